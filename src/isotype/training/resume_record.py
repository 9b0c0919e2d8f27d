"""`resumes.json`: the steps after which a run was resumed, and what has been different since.

The other files of a run folder describe the part that was started last. What a resume changes is written here before they are replaced, so
that a kill between the two loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..runs.folder import RunFolder
from .same_settings import recorded

RESUMES = "resumes.json"
ROWS, EVALUATION_ROWS = "rows", "evaluation rows"  # of a change
OTHER_ROWS = "earlier steps were trained on other rows: resumes.json says until which step"
CHANGES = "changes"  # in plan.json
_NEXT = "next"  # changes of a resume that has not restored its checkpoint yet


@dataclass(frozen=True)
class Changed:
    """`of`: settings, rows, evaluation rows or objective."""

    of: str
    what: str


def to_come(folder: RunFolder) -> list[dict[str, Any]]:
    """The changes of a resume that has not restored its checkpoint yet, or was killed before it did."""
    found: list[dict[str, Any]] = _read(folder).get(_NEXT, [])
    return found


def keep_changes(folder: RunFolder, changed: Sequence[Changed]) -> None:
    """Keeps what a resume changes, until `went_on` knows the step.

    Of a resume that was killed before, a change counts where plan.json was written with it; else nothing of it has happened.
    """
    record, changes, begun = _read(folder), [asdict(one) for one in changed], recorded(folder).get(CHANGES, [])
    kept = [change for change in record.get(_NEXT, []) if change not in changes and change in begun]
    if kept or changes or _NEXT in record:
        folder.write_json(RESUMES, record | {_NEXT: [*kept, *changes]})


def went_on(folder: RunFolder, step: int | None) -> None:
    """Records a resume after this step; None where the run began again, so that nothing before it counts."""
    if step is None:
        (folder.path / RESUMES).unlink(missing_ok=True)
        return
    record = _read(folder)
    # steps that are done again, since their checkpoint was damaged, have the later settings
    changes = [change | {"after_step": min(change["after_step"], step)} for change in record.get("changes", [])]
    for change in record.get(_NEXT, []):
        undone = [one for one in changes if one["after_step"] == step and _undoes(change.get("what"), one.get("what"))]
        if undone:  # no step was trained with it
            changes.remove(undone[-1])
        else:
            changes.append({"after_step": step, **change})
    steps = [earlier for earlier in record["steps"] if earlier <= step] + [step]
    folder.write_json(RESUMES, {"steps": steps} | ({"changes": changes} if changes else {}))


def _undoes(new: Any, old: Any) -> bool:
    """Whether one change of a setting, `key: old -> new (why)`, is another one's way back."""
    (key, there), (same, back) = (str(what).rpartition(" (")[0].partition(": ")[::2] for what in (old, new))
    was, arrow, became = there.partition(" -> ")
    return key == same and bool(arrow) and back == f"{became} -> {was}"


def had_other_rows(folder: RunFolder) -> bool:
    """Whether the rows changed in one of the run's resumes."""
    record = _read(folder)
    return any(change.get("of") == ROWS for change in [*record.get("changes", []), *record.get(_NEXT, [])])


def _read(folder: RunFolder) -> dict[str, Any]:
    """What the file has in the form that this module writes; the rest of a damaged one is left out."""
    try:
        found = folder.read_json(RESUMES)
    except (OSError, ValueError):
        found = {}
    found = found if isinstance(found, dict) else {}
    lists = {key: value for key in ("steps", "changes", _NEXT) if isinstance(value := found.get(key), list)}
    record: dict[str, Any] = {"steps": [step for step in lists.get("steps", []) if type(step) is int]}
    record["changes"] = [c for c in lists.get("changes", []) if isinstance(c, dict) and type(c.get("after_step")) is int]
    record[_NEXT] = [change for change in lists.get(_NEXT, []) if isinstance(change, dict)]
    return {key: value for key, value in record.items() if value or key == "steps"}
