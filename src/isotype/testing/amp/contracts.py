"""AC014: an OpContract broken: output dtypes and shapes, and the dtype in which each gradient leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...dtypes import TensorSpec, name, parse
from ...finding import Finding, Place, Severity
from ...ops.contract import OpContract
from .attempt import Outcome
from .fault import Fault, return_of
from .samples import Sample
from .settings import Setting
from .subjects import Subject


def contract_faults(outcome: Outcome, setting: Setting, sample: Sample, subject: Subject, contract: OpContract) -> list[Fault]:
    """What one run did against what was declared."""
    letters, sizes = _bound(setting, sample, contract)
    return [
        *_output_faults(outcome, setting, subject, contract, letters, sizes),
        *_gradient_faults(outcome, setting, contract, letters),
    ]


def _bound(setting: Setting, sample: Sample, contract: OpContract) -> tuple[dict[str, str], dict[str, Any]]:
    """The free letters and named sizes, as this call's inputs bind them."""
    _, named = sample.fresh(setting.by_group)
    letters: dict[str, str] = {}
    sizes: dict[str, Any] = {}
    for argument, spec in contract.inputs.items():
        if argument in named:
            spec.dtype_fault(_word(named[argument].dtype), letters)
            spec.shape_fault(tuple(named[argument].shape), sizes)
    return letters, sizes


def declared_output(spec: TensorSpec, setting: Setting, contract: OpContract, letters: dict[str, str]) -> TensorSpec:
    """The output's spec under this setting: autocast may lower a free letter, or raise it to fp32."""
    if setting.autocast is not None and spec.free and contract.autocast != "ignored":
        return replace(spec, dtype=_word(setting.autocast) if contract.autocast == "follows" else "fp32")
    if setting.autocast is not None and contract.autocast == "fp32" and spec.dtype in ("any", "float"):
        return replace(spec, dtype="fp32")
    return replace(spec, dtype=letters.get(spec.dtype, spec.dtype)) if spec.free else spec


def _output_faults(
    outcome: Outcome, setting: Setting, subject: Subject, contract: OpContract, letters: dict[str, str], sizes: dict[str, Any]
) -> list[Fault]:
    floats = [
        spec
        for spec in contract.outputs
        if spec.dtype in ("any", "float") or spec.free or not spec.dtype.startswith(("int", "uint", "bool"))
    ]
    faults = []
    if len(floats) != len(outcome.outputs):
        message = f"{subject.label} returns {len(outcome.outputs)} floating outputs; {len(floats)} are declared"
        return [_fault(("count",), message, subject.place, contract.signature, f"{len(outcome.outputs)} outputs", _FIX)]
    for i, (given, spec) in enumerate(zip(outcome.outputs, floats)):
        expected = declared_output(spec, setting, contract, letters)
        observed = _word(given.dtype)
        which = "its output" if len(floats) == 1 else f"output {i}"
        wanted = expected.dtype_fault(observed, dict(letters))
        if wanted is not None:
            message = f"{subject.label} returns {which} in {observed}; its contract says {wanted}"
            seen = f"{observed} with {setting.describe()}"
            faults.append(
                _fault(("output", i, observed, wanted), message, subject.place, f"{spec}, autocast {contract.autocast}", seen, _FIX)
            )
        shape = spec.shape_fault(tuple(given.shape), dict(sizes))
        if shape is not None:
            message = f"{subject.label} returns {which} with {shape}"
            faults.append(_fault(("shape", i), message, subject.place, str(spec), str(list(given.shape)), _FIX))
    return faults


def _gradient_faults(outcome: Outcome, setting: Setting, contract: OpContract, letters: dict[str, str]) -> list[Fault]:
    """Only gradients that reach an argument directly are judged; the op does not decide the result of a cast in between."""
    by_tensor = {id(t): n for n, t in outcome.tensors.items()}
    faults = []
    for call in outcome.calls:
        for leaf, returned in zip(call.leaves, call.returned or []):
            argument = by_tensor.get(id(leaf)) if leaf is not None else None
            if argument is None or argument not in contract.grads or returned is None:
                continue
            declared = contract.grads[argument]
            wanted = letters.get(declared) if len(declared) == 1 else parse(declared)
            if wanted is None or wanted == _word(returned):
                continue
            owner = f"{call.function.__qualname__.split('<locals>.')[-1]}.backward"
            message = f"{owner} returns the gradient of {argument} in {_word(returned)}; its contract says {wanted}"
            seen = f"{_word(returned)} with {setting.describe()}"
            faults.append(
                _fault(("grad", argument, _word(returned)), message, return_of(call.function, owner), f"{argument}: {declared}", seen, _FIX)
            )
    return faults


_FIX = "cast once at the end to the declared dtype, or change the contract if it is the contract that is wrong"


def _fault(key: tuple[object, ...], message: str, place: Place, declared: str, observed: str, fix: str) -> Fault:
    return ("AC014", *key), Finding(
        code="AC014",
        severity=Severity.ERROR,
        message=message,
        place=place,
        declared=declared,
        observed=observed,
        cause="callers, the tracer and the other ops rely on the declared dtypes; the engine's silent casts hide a gradient in another one",
        fix=fix,
    )


def _word(dtype: torch.dtype) -> str:
    return name(str(dtype))
