"""Launches of wrappers are trapped, never run, and compiled with the signatures they had."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from isotype.doctor.kernels.calls import call_trapped
from isotype.doctor.kernels.signature import parse_target
from isotype.testing import compile_matrix

from . import fault_kernels, wrapped

SM90 = parse_target("sm_90")


def pair(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 16), torch.randn(rows, 16)


def test_right_kernels_pass_for_every_target() -> None:
    compile_matrix(wrapped.good_mul, pair(), targets=["sm_80", "sm_90", "sm_100", "gfx942"])
    compile_matrix(wrapped.GoodMul, [pair(), pair(64)], targets=["sm_90"])


def test_a_fault_in_backward_is_an_assertion_that_names_it() -> None:
    with pytest.raises(AssertionError, match=r"exp on g, which is bf16") as caught:
        compile_matrix(wrapped.bad_mul, pair(), targets=["sm_80", "gfx942"])
    assert "wrapped.py:" in str(caught.value)
    assert "sm_80, gfx942" in str(caught.value)


def test_a_function_without_a_launch_is_reported() -> None:
    with pytest.raises(AssertionError, match="launched no Triton kernel"):
        compile_matrix(wrapped.on_the_cpu, (torch.randn(4),))


def test_a_kernel_itself_is_checked_with_inferred_signatures() -> None:
    compile_matrix(wrapped.silu_mul_forward, targets=["sm_90"])
    with pytest.raises(AssertionError, match="redefine"):
        compile_matrix(fault_kernels.branch_else, targets=["sm_90"])


def test_mixed_inputs_that_the_wrapper_accepts_are_a_warning() -> None:
    a = torch.randn(32, 32)
    with pytest.raises(AssertionError, match=r"tl.dot got"):
        compile_matrix(wrapped.mixed_dot, (a, a.clone()), targets=["sm_90"])
    compile_matrix(wrapped.mixed_dot, (a, a.clone()), targets=["sm_90"], fail_on="error")


def test_a_wrapper_that_refuses_mixed_inputs_gets_no_finding() -> None:
    calls = call_trapped(wrapped.good_mul, pair(), SM90)
    assert any("gate and up differ" in why for why in calls.refused.values())
    assert {c.label for r in calls.reached.values() for c in r.combinations} == {
        "inputs as given",
        "fp32 inputs",
        "bf16 inputs",
        "fp16 inputs",
    }


def test_every_autotuning_configuration_and_heuristic_is_recorded() -> None:
    calls = call_trapped(wrapped.copy, (torch.randn(128),), SM90)
    (reached,) = calls.reached.values()
    given = [c for c in reached.combinations if c.label == "bf16 inputs"]
    assert [c.constexprs[(3,)] for c in given] == [64, 128]
    assert all(c.constexprs[(4,)] is True for c in given)
    assert given[1].options["num_stages"] == 3
