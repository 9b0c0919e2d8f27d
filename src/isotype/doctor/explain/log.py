"""Reads a log of any length and divides it into incidents. An incident is an exception with its
frames, or a passage of text without a traceback.

Memory does not grow with the length of the log. At any time, the module holds at most one passage
of text, and one unfinished traceback per process. Several tracebacks can be unfinished, because the
log can mix the lines of several processes. Tracebacks in the formats of rich and pytest are first
converted to the format of CPython.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

NumberedLine = tuple[int, str]  # (number of the line in the log, its text)

_TRACEBACK_TITLE = "Traceback (most recent call last):"
_BOX_TOP = re.compile(r"^(?P<head>[^╭]*)(?P<box>╭─+ Traceback \(most recent call last\) ─+╮)")
_BOX_FRAME = re.compile(r"^(?P<file>\S.*?):(?P<line>\d+) in (?P<function>[\w<>.]+)$")
_BOX_ARROW = re.compile(r"^❱\s*\d+ (?P<code>.*)$")
_PATH = re.compile(r"^(?:[/~.]|[A-Za-z]:\\|<)\S*(?: in)?$")


@dataclass(slots=True)
class _RichBox:
    """A traceback that rich prints in a box.

    head     the text before the box on each line, such as a rank
    message  the lines of the exception's text, which follows the box
    """

    head: str
    width: int
    path: str = ""
    is_inside: bool = True
    message: list[NumberedLine] = field(default_factory=list)
    last_line: str = ""  # the last line of the message as it was printed


def _rewrite_rich(lines: Iterable[NumberedLine]) -> Iterator[NumberedLine]:
    box: _RichBox | None = None
    for number, line in lines:
        if box is None and "╭" not in line:
            yield number, line
        elif top := _BOX_TOP.match(line):
            if box is not None:
                yield from box.message
            box = _RichBox(top["head"], len(top["box"]))
            yield number, box.head + _TRACEBACK_TITLE
        elif box is None:
            yield number, line
        elif box.is_inside:
            if not line.startswith(box.head):
                yield number, line
            elif line.startswith("╰", len(box.head)):
                box.is_inside = False
            else:
                yield from (
                    (number, box.head + text)
                    for text in _convert_box_line(box, line[len(box.head) :])
                )
        elif box.message and _continues_message(box, line):
            first_number, text = box.message[-1]
            box.message[-1] = (first_number, f"{text.rstrip()} {line[len(box.head) :].strip()}")
            box.last_line = line
        else:
            yield from box.message
            box.message = [(number, line)] if line.strip() else []
            box.last_line = line
            if not line.strip():
                box = None
                yield number, line
    if box is not None:
        yield from box.message


def _convert_box_line(box: _RichBox, line: str) -> list[str]:
    content = re.sub(r"^│ ?|\s*│?\s*$", "", line)
    for text in (content, box.path + content, f"{box.path} {content}"):
        if frame := _BOX_FRAME.match(text):
            box.path = ""
            return [f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}']
    if arrow := _BOX_ARROW.match(content):
        return ["    " + arrow["code"].replace("│", " ").strip()]
    box.path = content if _PATH.match(content) else ""
    return []


def _continues_message(box: _RichBox, line: str) -> bool:
    """True if a line continues the previous line. rich breaks a line only if the next word does not
    fit. If the previous line had room for the next word, the line break belongs to the message
    itself.
    """
    text = line[len(box.head) :]
    if not line.startswith(box.head) or not text.strip() or text[0].isspace():
        return False
    return len(box.last_line.rstrip()) - len(box.head) + 1 + len(text.split()[0]) > box.width


_PYTEST_TEST = re.compile(r"^_{3,} (?P<name>\S.*?) _{3,}$")
_PYTEST_SECTION = re.compile(r"^={3,} .* ={3,}$|^={20,}$")
_PYTEST_LOCATION = re.compile(
    r"^(?P<file>[^\s:]+\.py):(?P<line>\d+):(?: in (?P<function>\S+)| [\w.]*)?\s*$"
)


@dataclass(slots=True)
class _PytestFailure:
    """One failed test in pytest's output. pytest prints the code of a frame before the location of
    the frame. In the short form of pytest's output, the code comes after the location.
    """

    function: str
    start: int
    code: str = ""
    frames: list[str] = field(default_factory=list)
    message: list[str] = field(default_factory=list)
    is_short: bool = False

    def read_line(self, line: str) -> None:
        if line.startswith(">") and line[1:].strip():
            self.code = line[1:].strip()
        elif re.match(r"E {3}", line):
            self.message.append(line[1:])
        elif definition := re.match(r"^ {4}(?:async )?def (\w+)", line):
            self.function = definition[1]
        elif location := _PYTEST_LOCATION.match(line):
            self.frames.append(
                f'  File "{location["file"]}", line {location["line"]}, in'
                f" {location['function'] or self.function}"
            )
            if self.code:
                self.frames.append(f"    {self.code}")
            self.code = ""
            self.is_short = bool(location["function"])
        elif self.is_short and line.startswith("    "):
            self.frames.append(line)

    def traceback_lines(self) -> Iterator[NumberedLine]:
        if self.message:
            indent = min(
                (len(text) - len(text.lstrip()) for text in self.message if text.strip()), default=0
            )
            for text in (
                "",
                _TRACEBACK_TITLE,
                *self.frames,
                *(text[indent:] for text in self.message),
                "",
            ):
                yield self.start, text


def _rewrite_pytest(lines: Iterable[NumberedLine]) -> Iterator[NumberedLine]:
    failure: _PytestFailure | None = None
    is_in_summary = False
    for number, line in lines:
        if failure is None and not is_in_summary and not line.startswith("___"):
            yield number, line
        elif test := _PYTEST_TEST.match(line):
            if failure is not None:
                yield from failure.traceback_lines()
            failure = _PytestFailure(test["name"], number)
        elif failure is None:
            if not (is_in_summary and re.match(r"(?:FAILED|ERROR) \S+\.py\b", line)):
                yield number, line
        elif _TRACEBACK_TITLE in line:  # --tb=native prints CPython's form
            yield from failure.traceback_lines()
            is_in_summary = True
            failure = None
            yield number, line
        elif _PYTEST_SECTION.match(line):
            yield from failure.traceback_lines()
            is_in_summary = is_in_summary or bool(failure.message)
            failure = None
            yield number, line
        else:
            failure.read_line(line)
    if failure is not None:
        yield from failure.traceback_lines()


MAX_MESSAGE_LINES = 80  # lines kept of an exception's text
MAX_PASSAGE_LINES = 40  # lines of text without a traceback that are read as one passage
MAX_FRAMES = 400  # of a longer traceback, such as a RecursionError's, both ends are kept
MAX_LINE_LENGTH = 4000  # characters of a line that are read
MAX_PREFIXES = 16  # different prefixes of lines (a rank, a timestamp) that are removed

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK_PREFIX = re.compile(
    r"^\s*(\[(?:default|rank|Rank|RANK|trainer)?\s?\d+\]:?|\(\w[\w.]* pid=\d+(?:,"
    r" ip=[\d.]+)?\)|\w+-\d+-\w+:|\d+:(?= ))\s?"
)
_TIMESTAMP = re.compile(
    r"^\[?\d{4}-\d\d-\d\d[T "
    r"]\d\d:\d\d:\d\d[,.\d]*\]?(?:\s*[-|]?\s*(?:ERROR|WARNING|INFO|CRITICAL)\s*[-|:]?)?\s*(?=Traceback|File "
    r"|\w*Error)"
)
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_NOTEBOOK_FRAME = re.compile(
    r"^(?:File|Cell) (?P<file>\S+?|In\[\d+\])(?::(?P<line>\d+)|, line (?P<cell>\d+))(?:, in"
    r" (?P<function>[\w.<>]+))?"
)
_ARROW = re.compile(r"^-+> ?(?P<line>\d+)\s(?P<code>.*)$")
_EXCEPTION = re.compile(
    r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Timeout|Failure|Unsupported|Iteration))(?:: "
    r"?(?P<text>.*))?$"
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
# the compiler prints the frames of the code that it compiled under its own message
_COMPILED_CODE = re.compile(r"^(?:from user code|Original traceback|Found from) ?:\s*$")
_CHAINED_EXCEPTION = re.compile(
    r"^(?:The above exception was the direct cause|During handling of the above exception)"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a traceback. `code` is the line of source code that the traceback shows."""

    file: str
    line: int | None
    function: str
    code: str = ""


@dataclass(slots=True)
class Incident:
    """An exception, or a passage of text without an exception.

    line     the number of its first line in the log
    message  the lines of the exception's text, or of the passage
    frames   the frames of the traceback, outermost first
    is_chained  whether the previous exception is its cause or context
    frame_indent  the number of blanks before a frame, if the whole traceback is indented
    is_compiled_code  whether the message has come to the frames of the compiled code
    """

    line: int
    message: list[str] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    exception: str | None = None
    is_chained: bool = False
    frame_indent: int = 0
    is_compiled_code: bool = False

    @property
    def text(self) -> str:
        return "\n".join(self.message).strip()

    def add_frame(self, match: re.Match[str], line: str) -> None:
        """Adds the frame that a line of a traceback describes."""
        if len(self.frames) >= MAX_FRAMES:
            del self.frames[MAX_FRAMES // 2]
        self.frames.append(Frame(match["file"], int(line), match["function"] or ""))


def read_incidents(lines: Iterable[str]) -> Iterator[Incident]:
    """Yields the incidents of a log: every exception, and every block of other lines. They are
    sorted by the position of their last line.
    """
    open_incidents: dict[str, Incident] = {}
    ranks_with_cause: set[str] = (
        set()
    )  # ranks whose previous exception is the cause of the next one
    passage = Incident(0)
    # the text before the first line of a traceback, which its other lines have too
    prefixes: dict[str, re.Pattern[str]] = {}

    def close_incidents(*incidents: Incident | None) -> Iterator[Incident]:
        """Yields those of the given incidents that have a message."""
        yield from (incident for incident in incidents if incident is not None and incident.message)

    def flush_passage() -> Iterator[Incident]:
        nonlocal passage
        yield from close_incidents(passage)
        passage = Incident(0)

    for number, line in _rewrite_pytest(_rewrite_rich(_clean_lines(lines))):
        rank = ""
        if match := _RANK_PREFIX.match(line):
            rank = match[1]
            line = line[match.end() :]
        line = _TIMESTAMP.sub("", line)
        if title := _TRACEBACK.search(line):
            _learn_prefix(line[: title.start()], prefixes)
            yield from close_incidents(open_incidents.pop(rank, None))
            yield from flush_passage()
            head = line[: title.start()]
            open_incidents[rank] = Incident(
                number,
                is_chained=rank in ranks_with_cause,
                frame_indent=len(head) + 2 if head and not head.strip() else 0,
            )
            ranks_with_cause.discard(rank)
            continue
        if prefix_match := next(
            (match for prefix in prefixes.values() if (match := prefix.match(line))), None
        ):
            line = line[prefix_match.end() :]
        if _CHAINED_EXCEPTION.match(line):
            yield from close_incidents(open_incidents.pop(rank, None))
            ranks_with_cause.add(rank)
        elif current := open_incidents.get(rank):
            if _extend_traceback(current, _remove_indent(current, line)):
                yield from close_incidents(open_incidents.pop(rank))
                if line.strip():
                    passage.line = number
                    passage.message.append(line)
        elif frame := _FRAME.match(line):  # a traceback without its first line
            yield from flush_passage()
            indent = len(line) - len(line.lstrip())
            open_incidents[rank] = Incident(number, frame_indent=indent if indent > 2 else 0)
            open_incidents[rank].add_frame(frame, frame["line"])
        elif line.strip():
            passage.line = passage.line or number
            passage.message.append(line)
            if len(passage.message) >= MAX_PASSAGE_LINES:
                yield from flush_passage()
        else:
            yield from flush_passage()
    yield from close_incidents(*open_incidents.values())
    yield from flush_passage()


def _clean_lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yields numbered lines without colour codes and line ends. Very long lines are cut."""
    for number, raw in _unfold_json_lines(lines):
        line = _ANSI.sub("", raw[:MAX_LINE_LENGTH]) if "\x1b" in raw else raw[:MAX_LINE_LENGTH]
        yield number, line.rstrip("\r\n")


def _learn_prefix(head: str, prefixes: dict[str, re.Pattern[str]]) -> None:
    """Stores a pattern of the text that precedes each line of a traceback, such as a timestamp, a
    log level or the name of a container. The numbers in this text may differ from line to line.
    """
    if not head.strip() or "Group" in head or len(prefixes) >= MAX_PREFIXES:
        return
    shape = re.sub(r"\d+", r"\\d+", re.escape(head.rstrip()))
    prefixes.setdefault(shape, re.compile(shape + r"(?: |$)" if head.endswith(" ") else shape))


def _unfold_json_lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yields numbered lines. A traceback inside a JSON string, whose line breaks are escaped, is
    split into its lines.
    """
    for number, raw in enumerate(lines, 1):
        if "\\n" in raw and "Traceback" in raw:
            text = raw[: MAX_MESSAGE_LINES * MAX_LINE_LENGTH].replace('\\"', '"')
            first, *rest = text.split("\\n")
            yield number, first
            yield from ((number, line) for line in rest[:-1])
            if rest:
                yield number, re.sub(r'"[\s,}\]]*(?:"\w+":.*)?$', "", rest[-1])
        else:
            yield number, raw


def _remove_indent(current: Incident, line: str) -> str:
    """Returns a line of a traceback without its blanks, if the whole traceback is indented and the
    line is not deeper than a frame. Such a line is the exception, and deeper lines are code.
    """
    text = line.lstrip(" ")
    is_deeper = len(line) - len(text) > current.frame_indent
    return line if is_deeper or _FRAME.match(line) else text


def _extend_traceback(current: Incident, line: str) -> bool:
    """Adds a line to a traceback that is not yet complete. Returns True if the line does not belong
    to this traceback.
    """
    if not current.message:
        if frame := _FRAME.match(line):
            current.add_frame(frame, frame["line"])
        elif frame := _NOTEBOOK_FRAME.match(line):
            current.add_frame(frame, frame["line"] or frame["cell"])
        elif (arrow := _ARROW.match(line)) and current.frames:
            last = current.frames[-1]
            current.frames[-1] = Frame(
                last.file, int(arrow["line"]), last.function, arrow["code"].strip()
            )
        elif exception := _EXCEPTION.match(line):
            current.exception = exception["kind"]
            current.message.append(line)
        elif line.startswith((" ", "\t")) and current.frames and line.strip().strip("^~"):
            last = current.frames[-1]
            if not last.code:
                current.frames[-1] = Frame(last.file, last.line, last.function, line.strip())
        elif (
            line
            and not line[0].isspace()
            and re.match(r"[A-Za-z_][\w.]*: ", line)
            and current.frames
        ):
            current.exception = line.partition(":")[0]
            current.message.append(line)
        return False
    return _extend_message(current, line)


def _extend_message(current: Incident, line: str) -> bool:
    """Adds a line to the text of an exception. Returns True if the line does not belong to it."""
    if len(current.message) >= MAX_MESSAGE_LINES:
        return True
    if _COMPILED_CODE.match(line):
        current.is_compiled_code = True
        return False
    if current.is_compiled_code and line.startswith((" ", "\t")):
        _add_compiled_code(current, line)
        return False
    if not line.strip():  # a message may contain one blank line, but not two in a row
        if current.message[-1] == "":
            return True
        current.message.append("")
        return False
    if (
        current.message[-1] == ""
        and not line[0].isspace()
        and not _EXCEPTION.match(line)
        and not re.match(r"\w+\(['\"]|saved|recomputed|tensor", line)
    ):
        return True
    current.message.append(line)
    return False


def _add_compiled_code(current: Incident, line: str) -> None:
    """Adds a frame of the code that was being compiled, or the code of its line."""
    if frame := _FRAME.match(line):
        current.add_frame(frame, frame["line"])
    elif current.frames and not current.frames[-1].code:
        last = current.frames[-1]
        current.frames[-1] = Frame(last.file, last.line, last.function, line.strip())
