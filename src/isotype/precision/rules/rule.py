"""The facts that a rule reads, the register of rules, and the finding that a rule makes.

A rule is a function from `Facts` to findings; its docstring is its page. It names both settings, where each was set, why they
conflict, and the fix. Errors refuse the run; warnings are shown in its header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from ...finding import Finding, Place, Severity
from ...pages import registered


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


Rule = Callable[[Facts], Iterator[Finding]]
RULES: dict[str, Rule] = {}


rule = partial(registered, RULES)


def finding(facts: Facts, keys: tuple[str, ...], message: str, *, cause: str, fix: str, severity: Severity = Severity.ERROR) -> Finding:
    """Makes a finding that lists each setting with its source. Its place is the first one that the user wrote, else the first."""
    written = next((k for k in keys if facts[k].given), keys[0])
    file, _, line = facts[written].where.rpartition(", ")[2].rpartition(":")  # "run.yaml:3", or "preset nf4-lora, run.yaml:3"
    place = Place(
        file=file if line.isdigit() else None,
        line=int(line) if line.isdigit() and file else None,
        symbol=_key(written),
    )
    details = tuple((_key(k), str(facts[k])) for k in keys)
    return Finding(code="", severity=severity, message=message, place=place, cause=cause, fix=fix, details=details)


def _key(name: str) -> str:
    return {"adapter": "adapter.kind", "optimizer_name": "train.optimizer"}.get(name, f"precision.{name}")
