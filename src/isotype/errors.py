"""Errors that a user sees. Each has a code, an exit status for the command line, and a page of
documentation.

`UsageError` reports a mistake of the caller: the command line prints one line and exits with 2.
"""

from __future__ import annotations


class IsotypeError(Exception):
    """The base class of every error that Isotype raises on purpose. `isotype doctor explain CODE`
    prints the page of its `code`.
    """

    exit_status = 1
    is_shown_elsewhere = False
    """True if another process of this run prints the error: this process then only exits with the
    status.
    """

    def __init__(self, message: str, *, code: str | None = None, fix: str | None = None) -> None:
        self.code = code
        self.message = message
        self.fix = fix
        text = message if code is None or message.startswith(code) else f"{code} {message}"
        super().__init__(text if fix is None else f"{text}\n  fix       {fix}")


class UsageError(IsotypeError, ValueError):
    """Bad configuration or usage: nothing was started."""

    exit_status = 2


def raise_first_refusal(*cases: tuple[object, str, str]) -> None:
    """Raises UsageError for the first case whose condition is true. A case is (condition, message,
    fix).
    """
    for is_refused, message, fix in cases:
        if is_refused:
            raise UsageError(message, fix=fix)


class PreflightError(IsotypeError, ValueError):
    """A check before step 1 refused the run."""

    exit_status = 3


class RunError(IsotypeError, RuntimeError):
    """The run failed after it started. This is not a ValueError, because the caller's arguments
    were valid.
    """


class DtypeError(IsotypeError, ValueError):
    """A tensor's dtype is not the declared one."""


class ShapeError(IsotypeError, ValueError):
    """A tensor's shape is not the declared one."""
