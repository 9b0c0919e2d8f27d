"""What is handed to the process that executes, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..dataflow.events import Scenario

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
