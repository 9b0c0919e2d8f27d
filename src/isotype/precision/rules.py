"""Finds contradictions between precision settings before anything is loaded. Imports no torch; the doctor uses the same rules.

Rules are the sheet `rules.txt`, read by `pages.sheets`. A rule names both settings, where each was set, why they conflict, and the fix.
Errors refuse the run; warnings are shown in its header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..dtypes import itemsize
from ..finding import Finding, Place, Severity
from ..pages import docstring_page, sheets
from .packing import WORDS as PACKED
from .precision import EIGHT_BIT


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its source. `given`: the user wrote it; it is not from a preset or a default."""

    value: str
    where: str = "default"
    given: bool = False

    def __str__(self) -> str:
        return f"{self.value} ({self.where})"


@dataclass(frozen=True)
class Facts:
    """What the rules look at: every role of `Precision`, and the settings around it.

    settings  role or `adapter` (lora, none), `frozen` (yes, no: whether weights of the model are not trained), `optimizer_name` (adamw,
              adamw8bit), `preset` -> Setting
    device    the name of the hardware in messages; `bf16` is native, emulated or none there
    """

    settings: Mapping[str, Setting] = field(default_factory=dict)
    device: str = "this device"
    device_kind: str = "cpu"
    bf16: str = "native"

    def __getitem__(self, key: str) -> Setting:
        return self.settings[key]

    def value(self, key: str) -> str:
        return self.settings[key].value


class _Words(sheets.Facts):
    """The words of the sheet: its own, roles and settings by name (their values), and the following.

    given ROLE                   whether the user wrote it
    packed ROLE                  whether its weights are a few bits with scales
    bf16 among ROLE, ROLE        those of the roles that are bf16; `half among`: bf16 or fp16
    ROLES set to WORD            `precision.ROLE: WORD`, for each of the roles
    device, bf16 of device       its name; native, emulated or none
    eight bit                    whether the optimizer keeps its states in 8 bits
    ROLE narrower than ROLE      a test of its own
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts

    def get(self, name: str) -> Any:
        settings = self.facts.settings
        if name in self.made:
            return self.made[name]
        if name in settings:
            return settings[name].value
        kind, _, rest = name.partition(" ")
        roles, found, word = name.partition(" set to ")
        if found:
            return " and ".join(f"precision.{role}: {self.get(word)}" for role in str(self.get(roles)).split(", "))
        dtype, found, roles = name.partition(" among ")
        if found:
            wanted = ("bf16", "fp16") if dtype == "half" else (dtype,)
            return ", ".join(r for r in self.made.get(roles, roles).split(", ") if r in settings and settings[r].value in wanted)
        match kind:
            case "given":
                return settings[rest].given
            case "packed":
                return self.get(rest) in ("nf4", *PACKED)
            case "eight":
                return self.get("optimizer_name") in EIGHT_BIT
            case "device":
                return self.facts.device
            case "bf16" if rest == "of device":
                return self.facts.bf16
        return None

    def holds_specially(self, term: str) -> bool | None:
        left, found, right = term.partition(" narrower than ")
        if not found:
            return None
        one, other = self.get(left), self.get(right)
        return one is not None and itemsize(one) < itemsize(other)


RULES: dict[str, Callable[[Facts], Iterator[Finding]]] = {}


def _register(section: sheets.Section) -> None:
    head, *entries = section.entries

    def rule(facts: Facts) -> Iterator[Finding]:
        words = _Words(facts)
        head.make(words)
        for entry in entries:
            if severity := entry.rank(words):
                names, cause, fix = (entry.first(name, words) for name in ("names", "cause", "fix"))
                told = words.say(entry.title)
                yield _finding(section.code, facts, names.split(", "), told, cause=cause, fix=fix, severity=Severity.parse(severity))

    rule.__doc__ = section.page
    RULES[section.code] = rule


def check(facts: Facts) -> list[Finding]:
    """Every finding of every rule, by code."""
    return [finding for code in codes() for finding in RULES[code](facts)]


def codes() -> list[str]:
    return sorted(RULES)


def page(code: str) -> str | None:
    """The page of a rule."""
    return docstring_page(code, RULES[code]) if code in RULES else None


def _finding(code: str, facts: Facts, keys: list[str], message: str, *, cause: str, fix: str, severity: Severity) -> Finding:
    """Makes a finding that lists each setting with its source. Its place is the first one that the user wrote, else the first."""
    written = next((k for k in keys if facts[k].given), keys[0])
    file, _, line = facts[written].where.rpartition(", ")[2].rpartition(":")  # "run.yaml:3", or "preset nf4-lora, run.yaml:3"
    place = Place(
        file=file if line.isdigit() else None,
        line=int(line) if line.isdigit() and file else None,
        symbol=_key(written),
    )
    details = tuple((_key(k), str(facts[k])) for k in keys)
    return Finding(code=code, severity=severity, message=message, place=place, cause=cause, fix=fix, details=details)


def _key(name: str) -> str:
    return {"adapter": "adapter.kind", "optimizer_name": "train.optimizer"}.get(name, f"precision.{name}")


for _section in sheets.sections(Path(__file__).with_name("rules.txt"), ranks="error|warning", fields="names|cause|fix"):
    _register(_section)
