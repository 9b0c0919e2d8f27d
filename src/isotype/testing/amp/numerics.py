"""The errors behind AC006 and AC007: results that are further from the truth than their dtypes explain.

The truth is the reference (or the function itself) in fp64 on the very values the narrow dtypes hold. The allowed error is `SLACK` times
that of the yardstick at the same dtypes: the reference, else the function's plain twin, which is its own forward as ordinary differentiable
PyTorch. Where there is neither, no error is judged. No tolerance is typed anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils import _pytree as pytree

from ...observe.operators import Operator
from ...observe.tape import Tape
from .attempt import Outcome, attempt
from .samples import Sample, Setting
from .subjects import Subject

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def _computed(op: Operator, args: tuple, kwargs: dict) -> Any:
    """Computes in fp64; a cast to a narrower float does nothing."""
    tensors = not op.func._schema.is_mutable
    args, kwargs = pytree.tree_map(_widened(tensors=tensors), (args, kwargs))
    return pytree.tree_map(_widened(tensors=tensors), op(*args, **kwargs))


def _widened(*, tensors: bool) -> Any:
    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value in _NARROW else value
        if tensors and isinstance(value, Tensor) and value.dtype in _NARROW:
            return value.to(torch.float64)
        return value

    return widen


@contextmanager
def exact() -> Iterator[None]:
    """Within this block every operator computes in fp64, also what is made without a dtype.

    Code that is not made of torch operators (a Triton kernel) is not reached; it computes as it is written.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Tape(_computed):
            yield
    finally:
        torch.set_default_dtype(before)


class _PlainContext:
    """Takes what forward stores and keeps none of it."""

    def __init__(self, wanted: tuple[bool, ...]) -> None:
        self.needs_input_grad = wanted
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_dirty(self, *tensors: Tensor) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


@contextmanager
def plain_functions() -> Iterator[None]:
    """Within this block `SomeFunction.apply(...)` runs its forward under autograd and never its backward."""
    original = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.setup_context is not Function.setup_context:
            return cls.forward(*args, **kwargs)
        return cls.forward(_PlainContext(tuple(isinstance(a, Tensor) and a.requires_grad for a in args)), *args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]  # for every function of the program, in this block
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]  # gives the method back


SLACK = 4.0  # how many times worse than the yardstick a result may be
REORDERED = 16  # steps of the dtype by which another order of additions may change a result


@dataclass(frozen=True)
class Excess:
    """A result whose error is larger than allowed. Errors are relative to the truth's norm."""

    result: str
    error: float
    excused: float
    yardstick: str


@dataclass(frozen=True)
class Measured:
    """Relative error of each result, and those in excess."""

    errors: dict[str, float]
    excesses: tuple[Excess, ...]


class Numerics:
    """Errors of one subject on one sample; truths and yardsticks are computed once for each dtype combination."""

    def __init__(self, subject: Subject, plain: Subject | None, sample: Sample, *, inside_fp32: bool = False) -> None:
        self.subject, self.plain, self.sample, self.inside_fp32 = subject, plain, sample, inside_fp32
        self._truths: dict[Any, dict[str, Tensor]] = {}

    def on(self, sample: Sample, *, inside_fp32: bool | None = None) -> Numerics:
        """The same subject on another sample."""
        return Numerics(self.subject, self.plain, sample, inside_fp32=self.inside_fp32 if inside_fp32 is None else inside_fp32)

    def truth(self, setting: Setting) -> dict[str, Tensor]:
        key = setting.dtypes
        if key not in self._truths:
            self._truths[key] = self.exactly(setting)
        return self._truths[key]

    def exactly(self, setting: Setting) -> dict[str, Tensor]:
        """What the reference, or the subject itself, gives in fp64."""
        subject = self.plain or self.subject
        for wide in (torch.float64, torch.float32):
            around = exact if wide == torch.float64 else _as_is
            outcome = attempt(subject, self.sample, setting, exact=wide, around=around)
            if outcome.ran:
                return {n: t.detach().double() for n, t in outcome.results().items()}
        return {}

    @cached_property
    def twin_agrees(self) -> bool:
        """Whether the subject is made of hand-written Functions whose forward autograd can differentiate to the same gradients."""
        wide, setting = torch.float64, Setting(None)
        own = attempt(self.subject, self.sample, setting, exact=wide, around=exact).results()
        run = attempt(self.subject, self.sample, setting, exact=wide, around=_exact_twin)
        twin = run.results()
        return run.ran and not run.functions and set(twin) == set(own) and all(_agree(twin[n], own[n]) for n in own)

    def measure(self, outcome: Outcome, setting: Setting) -> Measured:
        truth = self.truth(setting)
        yardstick, label = self._yardstick(setting)
        unit = torch.finfo(setting.lowest(self.sample)).eps / 2
        errors, excesses = {}, []
        for result, given in outcome.results().items():
            if result not in truth or truth[result].shape != given.shape:
                continue
            exactly, given = truth[result], given.detach().double()
            size = _norm(exactly)
            rounding = max(unit, torch.finfo(outcome.results()[result].dtype).eps / 2)
            distance = _distance(given, exactly)
            errors[result] = distance / size if size else float(distance > 0)
            if yardstick is None or result not in yardstick:
                continue
            allowed = SLACK * max(_distance(yardstick[result], exactly), rounding * size)
            if distance > allowed:
                excesses.append(Excess(result, errors[result], allowed / size if size else 0.0, label))
        return Measured(errors, tuple(excesses))

    def alike(self, left: Tensor | None, right: Tensor | None, setting: Setting, usual: Tensor | None = None) -> bool:
        """Equal but for the order of additions.

        usual  the same result where it is of its usual size, should `right` be nothing but rounding errors
        """
        if left is None or right is None:
            return (left is None) == (right is None)
        if left.shape != right.shape:
            return False
        distance, size = _distance(left, right), max(_norm(right), _norm(usual) if usual is not None else 0.0)
        return distance <= REORDERED * torch.finfo(setting.lowest(self.sample)).eps * size

    def _yardstick(self, setting: Setting) -> tuple[dict[str, Tensor] | None, str]:
        if self.plain is not None:
            wide = Setting(setting.dtypes)
            if self.inside_fp32:
                outcome = attempt(self.plain, self.sample, wide, exact=torch.float32)
                return (outcome.results(), "the reference in fp32, rounded once") if outcome.ran else (None, "")
            outcome = attempt(self.plain, self.sample, setting)
            return (outcome.results(), "the reference at the same dtypes") if outcome.ran else (None, "")
        if self.twin_agrees:
            outcome = attempt(self.subject, self.sample, setting, around=plain_functions)
            if outcome.ran and not outcome.functions:
                return outcome.results(), "plain PyTorch running the same forward"
        return None, ""


@contextmanager
def _as_is() -> Iterator[None]:
    yield


@contextmanager
def _exact_twin() -> Iterator[None]:
    with exact(), plain_functions():
        yield


def _agree(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and _distance(left, right) <= 1e-5 * _norm(right) + 1e-12


def _norm(t: Tensor) -> float:
    finite = t.detach().double()
    return float(finite[torch.isfinite(finite)].norm())


def _distance(given: Tensor, exactly: Tensor) -> float:
    """Norm of the difference where the truth is finite; infinite where the result is not."""
    given, exactly = given.detach().double(), exactly.detach().double()
    finite = torch.isfinite(exactly)
    difference = (given - exactly)[finite]
    return float("inf") if not bool(torch.isfinite(difference).all()) else float(difference.norm())


def percent(value: float) -> str:
    return "not finite" if value == float("inf") else f"{value:.2g}"
