"""Tells a resumed run that its rows are not those of its last start: a file, a setting, the tokenizer or its template has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..runs.folder import RunFolder
from .console import RunConsole
from .resume_record import EVALUATION_ROWS, ROWS, Changed
from .task import Task

DATA = "data"  # in plan.json
_KINDS = (
    ("training", ROWS, "it goes on at the same place in them"),
    ("evaluation", EVALUATION_ROWS, "their losses are not compared with the earlier ones, and the best is chosen anew"),
)


def compare_data(task: Task, folder: RunFolder, console: RunConsole, settings: Sequence[Changed] = ()) -> list[Changed]:
    """What has changed since the run was last started, printed too. A run from before this was recorded is not compared.

    settings  those that this start changes
    """
    try:
        before = folder.read_json("plan.json")[DATA]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    try:
        recorded = folder.read_json("data.json")
    except (OSError, ValueError):
        recorded = {}
    facts, now = task.records().get("data.json", {}), task.fingerprints()
    by_settings = [change.what.partition(":")[0] for change in settings if change.what.startswith(f"{DATA}.")]
    found: list[Changed] = []
    for kind, of, follows in _KINDS:
        files = _changed_files(recorded, facts, evaluation=kind == "evaluation")
        same = now[kind] == before.get(kind) if isinstance(before, dict) else not files  # a string: of an earlier version, of both kinds
        streamed = bool(facts.get("stream")) and kind == "training"  # the rows that were compared are the first ones only
        if same and not (streamed and files):
            continue
        if kind == "evaluation" and not files and found:  # held out of the training files
            files = _changed_files(recorded, facts, evaluation=False)
        what = ", ".join([*files[:5], *by_settings]) or "the files are the same: the tokenizer, its chat template or a library"
        was, are = _rows(recorded), _rows(facts)
        if kind == "training" and was != are and not streamed:
            what += f"; training rows: {was} before, {are} now"
        line = f"the {of} are not those of the run's last start ({what}): {follows}"
        console.say(f"changed   {line}")
        found.append(Changed(of, line))
    return found


def _changed_files(old: Any, new: Any, *, evaluation: bool) -> list[str]:
    """The files of the evaluation, or the others, that data.json names with another checksum than before."""
    before, after = (
        dict(_checksums((facts.get("eval") if evaluation else {k: v for k, v in facts.items() if k != "eval"}) or {}))
        for facts in (old if isinstance(old, dict) else {}, new)
    )
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


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
