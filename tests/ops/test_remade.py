"""What backward makes again in place of keeping it has the bits that it had, and the gradients are those of a tensor that was kept."""

import pytest
import torch

from isotype.lora.linear import lora_linear
from isotype.ops import gated_residual, gelu


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def narrow(*shape):
    return drawn(*shape, dtype=torch.bfloat16)


def saved_by(run):
    """(the result, bytes that its graph keeps, each storage once)"""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = run()
    return made, sum(seen.values())


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_lora_layer_that_reads_an_activation_saves_the_activations_input(frozen):
    weight, a, b = narrow(6, 32).detach().requires_grad_(not frozen), drawn(2, 32), drawn(6, 2)
    results = []
    for known in (True, False):
        x, leaves = narrow(64, 32), [t.detach().clone().requires_grad_(t.requires_grad) for t in (weight, a, b)]

        def run(x=x, leaves=leaves, known=known):
            made = gelu(x * 1, approximate="tanh")
            return lora_linear(made if known else made.view(64, 32), *leaves)

        with torch.autocast("cpu", torch.bfloat16):
            y, kept = saved_by(run)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
        results.append(([y.detach(), x.grad, *(t.grad for t in leaves if t.requires_grad)], kept))
    (mine, less), (theirs, more) = results
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert more - less == 64 * 32 * 2


def test_a_gated_sum_keeps_what_it_adds_for_the_gates_gradient_alone():
    residual, x, gate = narrow(2, 64, 32), narrow(2, 64, 32), narrow(2, 32)
    dy, kept, found = torch.linspace(-1, 1, 2 * 64 * 32).view(2, 64, 32).bfloat16(), [], []
    for trained in (True, False):
        y, saved = saved_by(lambda trained=trained: gated_residual(residual, x, gate if trained else gate.detach()))
        found.append(torch.autograd.grad(y, [residual, x], dy))
        kept.append(saved)
    assert kept[0] - kept[1] == 2 * 64 * 32 * 2
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
