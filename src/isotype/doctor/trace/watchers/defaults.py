"""The process-wide default dtype: who set it, and whether a function left it changed."""

from __future__ import annotations

import dis
import sys
from dataclasses import dataclass, field
from types import CodeType, FrameType

import torch

from ....dtypes import name as dtype_name
from ....finding import Finding, Place, Severity
from ..context import Context
from ..ops import LOW
from ..source import Site, callers, in_library, own_line, short
from ..watcher import Watcher


@dataclass(slots=True)
class Change:
    """built: tensors that took it while its setter ran; outside: their places once it had ended."""

    before: torch.dtype
    after: torch.dtype
    stack: tuple[Site, ...]
    built: int = 0
    outside: list[Site] = field(default_factory=list)

    @property
    def setter(self) -> Site:
        """The line that decided: the user's own, else the library's outside torch."""
        return own_line(list(self.stack)) or self.stack[0]


class DefaultDtype(Watcher):
    """Follows `torch.set_default_dtype`; a function that means to put the old dtype back and has ended without doing so has leaked it."""

    order = 5

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._original = torch.set_default_dtype
        self._initial = torch.get_default_dtype()
        self._last: Change | None = None
        self._leaks: dict[CodeType, Change] = {}
        self._never: dict[CodeType, Change] = {}

    def start(self) -> None:
        torch.set_default_dtype = self._set

    def stop(self) -> None:
        self.look()
        torch.set_default_dtype = self._original

    def _set(self, dtype: torch.dtype) -> None:
        before = torch.get_default_dtype()
        self.look()
        self._original(dtype)
        after = torch.get_default_dtype()
        if after == before:
            return
        if after == self._initial:
            self._never.clear()  # somebody put it back after all
        stack = tuple(site for site in callers(2) if not site.file.startswith("<"))
        self._last = None if after == self._initial else Change(before, after, stack)

    def forward_begins(self) -> None:
        self.look()

    def look(self) -> Change | None:
        """The change that is in force although the function that made it, meaning to undo it, is gone."""
        change = self._last
        if change is None or torch.get_default_dtype() != change.after:
            return None
        code = change.setter.code
        running = {site.code for site in callers(2)}
        if code in running or not restores(code):
            return None
        self._leaks.setdefault(code, change)
        return change

    def decided(self, site: Site | None) -> None:
        """A tensor was created without dtype= while a change is in force."""
        change = self._last
        if change is None or change.after not in LOW or len(change.outside) > 2:
            return
        code = change.setter.code
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is not None:
            change.built += 1
        elif change.built and site is not None and code.co_name != "<module>":
            change.outside.append(site)
            self._never.setdefault(code, change)

    def explain(self) -> tuple[str, str] | None:
        """Cause and fix, while a leak is in force."""
        change = self.look()
        return (cause_of(change), fix_of(change)) if change is not None else None

    def findings(self) -> list[Finding]:
        found = [_never_restored(change) for code, change in self._never.items() if code not in self._leaks]
        for change in self._leaks.values():
            setter = change.setter
            found.append(
                Finding(
                    code="TR017",
                    severity=Severity.WARNING if not in_library(setter.file) else Severity.NOTE,
                    message=f"the default dtype was left at {dtype_name(change.after)} by {setter.function}",
                    place=Place(file=setter.file, line=setter.line, symbol=setter.function),
                    cause=cause_of(change),
                    fix=fix_of(change),
                )
            )
        return found


def _never_restored(change: Change) -> Finding:
    setter, word = change.setter, dtype_name(change.after)
    return Finding(
        code="TR017",
        severity=Severity.WARNING if not in_library(setter.file) else Severity.NOTE,
        message=f"the default dtype was set to {word} by {setter.function} and not restored",
        place=Place(file=setter.file, line=setter.line, symbol=setter.function),
        cause=f"{setter.function} made {change.built} tensors under torch.set_default_dtype({word}) and ended; everything created since "
        f"without dtype= is {word} too, first at {change.outside[0]}",
        fix=f"restore it in {setter.function} with try: ... finally: torch.set_default_dtype(old), or pass dtype= to what it builds",
        details=tuple(("created at", f"{site}: {site.text}") for site in change.outside),
    )


def restores(code: CodeType) -> bool:
    """Whether a function means to put the default dtype back: it reads the old one, or sets it more than once."""
    calls = [i.argval for i in dis.get_instructions(code) if isinstance(i.argval, str)]
    return "get_default_dtype" in calls or calls.count("set_default_dtype") > 1


def cause_of(change: Change) -> str:
    setter = change.setter
    return (
        f"torch.set_default_dtype({dtype_name(change.after)}) at {short(setter.file)}:{setter.line} in {setter.function} changed the "
        "default dtype from "
        f"{dtype_name(change.before)}; {setter.function} has ended without restoring it (an exception or an early return skipped the "
        "line that does), "
        f"so everything created since without dtype= is {dtype_name(change.after)}"
    )


def fix_of(change: Change) -> str:
    return f"restore it in {change.setter.function} with try: ... finally: torch.set_default_dtype(old)"
