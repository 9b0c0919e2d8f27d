"""One set of demands for every op: derivatives, transforms, strides, no rows, results that may be
written to, nothing read on the host.
"""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from isotype import ops
from isotype.errors import DtypeError, IsotypeError, ShapeError, UsageError
from isotype.ops import cpp
from isotype.ops.backend import force_backend
from tests.api import (
    Projection,
    builds,
    forward_4bit,
    gated_op,
    lora_group,
    lora_linear,
    lora_mlp,
    plan_device,
    resolve_dtypes,
)
from tests.host_reads import HostReadError, NoHostReads
from tests.models import quantised, tiny
from tests.ops.cases import CASES, OPTIONAL, drawn
from tests.ops.trials import FACTOR, error

COMPILED = pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")
# each op's own case; what its options change is held to the same reference by the tests above
NAMES = [name for name in CASES if not name.endswith(OPTIONAL)]
# a formula a row
ROW_OPS = ("rms_norm", "add_rms_norm", "silu", "gelu", "modulated", "gated", "rope")


def leaves(case, *sizes, dtype=torch.float64):
    """The inputs of a call; those that the contract gives a gradient (a teacher's head has none)
    require it.
    """
    made = [t.to(dtype) if t.is_floating_point() else t for t in case.inputs(*sizes)]
    return [
        t.requires_grad_(name in case.contract.grads)
        for name, t in zip(case.contract.inputs, made, strict=False)
    ]


def outputs(made):
    """The results that are not integers, of an op that has one or several."""
    return tuple(t for t in (made if isinstance(made, tuple) else (made,)) if t.is_floating_point())


def gradients(made, inputs):
    total = sum(
        (t * torch.linspace(-1, 2, t.numel()).view(t.shape).to(t)).sum() for t in outputs(made)
    )
    return torch.autograd.grad(total, [t for t in inputs if t.requires_grad])


def differentiable(case, rows):
    """(the inputs that have a gradient, the op and its reference as functions of them alone)"""
    inputs = leaves(case, rows)
    places = [i for i, t in enumerate(inputs) if t.requires_grad]

    def of(f, *given):
        every = list(inputs)
        for i, t in zip(places, given, strict=False):
            every[i] = t
        return outputs(f(*every))

    return [inputs[i] for i in places], partial(of, case.op), partial(of, case.reference)


PLAIN = {
    "cross_entropy": F.cross_entropy,
    "cross_entropy-none": partial(F.cross_entropy, reduction="none"),
    "linear_cross_entropy": lambda x, w, t: F.cross_entropy(F.linear(x, w), t),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
    "rms_norm-gemma": lambda x, w: F.rms_norm(x, x.shape[-1:], 1 + w, 1e-6),
    "silu_mul": lambda g, u: F.silu(g) * u,
    "gelu_mul": lambda g, u: F.gelu(g) * u,
    "gelu_mul-tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "modulated_layer_norm": lambda x, a, b: (
        F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + a)[:, None] + b[:, None]
    ),
    "gated_residual": lambda r, x, g: r + g[:, None] * x,
    "attention": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
}


def test_references_are_plain_pytorch(subtests):
    for name, plain in PLAIN.items():
        with subtests.test(name):
            inputs = CASES[name].inputs(12)
            torch.testing.assert_close(CASES[name].reference(*inputs), plain(*inputs))


def test_derivatives_agree_with_finite_differences_and_second_ones_are_refused(subtests):
    for name, case in CASES.items():
        with subtests.test(name):
            inputs, op, reference = differentiable(case, 5)
            assert torch.autograd.gradcheck(op, inputs, fast_mode=True)
            torch.testing.assert_close(op(*inputs), reference(*inputs))
            if name == "attention":
                continue
            with pytest.raises(UsageError, match=r"has no second derivative \(create_graph=True\)"):
                torch.autograd.grad(op(*inputs)[0].sum(), inputs, create_graph=True)


@pytest.mark.parametrize(
    "cast",
    [pytest.param(None, id="off", marks=pytest.mark.full), pytest.param(torch.bfloat16, id="bf16")],
)
def test_ops_compile_without_a_graph_break(cast, subtests):
    for name in NAMES:
        if not name.startswith("experts"):
            with subtests.test(name):
                compiled_as_it_is(CASES[name], cast)


def compiled_as_it_is(case, cast):
    torch._dynamo.reset()
    # fp32 too: there the op's last cast changes nothing, which torch 2.11 takes for an output
    # without a gradient
    dtype = torch.float32 if cast is None else torch.bfloat16
    results = []
    compiled = torch.compile(lambda *a: case.op(*a), fullgraph=True, backend="aot_eager")
    # the plain call first: it loads the op's library, which a compiled call does not load
    for f in (case.op, compiled):
        inputs = leaves(case, 6, dtype=dtype)
        with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
            made = f(*inputs)
        results.append([*outputs(made), *gradients(made, inputs)])
    torch.testing.assert_close(*results)


@COMPILED
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(dtype, marks=pytest.mark.full) for dtype in (torch.float32, torch.float16)),
    ],
)
def test_cpp_kernels_take_rows_of_any_stride_and_length_and_none(dtype, subtests):
    for name in NAMES:
        with subtests.test(name):
            strided(name, dtype)


def strided(name, dtype):
    # 100 is no multiple of a vector, and 300 rows of it are more than one block
    case, sizes = CASES[name], (300, 100) if name.startswith(ROW_OPS) else (40,)
    results = []
    for path in ("cpp", "eager", "fp64"):
        drawn = [x.detach().to(torch.float64).requires_grad_(x.requires_grad) if path == "fp64" and x.is_floating_point() else x
                 for x in leaves(case, *sizes, dtype=dtype)]  # fmt: skip
        inputs = [
            torch.stack((x.detach(), x.detach()), -1)[..., 0].requires_grad_(x.requires_grad)
            for x in drawn
        ]
        with force_backend("eager" if path == "fp64" else path):
            made = case.op(*inputs)
            results.append([*outputs(made), *gradients(made, inputs)])
            nothing = leaves(case, 0)
            assert [g.shape for g in gradients(case.op(*nothing), nothing)] == [
                x.shape for x in nothing if x.requires_grad
            ]
    for mine, plain, exact in zip(*results, strict=False):
        assert error(mine, plain) <= max(2 * torch.finfo(dtype).eps, FACTOR * error(plain, exact))


class SeenOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.names.add(operator.__name__)
        return operator(*arguments, **(options or {}))


@COMPILED
def test_norms_without_gradients_are_the_same_and_a_dispatch_mode_sees_them():
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 72, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(72, generator=generator).requires_grad_()
    expected = (*ops.add_rms_norm(x, residual, weight), ops.rms_norm(x, weight))
    with torch.no_grad():
        direct = (*ops.add_rms_norm(x, residual, weight), ops.rms_norm(x, weight))
        assert ops.add_rms_norm(x, None, weight)[1] is x
        with SeenOperators() as seen:
            ops.rms_norm(x, weight)
    assert all(map(torch.equal, direct, expected))
    assert any("rms_norm_forward_cpp" in name for name in seen.names)


@pytest.mark.parametrize("path", ["cpp", pytest.param("eager", marks=pytest.mark.full)])
def test_on_a_planned_gpu_nothing_is_read_on_the_host_and_results_have_the_real_forms(
    path, subtests
):
    """ "cpp": each op as one operator, as with kernels; "eager": every operator of the formulas,
    loops over chunks included.
    """
    for name in NAMES:
        with subtests.test(name):
            planned(name, path)


def planned(name, path):
    forms = []
    for device in ("cpu", "meta"):
        inputs = [
            t.detach().to(device).requires_grad_(t.requires_grad)
            for t in leaves(CASES[name], 70, dtype=torch.bfloat16)
        ]
        with (
            plan_device("cuda") if device == "meta" else contextlib.nullcontext(),
            force_backend(path),
            NoHostReads() as mode,
        ):
            made = CASES[name].op(*inputs)
            grads = torch.autograd.grad(
                outputs(made), [t for t in inputs if t.requires_grad], outputs(made)
            )
        assert mode.seen
        forms.append([(t.dtype, t.shape) for t in (*outputs(made), *grads)])
    assert forms[0] == forms[1]


def test_the_mode_raises_for_operators_that_wait_for_the_device():
    x = torch.empty(4, device="meta")
    for wait in (lambda: x.nonzero(), lambda: x[x > 0], lambda: bool(x.sum() > 0), lambda: x.cpu()):
        with NoHostReads(), pytest.raises((HostReadError, RuntimeError)):
            wait()


WEIGHT, A, B = drawn(8, 8) / 3, drawn(2, 8) / 3, drawn(8, 2) / 3


def projection():
    return Projection(WEIGHT, None, A.clone().requires_grad_(), B.clone().requires_grad_(), None)


def decided(x):
    return resolve_dtypes(x, x.dtype, x.dtype, is_quantised=False, branch_fp32=False)


def four_bit(x):
    layer = quantised(tiny(hidden_size=64, intermediate_size=64)).model.layers[0].mlp.gate_proj
    return forward_4bit(layer, x.repeat_interleave(8, -1))


LORA = {
    "lora_linear": lambda x: lora_linear(x, WEIGHT, A.clone().requires_grad_(), B),
    "lora_group": lambda x: lora_group(x, [projection(), projection()], decided(x)),
    "lora_mlp": lambda x: lora_mlp(
        x, [projection(), projection()], projection(), "silu_mul", decided(x)
    ),
    "linear_4bit": four_bit,
}


def in_place(y):
    y.mul_(1.5)
    y.clamp_(-2, 2)
    y += 0.25
    if y.dim():
        y[..., :1] = 0
    return y


def beside(y):
    y = (y * 1.5).clamp(-2, 2) + 0.25
    return torch.cat([torch.zeros_like(y[..., :1]), y[..., 1:]], -1) if y.dim() else y


# backward needs the other results: the sum is the norm's input. Attention keeps its output for
# backward, as sdpa does
FIRST = ("add_rms_norm", "linear_log_probs")


@pytest.mark.parametrize("path", ["cpp", pytest.param("eager", marks=pytest.mark.full)])
def test_results_can_be_changed_in_place(path, subtests):
    """As a plain op's can: they are no views that an autograd function has made."""
    for name in (*NAMES, *LORA):
        if name != "attention":
            with subtests.test(name):
                changed_in_place(name, path)


def changed_in_place(name, path):
    seen = []
    for change in (in_place, beside):
        x, *others = (
            [drawn(2, 3, 8).requires_grad_()]
            if name in LORA
            else leaves(CASES[name], 6, dtype=torch.float32)
        )
        with force_backend(path):
            made = (LORA[name] if name in LORA else CASES[name].op)(x * 1, *others)
        parts = [
            change(y) for y in (outputs(made)[:1] if name.startswith(FIRST) else outputs(made))
        ]
        sum((y.square() * (i + 1)).sum() for i, y in enumerate(parts)).backward()
        seen.append([x.grad, *(y.detach() for y in parts)])
    torch.testing.assert_close(*seen)


X, TOKENS, VECTOR, HEADS = (
    torch.randn(3, 4),
    torch.randn(2, 3, 4),
    torch.randn(2, 4),
    torch.randn(1, 2, 3, 4),
)
T, STACK = torch.tensor([0, 1, 2]), torch.randn(2, 4, 4)


BAD = (
    (lambda: ops.silu_mul(X, X.bfloat16()), DtypeError, "DT001"),
    (lambda: ops.gelu_mul(X, X[:2]), ShapeError, "SH001"),
    (lambda: ops.rms_norm(X, torch.ones(3)), ShapeError, "SH001 weight"),
    (lambda: ops.add_rms_norm(X, X[:2], torch.ones(4)), ShapeError, "SH001 x is"),
    (lambda: ops.modulated_layer_norm(TOKENS, VECTOR, VECTOR[:1]), ShapeError, "SH001 shift is"),
    (
        lambda: ops.modulated_layer_norm(TOKENS, VECTOR, VECTOR.bfloat16()),
        DtypeError,
        "DT001 scale is",
    ),
    (lambda: ops.gated_residual(TOKENS, TOKENS, torch.ones(4)), ShapeError, "SH001 gate is"),
    (
        lambda: ops.gated_residual(TOKENS, TOKENS.bfloat16(), VECTOR),
        DtypeError,
        "DT001 residual is",
    ),
    (lambda: ops.gated_residual(TOKENS[:, :2], TOKENS, VECTOR), ShapeError, "SH001 residual is"),
    (lambda: ops.gelu(X, approximate="sigmoid"), UsageError, "expected none or tanh"),
    (
        lambda: ops.rope(HEADS, HEADS, torch.ones(3, 3), torch.ones(3, 3)),
        ShapeError,
        "pairs need 6",
    ),
    (lambda: ops.rope(HEADS, HEADS, torch.ones(2, 2), torch.ones(2, 2)), ShapeError, "expected"),
    (
        lambda: ops.cross_entropy(X, T + 2),
        IsotypeError,
        r"SH002 1 .* of range, .* is 4: expected 0\.\.3",
    ),
    (lambda: ops.cross_entropy(X, T - 1), IsotypeError, "SH002"),
    (lambda: ops.cross_entropy(X, T.float()), DtypeError, "DT001"),
    (lambda: ops.cross_entropy(X, T[:1]), ShapeError, "SH001"),
    (lambda: ops.cross_entropy(X, T, reduction="average"), UsageError, "reduction"),
    (
        lambda: ops.cross_entropy(X, T, reduction="sum", num_items=3),
        UsageError,
        "num_items=3 has no effect",
    ),
    (lambda: ops.cross_entropy(X, T, label_smoothing=2.0), UsageError, "label_smoothing"),
    (lambda: ops.linear_divergence(X, STACK[0], X, STACK[1, :3]), ShapeError, "a student of"),
    (lambda: ops.linear_divergence(X, STACK[0], X, STACK[1], beta=2), UsageError, "beta is 2"),
    (
        lambda: ops.linear_divergence(X, STACK[0], X, STACK[1], temperature=0),
        UsageError,
        "temperature is 0",
    ),
    (lambda: ops.attention(HEADS, HEADS, HEADS, window=0), UsageError, "window is 0"),
    (lambda: ops.attention(HEADS, HEADS, HEADS, softcap=-1.0), UsageError, "softcap is -1"),
    (
        lambda: ops.attention(HEADS, HEADS.bfloat16(), HEADS.bfloat16()),
        DtypeError,
        "query, key and value are fp32, bf16 and bf16",
    ),
    (
        lambda: ops.attention(HEADS, HEADS[..., :2], HEADS[..., :2]),
        ShapeError,
        "head size must be the same",
    ),
    (
        lambda: ops.attention(HEADS[:, :1], HEADS, HEADS),
        ShapeError,
        "1 query heads cannot share 2 key heads",
    ),
    (
        lambda: ops.experts(X, T[:, None], X[:, :1], STACK[..., :3], STACK),
        ShapeError,
        r"SH001 x is .* up \[2, 4, 3\]",
    ),
    (lambda: ops.experts(X, X[:, :1], X[:, :1], STACK, STACK), DtypeError, "index is"),
)


def test_bad_inputs_are_named(subtests):
    for call, kind, message in BAD:
        with subtests.test(message), pytest.raises(kind, match=message):
            call()


def test_with_a_compiler_that_fails_the_plain_formula_runs_and_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(builds, "cpu_compiler", lambda: "/bin/false")
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpp, "_fallback_reasons", {})
    monkeypatch.setattr(gated_op.KERNELS, "library", None)
    x = torch.randn(4, 4)
    torch.testing.assert_close(ops.silu_mul(x, x), F.silu(x) * x)
    assert cpp.fallback_reasons() == {"gated": "false failed after 0 s: exit code 1"}
