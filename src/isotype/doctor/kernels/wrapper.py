"""The kernels behind a wrapper: what its calls launch, compiled for every target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...finding import Finding
from .calls import Calls, Reached, call_trapped
from .check import check_combinations
from .targets import DEFAULT, parse_target, require_triton


@dataclass
class WrapperResult:
    findings: list[Finding] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    launches: int = 0
    compiled: int = 0
    failed: int = 0
    usages: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def check_wrapper(
    function: Callable[..., Any], inputs: Any, targets: Sequence[str | int] = (DEFAULT,), *, backward: bool = True, binary: bool = False
) -> WrapperResult:
    """Exact signatures, constexprs, autotuning configurations and heuristics, as the wrapper's own launches have them."""
    require_triton()
    return check_reached(call_trapped(function, inputs, parse_target(targets[0]), backward=backward), targets, binary=binary)


def check_reached(calls: Calls, targets: Sequence[str | int], *, binary: bool = False) -> WrapperResult:
    result = WrapperResult(launches=calls.launches, refused=calls.refused, remarks=calls.remarks)
    for reached in calls.reached.values():
        one = check_combinations(reached.function, reached.combinations, targets, binary=binary, extend=not _only_own(reached))
        result.findings += one.findings
        result.compiled += one.compiled
        result.failed += one.failed
        result.usages += one.usages
        result.kernels.append(reached.function.__name__)
    return result


def _only_own(reached: Reached) -> bool:
    """Triton's and torch's own kernels are compiled as launched, and not put in question further."""
    return str(reached.function.__module__).split(".")[0] in ("triton", "torch")
