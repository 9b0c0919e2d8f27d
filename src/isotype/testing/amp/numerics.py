"""The errors behind AC006 and AC007: results that are further from the truth than their dtypes explain.

The truth is the reference (or the function itself) in fp64 on the very values the narrow dtypes hold. The allowed error is `SLACK` times
that of the yardstick at the same dtypes: the reference, else the function's plain twin, which is its own forward as ordinary differentiable
PyTorch. Where there is neither, what a rounding of the inputs does to the result. No tolerance is typed anywhere else."""

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
BLIND_SLACK = 8.0  # the same where only the inputs' rounding is known
ROW_SLACK = 16.0  # a single row may be unlucky
FEW = 8  # results of fewer numbers may be near the truth by luck


@dataclass(frozen=True)
class Excess:
    """A result whose error is larger than allowed. Errors are relative to the truth's norm."""

    result: str
    error: float
    excused: float
    yardstick: str
    worst_row: int | None = None


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
        self._noise: dict[Any, list[dict[str, Tensor]]] = {}

    def on(self, sample: Sample, *, inside_fp32: bool | None = None) -> Numerics:
        """The same subject on another sample."""
        return Numerics(self.subject, self.plain, sample, inside_fp32=self.inside_fp32 if inside_fp32 is None else inside_fp32)

    def truth(self, setting: Setting) -> dict[str, Tensor]:
        key = setting.dtypes
        if key not in self._truths:
            self._truths[key] = self.exactly(setting)
        return self._truths[key]

    def noise(self, setting: Setting) -> list[dict[str, Tensor]]:
        """Exact results for inputs moved by one rounding of the lowest dtype in play."""
        unit = torch.finfo(setting.lowest(self.sample)).eps / 2
        key = (setting.dtypes, unit)
        if key not in self._noise:
            runs = [self.exactly(setting, relative_noise=unit, noise_seed=seed) for seed in (0, 1)]
            self._noise[key] = [run for run in runs if run]
        return self._noise[key]

    def exactly(self, setting: Setting, relative_noise: float = 0.0, noise_seed: int = 0) -> dict[str, Tensor]:
        """What the reference, or the subject itself, gives in fp64."""
        subject = self.plain or self.subject
        for wide in (torch.float64, torch.float32):
            around = exact if wide == torch.float64 else _as_is
            outcome = attempt(
                subject, self.sample, setting, exact=wide, around=around, relative_noise=relative_noise, noise_seed=noise_seed
            )
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

    @property
    def sighted(self) -> bool:
        """Whether there is a yardstick: a reference, or a twin."""
        return self.plain is not None or self.twin_agrees

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
            sighted = yardstick is not None and result in yardstick
            own = _distance(yardstick[result], exactly) if yardstick is not None and sighted else 0.0
            slack = SLACK if sighted else BLIND_SLACK
            allowed = slack * max(own, rounding * size)
            distance = _distance(given, exactly)
            errors[result] = distance / size if size else float(distance > 0)
            if distance > allowed and (not sighted or exactly.numel() < FEW):
                allowed = max(allowed, slack * self._moved(result, setting, exactly))
            if distance > allowed and not sighted:
                allowed = max(allowed, slack * self._doubt(result, setting, exactly))
            if distance > allowed:
                excesses.append(Excess(result, errors[result], allowed / size if size else 0.0, label))
            elif yardstick is not None and sighted and exactly.dim() > 1:
                row = _worst_row(given, exactly, yardstick[result].detach().double(), rounding)
                if row is not None:
                    excesses.append(Excess(result, row[1], row[2], label, worst_row=row[0]))
        return Measured(errors, tuple(excesses))

    def yardstick_errors(self, setting: Setting) -> dict[str, float]:
        """Relative error of plain PyTorch, at the same dtypes and lengths, in each result; empty where there is no yardstick."""
        yardstick, _ = self._yardstick(setting)
        truth = self.truth(setting)
        given = {n: t for n, t in (yardstick or {}).items() if n in truth and t.shape == truth[n].shape and _norm(truth[n])}
        return {n: _distance(t, truth[n]) / _norm(truth[n]) for n, t in given.items()}

    def alike(self, result: str, left: Tensor | None, right: Tensor | None, setting: Setting, usual: Tensor | None = None) -> bool:
        """Equal but for the order of a few additions.

        Where that is exceeded, but for what one rounding of the inputs changes, or for the error the function always has.
        usual  the same result where it is of its usual size, should `right` be nothing but rounding errors
        """
        if left is None or right is None:
            return (left is None) == (right is None)
        if left.shape != right.shape:
            return False
        distance, size = _distance(left, right), max(_norm(right), _norm(usual) if usual is not None else 0.0)
        if distance <= 8 * torch.finfo(setting.lowest(self.sample)).eps * size:
            return True
        return distance <= SLACK * self._slip(result, setting) * size

    def _moved(self, result: str, setting: Setting, exactly: Tensor) -> float:
        """How far one rounding of the inputs moves a result."""
        return max((_distance(noisy[result], exactly) for noisy in self.noise(setting) if result in noisy), default=0.0)

    def _doubt(self, result: str, setting: Setting, exactly: Tensor) -> float:
        """How far the truth is from the same run in fp32: a Triton kernel given fp64 computes as it is written, perhaps no better."""
        single = attempt(self.subject, self.sample, setting, exact=torch.float32).results()
        return _distance(single[result], exactly) if result in single else float("inf")

    def _slip(self, result: str, setting: Setting) -> float:
        """Relative error that a result has anyway, from rounded inputs or inside."""
        exactly = self.truth(setting).get(result)
        if exactly is None or not _norm(exactly):
            return 0.0
        runs = [*self.noise(setting), attempt(self.subject, self.sample, setting).results()]
        return max((_distance(run[result], exactly) for run in runs if result in run), default=0.0) / _norm(exactly)

    def _yardstick(self, setting: Setting) -> tuple[dict[str, Tensor] | None, str]:
        if self.plain is not None:
            wide = Setting(setting.dtypes)
            if self.inside_fp32:
                outcome = attempt(self.plain, self.sample, wide, exact=torch.float32)
                return (outcome.results(), "the reference in fp32, rounded once") if outcome.ran else (None, "")
            outcome = attempt(self.plain, self.sample, setting)
            return (outcome.results(), "the reference at the same dtypes") if outcome.ran else (None, _BLIND)
        if self.twin_agrees:
            outcome = attempt(self.subject, self.sample, setting, around=plain_functions)
            if outcome.ran and not outcome.functions:
                return outcome.results(), "plain PyTorch running the same forward"
        return None, _BLIND


_BLIND = "what one rounding of the inputs changes"


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


def _worst_row(given: Tensor, exactly: Tensor, plain: Tensor, rounding: float) -> tuple[int, float, float] | None:
    """The row (of the last dimension) furthest beyond what is excused: its number, its error, what is excused; None when none is."""

    def rows(t: Tensor) -> Tensor:
        norms: Tensor = torch.nan_to_num(t.reshape(-1, t.shape[-1])).norm(dim=1)
        return norms

    size = rows(exactly)
    base = torch.maximum(rows(plain - exactly), rounding * size)
    floor = rounding * float(size.square().mean().sqrt()) * 0.1  # rows of almost nothing are no evidence
    excess = rows(given - exactly) / (ROW_SLACK * (base + floor)).clamp_min(1e-300)
    worst = int(excess.argmax())
    if float(excess[worst]) <= 1 or float(size[worst]) == 0:
        return None
    return worst, float(rows(given - exactly)[worst] / size[worst]), float(ROW_SLACK * (base + floor)[worst] / size[worst])


def percent(value: float) -> str:
    return "not finite" if value == float("inf") else f"{value:.2g}"
