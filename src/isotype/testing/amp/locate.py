"""Finds the line of the user's code that raised an exception, or at which a result lost its
precision.

For an exception, `find_failure` also collects the tensors in the failing expression. If a result is
not precise enough, `locate` compares each operator of the run with the same operator in a run in
fp64.
"""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from ...dtypes import format_dtype
from ...finding import Place
from ...observe.operators import Operator, split_names
from ...observe.origin import may_be_at_fault, running_frames
from ...observe.tape import Tape
from .attempt import attempt, floating_tensors, fp64_arithmetic
from .samples import Sample, Setting, Subject


@dataclass(frozen=True)
class Failure:
    """The place in the user's code that raised an exception.

    function  `Class.forward` or `Class.backward` if the traceback contains a hand-written Function,
              else None
    operands  the tensors in the failing expression: name -> tensor
    chain     the frames of the user's code as `file:line symbol`, the outermost first
    """

    location: Place
    source: str
    function: str | None
    operands: dict[str, Tensor]
    chain: tuple[str, ...]
    is_raised_by_user: bool

    @property
    def expression(self) -> str:
        """Returns the source code of the expression that failed, without comments."""
        return self.source.split("#")[0].strip()


def find_failure(error: BaseException) -> Failure | None:
    """Returns the place where an exception was raised, or None if its traceback has no frame of the
    user's code.
    """
    entries = list(_traceback_entries(error.__traceback__))
    # the line in a Triton kernel is in the traceback of the cause
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
        entries += list(_traceback_entries(error.__traceback__))
    function = None
    chain = []
    innermost: TracebackType | None = None
    for entry in entries:
        frame = entry.tb_frame
        file = frame.f_code.co_filename
        if not may_be_at_fault(file):
            continue
        innermost = entry
        chain.append(f"{file}:{entry.tb_lineno} {qualified_name(frame)}")
        if _is_function_method(frame):
            function = qualified_name(frame)
    if innermost is None:
        return None
    frame = innermost.tb_frame
    file = frame.f_code.co_filename
    span = _find_source_span(innermost)
    lines = [linecache.getline(file, n).strip() for n in range(span[0], span[1] + 1)]
    source = " ".join(lines).strip()
    is_raise = re.match(r"(raise|assert)\b", source) is not None
    return Failure(
        location=Place(file=file, line=span[0], symbol=qualified_name(frame)),
        source=source,
        function=function,
        operands=_find_operands(frame, span),
        chain=tuple(chain),
        is_raised_by_user=is_raise and entries[-1].tb_frame is frame,
    )


def _traceback_entries(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def qualified_name(frame: FrameType) -> str:
    """Returns the name of the frame's function, such as `Class.method`, without the names of
    functions around it.
    """
    return frame.f_code.co_qualname.split("<locals>.")[-1]


def function_method(frame: FrameType | None) -> str | None:
    """If this frame is in the forward or backward of a hand-written Function, or was called from
    there, returns `Class.forward` or `Class.backward`. Otherwise returns None.
    """
    while frame is not None:
        if may_be_at_fault(frame.f_code.co_filename) and _is_function_method(frame):
            return qualified_name(frame)
        frame = frame.f_back
    return None


def _is_function_method(frame: FrameType) -> bool:
    """True if the frame is in a method of a hand-written autograd Function."""
    first = frame.f_code.co_varnames[:1]
    owner = frame.f_code.co_qualname.rpartition(".")[0]
    return (
        frame.f_code.co_name in ("forward", "backward", "vjp", "setup_context")
        and bool(owner)
        and first != ("self",)
    )


def _find_source_span(tb: TracebackType) -> tuple[int, int, int | None, int | None]:
    """Returns the first line, last line, first column and end column of the instruction that
    failed.
    """
    line, end, column, end_column = next(
        islice(tb.tb_frame.f_code.co_positions(), tb.tb_lasti // 2, None)
    )
    line = line or tb.tb_lineno
    return line, end or line, column, end_column


def _find_operands(
    frame: FrameType, span: tuple[int, int, int | None, int | None]
) -> dict[str, Tensor]:
    """Returns the tensors that are variables in the expression, in order. Names of attributes and
    of keyword arguments are skipped.
    """
    first, last, column, end_column = span
    lines = [
        linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)
    ]
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    variables: dict[str, Any] = {**frame.f_globals, **frame.f_locals}
    identifiers = dict.fromkeys(
        re.findall(r"(?<![\w.])[^\W\d]\w*(?!\w|\s*=[^=])", b"".join(lines).decode(errors="replace"))
    )
    return {
        identifier: variables[identifier]
        for identifier in identifiers
        if isinstance(variables.get(identifier), Tensor)
    }


def format_tensor(tensor: Tensor) -> str:
    """Returns dtype and shape as text, such as `bf16[2 3 4]`."""
    return f"{format_dtype(tensor.dtype)}[{' '.join(map(str, tensor.shape))}]"


_NO_ARITHMETIC = split_names("""
    _to_copy detach alias lift_fresh view _unsafe_view t transpose permute expand unsqueeze squeeze
    slice select empty empty_like new_empty empty_strided new_empty_strided empty_permuted clone
    as_strided split set_
    """)
_ACCUMULATING_ADDITIONS = split_names(
    "add add_ sub sub_ addmm addmm_ baddbmm baddbmm_ index_add index_add_ index_put index_put_"
)


@dataclass(frozen=True)
class _Step:
    """One arithmetic operator of a run, with its inputs and outputs converted to fp64."""

    operator: str
    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    dtype: torch.dtype | None
    accumulates: bool
    location: Place | None


@dataclass(frozen=True)
class ImpreciseStep:
    """The step at which the error of the final result first appeared.

    input_error, output_error  relative errors of the step's inputs and outputs
    repeats      the number of additions that the same line makes
    accumulates  whether the step adds its second input to its first input, as in a running sum
    """

    location: Place
    source: str
    operator: str
    dtype: torch.dtype | None
    input_error: float
    output_error: float
    repeats: int
    accumulates: bool


class _Recorder:
    """Records the inputs and outputs of every arithmetic operator, with the line of the user's code
    that called it.
    """

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.tape = Tape(self._record)

    def _record(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        """Computes an operator, and adds a step for it to the list."""
        if op.name in _NO_ARITHMETIC:
            return op(*args, **kwargs)
        inputs = _copy_floats((args, kwargs))
        result = op(*args, **kwargs)
        outputs = floating_tensors(result)
        dtype = None
        accumulates = False
        if outputs:
            dtype = outputs[0].dtype
            accumulates = op.name in _ACCUMULATING_ADDITIONS and _adds_to_first(
                op, args, kwargs, outputs[0]
            )
        step = _Step(
            operator=op.name,
            outputs=_copy_floats(result),
            inputs=inputs,
            dtype=dtype,
            accumulates=accumulates,
            location=_user_location(),
        )
        self.steps.append(step)
        return result


def _adds_to_first(op: Operator, args: tuple, kwargs: dict, output: Tensor) -> bool:
    """True if an addition may add to a running sum that is stored in its first argument. An
    addition may do so if it writes in place, or if its result has the same shape as the first
    argument.
    """
    if not args or not isinstance(args[0], Tensor):
        return False
    is_in_place = any(op.is_written) or kwargs.get("out") is not None
    return is_in_place or args[0].shape == output.shape


def _copy_floats(tree: Any) -> tuple[Tensor, ...]:
    """Returns copies of the floating tensors, in fp64."""
    return tuple(tensor.detach().double().clone() for tensor in floating_tensors(tree))


def _user_location() -> Place | None:
    """Returns the innermost running line of the user's code. Only code that `attempt` has called
    counts. Returns None if there is no such line.

    The frames themselves are not stored. A stored frame would keep its tensors alive, and autograd
    would then have to copy some gradients.
    """
    for frame in running_frames(2):
        if frame.f_code is attempt.__code__:
            return None
        if may_be_at_fault(frame.f_code.co_filename):
            return Place(
                file=frame.f_code.co_filename,
                line=frame.f_lineno,
                symbol=function_method(frame) or qualified_name(frame),
            )
    return None


def locate(
    subject: Subject, sample: Sample, setting: Setting, *, is_long_sum: bool = False
) -> ImpreciseStep | None:
    """Returns the line at which the result lost its precision. Returns None if the two runs do not
    call the same operators, or if the code does not consist of operators.

    is_long_sum  whether the error grew with the number of rows. In this case the function returns
              the line that adds most often to a low-precision tensor, if there is one
    """
    narrow_recorder = _Recorder()
    wide_recorder = _Recorder()
    if not attempt(subject, sample, setting, context=lambda: narrow_recorder.tape).succeeded:
        return None

    @contextmanager
    def fp64_context() -> Any:
        with fp64_arithmetic(), wide_recorder.tape:
            yield

    if not attempt(
        subject, sample, setting, widen_to=torch.float64, context=fp64_context
    ).succeeded:
        return None
    steps = narrow_recorder.steps
    if [step.operator for step in steps] != [step.operator for step in wide_recorder.steps]:
        return None
    index = None
    if is_long_sum:
        index = _last_of_busiest_sum(steps)
    errors = [_relative_error(n.outputs, w.outputs) for n, w in zip(steps, wide_recorder.steps)]
    input_errors = [_relative_error(n.inputs, w.inputs) for n, w in zip(steps, wide_recorder.steps)]
    if index is None:
        located_steps = [i for i, step in enumerate(steps) if step.location is not None]
        index = _first_inexact(located_steps, errors, input_errors)
    if index is None:
        return None
    return _make_imprecise_step(steps, index, input_errors[index], errors[index])


def _last_of_busiest_sum(steps: list[_Step]) -> int | None:
    """Finds the line that adds most often to a low-precision tensor. Returns the index of the last
    addition at this line, or None if no line adds more than once.
    """
    counts: Counter[Place] = Counter()
    last: dict[Place, int] = {}
    for i, step in enumerate(steps):
        if not step.accumulates or step.location is None:
            continue
        last[step.location] = i
        if _is_low_precision(step.dtype):
            counts[step.location] += 1
    for location, count in counts.most_common(1):
        if count > 1:
            return last[location]
    return None


def _first_inexact(
    located_steps: list[int], errors: list[float], input_errors: list[float]
) -> int | None:
    """Returns the first step whose error is much larger than the error of its inputs, and not much
    smaller than the error of the final result.
    """
    if not located_steps:
        return None
    final_error = max(errors[i] for i in located_steps)
    if final_error == float("inf"):
        return next(i for i in located_steps if errors[i] == final_error)
    for i in located_steps:
        if errors[i] > final_error / 8 and errors[i] / max(input_errors[i], 1e-9) > 4:
            return i
    for i in located_steps:
        if errors[i] > final_error / 4:
            return i
    return None


def _make_imprecise_step(
    steps: list[_Step], index: int, input_error: float, output_error: float
) -> ImpreciseStep:
    step = steps[index]
    assert step.location is not None
    line = linecache.getline(step.location.file or "", step.location.line or 0)
    return ImpreciseStep(
        location=step.location,
        source=line.split("#")[0].strip(),
        operator=step.operator,
        dtype=step.dtype,
        input_error=input_error,
        output_error=output_error,
        repeats=sum(s.location == step.location and s.accumulates for s in steps),
        accumulates=step.accumulates,
    )


def _is_low_precision(dtype: torch.dtype | None) -> bool:
    """True if a dtype has fewer than 32 bits."""
    return dtype is not None and dtype.is_floating_point and torch.finfo(dtype).bits < 32


def _relative_error(narrow: tuple[Tensor, ...], wide: tuple[Tensor, ...]) -> float:
    """Returns the largest relative error of a step, or infinity if a value is not finite."""
    worst = 0.0
    for n, w in zip(narrow, wide):
        if n.shape != w.shape or not w.numel():
            continue
        finite = torch.isfinite(w)
        size = float(w[finite].norm())
        difference = float((n - w)[finite].norm())
        if difference != difference or difference == float("inf"):
            return float("inf")
        if size > 0:
            worst = max(worst, difference / size)
    return worst
