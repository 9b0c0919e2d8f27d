"""The op passes the doctor's own check of it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from isotype.lora import lora_linear
from isotype.lora.linear import LORA_LINEAR
from isotype.testing import ampcheck


def arguments():
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (64, 24), "weight": (16, 24), "a": (4, 24), "b": (16, 4)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def op(x, weight, a, b, branch_fp32=False):
    return lora_linear(x, weight, a, b, scale=0.7, branch_fp32=branch_fp32)


def reference(x, weight, a, b):
    return F.linear(x, weight) + 0.7 * F.linear(F.linear(x, a), b)


@pytest.mark.parametrize("branch_fp32", [False, True])
def test_ampcheck_finds_nothing_under_any_dtype_combination(branch_fp32):
    x, *params = arguments().values()
    report = ampcheck(partial(op, branch_fp32=branch_fp32), (x,), params=params, reference=reference)
    assert report.tried >= 50
    assert len(report.refused) == 6
    assert all("autocast off" in where and "DT001" in why for where, why in report.refused)


def test_it_keeps_its_contract():
    # a contract has no words for "X is W where autocast is off": that refusal is all that is found
    report = ampcheck(op, arguments(), reference=reference, contract=LORA_LINEAR, raises=False)
    assert {finding.code for finding in report.findings} == {"AC001"}
    assert all("DT001" in finding.message and finding.observed.endswith("autocast off") for finding in report.findings)
