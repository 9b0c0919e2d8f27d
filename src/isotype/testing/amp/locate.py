"""Which line made a result inexact: the run as it is beside the exact run, operator by operator.
From an exception to the line of the user's own code, with the dtypes of the tensors that it names.
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
from torch.utils import _pytree as pytree

from ...dtypes import name
from ...finding import Place
from ...observe.operators import Operator, split_names
from ...observe.origin import may_be_at_fault, running_frames
from ...observe.tape import Tape
from .attempt import attempt, fp64_arithmetic
from .samples import Sample, Setting, Subject


@dataclass(frozen=True)
class Failure:
    """Where an exception began in the user's code.

    function  `Class.forward` or `Class.backward` when the way there leads through a hand-written
              Function
    operands  the tensors the failing expression names: name -> tensor
    chain     user frames from the outermost to the innermost, as `file:line symbol`
    """

    location: Place
    source: str
    function: str | None
    operands: dict[str, Tensor]
    chain: tuple[str, ...]
    raised_by_hand: bool

    @property
    def expression(self) -> str:
        return self.source.split("#")[0].strip()


def find_failure(error: BaseException) -> Failure | None:
    """None when no frame between them is the user's."""
    frames = list(_frames(error.__traceback__))
    # a Triton kernel: its own line is in the cause
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
        frames += list(_frames(error.__traceback__))
    user_frames = [
        (tb.tb_frame, tb) for tb in frames if may_be_at_fault(tb.tb_frame.f_code.co_filename)
    ]
    if not user_frames:
        return None
    frame, tb = user_frames[-1]
    span = _span(tb)
    source = " ".join(
        linecache.getline(frame.f_code.co_filename, n).strip() for n in range(span[0], span[1] + 1)
    ).strip()
    return Failure(
        location=Place(file=frame.f_code.co_filename, line=span[0], symbol=qualified_name(frame)),
        source=source,
        function=next(
            (qualified_name(f) for f, _ in reversed(user_frames) if _is_function_method(f)), None
        ),
        operands=_operands(frame, span),
        chain=tuple(
            f"{f.f_code.co_filename}:{t.tb_lineno} {qualified_name(f)}" for f, t in user_frames
        ),
        raised_by_hand=frames[-1].tb_frame is frame
        and re.match(r"(raise|assert)\b", source) is not None,
    )


def _frames(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def qualified_name(frame: FrameType) -> str:
    return frame.f_code.co_qualname.split("<locals>.")[-1]


def function_method(frame: FrameType | None) -> str | None:
    """`Class.forward` or `Class.backward` of the hand-written Function this frame belongs to or was
    called from.
    """
    while frame is not None:
        if may_be_at_fault(frame.f_code.co_filename) and _is_function_method(frame):
            return qualified_name(frame)
        frame = frame.f_back
    return None


def _is_function_method(frame: FrameType) -> bool:
    first = frame.f_code.co_varnames[:1]
    owner = frame.f_code.co_qualname.rpartition(".")[0]
    return (
        frame.f_code.co_name in ("forward", "backward", "vjp", "setup_context")
        and bool(owner)
        and first != ("self",)
    )


def _span(tb: TracebackType) -> tuple[int, int, int | None, int | None]:
    """Lines and columns of the instruction that failed."""
    line, end, column, end_column = next(
        islice(tb.tb_frame.f_code.co_positions(), tb.tb_lasti // 2, None)
    )
    line = line or tb.tb_lineno
    return line, end or line, column, end_column


def _operands(frame: FrameType, span: tuple[int, int, int | None, int | None]) -> dict[str, Tensor]:
    """The tensors that the expression names, in order; names of attributes and of keywords are
    none.
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
    """`bf16[2 3 4]`"""
    return f"{name(tensor.dtype)}[{' '.join(map(str, tensor.shape))}]"


_NO_ARITHMETIC = split_names("""
    _to_copy detach alias lift_fresh view _unsafe_view t transpose permute expand unsqueeze squeeze slice select empty empty_like new_empty
    empty_strided new_empty_strided empty_permuted clone as_strided split set_
    """)
_ADDITIONS = split_names(
    "add add_ sub sub_ addmm addmm_ baddbmm baddbmm_ index_add index_add_ index_put index_put_"
)


@dataclass(frozen=True)
class _Step:
    operator: str
    values: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    dtype: torch.dtype | None
    accumulates: bool
    location: Place | None


@dataclass(frozen=True)
class Culprit:
    """The step at which the error of the final result first appeared.

    before, after  relative error of what the step was given and of what it made
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
    """A reader of the tape: keeps what every arithmetic operator was given and made, with the
    user's line that asked for it.
    """

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.tape = Tape(self._record)

    def _record(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        if op.name in _NO_ARITHMETIC:
            return op(*args, **kwargs)
        inputs = tuple(t.detach().double().clone() for t in _floats((args, kwargs)))
        result = op(*args, **kwargs)
        outputs = _floats(result)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        target = kwargs.get("out", first if any(op.writes) else None)
        accumulates = (
            op.name in _ADDITIONS
            and bool(outputs)
            and first is not None
            and (target is not None or first.shape == outputs[0].shape)
        )
        values = tuple(t.detach().double().clone() for t in outputs)
        self.steps.append(
            _Step(
                op.name,
                values,
                inputs,
                outputs[0].dtype if outputs else None,
                accumulates,
                _user_location(),
            )
        )
        return result


def _floats(tree: Any) -> list[Tensor]:
    return [
        t for t in pytree.tree_flatten(tree)[0] if isinstance(t, Tensor) and t.is_floating_point()
    ]


def _user_location() -> Place | None:
    """The innermost line of the checked code; frames beyond `attempt` belong to the caller of the
    check.

    No frame is kept: its tensors would live on, and autograd copies a gradient that somebody else
    holds.
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
    subject: Subject, sample: Sample, setting: Setting, *, long_sum: bool = False
) -> Culprit | None:
    """The culprit line, or None where the two runs do not go through the same operators (or the
    code is not made of operators).

    long_sum  the error grew with the number of rows: the line that adds most often into a
              low-precision tensor, if there is one
    """
    narrow = _Recorder()
    wide = _Recorder()
    if not attempt(subject, sample, setting, context=lambda: narrow.tape).ran:
        return None

    @contextmanager
    def exactly() -> Any:
        with fp64_arithmetic(), wide.tape:
            yield

    if not attempt(subject, sample, setting, widen_to=torch.float64, context=exactly).ran:
        return None
    if [s.operator for s in narrow.steps] != [s.operator for s in wide.steps]:
        return None
    errors = [_error(n.values, w.values) for n, w in zip(narrow.steps, wide.steps)]
    input_errors = [_error(n.inputs, w.inputs) for n, w in zip(narrow.steps, wide.steps)]
    located = [i for i, step in enumerate(narrow.steps) if step.location is not None]
    if not located:
        return None
    if long_sum:
        sums = Counter(
            step.location
            for step in narrow.steps
            if step.accumulates and step.location is not None and _is_low(step.dtype)
        )
        busiest = next((location for location, count in sums.most_common(1) if count > 1), None)
        last = max(
            (
                i
                for i in located
                if narrow.steps[i].location == busiest and narrow.steps[i].accumulates
            ),
            default=None,
        )
        if last is not None:
            return _make_culprit(narrow.steps, last, input_errors[last], errors[last])
    # the step that made its own result much worse than what it was given, and above all the error
    # that the last steps show
    final = max(errors[i] for i in located)
    if final == float("inf"):
        endless = next(i for i in located if errors[i] == final)
        return _make_culprit(narrow.steps, endless, input_errors[endless], final)
    growth = {i: errors[i] / max(input_errors[i], 1e-9) for i in located if errors[i] > final / 8}
    grown = [i for i, times in growth.items() if times > 4] or [
        i for i in located if errors[i] > final / 4
    ]
    if grown:
        return _make_culprit(narrow.steps, grown[0], input_errors[grown[0]], errors[grown[0]])
    return None


def _make_culprit(
    steps: list[_Step], index: int, input_error: float, output_error: float
) -> Culprit:
    step = steps[index]
    assert step.location is not None
    return Culprit(
        location=step.location,
        source=linecache.getline(step.location.file or "", step.location.line or 0)
        .split("#")[0]
        .strip(),
        operator=step.operator,
        dtype=step.dtype,
        input_error=input_error,
        output_error=output_error,
        repeats=sum(s.location == step.location and s.accumulates for s in steps),
        accumulates=step.accumulates,
    )


def _is_low(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and torch.finfo(dtype).bits < 32


def _error(narrow: tuple[Tensor, ...], wide: tuple[Tensor, ...]) -> float:
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
