"""Checks whether the offsets in a function's kernels fit in int32 at the largest shape that its
callers use. The check needs no memory for tensors of this shape.

The function is called on a simulated GPU with tensors that have no memory. The module records the
grid and the integer arguments of each kernel launch. From these numbers it computes the offsets in
the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .calls import Launch, call_function, split_calls, trap_launches
from .checker import Report, build_offset_findings
from .compile_inputs import DEFAULT_TARGET, parse_target
from .observe import observe
from .offsets import MAX_INT32
from .simulated_gpu import simulate_gpu

MAX_REASON = 300  # characters of an error message that are shown


def check_largest(
    function: Callable[..., Any],
    build_inputs: Callable[..., Any],
    sizes: Sequence[int],
    target_label: str = DEFAULT_TARGET,
) -> Report:
    """Calls `function` with `build_inputs(*sizes)`, forward and backward, and reports the offsets
    in its kernels that int32 cannot hold.

    ->  a Report. `refused` contains the error if the call was not possible. `remarks` says which
        lines of the function read the value of a tensor
    """
    import torch._dynamo  # noqa: F401  # its table of torch's functions must hold the unpatched ones

    target = parse_target(target_label)
    label = ",".join(map(str, sizes))
    report = Report()
    with trap_launches() as trap, simulate_gpu(target, allocates=False) as reads:
        try:
            for arguments in split_calls(build_inputs(*sizes)):
                _require_gradients(arguments)
                call_function(function, arguments)
        except Exception as error:
            text = " ".join(str(error).split())[:MAX_REASON]
            report.refused[label] = f"{type(error).__name__}: {text}"
    report.launches = len(trap.launches)
    report.remarks += trap.remarks
    for line in dict.fromkeys(reads):
        report.remarks.append(
            f"{line} reads the value of a tensor, which has no memory here; 1 was used"
        )
    checked: set[str] = set()
    for launch in trap.launches:
        _check_launch(launch, label, target, report, checked)
    return report


def _require_gradients(arguments: Any) -> None:
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.is_leaf:
            leaf.requires_grad_()


def _check_launch(
    launch: Launch, label: str, target: Any, report: Report, checked: set[str]
) -> None:
    name = launch.function.__name__
    try:
        combination = launch.combination(target, label)
        shape = launch.shape()
    except Exception as error:
        text = " ".join(str(error).split())[:MAX_REASON]
        report.remarks.append(f"{name}: its launch cannot be evaluated, {text}")
        return
    key = repr((name, combination.key, shape))
    if key in checked:
        return
    checked.add(key)
    if name not in report.kernels:
        report.kernels.append(name)
    if max(shape.extents.values(), default=0) <= MAX_INT32:
        return
    observation = observe(launch.function, combination, target, keeps_ttir=True)
    report.compiled += 1
    report.failed += observation.failed
    findings = build_offset_findings(launch.function, shape, observation)
    places = {(finding.code, finding.place) for finding in report.findings}
    report.findings += [
        finding for finding in findings if (finding.code, finding.place) not in places
    ]
