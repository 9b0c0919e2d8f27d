"""Checks of the preflight that run no step: lost updates, disk, memory."""

from dataclasses import replace
from types import SimpleNamespace

from tests.api import (
    check_disk,
    check_memory,
    check_update_sizes,
    checkpoint_bytes,
    overhead_memory,
    result_bytes,
)
from tests.api import static as disk

from isotype.finding import Severity
from isotype.tasks.language.outline import outline_step
from isotype.training.memory.plan import plan_memory
from isotype.training.memory.recomputation import Checkpointing

FULL = {"kind": "none"}
NEAREST = {"preset": "bf16-pure", "rounding": "nearest"}


def test_bf16_weights_rounded_to_nearest(subject):
    for rate, severity in ((1e-5, Severity.ERROR), (1e-4, Severity.WARNING)):
        (finding,) = check_update_sizes(
            subject(adapter=FULL, precision=NEAREST, train={"learning_rate": rate})
        )
        assert finding.severity == severity
        assert "bf16 keeps 8 bits" in str(finding.cause)
        assert dict(finding.details)["still"].startswith("5 of 21 tensors"), (
            "a norm's weight is 1 and does not move"
        )
        assert (
            finding.fix
            == f"precision.rounding: stochastic, precision.trainable: fp32, or a train.learning_rate above {rate:g}"
        )


def test_a_rate_that_only_prodigy_takes_is_warned_of(subject):
    (finding,) = check_update_sizes(subject(train={"learning_rate": 10.0}))
    assert "the learning rate is 10: AdamW moves each weight by about that much" in finding.message
    assert not list(
        check_update_sizes(
            subject(
                "prodigy",
                train={"learning_rate": 1.0, "optimizer": "prodigy", "schedule": "constant"},
            )
        )
    )


def test_updates_below_the_spacing_of_fp32_are_lost(subject):
    (finding,) = check_update_sizes(subject(adapter=FULL, train={"learning_rate": 1e-11}))
    assert "fp32 keeps 24 bits" in str(finding.cause)
    assert finding.fix == "a train.learning_rate above 1e-11"


def test_a_disk_that_is_a_byte_too_small(subject, monkeypatch):
    one = subject()
    needed = 4 * checkpoint_bytes(one) + result_bytes(one)  # keep 2, the best, the one in writing
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    (finding,) = check_disk(one)
    assert "3 kept and 1 in writing" in finding.render()
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    assert list(check_disk(one)) == []


# --- PF011: the plan against the memory there is, and the bound that makes it unnecessary.


def planned(one):
    precision = one.prepared.resolved.precision
    made = one.task.outline_model(precision, device_type="cpu")
    largest = outline_step(one.config, precision, length=len(one.longest_rows[0].input_ids))
    return plan_memory(
        made, one.config.train, precision, largest, checkpointing=Checkpointing("none")
    )


def besides(one):
    prepared = one.prepared
    return overhead_memory(prepared.process_bytes)


def with_memory(one, size):
    one.prepared.hardware = replace(one.prepared.hardware, memory=int(size))
    return one


def test_too_little_memory_is_an_error_and_almost_too_little_a_warning(subject):
    one = subject(train={"batch_size": 16})
    needs = planned(one).peak + besides(one)
    for share, severities in ((1.25, []), (1.0, [Severity.WARNING])):
        assert [f.severity for f in check_memory(with_memory(one, needs * share))] == severities, (
            share
        )
    (finding,) = check_memory(with_memory(one, needs * 0.8))
    assert finding.severity == Severity.ERROR
    assert "gradient_checkpointing" in str(finding.fix)
    assert "train.batch_size" in str(finding.fix)
    (finding,) = check_memory(
        with_memory(
            subject("one row", train={"batch_size": 1, "gradient_checkpointing": "layers"}),
            needs / 9,
        )
    )
    assert finding.fix == "a smaller data.max_length, or --preset qlora"
