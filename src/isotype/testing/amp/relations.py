"""AC005, AC012, AC013, AC015, AC016, AC018: results that must not change under another condition. No exact result is needed:
freezing an input, scaling the loss, another memory layout, checkpointing or compiling must not change a gradient.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...finding import Finding, Place, Severity
from .attempt import FORWARD, Fault, Outcome, attempt, fault, method_at_fault
from .dtype_rules import first_line
from .locate import failure_of
from .numerics import Numerics
from .samples import Setting
from .subjects import Subject


def state_faults(outcome: Outcome, subject: Subject) -> list[Fault]:
    """Autocast, grad mode or the default dtype not put back."""
    faults = []
    for what, change in outcome.states:
        stage = what.rpartition(" ")[2]
        place = method_at_fault(subject, outcome, stage)
        faults.append(
            fault(
                "AC005",
                f"{place.symbol} leaves {what.split(' after ')[0]} changed",
                place,
                f"{what}: {change}; everything the caller runs next computes in other dtypes than its code says",
                "change it in a `with` block (torch.autocast(..., enabled=False), torch.enable_grad()), which puts it back "
                "after an exception too",
                observed=change,
            )
        )
    return faults


def relation_faults(numerics: Numerics, setting: Setting, baseline: Outcome, *, stable: bool) -> list[Fault]:
    """`baseline` is an undisturbed run under the same setting; `stable`: two runs of it agree."""
    if not baseline.grads or not stable:
        return []
    faults = [*_scaled_loss(numerics, setting, baseline), *_frozen_inputs(numerics, setting, baseline)]
    return [*faults, *_layout(numerics, setting, baseline)]


def _scaled_loss(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    subject, sample = numerics.subject, numerics.sample
    scaled = attempt(subject, sample, setting, grad_scale=4.0)
    if not scaled.ran:
        return []
    wrong = [
        n
        for n, g in baseline.grads.items()
        if g is not None and not numerics.alike(f"gradient of {n}", scaled.grads.get(n), g * 4, setting)
    ]
    if not wrong or not baseline.calls:
        return []
    place = method_at_fault(subject, baseline, "backward")
    # a gradient that is no derivative at all (a penalty added to logits) was not meant to be scaled
    meant = any(numerics.is_derivative(f"gradient of {n}") is False for n in wrong)
    return [
        fault(
            "AC015",
            f"{place.symbol} does not scale the gradient of {', '.join(wrong)} with the incoming gradient",
            place,
            "four times the incoming gradient must give four times the result: loss scaling (fp16), gradient accumulation and a "
            "loss that is one term of several rely on it",
            "multiply by the incoming gradient in backward, also when the gradient was made in forward",
            Severity.NOTE if meant else Severity.ERROR,
        )
    ]


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
            message = f"{place.symbol} raises when {frozen} is frozen: {first_line(outcome.error)}"
        else:
            others = [n for n in trainable if n != frozen]
            wrong = [n for n in others if not numerics.alike(f"gradient of {n}", outcome.grads.get(n), baseline.grads[n], setting)]
            if not wrong:
                continue
            missing = [n for n in wrong if outcome.grads.get(n) is None]
            what = f"no gradient for {', '.join(missing)}" if missing else f"another gradient for {', '.join(wrong)}"
            message = f"{place.symbol} gives {what} when {frozen} is frozen"
        faults.append(
            fault(
                "AC012",
                message,
                place,
                f"with {frozen}.requires_grad = False (LoRA, a frozen head) the other gradients must stay what they were",
                "ask ctx.needs_input_grad for each input by itself, and leave what the others need independent of it",
            )
        )
    return faults


def _layout(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """Another memory layout with the same values must give the same results, or be refused."""
    subject, sample = numerics.subject, numerics.sample

    def strided(t: Tensor) -> Tensor:
        if t.dim() < 2:
            wide = t.new_zeros((*t.shape, 2))
            wide[..., 0] = t
            return wide[..., 0] if t.dim() else t.clone()
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)

    outcome = attempt(subject, sample, setting, arrange=strided)
    if not outcome.ran:
        return []  # refusing a layout is the function's right
    right = baseline.results()
    wrong = [n for n, t in outcome.results().items() if n in right and not numerics.alike(n, t, right[n], setting)]
    if not wrong:
        return []
    place = method_at_fault(subject, baseline, FORWARD)
    return [
        fault(
            "AC016",
            f"{place.symbol} gives another {', '.join(wrong)} for the same values in another memory layout",
            place,
            "an input that is a transpose or a slice was read as if it were contiguous",
            "call .contiguous() on the inputs first, or pass their strides to the kernel",
        )
    ]


def wrapped_faults(numerics: Numerics, setting: Setting, baseline: Outcome, wraps: tuple[str, ...]) -> list[Fault]:
    """Under both gradient checkpointings, and a compiler if one was asked for, everything must stay what it was."""
    subject, sample = numerics.subject, numerics.sample
    faults: list[Fault] = []
    for wrap in wraps:
        compiled = wrap not in ("reentrant", "non-reentrant")
        if wrap == "reentrant" and (sample.behind_clone or not sample.differentiates_positionally()):
            continue  # torch itself cannot: it sees leaves that are positional arguments only
        outcome = attempt(subject, sample, replace(setting, wrap=wrap))
        place = method_at_fault(subject, baseline, "backward")
        under = f"torch.compile (backend {wrap})" if compiled else f"{wrap} gradient checkpointing"
        if outcome.error is not None:
            failure = failure_of(outcome.error)
            place = failure.place if failure else place
            message = f"{subject.label} raises under {under}: {first_line(outcome.error)}"
        else:
            right, given = baseline.results(), outcome.results()
            wrong = [n for n, t in right.items() if not numerics.alike(n, given.get(n), t, setting)]
            if not wrong:
                continue
            message = f"{subject.label} gives another {', '.join(wrong)} under {under}"
        finding: Finding = fault(
            "AC018" if compiled else "AC013",
            message,
            place,
            "the compiled graph computes something else than the code does eagerly"
            if compiled
            else "forward runs a second time during backward: it must compute the same with the same dtypes, and keep nothing "
            "between the two runs",
            "compare with backend='eager' and 'aot_eager' to see which stage differs"
            if compiled
            else "derive dtypes from the inputs and the autocast state that checkpoint restores, not from state kept from the first run",
            observed=setting.describe(),
        )[1]
        faults.append(((finding.code, wrap, place.line), finding))
    return faults


__all__ = ["relation_faults", "state_faults", "wrapped_faults"]
