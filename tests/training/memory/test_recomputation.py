"""Which layers recompute: by configuration, with the numbers of a run without it, and out of
generation's way.
"""

import copy
import json
from dataclasses import replace

import pytest
import torch
from tests.api import PLAN_TOLERANCE, choose_checkpointing_by_plan
from tests.commands import ask
from tests.models import assert_same_step, lora, step, tiny

from isotype.config.load import load
from isotype.errors import UsageError
from isotype.ops import cpp as ops_cpp
from isotype.ops.attention import op
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.choose import train
from isotype.training.memory.plan import MemoryPlan
from isotype.training.memory.recomputation import (
    Checkpointing,
    apply_checkpointing,
    checkpointable_layers,
    configured_checkpointing,
    select_layers,
)


def train_section(*settings):
    return load(None, list(settings)).config.train


def test_layers_are_chosen_as_written():
    for text, expected in (
        ("all", (0, 1, 2, 3, 4)),
        ("2", (0, 1)),
        ("every 2", (0, 2, 4)),
        ("every 9", (0,)),
        ("[4, 1, 1]", (1, 4)),
    ):
        train = train_section(
            "train.gradient_checkpointing=layers", f"train.checkpointed_layers={text}"
        )
        assert select_layers(train.checkpointed_layers, 5) == expected, text


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 96, (2, 19), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "what",
    [Checkpointing("layers", (0, 2), 4), Checkpointing("layers+offload", (0, 1, 2, 3), 4)],
    ids=str,
)
def test_results_are_bit_for_bit_those_without_it_also_with_dropout(what, ids):
    model = lora(tiny(num_hidden_layers=4), lora_dropout=0.3)
    apply_precision(model, PRESETS["bf16-lora"], device_type="cpu")
    model.train()
    recomputing = copy.deepcopy(model)
    apply_checkpointing(recomputing, what)
    calls = [0, 0]
    for counted, each in enumerate((model, recomputing)):
        for layer in checkpointable_layers(each):
            layer.input_layernorm.register_forward_pre_hook(
                lambda *_, at=counted: calls.__setitem__(at, calls[at] + 1)
            )
    found = []
    for each in (model, recomputing):
        torch.manual_seed(3)
        found.append(step(each, input_ids=ids, labels=ids, use_cache=False))
    assert calls == [4, 4 + len(what.layers)], "each chosen layer runs twice, the others once"
    assert_same_step(*found, rtol=0, atol=0)


def test_generation_in_training_mode_keeps_its_cache(ids):
    model = lora(tiny(num_hidden_layers=3))
    apply_precision(model, PRESETS["fp32"], device_type="cpu")
    expected = model.train().generate(input_ids=ids[:, :5], max_new_tokens=6, do_sample=False)
    apply_checkpointing(model, Checkpointing("layers", (0, 1, 2), 3))
    assert torch.equal(
        model.generate(input_ids=ids[:, :5], max_new_tokens=6, do_sample=False), expected
    )


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(UsageError, match="marks no layers"):
        configured_checkpointing(
            torch.nn.Linear(2, 2), train_section("train.gradient_checkpointing=layers")
        )


# --- What `auto` becomes: nothing where the step fits, else as few layers as will do, then host
# memory.


LAYERS, MiB = 16, 1 << 20
NOTHING = MemoryPlan(frozen=0, trained=0, gradients=0, optimizer=0)


def simulated(checkpointing):
    """100 MiB, 5 less for each layer that recomputes, and 15 less with offload: but the last two
    layers save nothing.
    """
    saved = 5 * min(len(checkpointing.layers), LAYERS - 2) + (
        15 if checkpointing.kind == "layers+offload" else 0
    )
    return replace(NOTHING, peak=(100 - saved) * MiB)


def test_auto_recomputes_as_few_layers_as_needed(subtests):
    for has, device_type, kind, layers in (
        (100, "cpu", "none", 0), (99, "cpu", "layers", 1), (75, "cuda", "layers", 5), (40, "cuda", "layers", 12),
        (30, "cuda", "layers", 14), (29, "cuda", "layers+offload", 16), (29, "cpu", "layers", 16), (1, "cuda", "layers+offload", 16),
    ):  # fmt: skip
        with subtests.test(has=has, device_type=device_type):
            there = round(has * MiB / (1 - PLAN_TOLERANCE)) + 1
            found, plan = choose_checkpointing_by_plan(
                simulated, layers=LAYERS, available=there, overhead=0, device_type=device_type
            )
            assert found.kind == kind
            # the estimate may ask for more than the fewest, never for too few
            assert layers <= len(found.layers) <= layers + 2
            assert plan == simulated(found)
            assert found.reason.startswith("auto: ")


@pytest.fixture
def little_memory(monkeypatch):
    """A machine on which this process's own memory and half of the tiny model's step just fit."""
    from tests.api import device_setup, peak_memory, plan

    from isotype.environment.hardware import detect

    def some(device):
        import torch

        return replace(detect("cpu"), memory=peak_memory(torch.device("cpu")) + 2 * MiB)

    monkeypatch.setattr(plan, "detect", some)
    monkeypatch.setattr(device_setup, "detect", some)


@pytest.mark.full
def test_a_run_uses_the_choice_prints_it_and_records_it(
    configured, tmp_path, little_memory, capsys
):
    loaded = configured(train={"batch_size": 16})
    assert (
        json.loads(ask("plan", tmp_path / "run.yaml", "--json"))["checkpointing"][
            "train.gradient_checkpointing"
        ]
        == "layers"
    )
    assert train(loaded, skips={"PF011": "a machine that only pretends"}) == 0
    resolved = (tmp_path / "run" / "resolved.yaml").read_text()
    assert "gradient_checkpointing: layers" in resolved
    assert "# auto: without it the step takes" in resolved
    assert "layers: all of 2 (auto: without it the step takes" in capsys.readouterr().out
    assert (
        train(loaded, resume=tmp_path / "run", skips={"PF011": "a machine that only pretends"}) == 0
    )


def keeping(checkpointing):
    """As `simulated`; a layer that keeps attention saves 4 MiB instead of 5; with offload all of
    them need 18, or 19 with attention.
    """
    if checkpointing.kind == "layers+offload":
        return replace(NOTHING, peak=(19 if checkpointing.keep_attention else 18) * MiB)
    saved = 4 if checkpointing.keep_attention else 5
    return replace(NOTHING, peak=(100 - saved * len(checkpointing.layers)) * MiB)


def test_auto_keeps_attention_where_the_layers_that_must_recompute_fit_with_it(subtests):
    for target, kind, layers, kept in (
        (100, "none", 0, False), (97, "layers", 1, True), (70, "layers", 6, False), (19, "layers+offload", 16, True),
        (18, "layers+offload", 16, False),
    ):  # fmt: skip
        with subtests.test(target=target):
            found, plan = choose_checkpointing_by_plan(
                keeping,
                layers=LAYERS,
                available=0,
                overhead=0,
                device_type="cuda",
                target_bytes=target * MiB,
            )
            assert (found.kind, len(found.layers), found.keep_attention) == (kind, layers, kept)
            assert plan.peak == keeping(found).peak <= target * MiB


# --- `train.keep_attention`: attention whose results were kept does not run again in backward, and
# no gradient changes.


BF16 = {
    "attn_implementation": "sdpa",
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def optimized_in_bf16(**options):
    model = lora(tiny(**options)).train().bfloat16()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    model.base_model.model.get_input_embeddings().weight.requires_grad_()
    optimize(model)
    return model


def gradients(model, kind="none", **options):
    apply_checkpointing(model, Checkpointing(kind, (0, 1) if kind != "none" else (), 2, **options))
    ids = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    return step(model, input_ids=ids, labels=ids)


@pytest.fixture
def counted(monkeypatch):
    """How often attention's kernel ran."""
    seen, real = [], op.attention_forward
    monkeypatch.setattr(op, "attention_forward", lambda *args: seen.append(1) or real(*args))
    return seen


@pytest.mark.skipif(ops_cpp.cpu_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("kind", "keep"), [("layers", False), ("layers", True), ("layers+offload", True)]
)
def test_attention_whose_results_were_kept_does_not_run_again(counted, keep, kind):
    model = optimized_in_bf16(**BF16)
    want = gradients(model)
    counted.clear()
    got = gradients(model, kind=kind, keep_attention=keep)
    # two layers; without keeping, each once more in backward
    assert len(counted) == (2 if keep else 4)
    assert_same_step(got, want, rtol=0, atol=0)
