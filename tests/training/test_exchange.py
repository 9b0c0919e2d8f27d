"""Planned bytes against those that two real processes send, and the formulas' own arithmetic."""

from __future__ import annotations

import re

import pytest
from tests.distributed.processes import run
from transformers import AutoModelForCausalLM

from isotype.precision import PRESETS
from isotype.training import exchange
from isotype.training.memory.distributed_plan import UnitBytes, unit_bytes

UNITS = [UnitBytes(600, 600, 150, 0, kept=False), UnitBytes(200, 0, 0, 0, kept=True)]


def test_bytes_of_each_kind_are_those_of_the_formulas():
    fp32 = PRESETS["fp32"]
    assert exchange.replicated(UNITS, fp32, processes=4, nodes=1) == exchange.Exchange(2 * 600 * 3 // 4, 0)
    # all weights forward, those of the layer again backward, and its gradients: 800 + 600 + 600
    assert exchange.sharded(UNITS, fp32, processes=4, nodes=2, passes=3) == exchange.Exchange(3 * 1500, 3 * 1500)
    within, between = 3 * 1000, 3 * 2 * 150
    assert exchange.hybrid(UNITS, fp32, processes=4, nodes=2, passes=3) == exchange.Exchange(within + between, 2 * between)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_planned_bytes_of_replicate_are_those_sent(configured, workshop, tmp_path):
    steps = {"steps": 2, "batch_size": 2, "accumulate": 4, "eval_every": None}
    configured("run", adapter={"kind": "none"}, train=steps, parallel={"kind": "replicate"}, run={"sample_every": 0, "samples": []})
    status, said = run(2, tmp_path / "run.yaml", counted=True)
    assert status == 0, said
    counted = int(re.search(r"step 2 sent (\d+) bytes", said)[1])
    units = unit_bytes(AutoModelForCausalLM.from_pretrained(workshop.base))
    fp32 = PRESETS["fp32"]
    planned = exchange.replicated(units, fp32, processes=2, nodes=1).sent
    assert abs(planned - counted) <= 0.02 * counted, (planned, counted)
