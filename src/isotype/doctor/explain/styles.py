"""Tracebacks as rich and pytest print them, rewritten as CPython prints one; every other line passes unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Numbered = tuple[int, str]

_TITLE = "Traceback (most recent call last):"
_BOX_TOP = re.compile(r"^(?P<head>[^╭]*)(?P<box>╭─+ Traceback \(most recent call last\) ─+╮)")
_BOX_FRAME = re.compile(r"^(?P<file>\S.*?):(?P<line>\d+) in (?P<function>[\w<>.]+)$")
_BOX_ARROW = re.compile(r"^❱\s*\d+ (?P<code>.*)$")
_PATH = re.compile(r"^(?:[/~.]|[A-Za-z]:\\|<)\S*(?: in)?$")


def as_cpython(lines: Iterable[Numbered]) -> Iterator[Numbered]:
    """Lines with their numbers."""
    return _pytest(_rich(lines))


@dataclass(slots=True)
class _Box:
    """head: what stands before the box on its lines (a rank); message: the exception's text so far, which follows the box."""

    head: str
    width: int
    path: str = ""
    inside: bool = True
    message: list[Numbered] = field(default_factory=list)
    last: str = ""  # the message's last line as printed


def _rich(lines: Iterable[Numbered]) -> Iterator[Numbered]:
    box: _Box | None = None
    for number, line in lines:
        if box is None and "╭" not in line:
            yield number, line
        elif top := _BOX_TOP.match(line):
            yield from box.message if box else ()
            box = _Box(top["head"], len(top["box"]))
            yield number, box.head + _TITLE
        elif box is None:
            yield number, line
        elif box.inside:
            if not line.startswith(box.head):
                yield number, line
            elif line.startswith("╰", len(box.head)):
                box.inside = False
            else:
                yield from ((number, box.head + text) for text in _in_box(box, line[len(box.head) :]))
        elif box.message and _continues(box, line):
            first, text = box.message[-1]
            box.message[-1] = (first, f"{text.rstrip()} {line[len(box.head) :].strip()}")
            box.last = line
        else:
            yield from box.message
            box.message, box.last = [(number, line)] if line.strip() else [], line
            if not line.strip():
                box = None
                yield number, line
    yield from box.message if box else ()


def _in_box(box: _Box, line: str) -> list[str]:
    content = re.sub(r"^│ ?|\s*│?\s*$", "", line)
    for text in (content, box.path + content, f"{box.path} {content}"):
        if frame := _BOX_FRAME.match(text):
            box.path = ""
            return [f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}']
    if arrow := _BOX_ARROW.match(content):
        return ["    " + arrow["code"].replace("│", " ").strip()]
    box.path = content if _PATH.match(content) else ""
    return []


def _continues(box: _Box, line: str) -> bool:
    """rich breaks a line where the next word would not have fitted; the message's own line ends are shorter."""
    text = line[len(box.head) :]
    if not line.startswith(box.head) or not text.strip() or text[0].isspace():
        return False
    return len(box.last.rstrip()) - len(box.head) + 1 + len(text.split()[0]) > box.width


_TEST = re.compile(r"^_{3,} (?P<name>\S.*?) _{3,}$")
_SECTION = re.compile(r"^={3,} .* ={3,}$|^={20,}$")
_LOCATION = re.compile(r"^(?P<file>[^\s:]+\.py):(?P<line>\d+):(?: in (?P<function>\S+)| [\w.]*)?\s*$")


@dataclass(slots=True)
class _Report:
    """One failed test: pytest prints a frame's code before its place, or (short) the place first."""

    function: str
    start: int
    code: str = ""
    frames: list[str] = field(default_factory=list)
    message: list[str] = field(default_factory=list)
    short: bool = False

    def take(self, line: str) -> None:
        if line.startswith(">") and line[1:].strip():
            self.code = line[1:].strip()
        elif re.match(r"E {3}", line):
            self.message.append(line[1:])
        elif definition := re.match(r"^ {4}(?:async )?def (\w+)", line):
            self.function = definition[1]
        elif place := _LOCATION.match(line):
            self.frames.append(f'  File "{place["file"]}", line {place["line"]}, in {place["function"] or self.function}')
            if self.code:
                self.frames.append(f"    {self.code}")
            self.code, self.short = "", bool(place["function"])
        elif self.short and line.startswith("    "):
            self.frames.append(line)

    def printed(self) -> Iterator[Numbered]:
        if self.message:
            indent = min((len(text) - len(text.lstrip()) for text in self.message if text.strip()), default=0)
            for text in ("", _TITLE, *self.frames, *(text[indent:] for text in self.message), ""):
                yield self.start, text


def _pytest(lines: Iterable[Numbered]) -> Iterator[Numbered]:
    report: _Report | None = None
    summary = False
    for number, line in lines:
        if report is None and not summary and not line.startswith("___"):
            yield number, line
        elif test := _TEST.match(line):
            yield from report.printed() if report else ()
            report = _Report(test["name"], number)
        elif report is None:
            if not (summary and re.match(r"(?:FAILED|ERROR) \S+\.py\b", line)):
                yield number, line
        elif _TITLE in line:  # --tb=native: CPython's own
            yield from report.printed()
            summary, report = True, None
            yield number, line
        elif _SECTION.match(line):
            yield from report.printed()
            summary, report = summary or bool(report.message), None
            yield number, line
        else:
            report.take(line)
    yield from report.printed() if report else ()
