"""Where in the source something happened: the first frame that is neither torch's nor ours, as a file, a line and a function."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from ...finding import Place

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
CLI = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "cli") + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_MACHINERY = tuple(os.path.join(_STDLIB, name) for name in ("contextlib.py", "functools.py", "runpy.py"))
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class Site(NamedTuple):
    """A line of a running function."""

    code: CodeType
    line: int

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def function(self) -> str:
        return self.code.co_qualname.replace("<locals>.", "")

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{short(self.file)}:{self.line} in {self.function}"


def place_of(site: Site | None, symbol: str | None = None) -> Place:
    """Where a finding points to: the line, under `symbol`, or under its function where there is none."""
    if site is None:
        return Place(symbol=symbol or None)
    return Place(file=site.file, line=site.line, symbol=symbol or site.function)


def short(file: str) -> str:
    """A shortened path: the part after site-packages, or relative to the current folder."""
    for mark in _LIBRARIES:
        if mark in file:
            return file.rpartition(mark)[2]
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def in_library(file: str) -> bool:
    """Whether the file is installed code rather than the user's own."""
    return file.startswith(("<", _STDLIB, TORCH, OURS, CLI)) or any(mark in file for mark in _LIBRARIES)


class Locator:
    """Finds the running line; remembers which code objects to skip, since it is asked for most ops."""

    def __init__(self) -> None:
        self._skip: dict[CodeType, bool] = {}

    def here(self, depth: int = 2) -> Site | None:
        """The innermost line that is neither torch's nor ours."""
        frame: FrameType | None = sys._getframe(depth)
        known = self._skip
        while frame is not None:
            code = frame.f_code
            skip = known.get(code)
            if skip is None:
                file = code.co_filename
                skip = known[code] = file.startswith((TORCH, OURS, CLI, "<", *_MACHINERY))
            if not skip:
                return Site(code, frame.f_lineno)
            frame = frame.f_back
        return None


def callers(depth: int = 1) -> list[Site]:
    """Every line on the stack but ours, innermost first."""
    frame: FrameType | None = sys._getframe(depth)
    found = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(OURS):
            found.append(Site(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def own_line(stack: list[Site]) -> Site | None:
    """The innermost line of the user's own code."""
    return next((site for site in stack if not in_library(site.file)), None)


def statement(site: Site) -> str:
    """The whole statement at a line, on one line (a call may span several)."""
    lines = linecache.getlines(site.file)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return site.text
    holding = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and node.lineno <= site.line <= (node.end_lineno or node.lineno)
    ]
    if not holding:
        return site.text
    node = max(holding, key=lambda n: n.lineno)
    return " ".join(line.strip() for line in lines[node.lineno - 1 : node.end_lineno])
