"""AC019 to AC021: no rows at all, memory that was never written, and the gradient of a gradient.

Only hand-written functions and functions with a reference are checked, since edge cases of plain PyTorch are not faults of the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...finding import Place, Severity
from .attempt import BACKWARD, FORWARD, Outcome, attempt, floating, incoming_gradient
from .exact import exact
from .fault import Fault, fault, method_at_fault
from .numerics import Numerics
from .places import failure_of
from .raising import first_line
from .samples import Sample, emptied
from .settings import Setting
from .subjects import Subject
from .twin import plain_functions


def edge_faults(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """AC019 and AC020. `baseline` is an undisturbed run under the same setting, and two runs of it agree."""
    if not (baseline.functions or numerics.plain is not None):
        return []
    return [*_without_rows(numerics, setting, baseline), *_second_derivatives(numerics, baseline)]


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


def _yardstick(numerics: Numerics) -> tuple[Subject, Any] | None:
    """Plain PyTorch of the same mathematics, and the block to run it in: the reference, else the twin; None where there is neither."""
    if numerics.plain is not None:
        return numerics.plain, nullcontext
    return (numerics.subject, plain_functions) if numerics.twin_agrees else None


def _without_rows(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """Inputs without rows (an empty micro-batch, an expert without tokens) must give the result of plain PyTorch, or a deliberate error."""
    sample, plain = emptied(numerics.sample), _yardstick(numerics)
    if sample is None or plain is None:
        return []
    right = attempt(plain[0], sample, setting, around=plain[1])
    if not right.ran:
        return []
    given = attempt(numerics.subject, sample, setting, around=poisoned)
    spot = method_at_fault(numerics.subject, baseline, given.stage or FORWARD)
    if given.error is not None:
        failure = failure_of(given.error)
        if failure is None or failure.raised_by_hand:
            return []
        spot = Place(file=failure.place.file, line=failure.place.line, symbol=spot.symbol)
        message = f"{spot.symbol} raises where there are no rows: {first_line(given.error)}"
    else:
        wanted = right.results()
        wrong = [n for n, t in given.results().items() if n in wanted and not _alike_without_rows(t, wanted[n])]
        if not wrong:
            return []
        spot = method_at_fault(numerics.subject, baseline, _stage(wrong))
        message = f"{spot.symbol} gives another {', '.join(wrong)} than plain PyTorch where there are no rows"
    return [
        fault(
            "AC019",
            message,
            spot,
            "plain PyTorch takes tensors without rows: a micro-batch whose tokens are all masked away, an expert that no token chose; "
            "a grid of no programs, and a result that only the rows' loop writes, do not",
            "return early where there are no rows, with zeros for the gradients of weights",
            Severity.WARNING,
        )
    ]


def _alike_without_rows(given: Tensor, right: Tensor) -> bool:
    """Sums of nothing are exact; a finite value where plain PyTorch has 0 / 0 is no fault."""
    if given.shape != right.shape:
        return False
    given, right = given.detach().double(), right.detach().double()
    finite = torch.isfinite(right)
    return bool(torch.equal(given[finite], right[finite]))


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


def _second_derivatives(numerics: Numerics, baseline: Outcome) -> list[Fault]:
    plain = _yardstick(numerics)
    if plain is None or not baseline.grads or not baseline.functions:
        return []
    names = [n for n, g in baseline.grads.items() if g is not None]
    given = _twice_differentiated(numerics.subject, numerics.sample, names, nullcontext)
    right = _twice_differentiated(plain[0], numerics.sample, names, plain[1])
    if given is None or right is None:
        return []  # refused, which is its right
    wrong = [n for n in names if float((given[n] - right[n]).norm()) > 1e-5 * float(right[n].norm()) + 1e-12]
    if not wrong:
        return []
    spot = method_at_fault(numerics.subject, baseline, "backward")
    return [
        fault(
            "AC020",
            f"{spot.symbol} lets itself be differentiated, and the second derivative by {', '.join(wrong)} is wrong",
            spot,
            "to autograd whatever forward saved besides its inputs and outputs is a constant, and what a kernel wrote has no graph: "
            "terms of a second derivative (a gradient penalty, a Hessian) are missing without a word",
            "put @once_differentiable (torch.autograd.function) on backward, which then refuses; or, where torch.is_grad_enabled() in "
            "backward (create_graph=True), compute the gradients from the saved inputs with plain operators",
            Severity.NOTE,  # no trainer needs one
        )
    ]


def _twice_differentiated(subject: Subject, sample: Sample, names: list[str], around: Any) -> dict[str, Tensor] | None:
    """Name -> gradient of a fixed combination of the gradients of `names`, in fp64; None where that raises."""
    leaves, tensors = sample.fresh(None, exact=torch.float64)
    call, owned = subject.ready(None, exact=torch.float64)
    named = tensors | owned
    if not set(names) <= set(named):
        return None  # a reference that holds the subject's weights in a closure
    wanted = [named[n] for n in names]
    args, kwargs = sample.call_arguments(leaves)
    try:
        with exact(), around():
            outputs = [t for t in floating(call(*args, **kwargs)) if t.requires_grad]
            # as from a loss that is not linear in the outputs; @once_differentiable refuses nothing else
            incoming = [incoming_gradient(t, i).requires_grad_() for i, t in enumerate(outputs)]
            first = torch.autograd.grad(outputs, wanted, incoming, create_graph=True, allow_unused=True)
            total = sum((g * incoming_gradient(g, 10 + i)).sum() for i, g in enumerate(first) if g is not None and g.requires_grad)
            if isinstance(total, Tensor):
                total.backward()  # autograd.grad would not reach @once_differentiable's error
    except Exception:  # any exception is a refusal
        return None
    return {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in zip(names, wanted)}


__all__ = ["edge_faults", "poisoned", "unwritten_memory"]
