"""Explains the errors of a text: recognised, placed in their situation, causes ranked, the last error first in rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice

from ...finding import Finding, Place, Severity
from .log import LONGEST_PASSAGE, Incident, incidents
from .recognise import half_words, recognise
from .sheets import FAMILIES, Cause, Explained
from .situation import Seen, Situation, read, said_in

REPORT = 400  # lines: a text as long as this at most is one report, and what it says in words belongs to its error
MOST_DISTINCT = 200  # different errors kept of one log
MOST_PLAIN = 5000  # passages without an error that are remembered
_COMPLAINS = re.compile(
    r"(?i)\berror\b|\bexpected\b|\b(?:but )?got\b|\bfound\b|does not (?:equal|match)|mismatch|!=|incompatible|inconsistent"
)
_NUMBER = re.compile(r"\d+")


def explain(lines: Iterable[str], *, source: str | None = None) -> list[Finding]:
    """One finding for each distinct dtype error; the last keeps its severity, earlier ones become warnings. None found: one note, EX000.

    source  the log's file, for the places of errors without a traceback
    """
    found: dict[tuple[str, str, str], tuple[Finding, int]] = {}
    last_incident: Incident | None = None
    plain: set[str] = set()  # passages that are no error, without their numbers: a log repeats the same line ten thousand times
    raised = ""
    lines = iter(lines)
    head = list(islice(lines, REPORT + 1))
    report = "".join(line if line.endswith("\n") else line + "\n" for line in head) if len(head) <= REPORT else ""
    said = said_in(report)
    short = report if len(head) <= LONGEST_PASSAGE else ""  # so short a text speaks of one error: the code that it quotes is the error's
    for incident in incidents(chain(head, lines)):
        before, raised = raised, incident.text.partition("\n")[0] if incident.exception else raised
        if incident.chained and raised == before:
            continue  # raised again where it was awaited: its first traceback was explained already
        loose = _NUMBER.sub("#", incident.text) if incident.exception is None and not incident.frames else ""
        if loose in plain:
            continue
        seen = recognise(_said(incident), read(incident.frames, said, short or incident.text))
        if (
            seen is not None
            and seen.operator == "unknown wording"
            and incident.exception is None
            and "Error" not in incident.text
            and (len(incident.text) > 600 or not _COMPLAINS.search(incident.text))
        ):
            seen = None  # loose prose about dtypes is no error
        if seen is None:
            if loose and len(plain) < MOST_PLAIN:
                plain.add(loose)
            if incident.exception or _speaks_of_an_error(incident.text):
                last_incident = incident
            continue
        finding = _finding(seen, incident, source)
        key = (finding.code, finding.message, str(finding.place) if incident.frames else "")
        first, count = found.pop(key, (finding, 0))  # a repeated error takes its last position
        finding = finding if incident.frames else first  # and, without a traceback, keeps its first line
        if len(found) >= MOST_DISTINCT:
            found.pop(next(iter(found)))
        found[key] = (finding, count + 1)
    if not found:
        told = _symptom(short, read((), said)) if last_incident is None or last_incident.exception is None else None
        return [_finding(told, Incident(short, [], 1), source) if told else _not_dtype(last_incident, source)]
    traced = {key[:2] for key in found if key[2]}
    ordered = [entry for key, entry in found.items() if key[2] or key[:2] not in traced]  # a logger's line beside its traceback
    findings = []
    for position, (finding, count) in enumerate(ordered, 1):
        details = finding.details
        if count > 1:
            details += (("repeated", f"{count} times (ranks, or retries)"),)
        if position < len(ordered):
            details += (("order", f"{position} of {len(ordered)} in the text; the last one is what stopped it"),)
            finding = replace(finding, severity=min(finding.severity, Severity.WARNING))
        findings.append(replace(finding, details=details))
    return findings[::-1]


def _symptom(text: str, situation: Situation) -> Seen | None:
    """A report without an error that names half precision and describes what its family knows; None where no cause fits."""
    if not half_words(text) and not re.search(r"autocast\(", text):
        return None
    seen = Seen(text=text, operator="symptom", situation=situation)
    return seen if any(cause.score > 1 for cause in FAMILIES["symptom"][1](seen).causes) else None


def _said(incident: Incident) -> str:
    """The exception's text; for an assertion without a message, the asserted expression."""
    code = incident.frames[-1].code if incident.frames else ""
    return f"{incident.text}: {code}" if incident.text == "AssertionError" and code.startswith("assert ") else incident.text


def _speaks_of_an_error(text: str) -> bool:
    return "Error" in text or "error" in text


def _finding(seen: Seen, incident: Incident, source: str | None) -> Finding:
    code, family = FAMILIES[seen.operator]
    explained: Explained = family(seen)
    ranked = explained.ranked()
    if "autocast" in seen.situation:  # it is on already: a remedy that switches it on is none
        ranked = sorted(ranked, key=lambda c: "torch.autocast(" in c.fix.splitlines()[0])
    top, others = ranked[0], ranked[1:]
    situation = seen.situation
    frame = situation.users or situation.callers or situation.innermost
    details: list[tuple[str, str]] = [
        (
            "text" if seen.operator == "symptom" else "error",
            incident.text.strip()[:300] if len(incident.text.strip().splitlines()) < 2 else _telling_line(incident.text, seen),
        )
    ]
    if seen.dtypes:
        details.append(("dtypes", ", ".join(f"{role} {dtype}" for role, dtype in seen.dtypes.items())))
    if situation.innermost and frame is not situation.innermost:
        details.append(("raised in", f"{situation.innermost.function} at {situation.innermost.file}:{situation.innermost.line} (library)"))
    context = [
        flag
        for flag in ("callback", "generate", "evaluation", "backward", "custom backward", "recompute", "optimizer", "compile")
        if flag in situation
    ]
    if situation.frames:
        inside = "inside a trainer" if "trainer" in situation else "no trainer in the traceback"
        details.append(("situation", ", ".join([*context, inside])))
    details.append(("sure", sureness(ranked)))
    if others:
        lines = [f"{c.name}: {c.fix.splitlines()[0]}" + (f" (seen: {c.because})" if c.because else "") for c in others[:3]]
        details.append(("or", "\n".join(lines)))
    place = (
        Place(file=frame.file, line=frame.line, symbol=frame.function or None)
        if frame
        else Place(file=source, line=_line_of(incident, seen) if source else None)
    )
    return Finding(
        code=code,
        severity=explained.severity,
        message=explained.message,
        place=place,
        cause=f"{top.name}: {'' if top.because else 'perhaps '}{top.why}",
        fix=without_autocast(top.fix) if "autocast" in seen.situation else top.fix,
        details=tuple(details),
    )


def _telling_line(text: str, seen: Seen) -> str:
    """The line of a long message that recognition rests on."""
    names = [line for line in text.splitlines() if recognise(line, seen.situation)]
    return (names[-1] if names else text.splitlines()[0]).strip()[:300]


def _line_of(incident: Incident, seen: Seen) -> int:
    """The log's line that a passage was recognised by; a traceback's first line."""
    if incident.exception is None:
        for offset, line in enumerate(incident.text.splitlines()):
            if recognise(line, seen.situation):
                return incident.line + offset
    return incident.line


def _not_dtype(incident: Incident | None, source: str | None) -> Finding:
    cause = "nothing in it speaks of a disagreement between dtypes"
    if incident is None:
        what, place = "no error found in the text", Place(file=source)
    else:
        situation = read(incident.frames)
        frame = situation.users or situation.innermost
        first = _said(incident).strip().splitlines()[0][:200]
        named = half_words(incident.text)
        what = f"no dtype error that isotype knows: {first}" if named else f"not a dtype error: {first}"
        if named:
            cause = f"it names {', '.join(named)}, and no disagreement or refusal that isotype knows; another reason may be named beside it"
        place = Place(file=frame.file, line=frame.line, symbol=frame.function or None) if frame else Place(file=source)
    return Finding(
        code="EX000",
        severity=Severity.NOTE,
        message=what,
        place=place,
        cause=cause,
        fix="if you think it is one: give the whole traceback, from its first line",
    )


NEAR = 2.0  # a cause that scores less than this below the first is as good a guess
_SWITCHES_ON = re.compile(r"(?:, |; )?(?:or )?run[^,;\n(]*under torch\.autocast\([^)]*\)(?:, or |; or |; )?")


def without_autocast(fix: str) -> str:
    """The fix without the way that switches autocast on, where it is on already; as it is where that is the only way."""
    return _SWITCHES_ON.sub("", fix).strip() or fix


def sureness(ranked: Sequence[Cause]) -> str:
    """`likely`, `open` or `a guess`, with the reason."""
    top, near = ranked[0], [c for c in ranked[1:] if ranked[0].score - c.score < NEAR]
    if not top.because:
        return "a guess: nothing in the text decides, and this cause is the usual one"
    if near:
        return f"open between {1 + len(near)} causes: {', '.join(c.name for c in [top, *near])}"
    return f"likely: {top.because}" + ("" if len(ranked) == 1 else ", and nothing as telling speaks for another cause")
