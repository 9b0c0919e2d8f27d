"""AC001, AC002: it raises where plain PyTorch would not.

When raising is legitimate: a reference or plain PyTorch refuses the combination too (mixed dtypes with autocast off; torch's own
layers with fp32 inputs and low-precision weights), the code refuses on purpose (its own `raise`), or the backend has no kernel.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ...dtypes import name
from ...finding import Finding, Place, Severity
from .attempt import BACKWARD, Outcome
from .places import Failure, failure_of, shown
from .samples import Sample
from .settings import Setting
from .subjects import Subject

_NO_KERNEL = re.compile(
    r"not implemented for|not supported on|no kernel|could not create a primitive|Could not run '|"
    r"not yet implemented|doesn't support|does not support|No available kernel|not currently implemented",
    re.IGNORECASE,
)
# out= variants and in-place products take no part in autocast
_OUT = re.compile(r"[(,]\s*out\s*=(?!=)")  # the keyword of a call: `out = x @ w` writes nothing into a buffer
_IN_PLACE_PRODUCT = re.compile(r"\.(addmm|addmv|addbmm|baddbmm|addr|matmul|mm)_\(")
_SCATTER = re.compile(r"\b(scatter|scatter_add|scatter_reduce|index_put|index_add|index_copy|masked_scatter|copy)_?\(|\]\s*[-+*/]?=(?!=)")


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def legitimate(
    outcome: Outcome, setting: Setting, sample: Sample, subject: Subject, *, plain_runs: bool | None, declared: bool
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
    if failure.function is None and not _skips_autocast(failure) and not setting.produced_by_any_trainer(sample):
        return "plain PyTorch refuses it"
    return None


def finding_for(outcome: Outcome, setting: Setting, subject: Subject, *, severity: Severity) -> tuple[tuple[object, ...], Finding]:
    """The finding for an outcome that raised, and what makes it the same fault as another."""
    assert outcome.error is not None
    failure = failure_of(outcome.error)
    place = failure.place if failure else subject.place
    owner = failure.function if failure and failure.function else place.symbol or subject.label
    stage = outcome.stage or "forward"
    code = "AC002" if stage == BACKWARD else "AC001"
    operands = _described(failure, outcome) if failure else {}
    details = [("raised", first_line(outcome.error))]
    if failure and failure.source:
        details.append(("code", failure.expression))
    if operands:
        details.append(("met", ", ".join(operands.values())))
    if failure and len(failure.chain) > 1:
        details.append(("called from", "\n".join(failure.chain[-4:-1])))
    verb = "raises in backward although forward ran" if stage == BACKWARD else "raises where plain PyTorch does not"
    return (code, place.file, place.line), Finding(
        code=code,
        severity=severity,
        message=f"{owner} {verb}: {first_line(outcome.error).split(': ', 1)[-1]}",
        place=Place(file=place.file, line=place.line, symbol=owner),
        cause=_cause(outcome, setting, failure, operands, owner),
        fix=_fix(outcome, setting, failure, owner),
        observed=setting.describe(),
        details=tuple(details),
    )


def _described(failure: Failure, outcome: Outcome) -> dict[str, str]:
    """`d bf16[2 3 4] (the incoming gradient)`, for each tensor that the failing expression names."""
    call = outcome.calls[-1] if outcome.calls and outcome.stage == BACKWARD else None
    said = {}
    for word, tensor in failure.operands.items():
        role = ""
        if call is not None and _same_storage(tensor, call.incoming):
            role = " (the incoming gradient)"
        elif call is not None and _same_storage(tensor, call.saved()):
            role = " (a saved tensor)"
        else:
            owner = next((n for n, t in outcome.tensors.items() if _same_storage(tensor, [t])), None)
            role = f" (input {owner})" if owner and owner != word and not owner.startswith("input") else role
        said[word] = f"{word} {shown(tensor)}{role}"
    return said


def _same_storage(tensor: Tensor, others: list[Tensor]) -> bool:
    try:
        return any(o.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and o.dtype == tensor.dtype for o in others)
    except (RuntimeError, NotImplementedError):
        return False


def _skips_autocast(failure: Failure) -> bool:
    return bool(_OUT.search(failure.source) or _IN_PLACE_PRODUCT.search(failure.source))


def _word(dtype: torch.dtype) -> str:
    return name(str(dtype))


def _cause(outcome: Outcome, setting: Setting, failure: Failure | None, operands: dict[str, str], owner: str) -> str:
    mixed = f": {', '.join(operands.values())}" if operands else ""
    auto = _word(setting.autocast) if setting.autocast else None
    if failure and _OUT.search(failure.source):
        return (
            f"a product written with out= takes no part in autocast and needs every operand and the buffer in one dtype{mixed}; "
            + (f"{outcome.stage} made one of them {auto} under autocast and nothing cast the others" if auto else "their dtypes differ")
            + (" (without custom_fwd, forward runs with autocast left on)" if auto and outcome.stage != BACKWARD else "")
        )
    if failure and _IN_PLACE_PRODUCT.search(failure.source):
        return f"an in-place product takes no part in autocast and needs one dtype for all{mixed}"
    if failure and _SCATTER.search(failure.source):
        return (
            f"{owner} writes values of one dtype into a buffer of another, and scatter, index and slice writes by kernel do not cast{mixed}"
        )
    if outcome.stage == BACKWARD and auto and not setting.inside:
        incoming = {_word(t.dtype) for call in outcome.calls[-1:] for t in call.incoming}
        saved = {_word(t.dtype) for call in outcome.calls[-1:] for t in call.saved()}
        return (
            "forward ran under autocast, backward ran outside it (as trainers call it): the incoming gradient is "
            f"{'/'.join(sorted(incoming)) or auto}, "
            f"the saved tensors (the weight or master weight among them) are {'/'.join(sorted(saved)) or 'as given'}, and this "
            "branch of backward "
            f"multiplies them without a cast{mixed}"
        )
    if outcome.stage == BACKWARD:
        return f"this branch of backward mixes the incoming gradient with tensors of another dtype (a saved tensor, a buffer){mixed}"
    if auto:
        return f"forward ran under autocast to {auto}, and this line meets two dtypes that autocast does not reconcile{mixed}"
    return f"every input has one dtype here, so the other one is written into the code (a constant, a buffer, a table, a cast){mixed}"


def _fix(outcome: Outcome, setting: Setting, failure: Failure | None, owner: str) -> str:
    device = next((t.device.type for t in outcome.tensors.values()), "cuda")
    if failure and (_OUT.search(failure.source) or _IN_PLACE_PRODUCT.search(failure.source)):
        return (
            "compute without out= or the in-place form and cast the result to the dtype of the buffer (`buffer += (a @ "
            "b).to(buffer.dtype)`, "
            "`dx = (d @ w).to(x.dtype)`), or cast every operand to it first; "
            f'decorate forward with torch.amp.custom_fwd(device_type="{device}") and backward with torch.amp.custom_bwd so that '
            "both know which dtype it is"
        )
    if failure and _SCATTER.search(failure.source):
        return (
            "make the buffer in the dtype of what is written into it, or cast the values to the dtype of the buffer: "
            "`buffer.scatter_(1, index, values.to(buffer.dtype))`"
        )
    if outcome.stage == BACKWARD and setting.autocast:
        return (
            f'decorate forward with torch.amp.custom_fwd(device_type="{device}") and backward with '
            f'torch.amp.custom_bwd(device_type="{device}"), which '
            "re-enters forward's autocast; or cast the saved tensors to the grad dtype (`weight.to(d.dtype)`) in every branch, "
            "and return each gradient in its tensor's dtype"
        )
    if outcome.stage == BACKWARD:
        return (
            "cast to one dtype at the top of backward (`d = d.to(saved.dtype)` or the saved tensors to the grad dtype), and "
            "return each gradient in its tensor's dtype"
        )
    if setting.autocast:
        return (
            f"decide the compute dtype once at the top of {owner} and cast what it multiplies to it, with autocast off inside; "
            f'or decorate it with torch.amp.custom_fwd(device_type="{device}", cast_inputs=...)'
        )
    return "derive the dtype from an input (`torch.zeros(..., dtype=x.dtype)`, `table.to(x.dtype)`) instead of writing it down"
