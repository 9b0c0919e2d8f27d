"""Defines the rules about exceptions, dtypes, writes to inputs, and frozen inputs.

AC001, AC002  exceptions in forward and in backward
AC003, AC004  gradients and outputs in the wrong dtype
AC008, AC011  writes into the incoming gradient, and into an input
AC009, AC010  wrong gradients if the incoming gradient is an expanded tensor, and in a second
              backward
AC012         gradients that change if another input is frozen
AC014         results that differ from the OpContract

AC008 to AC012 are checked with only one combination of dtypes, with which the function runs without
an error. The gradients are compared with gradients of the same function in the same dtypes, so the
comparison needs no tolerance for dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...dtypes import TensorSpec, format_dtype, parse
from ...finding import Finding, Place, Severity
from ...ops.contract import OpContract
from .attempt import (
    BACKWARD,
    FORWARD,
    BackwardCall,
    Fault,
    Outcome,
    attempt,
    faulty_method_location,
    incoming_gradient,
    make_fault,
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
    r" implemented|has no CPU version",  # the last one is of Triton's interpreter
    re.IGNORECASE,
)
# FFTs in bf16
_UNSUPPORTED_DTYPE = re.compile(r"Unsupported dtype (\w+)")
# autocast ignores out= and in-place products. Only a keyword argument is matched, since an
# assignment such as `out = x @ w` writes into no buffer
_OUT = re.compile(r"[(,]\s*out\s*=(?!=)")
_IN_PLACE_PRODUCT = re.compile(r"\.(addmm|addmv|addbmm|baddbmm|addr|matmul|mm)_\(")
_SCATTER = re.compile(
    r"\b(scatter|scatter_add|scatter_reduce|index_put|index_add|index_copy|masked_scatter|copy)_?\(|\]\s*[-+*/]?=(?!=)"
)


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    name_of_type = type(error).__name__
    for line in str(error).splitlines():
        if line.strip():
            return f"{name_of_type}: {line.strip()[:200]}"
    return name_of_type


def accepted_failure_reason(
    outcome: Outcome,
    setting: Setting,
    sample: Sample,
    subject: Subject,
    *,
    does_reference_run: bool | None,
    has_contract: bool,
) -> str | None:
    """The function raised an exception with this combination of dtypes. If this is acceptable,
    returns the reason why. Returns None if the exception is a fault.

    does_reference_run  whether the reference runs under this setting; None without a reference
    has_contract        whether a contract declares that this combination runs
    """
    assert outcome.error is not None
    failure = find_failure(outcome.error)
    if _NO_KERNEL.search(str(outcome.error)) or isinstance(outcome.error, NotImplementedError):
        return "the backend has no kernel for these dtypes"
    if has_contract:
        return None
    if failure is not None and failure.is_raised_by_user:
        return "the function refuses it on purpose"
    if does_reference_run:
        return None
    if does_reference_run is not None:
        return "the reference refuses it too"
    if failure is None:
        return "plain PyTorch refuses it"
    if outcome.stage == BACKWARD:
        return None
    if setting.autocast is None:
        dtypes = sample.dtypes_in_play(setting.group_dtypes) | subject.captured_dtypes()
        if len(dtypes) > 1:
            return "plain PyTorch refuses mixed dtypes with autocast off"
        return None
    if failure.function is not None or _skips_autocast(failure):
        return None
    if setting.may_come_from_trainer(sample):
        return None
    return "plain PyTorch refuses it"


def failure_finding(
    outcome: Outcome, setting: Setting, subject: Subject, *, severity: Severity
) -> tuple[tuple[object, ...], Finding]:
    """Returns a key and a finding for a run that raised an error. Findings of the same fault have
    the same key.
    """
    assert outcome.error is not None
    failure = find_failure(outcome.error)
    location = subject.location
    operands: list[str] = []
    source = ""
    details = [("raised", first_line(outcome.error))]
    if failure:
        location = failure.location
        operands = _describe_operands(failure, outcome)
        source = failure.source
        if source:
            details.append(("code", failure.expression))
        if operands:
            details.append(("met", ", ".join(operands)))
        if len(failure.chain) > 1:
            details.append(("called from", "\n".join(failure.chain[-4:-1])))
    if failure and failure.function:
        owner = failure.function
    else:
        owner = location.symbol or subject.label
    stage = outcome.stage or "forward"
    mixed = ""
    if operands:
        mixed = f": {', '.join(operands)}"
    autocast_name = ""
    if setting.autocast:
        autocast_name = format_dtype(setting.autocast)
    device = "cuda"
    for tensor in outcome.tensors.values():
        device = tensor.device.type
        break
    incoming: list[Tensor] = []
    saved: list[Tensor] = []
    if outcome.calls:
        incoming = outcome.calls[-1].incoming
        saved = outcome.calls[-1].saved()
    _, finding = make_fault(
        "AC001",
        Place(file=location.file, line=location.line, symbol=owner),
        details=tuple(details),
        severity=str(severity),
        backward=stage == BACKWARD,
        owner=owner,
        stage=stage,
        error=first_line(outcome.error).split(": ", 1)[-1],
        mixed=mixed,
        auto=autocast_name,
        inside=setting.is_backward_in_autocast,
        out=_OUT.search(source),
        in_place=_IN_PLACE_PRODUCT.search(source),
        scatter=_SCATTER.search(source),
        incoming=_join_dtypes(incoming),
        saved=_join_dtypes(saved),
        device=device,
        observed=setting.describe(),
        unsupported=_unsupported_dtype(outcome.error),
        unpromoted="at::autocast::prioritize" in str(outcome.error),
    )
    code = "AC001"
    if stage == BACKWARD:
        code = "AC002"
    return (code, location.file, location.line), replace(finding, code=code)


def _unsupported_dtype(error: BaseException) -> str:
    """Returns the dtype that an operator does not accept, or "" if the error is another one."""
    match = _UNSUPPORTED_DTYPE.search(str(error))
    if match is None:
        return ""
    names = {"BFloat16": "bf16", "Half": "fp16", "Float": "fp32", "Double": "fp64"}
    return names.get(match[1], match[1])


def _join_dtypes(tensors: Sequence[Tensor]) -> str:
    """Returns the dtypes as text, such as `bf16/fp32`."""
    return "/".join(sorted({format_dtype(tensor.dtype) for tensor in tensors}))


def _describe_operands(failure: Failure, outcome: Outcome) -> list[str]:
    """Describes each tensor in the failing expression, such as `d bf16[2 3 4] (the incoming
    gradient)`.
    """
    call = None
    if outcome.calls and outcome.stage == BACKWARD:
        call = outcome.calls[-1]
    descriptions = []
    for operand_name, tensor in failure.operands.items():
        if call is not None and _same_storage(tensor, call.incoming):
            role = " (the incoming gradient)"
        elif call is not None and _same_storage(tensor, call.saved()):
            role = " (a saved tensor)"
        else:
            role = _input_role(operand_name, tensor, outcome)
        descriptions.append(f"{operand_name} {format_tensor(tensor)}{role}")
    return descriptions


def _input_role(operand_name: str, tensor: Tensor, outcome: Outcome) -> str:
    """Returns a text such as ` (input weight)` if the tensor is an input that has another name
    outside the function. Returns "" otherwise.
    """
    for input_name, candidate in outcome.tensors.items():
        if _same_storage(tensor, [candidate]):
            if input_name != operand_name and not input_name.startswith("input"):
                return f" (input {input_name})"
            return ""
    return ""


def _same_storage(tensor: Tensor, candidates: list[Tensor]) -> bool:
    """True if one of the candidates has the same memory and the same dtype as the tensor. Returns
    False if the tensor has no memory address.
    """
    try:
        address = tensor.untyped_storage().data_ptr()
        for candidate in candidates:
            if candidate.dtype != tensor.dtype:
                continue
            if candidate.untyped_storage().data_ptr() == address:
                return True
    except (RuntimeError, NotImplementedError):
        return False
    return False


def _skips_autocast(failure: Failure) -> bool:
    """True if the line that failed contains a matrix product that writes in place or has an
    argument `out=`. Autocast does not cast the operands of such products.
    """
    return bool(_OUT.search(failure.source) or _IN_PLACE_PRODUCT.search(failure.source))


def gradient_faults(outcome: Outcome, setting: Setting) -> list[Fault]:
    """Returns a fault AC003 for each gradient that the autograd engine had to cast.

    A gradient that is narrower than every tensor of the call is an error, because precision is
    lost. A gradient in the autocast dtype is accepted, because plain operators return such
    gradients under autocast. A gradient that has the dtype of another tensor in the call is
    accepted too, because the backward of a cast returns such gradients. A gradient that is wider
    than its tensor is reported as a note, because it can be cast without loss.
    """
    faults = []
    for call in outcome.calls:
        dtypes_in_play = {dtype for dtype in call.expected if dtype is not None}
        dtypes_in_play |= {t.dtype for t in call.incoming if t.is_floating_point()}
        pairs = zip(call.returned or [], call.expected)
        for i, (returned, expected) in enumerate(pairs):
            if returned is None or expected is None or returned == expected:
                continue
            if not returned.is_floating_point:
                continue
            if setting.autocast is not None and returned == setting.autocast:
                continue
            wider = torch.finfo(returned).bits > torch.finfo(expected).bits
            if wider or returned not in dtypes_in_play:
                faults.append(_gradient_fault(call, i, returned, expected, wider, setting))
    return faults


def _gradient_fault(
    call: BackwardCall,
    index: int,
    returned: torch.dtype,
    expected: torch.dtype,
    wider: bool,
    setting: Setting,
) -> Fault:
    """Returns the fault AC003 for the gradient of one input."""
    owner = method_name(call.function, "backward")
    argument = _argument_name(call.function, index)
    autocast_name = "off"
    if setting.autocast:
        autocast_name = format_dtype(setting.autocast)
    values: dict[str, Any] = {
        "owner": owner,
        "argument": argument,
        "wider": wider,
        "got": format_dtype(returned),
        "expected": format_dtype(expected),
        "autocast": autocast_name,
    }
    location = return_location(call.function, owner)
    return make_fault("AC003", location, owner, argument, wider, **values)


def output_faults(
    outcome: Outcome, setting: Setting, sample: Sample, subject: Subject, reference: Outcome | None
) -> list[Fault]:
    """Returns a fault AC004 for each output that is narrower than every tensor of the call, or that
    has another dtype than the same output of the reference.
    """
    inputs = sample.dtypes_in_play(setting.group_dtypes)
    classes = outcome.functions
    dims = [sample.tensor(slot).dim() for slot in sample.slots]
    max_dims = max(dims, default=0)
    faults: list[Fault] = []
    for i, tensor in enumerate(outcome.values):
        dtype = tensor.dtype
        # the dtype of an input or of autocast is intended; any other may be an accident
        if dtype in inputs or dtype == setting.autocast:
            continue
        if reference is not None:
            if not reference.succeeded or i >= len(reference.values):
                continue
            expected = reference.values[i].dtype
            against = "the reference returns"
            wider = torch.finfo(dtype).bits > torch.finfo(expected).bits
            if wider and tensor.dim() < max_dims:
                continue  # not a fault, since every fused loss returns fp32
        elif classes and not subject.captured_dtypes() and torch.finfo(dtype).bits < 32:
            expected = max(inputs, key=lambda d: torch.finfo(d).bits)
            against = "every input is"
            wider = False
        else:
            continue
        if expected == dtype:
            continue
        owner = subject.label
        location = subject.location
        if classes:
            owner = method_name(classes[0], "forward")
            location = method_location(classes[0], "forward", owner)
        values: dict[str, Any] = {
            "owner": owner,
            "wider": wider,
            "output": _output_name(i, outcome.values),
            "got": format_dtype(dtype),
            "against": against,
            "expected": format_dtype(expected),
            "setting": setting.describe(),
        }
        faults.append(make_fault("AC004", location, owner, i, wider, **values))
    return faults


def _output_name(index: int, outputs: Sequence[Any]) -> str:
    if len(outputs) == 1:
        return "its output"
    return f"output {index}"


def _argument_name(function: type[torch.autograd.Function], index: int) -> str:
    """Returns the name of the argument of a Function at this index."""
    names = parameter_names(function.forward)
    if function.setup_context is torch.autograd.Function.setup_context:
        # the first parameter is ctx
        names = names[1:]
    if index < len(names):
        return names[index]
    return f"input {index}"


def contract_faults(
    outcome: Outcome, setting: Setting, subject: Subject, contract: OpContract
) -> list[Fault]:
    """Returns a fault AC014 for each dtype or shape in a run that differs from the contract."""
    # the dtype of each free letter, and each named size, for the inputs of this call
    letters: dict[str, str] = {}
    sizes: dict[str, Any] = {}
    for argument, spec in contract.inputs.items():
        if (tensor := outcome.tensors.get(argument)) is not None:
            spec.dtype_fault(format_dtype(tensor.dtype), letters)
            spec.shape_fault(tuple(tensor.shape), sizes)
    output_mismatches = _declared_output_faults(outcome, setting, subject, contract, letters, sizes)
    return [*output_mismatches, *_declared_gradient_faults(outcome, setting, contract, letters)]


def declared_output(
    spec: TensorSpec, setting: Setting, contract: OpContract, letters: dict[str, str]
) -> TensorSpec:
    """Returns the dtype and shape that the contract requires of an output for this combination of
    dtypes and autocast. A contract can use a letter for a dtype that is not fixed. Under autocast,
    depending on the contract, such a letter may mean the autocast dtype or fp32.
    """
    if setting.autocast is not None:
        if contract.autocast == "follows" and spec.is_free:
            return replace(spec, dtype=format_dtype(setting.autocast))
        if contract.autocast == "fp32" and (spec.is_free or spec.dtype in ("any", "float")):
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
    """Returns a fault AC014 if the number, the dtypes or the shapes of the outputs differ from the
    contract.
    """
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
        observed = format_dtype(output.dtype)
        output_name = _output_name(i, floats)
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
    """Returns a fault AC014 for each gradient whose dtype differs from the dtype in the contract.
    Only gradients of the arguments themselves are checked. If the function first casts an argument,
    the gradient of the cast argument is not checked. The backward of the cast still changes the
    dtype of this gradient.
    """
    names = {id(tensor): argument for argument, tensor in outcome.tensors.items()}
    faults = []
    for call in outcome.calls:
        for leaf, returned in zip(call.leaves, call.returned or []):
            if leaf is None or returned is None:
                continue
            argument = names.get(id(leaf))
            if argument is None or argument not in contract.grads:
                continue
            declared = contract.grads[argument]
            if len(declared) == 1:
                expected = letters.get(declared)
            else:
                expected = parse(declared)
            if expected is None or expected == format_dtype(returned):
                continue
            owner = method_name(call.function, "backward")
            message = (
                f"{owner} returns the gradient of {argument} in {format_dtype(returned)}; its contract says"
                f" {expected}"
            )
            observed_text = f"{format_dtype(returned)} with {setting.describe()}"
            faults.append(
                _contract_fault(
                    ("grad", argument, format_dtype(returned)),
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
    return make_fault(
        "AC014", location, *key, message=message, declared=declared, observed=observed
    )


def aliasing_faults(
    numerics: Numerics, setting: Setting, baseline: Outcome, *, is_stable: bool
) -> list[Fault]:
    """Checks the rules AC008 to AC012 and returns their faults.

    baseline   an ordinary run under the same setting, with `watch_inputs`
    is_stable  whether two such runs have the same results
    """
    subject = numerics.subject
    faults = [*_overwritten_inputs(subject, baseline), *_written_gradient(subject, baseline)]
    if baseline.grads:
        faults += _expanded_gradient(numerics, setting, baseline)
        faults += _second_backward(numerics, setting, baseline)
        if is_stable:
            faults += _frozen_inputs(numerics, setting, baseline)
    return faults


def _overwritten_inputs(subject: Subject, baseline: Outcome) -> list[Fault]:
    """Returns a fault AC011 for each argument whose values the function has changed."""
    faults = []
    for argument, (tensor, original) in baseline.watched_inputs.items():
        if is_bit_identical(tensor.detach(), original):
            continue
        # an in-place operator returns the tensor that it wrote to
        if any(_share_storage(tensor, output) for output in baseline.outputs):
            continue
        # plain in-place code, for which autograd raises an error if the write matters
        is_autograd_checked = not baseline.calls and bool(tensor._version)
        stage = BACKWARD
        if argument in baseline.changed_by_forward:
            stage = FORWARD
        location = faulty_method_location(subject, baseline, stage)
        faults.append(make_fault("AC011", location, name=argument, plain=is_autograd_checked))
    return faults


def _written_gradient(subject: Subject, baseline: Outcome) -> list[Fault]:
    """Returns a fault AC008 if backward has changed the values of an incoming gradient."""
    expected_gradients = []
    for i, output in enumerate(baseline.outputs):
        if output.requires_grad:
            expected_gradients.append(incoming_gradient(output, i))
    for received, expected in zip(baseline.grad_outputs, expected_gradients):
        if not is_bit_identical(received, expected):
            return [make_fault("AC008", faulty_method_location(subject, baseline, BACKWARD))]
    return []


def _expanded_gradient(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """Returns a fault AC009 if the gradients are different when the incoming gradient is an
    expanded tensor. For example, `f(x).sum().backward()` passes such a gradient: a single number
    that is expanded to the shape of the output.
    """
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
    if not expected.succeeded:
        return []
    location = faulty_method_location(subject, expected, BACKWARD)
    return _compare_gradients("AC009", location, actual, expected, setting, numerics, baseline)


def _second_backward(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """Runs backward twice over one graph. Returns a fault AC010 if the accumulated gradients are
    not twice the gradients of a single backward.
    """
    subject = numerics.subject
    sample = numerics.sample
    twice_outcome = attempt(subject, sample, setting, backward_passes=2)
    if twice_outcome.error is not None and twice_outcome.stage != BACKWARD:
        return []
    expected_outcome = Outcome()
    for argument, gradient in baseline.grads.items():
        if gradient is not None:
            gradient = gradient * 2
        expected_outcome.grads[argument] = gradient
    location = faulty_method_location(subject, baseline, BACKWARD)
    return _compare_gradients("AC010", location, twice_outcome, expected_outcome, setting, numerics)


def _compare_gradients(
    code: str,
    location: Place,
    actual: Outcome,
    expected: Outcome,
    setting: Setting,
    numerics: Numerics,
    typical_outcome: Outcome | None = None,
) -> list[Fault]:
    """Returns a fault if a run raises an error, or if its gradients differ from the expected
    gradients. An exception that the function itself raises with `raise` is not a fault.
    """
    if actual.error is None:
        wrong_arguments = _differing_gradients(actual, expected, setting, numerics, typical_outcome)
        if wrong_arguments:
            return [make_fault(code, location, wrong=wrong_arguments)]
        return []
    failure = find_failure(actual.error)
    if failure is not None and failure.is_raised_by_user:
        return []
    if failure:
        location = Place(
            file=failure.location.file, line=failure.location.line, symbol=location.symbol
        )
    return [make_fault(code, location, raised=first_line(actual.error))]


def _frozen_inputs(numerics: Numerics, setting: Setting, baseline: Outcome) -> list[Fault]:
    """Returns a fault AC012 if freezing one input changes the gradients of other inputs."""
    subject = numerics.subject
    sample = numerics.sample
    faults: list[Fault] = []
    trainable = [name for name, gradient in baseline.grads.items() if gradient is not None]
    if not 1 < len(trainable) <= 8:
        return []
    for frozen in trainable:
        outcome = attempt(subject, sample, setting, frozen=frozen)
        location = faulty_method_location(subject, baseline, BACKWARD)
        if outcome.error is not None:
            failure = find_failure(outcome.error)
            if failure is None or failure.is_raised_by_user:
                continue
            location = Place(
                file=failure.location.file,
                line=failure.location.line,
                symbol=failure.function or location.symbol,
            )
            raised = first_line(outcome.error)
            faults.append(make_fault("AC012", location, frozen=frozen, raised=raised))
            continue
        missing = []
        wrong_arguments = []
        for argument in trainable:
            gradient = outcome.grads.get(argument)
            expected = baseline.grads[argument]
            if argument == frozen or numerics.equals_up_to_order(gradient, expected, setting):
                continue
            wrong_arguments.append(argument)
            if gradient is None:
                missing.append(argument)
        if wrong_arguments:
            finding = make_fault(
                "AC012",
                location,
                frozen=frozen,
                missing=", ".join(missing),
                wrong=", ".join(wrong_arguments),
            )
            faults.append(finding)
    return faults


def _differing_gradients(
    actual: Outcome,
    expected: Outcome,
    setting: Setting,
    numerics: Numerics,
    typical_outcome: Outcome | None = None,
) -> str:
    """Returns the names of the gradients that differ too much. (A small difference can be the
    result of another order of the additions, and is allowed.)
    """
    typical_grads: dict[str, Tensor | None] = {}
    if typical_outcome is not None:
        typical_grads = typical_outcome.grads
    wrong_arguments = []
    for argument, gradient in expected.grads.items():
        if not numerics.equals_up_to_order(
            actual.grads.get(argument),
            gradient,
            setting,
            typical_result=typical_grads.get(argument),
        ):
            wrong_arguments.append(argument)
    return ", ".join(wrong_arguments)


def is_bit_identical(first: Tensor, second: Tensor) -> bool:
    """True if two tensors have the same shape, the same dtype and the same bits. NaN counts as
    equal to NaN.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))


def _share_storage(first: Tensor, second: Tensor) -> bool:
    """True if two tensors use the same memory."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
