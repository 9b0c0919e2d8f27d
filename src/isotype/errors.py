"""Errors that a user sees, each with a code, the exit status of the command line, and a page.

`UsageError` is the caller's mistake: the command line prints one line and exits with 2.
"""

from __future__ import annotations


class IsotypeError(Exception):
    """Base of every error Isotype raises on purpose. `code` names its page (`isotype doctor explain
    CODE`).
    """

    exit_status = 1
    shown_elsewhere = False
    """Another process of this run prints the error; this one only exits with its status."""

    def __init__(self, message: str, *, code: str | None = None, fix: str | None = None) -> None:
        self.code = code
        self.message = message
        self.fix = fix
        text = message if code is None or message.startswith(code) else f"{code} {message}"
        super().__init__(text if fix is None else f"{text}\n  fix       {fix}")


class UsageError(IsotypeError, ValueError):
    """Bad configuration or usage: nothing was started."""

    exit_status = 2


def refuse_where(*cases: tuple[object, str, str]) -> None:
    """Raises  UsageError for the first case that is refused: (whether it is refused, message, fix)."""
    for is_refused, message, fix in cases:
        if is_refused:
            raise UsageError(message, fix=fix)


class PreflightError(IsotypeError, ValueError):
    """Refused before step 1."""

    exit_status = 3


class RunError(IsotypeError, RuntimeError):
    """The run failed after it started. Not a ValueError, since the caller's arguments were valid."""


class DtypeError(IsotypeError, ValueError):
    """A tensor's dtype is not the declared one."""


class ShapeError(IsotypeError, ValueError):
    """A tensor's shape is not the declared one."""
