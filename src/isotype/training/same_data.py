"""Tells a resumed run that its rows are not those of its last start: a file, a setting, the tokenizer or its template has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..runs.folder import RunFolder
from .console import RunConsole
from .resume_record import Changed
from .task import Task

DATA = "data"  # in plan.json


def compare_data(task: Task, folder: RunFolder, console: RunConsole, settings: Sequence[Changed] = ()) -> list[Changed]:
    """What has changed since the run was last started, printed too. A run from before this was recorded is not compared.

    settings  those that this start changes
    """
    try:
        before = folder.read_json("plan.json")[DATA]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    facts = task.records().get("data.json", {})
    streamed = bool(facts.get("stream"))  # of a stream the rows that were compared are the first ones only
    if before == task.fingerprint() and not streamed:
        return []
    try:
        recorded = folder.read_json("data.json")
    except (OSError, ValueError):
        recorded = {}
    old, new = dict(_checksums(recorded)), dict(_checksums(facts))
    changed = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    if not changed and before == task.fingerprint():
        return []
    by_settings = [change.what.partition(":")[0] for change in settings if change.what.startswith(f"{DATA}.")]
    what = ", ".join([*changed[:5], *by_settings]) or "the files are the same: the tokenizer, its chat template or a library"
    was, now = _rows(recorded), _rows(facts)
    if was != now and not streamed:
        what += f"; training rows: {was} before, {now} now"
    line = f"the rows are not those of the run's last start ({what}): it goes on at the same place in them"
    console.say(f"changed   {line}")
    return [Changed("rows", line)]


def _rows(facts: Any) -> Any:
    train = facts.get("train") if isinstance(facts, dict) else None
    return train.get("rows") if isinstance(train, dict) else None


def _checksums(facts: Any) -> Iterator[tuple[str, str]]:
    """(path, checksum) of each file that data.json names, wherever it does."""
    if isinstance(facts, dict):
        if isinstance(facts.get("path"), str) and isinstance(facts.get("sha256"), str):
            yield facts["path"], facts["sha256"]
        facts = list(facts.values())
    if isinstance(facts, list):
        for part in facts:
            yield from _checksums(part)
