"""PF011: the plan against the memory there is, and the bound that makes it unnecessary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isotype.finding import Severity
from isotype.tasks.language.outline import step_outline
from isotype.training.memory.device import other_memory
from isotype.training.memory.plan import most_bytes, plan_memory
from isotype.training.memory.recomputation import Checkpointing
from isotype.training.preflight.static import memory_too_small


def planned(one):
    precision = one.prepared.resolved.precision
    made = one.task.outline(precision, device_type="cpu")
    largest = step_outline(one.config, precision, length=len(one.longest_rows[0].input_ids))
    return plan_memory(made, one.config.train, precision, largest, checkpointing=Checkpointing("none"))


def besides(one):
    return other_memory(one.prepared.model, one.prepared.device)


def with_memory(one, size):
    one.prepared.hardware = replace(one.prepared.hardware, memory=int(size))
    return one


@pytest.mark.parametrize("settings", [{}, {"adapter": {"kind": "none"}}, {"precision": {"preset": "nf4-lora"}},
                                      {"precision": {"preset": "bf16-mixed"}, "train": {"accumulate": 3, "batch_size": 16}},
                                      {"model": {"attention": "eager"}}])  # fmt: skip
def test_the_bound_is_above_the_plan(subject, settings):
    one = subject(**settings)
    length = len(one.longest_rows[0].input_ids)
    assert most_bytes(one.prepared.model, one.config.train, one.prepared.resolved.precision, length=length) >= planned(one).peak


def test_too_little_memory_is_an_error_and_almost_too_little_a_warning(subject):
    one = subject(train={"batch_size": 16})
    needs = planned(one).peak + besides(one)
    for share, severities in ((2.0, []), (1.25, []), (1.0, [Severity.WARNING]), (0.8, [Severity.ERROR])):
        assert [f.severity for f in memory_too_small(with_memory(one, needs * share))] == severities, share
    (finding,) = memory_too_small(with_memory(one, needs / 2))
    assert "gradient_checkpointing" in str(finding.fix)
    assert "train.batch_size" in str(finding.fix)
    (finding,) = memory_too_small(with_memory(subject("one row", train={"batch_size": 1, "gradient_checkpointing": "layers"}), needs / 9))
    assert finding.fix == "a smaller data.max_length, or --preset qlora"
