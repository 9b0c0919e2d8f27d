"""What is wrong with a kernel, once for all the combinations that show it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...finding import Severity


@dataclass(frozen=True)
class Fault:
    """What `check` turns into a Finding, once for all the combinations that show it."""

    code: str
    file: str
    line: int
    kernel: str
    variable: str
    message: str
    cause: str
    fix: str
    dtypes: tuple[str, str] | tuple[str] | tuple[()] = ()
    facts: tuple[tuple[str, str], ...] = field(default=())
    is_dtype: bool = True  # whether the failure is about dtypes at all
    statistic: bool = False  # whether the value at fault is one loaded number a program
    severity: Severity | None = None  # None: decided by how reachable the combination is
