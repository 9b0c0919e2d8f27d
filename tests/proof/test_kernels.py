"""What the parts of `isotype proof` compare, at sizes of a test."""

import dataclasses

import pytest
import torch

from tests.api import LORA_CASES, OP_CASES, Scale, check_bf16_base, check_ops, check_resume

TINY = Scale("cpu", is_tiny=True)


def test_every_op_agrees_with_its_reference_on_a_cpu(subtests):
    rows = list(check_ops(TINY))
    every_dtype = [case for case in OP_CASES.values() if not case.is_for_gpus]
    every_dtype += LORA_CASES.values()
    assert len(rows) == sum(len(case.dtypes) or 3 for case in every_dtype)
    for row in rows:
        with subtests.test(row["name"]):
            assert row["passed"], row


class TwiceTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def skip_every_second_row(output):
    wrong = output.clone()
    wrong[::2] = 0
    return wrong


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        (lambda op, x, *rest: op(x, *rest) * 1.05, "output 0"),
        (lambda op, x, *rest: op(TwiceTheGradient.apply(x), *rest), "gradient of x"),
        (lambda op, x, *rest: skip_every_second_row(op(x, *rest)), "output 0"),
        (lambda op, x, *rest: op(x, *rest) * float("nan"), "output 0"),
    ],
    ids=["scaled", "gradient", "rows left out", "not finite"],
)
def test_a_wrong_kernel_fails_with_the_tensor_that_is_wrong(fault, tensor):
    case = OP_CASES["rms_norm"]
    wrong = dataclasses.replace(case, op=lambda *inputs: fault(case.op, *inputs))
    row = wrong.check(torch.device("cpu"), torch.bfloat16)
    assert not row["passed"]
    assert row["tensor"] == tensor


def test_gradients_of_lora_layers_are_within_peft_s_error():
    rows = list(check_bf16_base(TINY))
    assert len(rows) == 7
    assert all(row["passed"] for row in rows), rows


@pytest.mark.full
def test_an_interrupted_run_ends_with_the_same_bytes():
    (row,) = check_resume(TINY)
    assert row["passed"], row
