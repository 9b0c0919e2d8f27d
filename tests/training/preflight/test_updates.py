"""PF003: what rounding to nearest leaves of an update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isotype.finding import Severity
from isotype.training.preflight.static import stuck_share, vanishing_updates

FULL = {"kind": "none"}
NEAREST = {"preset": "bf16-pure", "rounding": "nearest"}


@pytest.mark.parametrize(("rate", "severity"), [(1e-5, Severity.ERROR), (1e-4, Severity.WARNING)])
def test_bf16_weights_rounded_to_nearest(subject, rate, severity):
    (finding,) = vanishing_updates(subject(adapter=FULL, precision=NEAREST, train={"learning_rate": rate}))
    assert finding.severity == severity
    assert "bf16 keeps 8 bits" in str(finding.cause)
    assert dict(finding.details)["still"].startswith("5 of 21 tensors"), "a norm's weight is 1 and does not move"
    assert finding.fix == f"precision.rounding: stochastic, precision.trainable: fp32, or a train.learning_rate above {rate:g}"


def test_updates_that_change_their_weights_are_not_reported(subject):
    assert list(vanishing_updates(subject(adapter=FULL, precision=NEAREST, train={"learning_rate": 1e-2}))) == []
    assert list(vanishing_updates(subject("b", adapter=FULL, precision={"preset": "bf16-pure"}, train={"learning_rate": 1e-5}))) == []
    assert list(vanishing_updates(subject("c", adapter=FULL, precision={"preset": "bf16-mixed"}, train={"learning_rate": 1e-6}))) == []
    assert list(vanishing_updates(subject("d", train={"learning_rate": 1e-6}))) == []


def test_updates_below_the_spacing_of_fp32_are_lost(subject):
    (finding,) = vanishing_updates(subject(adapter=FULL, train={"learning_rate": 1e-11}))
    assert "fp32 keeps 24 bits" in str(finding.cause)
    assert finding.fix == "a train.learning_rate above 1e-11"


def test_a_learning_rate_of_zero(subject):
    (finding,) = vanishing_updates(subject(train={"learning_rate": 0.0}))
    assert "learning rate is 0" in finding.message


@given(st.floats(2**-10, 4.0, width=16), st.floats(1e-7, 1.0), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_the_share_is_what_the_update_really_does(value, update, dtype):
    weight = torch.full((8,), value, dtype=dtype)
    after = (weight.double() - update).to(torch.float32).to(dtype)
    assert stuck_share(weight, update) == float(torch.equal(after, weight))
