"""AC001 to AC004, AC014: what raises, gradients and outputs in the wrong dtype, and an OpContract
broken. AC008 to AC011: memory that belongs to someone else, written to. AC012: gradients that
depend on which other inputs are frozen.

The last five are looked for on one setting that runs, against the same function's own gradients;
they depend on no tolerance for dtypes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...dtypes import TensorSpec, name, parse
from ...finding import Finding, Place, Severity
from ...ops.contract import OpContract
from .attempt import (
    BACKWARD,
    Fault,
    Outcome,
    attempt,
    fault,
    incoming_gradient,
    method_at_fault,
    method_place,
    owner_of_method,
    return_of,
)
from .inexact import Numerics
from .locate import Failure, failure_of, shown
from .samples import Sample, Setting, Subject, parameter_names

_NO_KERNEL = re.compile(
    r"not implemented for|not supported on|no kernel|could not create a primitive|Could not run '|"
    r"not yet implemented|doesn't support|does not support|No available kernel|not currently"
    r" implemented",
    re.IGNORECASE,
)
# out= variants and in-place products take no part in autocast
# the keyword of a call: `out = x @ w` writes nothing into a buffer
_OUT = re.compile(r"[(,]\s*out\s*=(?!=)")
_IN_PLACE_PRODUCT = re.compile(r"\.(addmm|addmv|addbmm|baddbmm|addr|matmul|mm)_\(")
_SCATTER = re.compile(
    r"\b(scatter|scatter_add|scatter_reduce|index_put|index_add|index_copy|masked_scatter|copy)_?\(|\]\s*[-+*/]?=(?!=)"
)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines:
        return f"{type(error).__name__}: {lines[0][:200]}"
    return type(error).__name__


def legitimate(
    outcome: Outcome,
    setting: Setting,
    sample: Sample,
    subject: Subject,
    *,
    plain_runs: bool | None,
    declared: bool,
) -> str | None:
    """Why raising is right here, or None.

    plain_runs  whether the given reference runs under this setting; None without a reference
    declared    a contract promises that this combination runs
    """
    assert outcome.error is not None
    failure = failure_of(outcome.error)
    if _NO_KERNEL.search(str(outcome.error)) or isinstance(outcome.error, NotImplementedError):
        return "the backend has no kernel for these dtypes"
    if declared:
        return None
    if failure is not None and failure.raised_by_hand:
        return "the function refuses it on purpose"
    if plain_runs is not None:
        return None if plain_runs else "the reference refuses it too"
    if failure is None:
        return "plain PyTorch refuses it"
    if outcome.stage == BACKWARD:
        return None
    if setting.autocast is None:
        if len(sample.met(setting.by_group) | subject.captured_dtypes()) > 1:
            return "plain PyTorch refuses mixed dtypes with autocast off"
        return None
    if (
        failure.function is None
        and not _skips_autocast(failure)
        and not setting.produced_by_any_trainer(sample)
    ):
        return "plain PyTorch refuses it"
    return None


def finding_for(
    outcome: Outcome, setting: Setting, subject: Subject, *, severity: Severity
) -> tuple[tuple[object, ...], Finding]:
    """The finding for an outcome that raised, and what makes it the same fault as another."""
    assert outcome.error is not None
    failure = failure_of(outcome.error)
    place = failure.place if failure else subject.place
    if failure and failure.function:
        owner = failure.function
    else:
        owner = place.symbol or subject.label
    stage = outcome.stage or "forward"
    backward = stage == BACKWARD
    operands = _described(failure, outcome) if failure else []
    details = [("raised", first_line(outcome.error))]
    if failure and failure.source:
        details.append(("code", failure.expression))
    if operands:
        details.append(("met", ", ".join(operands)))
    if failure and len(failure.chain) > 1:
        details.append(("called from", "\n".join(failure.chain[-4:-1])))
    source = failure.source if failure else ""
    calls = outcome.calls[-1:]
    _, finding = fault(
        "AC001",
        Place(file=place.file, line=place.line, symbol=owner),
        details=tuple(details),
        severity=str(severity),
        backward=backward,
        owner=owner,
        stage=stage,
        error=first_line(outcome.error).split(": ", 1)[-1],
        mixed=f": {', '.join(operands)}" if operands else "",
        auto=name(setting.autocast) if setting.autocast else "",
        inside=setting.inside,
        out=_OUT.search(source),
        in_place=_IN_PLACE_PRODUCT.search(source),
        scatter=_SCATTER.search(source),
        incoming="/".join(sorted({name(t.dtype) for call in calls for t in call.incoming})),
        saved="/".join(sorted({name(t.dtype) for call in calls for t in call.saved()})),
        device=next((t.device.type for t in outcome.tensors.values()), "cuda"),
        observed=setting.describe(),
    )
    code = "AC002" if backward else "AC001"
    return (code, place.file, place.line), replace(finding, code=code)


def _described(failure: Failure, outcome: Outcome) -> list[str]:
    """`d bf16[2 3 4] (the incoming gradient)`, for each tensor that the failing expression names."""
    call = outcome.calls[-1] if outcome.calls and outcome.stage == BACKWARD else None
    said = []
    for word, tensor in failure.operands.items():
        if call is not None and _same_storage(tensor, call.incoming):
            role = " (the incoming gradient)"
        elif call is not None and _same_storage(tensor, call.saved()):
            role = " (a saved tensor)"
        else:
            owner = next(
                (n for n, t in outcome.tensors.items() if _same_storage(tensor, [t])), None
            )
            if owner and owner != word and not owner.startswith("input"):
                role = f" (input {owner})"
            else:
                role = ""
        said.append(f"{word} {shown(tensor)}{role}")
    return said


def _same_storage(tensor: Tensor, others: list[Tensor]) -> bool:
    try:
        return any(
            o.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            and o.dtype == tensor.dtype
            for o in others
        )
    except (RuntimeError, NotImplementedError):
        return False


def _skips_autocast(failure: Failure) -> bool:
    return bool(_OUT.search(failure.source) or _IN_PLACE_PRODUCT.search(failure.source))


def gradient_faults(outcome: Outcome, setting: Setting) -> list[Fault]:
    """Gradients that the engine had to cast.

    Narrower than everything in play: precision is lost, an error. In the autocast dtype, as plain
    autocast operators return them: right. In the dtype of another tensor of a mixed call: what a
    cast would have given, right. Wider than its tensor: cast without loss, a note.
    """
    faults = []
    for call in outcome.calls:
        met = {d for d in call.expected if d is not None} | {
            t.dtype for t in call.incoming if t.is_floating_point()
        }
        for i, (returned, expected) in enumerate(zip(call.returned or [], call.expected)):
            if (
                returned is None
                or expected is None
                or returned == expected
                or not returned.is_floating_point
            ):
                continue
            if setting.autocast is not None and returned == setting.autocast:
                continue
            wider = torch.finfo(returned).bits > torch.finfo(expected).bits
            if not wider and returned in met:
                continue
            owner = owner_of_method(call.function, "backward")
            argument = _argument(call.function, i)
            words: dict[str, Any] = {
                "owner": owner,
                "argument": argument,
                "wider": wider,
                "got": name(returned),
                "wanted": name(expected),
            }
            auto = name(setting.autocast) if setting.autocast else "off"
            faults.append(
                fault(
                    "AC003",
                    return_of(call.function, owner),
                    owner,
                    argument,
                    wider,
                    autocast=auto,
                    **words,
                )
            )
    return faults


def output_faults(
    outcome: Outcome, setting: Setting, sample: Sample, subject: Subject, plain: Outcome | None
) -> list[Fault]:
    """Outputs narrower than anything in play, or not in the dtype in which the reference returns
    them.
    """
    inputs = sample.met(setting.by_group)
    classes = outcome.functions
    most = max((sample.tensor(s).dim() for s in sample.slots), default=0)
    faults: list[Fault] = []
    for i, tensor in enumerate(outcome.values):
        dtype = tensor.dtype
        if dtype in inputs or dtype == setting.autocast:
            continue  # following an input, or autocast, is a decision; a dtype from nowhere is none
        if plain is not None:
            if plain.ran and i < len(plain.values):
                wanted = plain.values[i].dtype
            else:
                wanted = dtype
            against = "the reference returns"
            wider = torch.finfo(dtype).bits > torch.finfo(wanted).bits
            if wider and tensor.dim() < most:
                continue  # every fused loss returns fp32, which is no fault
        elif classes and not subject.captured_dtypes() and torch.finfo(dtype).bits < 32:
            wanted = max(inputs, key=lambda d: torch.finfo(d).bits)
            against = "every input is"
            wider = False
        else:
            continue
        if wanted == dtype:
            continue
        owner = owner_of_method(classes[0], "forward") if classes else subject.label
        place = method_place(classes[0], "forward", owner) if classes else subject.place
        words: dict[str, Any] = {
            "owner": owner,
            "wider": wider,
            "which": "its output" if len(outcome.values) == 1 else f"output {i}",
            "got": name(dtype),
            "against": against,
            "wanted": name(wanted),
            "setting": setting.describe(),
        }
        faults.append(fault("AC004", place, owner, i, wider, **words))
    return faults


def _argument(function: type[torch.autograd.Function], index: int) -> str:
    skip = 0 if function.setup_context is not torch.autograd.Function.setup_context else 1
    names = parameter_names(function.forward, skip=skip)
    return names[index] if index < len(names) else f"input {index}"


def contract_faults(
    outcome: Outcome, setting: Setting, subject: Subject, contract: OpContract
) -> list[Fault]:
    """What one run did against what was declared."""
    letters: dict[str, str] = {}  # as this call's inputs bind them, and the named sizes
    sizes: dict[str, Any] = {}
    for argument, spec in contract.inputs.items():
        if (given := outcome.tensors.get(argument)) is not None:
            spec.dtype_fault(name(given.dtype), letters)
            spec.shape_fault(tuple(given.shape), sizes)
    of_outputs = _output_faults(outcome, setting, subject, contract, letters, sizes)
    return [*of_outputs, *_gradient_faults(outcome, setting, contract, letters)]


def declared_output(
    spec: TensorSpec, setting: Setting, contract: OpContract, letters: dict[str, str]
) -> TensorSpec:
    """The output's spec under this setting: autocast may lower a free letter, or raise it to fp32."""
    if setting.autocast is not None and spec.is_free and contract.autocast != "ignored":
        return replace(
            spec, dtype=name(setting.autocast) if contract.autocast == "follows" else "fp32"
        )
    if (
        setting.autocast is not None
        and contract.autocast == "fp32"
        and spec.dtype in ("any", "float")
    ):
        return replace(spec, dtype="fp32")
    if spec.is_free:
        return replace(spec, dtype=letters.get(spec.dtype, spec.dtype))
    return spec


def _output_faults(
    outcome: Outcome,
    setting: Setting,
    subject: Subject,
    contract: OpContract,
    letters: dict[str, str],
    sizes: dict[str, Any],
) -> list[Fault]:
    floats = [
        spec
        for spec in contract.outputs
        if spec.is_free or not spec.dtype.startswith(("int", "uint", "bool"))
    ]
    faults = []
    if len(floats) != len(outcome.outputs):
        message = (
            f"{subject.label} returns {len(outcome.outputs)} floating outputs; {len(floats)} are"
            " declared"
        )
        return [
            _fault(
                ("count",),
                message,
                subject.place,
                contract.signature,
                f"{len(outcome.outputs)} outputs",
            )
        ]
    for i, (given, spec) in enumerate(zip(outcome.outputs, floats)):
        expected = declared_output(spec, setting, contract, letters)
        observed = name(given.dtype)
        which = "its output" if len(floats) == 1 else f"output {i}"
        wanted = expected.dtype_fault(observed, dict(letters))
        if wanted is not None:
            message = f"{subject.label} returns {which} in {observed}; its contract says {wanted}"
            seen = f"{observed} with {setting.describe()}"
            faults.append(
                _fault(
                    ("output", i, observed, wanted),
                    message,
                    subject.place,
                    f"{spec}, autocast {contract.autocast}",
                    seen,
                )
            )
        shape = spec.shape_fault(tuple(given.shape), dict(sizes))
        if shape is not None:
            message = f"{subject.label} returns {which} with {shape}"
            faults.append(
                _fault(("shape", i), message, subject.place, str(spec), str(list(given.shape)))
            )
    return faults


def _gradient_faults(
    outcome: Outcome, setting: Setting, contract: OpContract, letters: dict[str, str]
) -> list[Fault]:
    """Only gradients that reach an argument directly are judged; the op does not decide the result
    of a cast in between.
    """
    by_tensor = {id(t): n for n, t in outcome.tensors.items()}
    faults = []
    for call in outcome.calls:
        for leaf, returned in zip(call.leaves, call.returned or []):
            argument = by_tensor.get(id(leaf)) if leaf is not None else None
            if argument is None or argument not in contract.grads or returned is None:
                continue
            declared = contract.grads[argument]
            wanted = letters.get(declared) if len(declared) == 1 else parse(declared)
            if wanted is None or wanted == name(returned):
                continue
            owner = owner_of_method(call.function, "backward")
            message = (
                f"{owner} returns the gradient of {argument} in {name(returned)}; its contract says"
                f" {wanted}"
            )
            seen = f"{name(returned)} with {setting.describe()}"
            faults.append(
                _fault(
                    ("grad", argument, name(returned)),
                    message,
                    return_of(call.function, owner),
                    f"{argument}: {declared}",
                    seen,
                )
            )
    return faults


def _fault(
    key: tuple[object, ...], message: str, place: Place, declared: str, observed: str
) -> Fault:
    return fault("AC014", place, *key, message=message, declared=declared, observed=observed)


def aliasing_faults(
    numerics: Numerics, setting: Setting, baseline: Outcome, *, stable: bool
) -> list[Fault]:
    """`baseline` is an undisturbed run under the same setting, with its inputs watched; `stable`:
    two runs of it agree.
    """
    subject = numerics.subject
    faults = [*_overwritten_inputs(subject, baseline), *_written_gradient(subject, baseline)]
    if baseline.grads:
        faults += _expanded_gradient(numerics, setting, baseline)
        faults += _second_backward(numerics, setting, baseline)
        faults += _frozen_inputs(numerics, setting, baseline) if stable else []
    return faults


def _overwritten_inputs(subject: Subject, baseline: Outcome) -> list[Fault]:
    faults = []
    for argument, (tensor, before) in baseline.passed.items():
        if same(tensor.detach(), before):
            continue
        given_back = any(_overlap(tensor, out) for out in baseline.outputs)
        if given_back:
            continue  # an operator that is in place by intention returns what it wrote to
        # in-place code: autograd raises an error where it matters
        plain = not baseline.calls and bool(tensor._version)
        place = method_at_fault(
            subject, baseline, "forward" if argument in baseline.changed_by_forward else "backward"
        )
        faults.append(fault("AC011", place, name=argument, plain=plain))
    return faults


def _written_gradient(subject: Subject, baseline: Outcome) -> list[Fault]:
    fresh = [incoming_gradient(t, i) for i, t in enumerate(baseline.outputs) if t.requires_grad]
    if all(same(given, clean) for given, clean in zip(baseline.grad_outputs, fresh)):
        return []
    return [fault("AC008", method_at_fault(subject, baseline, "backward"))]


def _expanded_gradient(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """`f(x).sum().backward()` hands over one number seen as a whole tensor."""
    subject = numerics.subject
    sample = numerics.sample
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
    return _judged(
        "AC009",
        method_at_fault(subject, right, "backward"),
        given,
        right,
        setting,
        numerics,
        baseline,
    )


def _second_backward(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    subject = numerics.subject
    sample = numerics.sample
    twice = attempt(subject, sample, setting, passes=2)
    if twice.error is not None and twice.stage != BACKWARD:
        return []
    doubled = Outcome(grads={n: None if g is None else g * 2 for n, g in baseline.grads.items()})
    return _judged(
        "AC010", method_at_fault(subject, baseline, "backward"), twice, doubled, setting, numerics
    )


def _judged(
    code: str,
    place: Place,
    given: Outcome,
    right: Outcome,
    setting: Setting,
    numerics: Numerics,
    usual: Outcome | None = None,
) -> list[Fault]:
    """A fault where a run raises, other than by hand, or gives other gradients than it should."""
    if given.error is None:
        wrong = _differing(given, right, setting, numerics, usual)
        return [fault(code, place, wrong=wrong)] if wrong else []
    failure = failure_of(given.error)
    if failure is not None and failure.raised_by_hand:
        return []
    if failure:
        spot = Place(file=failure.place.file, line=failure.place.line, symbol=place.symbol)
    else:
        spot = place
    return [fault(code, spot, raised=first_line(given.error))]


def _frozen_inputs(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    subject = numerics.subject
    sample = numerics.sample
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
            place = Place(
                file=failure.place.file,
                line=failure.place.line,
                symbol=failure.function or place.symbol,
            )
            words: dict[str, Any] = {"raised": first_line(outcome.error)}
        else:
            others = [n for n in trainable if n != frozen]
            wrong = [
                n
                for n in others
                if not numerics.alike(outcome.grads.get(n), baseline.grads[n], setting)
            ]
            if not wrong:
                continue
            words = {
                "missing": ", ".join(n for n in wrong if outcome.grads.get(n) is None),
                "wrong": ", ".join(wrong),
            }
        faults.append(fault("AC012", place, frozen=frozen, **words))
    return faults


def _differing(
    given: Outcome,
    right: Outcome,
    setting: Setting,
    numerics: Numerics,
    usual: Outcome | None = None,
) -> str:
    """Names of the gradients that differ by more than the order of additions explains."""
    sizes = usual.grads if usual is not None else {}
    wrong = [
        n
        for n, g in right.grads.items()
        if not numerics.alike(given.grads.get(n), g, setting, usual=sizes.get(n))
    ]
    return ", ".join(wrong)


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit, NaN beside NaN."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and bool(torch.equal(torch.nan_to_num(left), torch.nan_to_num(right)))
    )


def _overlap(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
