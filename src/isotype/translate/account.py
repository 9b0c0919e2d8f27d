"""What became of each key of another tool's configuration, and the settings of Isotype that came of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Fate(StrEnum):
    TAKEN = "taken"  # the same key with the same value
    RENAMED = "renamed"  # the same value under another key
    CHANGED = "changed"  # another value, or another meaning of it: the note says which
    NO_EFFECT = "no effect"  # nothing here depends on it
    NOT_OFFERED = "not offered"  # the note says what to use


@dataclass(frozen=True)
class Given:
    """A key of the other tool; `name` is its name in the tables, `written` the name in the file."""

    name: str
    value: Any
    line: int | None = None
    written: str = ""


@dataclass(frozen=True)
class Outcome:
    """became: `train.learning_rate: 0.0002`, or "" where nothing came of the key."""

    given: Given
    fate: Fate
    became: str = ""
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.given.written or self.given.name,
            "line": self.given.line,
            "value": self.given.value,
            "fate": str(self.fate),
            "became": self.became or None,
            "note": self.note or None,
        }


class Computed:
    """The value of a key that only running the program would tell."""


@dataclass
class Draft:
    """The configuration that is being made. A tool's handlers call its methods, one for each key.

    settings  `train.learning_rate` -> value
    sources   `train.learning_rate` -> the key that it came from
    keys      every key of the file, for handlers that depend on another one
    folder    where the file lies, for those that name other files
    defaults  the settings that are the other tool's defaults
    notes     what no single key says
    """

    keys: dict[str, Any] = field(default_factory=dict)
    folder: str = "."
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Given] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    about_precision: list[Given] = field(default_factory=list)
    defaults: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def default(self, target: str, value: Any) -> None:
        """The other tool's default where it differs from Isotype's and the file does not set the key."""
        if target not in self.settings:
            self.settings[target] = value
            self.defaults.add(target)

    def set(self, given: Given, target: str, value: Any, note: str = "") -> None:
        """One setting from one key. A note, or a value that is not the given one, makes it `changed`."""
        self.settings[target] = value
        self.sources[target] = given
        fate = (
            Fate.CHANGED
            if note or not _same(value, given.value)
            else Fate.TAKEN
            if given.name == target.partition(".")[2]
            else Fate.RENAMED
        )
        self.outcomes.append(Outcome(given, fate, f"{target}: {_shown(value)}", note))

    def changed(self, given: Given, note: str) -> None:
        """Isotype does something else here, for which it has no setting."""
        self.outcomes.append(Outcome(given, Fate.CHANGED, note=note))

    def no_effect(self, given: Given, why: str) -> None:
        self.outcomes.append(Outcome(given, Fate.NO_EFFECT, note=why))

    def not_offered(self, given: Given, use: str) -> None:
        self.outcomes.append(Outcome(given, Fate.NOT_OFFERED, note=use))

    def precision(self, given: Given) -> None:
        """Keys that decide the precision together are reported when all of them are known."""
        self.about_precision.append(given)


Handler = Callable[[Draft, Given], None]
DEFAULT_WORDS = (None, "", "none", "None", "null", False, "false")


def number(value: Any) -> float | int:
    """1e-5 is text in YAML 1.1, and on a command line everything is."""
    parsed = float(value)
    return int(parsed) if parsed == int(parsed) and "." not in str(value) and "e" not in str(value).lower() else parsed


def truth(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "yes", "on", "1", "auto")


def to(target: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Handler:
    """The key sets `target`; null leaves Isotype's default."""

    def handler(draft: Draft, given: Given) -> None:
        if given.value is None:
            draft.no_effect(given, "null: the default")
        else:
            draft.set(given, target, convert(given.value), note)

    return handler


def to_number(target: str, note: str = "") -> Handler:
    return to(target, number, note)


def to_count(target: str) -> Handler:
    """A whole number from 1 on; 0, -1 and null leave the default."""

    def handler(draft: Draft, given: Given) -> None:
        value = number(given.value) if given.value is not None else 0
        if value <= 0:
            draft.no_effect(given, f"{given.value}: the default")
        elif value != int(value):
            draft.not_offered(given, f"a share of the run; {target} is a number of steps")
        else:
            draft.set(given, target, int(value))

    return handler


def to_truth(target: str) -> Handler:
    return to(target, truth)


def no_effect(why: str) -> Handler:
    return lambda draft, given: draft.no_effect(given, why)


def not_offered(use: str) -> Handler:
    """Only where the key is switched on; off, it changes nothing."""

    def handler(draft: Draft, given: Given) -> None:
        if given.value in DEFAULT_WORDS or given.value in ([], {}):
            draft.no_effect(given, "switched off")
        else:
            draft.not_offered(given, use)

    return handler


def changed(note: str) -> Handler:
    return lambda draft, given: draft.changed(given, note)


def precision(draft: Draft, given: Given) -> None:
    draft.precision(given)


def _same(ours: Any, theirs: Any) -> bool:
    """Whether it is one value, written in two ways perhaps (`2e-4` and 0.0002)."""
    if ours == theirs or str(ours) == str(theirs):
        return True
    try:
        return float(ours) == float(theirs)
    except (TypeError, ValueError):
        return False


def _shown(value: Any) -> str:
    from ..config.yaml_text import write_value

    return write_value(value)
