"""What became of each key of another tool's configuration, and the settings of Isotype that came of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..config.yaml_text import write_value


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
    """The configuration that is being made. A table's transforms call its methods, one for each key.

    settings  `train.learning_rate` -> value
    sources   `train.learning_rate` -> the key that it came from
    keys      every key of the file, for transforms that depend on another one
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

    def without_adapter(self) -> bool:
        """Whether every weight is trained; then the adapter's other settings are dropped."""
        if self.settings["adapter.kind"] != "none":
            return False
        self.settings = {key: value for key, value in self.settings.items() if not key.startswith("adapter.") or key == "adapter.kind"}
        return True

    def set(self, given: Given, target: str, value: Any, note: str = "") -> None:
        """One setting from one key. A note, or a value that is not the given one, makes it `changed`."""
        self.settings[target] = value
        self.sources[target] = given
        fate = Fate.RENAMED
        if note or not _same(value, given.value):
            fate = Fate.CHANGED
        elif given.name == target.partition(".")[2]:
            fate = Fate.TAKEN
        self.outcomes.append(Outcome(given, fate, f"{target}: {write_value(value)}", note))

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


def _same(ours: Any, theirs: Any) -> bool:
    """Whether it is one value, written in two ways perhaps (`2e-4` and 0.0002)."""
    if ours == theirs or str(ours) == str(theirs):
        return True
    try:
        return float(ours) == float(theirs)
    except (TypeError, ValueError):
        return False
