"""AC008 to AC011: memory that belongs to someone else, written to; AC021: memory that was never written.

All on one setting that runs, against the same function's own gradients; nothing here depends on a tolerance for dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...finding import Place, Severity
from .attempt import BACKWARD, FORWARD, Fault, Outcome, attempt, fault, incoming_gradient, method_at_fault
from .dtype_rules import first_line
from .locate import failure_of
from .numerics import Numerics
from .samples import Setting
from .subjects import Subject


def aliasing_faults(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """`baseline` is an undisturbed run under the same setting, with its inputs watched."""
    subject = numerics.subject
    faults = [*_overwritten_inputs(subject, baseline), *_written_gradient(subject, baseline)]
    if baseline.grads:
        faults += _strange_gradients(numerics, setting, baseline)
        faults += _second_backward(numerics, setting, baseline)
    return faults


def _overwritten_inputs(subject: Subject, baseline: Outcome) -> list[Fault]:
    faults = []
    for name, (tensor, before) in baseline.passed.items():
        if same(tensor.detach(), before):
            continue
        given_back = any(_overlap(tensor, out) for out in baseline.outputs)
        if given_back:
            continue  # an operator that is in place by intention returns what it wrote to
        if not baseline.calls and tensor._version:
            severity = Severity.NOTE  # plain in-place code: autograd raises an error where it matters
        else:
            severity = Severity.ERROR
        place = method_at_fault(subject, baseline, "forward" if name in baseline.changed_by_forward else "backward")
        faults.append(
            fault(
                "AC011",
                f"{place.symbol} overwrites its caller's tensor {name}",
                place,
                f"{name} holds other values afterwards: whoever else uses it (a second loss, a metric, a residual) reads the "
                "gradient or scratch written there",
                "write into a tensor of your own (`torch.empty_like(...)`); where the memory matters, declare it with "
                "ctx.mark_dirty and return it",
                severity,
            )
        )
    return faults


def _written_gradient(subject: Subject, baseline: Outcome) -> list[Fault]:
    fresh = [incoming_gradient(t, i) for i, t in enumerate(baseline.outputs) if t.requires_grad]
    if all(same(given, clean) for given, clean in zip(baseline.grad_outputs, fresh)):
        return []
    place = method_at_fault(subject, baseline, "backward")
    return [
        fault(
            "AC008",
            f"{place.symbol} writes into the incoming gradient",
            place,
            "the engine hands the same gradient to every consumer of the sum it belongs to (`x + f(x)`), so the others receive "
            "what was written there",
            "write into a tensor of your own (`torch.empty_like(d)`), and return that",
        )
    ]


def _strange_gradients(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """`f(x).sum().backward()` hands over one number seen as a whole tensor; a transpose after f, a transposed gradient."""
    subject, sample = numerics.subject, numerics.sample
    if all(t.dim() == 0 for t in baseline.outputs):
        return []

    def ones(t: Tensor, _: int) -> Tensor:
        return torch.ones_like(t)

    def expanded(t: Tensor, _: int) -> Tensor:
        return torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape)

    def transposed(t: Tensor, i: int) -> Tensor:
        dense = incoming_gradient(t, i)
        return dense.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else dense

    faults = []
    for gradient, right, kind in (
        (expanded, attempt(subject, sample, setting, gradient=ones), "expanded"),
        (transposed, baseline, "transposed"),
    ):
        given = attempt(subject, sample, setting, gradient=gradient)
        if right.ran:
            faults += _strange_gradient(given, right, kind, _differing(given, right, setting, numerics, baseline), subject)
    return faults


def _strange_gradient(given: Outcome, right: Outcome, kind: str, wrong: str, subject: Subject) -> list[Fault]:
    place = method_at_fault(subject, right, "backward")
    severity = Severity.ERROR
    if given.error is not None:
        failure = failure_of(given.error)
        if failure is not None and failure.raised_by_hand:
            return []
        place = Place(file=failure.place.file, line=failure.place.line, symbol=place.symbol) if failure else place
        message = f"{place.symbol} raises on an {kind} gradient: {first_line(given.error)}".replace("an tr", "a tr")
        severity = Severity.ERROR if kind == "expanded" else Severity.NOTE  # at least it is loud
    elif wrong:
        message = f"{place.symbol} gives a wrong gradient of {wrong} for an {kind} incoming gradient".replace("an tr", "a tr")
    else:
        return []
    return [
        fault(
            "AC009",
            message,
            place,
            "`f(x).sum().backward()` and `.mean()` hand backward one number expanded over the whole shape (stride 0), and a "
            "transpose after f a "
            "transposed gradient; code that assumes a dense layout, or writes into it, reads or writes the wrong memory",
            "call `d = d.contiguous()` first, use .reshape instead of .view, and pass strides to kernels",
            severity,
        )
    ]


def _second_backward(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    subject, sample = numerics.subject, numerics.sample
    twice = attempt(subject, sample, setting, passes=2)
    place = method_at_fault(subject, baseline, "backward")
    if twice.error is not None:
        failure = failure_of(twice.error)
        if twice.stage != BACKWARD or (failure is not None and failure.raised_by_hand):
            return []
        spot = Place(file=failure.place.file, line=failure.place.line, symbol=place.symbol) if failure else place
        message = f"{place.symbol} raises the second time it runs over one graph: {first_line(twice.error)}"
        severity = Severity.WARNING
    else:
        doubled = Outcome(grads={n: None if g is None else g * 2 for n, g in baseline.grads.items()})
        wrong = _differing(twice, doubled, setting, numerics)
        if not wrong:
            return []
        spot, message = place, f"{place.symbol} gives another gradient of {wrong} the second time it runs over one graph"
        severity = Severity.ERROR
    return [
        fault(
            "AC010",
            message,
            spot,
            "the first run consumed or overwrote what it had saved; with retain_graph=True, two losses over one graph, or a "
            "gradient penalty, "
            "the second run is wrong",
            "leave saved tensors and incoming gradients as they are: multiply out of place (`g * d`, not `g.mul_(d)`), and "
            "write into new tensors",
            severity,
        )
    ]


def _differing(given: Outcome, right: Outcome, setting: Setting, numerics: Numerics, usual: Outcome | None = None) -> str:
    """Names of the gradients that differ by more than the order of additions explains."""
    sizes = usual.grads if usual is not None else {}
    wrong = [
        n for n, g in right.grads.items() if not numerics.alike(f"gradient of {n}", given.grads.get(n), g, setting, usual=sizes.get(n))
    ]
    return ", ".join(wrong)


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit, NaN beside NaN."""
    return left.shape == right.shape and left.dtype == right.dtype and bool(torch.equal(torch.nan_to_num(left), torch.nan_to_num(right)))


def _overlap(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


@contextmanager
def poisoned() -> Iterator[None]:
    """Within this block fresh memory (`torch.empty` and the like) holds NaN, and integers their largest value."""
    on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # a module whose one setting is a property, which its annotations do not show
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warns)
        memory.fill_uninitialized_memory = filled


def unwritten_memory(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """AC021. Checked first, since this fault would look like many others."""
    if not (baseline.functions or numerics.plain is not None):
        return []
    given = attempt(numerics.subject, numerics.sample, setting, around=poisoned)
    if not given.ran:
        return []
    right = baseline.results()
    wrong = [n for n, t in given.results().items() if n in right and bool((torch.isfinite(right[n]) & ~torch.isfinite(t)).any())]
    if not wrong:
        return []
    spot = method_at_fault(numerics.subject, baseline, _stage(wrong))
    return [
        fault(
            "AC021",
            f"{spot.symbol} returns memory it never wrote in its {', '.join(wrong)}",
            spot,
            "with fresh memory filled with NaN, NaN is in the result: an element was left as `torch.empty` handed it out. It is usually "
            "zero or a value of the last step, so that nobody notices",
            "write every element, masked rows and the tail of the last block too, or allocate with torch.zeros",
        )
    ]


def _stage(results: list[str]) -> str:
    return BACKWARD if all(n.startswith("gradient") for n in results) else FORWARD
