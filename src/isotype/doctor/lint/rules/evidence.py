"""From events to hits: one hit a place, with the scenario that shows it and the branches that lead there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..dataflow.events import Event, Kind


def first_of_each(events: Iterable[Event], *kinds: Kind, phase: str | None = None) -> Iterator[Event]:
    """The first event of these kinds on each line, in source order."""
    found: dict[int, Event] = {}
    for event in events:
        if event.kind in kinds and phase in (None, event.phase):
            found.setdefault(event.node.lineno, event)
    yield from (found[line] for line in sorted(found))


def details(event: Event) -> tuple[tuple[str, str], ...]:
    """The scenario in which it happens, and the branches taken on the way."""
    shown = [("when", str(event.scenario))]
    if event.path:
        shown.append(("path", ", ".join(event.path)))
    return tuple(shown)


def operands(event: Event) -> str:
    """`dy is bf16 (the gradient, ...); w is fp32 (the argument w)`."""
    return "; ".join(f"{'the out= tensor' if label == 'out=' else label} is {value}" for label, value in event.operands)


def dtypes(event: Event) -> str:
    """`bf16 and fp32`."""
    return " and ".join(str(value.dtype) for _, value in event.operands)
