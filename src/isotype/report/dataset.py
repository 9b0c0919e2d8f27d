"""The data a run learnt from: counts, lengths, and rows with what is learnt of them."""

from __future__ import annotations

import math
from typing import Any

from ..counted import counted
from .chart import length_chart
from .plots import length_bars
from .record import RunRecord, dict_of, list_of, rows_of


def data(record: RunRecord) -> dict[str, Any]:
    """Counts, files, lengths and notes of both sides."""
    sides = []
    for key, title in (("train", "Training"), ("eval", "Evaluation")):
        side = record.data.get(key)
        if not isinstance(side, dict) or (key == "eval" and side.get("rows") == 0):
            continue
        lengths = dict_of(side.get("lengths"))
        facts = [
            ("rows", side.get("rows")),
            ("tokens", side.get("tokens")),
            ("learnt tokens", side.get("supervised_tokens")),
            ("cut at the end", side.get("truncated")),
            (
                "dropped",
                sum(d.get("rows", 0) for d in list_of(side.get("dropped")) if isinstance(d, dict) and isinstance(d.get("rows"), int)),
            ),
            ("exact repeats", side.get("duplicates")),
            ("tokens of the median row", lengths.get("median")),
            ("tokens of the longest row", lengths.get("longest")),
        ]
        sides.append(
            {
                "title": title + (" (held out)" if side.get("held_out") else ""),
                "facts": [(name, f"{value:,}") for name, value in facts if isinstance(value, int)],
                "files": _sources(side, record.data.get("mix") if key == "train" else None),
                "lengths": length_chart(length_bars(side), label=f"Rows of {title.lower()} data by length"),
            }
        )
    return {"sides": sides, "notes": [str(note) for note in list_of(record.data.get("notes"))]}


def _sources(side: dict[str, Any], mix: Any) -> list[dict[str, str]]:
    """The sources of a side: how many rows each had and gave, and of weighted ones how often a row comes."""
    found = rows_of(side.get("files"), "path", "format", "why")
    shares = {str(one.get("path")): one for one in list_of(mix) if isinstance(one, dict)}
    for shown, file in zip(found, (f for f in list_of(side.get("files")) if isinstance(f, dict))):
        rows, kept = file.get("rows"), file.get("kept")
        words = [counted(rows, "row")] if isinstance(rows, int) else []
        if isinstance(kept, int) and kept != rows:
            words.append(f"{kept:,} here")
        if (share := shares.get(shown["path"])) is not None:
            weight, part, passes = (n if isinstance(n := share.get(k), int | float) else math.nan for k in ("weight", "share", "passes"))
            words.append(f"weight {weight:g}: {part:.1%} of an epoch, each row {passes:.3g} times")
        shown["counts"] = ", ".join(words)
    return found


def examples(record: RunRecord) -> list[dict[str, Any]]:
    """Training rows as parts of text, each marked as learnt or not."""
    found = []
    for row in record.examples:
        parts = [(str(part.get("text", "")), bool(part.get("learnt"))) for part in list_of(row.get("parts")) if isinstance(part, dict)]
        if parts:
            found.append({key: row.get(key) for key in ("which", "tokens", "learnt", "left_out")} | {"parts": parts})
    return found
