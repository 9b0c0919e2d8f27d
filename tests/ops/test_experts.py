"""The op of stacked experts in each of its forms beside plain PyTorch, and the gradient of a
routing weight.
"""

import itertools
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isotype.ops import cpp
from isotype.ops.backend import force_backend
from tests.api import Clamped, StackState, dequantise_packed, experts_reference, groups
from tests.api import ops_experts_Adapter as Adapter
from tests.api import ops_experts_experts as experts
from tests.ops.test_packed import read
from tests.ops.trials import error
from tests.published import packed

TOKENS, PLACES, EXPERTS, HIDDEN, INNER, RANK = 37, 2, 5, 24, 19, 3
GATES = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "clamped": Clamped(1.7, 0.8),
    "relu": torch.relu,
}
COMPILED = pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")


@contextmanager
def on_the_kernels_of_a_gpu():
    from isotype.testing.interpreter import interpreted

    with interpreted(), force_backend("triton"):
        yield


class Call:
    """One call and its gradients. Values are drawn in fp64 and rounded to `dtype`; adapters are
    `adapter`.
    """

    def __init__(
        self,
        *,
        gate="silu",
        biased=False,
        transposed=False,
        lora=False,
        dtype=torch.float64,
        adapter=None,
        hidden=HIDDEN,
        inner=INNER,
    ):
        generator = torch.Generator().manual_seed(0)

        def made(*shape, dtype=dtype):
            return (
                (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5)
                .to(dtype)
                .requires_grad_()
            )

        width = inner if gate == "relu" else 2 * inner
        self.x, self.w = made(TOKENS, hidden), made(TOKENS, PLACES)
        # the last expert has no row
        self.index = torch.stack(
            [torch.randperm(EXPERTS - 1, generator=generator)[:PLACES] for _ in range(TOKENS)]
        )
        self.up = made(*((EXPERTS, hidden, width) if transposed else (EXPERTS, width, hidden)))
        self.down = made(*((EXPERTS, inner, hidden) if transposed else (EXPERTS, hidden, inner)))
        self.leaves = {"x": self.x, "w": self.w, "up": self.up, "down": self.down}
        self.options = {"activation": GATES[gate], "transposed": transposed}
        adapter = adapter or dtype
        for name, rows, columns in (("up", width, hidden), ("down", hidden, inner)):
            if biased:
                self.leaves[f"{name}_bias"] = self.options[f"{name}_bias"] = made(EXPERTS, rows)
            if lora:
                # B as PEFT keeps it: the expert is its fast index
                a, b = (
                    made(EXPERTS, RANK, columns, dtype=adapter),
                    made(rows, RANK, EXPERTS, dtype=adapter),
                )
                self.leaves |= {f"{name}_a": a, f"{name}_b": b}
                self.options[f"{name}_adapter"] = Adapter(a, b.permute(2, 0, 1), 2.0)
        self.dy = made(TOKENS, hidden).detach()

    def run(self, op, **more):
        y = op(self.x, self.index, self.w, self.up, self.down, **self.options, **more)
        grads = torch.autograd.grad(y, tuple(self.leaves.values()), self.dy.to(y.dtype))
        return {"y": y.detach(), **dict(zip(self.leaves, grads, strict=True))}


FORMS = list(itertools.product(GATES, (False, True), (False, True), (False, True)))


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("eager", torch.float64), pytest.param("cpp", torch.float32, marks=COMPILED)],
)
def test_every_form_gives_plain_pytorchs_output_and_gradients(dtype, backend, monkeypatch):
    monkeypatch.setattr(groups, "ROWS_PER_PART", 30)
    for gate, biased, transposed, lora in FORMS:
        call = Call(gate=gate, biased=biased, transposed=transposed, lora=lora, dtype=dtype)
        with force_backend(backend):
            got = call.run(experts)
        for name, want in call.run(experts_reference).items():
            assert got[name].dtype == want.dtype
            assert error(got[name], want) < (1e-12 if dtype == torch.float64 else 5e-6), (
                name,
                gate,
                biased,
                transposed,
                lora,
            )


@pytest.mark.parametrize(
    ("form", "transposed", "path"),
    [
        ("mxfp4-ct", True, nullcontext),
        pytest.param("gptq-v2", False, on_the_kernels_of_a_gpu, marks=pytest.mark.full),
        pytest.param("fp8-block", False, on_the_kernels_of_a_gpu, marks=pytest.mark.full),
    ],
)
def test_packed_stacks_are_as_exact_as_the_dense_weights_that_they_mean(
    form, transposed, path, monkeypatch
):
    """A few experts are wide at a time: no tensor is as large as half of the larger stack."""
    monkeypatch.setattr(groups, "ROWS_PER_PART", 30)
    monkeypatch.setattr(groups, "EXPERTS_AT_ONCE", 2)
    options, sizes = (
        {"gate": "silu", "lora": True, "transposed": transposed},
        {"hidden": 64, "inner": 32},
    )
    call = Call(**options, **sizes, dtype=torch.bfloat16, adapter=torch.float32)
    exact = Call(**options, **sizes)
    states = {}
    for name, (o, i) in {"up": (64, 64), "down": (64, 32)}.items():
        weight, states[f"{name}_state"] = packed_stack(form, o, i, transposed=transposed)
        for one in (call, exact):
            one.leaves.pop(name)
        wide = dequantise_packed(weight, states[f"{name}_state"], torch.float64)
        setattr(exact, name, wide)
        setattr(call, name, wide.bfloat16())
        states[name] = weight
    for name, leaf in exact.leaves.items():
        leaf.data.copy_(call.leaves[name].data)
    exact.dy.copy_(call.dy)
    truth = exact.run(experts_reference)
    with path():
        plain = call.run(experts)
    call.up, call.down = states.pop("up"), states.pop("down")
    half = EXPERTS * 64 * 64 // 2
    with path(), Largest() as seen:
        got = call.run(experts, **states)
    assert seen.elements < half
    for name, want in truth.items():
        assert got[name].dtype == (torch.float32 if name[-2:] in ("_a", "_b") else torch.bfloat16)
        assert error(got[name], want) <= 1.5 * error(plain[name], want), name


def packed_stack(form, o, i, *, transposed):
    """The bytes of EXPERTS random matrices [o i] in this format, and their state."""
    torch.manual_seed(0)
    made = [read(form, packed(form, o, i), (o, i)) for _ in range(EXPERTS)]
    first = made[0][1]
    tensors = {
        name: torch.stack([state.tensors[name][None] for _, state in made])
        for name in first.tensors
    }
    state = StackState(
        first.layout, first.dtype_name, tensors, experts=EXPERTS, pieces=1, transposed=transposed
    )
    return torch.stack([weight for weight, _ in made]).flatten(), state


class Largest(TorchDispatchMode):
    """Counts the elements of the largest floating tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for t in made if isinstance(made, tuple | list) else [made]:
            if isinstance(t, torch.Tensor) and t.is_floating_point() and not function.is_view:
                self.elements = max(self.elements, t.numel())
        return made


def test_the_gradient_of_a_routing_weight_of_zero_is_exact():
    call = Call(dtype=torch.float64)
    with torch.no_grad():
        call.w.zero_()
    got, want = call.run(experts), call.run(experts_reference)
    assert want["w"].abs().min() > 0
    assert error(got["w"], want["w"]) < 1e-12


def test_no_expert_output_is_kept():
    """x, the first layer's output, products with A, and the order of the rows: nothing of rows
    times hidden features besides x.
    """
    call, kept = Call(lora=True, dtype=torch.float32), []
    weights = {t.untyped_storage().data_ptr() for name, t in call.leaves.items() if name != "x"}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts(call.x, call.index, call.w, call.up, call.down, **call.options)
    rows = TOKENS * PLACES
    of_rows = {
        tuple(t.shape)
        for t in kept
        if t.untyped_storage().data_ptr() not in weights and t.shape[:1] == (rows,)
    }
    assert of_rows == {(rows, 2 * INNER), (rows, RANK), (rows,)}
