"""The process-wide default dtype: who set it, and whether a function left it changed."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from types import CodeType

import torch

from ...dtypes import name as dtype_name
from ...finding import Finding, Place, Severity
from .source import Site, callers, in_library, own_line, short


@dataclass(frozen=True, slots=True)
class Change:
    before: torch.dtype
    after: torch.dtype
    stack: tuple[Site, ...]

    @property
    def setter(self) -> Site:
        """The line that decided: the user's own, else the library's outside torch."""
        return own_line(list(self.stack)) or self.stack[0]


class DefaultDtype:
    """Follows `torch.set_default_dtype`; a function that means to put the old dtype back and has ended without doing so has leaked it."""

    def __init__(self) -> None:
        self._original = torch.set_default_dtype
        self._initial = torch.get_default_dtype()
        self._last: Change | None = None
        self._leaks: dict[CodeType, Change] = {}

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
        stack = tuple(site for site in callers(2) if not site.file.startswith("<"))
        self._last = None if after == self._initial else Change(before, after, stack)

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

    def explain(self) -> tuple[str, str] | None:
        """Cause and fix, while a leak is in force."""
        change = self.look()
        return (cause_of(change), fix_of(change)) if change is not None else None

    def findings(self) -> list[Finding]:
        found = []
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
        f"so whatever is created since without dtype= is {dtype_name(change.after)}"
    )


def fix_of(change: Change) -> str:
    return f"restore it in {change.setter.function} with try: ... finally: torch.set_default_dtype(old)"
