"""What backward makes again in place of keeping it has the bits that it had, and the gradients are those of a tensor that was kept."""

from __future__ import annotations

import pytest
import torch

from isotype.lora.linear import lora_linear
from isotype.ops import attention, gelu, modulated_layer_norm, rms_norm, rope
from isotype.ops.remade import follow, made_again, remember, way_of


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


MADE = {
    "gelu": lambda: gelu(narrow(3, 8) * 1, approximate="tanh"),
    "modulated_layer_norm": lambda: modulated_layer_norm(narrow(2, 3, 8) * 1, narrow(2, 8), narrow(2, 8)),
    "modulated_layer_norm, narrowed": lambda: modulated_layer_norm(drawn(2, 3, 8), drawn(2, 8), drawn(2, 8), out_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_result_is_made_again_bit_for_bit(make):
    made = make()
    way = way_of(made)
    with torch.no_grad():
        again = made_again(way.make, way.tensors)
    assert torch.equal(again, made)
    assert again.dtype == made.dtype
    assert not again.requires_grad


def test_a_result_that_was_written_to_or_seen_through_a_view_is_kept():
    made = gelu(narrow(3, 8) * 1)
    assert way_of(made) is not None
    assert way_of(made.view(8, 3)) is None
    made.mul_(2.0)
    assert way_of(made) is None


def test_a_chain_is_made_again_from_its_first_inputs():
    first, weight, other = narrow(2, 8), narrow(8), narrow(3, 8)
    normed = remember(rms_norm(first, weight), rms_norm, first, weight)
    joined = follow(torch.cat((normed, other)), lambda *parts: torch.cat(parts), normed, other)
    way = way_of(joined)
    assert [id(t) for t in way.tensors] == [id(first), id(weight), id(other)]
    with torch.no_grad():
        assert torch.equal(made_again(way.make, way.tensors), joined)
    assert way_of(follow(torch.cat((first, other)), lambda *parts: torch.cat(parts), first, other)) is None, "nothing would be saved"


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


def test_attention_saves_projections_in_place_of_rotated_queries_and_keys():
    weight, angle = narrow(16), torch.randn(40, 8)

    def heads(x, known):
        normed = rms_norm(x, weight)
        normed = remember(normed, rms_norm, x, weight) if known else normed
        turned = rope(normed, normed[:, :0], angle.cos(), angle.sin(), interleaved=True)[0]
        return follow(turned, lambda n: rope(n, n[:, :0], angle.cos(), angle.sin(), interleaved=True)[0], normed)

    results = []
    for known in (True, False):
        q, k, v = (drawn(1, 2, 40, 16 * (i + 1))[..., :16].bfloat16().detach().requires_grad_() for i in range(3))
        y, kept = saved_by(lambda q=q, k=k, v=v, known=known: attention(heads(q, known), heads(k, known), v))
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
        results.append(([y.detach(), q.grad, k.grad, v.grad], kept))
    (mine, less), (theirs, more) = results
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert more - less >= 2 * 40 * 2 * 16 * 2
