"""Every family's rows with pictures beside TRL's SFT of the same model: loss and LoRA gradients in
fp32, their errors in bf16.
"""

import copy
import json

import pytest
import torch
from datasets import Dataset
from PIL import Image

from isotype.config.schema import AdapterSection, DataSection, ModelSection, RunConfig
from isotype.data.load import load_data
from isotype.model.adapter import attach_adapter
from isotype.model.build import build_model
from isotype.model.load import Source, load_tokenizer
from isotype.precision import PRESETS
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import batch_loss_sum
from tests.api import build_picture_reader
from tests.vlms import FAMILIES, saved_with_processor

pytest.importorskip("trl")
FAST = ("gemma3",)
ANSWERS = ("it is red.", "a green square and a blue one.", "blue.")
SIZES = ((64, 40), (40, 64), (90, 60), (56, 56))
COLOURS = ((220, 20, 20), (20, 200, 20), (20, 20, 220), (200, 180, 30))


@pytest.fixture
def shown(tmp_path):
    """Rows with one picture, two and one, as messages with the pictures' files."""
    for i, (size, colour) in enumerate(zip(SIZES, COLOURS, strict=True)):
        image = Image.new("RGB", size, colour)
        image.paste((255, 255, 255), (5, 5, 20, 30))
        image.save(tmp_path / f"{i}.png")
    made = []
    for which, answer in zip(((0,), (1, 2), (3,)), ANSWERS, strict=True):
        parts = [
            *({"type": "image", "path": f"{i}.png"} for i in which),
            {"type": "text", "text": "what colour is it?"},
        ]
        made.append([{"role": "user", "content": parts}, {"role": "assistant", "content": answer}])
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"messages": row}) + "\n" for row in made)
    )
    return tmp_path / "rows.jsonl"


def batch_of(base, file):
    """Our batch of all rows, and the processor."""
    section, data = (
        ModelSection(name=str(base)),
        DataSection(train=str(file), eval_split=0, cache="none"),
    )
    tokenizer = load_tokenizer(section)
    loaded = load_data(
        data, tokenizer, seed=0, pictures=build_picture_reader(section, data, tokenizer)
    )
    return collate(
        list(loaded.train), pad_id=tokenizer.pad_token_id, pictures=loaded.pictures
    ), loaded.pictures


def theirs(base, file, processor):
    """(TRL's SFT trainer of a PEFT model whose adapters are no zeros, its batch of the same rows
    with labels on the assistant's turns).
    """
    from transformers import AutoModelForImageTextToText
    from trl import SFTConfig, SFTTrainer

    rows = []
    for line in file.read_text().splitlines():
        asked, answered = json.loads(line)["messages"]
        images = [
            Image.open(file.parent / part["path"]).convert("RGB")
            for part in asked["content"]
            if part["type"] == "image"
        ]
        parts = [part if part["type"] == "text" else {"type": "image"} for part in asked["content"]]
        rows.append({"images": images, "messages": [{"role": "user", "content": parts}, answered]})
    seen = copy.copy(processor)
    seen.chat_template = marked(seen.tokenizer.chat_template)
    model = adapted(AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32))
    args = SFTConfig(
        output_dir=str(file.parent / "out"), use_cpu=True, report_to=[], max_length=None, assistant_only_loss=True,
        per_device_train_batch_size=3, gradient_checkpointing=False, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    columns = Dataset.from_list(
        [{"images": [], "messages": [{"role": "user", "content": "rows are collated below"}]}]
    )
    trainer = SFTTrainer(model, args, train_dataset=columns, processing_class=seen)
    trainer.current_gradient_accumulation_steps = 1
    return trainer, trainer.data_collator(rows)


def marked(template):
    """The tests' chat template, with the assistant's words and the end of their turn in the block
    that TRL reads.
    """
    found = template.replace(
        "{% if m.content is string %}{{ m.content }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content if m.content is string else m.content[0].text }}<|im_end|>"
        "{% endgeneration %}{{ '\\n' }}{% continue %}{% elif m.content is string %}{{ m.content }}",
    )
    assert found != template
    return found


def adapted(base):
    model = attach_adapter(base, AdapterSection(r=2), seed=0, has_pictures=True)
    fill(model)
    return model


def fill(model, seed=0):
    """The same B for every dtype, of a size at which the class itself moves by 3e-6 where the last
    bits of its weights are changed.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(
                    torch.randn(
                        parameter.shape,
                        generator=torch.Generator().manual_seed(100 * seed + len(name)),
                    )
                    * 0.02
                )


def gradient(model):
    """Of every adapter, one after the other."""
    return torch.cat(
        [p.grad.double().flatten() for _, p in sorted(model.named_parameters()) if p.requires_grad]
    )


def distance(one, other):
    return float((one - other).norm() / other.norm())


def trained(base, preset):
    config = RunConfig(model={"name": str(base)}, adapter={"r": 2}, train={"seed": 0})
    tokenizer = load_tokenizer(config.model)
    model, manifest = build_model(
        config,
        PRESETS[preset],
        Source(str(base)),
        tokenizer,
        torch.device("cpu"),
        has_pictures=True,
    )
    assert manifest.replaced
    return model


@pytest.mark.parametrize(
    "family", [f if f in FAST else pytest.param(f, marks=pytest.mark.full) for f in FAMILIES]
)
def test_loss_and_gradients_are_those_of_trl(family, vlm, shown):
    base = vlm(family)
    batch, pictures = batch_of(base, shown)
    trainer, inputs = theirs(base, shown, pictures.processor)
    n = inputs["input_ids"].shape[1]
    assert torch.equal(inputs["input_ids"], batch.input_ids[:, :n])
    assert torch.equal(inputs["labels"], batch.labels[:, :n])
    trainer.model.train()
    wanted = trainer.compute_loss(trainer.model, inputs)
    wanted.backward()
    model = trained(base, "fp32")
    fill(model)
    loss = batch_loss_sum(model, batch) / batch.supervised
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert distance(gradient(model), gradient(trainer.model)) <= 1e-5


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.full) for f in FAMILIES])
def test_errors_in_bf16_are_no_larger_than_those_of_plain_peft(family, vlm, shown, tmp_path):
    """Beside the same weights in fp64: root mean squares over twelve models, since the roundings of
    one loss may cancel.
    """
    from transformers import AutoModelForImageTextToText

    batch, _ = batch_of(vlm(family), shown)

    def measured(way, model, seed):
        fill(model, seed)
        model.zero_grad()
        inputs = {
            k: v.double() if way == "exact" and torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in batch.inputs.items()
        }
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "plain"):
            loss = (
                batch_loss_sum(model, batch) / batch.supervised
                if way == "ours"
                else model(**inputs, labels=batch.labels).loss
            )
        loss.backward()
        return loss.item(), gradient(model)

    off = {"ours": [], "plain": []}
    for drawn in range(4):
        base = saved_with_processor(family, tmp_path / str(drawn), seed=drawn)
        ours = trained(base, "bf16-lora")
        plain, exact = (
            adapted(AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16))
            for _ in range(2)
        )
        exact = exact.double()
        for seed in range(3):
            loss, grad = measured("exact", exact, seed)
            for way, model in (("ours", ours), ("plain", plain)):
                one, other = measured(way, model, seed)
                off[way].append(((one - loss) ** 2, distance(other, grad) ** 2))
    for own, peft in zip(
        *(torch.tensor(off[way]).mean(0).sqrt() for way in ("ours", "plain")), strict=True
    ):
        assert own <= 1.5 * peft
