"""Every Triton kernel of the ops: numerics in the repaired interpreter beside plain PyTorch, and
compiled for GPUs that are not here.
"""

import functools

import pytest
import torch

# library ops import it on their first call, which must not happen while launches are trapped
import torch._dynamo

pytest.importorskip("triton")

from isotype.ops import (
    add_rms_norm,
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
from isotype.ops.backend import force_backend
from isotype.testing import compile_matrix
from isotype.testing.interpreter import interpreted
from tests.api import OUTPUTS, Clamped, divergence_and_entropy, gated_gradients, gated_product
from tests.api import ops_experts_Adapter as Adapter
from tests.api import ops_experts_experts as experts
from tests.api import rms_norm_triton as norm_kernels
from tests.gpu import DEVICE, kernels, on_a_gpu
from tests.ops.trials import FACTOR, error

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
ALL = {"label_smoothing": 0.1, "logit_scale": 1.5, "softcap": 8.0, "z_loss": 1e-2}


def labels(rows, classes):
    targets = torch.arange(rows) * 7 % classes
    targets[1] = -100
    return targets


def loss(op, options, targets):
    return functools.partial(lambda *a, **k: op(*a, targets.to(a[0].device), **k), **options)


def log_probs(outputs, options, targets):
    """Every output asked for in one tensor; the most likely class as a number without a gradient."""
    return lambda h, w: torch.stack(
        [v.to(torch.float32) if h.dtype != torch.float64 else v.double()
         for v in linear_log_probs(h, w, targets.to(h.device), outputs=outputs, **options) if v is not None]
    )  # fmt: skip


TAUGHT = [(6, 8), (300, 8), (6, 5), (300, 5)]
TWO_RULES = {
    "logit_scale": 1.5,
    "softcap": 8.0,
    "teacher_logit_scale": 0.5,
    "teacher_softcap": 5.0,
    "temperature": 0.7,
}


def taught(beta, **options):
    """Divergence and entropy in one tensor; the teacher gets no gradient."""
    return lambda *heads: torch.stack(divergence_and_entropy(*heads, beta=beta, **options))


SHAPED = {"logit_scale": 1.5, "softcap": 8.0, "temperature": 0.7}


def tables(positions, pairs):
    angle = torch.arange(positions, dtype=torch.float32)[:, None] / (
        1 + torch.arange(pairs, dtype=torch.float32)
    )
    return angle.cos(), angle.sin()


def rotary(interleaved, pairs):
    def run(q, k):
        a, b = rope(
            q, k, *(t.to(q.device) for t in tables(q.shape[2], pairs)), interleaved=interleaved
        )
        return torch.cat((a, b), 1)

    return run


LARGE = {
    "cross_entropy": (loss(cross_entropy, ALL, labels(512, 128256)), [(512, 128256)]),
    "linear_cross_entropy": (
        loss(linear_cross_entropy, {"chunk": 200}, labels(700, 32001)),
        [(700, 256), (32001, 256)],
    ),
    "linear_log_probs": (
        log_probs(OUTPUTS[:5], {"chunk": 200}, labels(700, 32001)),
        [(700, 256), (32001, 256)],
    ),
    "linear_divergence": (taught(0.5), [(700, 256), (32001, 256), (700, 320), (32001, 320)]),
    "rms_norm": (rms_norm, [(5000, 4096), (4096,)]),
    "rms_norm-heads": (rms_norm, [(70000, 128), (128,)]),
    "rms_norm-wide": (rms_norm, [(70, 16384), (16384,)]),
    "modulated_layer_norm": (modulated_layer_norm, [(1, 4608, 3072), (1, 3072), (1, 3072)]),
    "gated_residual": (gated_residual, [(2, 4608, 3072), (2, 4608, 3072), (2, 3072)]),
    "gelu-tanh": (functools.partial(gelu, approximate="tanh"), [(4608, 12288)]),
    "silu_mul-halves": (lambda both: silu_mul(*both.chunk(2, -1)), [(4097, 22016)]),
    "rope": (
        lambda q, k: rotary(False, 64)(q.transpose(1, 2), k.transpose(1, 2)),
        [(2, 1024, 32, 128), (2, 1024, 8, 128)],
    ),
    "rope-partial-interleaved": (rotary(True, 32), [(2, 71, 301, 96), (2, 1, 301, 96)]),
}


class Again(torch.autograd.Function):
    """A gated product whose backward also needs the product again, as the fused MLP's does: the sum
    stands for its use there.
    """

    @staticmethod
    def forward(ctx, kind, gate, up):
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        return gated_product(kind, gate, up)

    @staticmethod
    def backward(ctx, dy):
        dgate, dup, product = gated_gradients(ctx.kind, *ctx.saved_tensors, dy)
        return None, dgate + product, dup


def again(kind):
    return lambda gate, up: Again.apply(kind, gate, up)


def mixture(activation):
    """Three experts of which one has no token, with adapters of rank 8."""
    index = torch.tensor([[0, 2], [2, 0], [2, 0]]).repeat(4, 1)

    def run(x, w, up, down, up_a, up_b, down_a, down_b):
        adapters = {
            "up_adapter": Adapter(up_a, up_b, 0.5),
            "down_adapter": Adapter(down_a, down_b, 2.0),
        }
        return experts(
            x, index[: len(x)].to(x.device), w, up, down, activation=activation, **adapters
        )

    return run


MIXTURE = [
    (12, 16),
    (12, 2),
    (3, 48, 16),
    (3, 16, 24),
    (3, 8, 16),
    (3, 48, 8),
    (3, 8, 24),
    (3, 16, 8),
]
CASES = {
    "experts": (mixture("silu"), MIXTURE),
    "experts-clamped": (mixture(Clamped(1.7, 0.9)), MIXTURE),
    "cross_entropy": (loss(cross_entropy, {}, labels(5, 300)), [(5, 300)]),
    "cross_entropy-all": (
        loss(cross_entropy, {**ALL, "reduction": "none"}, labels(5, 300)),
        [(5, 300)],
    ),
    "cross_entropy-many-blocks": (loss(cross_entropy, {}, labels(2, 40001)), [(2, 40001)]),
    "linear_cross_entropy": (
        loss(linear_cross_entropy, {"chunk": 4}, labels(6, 40)),
        [(6, 8), (40, 8)],
    ),
    "linear_cross_entropy-none": (
        loss(linear_cross_entropy, {**ALL, "reduction": "none"}, labels(6, 40)),
        [(6, 8), (40, 8)],
    ),
    "linear_log_probs": (log_probs(("log_probs",), {"chunk": 4}, labels(6, 40)), [(6, 8), (40, 8)]),
    "linear_log_probs-all": (log_probs(OUTPUTS, SHAPED, labels(6, 300)), [(6, 8), (300, 8)]),
    "linear_divergence": (taught(0.0, chunk=4), TAUGHT),
    "linear_divergence-reverse": (taught(1.0, **TWO_RULES), TAUGHT),
    "linear_divergence-between": (taught(0.3, **TWO_RULES), TAUGHT),
    "rms_norm": (rms_norm, [(300, 24), (24,)]),
    "rms_norm-gemma": (lambda x, w: rms_norm(x, w, unit_offset=True), [(7, 24), (24,)]),
    "rms_norm-frozen": (lambda x, w: rms_norm(x, w.detach()), [(300, 24), (24,)]),
    "add_rms_norm": (
        lambda x, r, w: torch.cat(add_rms_norm(x, r, w)),
        [(300, 24), (300, 24), (24,)],
    ),
    "add_rms_norm-nothing": (
        lambda x, w: torch.cat(add_rms_norm(x, None, w.detach())),
        [(7, 24), (24,)],
    ),
    "gelu": (gelu, [(9, 200)]),
    "gelu-tanh-halves": (lambda both: gelu(both.chunk(2, -1)[1], approximate="tanh"), [(9, 400)]),
    "modulated_layer_norm": (modulated_layer_norm, [(2, 150, 24), (2, 24), (2, 24)]),
    "modulated_layer_norm-frozen": (
        lambda x, s: modulated_layer_norm(x, s.detach(), s.detach()),
        [(2, 7, 24), (2, 24)],
    ),
    "gated_residual": (gated_residual, [(2, 150, 24), (2, 150, 24), (2, 24)]),
    "gated_residual-frozen": (
        lambda r, x, gate: gated_residual(r, x, gate.detach()),
        [(2, 7, 24), (2, 7, 24), (2, 24)],
    ),
    "silu_mul-halves": (lambda both: silu_mul(*both.chunk(2, -1)), [(9, 400)]),
    "gelu_mul-halves": (lambda both: gelu_mul(*both.chunk(2, -1)), [(9, 400)]),
    "gelu_mul-tanh": (lambda g, u: gelu_mul(g, u, approximate="tanh"), [(9, 200), (9, 200)]),
    "silu_mul-again": (again("silu_mul"), [(9, 200), (9, 200)]),
    "gelu_mul-tanh-again": (again("gelu_mul tanh"), [(9, 200), (9, 200)]),
    "rope": (rotary(False, 4), [(2, 3, 5, 8), (2, 1, 5, 8)]),
    "rope-as-projected": (
        lambda q, k: rotary(False, 4)(q.transpose(1, 2), k.transpose(1, 2)),
        [(2, 5, 3, 8), (2, 5, 1, 8)],
    ),
    "rope-partial": (rotary(False, 3), [(2, 3, 5, 10), (2, 1, 5, 10)]),
    "rope-partial-interleaved": (rotary(True, 3), [(2, 3, 5, 10), (2, 1, 5, 10)]),
}


def results(op, inputs, backend):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with force_backend(backend):
        y = op(*leaves)
        y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(y))
    return [y, *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=pytest.mark.full),
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.full),
    ],
)
def test_kernels_compute_what_the_eager_path_does(dtype, subtests):
    for name, (op, shapes) in CASES.items():
        with subtests.test(name):
            compared(op, shapes, dtype)


def compared(op, shapes, dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(s).to(dtype) for s in shapes]
    want, truth = results(op, inputs, "eager"), results(op, [x.double() for x in inputs], "eager")
    with interpreted():
        got = results(op, inputs, "triton")
    for mine, theirs, exact in zip(got, want, truth, strict=True):
        assert mine.dtype == theirs.dtype
        # both narrow once: they differ where fp32 sums in another order round to the other
        # neighbour
        few = 4 * torch.finfo(mine.dtype if mine.dtype == dtype else torch.float32).eps
        assert error(mine, theirs) <= max(few, 4 * error(theirs, exact))


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("op", "shapes"),
    [*CASES.values(), *LARGE.values()],
    ids=[*CASES, *(f"large {name}" for name in LARGE)],
)
def test_kernels_on_a_gpu_are_as_near_to_fp64_as_the_eager_path_and_repeat_themselves(
    op, shapes, dtype
):
    torch.manual_seed(0)
    if DEVICE == "cpu":
        if any(n > 30000 for shape in shapes for n in shape):
            pytest.skip("too large for the interpreter")
        shapes = [(*(n if n <= 300 else 20 for n in shape[:-1]), shape[-1]) for shape in shapes]
    inputs = [torch.randn(s, device=DEVICE).to(dtype) for s in shapes]
    truth = results(op, [x.double() for x in inputs], "eager")
    theirs = results(op, inputs, "eager")
    with kernels():
        mine, again = (results(op, inputs, "triton") for _ in range(2))
    for ours, plain, exact, repeated in zip(mine, theirs, truth, again, strict=True):
        assert ours.dtype == plain.dtype
        assert torch.equal(ours, repeated)
        # sums of thousands of fp32 values differ by their order
        assert (
            error(ours, exact) <= FACTOR * error(plain, exact) + 16 * torch.finfo(torch.float32).eps
        )


def test_the_weights_gradient_is_summed_over_tiles_and_programs(monkeypatch):
    """128 columns make tiles of 16 rows; one multiprocessor has 4 programs: 19 tiles are runs of 5."""
    monkeypatch.setattr(norm_kernels, "multiprocessors", lambda device: 1)
    torch.manual_seed(0)
    inputs = [torch.randn(300, 128), torch.randn(128)]
    want = results(rms_norm, inputs, "eager")
    with interpreted():
        got = results(rms_norm, inputs, "triton")
        torch.testing.assert_close(got, want)
        assert all(
            torch.equal(a, b) for a, b in zip(got, results(rms_norm, inputs, "triton"), strict=True)
        )


def test_a_row_too_long_for_registers_takes_plain_pytorch():
    x, w = torch.randn(1, norm_kernels.MAX_COLUMNS + 1), torch.ones(norm_kernels.MAX_COLUMNS + 1)
    want = rms_norm(x, w)
    with force_backend("triton"):  # whose kernels cannot run outside the interpreter
        torch.testing.assert_close(rms_norm(x, w), want)


# forward and backward of each, with every constexpr flag, and the loss in one block and in several
COMPILED = (
    "experts", "experts-clamped", "cross_entropy", "cross_entropy-all", "cross_entropy-many-blocks", "linear_cross_entropy-none",
    "linear_log_probs", "linear_log_probs-all", "linear_divergence", "linear_divergence-reverse", "linear_divergence-between", "rms_norm",
    "rms_norm-gemma", "rms_norm-frozen", "add_rms_norm", "add_rms_norm-nothing", "gelu", "gelu-tanh-halves", "modulated_layer_norm",
    "modulated_layer_norm-frozen", "gated_residual", "gated_residual-frozen", "silu_mul-again", "gelu_mul-tanh-again", "rope",
    "rope-partial-interleaved",
)  # fmt: skip
# one of each file of kernels, for one target; the whole matrix is left to `make test-full`
SLICE = (
    "cross_entropy", "linear_log_probs", "linear_divergence", "rms_norm", "gelu_mul-tanh-again", "gated_residual", "rope",
    "experts-clamped",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "targets"),
    [(SLICE, ["sm_90"]), pytest.param(COMPILED, TARGETS, marks=pytest.mark.full)],
    ids=["slice", "all"],
)
def test_kernels_compile_for_every_dtype_integer_class_and_target(names, targets, subtests):
    """The front end for the whole matrix, machine code for one signature a dtype; a note (spills, a
    latent combination) fails too.
    """
    for name in names:
        op, shapes = CASES[name]

        def run(*inputs, op=op):
            with force_backend("triton"):
                return op(*inputs)

        for target in targets:
            with subtests.test(name, target=target):
                # one target at a time: the integers' classes (1, 0, 16, other) are varied on the
                # first target only fp16 logits of an odd number of classes: two values a thread of
                # 32 warps spill on sm_90
                fail_on = "warning" if name == "cross_entropy-many-blocks" else "note"
                compile_matrix(
                    run,
                    tuple(torch.randn(s, requires_grad=True) for s in shapes),
                    targets=[target],
                    fail_on=fail_on,
                    binary=True,
                )


def test_a_row_of_nan_poison_is_overwritten(monkeypatch):
    empty, empty_like = torch.empty, torch.empty_like

    def poison(t):
        return t.fill_(float("nan")) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    with interpreted():
        for op, shapes in CASES.values():
            assert all(
                t.isfinite().all() for t in results(op, [torch.randn(s) for s in shapes], "triton")
            )
