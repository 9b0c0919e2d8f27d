"""The norms, rotations, activations and gated sums: one set of demands for all, since each is a formula a row with a contract."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from isotype.errors import DtypeError, ShapeError, UsageError
from isotype.ops import add_rms_norm, cpp, gated_residual, gelu, gelu_mul, modulated_layer_norm, rms_norm, rope, silu_mul
from isotype.ops.backend import using
from isotype.ops.gated import op as gated_op
from isotype.ops.gated.op import gelu_mul_reference, gelu_reference, silu_mul_reference
from isotype.ops.modulation.op import gated_residual_reference, modulated_layer_norm_reference
from isotype.ops.rms_norm.op import rms_norm_reference
from isotype.ops.rope.op import rope_reference
from isotype.testing.interpreter import interpreted
from tests.ops.trials import error


@dataclass
class Case:
    op: Any
    reference: Any
    plain: Any
    shapes: Any  # rows -> shapes of the inputs


def tables(positions, pairs):
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return angle.cos(), angle.sin()


def rotary(f, interleaved, pairs):
    def run(q, k):
        cos, sin = ((t if q.dtype == k.dtype == torch.float64 else t.float()).to(q.device) for t in tables(q.shape[2], pairs))
        q, k = f(q, k, cos[None], sin[None], interleaved=interleaved)
        # one output, so that both gradients are compared
        with torch.autocast(q.device.type, enabled=False):
            return torch.cat((q, k.to(q.dtype)), 1)

    return run


def plain_norm(x, w, offset=0.0):
    # F.rms_norm wants one dtype; transformers' own forms are the plain ops
    h = x.float() if x.dtype != torch.float64 else x
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    return (w * h.to(x.dtype)).to(x.dtype) if not offset else (h * (1.0 + w.to(h.dtype))).to(x.dtype)


def plain_modulated(x, scale, shift):
    h = F.layer_norm(x if x.dtype == torch.float64 else x.float(), x.shape[-1:], eps=1e-6)
    return (h * (1 + scale.to(h.dtype))[:, None] + shift.to(h.dtype)[:, None]).to(x.dtype)


def plain_gated(residual, x, gate):
    return (residual + gate.to(x.dtype)[:, None] * x).to(x.dtype)


def rotary_case(interleaved, pairs):
    return Case(
        rotary(rope, interleaved, pairs),
        rotary(rope_reference, interleaved, pairs),
        rotary(rope_reference, interleaved, pairs),
        lambda rows: [(2, 3, rows // 2, 8), (2, 1, rows // 2, 8)],
    )


def pair(rows):
    return [(rows, 6), (rows, 6)]


def gated(activation):
    return lambda gate, up: activation(gate) * up


CASES = {
    "rms_norm": Case(rms_norm, rms_norm_reference, plain_norm, lambda rows: [(rows, 6), (6,)]),
    "rms_norm-gemma": Case(
        lambda x, w: rms_norm(x, w, unit_offset=True),
        lambda x, w: rms_norm_reference(x, w, unit_offset=True),
        lambda x, w: plain_norm(x, w, 1.0),
        lambda rows: [(rows, 6), (6,)],
    ),
    "silu_mul": Case(silu_mul, silu_mul_reference, gated(F.silu), pair),
    "gelu_mul": Case(gelu_mul, gelu_mul_reference, gated(F.gelu), pair),
    "gelu_mul-tanh": Case(
        lambda g, u: gelu_mul(g, u, approximate="tanh"),
        lambda g, u: gelu_mul_reference(g, u, approximate="tanh"),
        gated(lambda g: F.gelu(g, approximate="tanh")),
        pair,
    ),
    "gelu": Case(gelu, gelu_reference, F.gelu, lambda rows: [(rows, 6)]),
    "gelu-tanh": Case(
        lambda x: gelu(x, approximate="tanh"),
        lambda x: gelu_reference(x, approximate="tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda rows: [(rows, 6)],
    ),
    "modulated_layer_norm": Case(
        modulated_layer_norm,
        modulated_layer_norm_reference,
        plain_modulated,
        lambda rows: [(2, rows // 2, 6), (2, 6), (2, 6)],
    ),
    "gated_residual": Case(
        gated_residual, gated_residual_reference, plain_gated, lambda rows: [(2, rows // 2, 6), (2, rows // 2, 6), (2, 6)]
    ),
    "rope": rotary_case(False, 4),
    "rope-interleaved": rotary_case(True, 4),
    "rope-partial": rotary_case(False, 2),
    "rope-partial-interleaved": rotary_case(True, 3),
}
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make(case, rows=12, dtype=torch.float64):
    torch.manual_seed(0)
    return [(torch.randn(s, dtype=torch.float64) + (len(s) == 1)).to(dtype).requires_grad_() for s in case.shapes(rows)]


def copies(inputs):
    return [x.detach().clone().requires_grad_() for x in inputs]


@each
def test_derivatives_and_the_reference(case):
    assert torch.autograd.gradcheck(case.op, tuple(make(case, 6)))
    inputs = make(case, 4)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(case.op(*inputs).sum(), inputs, create_graph=True)
    inputs = make(case)
    torch.testing.assert_close(case.reference(*inputs), case.plain(*inputs))


PATHS = [
    pytest.param("eager", marks=pytest.mark.full),
    pytest.param("cpp", marks=pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")),
]


@each
@pytest.mark.parametrize("path", PATHS)
def test_aliases_strides_and_no_rows(case, path):
    """A shared gradient (residual), an expanded one, a second backward: inputs and incoming gradients stay as they were."""
    results = []
    for f, of in ((case.op, path), (case.reference, "eager")):
        leaves = [torch.stack((x.detach(), x.detach()), -1).requires_grad_() for x in make(case, dtype=torch.float32)]
        hidden = [x[..., 0] * 1 for x in leaves]
        with using(of):
            y, z = f(*hidden), f(*(x[..., 1] for x in leaves))
            kept = [h.detach().clone() for h in hidden]
            dz = torch.stack((z.detach(), z.detach()), -1)[..., 1]
            total = y.sum() + (y * 2 + y.detach()).square().sum() + hidden[0].square().sum() + (z * dz).sum()
            total.backward(retain_graph=True)
            total.backward()
            nothing = make(case, 0, torch.float32)
            f(*nothing).sum().backward()
        assert all(torch.equal(h, k) for h, k in zip(hidden, kept))
        assert all(x.grad is not None and x.grad.shape == x.shape for x in nothing)
        results.append([x.grad for x in leaves])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full if "-" in name else []) for name, case in CASES.items()], ids=CASES
)
@pytest.mark.parametrize("cast", [None, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=["off", "bf16"])
def test_compiles_without_a_graph_break(case, cast):
    torch._dynamo.reset()
    # fp32 too: there the op's last cast changes nothing, which torch 2.11 takes for an output without a gradient
    dtype = torch.float32 if cast is None else torch.bfloat16
    mine, theirs = make(case, dtype=dtype), make(case, dtype=dtype)
    got = torch.compile(lambda *a: case.op(*a), fullgraph=True, backend="aot_eager")
    for f, leaves in ((got, mine), (case.op, theirs)):
        with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
            y = f(*leaves)
        y.sum().backward()
    torch.testing.assert_close([x.grad for x in mine], [x.grad for x in theirs])


def test_bad_inputs_raise():
    x = torch.randn(3, 4)
    with pytest.raises(DtypeError, match="DT001"):
        silu_mul(x, x.bfloat16())
    with pytest.raises(ShapeError, match="SH001"):
        gelu_mul(x, x[:2])
    with pytest.raises(ShapeError, match="SH001 weight"):
        rms_norm(x, torch.ones(3))
    with pytest.raises(ShapeError, match="SH001 x is"):
        add_rms_norm(x, x[:2], torch.ones(4))
    tokens, vector = torch.randn(2, 3, 4), torch.randn(2, 4)
    with pytest.raises(ShapeError, match="SH001 shift is"):
        modulated_layer_norm(tokens, vector, vector[:1])
    with pytest.raises(DtypeError, match="DT001 scale is"):
        modulated_layer_norm(tokens, vector, vector.bfloat16())
    with pytest.raises(ShapeError, match="SH001 gate is"):
        gated_residual(tokens, tokens, torch.ones(4))
    with pytest.raises(DtypeError, match="DT001 residual is"):
        gated_residual(tokens, tokens.bfloat16(), vector)
    with pytest.raises(ShapeError, match="SH001 residual is"):
        gated_residual(tokens[:, :2], tokens, vector)
    with pytest.raises(UsageError, match="expected none or tanh"):
        gelu(x, approximate="sigmoid")
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ShapeError, match="pairs need 6"):
        rope(q, q, torch.ones(3, 3), torch.ones(3, 3))
    with pytest.raises(ShapeError, match="expected"):
        rope(q, q, torch.ones(2, 2), torch.ones(2, 2))


def test_an_fp32_weight_does_not_widen_the_norm_and_out_dtype_does():
    x, w = torch.randn(3, 4, dtype=torch.bfloat16), torch.ones(4)
    assert rms_norm(x, w).dtype == torch.bfloat16
    assert rms_norm(x.float(), w, out_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_add_rms_norm():
    x, r, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (3, 4), (4,)))
    y, total = add_rms_norm(x, r, w)
    torch.testing.assert_close(y, rms_norm_reference(x + r, w))
    torch.testing.assert_close(total, x + r)
    assert torch.autograd.gradcheck(add_rms_norm, (x, r, w))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpp", "triton", "eager"])
@pytest.mark.parametrize(("added", "used"), [(True, "both"), (False, "normed"), (True, "sum")])
def test_the_sums_two_gradients_leave_as_one(dtype, backend, added, used):
    """Against fp64, no worse than twice the error of the same steps one by one; and of either output alone."""
    if backend == "cpp" and cpp.cpu_compiler() is None:
        pytest.skip("no C++ compiler")
    torch.manual_seed(0)
    made = [torch.randn(s) for s in ((37, 48), (37, 48), (48,), (37, 48), (37, 48))]

    def gradients(kind, op):
        x, r, w, dy, dtotal = (t.to(dtype).to(kind).requires_grad_(i < 3) for i, t in enumerate(made))
        y, total = op(x, r if added else None, w)
        outs = {"both": [(y, dy), (total, dtotal)], "normed": [(y, dy)], "sum": [(total, dtotal)]}[used]
        torch.autograd.backward([out for out, _ in outs], [g for _, g in outs])
        return [y.detach(), total.detach(), *(t.grad for t in (x, r, w) if t.grad is not None)]

    def steps(x, r, w):
        total = x if r is None else x + r
        return rms_norm_reference(total, w), total

    want, plain = gradients(torch.float64, steps), gradients(dtype, steps)
    if backend == "triton":
        pytest.importorskip("triton")
    with interpreted() if backend == "triton" else contextlib.nullcontext(), using(backend):
        got = gradients(dtype, add_rms_norm)
    for name, a, b, c in zip(("normed", "sum", "dx", "dr", "dw"), got, plain, want, strict=False):
        assert error(a, c) <= 2 * error(b, c) + 1e-7, name


# --- the C++ kernels, which every test above ran on fp32, bf16 and fp16 where there is a compiler, and plain PyTorch where there is none


@pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", CASES)
def test_cpp_equals_plain_pytorch_on_rows_of_any_length_and_stride(name, dtype):
    case = CASES[name]
    torch.manual_seed(0)
    # 16k elements is a block, and 100 is no multiple of a vector
    shapes = [(2, 3, 40, 100), (2, 1, 40, 100)] if name.startswith("rope") else [(*shape[:-1], 100) for shape in case.shapes(300)]
    results = []
    for backend in ("cpp", "eager"):
        torch.manual_seed(0)
        wide = [torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype) for shape in shapes]
        leaves = [x[..., : x.shape[-1] // 2].detach().requires_grad_() for x in wide]
        with using(backend):
            y = case.op(*leaves)
            y.backward(torch.randn(y.shape).to(y.dtype))
        results.append([y, *(x.grad for x in leaves)])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")
def test_dispatch_modes_see_one_op_with_the_right_outputs():
    """What observes or traces dtypes sees the kernels' results; a fake tensor gets the same shapes and dtypes without running them."""
    x, w = torch.randn(4, 6, dtype=torch.bfloat16), torch.ones(6)
    q, cos = torch.randn(1, 5, 2, 8).transpose(1, 2), torch.ones(1, 5, 4)
    tokens, vector = torch.randn(2, 5, 6, dtype=torch.bfloat16), torch.randn(2, 6)
    ops = torch.ops.isotype
    for op, inputs in [
        (ops.gated_forward_cpp, (x, x, "silu")),
        (ops.gated_backward_cpp, (x, x, x, "silu", False)),
        (ops.gated_forward_cpp, (x, x, "gelu_tanh")),
        (ops.gated_backward_cpp, (x, x, x, "gelu", True)),
        (ops.gated_forward_cpp, (x, None, "gelu")),
        (ops.gated_backward_cpp, (x, None, x, "gelu", False)),
        (ops.modulated_layer_norm_forward_cpp, (tokens, vector, vector, 1e-6, torch.float32)),
        (ops.modulated_layer_norm_backward_cpp, (tokens, vector, tokens, 1e-6, True)),
        (ops.modulated_layer_norm_backward_cpp, (tokens, vector, tokens, 1e-6, False)),
        (ops.gated_residual_forward_cpp, (tokens, tokens, vector)),
        (ops.gated_residual_backward_cpp, (tokens, vector, tokens, True)),
        (ops.gated_residual_backward_cpp, (tokens, vector, tokens, False)),
        (ops.rms_norm_forward_cpp, (x, None, w, 1e-6, False, torch.float32)),
        (ops.rms_norm_forward_cpp, (x, x, w, 1e-6, False, torch.float32)),
        (ops.rms_norm_backward_cpp, (x, w, torch.ones(4, 1), x, None, True, True)),
        (ops.rms_norm_backward_cpp, (x, w, torch.ones(4, 1), x, x, True, True)),
        (ops.rope_cpp, (q, q, cos, cos, False, True)),
    ]:
        torch.library.opcheck(op.default, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("compiler", "why"), [(None, "no C++ compiler (g++ or clang++) was found"), ("/bin/false", "false failed after 0 s: exit code 1")]
)
def test_without_a_working_compiler_the_plain_formula_runs_and_says_why(monkeypatch, tmp_path, compiler, why):
    monkeypatch.setattr(cpp, "cpu_compiler", lambda: compiler)
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpp, "_fallbacks", {})
    monkeypatch.setattr(gated_op.KERNELS, "library", None)
    x = torch.randn(4, 4)
    torch.testing.assert_close(silu_mul(x, x), silu_mul_reference(x, x))
    assert cpp.fallbacks() == {"gated": why}
