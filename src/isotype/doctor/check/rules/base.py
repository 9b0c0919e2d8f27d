"""What a rule is: a function from a record to findings, naming the settings, their places and who wins; its docstring is its page.

Most rules are sheets (`*.txt` beside this file, read by `doctor.sheets`). A section has no name; its head may `set` names to settings.
An entry's title is the finding's message, its ranks are the severities, its fields: `shows` (the settings listed, with `,` between them,
each the first of `|` that is there), `cause`, `fix`, `today`, `holds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ....finding import Finding, Place, Severity
from ....pages import docstring_page, registered
from ...sheets import Entry, sections
from ...sheets import Facts as Known
from ..model_settings import (
    CHECKPOINT_DTYPE,
    deepspeed_half,
    deepspeed_setting,
    fsdp_version,
    launcher_mode,
    lightning_precision,
    uses_deepspeed,
    uses_fsdp,
    zero_stage,
)
from ..settings import ROLES, Record, Setting, dtype_of

Rule = Callable[[Record], Iterator[Finding]]
RULES: dict[str, Rule] = {}
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


rule = partial(registered, RULES)


def found(
    severity: Severity,
    message: str,
    *settings: Setting | None,
    cause: str,
    fix: str,
    wins: str | None = None,
    holds: str | None = None,
) -> Finding:
    """A finding at the first setting, listing all of them.

    wins   what happens today, when two settings disagree
    holds  the versions the rule is known for
    """
    given = list({(s.key, s.file, s.line): s for s in settings if s is not None}.values())
    details: list[tuple[str, str]] = []
    for setting in given:
        label = setting.key if all(setting.key != known for known, _ in details) else f"{setting.key}, also"
        details.append((label, setting.shown))
    if wins:
        details.append(("today", wins))
    if holds:
        details.append(("holds for", holds))
    place = given[0].place if given else Place()
    return Finding(code="", severity=severity, message=message, place=place, cause=cause, fix=fix, details=tuple(details))


error, warning, note = (partial(found, severity) for severity in (ERROR, WARNING, NOTE))


def page(code: str) -> str | None:
    return docstring_page(code, RULES[code]) if code in RULES else None


_QUANTO = "precision with quanto"
_SHARED: dict[str, Callable[[Record], Any]] = {
    "accumulates": lambda r: r.accumulates,
    "adapter": lambda r: r.adapter,
    "adapter by": lambda r: r.adapter_by,
    "without adapter": lambda r: r.adapter is False,
    "checkpoint dtype": lambda r: r.facts.get(*CHECKPOINT_DTYPE),
    "deepspeed": lambda r: uses_deepspeed(r.facts),
    "deepspeed half": deepspeed_half,
    "device": lambda r: r.device,
    "fsdp": lambda r: uses_fsdp(r.facts),
    "fsdp version": lambda r: fsdp_version(r.facts)[0],
    "fsdp version by": lambda r: fsdp_version(r.facts)[1],
    "made by": lambda r: next((made for d in r.facts.documents if (made := d.attributes.get("made_by"))), None),
    "launcher": lambda r: launcher_mode(r.facts),
    "lightning precision": lambda r: lightning_precision(r.facts),
    "quantised": lambda r: r.quantised,
    "quantised by": lambda r: r.quantised_by,
    "quantised by simpletuner": lambda r: r.facts.word("simpletuner.base_model_precision") not in ("", "no_change"),
    "tool": lambda r: r.tool,
    "zero stage": lambda r: zero_stage(r.facts)[0],
    "zero stage by": lambda r: zero_stage(r.facts)[1],
    _QUANTO: lambda r: next((s for n, s in r.facts.all("simpletuner") if n.endswith("_precision") and "quanto" in str(s.value)), None),
}
_READINGS: dict[str, Callable[[Any], Any]] = {
    " as dtype": dtype_of,
    " as key": lambda setting: setting.key,
    " as text": str,
    " in lower case": lambda value: str(value).lower(),
}


class Facts(Known):
    """What is known of a run, by name: words and settings that the sheet made, roles of the record by name, and the following.

    TOOL.KEY, TOOL.KEY     the first of these settings that is given; after `on` or `off` the first that is switched so, after `given`
                           that is written at all, after `under` that begins so
    by ROLE                the setting that decided a role
    deepspeed KEY          a setting of DeepSpeed's, wherever the tool keeps it
    has TOOL               whether a file of the tool is there
    and the names of `_SHARED`; `NAME as dtype` and the other endings of `_READINGS` read a value so
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def get(self, name: str) -> Any:
        record, facts = self.record, self.record.facts
        if name in self.made:
            return self.made[name]
        if name in _SHARED:
            return _SHARED[name](record)
        if name in ROLES:
            return record.value(name)
        for ending, read in _READINGS.items():
            if name.endswith(ending):
                value = self.get(name.removesuffix(ending))
                return None if value is None else read(value.value if isinstance(value, Setting) and ending != " as key" else value)
        kind, _, rest = name.partition(" ")
        match kind:
            case "on":
                return facts.on(*rest.split(", "))
            case "off":
                return facts.off(*rest.split(", "))
            case "given":
                return facts.given(rest)
            case "under":
                return next((s for prefix in rest.split(", ") for s in facts.under(prefix)), None)
            case "by":
                return record.by(rest)
            case "deepspeed":
                return deepspeed_setting(facts, rest)
            case "has":
                return facts.has(rest)
        return facts.get(*name.split(", ")) if "." in name else None

    def setting(self, names: str) -> Setting | None:
        """The first of `one|another` that is a setting."""
        return next((value for name in names.split("|") if isinstance(value := self.get(name), Setting)), None)


def _findings(entries: list[Entry], record: Record) -> Iterator[Finding]:
    facts, head = Facts(record), entries[0]
    for name, test, lookup in head.fields:
        if name.startswith("set ") and facts.made.get(name[4:]) is None and facts.holds(test):
            facts.made[name[4:]] = facts.get(lookup)
    head.make(facts)
    for entry in entries[1:]:
        if severity := entry.rank(facts):
            cause, fix, wins, holds = (entry.first(name, facts) for name in ("cause", "fix", "today", "holds"))
            settings = [facts.setting(names) for names in entry.first("shows", facts).split(", ")]
            yield found(Severity.parse(severity), facts.say(entry.title), *settings, cause=cause, fix=fix, wins=wins, holds=holds)


def register(path: Path) -> None:
    """Makes the rules of one sheet."""
    for section in sections(path, ranks="error|warning|note", fields=r"set \w+|shows|cause|fix|today|holds"):

        def findings(record: Record, entries: list[Entry] = section.entries) -> Iterator[Finding]:
            return _findings(entries, record)

        findings.__doc__ = section.page
        rule(section.code)(findings)


for _sheet in sorted(Path(__file__).parent.glob("*.txt")):
    register(_sheet)
