"""Defines the rules about numerical errors.

AC006, AC007  results whose error is too large to be caused by rounding to their dtypes
AC022         a value that is computed from a weight and is rounded before it is used. An example is
              the sum in `x * (1 + weight)` if it is computed in bf16 (found in four norms of
              transformers 5.23)

The error of a result is its difference from the exact result. To get the exact results, the inputs
are rounded to the narrow dtypes, and then the reference (or the function itself) computes in fp64.
The allowed error is `SLACK` times the error that plain PyTorch code makes with the same dtypes, or
`SLACK` roundings to the narrowest of these dtypes if that is more.
This plain code (called `yardstick` below) is the reference, if there is one. Otherwise it is the
forward of the function, run as ordinary code that autograd differentiates. If neither exists,
errors are not checked. There is no other tolerance.

For AC022, the module computes for each column how the error depends on the exact value, with a
linear regression over many rows. Rounding errors of activations differ from row to row and average
out. The rounding error of a weight is the same in every row, so it changes the slope that the
regression finds for the column of this weight. If the slopes of the columns differ by more than
random errors can explain, a weight was rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...dtypes import format_dtype
from ...finding import Place
from .attempt import (
    BACKWARD,
    FORWARD,
    Fault,
    Outcome,
    attempt,
    faulty_method_location,
    fp64_arithmetic,
    make_fault,
    plain_functions,
)
from .locate import locate
from .samples import LOW, PARAM, Sample, Setting, Subject, count_rows, lengthen

SLACK = 4.0  # factor by which a result's error may exceed the yardstick's
# the relative error in fp64 from which a result is another function than the reference's: a value
# that the code itself rounds to bf16 has a tenth of it
MAX_FP64_ERROR = 0.02
# number of machine epsilons by which another order of additions may change a result
REORDERING_STEPS = 16


@dataclass(frozen=True)
class Excess:
    """A result whose error is larger than allowed. Errors are divided by the norm of the exact
    result.

    yardstick  what the plain code is (see the docstring of the module)
    """

    result: str
    error: float
    allowed: float
    yardstick: str


@dataclass(frozen=True)
class Measurement:
    """The relative error of one result in one run, the error of the plain code with the same
    dtypes, and the error that is allowed.
    """

    result: str
    setting: str
    error: float
    plain_error: float
    allowed: float


@dataclass(frozen=True)
class Difference:
    """How far a result is from the result of the reference in fp64.

    factor  the number by which the reference's result must be multiplied to get the result; None if
            there is no such number
    """

    error: float
    factor: float | None


@dataclass
class Numerics:
    """Measures the errors of one function with one set of arguments. The exact results are computed
    only once for each dtype combination.

    different_results  the results that differ from the reference even in fp64, so that rounding
                       cannot be the cause
    compared_in        the dtype in which they were compared: fp64, or fp32 if the function does not
                       run in fp64; empty if they were not compared
    """

    subject: Subject
    reference: Subject | None
    sample: Sample
    inside_fp32: bool = False
    different_results: frozenset[str] = frozenset()
    measurements: list[Measurement] = field(default_factory=list)
    compared_in: str = ""
    _truths: dict[Any, dict[str, Tensor]] = field(default_factory=dict)

    def with_sample(self, sample: Sample) -> Numerics:
        """Returns an object that measures the errors of the same function with other arguments."""
        return Numerics(
            self.subject, self.reference, sample, self.inside_fp32, self.different_results
        )

    def truth(self, setting: Setting) -> dict[str, Tensor]:
        """Returns the exact results, which are computed in fp64. They are the results of the
        reference, or of the checked function itself if there is no reference. If the function
        raises an error in fp64, they are computed in fp32. If the function raises an error in fp32
        too, there are no exact results.
        """
        if setting.dtypes not in self._truths:
            self._truths[setting.dtypes] = self._compute_truth(setting)
        return self._truths[setting.dtypes]

    def _compute_truth(self, setting: Setting) -> dict[str, Tensor]:
        subject = self.reference or self.subject
        outcome = attempt(
            subject, self.sample, setting, widen_to=torch.float64, context=fp64_arithmetic
        )
        if not outcome.succeeded:
            outcome = attempt(subject, self.sample, setting, widen_to=torch.float32)
        if not outcome.succeeded:
            return {}
        truth = {}
        for result, value in outcome.results().items():
            truth[result] = value.detach().double()
        return truth

    @cached_property
    def has_plain_twin(self) -> bool:
        """True if the checked function consists of hand-written Functions, and if their forward can
        run as ordinary code. Autograd must compute the same gradients from this code.
        """
        function_results = self._attempt_in_fp64(fp64_arithmetic).results()
        outcome = self._attempt_in_fp64(_exact_twin)
        twin_results = outcome.results()
        if not outcome.succeeded or outcome.functions or set(twin_results) != set(function_results):
            return False
        return all(
            _is_close(twin_results[result], function_results[result]) for result in function_results
        )

    def _attempt_in_fp64(self, context: Callable[[], Any]) -> Outcome:
        return attempt(
            self.subject, self.sample, Setting(None), widen_to=torch.float64, context=context
        )

    def compare_in_fp64(self) -> tuple[Outcome, dict[str, Difference]]:
        """Runs the function and the reference in fp64. Returns the run of the function, and the
        results that differ. If the function does not run in fp64 (many Triton kernels do not), it
        runs in fp32.
        """
        outcome = self._attempt_in_fp64(fp64_arithmetic)
        compared_in = "fp64"
        if not outcome.succeeded:
            outcome = attempt(self.subject, self.sample, Setting(None), widen_to=torch.float32)
            compared_in = "fp32"
        differences: dict[str, Difference] = {}
        small_differences: dict[str, Difference] = {}
        truth = self.truth(Setting(None))
        if self.reference is None or not outcome.succeeded or not truth:
            return outcome, differences
        self.compared_in = compared_in
        for result, value in outcome.results().items():
            exact_value = truth.get(result)
            if exact_value is None or exact_value.shape != value.shape:
                continue
            size = _norm(exact_value)
            error = _distance(value, exact_value)
            if size and error > FP32_ORDER_ERROR * size:
                factor = _find_factor(value.detach().double(), exact_value)
                is_large = error > MAX_FP64_ERROR * size
                selected = differences if is_large else small_differences
                selected[result] = Difference(error / size, factor)
        if compared_in == "fp64" and small_differences and not differences:
            differences = self._select_measured(small_differences)
        return outcome, differences

    def _select_measured(self, differences: dict[str, Difference]) -> dict[str, Difference]:
        """Returns the small differences in fp64, such as that of another eps, which explain an error
        above the allowed one in the dtypes of the inputs. Without such an error, a difference may be
        an approximation that is good enough.
        """
        outcome = attempt(self.subject, self.sample, Setting(None))
        if not outcome.succeeded:
            return {}
        measurement_count = len(self.measurements)
        _, excesses = self.measure(outcome, Setting(None))
        del self.measurements[measurement_count:]
        return {
            excess.result: differences[excess.result]
            for excess in excesses
            if excess.result in differences and differences[excess.result].error > excess.error / 2
        }

    def measure(self, outcome: Outcome, setting: Setting) -> tuple[dict[str, float], list[Excess]]:
        """Returns the relative error of each result, and the results whose error is larger than
        allowed.
        """
        truth = self.truth(setting)
        yardstick, label = self._yardstick(setting)
        unit = torch.finfo(setting.lowest(self.sample)).eps / 2
        errors = dict[str, float]()
        excesses = []
        for result, value in outcome.results().items():
            if result in self.different_results:
                continue
            if result not in truth or truth[result].shape != value.shape:
                continue
            exact_value = truth[result]
            size = _norm(exact_value)
            distance = _distance(value, exact_value)
            errors[result] = float(distance > 0)
            if size:
                errors[result] = distance / size
            if result not in yardstick:
                continue
            rounding = max(unit, torch.finfo(value.dtype).eps / 2)
            plain_distance = _distance(yardstick[result], exact_value)
            allowed = SLACK * max(plain_distance, rounding * size)
            if size:
                tolerated = allowed / size
                if setting.lowest(self.sample) == torch.float32:
                    tolerated = max(tolerated, FP32_ORDER_ERROR)
                self.measurements.append(
                    Measurement(
                        result,
                        setting.describe(),
                        errors[result],
                        plain_distance / size,
                        tolerated,
                    )
                )
            if distance > allowed:
                relative = 0.0
                if size:
                    relative = allowed / size
                excesses.append(Excess(result, errors[result], relative, label))
        return errors, excesses

    def find_captured_rows(self) -> str | None:
        """The function may refer to a tensor that is not an argument and has one entry for each
        row. With more rows, the function would read past the end of this tensor. Returns a text
        that names such a tensor. Returns None if there is no such tensor.
        """
        row_counts = count_rows(self.sample)
        subjects = [self.subject]
        if self.reference is not None:
            subjects.append(self.reference)
        for subject in subjects:
            for tensor in subject.captured_tensors():
                if tensor.dim() and tensor.shape[0] in row_counts and tensor.shape[0] > 1:
                    shape = " ".join(map(str, tensor.shape))
                    return (
                        f"{subject.label} refers to a tensor of shape [{shape}], which has an entry"
                        " for each row; pass it as an input"
                    )
        return None

    def equals_up_to_order(
        self,
        actual: Tensor | None,
        expected: Tensor | None,
        setting: Setting,
        typical_result: Tensor | None = None,
    ) -> bool:
        """True if two results differ so little that another order of the additions can be the
        reason.

        typical_result  a result of normal size; it is needed if `expected` would be zero without
                        rounding errors
        """
        if actual is None or expected is None:
            return (actual is None) == (expected is None)
        if actual.shape != expected.shape:
            return False
        size = _norm(expected)
        if typical_result is not None:
            size = max(size, _norm(typical_result))
        step = torch.finfo(setting.lowest(self.sample)).eps
        return _distance(actual, expected) <= REORDERING_STEPS * step * size

    def _yardstick(self, setting: Setting) -> tuple[dict[str, Tensor], str]:
        """Runs ordinary PyTorch code, from whose error the allowed error is computed. Returns the
        results of this code, and a name for it in messages.
        """
        if self.reference is not None and self.inside_fp32:
            outcome = attempt(
                self.reference, self.sample, Setting(setting.dtypes), widen_to=torch.float32
            )
            label = "the reference in fp32, rounded once"
        elif self.reference is not None:
            outcome = attempt(self.reference, self.sample, setting)
            label = "the reference at the same dtypes"
        elif self.has_plain_twin:
            outcome = attempt(self.subject, self.sample, setting, context=plain_functions)
            label = "plain PyTorch running the same forward"
        else:
            return {}, ""
        is_plain = self.reference is not None or not outcome.functions
        if outcome.succeeded and is_plain:
            return outcome.results(), label
        return {}, label


@contextmanager
def _exact_twin() -> Iterator[None]:
    """Within this block, hand-written Functions run as ordinary code that autograd differentiates,
    in fp64.
    """
    with fp64_arithmetic(), plain_functions():
        yield


def _find_factor(actual: Tensor, expected: Tensor) -> float | None:
    """Returns the number by which the expected values must be multiplied to get the actual values.
    Returns None if there is no such number.
    """
    if not bool(torch.isfinite(actual).all() & torch.isfinite(expected).all()):
        return None
    factor = float((actual * expected).sum() / expected.square().sum())
    is_multiple = _distance(actual, factor * expected) <= 1e-4 * _norm(actual) + 1e-12
    return factor if is_multiple else None


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    return (
        actual.shape == expected.shape
        and _distance(actual, expected) <= 1e-5 * _norm(expected) + 1e-12
    )


def _norm(tensor: Tensor) -> float:
    """Returns the norm of a tensor. Infinite elements and NaN are left out."""
    values = tensor.detach().double()
    return float(values[torch.isfinite(values)].norm())


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference between a result and the exact result. Elements whose
    exact value is not finite are left out. If an element of the result is not finite although its
    exact value is finite, the norm is infinite.
    """
    actual = actual.detach().double()
    expected = expected.detach().double()
    finite = torch.isfinite(expected)
    difference = (actual - expected)[finite]
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    return float(difference.norm())


def format_error(value: float) -> str:
    if value == float("inf"):
        return "not finite"
    return f"{value:.2g}"


# the number of rows of the first long run, and the largest number of rows
SOME_ROWS = 512
MANY_ROWS = 4096
MAX_ELEMENTS = 8_000_000  # the largest number of elements of a lengthened sample
# the relative error that another order of additions causes in fp32 sums
FP32_ORDER_ERROR = 64 * torch.finfo(torch.float32).eps


def precision_faults(outcome: Outcome, setting: Setting, numerics: Numerics) -> list[Fault]:
    """Returns a fault AC006 if results of a run have errors above the allowed error. It returns one
    fault, for the result whose error exceeds the allowed error most.
    """
    _, excesses = numerics.measure(outcome, setting)
    if not excesses:
        return []
    worst = _largest_excess(excesses)
    if worst.error < FP32_ORDER_ERROR and setting.lowest(numerics.sample) == torch.float32:
        return []  # another order of additions in fp32 explains the error
    return [_precision_fault("AC006", worst, outcome, setting, numerics.subject, numerics.sample)]


_WIDE = {
    "fp64": "fp64, where rounding plays no part",
    "fp32": "fp32, where rounding is far smaller (it does not run in fp64)",
}


def different_function_faults(numerics: Numerics) -> tuple[list[Fault], frozenset[str]]:
    """Returns a fault AC023 if results differ from the reference even in fp64. Also returns the
    names of these results.
    """
    outcome, differences = numerics.compare_in_fp64()
    if not differences:
        return [], frozenset()
    forward_results = [result for result in differences if not result.startswith("gradient")]
    stage = FORWARD if forward_results else BACKWARD
    location = faulty_method_location(numerics.subject, outcome, stage)
    worst = max(differences.values(), key=lambda difference: difference.error)
    factors = {difference.factor for difference in differences.values()}
    factor = factors.pop() if len(factors) == 1 else None
    names = list(differences)
    fault = make_fault(
        "AC023",
        location,
        location.symbol,
        location.line,
        results=", ".join(names),
        several=len(names) > 1,
        forward=bool(forward_results),
        error=format_error(worst.error),
        wide=_WIDE[numerics.compared_in],
        factor="" if factor is None else f"{factor:.4g}",
    )
    return [fault], frozenset(names)


def long_sum_faults(numerics: Numerics, setting: Setting) -> tuple[list[Fault], str | None]:
    """Returns a fault AC007 if an error appears only with thousands of rows. The second value is
    None, or the reason why the function could not be checked with so many rows.
    """
    subject = numerics.subject
    sample = numerics.sample
    short_outcome = attempt(subject, sample, setting)
    long_sample = lengthen(sample, SOME_ROWS)
    if not short_outcome.succeeded or long_sample is None:
        return [], None
    if captured := numerics.find_captured_rows():
        return [], f"long reductions: {captured}"
    outcome = attempt(subject, long_sample, setting)
    if outcome.succeeded and _grows_linearly(short_outcome, outcome, sample, long_sample):
        elements = sum(long_sample.tensor(slot).numel() for slot in long_sample.slots)
        rows = min(MANY_ROWS, MAX_ELEMENTS * SOME_ROWS // max(1, elements))
        long_sample = lengthen(sample, max(SOME_ROWS, rows)) or long_sample
        outcome = attempt(subject, long_sample, setting)
    rows = _count_rows(long_sample)
    if not outcome.succeeded:
        # not a fault, since a function may require a fixed number of rows
        return [], f"long reductions: the function refuses its inputs lengthened to {rows} rows"
    short_errors, short_excesses = numerics.measure(short_outcome, setting)
    reported = {excess.result for excess in short_excesses}
    _, long_excesses = numerics.with_sample(long_sample).measure(outcome, setting)
    excesses = [excess for excess in long_excesses if excess.result not in reported]
    if not excesses:
        return [], None
    worst = _largest_excess(excesses)
    key, finding = _precision_fault("AC007", worst, outcome, setting, subject, long_sample)
    short_error = format_error(short_errors.get(worst.result, 0.0))
    length = f"relative error {short_error} as given, {format_error(worst.error)} at {rows} rows"
    details = (("length", length), *finding.details)
    return [(key, replace(finding, details=details))], None


def _grows_linearly(
    short_outcome: Outcome, outcome: Outcome, sample: Sample, long_sample: Sample
) -> bool:
    """True if the number of output elements grew in proportion to the number of rows. If the
    outputs grow faster, as in attention or if weights were mistaken for rows, a run with thousands
    of rows would take too long.
    """
    growth = _count_rows(long_sample) * _count_results(short_outcome)
    return _count_results(outcome) * _count_rows(sample) <= 1.5 * growth


def _largest_excess(excesses: list[Excess]) -> Excess:
    """Returns the result whose error is largest in relation to the allowed error."""
    return max(excesses, key=lambda e: e.error / max(e.allowed, 1e-30))


def _count_rows(sample: Sample) -> int:
    """Returns the size of the first dimension of the first tensor that is not a scalar. This is the
    number of rows.
    """
    for slot in sample.slots:
        tensor = sample.tensor(slot)
        if tensor.dim():
            return tensor.shape[0]
    return 1


def _count_results(outcome: Outcome) -> int:
    """Returns the total number of elements in all outputs."""
    return sum(tensor.numel() for tensor in outcome.values)


def _precision_fault(
    code: str, excess: Excess, outcome: Outcome, setting: Setting, subject: Subject, sample: Sample
) -> Fault:
    """Returns the finding for one result whose error is too large. The location of the finding is
    the line at which the precision was lost.
    """
    imprecise_step = locate(subject, sample, setting, is_long_sum=code == "AC007")
    error = format_error(excess.error)
    allowed = format_error(excess.allowed)
    details = [("error", f"{error} of its norm; {allowed} is excused by {excess.yardstick}")]
    low_dtype = setting.lowest(sample)
    repeats = 0
    cancels = False
    sums = False
    has_rounded_operands = False
    if imprecise_step is None:
        stage = BACKWARD if excess.result.startswith("gradient") else FORWARD
        location = faulty_method_location(subject, outcome, stage)
    else:
        location = imprecise_step.location
        low_dtype = imprecise_step.dtype or low_dtype
        repeats = imprecise_step.repeats
        cancels = imprecise_step.accumulates and imprecise_step.output_error > 8 * max(
            imprecise_step.input_error, 1e-9
        )
        sums = imprecise_step.accumulates and repeats >= 4
        # Liger-Kernel's JSD subtracts log-probabilities in fp32 that were rounded to fp16
        has_rounded_operands = low_dtype == torch.float32 and imprecise_step.input_error > 1e-5
        if has_rounded_operands:
            low_dtype = setting.lowest(sample)
        input_error = format_error(imprecise_step.input_error)
        output_error = format_error(imprecise_step.output_error)
        errors = (
            f"relative error {input_error} before this operator ({imprecise_step.operator}),"
            f" {output_error} after"
        )
        details += [("code", imprecise_step.source), ("there", errors)]
    if not location.file:
        location = Place(
            file=subject.location.file, line=subject.location.line, symbol=location.symbol
        )
    times = ""
    if repeats > 1:
        times = f" ({repeats} additions)"
    key, finding = make_fault(
        "AC006",
        location,
        location.symbol,
        location.line,
        details=tuple(details),
        long=code == "AC007",
        result=excess.result,
        low=format_dtype(str(low_dtype)),
        times=times,
        cancels=cancels,
        sums=sums,
        has_rounded_operands=has_rounded_operands,
        repeats=repeats,
        setting=setting.describe(),
    )
    return (code, *key[1:]), replace(finding, code=code)


ROWS = 1024  # an output with fewer rows is not examined
# the largest number of parameters of a checked module: in deeper modules the rounding errors of
# activations do not average out
MAX_PARAMETERS = 16
MIN_COLUMNS = 8  # an output with fewer columns is not examined
# the smallest standard deviation of the columns' slopes that is reported, in machine epsilons: one
# rounding of values between 1 and 2 has a standard deviation of 0.29
MIN_SPREAD = 0.12
MIN_CORRELATION = 0.7  # required correlation of the columns' slopes between two sets of rows
NOISE_FACTOR = 5.0  # factor by which the slopes' spread must exceed the noise of the rows
OUTLIER_FACTOR = 6.0  # a row whose error exceeds this multiple of the median error is left out


def rounded_weight_faults(numerics: Numerics, setting: Setting) -> list[Fault]:
    """Returns a fault AC022 if a weight is rounded before it is used. The check is only made if all
    tensors have the same low-precision dtype, and if there are weights and rows.
    """
    subject = numerics.subject
    sample = numerics.sample
    dtypes = sample.dtypes_in_play(setting.group_dtypes)
    if setting.autocast is not None or len(dtypes) != 1 or setting.lowest(sample) not in LOW:
        return []
    if subject.module is not None:
        parameters = list(subject.module.parameters())
        if len(parameters) > MAX_PARAMETERS:
            return []
    has_weights = any(slot.group.startswith(PARAM) for slot in sample.slots)
    if not has_weights and not subject.groups:
        return []
    slopes = _column_slopes(numerics, setting, seed=0)
    for result, (slope, noise, dtype) in slopes.items():
        spread = float(slope.std())
        if spread <= MIN_SPREAD * torch.finfo(dtype).eps or spread <= NOISE_FACTOR * noise:
            continue
        # a rounding of a statistic of the rows would differ for other rows
        repeated_slopes = _column_slopes(numerics, setting, seed=1).get(result)
        if repeated_slopes is None or not _are_correlated(slope, repeated_slopes[0]):
            continue
        location = subject.location
        values: dict[str, Any] = {
            "result": result,
            "low": format_dtype(dtype),
            "spread": spread,
            "noise": noise,
            "rows": ROWS,
            "setting": setting.describe(),
        }
        return [make_fault("AC022", location, location.symbol, location.line, **values)]
    return []


def _are_correlated(slopes: Tensor, repeated_slopes: Tensor) -> bool:
    """True if two sets of rows give similar slopes."""
    if slopes.shape != repeated_slopes.shape:
        return False
    coefficients = torch.corrcoef(torch.stack([slopes, repeated_slopes]))
    return float(coefficients[0, 1]) > MIN_CORRELATION


def _column_slopes(
    numerics: Numerics, setting: Setting, *, seed: int
) -> dict[str, tuple[Tensor, float, torch.dtype]]:
    """For each low-precision output, returns three values: how strongly the error in each column
    depends on the exact value (the slope), the noise of these slopes, and the dtype of the output.
    """
    varied_sample = _vary_rows(numerics.sample, seed)
    if varied_sample is None or numerics.find_captured_rows():
        return {}
    outcome = attempt(numerics.subject, varied_sample, setting, forward_only=True)
    if not outcome.succeeded:
        return {}
    truth = numerics.with_sample(varied_sample).truth(setting)
    slopes_by_result = {}
    for result, value in outcome.results().items():
        exact_value = truth.get(result)
        if exact_value is None or exact_value.shape != value.shape:
            continue
        if result in numerics.different_results:
            continue
        if value.dtype not in LOW or value.dim() < 2 or value.shape[-1] < MIN_COLUMNS:
            continue
        # too few rows, such as in the last state of a recurrent layer, which has one row per
        # sequence
        if value.numel() // value.shape[-1] < ROWS:
            continue
        slopes = _regress_columns(value.detach().double(), exact_value)
        if slopes is not None:
            slopes_by_result[result] = (*slopes, value.dtype)
    return slopes_by_result


def _vary_rows(sample: Sample, seed: int) -> Sample | None:
    """Draws many rows from the sample, with repetition, and multiplies each element by a random
    factor. So no two rows have the same rounding errors.
    """
    long_sample = lengthen(sample, ROWS)
    if long_sample is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    scaled_tensors = {}
    for slot in long_sample.slots:
        tensor = long_sample.tensor(slot)
        if slot.group.startswith(PARAM) or tensor.shape == sample.tensor(slot).shape:
            continue
        factor = 0.5 + torch.rand(tensor.shape, generator=generator)
        product = tensor.detach().float() * factor.to(tensor.device)
        scaled_tensors[slot.index] = product.to(tensor.dtype)
    return long_sample.with_tensors(scaled_tensors)


def _regress_columns(actual: Tensor, expected: Tensor) -> tuple[Tensor, float] | None:
    """For each column, fits the error as a slope times the exact value. Returns the slopes, and an
    estimate of their random error.
    """
    truth = expected.flatten(0, -2)  # [rows columns]
    error = actual.flatten(0, -2) - truth
    # rows with a much larger error are left out, since rounding does not explain it; for example a
    # router chose another of two nearly equal experts
    tiny = torch.finfo(torch.float64).tiny
    row_sizes = truth.norm(dim=1).clamp(min=tiny)
    row_errors = error.norm(dim=1) / row_sizes
    is_inlier = row_errors <= OUTLIER_FACTOR * row_errors.median()
    truth = truth[is_inlier]
    error = error[is_inlier]
    weight = truth.square().sum(0)
    if not torch.isfinite(error).all() or not torch.isfinite(truth).all():
        return None
    if not (weight > 0).all():
        return None
    slope = (error * truth).sum(0) / weight
    residual = (error - slope * truth) * truth
    noise = residual.square().sum(0).sqrt() / weight
    return slope, float(noise.median())
