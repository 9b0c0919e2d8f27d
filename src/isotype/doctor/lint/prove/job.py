"""What is handed to the process that executes, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..dataflow.events import Scenario

REFUSED = frozenset({"LT001", "LT002", "LT007", "LT012", "LT016", "LT018", "LT026"})  # rules of what torch refuses
LOSSES = frozenset({"LT004", "LT008"})  # and of precision that is lost
Outcome = Literal["failed", "lost", "held", "not run"]


@dataclass(frozen=True, slots=True)
class Job:
    """One finding: file and line accused, code of its rule, and the dtypes that it supposes."""

    file: str
    line: int
    code: str
    scenario: Scenario


@dataclass(frozen=True, slots=True)
class Verdict:
    """failed: torch refused; lost: precision was lost; held: the accused line was executed and nothing happened; not run: why."""

    outcome: Outcome
    text: str
