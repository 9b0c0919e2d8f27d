"""What `auto` becomes: nothing where the step fits, else as few layers as will do, then host memory."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.tasks.choose import train
from isotype.training.ledger.rows import Row, copied_to_host
from isotype.training.memory.auto_recomputation import WITHIN, auto_checkpointing
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
    from isotype.training.memory.device import peak_memory

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
    """As `simulated`; a layer that keeps attention saves 4 MiB instead of 5, one that keeps everything 3."""
    saved = 3 if checkpointing.halves else 4 if checkpointing.keep_attention else 5
    return replace(NOTHING, peak=(100 - saved * len(checkpointing.layers)) * MiB)


def by_ledger(everything, attention=2.0):
    def seconds(checkpointing):
        each = everything if checkpointing.halves else attention if checkpointing.keep_attention else 3.0
        return 100 + each * len(checkpointing.layers)

    return seconds


@pytest.mark.parametrize(
    ("target", "everything", "layers", "kept"),
    [
        # ten layers of 1.0 against six of 3.0 that keep nothing
        (70, 1.0, 10, "all"),
        # ten layers of 1.7 take longer than eight of 2.0 that keep attention
        (70, 1.7, 8, True),
        # sixteen layers that keep everything save 48, too little; thirteen that keep attention take less time than ten of 3.0
        (50, 0.0, 13, True),
        # and sixteen of those save 64
        (32, 0.0, 14, False),
    ],
)
def test_auto_keeps_everything_where_that_fits_and_takes_less_time(target, everything, layers, kept):
    found, plan = auto_checkpointing(
        keeping, layers=LAYERS, has=0, besides=0, device_type="cuda", target=target * MiB, seconds=by_ledger(everything)
    )
    assert found.as_settings()["train.keep_attention"] == kept
    assert len(found.layers) == layers
    assert plan.peak == keeping(found).peak <= target * MiB
    assert ("saves" in found.reason and "by the ledger" in found.reason) == bool(kept)


def test_auto_asks_no_ledger_where_all_memory_is_enough():
    def refuse(checkpointing):
        raise AssertionError("a ledger was recorded")

    found, _ = auto_checkpointing(keeping, layers=LAYERS, has=0, besides=0, device_type="cuda", target=100 * MiB, seconds=refuse)
    assert found.kind == "none"


def test_compiled_layers_keep_nothing_and_stay_on_the_device():
    def choose(target):
        found, _ = auto_checkpointing(
            keeping, layers=LAYERS, has=0, besides=0, device_type="cuda", target=target * MiB, plain=True, seconds=by_ledger(0.0)
        )
        return found

    assert choose(99) == replace(choose(99), kind="layers", layers=(0,), keep_attention=False, halves=False)
    assert choose(1).kind == "layers"


def offloading(checkpointing):
    """As `keeping`, and with offload less than any of these: 18 MiB, attention's results 1 more, and everything 1 less."""
    if checkpointing.kind != "layers+offload":
        return keeping(checkpointing)
    return replace(NOTHING, peak=(17 if checkpointing.halves else 19 if checkpointing.keep_attention else 18) * MiB)


@pytest.mark.parametrize(
    ("target", "everything", "kept", "said"),
    [
        # less memory and less time than with attention's results alone
        (19, 1.0, "all", "saves 16000.0 ms by the ledger"),
        # copies that are waited for
        (19, 2.5, True, ""),
        # more time, and the only one that fits
        (17, 3.5, "all", "only with everything kept in host memory it fits"),
        # none fits: the smallest is also the fastest
        (16, 1.0, "all", "saves 32000.0 ms by the ledger"),
        # host memory is too small for it
        (19, math.inf, True, ""),
        (17, math.inf, False, ""),
    ],
)
def test_with_offload_auto_keeps_everything_in_host_memory_where_the_ledger_says_less_time(target, everything, kept, said):
    found, plan = auto_checkpointing(
        offloading, layers=LAYERS, has=0, besides=0, device_type="cuda", target=target * MiB, seconds=by_ledger(everything)
    )
    assert found.kind == "layers+offload"
    assert len(found.layers) == LAYERS
    assert found.as_settings()["train.keep_attention"] == kept
    assert plan.peak == offloading(found).peak
    assert said in found.reason
    assert bool(said) == ("ledger" in found.reason or "only" in found.reason)


def test_without_figures_of_the_device_offload_keeps_attention_alone():
    found, _ = auto_checkpointing(offloading, layers=LAYERS, has=0, besides=0, device_type="cuda", target=19 * MiB)
    assert found.as_settings()["train.keep_attention"] is True


def test_copies_to_the_host_are_those_of_forward():
    copy = Row(phase="forward", name="host_copy", kind="copy", bytes=3, count=4)
    assert copied_to_host([copy, replace(copy, phase="backward"), replace(copy, kind="memory")]) == 12
