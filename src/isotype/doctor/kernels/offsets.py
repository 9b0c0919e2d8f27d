"""Finds offsets that do not fit in int32 in one launch of a kernel (KN022). The tensors of this
launch need no memory.

Triton computes `pid * stride` in int32 if both are int32. If the product is larger than 2^31-1, it
wraps, and the kernel reads or writes other memory. The module evaluates the integer operations of a
kernel's TTIR with the integers and the grid of one launch. A value is an interval: `tl.arange` and
loop variables have a range, and a program id is one number. Several programs of the grid are
evaluated, among them its corners.

An overflow is only reported if the result is the offset of a pointer, and if the pointer's tensor
has more than 2^31-1 elements. In a smaller tensor no element needs such an offset. The overflow is
then in lanes that a mask switches off.

Values that are loaded from memory are unknown, and so is what is computed from them. Few faults are
missed for this reason. In five libraries that repaired such faults, the large numbers were program
ids, strides and numbers of rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...finding import Severity
from .observe import Fault, Observation
from .ttir import Block, Function, Module, Operation, parse_module

MAX_INT32 = 2**31 - 1
MIN_INT32 = -(2**31)
MAX_OPERATIONS = 20_000  # evaluated operations of one program; nested loops multiply them
MAX_PROGRAMS = 200  # up to this number, all programs are evaluated
SAMPLED_PROGRAMS = 24  # programs that are evaluated if there are more than MAX_PROGRAMS


@dataclass(frozen=True)
class Overflow:
    """An operation in int32 whose result does not fit."""

    location: str
    value: int
    operation: str


@dataclass(frozen=True)
class Interval:
    """The range of an integer. If an operation that computed it overflowed, `overflow` describes
    this.
    """

    low: int
    high: int
    overflow: Overflow | None = None

    @property
    def is_single(self) -> bool:
        return self.low == self.high


@dataclass(frozen=True)
class Pointer:
    """A pointer into the tensor that a parameter of the kernel names."""

    parameter: str


# None: not known
Value = Interval | Pointer | None


@dataclass(frozen=True)
class LaunchShape:
    """The numbers that describe one launch of a kernel.

    values   parameter -> integer argument
    extents  pointer parameter -> number of elements that its tensor spans
    """

    values: Mapping[str, int]
    extents: Mapping[str, int]
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Escape:
    """An offset that overflowed and is added to a pointer, in one program of the grid."""

    overflow: Overflow
    parameter: str
    program: tuple[int, int, int]


def find_offset_overflows(
    kernel: str, parameters: Sequence[str], shape: LaunchShape, observation: Observation
) -> list[Fault]:
    """Returns a fault KN022 for each line that computes in int32 an offset that is too large for
    it.

    parameters  the names of the kernel's run-time parameters, in order
    """
    large = {name: extent for name, extent in shape.extents.items() if extent > MAX_INT32}
    if not large or not observation.ttir:
        return []
    module = parse_module(observation.ttir)
    if len(module.kernel.parameters) != len(parameters):
        return []  # a tuple among the parameters
    arguments: list[Value] = []
    for name in parameters:
        if name in shape.values:
            arguments.append(Interval(shape.values[name], shape.values[name]))
        elif name in shape.extents:
            arguments.append(Pointer(name))
        else:
            arguments.append(None)
    escapes: dict[tuple[str, int], Escape] = {}
    for program in choose_programs(shape.grid):
        evaluation = _Evaluation(module, program, shape.grid, large)
        evaluation.call(module.kernel, arguments)
        for escape in evaluation.escapes:
            place = module.locations.get(escape.overflow.location, ("", 0))
            previous = escapes.get(place)
            if previous is None or abs(escape.overflow.value) > abs(previous.overflow.value):
                escapes[place] = escape
    return [_build_fault(kernel, place, escape, shape, large) for place, escape in escapes.items()]


def choose_programs(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Returns all programs of a small grid. Of a large grid, returns the corners, and some programs
    between them.
    """
    if grid[0] * grid[1] * grid[2] <= MAX_PROGRAMS:
        return list(itertools.product(range(grid[0]), range(grid[1]), range(grid[2])))
    last_x, last_y, last_z = (size - 1 for size in grid)
    corners = itertools.product((0, last_x), (0, last_y), (0, last_z))
    total = grid[0] * grid[1] * grid[2]
    programs = list(corners)
    for step in range(1, SAMPLED_PROGRAMS):
        index = total * step // SAMPLED_PROGRAMS
        x, rest = index % grid[0], index // grid[0]
        programs.append((x, rest % grid[1], rest // grid[1]))
    return list(dict.fromkeys(programs))


def _build_fault(
    kernel: str,
    place: tuple[str, int],
    escape: Escape,
    shape: LaunchShape,
    large: Mapping[str, int],
) -> Fault:
    file, line = place
    value = escape.overflow.value
    name = escape.parameter
    message = f"an offset of {name} is computed in int32 and reaches {value:,}"
    program = ", ".join(map(str, escape.program))
    cause = (
        f"int32 ends at {MAX_INT32:,}. In program ({program}) of the grid the"
        f" {escape.overflow.operation} on this line wraps to a wrong number, and the kernel reads or"
        f" writes other memory of {name}, which has {large[name]:,} elements"
    )
    fix = (
        "widen one operand to int64 before the multiplication:"
        " tl.program_id(0).to(tl.int64), or row.to(tl.int64) * stride"
    )
    numbers = ", ".join(f"{name} {value:,}" for name, value in shape.values.items())
    grid = " x ".join(f"{size:,}" for size in shape.grid)
    return Fault(
        "KN022",
        file,
        line,
        kernel,
        name,
        message,
        cause,
        fix,
        dtypes=("int32", "int64"),
        facts=(("grid", grid), ("arguments", numbers)),
        is_dtype=False,
        severity=Severity.ERROR,
    )


class _TooLongError(Exception):
    """The evaluation of one program takes too many operations."""


class _Evaluation:
    """Evaluates the integer operations of a kernel for one program of the grid."""

    def __init__(
        self,
        module: Module,
        program: tuple[int, int, int],
        grid: tuple[int, int, int],
        large: Mapping[str, int],
    ) -> None:
        self.module = module
        self.program = program
        self.grid = grid
        self.large = large
        self.escapes: list[Escape] = []
        self.reports = True  # False in the first pass over the body of a loop
        self.operations = 0

    def call(self, function: Function, arguments: Sequence[Value]) -> list[Value]:
        """Evaluates a function of the kernel and returns its results."""
        values: dict[str, Value] = dict(zip(function.parameters, arguments))
        try:
            return self._run_blocks(function.blocks, values)
        except _TooLongError:
            return []

    def _run_blocks(self, blocks: list[Block], values: dict[str, Value]) -> list[Value]:
        """Evaluates the blocks of a region in order. Returns the values that the region yields.

        No branch leads back to an earlier block, because TTIR has its own operations for loops.
        """
        yielded: list[list[Value]] = []
        passed: dict[str, list[list[Value]]] = {}
        for index, block in enumerate(blocks):
            if index and block.label not in passed:
                continue  # no branch leads here
            if index and block.arguments:
                joined = _join_all(passed[block.label])
                values.update(zip(block.arguments, joined))
            for operation in block.operations:
                self.operations += 1
                if self.operations > MAX_OPERATIONS:
                    raise _TooLongError
                if operation.name in ("scf.yield", "tt.return"):
                    yielded.append([values.get(name) for name in operation.values])
                elif operation.name == "scf.condition":
                    yielded.append([values.get(name) for name in operation.values[1:]])
                elif operation.name in ("cf.br", "cf.cond_br"):
                    for label, names in self._find_branches(operation, values):
                        arguments = [values.get(name) for name in names]
                        passed.setdefault(label, []).append(arguments)
                else:
                    results = self._run_operation(operation, values)
                    values.update(itertools.zip_longest(operation.results, results))
        return _join_all(yielded)

    def _find_branches(
        self, operation: Operation, values: Mapping[str, Value]
    ) -> list[tuple[str, list[str]]]:
        """Returns the blocks to which a branch can lead: the label of each block, and the names of
        the values that the branch passes to it.
        """
        targets = []
        for match in re.finditer(r"\^(\w+)(?:\(([^:)]*))?", operation.text):
            targets.append((match[1], re.findall(r"%[\w.$-]+(?:#\d+)?", match[2] or "")))
        if operation.name == "cf.cond_br":
            condition = values.get(operation.values[0])
            if isinstance(condition, Interval) and condition.is_single:
                return targets[:1] if condition.low else targets[1:]
        return targets

    def _run_operation(self, operation: Operation, values: dict[str, Value]) -> list[Value]:
        name = operation.name
        if name == "scf.for":
            return self._run_for(operation, values)
        if name == "scf.while":
            return self._run_while(operation, values)
        if name == "scf.if":
            return self._run_if(operation, values)
        operands = [values.get(operand) for operand in operation.values]
        if name == "tt.call":
            match = re.search(r"@([^(]+)\(", operation.text)
            function = self.module.functions.get(match[1].strip('"')) if match else None
            return self.call(function, operands) if function else []
        if name == "tt.addptr":
            return [self._add_to_pointer(operands)]
        if name in _PASSED_ON:
            return operands[:1]
        if name == "arith.constant":
            return [_read_constant(operation.text)]
        if name == "tt.get_program_id":
            axis = _read_axis(operation.text)
            return [Interval(self.program[axis], self.program[axis])]
        if name == "tt.get_num_programs":
            axis = _read_axis(operation.text)
            return [Interval(self.grid[axis], self.grid[axis])]
        if name == "tt.make_range":
            start = int(re.findall(r"start = (\d+)", operation.text)[0])
            end = int(re.findall(r"end = (\d+)", operation.text)[0])
            return [Interval(start, end - 1)]
        if name == "arith.select":
            return [_select(operands)]
        if name == "arith.cmpi":
            return [_compare(operation.text, operands)]
        if (name in _MONOTONIC or name in _OTHER_ARITHMETIC) and len(operands) == 2:
            return [_compute(operation, operands)]
        return []

    def _add_to_pointer(self, operands: Sequence[Value]) -> Value:
        """Returns the pointer. If the offset overflowed, the method stores it for the report."""
        pointer, offset = operands
        if not isinstance(pointer, Pointer):
            return None
        overflow = offset.overflow if isinstance(offset, Interval) else None
        if overflow is not None and pointer.parameter in self.large and self.reports:
            self.escapes.append(Escape(overflow, pointer.parameter, self.program))
        return pointer

    def _run_if(self, operation: Operation, values: dict[str, Value]) -> list[Value]:
        condition = values.get(operation.values[0])
        regions = operation.regions
        if isinstance(condition, Interval) and condition.is_single:
            regions = regions[:1] if condition.low else regions[1:]
        return _join_all([self._run_blocks(region, dict(values)) for region in regions])

    def _run_for(self, operation: Operation, values: dict[str, Value]) -> list[Value]:
        header = operation.text
        induction = operation.values[0]
        bounds = [values.get(name) for name in operation.values[1:4]]
        pairs = re.findall(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)", header.partition("iter_args")[2])
        carried = [name for name, _ in pairs]
        initial = [values.get(name) for _, name in pairs]
        trips = None
        first, last, step = bounds
        variable: Value = None
        if (
            isinstance(first, Interval)
            and isinstance(last, Interval)
            and isinstance(step, Interval)
            and step.low > 0
        ):
            trips = max(0, -((first.low - last.high) // step.low))
            if not trips:
                return initial
            variable = Interval(first.low, max(first.high, last.high - 1))
            if first.is_single and step.is_single:
                variable = Interval(first.low, first.low + (trips - 1) * step.low)
        return self._repeat(
            lambda inputs: self._run_blocks(
                operation.regions[0], {**values, induction: variable, **dict(zip(carried, inputs))}
            ),
            initial,
            trips,
        )

    def _run_while(self, operation: Operation, values: dict[str, Value]) -> list[Value]:
        pairs = re.findall(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)", operation.text)
        carried = [name for name, _ in pairs]
        initial = [values.get(name) for _, name in pairs]
        condition, body = operation.regions

        def run_round(inputs: Sequence[Value]) -> list[Value]:
            passed = self._run_blocks(condition, {**values, **dict(zip(carried, inputs))})
            arguments = dict(zip(body[0].arguments, passed))
            return self._run_blocks(body, {**values, **arguments})

        return self._repeat(run_round, initial, None)

    def _repeat(
        self,
        run_round: Callable[[Sequence[Value]], list[Value]],
        initial: list[Value],
        trips: int | None,
    ) -> list[Value]:
        """Evaluates a loop. Returns the range of each variable over all rounds, if the variable
        grows by a fixed number in each round. If the number of rounds is not known, the variable is
        unknown.
        """
        reports = self.reports
        self.reports = False
        once = run_round(initial)
        inside = []
        after = []
        for before, result in itertools.zip_longest(initial, once):
            inside.append(_extend(before, result, None if trips is None else trips - 1))
            after.append(_extend(before, result, trips))
        if inside:
            results = run_round(inside)
            inside = [_mark_overflow(a, b) for a, b in itertools.zip_longest(inside, results)]
            after = [_mark_overflow(a, b) for a, b in itertools.zip_longest(after, results)]
        self.reports = reports
        run_round(inside)
        return after


_PASSED_ON = {
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.reshape",
    "tt.trans",
    "tt.bitcast",
    "arith.extsi",
    "arith.extui",
    "arith.bitcast",
    "arith.index_cast",
}


def _read_constant(text: str) -> Value:
    match = re.match(r"arith\.constant (?:dense<)?(-?\d+|true|false)>? ?:?", text)
    if match is None or "." in text.partition(":")[0].removeprefix("arith.constant"):
        return None
    if match[1] in ("true", "false"):
        number = int(match[1] == "true")
    else:
        number = int(match[1])
    return Interval(number, number)


def _read_axis(text: str) -> int:
    match = re.search(r"get_(?:program_id|num_programs) ([xyz])", text)
    return "xyz".index(match[1]) if match else 0


def _join(first: Value, second: Value) -> Value:
    if isinstance(first, Interval) and isinstance(second, Interval):
        low = min(first.low, second.low)
        return Interval(low, max(first.high, second.high), first.overflow or second.overflow)
    return first if first == second else None


def _join_all(lists: list[list[Value]]) -> list[Value]:
    """Returns a list of ranges. The range at each position contains every value that one of the
    lists has at this position.
    """
    if not lists:
        return []
    joined = lists[0]
    for values in lists[1:]:
        joined = [_join(a, b) for a, b in itertools.zip_longest(joined, values)]
    return joined


def _extend(before: Value, result: Value, rounds: int | None) -> Value:
    """Returns the range of a loop's variable if the loop runs at most `rounds` times."""
    if before == result:
        return before
    if not isinstance(before, Interval) or not isinstance(result, Interval) or rounds is None:
        return None
    low = before.low + min(0, result.low - before.low) * rounds
    high = before.high + max(0, result.high - before.high) * rounds
    overflow = result.overflow or before.overflow
    return Interval(low, high, overflow)


def _mark_overflow(value: Value, result: Value) -> Value:
    """Returns the range of a loop's variable. If int32 cannot hold all values of the range, the
    result is marked with the operation that overflows.
    """
    if not isinstance(value, Interval) or not isinstance(result, Interval):
        return value
    if value.low >= MIN_INT32 and value.high <= MAX_INT32:
        return value
    return replace(value, overflow=value.overflow or result.overflow)


def _select(operands: Sequence[Value]) -> Value:
    condition, first, second = operands
    if isinstance(condition, Interval) and condition.is_single:
        return first if condition.low else second
    return _join(first, second)


def _compare(text: str, operands: Sequence[Value]) -> Value:
    """Returns 0 or 1 if a comparison has the same result for all numbers of both ranges."""
    left, right = operands
    if not isinstance(left, Interval) or not isinstance(right, Interval):
        return None
    predicate = text.removeprefix("arith.cmpi").strip().partition(",")[0]
    if predicate in ("sgt", "sge", "ugt", "uge"):
        left, right = right, left
        predicate = predicate.replace("g", "l")
    result = None
    if predicate in ("slt", "ult"):
        result = _decide(left.high < right.low, left.low >= right.high)
    elif predicate in ("sle", "ule"):
        result = _decide(left.high <= right.low, left.low > right.high)
    elif predicate in ("eq", "ne"):
        is_equal = left.is_single and right.is_single and left.low == right.low
        is_different = left.high < right.low or right.high < left.low
        result = _decide(is_equal, is_different)
        if result is not None and predicate == "ne":
            result = 1 - result
    return None if result is None else Interval(result, result)


def _decide(is_always: bool, is_never: bool) -> int | None:
    if is_always:
        return 1
    return 0 if is_never else None


def _compute(operation: Operation, operands: Sequence[Value]) -> Value:
    """Computes the range of an integer operation as if int32 had no limit. If the operation is in
    int32 and the range does not fit, the result contains the overflow.
    """
    left, right = operands
    if not isinstance(left, Interval) or not isinstance(right, Interval):
        return _compute_partly(operation.name, left, right)
    bounds = _compute_bounds(operation.name, left, right)
    if bounds is None:
        return None
    result = Interval(*bounds, overflow=left.overflow or right.overflow)
    is_int32 = re.search(r"\bi32\b|xi32>", operation.types) is not None
    if result.overflow is None and is_int32:
        extreme = result.high if result.high > MAX_INT32 else result.low
        if not MIN_INT32 <= extreme <= MAX_INT32:
            label = _OPERATION_NAMES.get(operation.name, "operation")
            return replace(result, overflow=Overflow(operation.location, extreme, label))
    return result


_OTHER_ARITHMETIC = {"arith.subi", "arith.remsi", "arith.remui"}
# operation of Triton's IR -> the word in messages
_OPERATION_NAMES = {
    "arith.addi": "addition",
    "arith.subi": "subtraction",
    "arith.muli": "multiplication",
    "arith.shli": "shift",
}


def _compute_partly(name: str, left: Value, right: Value) -> Value:
    """Computes the range of an operation of which one operand is unknown."""
    divisor = right.high if isinstance(right, Interval) and right.low > 0 else None
    if name in ("arith.remsi", "arith.remui") and divisor is not None:
        return Interval(1 - divisor if name == "arith.remsi" else 0, divisor - 1)
    return None


def _compute_bounds(name: str, left: Interval, right: Interval) -> tuple[int, int] | None:
    """Returns the lowest and the highest result of an operation, or None if they are unknown."""
    if name == "arith.subi":
        return left.low - right.high, left.high - right.low
    if name in ("arith.remsi", "arith.remui"):
        return _compute_remainder(left, right)
    if "div" in name and right.low <= 0:
        return None
    if name in ("arith.shli", "arith.shrsi") and not 0 <= right.low <= right.high <= 63:
        return None
    # the other operations are monotonic in both operands, so that the extremes are at the ends
    compute = _MONOTONIC[name]
    ends = [compute(a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
    return min(ends), max(ends)


_MONOTONIC: dict[str, Callable[[int, int], int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.muli": lambda a, b: a * b,
    "arith.minsi": min,
    "arith.minui": min,
    "arith.maxsi": max,
    "arith.maxui": max,
    "arith.divsi": lambda a, b: abs(a) // b * (1 if a >= 0 else -1),
    "arith.divui": lambda a, b: a // b,
    "arith.floordivsi": lambda a, b: a // b,
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.shli": lambda a, b: a << b,
    "arith.shrsi": lambda a, b: a >> b,
}


def _compute_remainder(left: Interval, right: Interval) -> tuple[int, int] | None:
    if right.low <= 0:
        return None
    if left.is_single and right.is_single and left.low >= 0:
        return left.low % right.low, left.low % right.low
    lowest = 0 if left.low >= 0 else 1 - right.high
    return lowest, min(right.high - 1, max(0, left.high))
