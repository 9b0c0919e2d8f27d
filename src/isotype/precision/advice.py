"""What a rule advises, tried on the settings of the run: a remedy is told only if it ends the
finding and begins no other error, and with what else it needs. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..finding import Finding, Severity

Settings = Mapping[str, str]
Change = dict[str, str | None]  # key -> its new value, or None where it is removed
_MAX_ADDITIONS = 4  # settings, besides those that a rule names, that a remedy may need


def parse_fix(fix: str) -> Iterator[tuple[str, Change]]:
    """(text, settings) of each remedy that a rule's advice names: `precision.a: x and precision.b:
    y, or remove precision.c`.
    """
    for text in fix.split(", or "):
        without_remarks = re.sub(r" \([^)]*\)", "", text)
        removal = re.fullmatch(r"remove ([a-z_.]+)", without_remarks)
        if removal:
            yield text, {removal[1]: None}
            continue
        pairs = (part.partition(": ") for part in without_remarks.split(" and "))
        yield text, {key: value for key, _, value in pairs}


def apply_change(settings: Settings, change: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in {**settings, **change}.items() if value is not None}


def keep_working_fixes(
    finding: Finding, settings: Settings, find: Callable[[Settings], Sequence[Finding]]
) -> Finding:
    """The finding with those of its remedies that end it and begin no other error, each with what
    else it needs.

    settings  what the user wrote, by its full key
    find      the findings of the rules for other settings
    """
    trial = _Trial(finding.code, settings, find, {f.code for f in find(settings)})
    fixes = []
    for text, remedy in parse_fix(finding.fix or ""):
        change = trial.complete(remedy)
        if change is not None:
            additions = {key: value for key, value in change.items() if key not in remedy}
            fixes.append(" and ".join([text, *map(_describe_change, additions.items())]))
    if not fixes:
        fixes = [text for text, change in _drop_roles(settings) if trial.failure(change) is None][
            :1
        ]
    if fixes:
        return replace(finding, fix=", or ".join(fixes))
    return finding


def _describe_change(change: tuple[str, str | None]) -> str:
    key, value = change
    return f"remove {key}" if value is None else f"{key}: {value}"


def _drop_roles(settings: Settings) -> Iterator[tuple[str, Change]]:
    """The preset without the roles that the user wrote beside it, and then another preset: for
    roles that contradict each other.
    """
    change: Change = {
        key: None for key in settings if key.startswith("precision.") and key != "precision.preset"
    }
    text = " and ".join(f"remove {key}" for key in change)
    yield text, change
    yield (
        " and ".join(filter(None, (text, "precision.preset: auto"))),
        {**change, "precision.preset": "auto"},
    )


@dataclass(frozen=True)
class _Trial:
    """Tries changes of the settings against one finding.

    previous_codes  those of the findings for the settings as they are
    """

    code: str
    settings: Settings
    find: Callable[[Settings], Sequence[Finding]]
    previous_codes: set[str]

    def failure(self, change: Change) -> Finding | None:
        """The finding if it is still there after a change, or an error that the change begins."""
        for finding in self.find(apply_change(self.settings, change)):
            begins = finding.severity == Severity.ERROR and finding.code not in self.previous_codes
            if finding.code == self.code or begins:
                return finding
        return None

    def complete(self, remedy: Change) -> Change | None:
        """The remedy with the settings that it needs besides, or None where it does not help."""
        change = dict(remedy)
        for _ in range(_MAX_ADDITIONS + 1):
            failure = self.failure(change)
            if failure is None:
                return change
            addition = next(self._additions(failure, change), None)
            if addition is None:
                return None
            change |= addition
        return None

    def _additions(self, failure: Finding, change: Change) -> Iterator[Change]:
        """What may end a finding that is still there: the removal of a role that the user wrote
        beside a preset, or that finding's own remedy.
        """
        if "precision.preset" in change:
            for key, _ in failure.details:
                is_role = key.startswith("precision.")
                if is_role and key in self.settings and key not in change:
                    yield {key: None}
        for _, remedy in parse_fix(failure.fix or ""):
            if not any(key in change or key == "precision.preset" for key in remedy):
                yield remedy
