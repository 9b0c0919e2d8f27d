"""Advice that holds: every way out that a rule names is tried on the very settings, and told with what else it needs.

A rule sees one contradiction. `precision.trainable: fp32` ends it, and begins another one where `precision.grads: bf16` stands beside it;
a preset ends none that a role beside it keeps up. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..finding import Finding, Severity

Settings = Mapping[str, str]
Change = dict[str, str | None]  # key -> its new value, or None where it is removed
_MOST = 4  # settings, besides those that a rule names, that a way out may need


def ways_out(fix: str) -> Iterator[tuple[str, Change]]:
    """(text, settings) of each way that a rule's advice names: `precision.a: x and precision.b: y, or remove precision.c`."""
    for text in fix.split(", or "):
        plain = re.sub(r" \([^)]*\)", "", text)
        if removed := re.fullmatch(r"remove ([a-z_.]+)", plain):
            yield text, {removed[1]: None}
            continue
        pairs = (part.partition(": ") for part in plain.split(" and "))
        yield text, {key: value for key, _, value in pairs}


def that_holds(finding: Finding, settings: Settings, look: Callable[[Settings], Sequence[Finding]]) -> Finding:
    """The finding with those of its ways out that end it and begin no other error, each with what it needs besides.

    settings  what the user wrote, by its full key
    look      what the rules say about other settings
    """
    before = {f.code for f in look(settings)}
    held = []
    for text, way in ways_out(finding.fix or ""):
        change = _completed(finding.code, way, settings, before, look)
        if change is not None:
            more = {key: value for key, value in change.items() if key not in way}
            held.append(" and ".join([text, *(f"remove {key}" if value is None else f"{key}: {value}" for key, value in more.items())]))
    if not held:
        held = [text for text, change in _without_roles(settings) if _bad(finding.code, change, settings, before, look) is None][:1]
    return replace(finding, fix=", or ".join(held)) if held else finding


def _without_roles(settings: Settings) -> Iterator[tuple[str, Change]]:
    """The preset alone, and another one: where the roles beside it contradict each other."""
    roles: Change = {key: None for key in settings if key.startswith("precision.") and key != "precision.preset"}
    removed = " and ".join(f"remove {key}" for key in roles)
    yield removed, roles
    yield " and ".join(filter(None, (removed, "precision.preset: auto"))), {**roles, "precision.preset": "auto"}


def changed(settings: Settings, change: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in {**settings, **change}.items() if value is not None}


def _completed(
    code: str, way: Change, settings: Settings, before: set[str], look: Callable[[Settings], Sequence[Finding]]
) -> Change | None:
    """The way with the settings that it needs besides, or None where it does not help."""
    change = dict(way)
    for _ in range(_MOST + 1):
        bad = _bad(code, change, settings, before, look)
        if bad is None:
            return change
        more = next(_further(bad, change, settings), None)
        if more is None:
            return None
        change |= more
    return None


def _bad(code: str, change: Change, settings: Settings, before: set[str], look: Callable[[Settings], Sequence[Finding]]) -> Finding | None:
    """The finding that is still there after a change, or an error that it begins."""
    found = look(changed(settings, change))
    return next((f for f in found if f.code == code or (f.severity == Severity.ERROR and f.code not in before)), None)


def _further(bad: Finding, change: Change, settings: Settings) -> Iterator[Change]:
    """What ends a finding that is still there: a role is removed that the user set beside a preset, or that finding's own way out."""
    named = [key for key, _ in bad.details]
    if "precision.preset" in change:
        for key in named:
            if key in settings and key not in change and key.startswith("precision."):
                yield {key: None}
    for _, way in ways_out(bad.fix or ""):
        if not any(key in change or key == "precision.preset" for key in way):
            yield way
