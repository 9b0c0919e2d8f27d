"""Every supported family trains under its declaration, and adapters go both ways between Isotype and plain PEFT."""

import re
from functools import partial

import pytest
import torch
from peft import PeftModel
from tests.models import FAMILIES, lora, rows, tiny

from isotype.config.schema import AdapterSection, TrainSection
from isotype.errors import UsageError
from isotype.model.adapter import attach_adapter, save_adapter, trainable_share
from isotype.observe import Observer
from isotype.precision import PRESETS
from isotype.precision.accumulate import GradientAccumulator
from isotype.precision.apply import apply_precision
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import batch_loss_sum
from isotype.training.optimizer import build_optimizer
from isotype.training.step import Stepper

BATCH = collate(rows(4), pad_id=0)


def step_of(model, preset):
    precision, train = PRESETS[preset], TrainSection(learning_rate=1e-2)
    apply_precision(model, precision, device_type="cpu")
    accumulator = GradientAccumulator(model.parameters(), dtype=precision.grads)
    return Stepper(
        model,
        build_optimizer(model, train, precision, accumulator.gradient),
        accumulator,
        precision,
        train,
        partial(batch_loss_sum, dtype=precision.loss),
    )


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
    step = step_of(model, preset)
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


@pytest.mark.full
def test_an_adapter_loads_in_plain_peft(tmp_path):
    model = lora(tiny(), modules_to_save=["lm_head"])
    step = step_of(model, "fp32")
    step([BATCH], step=1, learning_rate=1e-2, watch_changes=False)
    save_adapter(model, tmp_path, PRESETS["fp32"])
    plain = PeftModel.from_pretrained(tiny(), str(tmp_path))
    with torch.no_grad():
        assert torch.equal(model(input_ids=BATCH.input_ids).logits, plain(input_ids=BATCH.input_ids).logits)


def test_a_saved_adapter_has_the_declared_dtype(tmp_path):
    from safetensors.torch import load_file

    model = lora(tiny(), modules_to_save=["lm_head"])
    save_adapter(model, tmp_path, PRESETS["bf16-lora"].but(save="bf16"))
    assert {t.dtype for t in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.full
def test_a_plain_peft_adapter_can_be_trained_further(tmp_path):
    theirs = lora(tiny(), init_lora_weights=False)
    theirs.save_pretrained(tmp_path)
    ours = attach_adapter(tiny(), AdapterSection(start_from=str(tmp_path)), seed=0)
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=BATCH.input_ids).logits, ours(input_ids=BATCH.input_ids).logits)
    assert trainable_share(ours)[0] == trainable_share(theirs)[0]


def test_adapter_settings_reach_peft():
    section = AdapterSection(r=3, alpha=6, dropout=0.25, targets=["q_proj"], rslora=True, modules_to_save=["lm_head"])
    config = attach_adapter(tiny(), section, seed=0).peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora) == (3, 6, 0.25, True)
    assert set(config.target_modules) == {"q_proj"}
    assert config.modules_to_save == ["lm_head"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (AdapterSection(targets=["q_prj"]), r"adapter\.targets.*(.|\n)*q_proj"),
        (AdapterSection(start_from="nowhere"), "adapter_config.json"),
    ],
)
def test_a_wrong_adapter_setting_gets_one_clear_error(section, message):
    with pytest.raises(UsageError, match=message):
        attach_adapter(tiny(), section, seed=0)


def test_an_adapter_for_another_base_is_refused(tmp_path):
    lora(tiny(hidden_size=64)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"does not fit this model"):
        attach_adapter(tiny(), AdapterSection(start_from=str(tmp_path)), seed=0)
