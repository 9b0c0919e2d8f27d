"""Explains the errors of a text: recognised, placed in their situation, causes ranked, the last
error first in rank.

The families of errors are sheets (`families/*.txt`, read by `pages.sheets`). A section is headed by
the operators that refused, with `;` between them, and has a `message`; a rank is a cause's score,
its fields are `why`, `fix` and `seen`, the evidence. `+ outside autocast -2 if TEST` stands for
causes of `shared.txt`, their scores moved so. Two terms are tests of their own: `left > right`, a
wider dtype, and `frames ~ regex`, a frame of the traceback, `{frame}` from then on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ...dtypes import itemsize, torch_dtype_name
from ...finding import Finding, Place, Severity
from ...pages.sheets import Entry, Section, sections
from ...pages.sheets import Facts as Known
from .log import MAX_PASSAGE_LINES, Incident, read_incidents
from .recognition import find_half_dtypes, normalise_dtype, recognise_error
from .situation import Call, RecognisedError, failing_call, find_report_flags, read_situation


@dataclass(frozen=True, kw_only=True)
class Cause:
    """name: in a few words; score: higher is likelier; because: the evidence seen, empty when it is
    only the usual cause.
    """

    name: str
    score: float
    reason: str
    fix: str
    evidence: str = ""


_SHEET_FOLDER = Path(__file__).parent / "families"
# causes that several families take in, by name
_SHARED_CAUSES = {
    section.name: section.entries[1:]
    for section in sections(_SHEET_FOLDER / "shared.txt", ranks=r"[\d.]+", fields="why|fix|seen")
}
FAMILIES: dict[str, Section] = {}  # by operator
for _sheet in sorted(_SHEET_FOLDER.glob("*.txt")):
    if _sheet.name != "shared.txt":
        for _section in sections(_sheet, ranks=r"[\d.]+", fields="message|severity|why|fix|seen"):
            for _operator in _section.name.split("; "):
                assert _operator not in FAMILIES, _operator
                FAMILIES[_operator] = _section


_READINGS: dict[str, Callable[[str], Any]] = {
    " as dtype": normalise_dtype,
    " as dtypes": lambda text: ", ".join(
        normalise_dtype(name) for name in text.split(",") if name.strip()
    ),
    " as torch": torch_dtype_name,
    " as mixed": lambda text: text.replace("-true", "-mixed"),
    " without spaces": str.strip,
    " as list": lambda text: ", ".join(
        sorted(name.strip().removeprefix("torch.") for name in text.split(","))
    ),
    " as printed dtype": lambda text: next(
        (normalise_dtype(name) for name in re.findall(r"dtype=(torch\.\w+)", text)), ""
    ),
    " in lower case": str.lower,
    " in brief": lambda text: " ".join(text.split())[:160],
    " in 160": lambda text: text[:160],
    " without quotes": lambda text: text.replace("'", ""),
}


class Facts(Known):
    """What an incident showed, by name: a sheet's own words, dtypes by role, words of the text,
    flags of the situation, and the following.

    operator, text, half, torch_half, autocast  as in `Seen`; `autocast is on` is the flag
    where FLAG        the frame that proves a flag, in words
    word NAME         a word of the text, where a dtype's role has the same name
    NAME as dtype, NAME as list, and the other endings of `_READINGS`   a word, read so
    first of set, second of set   the dtypes of a set that the text prints
    package NAME      whether a frame lies in it
    call, in_place, product   the failing call; where it is a product in place; where it is a
                              product of two tensors
    user, inner, frame        the innermost frame of the user's code, of all, and the one that a
                              test found; its `place` and `line`
    """

    def __init__(self, error: RecognisedError) -> None:
        super().__init__()
        self.error = error
        self.frame: Any = None

    def get(self, name: str) -> Any:
        error = self.error
        for table in (self.made, error.dtypes, error.captures):
            if name in table:
                return table[name]
        for ending, reading in _READINGS.items():
            if name.endswith(ending):
                value = self.get(name.removesuffix(ending))
                return None if value is None else reading(value)
        return self._look_up(name)

    def _look_up(self, name: str) -> Any:
        """A fact by its kind, the first word of its name."""
        error, situation = self.error, self.error.situation
        kind, _, rest = name.partition(" ")
        match kind:
            case "where":
                return situation.describe_evidence(rest)
            case "word":
                return error.captures.get(rest)
            case "first" | "second" if rest and "set" in error.captures:
                return self._dtype_of_set(kind)
            case "package":
                return rest in situation.packages
            case "autocast" if rest:
                return "autocast" in situation
            case "operator" | "text" | "half" | "torch_half" | "autocast":
                return getattr(error, name)
            case "call" | "in_place" | "product":
                return self._failing_call(kind)
            case "user":
                return situation.user_frame
            case "inner":
                return situation.innermost
            case "frame":
                return self.frame
            case "place" if self.frame is not None:
                return self._describe_frame(self.frame.function)
            case "line" if self.frame is not None:
                return self._describe_frame(self.frame.code or self.frame.function)
        return name in situation or None

    def _dtype_of_set(self, position: str) -> str:
        """The first or second dtype of a set that the text prints."""
        names = [normalise_dtype(name) for name in self.error.captures["set"].split(",")]
        if position == "first":
            return names[0]
        return names[1] if len(names) > 1 else "another"

    def _failing_call(self, kind: str) -> Call | None:
        """The failing call; None where it is not of the kind that is asked for."""
        call = failing_call(self.error.situation)
        if call is None or kind == "call":
            return call
        fits = call.in_place if kind == "in_place" else len(call.tensors) == 2
        return call if call.is_product and fits else None

    def _describe_frame(self, code: str) -> str:
        return f"{code} at {self.frame.file}:{self.frame.line}"

    def holds_specially(self, term: str) -> bool | None:
        wider, operator_sign, narrower = term.partition(" > ")
        if operator_sign:
            try:
                return itemsize(str(self.get(wider))) > itemsize(str(self.get(narrower)))
            except ValueError:  # no dtype
                return False
        if term.startswith("frames ~ "):
            frame = self.error.situation.find_frame(term.removeprefix("frames ~ "))
            self.frame = frame or self.frame
            return frame is not None
        return None


def _collect_causes(
    entries: list[Entry], facts: Facts, score_offset: float = 0.0
) -> Iterator[Cause]:
    for entry in entries:
        if shared := re.fullmatch(r"\+ (.+?)(?: (-?\d+))?(?: if (.+))?", entry.title):
            yield from (
                _collect_causes(_SHARED_CAUSES[shared[1]], facts, float(shared[2] or 0))
                if facts.holds(shared[3])
                else ()
            )
        elif score := entry.rank(facts):
            reason, fix, evidence = (entry.first(name, facts) for name in ("why", "fix", "seen"))
            yield Cause(
                name=facts.say(entry.title),
                score=float(score) + score_offset,
                reason=reason,
                fix=fix,
                evidence=evidence,
            )


def diagnose_error(error: RecognisedError) -> tuple[str, Severity, list[Cause]]:
    """The message, the severity and the causes of what an incident showed, the likeliest first."""
    facts, (head, *entries) = Facts(error), FAMILIES[error.operator].entries
    head.make(facts)
    causes = sorted(_collect_causes(entries, facts), key=lambda c: -c.score)
    return (
        head.first("message", facts),
        Severity.parse(head.first("severity", facts) or "error"),
        causes,
    )


def codes() -> list[str]:
    return sorted({section.code for section in FAMILIES.values()})


def page(code: str) -> str | None:
    return next((section.as_page() for section in FAMILIES.values() if section.code == code), None)


# lines: a text as long as this at most is one report, and what it says in words belongs to its
# error
MAX_REPORT_LINES = 400
MAX_DISTINCT_ERRORS = 200  # different errors kept of one log
MAX_PLAIN_PASSAGES = 5000  # passages without an error that are remembered
_COMPLAINT = re.compile(
    r"(?i)\berror\b|\bexpected\b|\b(?:but )?got\b|\bfound\b|does not"
    r" (?:equal|match)|mismatch|!=|incompatible|inconsistent"
)
_NUMBER = re.compile(r"\d+")


def explain(lines: Iterable[str], *, source: str | None = None) -> list[Finding]:
    """One finding for each distinct dtype error; the last keeps its severity, earlier ones become
    warnings. Without a dtype error: one note, EX000.

    source  the log's file, for the places of errors without a traceback
    """
    lines = iter(lines)
    head = list(islice(lines, MAX_REPORT_LINES + 1))
    report = ""
    if len(head) <= MAX_REPORT_LINES:
        report = "".join(line if line.endswith("\n") else line + "\n" for line in head)
    # so short a text speaks of one error: the code that it quotes is the error's
    quoted_text = report if len(head) <= MAX_PASSAGE_LINES else ""
    collector = _ErrorCollector(source, find_report_flags(report), quoted_text)
    for incident in read_incidents(chain(head, lines)):
        collector.add(incident)
    return collector.findings()


class _ErrorCollector:
    """The distinct dtype errors of a log, in the order of their last occurrences."""

    def __init__(self, source: str | None, report_flags: frozenset[str], quoted_text: str) -> None:
        self._source = source
        self._report_flags = report_flags
        self._quoted_text = quoted_text
        # code, message and place -> the finding, and how often it occurred
        self._errors: dict[tuple[str, str, str], tuple[Finding, int]] = {}
        # passages that are no error, without their numbers: a log repeats the same line ten
        # thousand times
        self._plain_passages: set[str] = set()
        self._other_error: Incident | None = None  # the last that is no dtype error
        self._last_exception = ""

    def add(self, incident: Incident) -> None:
        previous = self._last_exception
        if incident.exception:
            self._last_exception = incident.text.partition("\n")[0]
        if incident.chained and self._last_exception == previous:
            return  # raised again where it was awaited: its first traceback was explained already
        passage_key = ""
        if incident.exception is None and not incident.frames:
            passage_key = _NUMBER.sub("#", incident.text)
        if passage_key in self._plain_passages:
            return
        error = self._recognise(incident)
        if error is not None:
            self._add_error(error, incident)
            return
        if passage_key and len(self._plain_passages) < MAX_PLAIN_PASSAGES:
            self._plain_passages.add(passage_key)
        if incident.exception or "Error" in incident.text or "error" in incident.text:
            self._other_error = incident

    def _recognise(self, incident: Incident) -> RecognisedError | None:
        situation = read_situation(
            incident.frames, self._report_flags, self._quoted_text or incident.text
        )
        error = recognise_error(_error_text(incident), situation)
        if error is None or error.operator != "unknown wording":
            return error
        is_prose = incident.exception is None and "Error" not in incident.text
        complains = len(incident.text) <= 600 and _COMPLAINT.search(incident.text) is not None
        # prose about dtypes counts only where it is short and complains
        return None if is_prose and not complains else error

    def _add_error(self, error: RecognisedError, incident: Incident) -> None:
        """A repeated error takes its last position and, without a traceback, keeps its first line."""
        finding = _build_finding(error, incident, self._source)
        place = str(finding.place) if incident.frames else ""
        key = (finding.code, finding.message, place)
        first_finding, count = self._errors.pop(key, (finding, 0))
        if not incident.frames:
            finding = first_finding
        if len(self._errors) >= MAX_DISTINCT_ERRORS:
            self._errors.pop(next(iter(self._errors)))
        self._errors[key] = (finding, count + 1)

    def findings(self) -> list[Finding]:
        """The last error first."""
        if not self._errors:
            return [_no_dtype_error_finding(self._other_error, self._source)]
        traced = {key[:2] for key in self._errors if key[2]}
        # a logger's line beside its traceback is left out
        ordered = [entry for key, entry in self._errors.items() if key[2] or key[:2] not in traced]
        findings = []
        for position, (finding, count) in enumerate(ordered, 1):
            details = finding.details
            severity = finding.severity
            if count > 1:
                details += (("repeated", f"{count} times (ranks, or retries)"),)
            if position < len(ordered):
                order = f"{position} of {len(ordered)} in the text; the last one is what stopped it"
                details += (("order", order),)
                severity = min(severity, Severity.WARNING)
            findings.append(replace(finding, details=details, severity=severity))
        return findings[::-1]


def _error_text(incident: Incident) -> str:
    """The exception's text; for an assertion without a message, the asserted expression."""
    code = incident.frames[-1].code if incident.frames else ""
    if incident.text == "AssertionError" and code.startswith("assert "):
        return f"{incident.text}: {code}"
    return incident.text


_CONTEXT = (
    "callback",
    "generate",
    "evaluation",
    "backward",
    "custom backward",
    "recompute",
    "optimizer",
    "compile",
)


def _build_finding(error: RecognisedError, incident: Incident, source: str | None) -> Finding:
    message, severity, ranked = diagnose_error(error)
    if "autocast" in error.situation:  # it is on already: a remedy that switches it on is none
        ranked = sorted(ranked, key=lambda c: "torch.autocast(" in c.fix.splitlines()[0])
    top = ranked[0]
    alternatives = ranked[1:]
    fix = (
        _AUTOCAST_ADVICE.sub("", top.fix).strip() if "autocast" in error.situation else ""
    ) or top.fix
    situation = error.situation
    frame = situation.user_frame or situation.caller_frame or situation.innermost
    details: list[tuple[str, str]] = [("error", _recognised_line(incident.text.strip(), error))]
    if error.dtypes:
        details.append(
            ("dtypes", ", ".join(f"{role} {dtype}" for role, dtype in error.dtypes.items()))
        )
    if situation.innermost and frame is not situation.innermost:
        details.append(
            (
                "raised in",
                (
                    f"{situation.innermost.function} at"
                    f" {situation.innermost.file}:{situation.innermost.line} (library)"
                ),
            )
        )
    if situation.frames:
        context = [flag for flag in _CONTEXT if flag in situation]
        if "trainer" in situation:
            trainer_note = "inside a trainer"
        else:
            trainer_note = "no trainer in the traceback"
        details.append(("situation", ", ".join([*context, trainer_note])))
    details.append(("sure", describe_confidence(ranked)))
    if alternatives:
        lines = [
            f"{c.name}: {c.fix.splitlines()[0]}" + (f" (seen: {c.evidence})" if c.evidence else "")
            for c in alternatives[:3]
        ]
        details.append(("or", "\n".join(lines)))
    if frame:
        location = Place(file=frame.file, line=frame.line, symbol=frame.function or None)
    else:
        location = Place(file=source, line=_log_line(incident, error) if source else None)
    return Finding(
        code=FAMILIES[error.operator].code,
        severity=severity,
        message=message,
        place=location,
        cause=f"{top.name}: {'' if top.evidence else 'perhaps '}{top.reason}",
        fix=fix,
        details=tuple(details),
    )


def _recognised_line(text: str, error: RecognisedError) -> str:
    """The line of a message that recognition rests on."""
    lines = text.splitlines()
    if len(lines) > 1:
        recognised_lines = [line for line in lines if recognise_error(line, error.situation)]
    else:
        recognised_lines = []
    return (recognised_lines or lines)[-1 if recognised_lines else 0].strip()[:300]


def _log_line(incident: Incident, error: RecognisedError) -> int:
    """The log's line that a passage was recognised by; a traceback's first line."""
    if incident.exception is None:
        for offset, line in enumerate(incident.text.splitlines()):
            if recognise_error(line, error.situation):
                return incident.line + offset
    return incident.line


def _no_dtype_error_finding(incident: Incident | None, source: str | None) -> Finding:
    cause = "nothing in it speaks of a disagreement between dtypes"
    if incident is None:
        message = "no error found in the text"
        location = Place(file=source)
    else:
        situation = read_situation(incident.frames)
        frame = situation.user_frame or situation.innermost
        first_line = _error_text(incident).strip().splitlines()[0][:200]
        dtype_names = find_half_dtypes(incident.text)
        if dtype_names:
            message = f"no dtype error that isotype knows: {first_line}"
        else:
            message = f"not a dtype error: {first_line}"
        if dtype_names:
            cause = (
                f"it names {', '.join(dtype_names)}, and no disagreement or refusal that isotype knows;"
                " another reason may be named beside it"
            )
        if frame:
            location = Place(file=frame.file, line=frame.line, symbol=frame.function or None)
        else:
            location = Place(file=source)
    return Finding(
        code="EX000",
        severity=Severity.NOTE,
        message=message,
        place=location,
        cause=cause,
        fix="if you think it is one: give the whole traceback, from its first line",
    )


CLOSE_SCORE = 2.0  # a cause that scores less than this below the first is as good a guess
_AUTOCAST_ADVICE = re.compile(
    r"(?:, |; )?(?:or )?run[^,;\n(]*under torch\.autocast\([^)]*\)(?:, or |; or |; )?"
)


def describe_confidence(ranked: Sequence[Cause]) -> str:
    """`likely`, `open` or `a guess`, with the reason."""
    top = ranked[0]
    close_rivals = [c for c in ranked[1:] if ranked[0].score - c.score < CLOSE_SCORE]
    if not top.evidence:
        return "a guess: nothing in the text decides, and this cause is the usual one"
    if close_rivals:
        return f"open between {1 + len(close_rivals)} causes: {', '.join(c.name for c in [top, *close_rivals])}"
    return f"likely: {top.evidence}" + (
        "" if len(ranked) == 1 else ", and nothing as telling speaks for another cause"
    )
