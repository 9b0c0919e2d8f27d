"""Which line made a result inexact: the run as it is beside the exact run, operator by operator."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...finding import Place
from .attempt import attempt
from .exact import exact
from .places import is_users, owner_of, symbol_of
from .samples import Sample
from .settings import Setting
from .subjects import Subject

_NO_ARITHMETIC = {"_to_copy", "detach", "alias", "lift_fresh", "view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze"}
_NO_ARITHMETIC |= {
    "squeeze",
    "slice",
    "select",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "clone",
    "as_strided",
    "split",
    "set_",
}
_ADDS = {"add", "add_", "sub", "sub_", "addmm", "addmm_", "baddbmm", "baddbmm_", "index_add", "index_add_", "index_put", "index_put_"}


@dataclass(frozen=True)
class _Step:
    operator: str
    values: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    dtype: torch.dtype | None
    accumulates: bool
    place: Place | None


@dataclass(frozen=True)
class Culprit:
    """The step at which the error of the final result first appeared.

    before, after  relative error of what the step was given and of what it made
    """

    place: Place
    source: str
    operator: str
    dtype: torch.dtype | None
    before: float
    after: float
    repeats: int
    accumulates: bool


class _Recorder(TorchDispatchMode):
    """Keeps what every arithmetic operator was given and made, with the user's line that asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `Exact`

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.split("::")[-1]
        if name in _NO_ARITHMETIC:
            return func(*args, **(kwargs or {}))
        given = tuple(t.detach().double().clone() for t in _floats((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        made = _floats(result)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        into = (kwargs or {}).get("out", first if func._schema.is_mutable else None)
        grows = name in _ADDS and bool(made) and first is not None and (into is not None or first.shape == made[0].shape)
        values = tuple(t.detach().double().clone() for t in made)
        self.steps.append(_Step(name, values, given, made[0].dtype if made else None, grows, _users_line()))
        return result


def _floats(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_flatten(tree)[0] if isinstance(t, Tensor) and t.is_floating_point()]


def _users_line() -> Place | None:
    frame: FrameType | None = sys._getframe(2)
    ours = __file__.rpartition("locate")[0]
    innermost = None
    while frame is not None:
        file = frame.f_code.co_filename
        if innermost is None and is_users(file):
            innermost = frame
        if file.startswith(ours) and not file.endswith(("locate.py", "watch.py", "exact.py")):
            break  # attempt() itself: the frames beyond it belong to the caller of the check
        frame = frame.f_back
    if innermost is None or frame is None:
        return None
    symbol = owner_of(innermost) or symbol_of(innermost)
    return Place(file=innermost.f_code.co_filename, line=innermost.f_lineno, symbol=symbol)


def locate(subject: Subject, sample: Sample, setting: Setting, *, long_sum: bool = False) -> Culprit | None:
    """The culprit line, or None where the two runs do not go through the same operators (or the code is not made of operators).

    long_sum  the error grew with the number of rows: the line that adds most often into a low-precision tensor, if there is one
    """
    narrow, wide = _Recorder(), _Recorder()
    if not attempt(subject, sample, setting, around=lambda: narrow).ran:
        return None

    @contextmanager
    def exactly() -> Any:
        with exact(), wide:
            yield

    if not attempt(subject, sample, setting, exact=torch.float64, around=exactly).ran:
        return None
    if [s.operator for s in narrow.steps] != [s.operator for s in wide.steps]:
        return None
    errors = [_error(n.values, w.values) for n, w in zip(narrow.steps, wide.steps)]
    given = [_error(n.inputs, w.inputs) for n, w in zip(narrow.steps, wide.steps)]
    placed = [i for i, step in enumerate(narrow.steps) if step.place is not None]
    if not placed:
        return None
    if long_sum:
        sums = Counter(step.place for step in narrow.steps if step.accumulates and step.place is not None and _is_low(step.dtype))
        busiest = next((place for place, count in sums.most_common(1) if count > 1), None)
        last = max((i for i in placed if narrow.steps[i].place == busiest and narrow.steps[i].accumulates), default=None)
        if last is not None:
            return _culprit(narrow.steps, last, given[last], errors[last])
    # the step that made its own result much worse than what it was given, and above all the error that the last steps show
    final = max((errors[i] for i in placed), default=0.0)
    if final == float("inf"):
        endless = next(i for i in placed if errors[i] == final)
        return _culprit(narrow.steps, endless, given[endless], final)
    growth = {i: errors[i] / max(given[i], 1e-9) for i in placed if errors[i] > final / 8}
    index = next((i for i in placed if i in growth and growth[i] > 4), None)
    if index is None:
        index = next((i for i in placed if errors[i] > final / 4), None)
    if index is None:
        return None
    return _culprit(narrow.steps, index, given[index], errors[index])


def _culprit(steps: list[_Step], index: int, before: float, after: float) -> Culprit:
    step = steps[index]
    assert step.place is not None
    return Culprit(
        place=step.place,
        source=linecache.getline(step.place.file or "", step.place.line or 0).split("#")[0].strip(),
        operator=step.operator,
        dtype=step.dtype,
        before=before,
        after=after,
        repeats=sum(s.place == step.place and s.accumulates for s in steps),
        accumulates=step.accumulates,
    )


def _is_low(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and torch.finfo(dtype).bits < 32


def running_sums(subject: Subject, sample: Sample, setting: Setting) -> dict[tuple[str | None, int | None, str | None], int]:
    """How often each line adds into a low-precision float of the shape it already had: place -> count."""
    recorder = _Recorder()
    if not attempt(subject, sample, setting, around=lambda: recorder).ran:
        return {}
    counts: dict[tuple[str | None, int | None, str | None], int] = {}
    for step in recorder.steps:
        if step.accumulates and _is_low(step.dtype) and step.place is not None:
            key = (step.place.file, step.place.line, step.place.symbol)
            counts[key] = counts.get(key, 0) + 1
    return counts


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
