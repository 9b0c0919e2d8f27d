"""What `auto` becomes: nothing where the step fits, else as few layers as will do, then host memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.tasks.choose import train
from isotype.training.memory.auto import WITHIN, auto_checkpointing
from isotype.training.memory.plan import MemoryPlan

LAYERS, MiB = 16, 1 << 20
NOTHING = MemoryPlan(frozen=0, trained=0, gradients=0, optimizer=0)


def simulated(checkpointing):
    """100 MiB, 5 less for each layer that recomputes, and 15 less with offload: but the last two layers save nothing."""
    saved = 5 * min(len(checkpointing.layers), LAYERS - 2) + (15 if checkpointing.kind == "layers+offload" else 0)
    return replace(NOTHING, peak=(100 - saved) * MiB)


@pytest.mark.parametrize(
    ("has", "device_type", "kind", "layers"),
    [(100, "cpu", "none", 0), (99, "cpu", "layers", 1), (75, "cuda", "layers", 5), (40, "cuda", "layers", 12), (30, "cuda", "layers", 14),
     (29, "cuda", "layers+offload", 16), (29, "cpu", "layers", 16), (1, "cuda", "layers+offload", 16)],
)  # fmt: skip
def test_auto_recomputes_as_few_layers_as_needed(has, device_type, kind, layers):
    found, plan = auto_checkpointing(simulated, layers=LAYERS, has=round(has * MiB / (1 - WITHIN)) + 1, besides=0, device_type=device_type)
    assert found.kind == kind
    # the estimate may ask for more than the fewest, never for too few
    assert layers <= len(found.layers) <= layers + 2
    assert plan == simulated(found)
    assert found.reason.startswith("auto: ")


def test_memory_of_the_process_counts_in_the_choice():
    found, _ = auto_checkpointing(simulated, layers=LAYERS, has=200 * MiB, besides=90 * MiB, device_type="cpu")
    assert found.kind == "layers"


@pytest.mark.parametrize(("has", "plan"), [(0, NOTHING), (MiB, replace(NOTHING, peak=9 * MiB, not_simulated="routed experts"))])
def test_without_a_plan_nothing_is_recomputed_and_the_reason_is_printed(has, plan):
    found, _ = auto_checkpointing(lambda _: plan, layers=LAYERS, has=has, besides=0, device_type="cpu")
    assert found.kind == "none"
    assert "unknown" in found.reason or "no plan" in found.reason


@pytest.fixture
def little_memory(monkeypatch):
    """A machine on which this process's own memory and half of the tiny model's step just fit."""
    from isotype.environment.hardware import detect
    from isotype.training import plan, setup
    from isotype.training.step import peak_memory

    def some(device):
        import torch

        return replace(detect("cpu"), memory=peak_memory(torch.device("cpu")) + 2 * MiB)

    monkeypatch.setattr(plan, "detect", some)
    monkeypatch.setattr(setup, "detect", some)


def test_a_run_uses_the_choice_prints_it_and_records_it(configured, tmp_path, little_memory, capsys):
    loaded = configured(train={"batch_size": 16})
    planned = CliRunner().invoke(build_app(), ["plan", str(tmp_path / "run.yaml"), "--json"])
    assert json.loads(planned.stdout)["checkpointing"]["train.gradient_checkpointing"] == "layers"
    assert train(loaded, skips={"PF011": "a machine that only pretends"}) == 0
    resolved = (tmp_path / "run" / "resolved.yaml").read_text()
    assert "gradient_checkpointing: layers" in resolved
    assert "# auto: without it the step takes" in resolved
    assert "layers: all of 2 (auto: without it the step takes" in capsys.readouterr().out
    assert train(loaded, resume=tmp_path / "run", skips={"PF011": "a machine that only pretends"}) == 0


def test_far_below_the_memory_limit_no_plan_is_made(configured, tmp_path, monkeypatch):
    from isotype.training import setup

    monkeypatch.setattr(setup, "plan_part", lambda *_, **__: pytest.fail("planned"))
    assert train(configured()) == 0
    resolved = (tmp_path / "run" / "resolved.yaml").read_text()
    assert re.search(r"gradient_checkpointing: none +# auto: the step cannot take more than", resolved)


def keeping(checkpointing):
    """As `simulated`; a layer that keeps attention saves 4 MiB instead of 5; with offload all of them need 18, or 19 with attention."""
    if checkpointing.kind == "layers+offload":
        return replace(NOTHING, peak=(19 if checkpointing.keep_attention else 18) * MiB)
    saved = 4 if checkpointing.keep_attention else 5
    return replace(NOTHING, peak=(100 - saved * len(checkpointing.layers)) * MiB)


@pytest.mark.parametrize(
    ("target", "kind", "layers", "kept"),
    [(100, "none", 0, False), (97, "layers", 1, True), (70, "layers", 6, False), (19, "layers+offload", 16, True),
     (18, "layers+offload", 16, False)],
)  # fmt: skip
def test_auto_keeps_attention_where_the_layers_that_must_recompute_fit_with_it(target, kind, layers, kept):
    found, plan = auto_checkpointing(keeping, layers=LAYERS, has=0, besides=0, device_type="cuda", target=target * MiB)
    assert (found.kind, len(found.layers), found.keep_attention) == (kind, layers, kept)
    assert plan.peak == keeping(found).peak <= target * MiB
