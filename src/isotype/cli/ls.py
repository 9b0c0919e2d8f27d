"""`isotype ls`: the runs in a folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError


def ls(
    folder: Annotated[Path, typer.Argument(help="Where to look, two levels deep.")] = Path("runs"),
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List runs: status, steps, losses, precision, data.

    Examples:

        isotype ls

        isotype ls quickstart --json
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: " + ("not a folder" if folder.exists() else "no such folder"), fix="isotype ls FOLDER, where runs are")
    runs = [
        _row(path.parent)
        for path in sorted([*folder.glob("resolved.yaml"), *folder.glob("*/resolved.yaml"), *folder.glob("*/*/resolved.yaml")])
    ]
    if json_output:
        print(json.dumps({"runs": runs}))
        return
    if not runs:
        print(f"{folder}: no runs here, nor two levels below")
        return
    rows = [list(_COLUMNS.values()), *([_cell(run[key]) for key in _COLUMNS] for run in runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    # model and data, which come last, are cut on a narrow screen
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        cells = [cell.rjust(width) if name in _RIGHT else cell.ljust(width) for name, cell, width in zip(_COLUMNS, row, widths)]
        print("  ".join(cells)[:most].rstrip())


_COLUMNS = {"folder": "run", "status": "status", "step": "step", "loss": "loss", "eval_loss": "eval loss", "precision": "precision",
            "model": "model", "data": "data"}  # fmt: skip
_RIGHT = ("step", "loss", "eval_loss")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _row(folder: Path) -> dict[str, Any]:
    from ..config.sources import short_names
    from ..report.record import read_run

    record = read_run(folder)
    losses = record.curve("loss")
    return {
        "folder": str(folder),
        "status": record.status,
        "step": int(losses[-1][0]) if losses else 0,
        "loss": record.last("loss"),
        "eval_loss": record.best_evaluation,
        "precision": str(record.precision.get("precision", "")),
        "model": Path(str(record.setting("model", "name") or "built")).name,
        "data": short_names(record.setting("data", "train") or record.setting("images", "train")),
    }
