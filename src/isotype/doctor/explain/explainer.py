"""Explains the errors in a text. For each error, the module recognises the kind of error, reads
from the traceback what the program was doing, and ranks the possible causes. The last error is
reported first.

Each family of errors has a text file (`families/*.txt`), which `pages.sheets` parses. A file is
divided into sections, and a section into entries. Each entry has a condition. The header of a
section lists the operators that raise the error, separated by `;`. The first entry of a section
contains the `message`. Each other entry describes a possible cause. The rank of the entry is the
score of the cause. The line `+ outside autocast -2 if TEST` inserts the causes called `outside
autocast` from `shared.txt` if TEST holds, and lowers their scores by 2. The fields of a cause are:

    cause     why it causes the error
    fix       what to change
    proof     a part of the text that fits no other cause. Only a cause with a proof is decided
    evidence  a part of the text that fits this cause, and others too
    sign      what a reader can look at to confirm this cause, if the text does not prove it

There are two kinds of proof. A message may be its own cause: it names an operation, a setting or a
device, and the one dtype that this refuses. A text may also show what made the dtype: a printed
setting, a format in which values are only stored, a training step that ran under autocast before
`generate()` failed. A message that two operands differ in dtype proves nothing about what made them
differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from ...finding import Finding, Place, Severity
from ...pages.sheet_check import check_section
from ...pages.sheets import Entry, Section, SheetError, read_sections
from .facts import ErrorFacts
from .log import MAX_PASSAGE_LINES, Incident, read_incidents
from .recognition import OPERATORS, find_half_dtypes, recognise_error
from .situation import RecognisedError, find_log_flags, find_report_flags, read_situation


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A possible cause of an error.

    name         a short name
    score        a higher score means a likelier cause
    reason, fix  why this causes the error, and what to change
    proof        the part of the text that fits this cause only; empty if there is none
    evidence     the part of the text that supports the cause; empty if it is only the usual cause
    sign         what confirms the cause if the text does not prove it
    """

    name: str
    score: float
    reason: str
    fix: str
    proof: str = ""
    evidence: str = ""
    sign: str = ""


_SHEET_FOLDER = Path(__file__).parent / "families"
_CAUSE_FIELDS = "cause|fix|proof|evidence|sign"
_SHARED_SHEET = "shared.txt"


def load_shared_causes(path: Path) -> dict[str, list[Entry]]:
    """Returns the causes that several families of errors share, by their names in `shared.txt`.
    Raises SheetError.
    """
    causes = {}
    for section in read_sections(path, rank_pattern=r"[\d.]+", field_pattern=_CAUSE_FIELDS):
        check_section(section, ErrorFacts)
        causes[section.header] = section.entries[1:]
    return causes


SHARED_CAUSES = load_shared_causes(_SHEET_FOLDER / _SHARED_SHEET)


def load_families(path: Path, shared: Collection[str]) -> dict[str, Section]:
    """Reads a file of rules. Returns a dict from each operator to the section that explains the
    operator's errors.

    shared  the names of the sections in `shared.txt`
    Raises  SheetError
    """
    families: dict[str, Section] = {}
    for section in read_sections(
        path, rank_pattern=r"[\d.]+", field_pattern=f"message|severity|{_CAUSE_FIELDS}"
    ):
        check_section(section, ErrorFacts, shared=shared)
        for operator in section.header.split("; "):
            if operator not in OPERATORS:
                raise SheetError(path.name, section.line, f"unknown operator {operator!r}")
            families[operator] = section
    return families


FAMILIES: dict[str, Section] = {}  # by operator
for _path in sorted(_SHEET_FOLDER.glob("*.txt")):
    if _path.name != _SHARED_SHEET:
        FAMILIES |= load_families(_path, SHARED_CAUSES)


def _collect_causes(
    entries: list[Entry], facts: ErrorFacts, score_offset: float = 0.0
) -> Iterator[Cause]:
    for entry in entries:
        if entry.is_include:
            if facts.holds(entry.test):
                yield from _collect_causes(SHARED_CAUSES[entry.title], facts, entry.offset)
        elif score := entry.severity_or_score(facts):
            yield Cause(
                reason=entry.text("cause", facts),
                fix=entry.text("fix", facts),
                proof=entry.text("proof", facts),
                evidence=entry.text("evidence", facts),
                sign=entry.text("sign", facts),
                name=facts.format(entry.title),
                score=float(score) + score_offset,
            )


def diagnose_error(error: RecognisedError) -> tuple[str, Severity, list[Cause]]:
    """Returns the message, the severity and the causes of an error. A cause that the text proves
    comes first, then the likeliest.
    """
    facts = ErrorFacts(error)
    section = FAMILIES[error.operator]
    section.define_variables(facts)
    head, *entries = section.entries
    causes = sorted(_collect_causes(entries, facts), key=lambda c: (not c.proof, -c.score))
    return (
        head.text("message", facts),
        Severity.parse(head.text("severity", facts) or "error"),
        causes,
    )


# A text of at most this many lines counts as one report. Words in it, such as "under autocast",
# describe its error.
MAX_REPORT_LINES = 400
MAX_DISTINCT_ERRORS = 200  # distinct errors kept per log
MAX_PLAIN_PASSAGES = 5000  # passages without an error that are remembered
_MISMATCH_PHRASE = re.compile(
    r"(?i)\berror\b|\bexpected\b|\b(?:but )?got\b|\bfound\b|does not"
    r" (?:equal|match)|mismatch|!=|incompatible|inconsistent"
)
_NUMBER = re.compile(r"\d+")


def explain(lines: Iterable[str], *, source: str | None = None) -> list[Finding]:
    """Returns one finding for each distinct dtype error. The last error keeps its severity, and all
    earlier errors become warnings. If the text contains no dtype error, the result is a single
    finding, EX000, of severity note.

    source  the path of the log, which is reported as the location of errors that have no traceback
    """
    lines = iter(lines)
    head = list(islice(lines, MAX_REPORT_LINES + 1))
    report = ""
    if len(head) <= MAX_REPORT_LINES:
        report = "".join(line if line.endswith("\n") else line + "\n" for line in head)
    # A text this short is about one error, so the code that it quotes is the code of the error.
    quoted_text = report if len(head) <= MAX_PASSAGE_LINES else ""
    log_flags: set[str] = set()
    for line in head:
        log_flags.update(find_log_flags(line))
    collector = _ErrorCollector(source, find_report_flags(report), quoted_text, log_flags)
    for incident in read_incidents(chain(head, _collect_log_flags(lines, log_flags))):
        collector.add(incident)
    return collector.findings()


def _collect_log_flags(lines: Iterable[str], flags: set[str]) -> Iterator[str]:
    """Yields the lines unchanged. If the words of a flag occur in a line, the flag is added to
    `flags`.
    """
    for line in lines:
        flags.update(find_log_flags(line))
        yield line


class _ErrorCollector:
    """Collects the distinct dtype errors of a log, in the order of their last occurrences.

    log_flags  the flags that occurred in the lines that were read so far
    """

    def __init__(
        self,
        source: str | None,
        report_flags: frozenset[str],
        quoted_text: str,
        log_flags: set[str],
    ) -> None:
        self._source = source
        self._report_flags = report_flags
        self._log_flags = log_flags
        self._quoted_text = quoted_text
        # (code, message, place) -> the finding and its number of occurrences
        self._errors: dict[tuple[str, str, str], tuple[Finding, int]] = {}
        # passages without an error, with their digits masked, because a log may repeat the same
        # line ten thousand times
        self._plain_passages: set[str] = set()
        self._other_error: Incident | None = None  # the last error that is no dtype error
        self._last_exception = ""

    def add(self, incident: Incident) -> None:
        previous = self._last_exception
        if incident.exception:
            self._last_exception = incident.text.partition("\n")[0]
        if incident.is_chained and self._last_exception == previous:
            return  # the same exception was raised again; its first traceback is already explained
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
            incident.frames,
            self._report_flags | self._log_flags,
            self._quoted_text or incident.text,
        )
        error = recognise_error(_error_text(incident), situation)
        if error is None or error.operator != "unknown wording":
            return error
        is_prose = incident.exception is None and "Error" not in incident.text
        mentions_mismatch = (
            len(incident.text) <= 600 and _MISMATCH_PHRASE.search(incident.text) is not None
        )
        # text without an exception counts only if it is short and mentions a mismatch
        return None if is_prose and not mentions_mismatch else error

    def _add_error(self, error: RecognisedError, incident: Incident) -> None:
        """Adds an error. If the same error occurs again, its count is increased, and the error
        moves to the end of the list. An error without a traceback keeps the line of its first
        occurrence.
        """
        finding = _build_finding(error, incident, self._source)
        location = str(finding.place) if incident.frames else ""
        key = (finding.code, finding.message, location)
        first_finding, count = self._errors.pop(key, (finding, 0))
        if not incident.frames:
            finding = first_finding
        if len(self._errors) >= MAX_DISTINCT_ERRORS:
            self._errors.pop(next(iter(self._errors)))
        self._errors[key] = (finding, count + 1)

    def findings(self) -> list[Finding]:
        """Returns one finding for each distinct error. The last error comes first."""
        if not self._errors:
            return [_no_dtype_error_finding(self._other_error, self._source)]
        errors_with_traceback = {key[:2] for key in self._errors if key[2]}
        # a logged line is left out if the same error also has a traceback
        ordered = [
            entry
            for key, entry in self._errors.items()
            if key[2] or key[:2] not in errors_with_traceback
        ]
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
    """Returns the text of the exception. If an assertion has no message, the expression that it
    asserts is added to the text.
    """
    code = incident.frames[-1].code if incident.frames else ""
    if incident.text == "AssertionError" and code.startswith("assert "):
        return f"{incident.text}: {code}"
    return incident.text


_SITUATION_FLAGS = (
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
    message, severity, causes = diagnose_error(error)
    if "autocast" in error.situation:  # autocast is on, so a fix that enables it is ranked last
        causes = sorted(
            causes, key=lambda c: (not c.proof, "torch.autocast(" in c.fix.splitlines()[0])
        )
    if causes[0].proof:
        causes = [cause for cause in causes if cause.proof]
    best_cause, *alternatives = causes[:MAX_LISTED_CAUSES]
    fix = best_cause.fix
    situation = error.situation
    if "autocast" in situation:
        fix = _AUTOCAST_ADVICE.sub("", best_cause.fix).strip() or best_cause.fix
    if "card without bf16" in situation:
        fix = _replace_bf16(fix)
        alternatives = [replace(cause, fix=_replace_bf16(cause.fix)) for cause in alternatives]
    code = FAMILIES[error.operator].code
    frame = situation.user_frame or situation.caller_frame or situation.innermost
    details: list[tuple[str, str]] = [("error", _recognised_line(incident.text.strip(), error))]
    if error.dtypes:
        details.append(
            ("dtypes", ", ".join(f"{role} {dtype}" for role, dtype in error.dtypes.items()))
        )
    if situation.innermost and frame is not situation.innermost:
        innermost_frame = situation.innermost
        raised_in = (
            f"{innermost_frame.function} at {innermost_frame.file}:{innermost_frame.line} (library)"
        )
        details.append(("raised in", raised_in))
    if situation.frames:
        context = [flag for flag in _SITUATION_FLAGS if flag in situation]
        if "trainer" in situation:
            trainer_note = "inside a trainer"
        else:
            trainer_note = "no trainer in the traceback"
        details.append(("situation", ", ".join([*context, trainer_note])))
    details.append(("sure", describe_confidence(causes, find_deciding_command(error, code))))
    if not best_cause.proof:
        if certain_fact := _describe_operands(error):
            details.append(("certain", certain_fact))
        if best_cause.sign:
            details.append(("sign", best_cause.sign))
    if alternatives:
        details.append(("or", "\n".join(map(_format_alternative, alternatives))))
    if frame:
        location = Place(file=frame.file, line=frame.line, symbol=frame.function or None)
    elif source:
        location = Place(file=source, line=_log_line(incident, error))
    else:
        location = Place()
    certainty_prefix = "" if best_cause.proof else "perhaps "
    return Finding(
        code=code,
        severity=severity,
        message=message,
        place=location,
        cause=f"{best_cause.name}: {certainty_prefix}{best_cause.reason}",
        fix=fix,
        details=tuple(details),
    )


def _format_alternative(cause: Cause) -> str:
    text = f"{cause.name}: {cause.fix.splitlines()[0]}"
    if cause.proof or cause.evidence:
        text += f" (seen: {cause.proof or cause.evidence})"
    if cause.sign:
        text += f" (sign: {cause.sign})"
    return text


_LAYER_FILE = re.compile(r"torch[\\/]nn[\\/]modules[\\/]\w+\.py$")


def _describe_operands(error: RecognisedError) -> str:
    """Returns what the text shows about the operands of a mismatch: the call that failed, and the
    dtype on each side of it. Returns "" if the text shows no call.
    """
    frame = error.situation.failing_frame
    if frame is None or not frame.code:
        return ""
    innermost_frame = error.situation.innermost
    is_layer = innermost_frame is not None and _LAYER_FILE.search(innermost_frame.file)
    left, right = error.dtypes.get("left"), error.dtypes.get("right")
    if is_layer and left and right:
        operands = f"its input is {left}, its weight {right}"
    else:
        operands = ", ".join(f"{role} is {dtype}" for role, dtype in error.dtypes.items())
    call = f"{frame.code} at {frame.file}:{frame.line}"
    return f"{call}: {operands}" if operands else call


def _recognised_line(text: str, error: RecognisedError) -> str:
    """Returns the line of the message in which the error can be recognised."""
    lines = text.splitlines()
    line = lines[0]
    if len(lines) > 1:
        recognised = (line for line in reversed(lines) if recognise_error(line, error.situation))
        line = next(recognised, line)
    return line.strip()[:300]


def _log_line(incident: Incident, error: RecognisedError) -> int:
    """Returns the line number of the error in the log. For a traceback this is its first line. For
    other text it is the first line in which the error can be recognised.
    """
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


MAX_LISTED_CAUSES = 3  # with the first; a longer list is not read
_AUTOCAST_ADVICE = re.compile(
    r"(?:, |; )?(?:or )?run[^,;\n(]*under torch\.autocast\([^)]*\)(?:, or |; or |; )?"
)


# codes of errors that a Triton kernel raises
_KERNEL_CODES = ("EX020", "EX021", "EX022", "EX023", "EX024")
_OTHER_FRAMEWORK = re.compile(
    r"\b(?:jax|jnp|lax|tensorflow|tf)\b|zero-based\) was expected to be|\bcarry component\b"
    r"|\bof Optype \(|\bof output arg \(|operand type mismatch: expected operand|compute type, but the target device"
    r"|failed assertion `"
)


def describe_confidence(causes: Sequence[Cause], command: str) -> str:
    """Returns `decided` and the proof, if the text proves the first cause. Otherwise returns `open`,
    the possible causes, and the command that can tell which of them is true.
    """
    best_cause = causes[0]
    if best_cause.proof:
        return f"decided by the text: {best_cause.proof}"
    listed_causes = causes[:MAX_LISTED_CAUSES]
    if len(listed_causes) > 1:
        names = ", ".join(cause.name for cause in listed_causes)
        parts = [f"open between {len(listed_causes)} causes: {names}"]
    else:
        parts = ["open: nothing in the text decides"]
    if best_cause.evidence:
        parts.append(f"seen: {best_cause.evidence}")
    if command:
        parts.append(f"{command} decides")
    return "; ".join(parts)


def find_deciding_command(error: RecognisedError, code: str) -> str:
    """Returns a command that can tell which of the possible causes is true. This command can find
    out more than a log contains.
    """
    if _OTHER_FRAMEWORK.search(error.text):
        return ""
    if code in _KERNEL_CODES:
        return "isotype doctor kernels FILE.py"
    return "isotype doctor run SCRIPT.py"


_BF16_REPLACEMENTS = (
    # a fix that already says what to do without bf16
    (re.compile(r"bf16=True, fp16=False where the GPU has bf16[^,\n;]*, else "), ""),
    (re.compile(r"bf16 in place of fp16 \([^)]*\), fp32 on a GPU without it"), "fp32"),
    (re.compile(r"(?:\n|; |, )or (?:use )?bf16=True[^\n;]*"), ""),
    (re.compile(r"bf16=True, fp16=False"), "fp16=True with fp32 weights (dtype=torch.float32)"),
    (re.compile(r"bf16=True \(fp16=True before Ampere\)"), "fp16=True"),
    (re.compile(r"torch\.bfloat16"), "torch.float16"),
)
_NAMES_BF16 = re.compile(r"bf16(?!=False)|bfloat16")
_FP16_ADVICE = "use fp16 (fp16=True, with fp32 weights: dtype=torch.float32): this card has no bf16"


def _replace_bf16(fix: str) -> str:
    """Changes a fix so that it works on a GPU that does not support bf16."""
    for pattern, replacement in _BF16_REPLACEMENTS:
        fix = pattern.sub(replacement, fix)
    if _NAMES_BF16.search(fix) is None:
        return fix
    parts = [part for part in re.split(r"; |, or ", fix) if not _NAMES_BF16.search(part)]
    return "; ".join(parts) or _FP16_ADVICE
