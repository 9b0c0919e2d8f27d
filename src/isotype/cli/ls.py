"""`isotype ls`: the runs in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from .app import RUNS


def register(app: typer.Typer) -> None:
    app.command(name="ls", rich_help_panel=RUNS)(ls)


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
    from rich.console import Console
    from rich.table import Table

    cells = [[_cell(run[key]) for key in _COLUMNS] for run in runs]
    console = Console()
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(_COLUMNS.values())]
    # the next command needs the name of a run: on a narrow screen model and data are cut instead
    left = max(16, console.width - sum(widths[:-2]) - 2 * len(widths)) if console.is_terminal else 2 * max(widths)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS.values():
        right, last = name in ("step", "loss", "eval loss"), name in ("model", "data")
        table.add_column(
            name,
            justify="right" if right else "left",
            overflow="ellipsis" if last else "fold",
            no_wrap=last,
            max_width=left // 2 if last else None,
        )
    for row in cells:
        table.add_row(*row)
    console.print(table) if console.is_terminal else Console(width=sum(widths) + 2 * len(widths)).print(table)


_COLUMNS = {"folder": "run", "status": "status", "step": "step", "loss": "loss", "eval_loss": "eval loss", "precision": "precision",
            "model": "model", "data": "data"}  # fmt: skip


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
