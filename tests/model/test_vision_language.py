"""Vision-language models trained on text: the adapter loads onto the released class, tower and
projector stay as they are.
"""

import json

import pytest
import torch
from safetensors import safe_open

from isotype.config.load import load
from isotype.config.schema import AdapterSection, RunConfig
from isotype.environment.hardware import detect
from isotype.errors import UsageError
from isotype.model.adapter import attach_adapter, save_adapter
from isotype.model.build import build_model, resolve_precision
from isotype.model.load import Source, load_tokenizer
from isotype.precision import PRESETS
from isotype.precision.apply import inner_model
from isotype.tasks.language.batches import collate, model_inputs
from isotype.tasks.language.objective import batch_loss_sum
from tests.api import tasks_language_result_load_result as load_result
from tests.api import vision_LANGUAGE as LANGUAGE
from tests.api import vision_parts
from tests.commands import ask
from tests.models import rows
from tests.vlms import FAMILIES, tiny_vlm

WITHOUT_PACKING = {"qwen3_5"}  # its linear attention carries a state along the row


def built(folder, *settings, preset="bf16-lora"):
    loaded = load(None, [f"model.name={folder}", "train.seed=3", *settings], preset=preset)
    precision = resolve_precision(loaded.config, loaded.sources, detect("cpu")).precision
    tokenizer = load_tokenizer(loaded.config.model)
    return (
        *build_model(loaded.config, precision, Source(str(folder)), tokenizer, torch.device("cpu")),
        precision,
    )


def test_every_tensor_of_the_adapter_arrives_on_the_released_class(vlm, tmp_path, subtests):
    for family in FAMILIES:
        with subtests.test(family):
            adapter_arrives(vlm(family), tmp_path / family)


def adapter_arrives(base, folder):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    model, manifest, precision = built(base)
    released = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16)
    assert type(inner_model(model)) is type(released)
    assert any("does not run" in note for note in manifest.notes)
    calls = []
    for module in (
        inner_model(model).get_submodule(vision_parts(inner_model(model)).towers[0]).modules()
    ):
        module.register_forward_hook(lambda *_: calls.append(1))
    batch_loss_sum(model, collate(rows(4), pad_id=0)).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(
        p.grad is not None and (".lora_A." in name or p.grad.abs().sum() > 0)
        for name, p in trained.items()
    )
    assert not calls
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn_like(parameter) * 0.1)

    save_adapter(model, folder, precision)
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dictionary
    there = PeftModel.from_pretrained(released, folder).state_dict()
    arrived = [
        name
        for name, value in stored.items()
        if torch.equal(there[name.replace(".weight", ".default.weight")], value)
    ]
    assert len(arrived) == len(stored) == len(trained) > 0


@pytest.mark.parametrize(
    "family",
    ["gemma3", *(pytest.param(f, marks=pytest.mark.full) for f in FAMILIES if f != "gemma3")],
)
def test_text_on_the_whole_model_is_the_loss_of_its_class_and_packing_keeps_documents_apart(
    family, vlm
):
    """As the class itself computes it; packed rows give the losses of their documents."""
    model, _, _ = built(vlm(family), preset="fp32")
    plain = tiny_vlm(family)
    some = rows(3)
    batch = collate(some, pad_id=0)
    loss = batch_loss_sum(model, batch).item()
    own = plain(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        labels=batch.labels,
        use_cache=False,
    ).loss.item()
    assert loss / batch.supervised == pytest.approx(own, rel=1e-5)
    if family in WITHOUT_PACKING:
        return
    from tests.api import join_rows

    packed = collate([join_rows(some)], pad_id=0)
    assert batch_loss_sum(model, packed).item() == pytest.approx(loss, rel=1e-5)
    # the tower's attention is not causal: no reason for a mask of the text
    assert model_inputs(model, batch)["attention_mask"] is None


def test_every_weight_but_the_towers_is_trained_without_an_adapter(vlm):
    model, manifest, _ = built(vlm("gemma3"), "adapter.kind=none", preset="bf16-mixed")
    parts = vision_parts(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        name for name, _ in model.named_parameters() if parts.part_kind(name) != LANGUAGE
    }
    assert {p.dtype for name, p in model.named_parameters() if name in frozen} == {torch.bfloat16}
    assert any("stay frozen" in note for note in manifest.notes)


def test_nf4_leaves_tower_and_projector_alone(vlm):
    model, _, _ = built(vlm("gemma3"), preset="nf4-lora")
    parts, inner = vision_parts(inner_model(model)), inner_model(model)
    packed = {
        parts.part_kind(name) for name, p in inner.named_parameters() if hasattr(p, "quant_state")
    }
    assert packed == {LANGUAGE}


def test_names_of_layers_mean_those_of_the_language_part():
    adapted = attach_adapter(
        tiny_vlm("gemma3"), AdapterSection(r=2, targets=["q_proj", "v_proj"]), seed=0
    )
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(names) == 8
    assert all(".language_model." in name for name in names)


def test_settings_that_contradict_each_other_are_refused(vlm, workshop, subtests):
    for base, section, message in (
        (
            vlm("gemma3"),
            AdapterSection(targets=r".*vision_tower.*q_proj"),
            "of the tower, which adapter.vision: none leaves without",
        ),
        (workshop.base, AdapterSection(vision="lora"), "has no vision tower"),
        (vlm("gemma3"), AdapterSection(vision="full"), "no row has a picture"),
    ):
        config = RunConfig(model={"name": str(base)}, adapter=section)
        with subtests.test(message), pytest.raises(UsageError, match=message):
            build_model(
                config,
                PRESETS["fp32"],
                Source(str(base)),
                load_tokenizer(config.model),
                torch.device("cpu"),
            )


def test_a_target_in_the_frozen_tower_is_refused_with_its_own_fix():
    with pytest.raises(UsageError) as caught:
        attach_adapter(
            tiny_vlm("gemma3"), AdapterSection(r=2, targets=r".*vision_tower.*q_proj"), seed=0
        )
    assert str(caught.value).count("adapter.targets:") == 1
    assert caught.value.fix.startswith("adapter.vision: lora")


def test_an_adapter_of_the_class_for_text_still_loads(vlm, tmp_path):
    """Adapters that were trained on Qwen3.5's class for text name its layers without
    `language_model`.
    """
    from transformers import AutoModelForCausalLM

    text = AutoModelForCausalLM.from_pretrained(vlm("qwen3_5"))
    older = attach_adapter(text, AdapterSection(r=2), seed=0)
    save_adapter(older, tmp_path, PRESETS["fp32"])
    assert not any("language_model" in name for name, _ in older.named_parameters())
    model = load_result(
        tmp_path,
        Source(str(vlm("qwen3_5"))),
        PRESETS["fp32"],
        config=RunConfig().model,
        device=torch.device("cpu"),
    )
    batch = collate(rows(2), pad_id=0)
    assert batch_loss_sum(model, batch).item() == pytest.approx(
        batch_loss_sum(older, batch).item(), rel=1e-5
    )


@pytest.mark.full
def test_train_and_merge_write_the_whole_released_model(vlm, tmp_path):
    """`isotype train` and `isotype merge` on text: the result has the tower unchanged, and the
    processor's files.
    """
    from transformers import AutoModelForImageTextToText

    base = vlm("qwen3_5")
    chats = tmp_path / "chats.jsonl"
    turns = [
        {"role": "user", "content": "what colour?"},
        {"role": "assistant", "content": "it is red."},
    ]
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(6)))
    out = ask("train", "--model", base, "--data", chats, "--out", tmp_path / "run", "train.steps=2", "run.report=false",
                  "data.eval_split=0", "precision.preset=fp32")  # fmt: skip
    assert "30 tensors equal" in out
    assert (tmp_path / "run" / "adapter" / "preprocessor_config.json").is_file()
    ask("merge", tmp_path / "run", "--out", tmp_path / "merged")
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()
    merged, before = (
        AutoModelForImageTextToText.from_pretrained(f).state_dict()
        for f in (tmp_path / "merged", base)
    )
    changed = {name for name, value in merged.items() if not torch.equal(value, before[name])}
    assert merged.keys() == before.keys()
    assert len(changed) == 15
    assert all(".language_model." in name for name in changed)
