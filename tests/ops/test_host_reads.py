"""No op makes the host wait for the device: each runs forward and backward on tensors without values, as a GPU's step would."""

from __future__ import annotations

import pytest
import torch

from isotype.environment.planned import planned_for
from isotype.ops import (
    add_rms_norm,
    attention,
    cross_entropy,
    gated_residual,
    gelu,
    gelu_mul,
    linear_cross_entropy,
    linear_log_probs,
    modulated_layer_norm,
    rms_norm,
    rope,
    silu_mul,
)
from isotype.ops.backend import using
from isotype.ops.cross_entropy import eager
from isotype.ops.cross_entropy.rule import LossRule
from isotype.ops.linear_cross_entropy import chunked, op
from tests.host_reads import HostReadError, NoHostReads

V, H = 1000, 64


def of(*shape, dtype=torch.bfloat16, grad=True):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad and dtype.is_floating_point)


def targets(*shape):
    return of(*shape, dtype=torch.int64)


OPS = {
    "cross_entropy": lambda: cross_entropy(of(50, V), targets(50)),
    "linear_cross_entropy": lambda: linear_cross_entropy(of(300, H), of(V, H), targets(300), chunk=64),
    "linear_cross_entropy frozen": lambda: linear_cross_entropy(of(300, H), of(V, H, grad=False), targets(300), chunk=64),
    "linear_cross_entropy of each": lambda: linear_cross_entropy(of(300, H), of(V, H), targets(300), reduction="none").sum(),
    "linear_cross_entropy in fp16": lambda: linear_cross_entropy(
        of(9, H, dtype=torch.float16), of(V, H, dtype=torch.float16), targets(9), num_items=of(dtype=torch.float32, grad=False)
    ),
    "linear_log_probs": lambda: linear_log_probs(of(300, H), of(V, H), targets(300), chunk=64).log_probs.sum(),
    "linear_log_probs frozen": lambda: linear_log_probs(of(300, H), of(V, H, grad=False), targets(300), chunk=64).log_probs.sum(),
    "add_rms_norm": lambda: sum(x.sum() for x in add_rms_norm(of(7, H), of(7, H), of(H))),
    "rms_norm": lambda: rms_norm(of(7, H), of(H)).sum(),
    "silu_mul": lambda: silu_mul(of(7, H), of(7, H)).sum(),
    "gelu_mul": lambda: gelu_mul(of(7, H), of(7, H)).sum(),
    "gelu": lambda: gelu(of(7, H)).sum(),
    "modulated_layer_norm": lambda: modulated_layer_norm(of(2, 7, H), of(2, H), of(2, H)).sum(),
    "gated_residual": lambda: gated_residual(of(2, 7, H), of(2, 7, H), of(2, H)).sum(),
    "rope": lambda: sum(x.sum() for x in rope(of(2, 8, 9, 16), of(2, 2, 9, 16), of(9, 8, grad=False), of(9, 8, grad=False))),
    "attention": lambda: attention(of(2, 8, 9, 16), of(2, 2, 9, 16), of(2, 2, 9, 16), causal=True).sum(),
}


@pytest.mark.parametrize("kernels", ["cpp", pytest.param("eager", marks=pytest.mark.full)])
@pytest.mark.parametrize("op", OPS)
def test_forward_and_backward_read_nothing_on_the_host(op, kernels):
    # "cpp": each op as one operator, as with kernels; "eager": every operator of the formulas, loops over chunks included
    with planned_for("cuda"), using(kernels), NoHostReads() as mode:
        OPS[op]().backward()
    assert mode.seen


@pytest.mark.parametrize("head", [False, True], ids=["frozen", "trained"])
def test_the_heads_chunks_read_nothing_on_the_host(head):
    # inside the operator, whose results alone the test above sees
    hidden, weight, labels, rule = of(300, H, grad=False), of(V, H, grad=False), targets(300), LossRule().arguments
    one = of(dtype=torch.float32, grad=False)
    with planned_for("cuda"), using("eager"), NoHostReads() as mode:
        loss, lse, *_ = op._forward.__wrapped__(hidden, weight, None, labels, one, *rule, 64, True, head, False, True)
        op._backward.__wrapped__(hidden, weight, None, labels, lse, loss, *rule, True, head)
    # five chunks of rows, then one block of the vocabulary
    assert sum(name in ("aten.mm.dtype_out", "aten.addmm.dtype_out") for name in mode.seen) == 6 * (2 + head)


def test_the_mode_raises_for_operators_that_wait_for_the_device():
    x = of(4)
    for wait in (lambda: x.nonzero(), lambda: x[x > 0], lambda: bool(x.sum() > 0), lambda: x.cpu()):
        with NoHostReads(), pytest.raises((HostReadError, RuntimeError)):
            wait()
    with NoHostReads(), pytest.raises(HostReadError, match="waits"):
        x.nonzero()


@pytest.mark.parametrize(("reduction", "share"), [("mean", 0.4), ("none", 0.4), ("mean", 1.0)])
def test_masked_rows_give_what_selected_rows_give(monkeypatch, reduction, share):
    hidden, weight = torch.randn(150, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64) / 8
    labels = torch.randint(0, V, (150,))
    labels[torch.rand(150) < share] = -100

    def run():
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(x, w, labels, reduction=reduction, chunk=64, label_smoothing=0.1, z_loss=1e-3)
        loss.sum().backward()
        return loss.detach(), x.grad, w.grad

    selected = run()
    for module in (chunked, eager):
        monkeypatch.setattr(module, "rows_can_be_counted", lambda x: False)
    for masked, wanted in zip(run(), selected, strict=True):
        torch.testing.assert_close(masked, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
