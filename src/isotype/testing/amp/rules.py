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
    faulty_method_location,
    incoming_gradient,
    method_location,
    method_name,
    return_location,
)
from .locate import Failure, find_failure, format_tensor
from .numerics import Numerics
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


def accepted_failure_reason(
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
    failure = find_failure(outcome.error)
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
        if len(sample.dtypes_in_play(setting.group_dtypes) | subject.captured_dtypes()) > 1:
            return "plain PyTorch refuses mixed dtypes with autocast off"
        return None
    if (
        failure.function is None
        and not _skips_autocast(failure)
        and not setting.produced_by_any_trainer(sample)
    ):
        return "plain PyTorch refuses it"
    return None


def failure_finding(
    outcome: Outcome, setting: Setting, subject: Subject, *, severity: Severity
) -> tuple[tuple[object, ...], Finding]:
    """The finding for an outcome that raised, and what makes it the same fault as another."""
    assert outcome.error is not None
    failure = find_failure(outcome.error)
    location = failure.location if failure else subject.location
    if failure and failure.function:
        owner = failure.function
    else:
        owner = location.symbol or subject.label
    stage = outcome.stage or "forward"
    backward = stage == BACKWARD
    operands = _describe_operands(failure, outcome) if failure else []
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
        Place(file=location.file, line=location.line, symbol=owner),
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
    return (code, location.file, location.line), replace(finding, code=code)


def _describe_operands(failure: Failure, outcome: Outcome) -> list[str]:
    """`d bf16[2 3 4] (the incoming gradient)`, for each tensor that the failing expression names."""
    call = outcome.calls[-1] if outcome.calls and outcome.stage == BACKWARD else None
    descriptions = []
    for operand_name, tensor in failure.operands.items():
        if call is not None and _same_storage(tensor, call.incoming):
            role = " (the incoming gradient)"
        elif call is not None and _same_storage(tensor, call.saved()):
            role = " (a saved tensor)"
        else:
            owner = next(
                (n for n, t in outcome.tensors.items() if _same_storage(tensor, [t])), None
            )
            if owner and owner != operand_name and not owner.startswith("input"):
                role = f" (input {owner})"
            else:
                role = ""
        descriptions.append(f"{operand_name} {format_tensor(tensor)}{role}")
    return descriptions


def _same_storage(tensor: Tensor, candidates: list[Tensor]) -> bool:
    try:
        return any(
            o.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            and o.dtype == tensor.dtype
            for o in candidates
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
        dtypes_in_play = {d for d in call.expected if d is not None} | {
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
            if not wider and returned in dtypes_in_play:
                continue
            owner = method_name(call.function, "backward")
            argument = _argument_name(call.function, i)
            values: dict[str, Any] = {
                "owner": owner,
                "argument": argument,
                "wider": wider,
                "got": name(returned),
                "expected": name(expected),
            }
            auto = name(setting.autocast) if setting.autocast else "off"
            faults.append(
                fault(
                    "AC003",
                    return_location(call.function, owner),
                    owner,
                    argument,
                    wider,
                    autocast=auto,
                    **values,
                )
            )
    return faults


def output_faults(
    outcome: Outcome, setting: Setting, sample: Sample, subject: Subject, reference: Outcome | None
) -> list[Fault]:
    """Outputs narrower than anything in play, or not in the dtype in which the reference returns
    them.
    """
    inputs = sample.dtypes_in_play(setting.group_dtypes)
    classes = outcome.functions
    max_dims = max((sample.tensor(s).dim() for s in sample.slots), default=0)
    faults: list[Fault] = []
    for i, tensor in enumerate(outcome.values):
        dtype = tensor.dtype
        if dtype in inputs or dtype == setting.autocast:
            continue  # following an input, or autocast, is a decision; a dtype from nowhere is none
        if reference is not None:
            if reference.ran and i < len(reference.values):
                expected = reference.values[i].dtype
            else:
                expected = dtype
            against = "the reference returns"
            wider = torch.finfo(dtype).bits > torch.finfo(expected).bits
            if wider and tensor.dim() < max_dims:
                continue  # every fused loss returns fp32, which is no fault
        elif classes and not subject.captured_dtypes() and torch.finfo(dtype).bits < 32:
            expected = max(inputs, key=lambda d: torch.finfo(d).bits)
            against = "every input is"
            wider = False
        else:
            continue
        if expected == dtype:
            continue
        owner = method_name(classes[0], "forward") if classes else subject.label
        location = method_location(classes[0], "forward", owner) if classes else subject.location
        values: dict[str, Any] = {
            "owner": owner,
            "wider": wider,
            "output": "its output" if len(outcome.values) == 1 else f"output {i}",
            "got": name(dtype),
            "against": against,
            "expected": name(expected),
            "setting": setting.describe(),
        }
        faults.append(fault("AC004", location, owner, i, wider, **values))
    return faults


def _argument_name(function: type[torch.autograd.Function], index: int) -> str:
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
        if (tensor := outcome.tensors.get(argument)) is not None:
            spec.dtype_fault(name(tensor.dtype), letters)
            spec.shape_fault(tuple(tensor.shape), sizes)
    output_faults_found = _declared_output_faults(
        outcome, setting, subject, contract, letters, sizes
    )
    return [*output_faults_found, *_declared_gradient_faults(outcome, setting, contract, letters)]


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


def _declared_output_faults(
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
            _contract_fault(
                ("count",),
                message,
                subject.location,
                contract.signature,
                f"{len(outcome.outputs)} outputs",
            )
        ]
    for i, (output, spec) in enumerate(zip(outcome.outputs, floats)):
        expected = declared_output(spec, setting, contract, letters)
        observed = name(output.dtype)
        output_name = "its output" if len(floats) == 1 else f"output {i}"
        mismatch = expected.dtype_fault(observed, dict(letters))
        if mismatch is not None:
            message = (
                f"{subject.label} returns {output_name} in {observed}; its contract says {mismatch}"
            )
            observed_text = f"{observed} with {setting.describe()}"
            faults.append(
                _contract_fault(
                    ("output", i, observed, mismatch),
                    message,
                    subject.location,
                    f"{spec}, autocast {contract.autocast}",
                    observed_text,
                )
            )
        shape = spec.shape_fault(tuple(output.shape), dict(sizes))
        if shape is not None:
            message = f"{subject.label} returns {output_name} with {shape}"
            faults.append(
                _contract_fault(
                    ("shape", i), message, subject.location, str(spec), str(list(output.shape))
                )
            )
    return faults


def _declared_gradient_faults(
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
            expected = letters.get(declared) if len(declared) == 1 else parse(declared)
            if expected is None or expected == name(returned):
                continue
            owner = method_name(call.function, "backward")
            message = (
                f"{owner} returns the gradient of {argument} in {name(returned)}; its contract says"
                f" {expected}"
            )
            observed_text = f"{name(returned)} with {setting.describe()}"
            faults.append(
                _contract_fault(
                    ("grad", argument, name(returned)),
                    message,
                    return_location(call.function, owner),
                    f"{argument}: {declared}",
                    observed_text,
                )
            )
    return faults


def _contract_fault(
    key: tuple[object, ...], message: str, location: Place, declared: str, observed: str
) -> Fault:
    return fault("AC014", location, *key, message=message, declared=declared, observed=observed)


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
    for argument, (tensor, original) in baseline.watched_inputs.items():
        if is_bit_identical(tensor.detach(), original):
            continue
        is_returned = any(_share_storage(tensor, out) for out in baseline.outputs)
        if is_returned:
            continue  # an operator that is in place by intention returns what it wrote to
        # in-place code: autograd raises an error where it matters
        is_autograd_checked = not baseline.calls and bool(tensor._version)
        location = faulty_method_location(
            subject, baseline, "forward" if argument in baseline.changed_by_forward else "backward"
        )
        faults.append(fault("AC011", location, name=argument, plain=is_autograd_checked))
    return faults


def _written_gradient(subject: Subject, baseline: Outcome) -> list[Fault]:
    fresh = [incoming_gradient(t, i) for i, t in enumerate(baseline.outputs) if t.requires_grad]
    if all(
        is_bit_identical(received, expected)
        for received, expected in zip(baseline.grad_outputs, fresh)
    ):
        return []
    return [fault("AC008", faulty_method_location(subject, baseline, "backward"))]


def _expanded_gradient(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """`f(x).sum().backward()` hands over one number seen as a whole tensor."""
    subject = numerics.subject
    sample = numerics.sample
    if all(t.dim() == 0 for t in baseline.outputs):
        return []

    def dense_gradient(t: Tensor, _: int) -> Tensor:
        return torch.ones_like(t)

    def expanded_gradient(t: Tensor, _: int) -> Tensor:
        return torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape)

    expected = attempt(subject, sample, setting, gradient=dense_gradient)
    actual = attempt(subject, sample, setting, gradient=expanded_gradient)
    if not expected.ran:
        return []
    return _compare_gradients(
        "AC009",
        faulty_method_location(subject, expected, "backward"),
        actual,
        expected,
        setting,
        numerics,
        baseline,
    )


def _second_backward(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    subject = numerics.subject
    sample = numerics.sample
    twice = attempt(subject, sample, setting, backward_passes=2)
    if twice.error is not None and twice.stage != BACKWARD:
        return []
    doubled = Outcome(grads={n: None if g is None else g * 2 for n, g in baseline.grads.items()})
    return _compare_gradients(
        "AC010",
        faulty_method_location(subject, baseline, "backward"),
        twice,
        doubled,
        setting,
        numerics,
    )


def _compare_gradients(
    code: str,
    location: Place,
    actual: Outcome,
    expected: Outcome,
    setting: Setting,
    numerics: Numerics,
    typical: Outcome | None = None,
) -> list[Fault]:
    """A fault where a run raises, other than by hand, or gives other gradients than it should."""
    if actual.error is None:
        wrong = _differing_gradients(actual, expected, setting, numerics, typical)
        return [fault(code, location, wrong=wrong)] if wrong else []
    failure = find_failure(actual.error)
    if failure is not None and failure.raised_by_hand:
        return []
    if failure:
        failure_location = Place(
            file=failure.location.file, line=failure.location.line, symbol=location.symbol
        )
    else:
        failure_location = location
    return [fault(code, failure_location, raised=first_line(actual.error))]


def _frozen_inputs(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    subject = numerics.subject
    sample = numerics.sample
    faults: list[Fault] = []
    trainable = [n for n, g in baseline.grads.items() if g is not None]
    if not 1 < len(trainable) <= 8:
        return []
    for frozen in trainable:
        outcome = attempt(subject, sample, setting, frozen=frozen)
        location = faulty_method_location(subject, baseline, "backward")
        if outcome.error is not None:
            failure = find_failure(outcome.error)
            if failure is None or failure.raised_by_hand:
                continue
            location = Place(
                file=failure.location.file,
                line=failure.location.line,
                symbol=failure.function or location.symbol,
            )
            values: dict[str, Any] = {"raised": first_line(outcome.error)}
        else:
            other_names = [n for n in trainable if n != frozen]
            wrong = [
                n
                for n in other_names
                if not numerics.equals_up_to_order(outcome.grads.get(n), baseline.grads[n], setting)
            ]
            if not wrong:
                continue
            values = {
                "missing": ", ".join(n for n in wrong if outcome.grads.get(n) is None),
                "wrong": ", ".join(wrong),
            }
        faults.append(fault("AC012", location, frozen=frozen, **values))
    return faults


def _differing_gradients(
    actual: Outcome,
    expected: Outcome,
    setting: Setting,
    numerics: Numerics,
    typical: Outcome | None = None,
) -> str:
    """Names of the gradients that differ by more than the order of additions explains."""
    sizes = typical.grads if typical is not None else {}
    wrong = [
        n
        for n, g in expected.grads.items()
        if not numerics.equals_up_to_order(actual.grads.get(n), g, setting, typical=sizes.get(n))
    ]
    return ", ".join(wrong)


def is_bit_identical(first: Tensor, second: Tensor) -> bool:
    """Bit for bit, NaN beside NaN."""
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and bool(torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)))
    )


def _share_storage(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
