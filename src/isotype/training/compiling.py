"""The compilation of a run's layers, before its first step or before a resumed run goes on (`model.compile: layers`)."""

from __future__ import annotations

from typing import Any

from ..config.kind import wants_compiled
from .preflight.rehearsal import undone
from .preflight.subject import Subject


def compile_ahead(subject: Subject[Any]) -> None:
    """Compiles the layers on the longest rows, where that is asked for. Raises UsageError for a layer that is not one graph.

    A resumed run does the same, whatever its next rows: the graphs of both are made from the same sizes.
    """
    prepared = subject.prepared
    if wants_compiled(subject.config):
        with undone(prepared):
            prepared.model.train()
            prepared.stepper.accumulate([subject.batch_of(subject.longest_rows)])
