"""What the doctor's commands check of the options that they share."""

from __future__ import annotations

from ..errors import UsageError
from ..finding import Severity


def threshold(fail_on: str) -> Severity:
    """The severity from which on a command exits with 1. Raises  UsageError for another word."""
    try:
        return Severity.parse(fail_on)
    except ValueError as error:
        raise UsageError(f"--fail-on: {error}") from None


def refuse_two_forms(json_output: bool, sarif: bool) -> None:
    """Raises  UsageError where both forms of output were asked for."""
    if json_output and sarif:
        raise UsageError("--json and --sarif: give one of them")
