"""AC003, AC004: gradients and outputs in the wrong dtype, judged by what a hand-written backward really returned."""

from __future__ import annotations

import torch

from ...dtypes import name
from ...finding import Finding, Place, Severity
from .attempt import Outcome
from .fault import Fault, method_place, owner_of_method, return_of
from .samples import Sample, parameter_names
from .settings import Setting
from .subjects import Subject
from .watch import BackwardCall


def gradient_faults(outcome: Outcome, setting: Setting) -> list[Fault]:
    """Gradients that the engine had to cast.

    Narrower than everything in play: precision is lost, an error. In the autocast dtype, as plain autocast operators return them: right.
    In the dtype of another tensor of a mixed call: what a cast would have given, right. Wider than its tensor: cast without loss, a note.
    """
    faults = []
    for call in outcome.calls:
        met = {d for d in call.expected if d is not None} | {t.dtype for t in call.incoming if t.is_floating_point()}
        for i, (returned, expected) in enumerate(zip(call.returned or [], call.expected)):
            if returned is None or expected is None or returned == expected or not returned.is_floating_point:
                continue
            if setting.autocast is not None and returned == setting.autocast:
                continue
            wider = torch.finfo(returned).bits > torch.finfo(expected).bits
            if not wider and returned in met:
                continue
            faults.append(_gradient_fault(call, i, returned, expected, setting, wider))
    return faults


def _gradient_fault(call: BackwardCall, i: int, returned: torch.dtype, expected: torch.dtype, setting: Setting, wider: bool) -> Fault:
    argument = _argument(call.function, i)
    owner = owner_of_method(call.function, "backward")
    place = return_of(call.function, owner)
    got, wanted = _word(returned), _word(expected)
    if wider:
        cause = (
            f"{argument} is {wanted}; backward returns its gradient in {got}, and the engine casts it without a word, so "
            ".grad.dtype looks right"
        )
        fix = (
            f"return it in its tensor's dtype: `d{argument}.to({argument}.dtype)`; until then it holds twice the memory, and "
            f"callers of backward by hand get {got}"
        )
    else:
        cause = (
            f"every tensor of this call is {'/'.join(sorted({wanted}))} and autocast is "
            f"{_word(setting.autocast) if setting.autocast else 'off'}, "
            f"yet the gradient of {argument} passes through {got}: rounded there, then cast back by the engine, so .grad.dtype looks right"
        )
        fix = (
            f"compute and return the gradient in the tensor's own dtype: `d{argument}.to({argument}.dtype)` and no narrower cast before it"
        )
    return ("AC003", owner, argument, wider), Finding(
        code="AC003",
        severity=Severity.NOTE if wider else Severity.ERROR,
        message=f"{owner} returns the gradient of {argument} in {got} where the tensor is {wanted}",
        place=place,
        declared=wanted,
        observed=got,
        cause=cause,
        fix=fix,
    )


def output_faults(outcome: Outcome, setting: Setting, sample: Sample, subject: Subject, plain: Outcome | None) -> list[Fault]:
    """Outputs narrower than anything in play, or not in the dtype in which the reference returns them."""
    inputs = sample.met(setting.by_group)
    classes = outcome.functions
    faults: list[Fault] = []
    for i, (tensor, dtype) in enumerate((t, t.dtype) for t in outcome.values):
        which = "its output" if len(outcome.values) == 1 else f"output {i}"
        if dtype in inputs or dtype == setting.autocast:
            continue  # following an input, or autocast, is a decision; a dtype from nowhere is none
        if plain is not None:
            wanted = plain.values[i].dtype if plain.ran and i < len(plain.values) else dtype
            if wanted == dtype:
                continue
            wider = torch.finfo(dtype).bits > torch.finfo(wanted).bits
            if wider and tensor.dim() < max((sample.tensor(s).dim() for s in sample.slots), default=0):
                continue  # every fused loss returns fp32, which is no fault
            severity, against = Severity.WARNING if wider else Severity.ERROR, "the reference returns"
        elif (
            classes and not subject.captured_dtypes() and dtype not in inputs and torch.finfo(dtype).bits < 32 and dtype != setting.autocast
        ):
            wanted, severity, against = max(inputs, key=lambda d: torch.finfo(d).bits), Severity.ERROR, "every input is"
            wider = False
        else:
            continue
        owner = owner_of_method(classes[0], "forward") if classes else subject.label
        faults.append(
            (
                ("AC004", owner, i, wider),
                Finding(
                    code="AC004",
                    severity=severity,
                    message=f"{owner} returns {which} in {_word(dtype)} where {against} {_word(wanted)}",
                    place=Place(file=subject.place.file, line=subject.place.line, symbol=owner)
                    if not classes
                    else method_place(classes[0], "forward", owner),
                    declared=_word(wanted),
                    observed=f"{_word(dtype)} with {setting.describe()}",
                    cause="what follows is promoted to the wider dtype, or the first matrix product that cannot mix dtypes raises"
                    if wider
                    else "a cast or a buffer in forward is written in a fixed dtype: precision is gone before the caller sees the result",
                    fix=f"return `{'out'}.to(...)` in the dtype decided from the inputs and autocast, not in one that an inner "
                    "step left over",
                ),
            )
        )
    return faults


def _argument(function: type[torch.autograd.Function], index: int) -> str:
    skip = 0 if function.setup_context is not torch.autograd.Function.setup_context else 1
    names = parameter_names(function.forward, skip=skip)
    return names[index] if index < len(names) else f"input {index}"


def _word(dtype: torch.dtype) -> str:
    return name(str(dtype))
