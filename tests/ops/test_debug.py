"""ISOTYPE_DEBUG=1 holds every call of an op to its contract."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from isotype.errors import DtypeError
from isotype.ops.contract import OpContract
from isotype.ops.debug import held_to

PLAIN = OpContract("x: F[*n] -> F[*n]", grads={"x": "F"})


class Widening(torch.autograd.Function):
    """The identity, whose gradient leaves in fp32 whatever the input's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.float()


def test_an_output_in_another_dtype_is_an_error():
    widened = held_to(PLAIN)(lambda x: x.float())
    assert widened(torch.ones(3)).dtype == torch.float32
    with pytest.raises(DtypeError, match=r"AC014 .*output 0 is fp32, its contract says bf16"):
        widened(torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("leaf", [True, False])
def test_a_gradient_in_another_dtype_is_an_error(leaf):
    """PyTorch casts such a gradient without a word: only what the function returned tells."""
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    op = held_to(PLAIN)(lambda x: Widening.apply(x).view(3))
    with pytest.raises(DtypeError, match=r"AC014 .*gradient of x leaves in fp32, its contract says bf16"):
        op(x if leaf else x * 2).sum().backward()


def test_autocast_decides_where_the_contract_follows_it():
    follows = OpContract("x: F[n k], w: F[k o] -> F[n o]", autocast="follows")
    x, w = torch.ones(2, 3), torch.ones(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert held_to(follows)(lambda x, w: x @ w)(x, w).dtype == torch.bfloat16
        with pytest.raises(DtypeError, match="its contract says fp32"):
            held_to(OpContract(follows.signature, autocast="ignored"))(lambda x, w: x @ w)(x, w)


PROGRAM = """
import torch
import isotype.ops as ops
from isotype.ops.gated import op

x = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
ids = torch.randint(0, 16, (8,))
ops.silu_mul(x(4, 8), x(4, 8)).sum().backward()
ops.gelu_mul(x(4, 8), x(4, 8)).sum().backward()
ops.gelu(x(4, 8)).sum().backward()
ops.modulated_layer_norm(x(2, 4, 8), x(2, 8), x(2, 8)).sum().backward()
ops.gated_residual(x(2, 4, 8), x(2, 4, 8), x(2, 8)).sum().backward()
print(sum(hasattr(getattr(ops, name), "__wrapped__") for name in ops.__all__))
op.call_op = lambda function, reference, path, gate, up, activation: (gate * up).float()
try:
    ops.silu_mul(x(4, 8), x(4, 8))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("debug", ["1", "0"])
def test_the_variable_switches_the_ops_checks_on(debug):
    environment = {**os.environ, "ISOTYPE_DEBUG": debug}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if debug == "1":
        assert lines[0] == "13"
        assert lines[1].startswith("AC014 silu_mul: output 0 is fp32, its contract says bf16")
    else:
        assert lines == ["0"]
