"""Finds Python numbers that have no effect because of rounding, such as an eps of 1e-8, which is 0
in fp16, or the bound `1 - 1e-6` of a clamp, which is 1 in bf16.

If such a number was to keep an operand away from a point at which a later operator has no finite
result, this later operator is the first whose result is not finite. To prove that the number is the
cause, the step runs again with a larger number in its place.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ....dtypes import format_dtype
from ....observe.operators import Operator
from ....observe.origin import Site, read_statement, running_frames
from .step import collect_tensors
from .trials import RunTrial, Trial, TrialEnd

_BOUNDS = frozenset(
    ("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "hardtanh", "threshold", "logit")
)
_CONSTANTS = frozenset(("fill", "full", "full_like", "masked_fill", "new_full", "scalar_tensor"))
_SUMS = frozenset(("add", "sub", "rsub"))
# a factor of 1e-8 has an effect even if it is rounded to 0: only factors near 1 are meant
_FACTORS = frozenset(("mul", "div"))
_OPERATORS = _BOUNDS | _CONSTANTS | _SUMS | _FACTORS
_LARGEST_DISTANCE = 0.01  # of such a number from the nearest integer; bf16 rounds 0.998 to 1
_MAX_TRIALS = 8  # lines of one step that are tried


@dataclass(frozen=True, slots=True)
class LostNumber:
    """A number of the program that has no effect in the dtype of a result.

    operator    the operator that gets it, such as `clamp`
    site        the line that calls the operator
    expression  the expression of the program that has this value, or ""
    """

    operator: str
    value: float
    dtype: torch.dtype
    site: Site | None
    expression: str

    @property
    def nearest(self) -> int:
        """The integer that has the same effect in this dtype."""
        return round(self.value)

    @property
    def is_bound(self) -> bool:
        return self.operator in _BOUNDS

    @property
    def is_literal(self) -> bool:
        """Whether the expression is a number or a computation, and not a name or an attribute."""
        return self.expression != "" and not self.expression.replace(".", "").isidentifier()

    def describe(self) -> str:
        """Returns what the number becomes in the dtype, such as "`1 - 1e-6` is 1 in bf16"."""
        text = repr(self.value)
        if self.expression:
            text = f"`{self.expression}`" if self.is_literal else f"`{self.expression}` = {text}"
        dtype_name = format_dtype(self.dtype)
        if _is_rounded_to_edge(self.value, self.dtype):
            return f"{text} is {self.nearest} in {dtype_name}"
        return f"{text} is rounded away in {dtype_name}"

    def describe_change(self, replacement: str) -> str:
        if not self.expression:
            return f"use {replacement} in place of {self.value!r}, such as eps={replacement}"
        if self.is_literal:
            return f"write {replacement} in place of `{self.expression}`"
        return f"set `{self.expression}` to {replacement}"


@dataclass(frozen=True, slots=True)
class Replacement:
    """A number that the dtype can hold, and the code for it."""

    value: float
    text: str


def operator_name(op: Operator) -> str:
    """Returns the name of an operator. Optimizers call operators for lists of tensors: the name of
    `_foreach_add_` is `add`.
    """
    return op.base_name.removeprefix("_foreach_")


def collect_results(op: Operator, args: tuple, result: Any) -> list[Tensor]:
    """Returns the tensors that an operator computed. Operators such as `_foreach_add_` return
    nothing, and write into their arguments.
    """
    results = collect_tensors(result)
    if results or not op.has_written_arguments:
        return results
    return collect_tensors([value for value, is_written in zip(args, op.is_written) if is_written])


def compute_references(op: Operator, args: tuple, kwargs: dict) -> list[tuple[float, list[Tensor]]]:
    """Must be called before the operator runs, because it may overwrite its inputs. Returns the
    numbers of the call that may be rounded away, each with the results of the nearest integer.
    """
    return [
        (value, _run_with_number(op, args, kwargs, index, float(round(value))))
        for index, value in _numbers_near_integers(op, args)
    ]


def list_lost_values(
    op: Operator, references: list[tuple[float, list[Tensor]]], results: list[Tensor]
) -> list[tuple[float, torch.dtype]]:
    """Returns the numbers of a call that have no more effect than the nearest integer, each with
    the dtype of a result in which it has none.
    """
    lost: dict[float, torch.dtype] = {}
    for value, references_of_value in references:
        for result, reference in zip(results, references_of_value):
            if value not in lost and _is_lost(op, value, result, reference):
                lost[value] = result.dtype
    return list(lost.items())


def _numbers_near_integers(op: Operator, args: tuple) -> Iterator[tuple[int, float]]:
    """Yields the position and the value of each number of a call that is close to an integer, and
    is no integer.
    """
    operator = operator_name(op)
    if operator not in _OPERATORS:
        return
    for index, argument in enumerate(args):
        value = _read_number(op, index, argument)
        if value is None or not is_near_integer(value):
            continue
        if round(value) != 0 or operator not in _FACTORS:
            yield index, value


def is_near_integer(value: Any) -> bool:
    """Whether a value is a number close to 0, 1 or -1, but none of them."""
    if not isinstance(value, float) or not abs(value) < 1 + _LARGEST_DISTANCE:
        return False
    return 0 < abs(value - round(value)) < _LARGEST_DISTANCE


def _read_number(op: Operator, index: int, argument: Any) -> float | None:
    """Returns the value of an argument if it is a number, or a constant tensor with the bound of a
    clamp.
    """
    if isinstance(argument, float):
        return argument
    if index == 0 or operator_name(op) not in _BOUNDS or not isinstance(argument, Tensor):
        return None
    is_constant = argument.dim() == 0 and not argument.requires_grad
    return float(argument) if is_constant and argument.is_floating_point() else None


@torch.no_grad()
def _run_with_number(
    op: Operator, args: tuple, kwargs: dict, index: int, number: float
) -> list[Tensor]:
    """Returns the results of an operator with another number. The inputs keep their values."""
    changed = list(args)
    for position, is_written in enumerate(op.is_written[: len(args)]):
        if is_written:
            changed[position] = _clone_tensors(changed[position])
    changed[index] = _replace_number(changed[index], number)
    result = op.func(*changed, **kwargs)
    return collect_results(op, tuple(changed), result)


def _clone_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_clone_tensors(item) for item in value] if isinstance(value, (list, tuple)) else value


def _replace_number(argument: Any, number: float) -> Any:
    return torch.full_like(argument, number) if isinstance(argument, Tensor) else number


def _is_lost(op: Operator, value: float, result: Tensor, reference: Tensor) -> bool:
    """Whether a number has no effect on values at 0, 1 or -1. At these points logarithms, divisions
    and inverse functions have no finite result or derivative.
    """
    if not result.is_floating_point() or result.shape != reference.shape:
        return False
    if operator_name(op) in _BOUNDS | _CONSTANTS:
        is_edge = result == round(value)
        return _is_rounded_to_edge(value, result.dtype) and bool(is_edge.any())
    is_edge = (result == 0) | (result == 1) | (result == -1)
    return bool((is_edge & (result == reference)).any())


def _is_rounded_to_edge(value: float, dtype: torch.dtype) -> bool:
    return float(torch.tensor(value, dtype=dtype)) == round(value)


def replace_numbers(
    op: Operator,
    args: tuple,
    replacements: dict[LostNumber, Replacement],
    find_site: Callable[[], Site | None],
) -> tuple:
    """Returns the arguments of a call with other numbers in place of lost numbers."""
    changed = list(args)
    for index, value in _numbers_near_integers(op, args):
        site = find_site()
        for number, replacement in replacements.items():
            if (number.site, number.value) == (site, value):
                changed[index] = _replace_number(changed[index], replacement.value)
    return tuple(changed)


class NumberTrial(Trial):
    """Runs the operators of a step with other numbers in place of the lost numbers of one line."""

    def __init__(
        self, replacements: dict[LostNumber, Replacement], operator: str, ordinal: int
    ) -> None:
        super().__init__(ordinal)
        self._replacements = replacements
        self._operator = operator

    def _compute(
        self, op: Operator, args: tuple, kwargs: dict, find_site: Callable[[], Site | None]
    ) -> tuple[tuple, Any]:
        changed = replace_numbers(op, args, self._replacements, find_site)
        return changed, op.func(*changed, **kwargs)

    def _is_result_finite(self, op: Operator, args: tuple, result: Any) -> bool:
        results = collect_results(op, args, result)
        is_finite = all(bool(tensor.isfinite().all()) for tensor in results)
        return is_finite and operator_name(op) == self._operator


def prove_lost_numbers(
    numbers: Sequence[LostNumber], operator: str, ordinal: int, run_again: RunTrial
) -> dict[LostNumber, Replacement]:
    """Returns the numbers of the line without whose rounding an operator gives a finite result,
    each with a number that has an effect in its place. The last lines of the step are tried first.

    ordinal  the number of operators of the step up to this operator
    """
    by_line: dict[Site | None, list[LostNumber]] = {}
    for number in reversed(numbers):
        by_line.setdefault(number.site, []).insert(0, number)
    for line_numbers in list(by_line.values())[:_MAX_TRIALS]:
        choices = [_list_replacements(number) for number in line_numbers]
        for index in range(max(map(len, choices))):
            chosen = [choice[min(index, len(choice) - 1)] for choice in choices]
            replacements = dict(zip(line_numbers, chosen))
            trial = NumberTrial(replacements, operator, ordinal)
            with suppress(TrialEnd):
                run_again(trial)
            if trial.is_finite:
                return replacements
    return {}


def _list_replacements(number: LostNumber) -> list[Replacement]:
    """Lists numbers that have an effect in the dtype, smaller effects first."""
    limits = torch.finfo(number.dtype)
    sign = 1.0 if number.value > number.nearest else -1.0
    eps = f"torch.finfo({number.dtype}).eps"
    if number.nearest:
        text = f"{number.nearest} {'+' if sign > 0 else '-'} {eps}"
        return [Replacement(number.nearest + sign * limits.eps, text)]
    values = {"1e-4": 1e-4, "1e-3": 1e-3, eps: limits.eps}
    if number.dtype != torch.float16:
        values = {f"torch.finfo({number.dtype}).tiny": limits.tiny}
        values |= {"1e-12": 1e-12, "1e-6": 1e-6, eps: limits.eps}
    mark = "" if sign > 0 else "-"
    return [Replacement(sign * value, mark + text) for text, value in values.items()]


def find_expression(value: float, site: Site | None) -> str:
    """Returns the expression in a statement of the program that has this value: a number, or the
    name, attribute or item that contains it.
    """
    if site is None:
        return ""
    statement = read_statement(site).strip()
    try:
        tree = ast.parse(statement)
    except SyntaxError:
        return ""
    frames = (frame for frame in running_frames() if frame.f_code is site.code)
    frame = next(frames, None)
    for node in ast.walk(tree):  # the outer expressions come first
        if isinstance(node, ast.expr) and _evaluate_number(node, frame) == value:
            return ast.get_source_segment(statement, node) or ""
    return ""


def _evaluate_number(node: ast.AST, frame: FrameType | None) -> Any:
    """Returns the value of an expression of numbers, or None. No code of the program runs."""
    value = _evaluate(node, frame)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _evaluate(node: ast.AST, frame: FrameType | None) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name) if frame is not None:
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(owner, name):
            return _read_attribute(_evaluate(owner, frame), name)
        case ast.Subscript(container, ast.Constant(key)):
            items = _evaluate(container, frame)
            return items.get(key) if type(items) is dict else None
        case ast.UnaryOp(ast.USub(), operand):
            value = _evaluate_number(operand, frame)
            return None if value is None else -value
        case ast.BinOp(left, operator, right):
            return compute_number(
                operator, _evaluate_number(left, frame), _evaluate_number(right, frame)
            )
    return None


def _read_attribute(owner: Any, name: str) -> Any:
    """Returns an attribute that is stored in an object, in its class, or as a module in a model."""
    modules = owner._modules if isinstance(owner, nn.Module) else {}
    return modules.get(name) or inspect.getattr_static(owner, name, None)


def compute_number(operator: ast.operator, left: float | None, right: float | None) -> float | None:
    """Returns the result of an operator on two numbers, or None."""
    if left is None or right is None:
        return None
    try:
        match operator:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.Pow():
                return float(left**right)
    except (ArithmeticError, ValueError):
        return None
    return None
