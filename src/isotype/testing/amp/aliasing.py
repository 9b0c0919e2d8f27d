"""AC008 to AC011: memory that belongs to someone else, written to. AC012: gradients that depend on which other inputs are frozen.

All on one setting that runs, against the same function's own gradients; nothing here depends on a tolerance for dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...finding import Place
from .attempt import BACKWARD, Fault, Outcome, attempt, fault, incoming_gradient, method_at_fault
from .dtype_rules import first_line
from .locate import failure_of
from .numerics import Numerics
from .samples import Setting
from .subjects import Subject


def aliasing_faults(numerics: Numerics, setting: Setting, baseline: Outcome, *, stable: bool) -> list[Fault]:
    """`baseline` is an undisturbed run under the same setting, with its inputs watched; `stable`: two runs of it agree."""
    subject = numerics.subject
    faults = [*_overwritten_inputs(subject, baseline), *_written_gradient(subject, baseline)]
    if baseline.grads:
        faults += _expanded_gradient(numerics, setting, baseline)
        faults += _second_backward(numerics, setting, baseline)
        faults += _frozen_inputs(numerics, setting, baseline) if stable else []
    return faults


def _overwritten_inputs(subject: Subject, baseline: Outcome) -> list[Fault]:
    faults = []
    for name, (tensor, before) in baseline.passed.items():
        if same(tensor.detach(), before):
            continue
        given_back = any(_overlap(tensor, out) for out in baseline.outputs)
        if given_back:
            continue  # an operator that is in place by intention returns what it wrote to
        plain = not baseline.calls and bool(tensor._version)  # in-place code: autograd raises an error where it matters
        place = method_at_fault(subject, baseline, "forward" if name in baseline.changed_by_forward else "backward")
        faults.append(fault("AC011", place, name=name, plain=plain))
    return faults


def _written_gradient(subject: Subject, baseline: Outcome) -> list[Fault]:
    fresh = [incoming_gradient(t, i) for i, t in enumerate(baseline.outputs) if t.requires_grad]
    if all(same(given, clean) for given, clean in zip(baseline.grad_outputs, fresh)):
        return []
    return [fault("AC008", method_at_fault(subject, baseline, "backward"))]


def _expanded_gradient(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """`f(x).sum().backward()` hands over one number seen as a whole tensor."""
    subject, sample = numerics.subject, numerics.sample
    if all(t.dim() == 0 for t in baseline.outputs):
        return []

    def ones(t: Tensor, _: int) -> Tensor:
        return torch.ones_like(t)

    def expanded(t: Tensor, _: int) -> Tensor:
        return torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape)

    right = attempt(subject, sample, setting, gradient=ones)
    given = attempt(subject, sample, setting, gradient=expanded)
    if not right.ran:
        return []
    return _judged("AC009", method_at_fault(subject, right, "backward"), given, right, setting, numerics, baseline)


def _second_backward(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    subject, sample = numerics.subject, numerics.sample
    twice = attempt(subject, sample, setting, passes=2)
    if twice.error is not None and twice.stage != BACKWARD:
        return []
    doubled = Outcome(grads={n: None if g is None else g * 2 for n, g in baseline.grads.items()})
    return _judged("AC010", method_at_fault(subject, baseline, "backward"), twice, doubled, setting, numerics)


def _judged(
    code: str, place: Place, given: Outcome, right: Outcome, setting: Setting, numerics: Numerics, usual: Outcome | None = None
) -> list[Fault]:
    """A fault where a run raises, other than by hand, or gives other gradients than it should."""
    if given.error is None:
        wrong = _differing(given, right, setting, numerics, usual)
        return [fault(code, place, wrong=wrong)] if wrong else []
    failure = failure_of(given.error)
    if failure is not None and failure.raised_by_hand:
        return []
    spot = Place(file=failure.place.file, line=failure.place.line, symbol=place.symbol) if failure else place
    return [fault(code, spot, raised=first_line(given.error))]


def _frozen_inputs(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    subject, sample = numerics.subject, numerics.sample
    faults: list[Fault] = []
    trainable = [n for n, g in baseline.grads.items() if g is not None]
    if not 1 < len(trainable) <= 8:
        return []
    for frozen in trainable:
        outcome = attempt(subject, sample, setting, frozen=frozen)
        place = method_at_fault(subject, baseline, "backward")
        if outcome.error is not None:
            failure = failure_of(outcome.error)
            if failure is None or failure.raised_by_hand:
                continue
            place = Place(file=failure.place.file, line=failure.place.line, symbol=failure.function or place.symbol)
            words: dict[str, Any] = {"raised": first_line(outcome.error)}
        else:
            others = [n for n in trainable if n != frozen]
            wrong = [n for n in others if not numerics.alike(f"gradient of {n}", outcome.grads.get(n), baseline.grads[n], setting)]
            if not wrong:
                continue
            words = {"missing": ", ".join(n for n in wrong if outcome.grads.get(n) is None), "wrong": ", ".join(wrong)}
        faults.append(fault("AC012", place, frozen=frozen, **words))
    return faults


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
