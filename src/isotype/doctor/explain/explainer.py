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

from ...dtypes import itemsize, torch_word
from ...finding import Finding, Place, Severity
from ...pages.sheets import Entry, Section, sections
from ...pages.sheets import Facts as Known
from .log import LONGEST_PASSAGE, Incident, incidents
from .recognition import dtype_word, half_words, recognise
from .situation import Seen, failing_call, read, said_in


@dataclass(frozen=True, kw_only=True)
class Cause:
    """name: in a few words; score: higher is likelier; because: the evidence seen, empty when it is
    only the usual cause.
    """

    name: str
    score: float
    why: str
    fix: str
    because: str = ""


_SHEETS = Path(__file__).parent / "families"
# causes that several families take in, by name
_SHARED = {
    section.name: section.entries[1:]
    for section in sections(_SHEETS / "shared.txt", ranks=r"[\d.]+", fields="why|fix|seen")
}
FAMILIES: dict[str, Section] = {}  # by operator
for _sheet in sorted(_SHEETS.glob("*.txt")):
    if _sheet.name != "shared.txt":
        for _section in sections(_sheet, ranks=r"[\d.]+", fields="message|severity|why|fix|seen"):
            for _operator in _section.name.split("; "):
                assert _operator not in FAMILIES, _operator
                FAMILIES[_operator] = _section


_READINGS: dict[str, Callable[[str], Any]] = {
    " as dtype": dtype_word,
    " as dtypes": lambda words: ", ".join(
        dtype_word(word) for word in words.split(",") if word.strip()
    ),
    " as torch": torch_word,
    " as mixed": lambda word: word.replace("-true", "-mixed"),
    " without spaces": str.strip,
    " as list": lambda words: ", ".join(
        sorted(word.strip().removeprefix("torch.") for word in words.split(","))
    ),
    " as printed dtype": lambda text: next(
        (dtype_word(word) for word in re.findall(r"dtype=(torch\.\w+)", text)), ""
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

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.frame: Any = None

    def get(self, name: str) -> Any:
        seen, situation = self.seen, self.seen.situation
        for known in (self.made, seen.dtypes, seen.words):
            if name in known:
                return known[name]
        for ending, reading in _READINGS.items():
            if name.endswith(ending):
                word = self.get(name.removesuffix(ending))
                return None if word is None else reading(word)
        kind, _, rest = name.partition(" ")
        match kind:
            case "where":
                return situation.where(rest)
            case "word":
                return seen.words.get(rest)
            case "first" | "second" if rest and "set" in seen.words:
                words = [dtype_word(word) for word in seen.words["set"].split(",")]
                if kind == "first":
                    return words[0]
                if len(words) > 1:
                    return words[1]
                return "another"
            case "package":
                return rest in situation.packages
            case "autocast" if rest:
                return "autocast" in situation
            case "operator" | "text" | "half" | "torch_half" | "autocast":
                return getattr(seen, name)
            case "call" | "in_place" | "product":
                call = failing_call(situation)
                fits = call and (
                    kind == "call"
                    or (
                        call.is_product
                        and (call.in_place if kind == "in_place" else len(call.tensors) == 2)
                    )
                )
                return call if fits else None
            case "user" | "inner" | "frame":
                return {"user": situation.users, "inner": situation.innermost, "frame": self.frame}[
                    kind
                ]
            case "place" | "line" if (f := self.frame) is not None:
                return (
                    f"{f.function if kind == 'place' else f.code or f.function} at"
                    f" {f.file}:{f.line}"
                )
        return name in situation or None

    def holds_specially(self, term: str) -> bool | None:
        left, found, right = term.partition(" > ")
        if found:
            try:
                return itemsize(str(self.get(left))) > itemsize(str(self.get(right)))
            except ValueError:  # no dtype
                return False
        if term.startswith("frames ~ "):
            frame = self.seen.situation.mentions(term.removeprefix("frames ~ "))
            self.frame = frame or self.frame
            return frame is not None
        return None


def _causes(entries: list[Entry], facts: Facts, moved: float = 0.0) -> Iterator[Cause]:
    for entry in entries:
        if shared := re.fullmatch(r"\+ (.+?)(?: (-?\d+))?(?: if (.+))?", entry.title):
            yield from (
                _causes(_SHARED[shared[1]], facts, float(shared[2] or 0))
                if facts.holds(shared[3])
                else ()
            )
        elif score := entry.rank(facts):
            why, fix, because = (entry.first(name, facts) for name in ("why", "fix", "seen"))
            yield Cause(
                name=facts.say(entry.title),
                score=float(score) + moved,
                why=why,
                fix=fix,
                because=because,
            )


def explained(seen: Seen) -> tuple[str, Severity, list[Cause]]:
    """The message, the severity and the causes of what an incident showed, the likeliest first."""
    facts, (head, *entries) = Facts(seen), FAMILIES[seen.operator].entries
    head.make(facts)
    causes = sorted(_causes(entries, facts), key=lambda c: -c.score)
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
REPORT = 400
MOST_DISTINCT = 200  # different errors kept of one log
MOST_PLAIN = 5000  # passages without an error that are remembered
_COMPLAINS = re.compile(
    r"(?i)\berror\b|\bexpected\b|\b(?:but )?got\b|\bfound\b|does not"
    r" (?:equal|match)|mismatch|!=|incompatible|inconsistent"
)
_NUMBER = re.compile(r"\d+")


def explain(lines: Iterable[str], *, source: str | None = None) -> list[Finding]:
    """One finding for each distinct dtype error; the last keeps its severity, earlier ones become
    warnings. None found: one note, EX000.

    source  the log's file, for the places of errors without a traceback
    """
    found: dict[tuple[str, str, str], tuple[Finding, int]] = {}
    last_incident: Incident | None = None
    # passages that are no error, without their numbers: a log repeats the same line ten thousand
    # times
    plain: set[str] = set()
    raised = ""
    lines = iter(lines)
    head = list(islice(lines, REPORT + 1))
    if len(head) <= REPORT:
        report = "".join(line if line.endswith("\n") else line + "\n" for line in head)
    else:
        report = ""
    said = said_in(report)
    # so short a text speaks of one error: the code that it quotes is the error's
    short = report if len(head) <= LONGEST_PASSAGE else ""
    for incident in incidents(chain(head, lines)):
        before = raised
        raised = incident.text.partition("\n")[0] if incident.exception else raised
        if incident.chained and raised == before:
            continue  # raised again where it was awaited: its first traceback was explained already
        if incident.exception is None and not incident.frames:
            loose = _NUMBER.sub("#", incident.text)
        else:
            loose = ""
        if loose in plain:
            continue
        seen = recognise(_said(incident), read(incident.frames, said, short or incident.text))
        prose = incident.exception is None and "Error" not in incident.text
        if prose and seen is not None and seen.operator == "unknown wording":
            # about dtypes, and no error
            if len(incident.text) <= 600 and _COMPLAINS.search(incident.text):
                seen = seen
            else:
                seen = None
        if seen is None:
            if loose and len(plain) < MOST_PLAIN:
                plain.add(loose)
            if incident.exception or "Error" in incident.text or "error" in incident.text:
                last_incident = incident
            continue
        finding = _finding(seen, incident, source)
        key = (finding.code, finding.message, str(finding.place) if incident.frames else "")
        first, count = found.pop(key, (finding, 0))  # a repeated error takes its last position
        # and, without a traceback, keeps its first line
        finding = finding if incident.frames else first
        if len(found) >= MOST_DISTINCT:
            found.pop(next(iter(found)))
        found[key] = (finding, count + 1)
    if not found:
        return [_not_dtype(last_incident, source)]
    traced = {key[:2] for key in found if key[2]}
    # a logger's line beside its traceback
    ordered = [entry for key, entry in found.items() if key[2] or key[:2] not in traced]
    findings = []
    for position, (finding, count) in enumerate(ordered, 1):
        details = finding.details
        if count > 1:
            details += (("repeated", f"{count} times (ranks, or retries)"),)
        if position < len(ordered):
            details += (
                (
                    "order",
                    f"{position} of {len(ordered)} in the text; the last one is what stopped it",
                ),
            )
            finding = replace(finding, severity=min(finding.severity, Severity.WARNING))
        findings.append(replace(finding, details=details))
    return findings[::-1]


def _said(incident: Incident) -> str:
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


def _finding(seen: Seen, incident: Incident, source: str | None) -> Finding:
    message, severity, ranked = explained(seen)
    if "autocast" in seen.situation:  # it is on already: a remedy that switches it on is none
        ranked = sorted(ranked, key=lambda c: "torch.autocast(" in c.fix.splitlines()[0])
    top = ranked[0]
    others = ranked[1:]
    fix = (_SWITCHES_ON.sub("", top.fix).strip() if "autocast" in seen.situation else "") or top.fix
    situation = seen.situation
    frame = situation.users or situation.callers or situation.innermost
    details: list[tuple[str, str]] = [("error", _telling_line(incident.text.strip(), seen))]
    if seen.dtypes:
        details.append(
            ("dtypes", ", ".join(f"{role} {dtype}" for role, dtype in seen.dtypes.items()))
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
            inside = "inside a trainer"
        else:
            inside = "no trainer in the traceback"
        details.append(("situation", ", ".join([*context, inside])))
    details.append(("sure", sureness(ranked)))
    if others:
        lines = [
            f"{c.name}: {c.fix.splitlines()[0]}" + (f" (seen: {c.because})" if c.because else "")
            for c in others[:3]
        ]
        details.append(("or", "\n".join(lines)))
    if frame:
        place = Place(file=frame.file, line=frame.line, symbol=frame.function or None)
    else:
        place = Place(file=source, line=_line_of(incident, seen) if source else None)
    return Finding(
        code=FAMILIES[seen.operator].code,
        severity=severity,
        message=message,
        place=place,
        cause=f"{top.name}: {'' if top.because else 'perhaps '}{top.why}",
        fix=fix,
        details=tuple(details),
    )


def _telling_line(text: str, seen: Seen) -> str:
    """The line of a message that recognition rests on."""
    lines = text.splitlines()
    if len(lines) > 1:
        names = [line for line in lines if recognise(line, seen.situation)]
    else:
        names = []
    return (names or lines)[-1 if names else 0].strip()[:300]


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
        what = "no error found in the text"
        place = Place(file=source)
    else:
        situation = read(incident.frames)
        frame = situation.users or situation.innermost
        first = _said(incident).strip().splitlines()[0][:200]
        named = half_words(incident.text)
        if named:
            what = f"no dtype error that isotype knows: {first}"
        else:
            what = f"not a dtype error: {first}"
        if named:
            cause = (
                f"it names {', '.join(named)}, and no disagreement or refusal that isotype knows;"
                " another reason may be named beside it"
            )
        if frame:
            place = Place(file=frame.file, line=frame.line, symbol=frame.function or None)
        else:
            place = Place(file=source)
    return Finding(
        code="EX000",
        severity=Severity.NOTE,
        message=what,
        place=place,
        cause=cause,
        fix="if you think it is one: give the whole traceback, from its first line",
    )


NEAR = 2.0  # a cause that scores less than this below the first is as good a guess
_SWITCHES_ON = re.compile(
    r"(?:, |; )?(?:or )?run[^,;\n(]*under torch\.autocast\([^)]*\)(?:, or |; or |; )?"
)


def sureness(ranked: Sequence[Cause]) -> str:
    """`likely`, `open` or `a guess`, with the reason."""
    top = ranked[0]
    near = [c for c in ranked[1:] if ranked[0].score - c.score < NEAR]
    if not top.because:
        return "a guess: nothing in the text decides, and this cause is the usual one"
    if near:
        return f"open between {1 + len(near)} causes: {', '.join(c.name for c in [top, *near])}"
    return f"likely: {top.because}" + (
        "" if len(ranked) == 1 else ", and nothing as telling speaks for another cause"
    )
