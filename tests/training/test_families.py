"""Every supported family trains under its declaration, and adapters go both ways between Isotype and plain PEFT."""

import re

import pytest
import torch
from tests.models import FAMILIES, lora, rows, stepper, tiny

from isotype.config.schema import AdapterSection, ModelSection
from isotype.data.prompts import prompts_from
from isotype.model.adapter import attach_adapter, save_adapter
from isotype.model.load import Source, load_base, load_tokenizer
from isotype.observe import Observer
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.language.batches import collate
from isotype.tasks.language.sample import sample

BATCH = collate(rows(4), pad_id=0)


# each family with one of the two presets; the other is left to `make test-full`
@pytest.mark.parametrize(
    ("family", "preset"),
    [
        pytest.param(family, preset, marks=[] if (i + j) % 2 == 0 else pytest.mark.full)
        for i, family in enumerate(FAMILIES)
        for j, preset in enumerate(["bf16-lora", "bf16-mixed"])
    ],
)
def test_a_family_trains_and_generates_under_its_declaration(family, preset):
    model = lora(tiny(family)) if preset == "bf16-lora" else tiny(family)
    step = stepper(model, preset, learning_rate=1e-2)
    observer = Observer(model, PRESETS[preset])
    with observer.watch(1) as seen:
        first = step([BATCH], step=1, learning_rate=1e-2, watch_changes=True)
    observer.look(seen, states=lambda p: step.optimizer.state[p]).raise_if_violated()
    # the router of a mixture gives its scores in fp32, in its class's own code
    assert not [module for module, _ in seen.promotions if not re.search(r"\.mlp\.gate(\.base_layer)?$", module)], seen.promotions
    for number in range(2, 8):
        last = step([BATCH], step=number, learning_rate=1e-2, watch_changes=False)
    assert last.loss < first.loss
    model.eval()
    with torch.no_grad():
        out = model.generate(input_ids=BATCH.input_ids[:1, :5], max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert out.shape == (1, 8)


def test_a_saved_adapter_has_the_declared_dtype(tmp_path):
    from safetensors.torch import load_file

    model = lora(tiny(), modules_to_save=["lm_head"])
    save_adapter(model, tmp_path, PRESETS["bf16-lora"].but(save="bf16"))
    assert {t.dtype for t in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.bfloat16}


# --- Real trained weights: what a 260,000-parameter story model says, and that it goes on saying it through a LoRA wrapper.


pytestmark = pytest.mark.full


BEGINNING = ", there was a little girl named Lily. She loved to play outside in the park."


def test_stories260k_generates_a_story(shared):
    folder = str(shared / "data/stories260k")
    tokenizer, precision, cpu = load_tokenizer(ModelSection(name=folder)), PRESETS["fp32"], torch.device("cpu")
    model = attach_adapter(load_base(Source(folder), precision, attention="sdpa", device=cpu, trainable=False), AdapterSection(r=4), seed=0)
    apply_precision(model, precision, device_type="cpu")
    story = sample(model, tokenizer, prompts_from(["Once upon a time"], tokenizer), max_new_tokens=40, device=cpu)[0]
    assert story.answer.startswith(BEGINNING)
