"""`compile_matrix`: in a test, every Triton kernel behind a function compiled for every dtype and several GPUs; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..finding import Severity, worst_first

DEFAULT_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def compile_matrix(
    function: Callable[..., Any],
    inputs: Any = None,
    targets: Sequence[str] = DEFAULT_TARGETS,
    *,
    fail_on: Severity | str = Severity.WARNING,
    backward: bool = True,
    binary: bool = False,
) -> None:
    """Calls `function(*inputs)` on the CPU in every dtype with launches trapped, then compiles what it launched.

    function  a wrapper, an autograd.Function, an nn.Module, or a `@triton.jit` kernel (its signatures are then inferred)
    inputs    a tuple, a list or a dict of arguments; a list of tuples is several calls. Float tensors are cast, the rest is kept
    fail_on   "error": dtypes alike; "warning" (default): also one tensor in another dtype, unless the function refuses it itself
    backward  also calls backward on the outputs
    binary    also to machine code, with registers, spills and shared memory (seconds a target)
    Raises    AssertionError naming kernel, line, variable and dtypes, also when nothing was launched
    """
    from ..doctor.kernels.calls import check_wrapper, several
    from ..doctor.kernels.signature import is_kernel

    wanted = Severity.parse(fail_on) if isinstance(fail_on, str) else fail_on
    name = getattr(function, "__name__", type(function).__name__)
    if is_kernel(function):
        from ..doctor.kernels import check

        findings = check(function, targets=targets, binary=binary).findings
    else:
        findings = []
        for arguments in several(inputs):
            answer = check_wrapper(function, arguments, targets, backward=backward, binary=binary)
            if not answer.launches:
                why = next(iter(answer.refused.values()), "the calls returned without one")
                raise AssertionError(f"{name} launched no Triton kernel: {why}")
            findings += [f for f in answer.findings if f not in findings]
    failing = worst_first(f for f in findings if f.severity >= wanted)
    if failing:
        count = f"{len(failing)} finding{'s' if len(failing) != 1 else ''}"
        raise AssertionError(f"{name}: {count} for {', '.join(targets)}\n\n" + "\n\n".join(f.render() for f in failing))
