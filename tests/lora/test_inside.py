"""Adapters inside the product's K dimension, and before it: the results of the plain order, with errors no larger against fp64."""

from __future__ import annotations

import pytest
import torch

from isotype.environment.planned import planned_for
from isotype.lora import group, inside
from isotype.lora.dtypes import LoraDtypes
from isotype.lora.group import Projection, lora_group
from isotype.lora.linear import lora_linear
from isotype.ops.backend import using
from tests.ops.trials import error

T, K, OUTS, R = 24, 40, (56, 72), (4, 3)


def gpu(monkeypatch, *, inside_k):
    """The paths of a GPU, on tensors that are here."""
    monkeypatch.setattr(inside, "stands_for", lambda device: "cuda")
    monkeypatch.setattr(inside, "pays", lambda *a, **k: inside_k)


def drawn(dtype, bias):
    g = torch.Generator().manual_seed(0)

    def one(*shape, scale=1.0):
        return (torch.randn(shape, generator=g) * scale).to(dtype)

    x = one(T, K)
    rows = [(one(o, K, scale=K**-0.5), one(o) if bias else None, one(r, K, scale=K**-0.5), one(o, r)) for o, r in zip(OUTS, R)]
    return x, rows, [one(T, o) for o in OUTS]


def gradients(dtype, kind, bias):
    """Outputs and gradients of two projections of one input, computed in `kind` from values of `dtype`."""
    x, rows, dys = drawn(dtype, bias)
    x = x.to(kind).requires_grad_()
    members = [[None if t is None else t.to(kind).requires_grad_() for t in row] for row in rows]
    dtypes = LoraDtypes(kind, kind, False)
    made = lora_group(x, [Projection(w, b, a, b_, None, scale) for (w, b, a, b_), scale in zip(members, (0.7, 2.0))], dtypes)
    torch.autograd.backward(made, [dy.to(kind) for dy in dys])
    return [*(y.detach() for y in made), x.grad, *(t.grad for row in members for t in row if t is not None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inside_k", [False, True])
def test_outputs_and_gradients_are_no_further_from_fp64_than_those_of_a_sum_after_the_product(monkeypatch, dtype, bias, inside_k):
    with using("eager"):
        want, after = gradients(dtype, torch.float64, bias), gradients(dtype, dtype, bias)
        gpu(monkeypatch, inside_k=inside_k)
        products = []
        real = inside.inputs
        monkeypatch.setattr(inside, "inputs", lambda *a: products.append(real(*a)) or products[-1])
        got = gradients(dtype, dtype, bias)
    assert [tuple(p.shape) for p in products] == ([(T, K + 8)] if inside_k else [])
    for i, (a, b, c) in enumerate(zip(got, after, want, strict=True)):
        assert error(a, c) <= 1.25 * error(b, c) + 1e-6, i


@pytest.mark.parametrize("bias", [False, True])
def test_one_layers_adapter_comes_before_its_product(monkeypatch, bias):
    x, rows, _ = drawn(torch.bfloat16, bias)
    w, b, a, b_ = rows[0]
    with using("eager"):
        after = lora_linear(x, w, a, b_, b, scale=0.7)
        want = lora_linear(*(t if t is None else t.double() for t in (x, w, a, b_, b)), scale=0.7)
        gpu(monkeypatch, inside_k=False)
        got = lora_linear(x, w, a, b_, b, scale=0.7)
        one = lora_linear(x[:1], w, a, b_, b, scale=0.7)
    assert error(got, want) <= 1.1 * error(after, want)
    torch.testing.assert_close(one, after[:1])


def test_the_arithmetic_chooses_gate_and_up_of_4_bit_weights():
    assert inside.pays(4096, 4096, [14336, 14336], 32, copies_weight=False)
    assert not inside.pays(4096, 4096, [14336, 14336], 32, copies_weight=True), "a dense weight would be copied"
    assert not inside.pays(4096, 4096, [4096, 1024, 1024], 48, copies_weight=False), "outputs no wider than the input"
    assert not inside.pays(4096, 14336, [4096], 16, copies_weight=False)
    assert not inside.pays(4096, 4096, [14336, 14336], 1024, copies_weight=False), "ranks that cost more than the pass they save"


def test_a_cpu_and_a_projection_without_an_adapter_keep_the_plain_order():
    x = torch.empty(4096, 2048, dtype=torch.bfloat16)
    outs = [4096, 4096]
    assert not inside.wanted(x, outs, [16, 16], [None, None])
    with planned_for("cuda"), using("cpp"):
        state = object()
        planned = x.to("meta")
        assert inside.wanted(planned, outs, [16, 16], [state, state])
        assert not inside.wanted(planned, outs, [16, 0], [state, state])
        assert not inside.wanted(planned, outs, [16, 16], [state, None])
        assert not inside.wanted(planned.float(), outs, [16, 16], [state, state])


def test_a_tile_uses_the_weights_that_were_made_for_all(monkeypatch):
    gpu(monkeypatch, inside_k=True)
    x, rows, _ = drawn(torch.bfloat16, False)
    flat = [t for row in rows for t in (*row, None)]
    ready = group.with_adapters(x, flat, (0.7, 2.0), (None, None))
    assert [tuple(w.shape) for w in ready] == [(o, K + 8) for o in OUTS]
    # another's ranks and the padding are zeros
    assert not ready[0][:, K + 4 :].any()
    assert not ready[1][:, K : K + 4].any()
    monkeypatch.setattr(inside, "weights", lambda *a: pytest.fail("made again"))
    whole = group.multiply(x, flat, (0.7, 2.0), (None, None), ready)
    tile = group.multiply(x[:10], flat, (0.7, 2.0), (None, None), ready)
    for a, b in zip(whole.ys, tile.ys, strict=True):
        torch.testing.assert_close(a[:10], b)
