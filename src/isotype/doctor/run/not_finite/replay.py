"""Runs a recorded step again, operator by operator, and finds the operator that produced the first
NaN or inf.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ....dtypes import format_dtype
from ....observe.operators import EXACT, NARROW_FLOATS, Operator
from ....observe.origin import Site, is_library_file, is_tool_file, running_frames
from ....observe.tape import make_tape
from .decompositions import Divisor, read_divisor
from .domains import Move, covers, find_moved_values, make_move
from .late_shadows import Rounding
from .lost_numbers import (
    LostNumber,
    Replacement,
    collect_results,
    compute_references,
    find_expression,
    list_lost_values,
    operator_name,
    replace_numbers,
)
from .positions import Part, Position, find_position, read_part
from .selections import Selected, read_selection
from .shadows import Shadows, TensorTable
from .stable_forms import StableForm, StableForms
from .step import Entry, Step, collect_gradients, collect_tensors
from .trials import RunTrial, Trial

# operators that write a constant, such as the -inf of a mask
CONSTANT_WRITERS = frozenset(
    ("masked_fill", "fill", "full", "full_like", "where", "tril", "triu", "zero", "index_fill")
    + ("new_full", "scalar_tensor", "constant_pad_nd", "lift_fresh", "scatter", "index_put")
)
_FILL = Operator(torch.ops.aten.fill.Scalar)
_OPTIMIZER_FOLDER = f"{os.sep}torch{os.sep}optim{os.sep}"


@dataclass(frozen=True, slots=True)
class Range:
    """The smallest and the largest finite value of a tensor, and whether it also contains NaN, inf
    or zeros.
    """

    low: float
    high: float
    has_nan: bool = False
    has_infinity: bool = False
    zeros: int = 0
    count: int = 0
    has_finite: bool = True
    infinity: str = "inf"  # "-inf" if every infinite value is negative

    @classmethod
    def measure(cls, tensor: Tensor) -> Range:
        values = tensor.detach()
        if not values.numel():
            return cls(0.0, 0.0)
        values = values.float() if values.dtype != torch.float64 else values
        finite = values.isfinite()
        zeros = int((values == 0).sum())
        if bool(finite.all()):
            low, high = (float(value) for value in torch.aminmax(values))
            return cls(low, high, zeros=zeros, count=values.numel())
        has_nan = bool(values.isnan().any())
        has_infinity = bool(values.isinf().any())
        kept = values[finite]
        low, high = 0.0, 0.0
        if kept.numel():
            low, high = (float(value) for value in torch.aminmax(kept))
        infinity = "inf" if bool((values == float("inf")).any()) else "-inf"
        has_finite = bool(finite.any())
        return cls(low, high, has_nan, has_infinity, zeros, values.numel(), has_finite, infinity)

    @property
    def is_finite(self) -> bool:
        return not (self.has_nan or self.has_infinity)

    @property
    def magnitude(self) -> float:
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        parts = []
        if self.count and self.has_finite:
            parts.append(f"{self.low:.4g} to {self.high:.4g}")
        if self.zeros and self.zeros < self.count and self.low >= 0:
            parts.append(f"{self.zeros} of {self.count} are 0")
        if self.has_infinity:
            parts.append(self.infinity)
        if self.has_nan:
            parts.append("NaN")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Input:
    """Describes an input of an operator. It stores the name of the input in the operator's schema,
    its values in this run, and the values that it would have in fp32 (its shadow). If the input is a
    loss whose labels are all ignored, `ignored_label` is the value of the labels. `moves` has the
    operators whose rounding moved values of the input out of the domain of other operators.
    `infinite_divisor` is the operator that made the inf by which a number was divided, if the input
    contains the 0 of this division.
    """

    label: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    run: Range
    exact: Range
    path: str
    origin: Event | None = None
    lost: Event | None = None
    ignored_label: int | None = None
    moves: dict[str, Move] = field(default_factory=dict)
    infinite_divisor: Event | None = None


@dataclass(slots=True, eq=False)
class Event:
    """Describes an operator whose result contains NaN or inf, or contains zeros in place of values
    that are not zero in fp32.

    parts      whether some values are finite in fp32 but not in the run
    makes_nan  whether the result contains NaN although no input does
    position   the line of the program; in backward it is the line of the forward operator
    entry      the recorded call in which the operator runs; None in backward
    in_layer   whether the operator runs inside a layer of PyTorch or of a library, such as Linear
    ordinal    the number of operators of the run up to this operator
    has_backward_line  whether `site` is a line that runs in backward
    written    the NaN or inf that the operator writes as a constant, as `torch.where` does
    divisor    what is nearly 0 in the backward of a matrix decomposition
    """

    op: Operator
    inputs: list[Input]
    dtype: torch.dtype
    result: Range
    exact: Range
    parts: bool
    makes_nan: bool
    is_backward: bool
    position: Position | None
    module: str
    settings: dict[str, Any] = field(default_factory=dict)
    entry: Entry | None = None
    in_layer: bool = False
    ordinal: int = 0
    has_backward_line: bool = False
    written: Selected | None = None
    divisor: Divisor | None = None

    @property
    def site(self) -> Site | None:
        return None if self.position is None else self.position.site

    @property
    def part(self) -> Part | None:
        """The expression of the line that calls the operator."""
        return read_part(self.position)

    @property
    def operator(self) -> str:
        """The name of the operator, such as `div`, also for `_foreach_div_`."""
        return operator_name(self.op)

    @property
    def is_derivative(self) -> bool:
        """Whether the operator belongs to the backward of the line `site`."""
        return self.is_backward and not self.has_backward_line

    @property
    def is_constant(self) -> bool:
        """Whether the operator writes a constant. It may be meant, such as the -inf of a mask."""
        return self.op.base_name in CONSTANT_WRITERS and not self.parts

    @property
    def has_finite_inputs(self) -> bool:
        return all(item.run.is_finite for item in self.inputs)

    @property
    def is_origin(self) -> bool:
        """True if the NaN or inf comes from this operator itself, and not from an operator before
        it.
        """
        if self.is_constant:
            return self.written is not None
        return self.parts or self.makes_nan or self.has_finite_inputs

    def root(self) -> Event:
        """Goes back from this event to the event that produced one of its inputs, and repeats this.
        Returns the first event of this chain.
        """
        for item in self.inputs:
            link = item.origin
            if link is not None and link is not self and not link.is_constant:
                return link.root()
        return self


class Watch:
    """Calls each operator in the dtypes of the run and in fp32, and collects the operators whose
    results contain NaN or inf, and the numbers that have no effect.

    hidden_events  operators of forward whose NaN or inf backward multiplies by a gradient
    trial          calls the operators in place of the watch, with another number
    replacements   numbers that take the place of lost numbers
    positions      sequence number of a node of autograd's graph -> the call of its operator
    writers        id of a tensor of the program -> the recorded call that wrote NaN or inf into it
    """

    def __init__(self, names: dict[int, str], trial: Trial | None = None) -> None:
        self.shadows = Shadows()
        self.numbers: list[LostNumber] = []
        self.roundings: list[Rounding] = []
        self.trial = trial
        self.replacements: dict[LostNumber, Replacement] = {}
        self.events: list[Event] = []
        self.hidden_events: list[Event] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self._names = names
        self._origins: TensorTable[Event] = TensorTable()
        self._lost: TensorTable[Event] = TensorTable()
        self._infinite_divisors: TensorTable[Event] = TensorTable()
        self._ignored_labels: TensorTable[int] = TensorTable()
        self._moves: TensorTable[dict[str, Move]] = TensorTable()
        self._forms = StableForms()
        self.in_backward = False
        self.is_paused = False
        self.entry: Entry | None = None
        self._count = 0
        self.positions: dict[int, Position | None] = {}
        self.writers: dict[int, Entry] = {}
        self.find_position: Callable[[], Position | None] = find_position

    def run(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        if self.is_paused:
            return op.func(*args, **kwargs)
        if self.trial is not None:
            return self.trial.run(op, args, kwargs, self._site)
        if self.replacements:
            args = replace_numbers(op, args, self.replacements, self._site)
        self._count += 1
        if torch.is_grad_enabled():
            self.positions.setdefault(_newest_node_number(), self._position())
        operands = (
            []
            if op.foreign_name and not hasattr(op.func, "_schema")
            else list(op.operands(args, kwargs))
        )
        needs_inputs = any(op.is_written)
        inputs = self._read_inputs(operands) if needs_inputs else None
        selection = read_selection(op, args)
        references = compute_references(op, args, kwargs)
        finish = self.shadows.prepare(op, args, kwargs)
        result = op.func(*args, **kwargs)
        if finish is not None:
            finish(result)
        results = collect_results(op, args, result)
        if not self.in_backward:
            self._forms.follow(op, args, result, self._count, self._position)
        if references:
            self._record_lost_numbers(op, references, results)
        self._follow_ignored_labels(op, args, result)
        for tensor in results:
            if tensor.is_floating_point() and tensor.numel():
                self._check(op, tensor, operands, inputs, args, selection)
        return result

    def count_records(self) -> tuple[int, int]:
        """Returns how many events and numbers there are now."""
        return len(self.events), len(self.numbers)

    def find_form(self, event: Event) -> StableForm | None:
        """Returns the stable function of which the operator of an event is a part."""
        return None if event.is_backward else self._forms.get(event.ordinal)

    def forget_records(self, counts: tuple[int, int]) -> None:
        """Removes the events and numbers that were recorded after `count_records`."""
        del self.events[counts[0] :], self.numbers[counts[1] :]

    def find_sources(self, tensors: Sequence[Tensor]) -> list[Event]:
        """Returns the events from which NaN or inf came to these tensors, in order."""
        pending = [self._origins.get(tensor) for tensor in tensors]
        sources: set[int] = set()
        while pending:
            event = pending.pop()
            if event is not None and id(event) not in sources:
                sources.add(id(event))
                pending += [item.origin for item in event.inputs]
        return [event for event in self.events if id(event) in sources]

    def _read_inputs(self, operands: Sequence[tuple[str, Tensor]]) -> list[Input]:
        return [self._read_input(label, tensor) for label, tensor in operands]

    def _read_input(self, label: str, tensor: Tensor) -> Input:
        values = Range.measure(tensor)
        # the program may have overwritten NaN and inf, as x[mask] = 0 does
        origin = None if values.is_finite else self._find_origin(tensor, values)
        return Input(
            label,
            tensor.dtype,
            tuple(tensor.shape),
            values,
            Range.measure(self.shadows.get(tensor)),
            self._names.get(id(tensor), ""),
            origin,
            self._lost.get(tensor),
            self._ignored_labels.get(tensor),
            self._moves.get(tensor) or {},
            self._infinite_divisors.get(tensor),
        )

    def _find_origin(self, tensor: Tensor, values: Range) -> Event | None:
        """Returns the operator that made the NaN or inf of a tensor. A tensor of the program that no
        operator of this run made may have a recorded call that wrote them, such as `torch.full`.
        """
        origin = self._origins.get(tensor)
        writer = self.writers.get(id(tensor))
        if origin is not None or writer is None:
            return origin
        event = Event(
            _FILL,
            [],
            tensor.dtype,
            values,
            values,
            parts=False,
            makes_nan=False,
            is_backward=False,
            position=writer.position,
            module="",
            entry=writer,
        )
        self.events.append(event)
        self._origins[tensor] = event
        return event

    def _check(
        self,
        op: Operator,
        tensor: Tensor,
        operands: Sequence[tuple[str, Tensor]],
        inputs: list[Input] | None,
        args: tuple,
        selection: Sequence[Selected],
    ) -> None:
        shadow = self.shadows.get(tensor)
        self._record_rounding(op, tensor)
        self._follow_domains(op, tensor, shadow, operands)
        is_finite = bool(tensor.isfinite().all())
        if is_finite:
            self._follow_zeros(op, tensor, shadow, operands, inputs, args)
            self._follow_infinite_divisors(op, tensor, operands)
            return
        if inputs is None:
            inputs = self._read_inputs([*operands, *_integer_divisors(op, args)])
        if op.is_view or op.base_name in ("detach", "clone", "alias"):
            origin = next((item.origin for item in inputs if item.origin is not None), None)
            if origin is not None:
                self._origins[tensor] = origin
            return
        parts = shadow.shape == tensor.shape and bool(
            (shadow.isfinite() & ~tensor.isfinite()).any()
        )
        written = next((item for item in selection if self._is_written(item)), None)
        inputs = _forget_discarded(inputs, operands, selection)
        event = self._make_event(op, tensor, shadow, inputs, args, parts=parts)
        event.written = written
        if event.is_origin or not any(item.origin for item in inputs):
            self.events.append(event)
            self._origins[tensor] = event
            return
        bad = [item for item in inputs if item.origin is not None]
        worst = next((item for item in bad if item.run.has_nan), bad[0])
        if worst.origin is not None:
            self._origins[tensor] = worst.origin
        if self.in_backward and worst.origin is not None and not worst.origin.is_backward:
            self.hidden_events.append(worst.origin)

    def _record_rounding(self, op: Operator, tensor: Tensor) -> None:
        if not self.in_backward and tensor.dtype in NARROW_FLOATS and op.kind != EXACT:
            self.roundings.append(Rounding(self._count, self._site(), tensor.dtype))

    def _is_written(self, selected: Selected) -> bool:
        """Whether an operand is a constant NaN or inf that stays in the result."""
        if not selected.stays or not selected.constant:
            return False
        if not isinstance(selected.value, Tensor):
            return True
        origin = self._origins.get(selected.value)
        if origin is None:
            return selected.is_scalar
        return origin.is_constant and origin.written is None

    def _follow_ignored_labels(self, op: Operator, args: tuple, result: Any) -> None:
        """Marks the result of a cross-entropy whose labels are all ignored, and the sum of it."""
        ignored_label = _find_ignored_label(op, args)
        if op.base_name in ("sum", "view", "_to_copy"):
            ignored_label = self._ignored_labels.get(args[0])
        if ignored_label is not None:
            for tensor in collect_tensors(result):
                self._ignored_labels[tensor] = ignored_label

    def _follow_zeros(
        self,
        op: Operator,
        tensor: Tensor,
        shadow: Tensor,
        operands: Sequence[tuple[str, Tensor]],
        inputs: list[Input] | None,
        args: tuple,
    ) -> None:
        """Some values of the tensor are 0 although they are not 0 in fp32. Stores the operator that
        turned them into 0.
        """
        if shadow is tensor or shadow.shape != tensor.shape:
            return
        if not bool(((tensor == 0) & (shadow != 0)).any()):
            return
        known = [event for _, t in operands if (event := self._lost.get(t)) is not None]
        if known:
            self._lost[tensor] = known[0]
            return
        values = shadow[(tensor == 0) & (shadow != 0)]
        read_inputs = inputs or self._read_inputs(operands)
        self._lost[tensor] = self._make_event(op, tensor, values, read_inputs, args, parts=False)

    def _follow_infinite_divisors(
        self, op: Operator, tensor: Tensor, operands: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Stores the operator that made the inf by which a number was divided. The quotient is 0."""
        if not operands or not bool((tensor == 0).any()):
            return
        divisor = operands[-1][1]
        origin = self._infinite_divisors.get(divisor) if op.is_view else None
        if op.base_name in ("div", "true_divide", "reciprocal") and bool(divisor.isinf().any()):
            origin = self._origins.get(divisor)
        if origin is not None:
            self._infinite_divisors[tensor] = origin

    def _follow_domains(
        self, op: Operator, tensor: Tensor, shadow: Tensor, operands: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Stores the operator whose rounding moved values of the tensor out of a domain, such as the
        difference that made a variance negative.
        """
        masks = find_moved_values(tensor, shadow)
        if not masks:
            return
        moves: dict[str, Move] = {}
        known = {id(t): self._moves.get(t) or {} for _, t in operands}
        for domain, mask in masks.items():
            sources = [t for _, t in operands if domain in known[id(t)]]
            source = next(
                (t for t in sources if self._has_moved(op, domain, t, tensor, mask)), None
            )
            if source is None:
                moves[domain] = make_move(domain, tensor, shadow, mask, self._site())
            else:
                moves[domain] = known[id(source)][domain]
        self._moves[tensor] = moves

    def _has_moved(
        self, op: Operator, domain: str, operand: Tensor, result: Tensor, mask: Tensor
    ) -> bool:
        """Whether the values of a result are outside of a domain because those of an operand are."""
        if operand is result or op.is_view:
            return True
        masks = find_moved_values(operand, self.shadows.get(operand))
        return domain in masks and covers(masks[domain], mask)

    def _make_event(
        self,
        op: Operator,
        tensor: Tensor,
        shadow: Tensor,
        inputs: list[Input],
        args: tuple,
        *,
        parts: bool,
    ) -> Event:
        result = Range.measure(tensor)
        has_nan_input = any(item.run.has_nan for item in inputs)
        return Event(
            op,
            inputs,
            tensor.dtype,
            result,
            Range.measure(shadow),
            parts,
            result.has_nan and not has_nan_input,
            self.in_backward,
            self._position(),
            self.modules[-1][0] if self.modules else "",
            _read_settings(op, args),
            None if self.in_backward else self.entry,
            bool(self.modules) and _is_library_module(self.modules[-1][1]),
            self._count,
            self.in_backward and _backward_position() is not None,
            divisor=read_divisor() if self.in_backward else None,
        )

    def _record_lost_numbers(
        self, op: Operator, references: list[tuple[float, list[Tensor]]], results: list[Tensor]
    ) -> None:
        expressions = {} if self.entry is None else self.entry.number_expressions
        site = self._site()
        for value, dtype in list_lost_values(op, references, results):
            expression = expressions.get(value) or find_expression(value, site)
            number = LostNumber(operator_name(op), value, dtype, site, expression)
            if number not in self.numbers:
                self.numbers.append(number)

    def _site(self) -> Site | None:
        position = self._position()
        return None if position is None else position.site

    def _position(self) -> Position | None:
        if self.in_backward and not self.modules:
            return _backward_position() or _forward_position(self.positions)
        return self.find_position() or (self.entry.position if self.entry is not None else None)


def _forget_discarded(
    inputs: list[Input], operands: Sequence[tuple[str, Tensor]], selection: Sequence[Selected]
) -> list[Input]:
    """Returns the inputs of an operator that selects values, without the origins of those whose NaN
    and inf it discards.
    """
    discarded = {id(item.value) for item in selection if not item.stays}
    discarded -= {id(item.value) for item in selection if item.stays}
    labels = {label for label, operand in operands if id(operand) in discarded}
    return [replace(x, origin=None) if x.label in labels else x for x in inputs]


@torch.no_grad()
def _have_equal_values(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    if len(tensors) != len(others):
        return False
    for tensor, other in zip(tensors, others):
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            return False
        if not bool(((tensor == other) | (tensor.isnan() & other.isnan())).all()):
            return False
    return True


def _is_library_module(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and is_library_file(code.co_filename)


def _read_settings(op: Operator, args: tuple) -> dict[str, Any]:
    """Returns some arguments of an operator by their names. These are numbers, booleans, and
    tensors that are not floating-point, such as the labels of a loss.
    """
    schema = getattr(op.func, "_schema", None)
    if schema is None:
        return {}
    settings: dict[str, Any] = {}
    for argument, value in zip(schema.arguments, args):
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                settings[argument.name] = value.detach()
        elif isinstance(value, (bool, int, float)):
            settings[argument.name] = value
    return settings


def _find_ignored_label(op: Operator, args: tuple) -> int | None:
    """Returns the value of the labels of a cross-entropy if all of them are ignored."""
    if "nll_loss" not in op.base_name and "cross_entropy" not in op.base_name:
        return None
    settings = _read_settings(op, args)
    ignored_label = int(settings.get("ignore_index", -100))
    labels = [value for value in settings.values() if isinstance(value, Tensor)]
    is_ignored = [bool((tensor == ignored_label).all()) for tensor in labels if tensor.numel()]
    return ignored_label if any(is_ignored) else None


def _newest_node_number() -> int:
    """Returns the sequence number of the last node that autograd has added to its graph. An
    operator runs after its node was added.
    """
    return int(torch._C._autograd._get_sequence_nr()) - 1


def _forward_position(positions: dict[int, Position | None]) -> Position | None:
    """Returns the line that called the forward operator whose backward is running."""
    node = torch._C._current_autograd_node()
    return None if node is None else positions.get(node._sequence_nr())


def _backward_position() -> Position | None:
    """Returns the running line of the program in backward, such as a line of the backward of an
    autograd Function. Operators of PyTorch's own formulas have no such line.
    """
    return find_position(Replay.run_backward.__code__)


class Replay:
    """Runs the recorded calls of a step again.

    trial       calls the operators with another number
    repeatable  ids of the calls without a gradient that give the recorded result again
    """

    def __init__(
        self, step: Step, trial: Trial | None = None, repeatable: Iterable[int] = ()
    ) -> None:
        self.step = step
        self.repeatable = set(repeatable)
        self.models = [entry.function for entry in step.entries if entry.is_module]
        self.paths = _name_modules(self.models)
        self.watch = Watch(_name_tensors(self.models), trial)
        self.watch.find_position = lambda: find_position(Replay._call.__code__)
        self.watch.writers = _find_writers(step.entries)
        self._replaced: dict[int, Tensor] = {}
        self._gradients: list[Tensor] = []

    def run_forward(self) -> None:
        """Runs forward again: the recorded calls whose results are part of autograd's graph, and
        the functions that compute their inputs.
        """
        with self._watching():
            self._run_entries()

    def run_frozen_module(self, entry: Entry) -> None:
        """Runs a recorded call of a module again that has no part in autograd's graph."""
        with torch.no_grad(), self._watching():
            self._run_entry(entry)

    def run_function(self, entry: Entry) -> None:
        """Runs a recorded call of a function again that has no part in autograd's graph, and the
        functions that compute its inputs.
        """
        with self._watching():
            for source in [*self._find_sources([entry]), entry]:
                self._repeat_function(source)

    def run_trial(self, run: Callable[[Replay], None]) -> RunTrial:
        """Returns a function that runs the same calls through a trial."""

        def run_again(trial: Trial) -> None:
            run(Replay(self.step, trial, self.repeatable))

        return run_again

    def find_sources_of_loss(self) -> list[Event]:
        """Returns the events from which NaN or inf came to the losses. Other results that are not
        finite, such as a metric, have no effect on the step.
        """
        losses = [self._replaced.get(id(loss), loss) for loss in self.step.losses]
        return self.watch.find_sources(losses)

    def find_sources_of_call(self, entry: Entry) -> list[Event]:
        """Returns the events from which NaN or inf came to the results of a call."""
        outputs = [self._replaced.get(id(output), output) for output in entry.outputs]
        return self.watch.find_sources(outputs)

    def find_sources_of_gradients(self) -> list[Event]:
        """Returns the events from which NaN or inf came to the gradients of `run_backward`."""
        return self.watch.find_sources(self._gradients)

    def _run_entries(self) -> None:
        entries = [entry for entry in self.step.entries if entry.takes_part]
        sources = set(map(id, self._find_sources(entries)))
        for entry in self.step.entries:
            if entry.takes_part:
                self._run_entry(entry)
            elif id(entry) in sources:
                self._repeat_function(entry)

    def _find_sources(self, targets: Sequence[Entry]) -> list[Entry]:
        """Returns the functions without a gradient that compute inputs of other calls, in order."""
        needed = {id(t) for entry in targets for t in collect_tensors((entry.args, entry.kwargs))}
        sources: list[Entry] = []
        for entry in reversed(self.step.entries):
            if entry.is_module or entry.takes_part or entry in targets:
                continue
            if any(id(output) in needed for output in entry.outputs):
                needed |= {id(tensor) for tensor in collect_tensors((entry.args, entry.kwargs))}
                sources.insert(0, entry)
        return sources

    def _repeat_function(self, entry: Entry) -> None:
        """Runs a function again that has no part in autograd's graph. If the result is another one,
        as that of a random function, the recorded result is used. Tensors of the program are not
        changed.
        """
        numbers = self.watch.count_records()
        args = self._replace(entry.args)
        if entry.is_in_place:
            args = (args[0].detach().clone(), *args[1:])
        try:
            with torch.no_grad():
                outputs = self._call(entry, args)
        except RuntimeError:
            outputs = []
        if self.watch.trial is None:
            self.watch.is_paused = True
            if _have_equal_values(outputs, entry.outputs):
                self.repeatable.add(id(entry))
            self.watch.is_paused = False
        if id(entry) not in self.repeatable:
            self.watch.forget_records(numbers)
            return
        for tensor, new_tensor in zip(entry.outputs, outputs):
            if not tensor.requires_grad:
                self._replaced[id(tensor)] = new_tensor

    def run_backward(self) -> None:
        """Runs forward and backward again. The gradients of the program are saved before this run
        and restored after it.
        """
        with preserved_gradients(self.models), self._watching():
            try:
                self._run_entries()
                self.watch.in_backward = True
                losses = [self._replace(loss) for loss in self.step.losses]
                torch.autograd.backward(losses, self._replace(list(self.step.gradients)))
                self._gradients = list(collect_gradients(self.step.entries))
            finally:
                self.watch.in_backward = False

    def _run_entry(self, entry: Entry) -> None:
        outputs = self._call(entry, self._replace(entry.args))
        for tensor, new_tensor in zip(entry.outputs, outputs):
            self._replaced[id(tensor)] = new_tensor

    def _call(self, entry: Entry, args: tuple) -> list[Tensor]:
        """Calls a function as in the recorded call, and returns its floating-point results."""
        kwargs = self._replace(entry.kwargs)
        self.watch.entry = entry
        function = entry.function
        if type(function).__name__ == "DistributedDataParallel":
            function = function.module  # the other processes do not take part
        with ExitStack() as stack:
            if entry.random_state is not None:
                stack.enter_context(_restored_random_state(entry.random_state))
            if not entry.is_module:
                for device in ("cpu", "cuda"):
                    stack.enter_context(_autocast(device, entry.autocast.get(device)))
            else:
                for device, dtype in entry.autocast.items():
                    stack.enter_context(_autocast(device, dtype))
            result = function(*args, **kwargs)
        if entry.is_assignment:
            result = args[0]
        return [tensor for tensor in collect_tensors(result) if tensor.is_floating_point()]

    def _replace(self, value: Any) -> Any:
        """Returns a copy of a value in which each recorded tensor is replaced by the corresponding
        tensor of this run.
        """
        if isinstance(value, Tensor):
            return self._replaced.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(self._replace(item) for item in value)
        if type(value) is dict:
            return {key: self._replace(item) for key, item in value.items()}
        return value

    @contextmanager
    def _watching(self) -> Iterator[None]:
        modules = self.watch.modules

        def enter(module: nn.Module, args: Any) -> None:
            modules.append((self.paths.get(id(module), type(module).__name__), module))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if modules:
                modules.pop()

        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            with warnings.catch_warnings(), make_tape(self.watch.run):
                warnings.simplefilter("ignore")  # about the hooks of this run
                yield
        finally:
            for hook in hooks:
                hook.remove()


def watch_update(function: Callable[[], Any], trial: Trial | None = None) -> Watch:
    """Runs an update of an optimizer, and collects the operators in it whose results contain NaN or
    inf.
    """
    watch = Watch({}, trial)
    watch.find_position = _optimizer_position
    with make_tape(watch.run):
        function()
    return watch


def _optimizer_position() -> Position | None:
    """Returns the line of the optimizer's code that is running, in the innermost frame."""
    for frame in running_frames():
        if (
            not is_tool_file(frame.f_code.co_filename)
            or _OPTIMIZER_FOLDER in frame.f_code.co_filename
        ):
            return Position(Site(frame.f_code, frame.f_lineno), frame.f_lasti)
    return None


def _autocast(device: str, dtype: torch.dtype | None) -> Any:
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None)


@contextmanager
def preserved_gradients(models: Sequence[nn.Module]) -> Iterator[None]:
    """Within this block no parameter of the models has a gradient. The gradients are restored
    afterwards.
    """
    gradients = [
        (parameter, parameter.grad) for model in models for parameter in model.parameters()
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _restored_random_state(state: dict[str, Tensor]) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
        yield


def _find_writers(entries: Sequence[Entry]) -> dict[int, Entry]:
    """Returns the last call without a gradient that wrote NaN or inf as a constant into a tensor, for
    each such tensor. These calls do not run again if the program has changed the tensor since.
    """
    return {
        id(output): entry
        for entry in entries
        for output in entry.outputs
        if not entry.takes_part and _writes_bad_constant(entry)
    }


def _writes_bad_constant(entry: Entry) -> bool:
    if entry.name.rstrip("_") not in CONSTANT_WRITERS and not entry.is_assignment:
        return False
    return any(map(_is_bad_constant, [*entry.args[1:], *entry.kwargs.values()]))


def _is_bad_constant(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_scalar = value.numel() == 1 and value.is_floating_point()
        return is_scalar and not bool(value.isfinite().all())
    return isinstance(value, float) and not math.isfinite(value)


def _name_modules(models: Sequence[nn.Module]) -> dict[int, str]:
    names: dict[int, str] = {}
    for model in models:
        for name, module in model.named_modules():
            names.setdefault(id(module), name or type(model).__name__)
    return names


def _name_tensors(models: Sequence[nn.Module]) -> dict[int, str]:
    names: dict[int, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"parameter {name}")
        for name, buffer in model.named_buffers():
            names.setdefault(id(buffer), f"buffer {name}")
    return names


def describe_input(item: Input) -> str:
    shape = " ".join(map(str, item.shape))
    text = f"{format_dtype(item.dtype)}[{shape}]  {item.run}"
    return f"{text}  {item.path}" if item.path else text


def _integer_divisors(op: Operator, args: tuple) -> list[tuple[str, Tensor]]:
    """Returns the divisor of a division if it is a tensor of integers, such as a count."""
    is_division = op.base_name in ("div", "true_divide") and len(args) > 1
    if not is_division or not isinstance(args[1], Tensor) or args[1].is_floating_point():
        return []
    return [("other", args[1])]
