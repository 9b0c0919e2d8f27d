"""If a rule reports an error or a warning, it suggests one or more changes of the settings. This
module tests each suggestion with the settings of the run. A suggestion is shown only if two
conditions are true with the suggested change: the rule reports nothing, and no other rule reports a
new error. If a suggestion only works together with changes of further settings, these changes are
shown too. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..finding import Finding, Severity

Settings = Mapping[str, str]  # key of the configuration -> its value
Change = dict[str, str | None]  # key -> its new value, or None where it is removed
_MAX_ADDITIONS = 4  # largest number of settings that are added to a remedy


def parse_fix(fix: str) -> Iterator[tuple[str, Change]]:
    """Splits a rule's advice into the changes that it suggests, as pairs (text, changes of
    settings). For example, `precision.a: x and precision.b: y, or remove precision.c` gives two
    pairs.
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
    """Returns a copy of the report with only those suggestions that solve the problem and cause no
    new error. Each suggestion includes the changes of further settings that it needs.

    settings  the settings that the user wrote, by full key
    find      a function that returns what the rules report for given settings
    """
    trial = _Trial(finding.code, settings, find, {finding.code for finding in find(settings)})
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
    """Yields changes of the settings that may solve a contradiction between fields of the
    precision. The first change is to remove all fields that the user wrote beside the preset. The
    second change also sets `precision.preset: auto`.
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
    """Tests whether changes of the settings solve one reported problem.

    previous_codes  the codes of all problems that are reported without a change
    """

    code: str
    settings: Settings
    find: Callable[[Settings], Sequence[Finding]]
    previous_codes: set[str]

    def failure(self, change: Change) -> Finding | None:
        """Checks the settings again with a change. Returns the problem if it is still reported, or
        a new error that the change causes. Returns None if the change solves the problem.
        """
        for finding in self.find(apply_change(self.settings, change)):
            begins = finding.severity == Severity.ERROR and finding.code not in self.previous_codes
            if finding.code == self.code or begins:
                return finding
        return None

    def complete(self, remedy: Change) -> Change | None:
        """If a change does not solve the problem alone, adds changes of further settings until it
        does. Returns all these changes, or None if they do not solve the problem.
        """
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
        """Yields further changes that may solve the remaining problem. Some of them remove a field
        that the user wrote beside a preset. The others are suggestions in the report of the
        problem.
        """
        if "precision.preset" in change:
            for key, _ in failure.details:
                is_role = key.startswith("precision.")
                if is_role and key in self.settings and key not in change:
                    yield {key: None}
        for _, remedy in parse_fix(failure.fix or ""):
            if not any(key in change or key == "precision.preset" for key in remedy):
                yield remedy
