"""From events to hits: one hit a place, with the scenario that shows it and the branches that lead there."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..dataflow.arguments import ACTIVATION
from ..dataflow.events import Event, Kind
from ..source import Function, SourceFile, last_name

_PLAIN_BASES = frozenset({"Module", "object", "ABC"})
_FIXED_SIGNATURES = frozenset({"overload", "abstractmethod", "jit", "register_fake", "custom_op", "register", "property", "override"})


def first_of_each(events: Iterable[Event], *kinds: Kind, phase: str | None = None) -> Iterator[Event]:
    """The first event of these kinds on each line, in source order."""
    found: dict[int, Event] = {}
    for event in events:
        if event.kind in kinds and phase in (None, event.phase):
            found.setdefault(event.node.lineno, event)
    yield from (found[line] for line in sorted(found))


def first_of_each_function(file: SourceFile, events: Iterable[Event], *kinds: Kind) -> Iterator[tuple[Event, list[int]]]:
    """The first event of these kinds in each function, and the other lines of it where such a thing happens: one mistake, one finding.

    Events come by scenario, the likeliest first.
    """
    found: dict[ast.AST | None, list[Event]] = {}
    for event in events:
        if event.kind in kinds:
            found.setdefault(file.function_of(event.node), []).append(event)
    for group in sorted(found.values(), key=lambda events: events[0].node.lineno):
        yield group[0], sorted({e.node.lineno for e in group} - {group[0].node.lineno})


def details(event: Event, file: SourceFile | None = None, also: Iterable[int] = ()) -> tuple[tuple[str, str], ...]:
    """The scenario in which it happens, the branches taken on the way, and other lines with the same mistake."""
    shown = [("when", str(event.scenario))]
    if event.path:
        shown.append(("path", ", ".join(event.path)))
    if file is not None and also:
        shown.append(("also", ", ".join(f"{Path(file.path).name}:{line}" for line in also)))
    return tuple(shown)


def operands(event: Event) -> str:
    """`dy is bf16 (the gradient, ...); w is fp32 (the argument w)`."""
    return "; ".join(f"{'the out= tensor' if label == 'out=' else label} is {value}" for label, value in event.operands)


def dtypes(event: Event) -> str:
    """`bf16 and fp32`."""
    return " and ".join(str(value.dtype) for _, value in event.operands)


def of_a_model(file: SourceFile, node: ast.AST) -> bool:
    """Whether bf16 may well come here: into a module, or a function with an argument named like an activation.

    Boxes, coordinates, audio and embeddings to be clustered are handled by plain functions too, and stay in fp32.
    """
    function = file.function_of(node)
    named = False
    while function is not None:
        cls = file.parents.get(function)
        if isinstance(cls, ast.ClassDef):
            has_forward = any(isinstance(m, ast.FunctionDef) and m.name == "forward" for m in cls.body)
            return has_forward or any("Module" in last_name(base) for base in cls.bases)
        named = named or any(ACTIVATION.match(a.arg) for a in (*function.args.args, *function.args.kwonlyargs))
        function = file.function_of(function)
    return named


def signature_is_its_own(file: SourceFile, function: Function) -> bool:
    """Whether the author chose the arguments: not of an override, a stub, or an implementation that is registered somewhere."""
    if any(last_name(d) in _FIXED_SIGNATURES for d in function.decorator_list) or function.name.startswith("__") or function.args.kwarg:
        return False
    cls = file.parents.get(function)
    return not isinstance(cls, ast.ClassDef) or all(last_name(base) in _PLAIN_BASES for base in cls.bases)
