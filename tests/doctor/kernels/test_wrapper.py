"""Launches of wrappers are trapped, never run, and compiled with the signatures they had."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from isotype.testing import compile_matrix
from tests.api import check_wrapper

from . import fault_kernels, wrapped


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
    # dtypes that the reference refuses too are no fault, such as those of unsloth's attention
    assert check_wrapper(wrapped.mixed_dot, (a, a.clone())).findings
    assert not check_wrapper(wrapped.mixed_dot, (a, a.clone()), reference=torch.matmul).findings


def test_a_wrapper_of_an_autotuned_kernel_with_heuristics_is_compiled() -> None:
    compile_matrix(wrapped.copy, (torch.randn(128),), targets=["sm_90"])
