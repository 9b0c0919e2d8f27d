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

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "status", "step", "loss", "eval loss", "precision", "model", "data"):
        table.add_column(column, justify="right" if column in ("step", "loss", "eval loss") else "left", overflow="fold")
    for run in runs:
        numbers = [f"{run[key]:.4f}" if isinstance(run[key], float) else "" for key in ("loss", "eval_loss")]
        table.add_row(run["folder"], run["status"], str(run["step"]), *numbers, run["precision"], run["model"], run["data"])
    Console().print(table)


def _row(folder: Path) -> dict[str, Any]:
    from ..report.record import read_run

    record = read_run(folder)
    losses = record.curve("loss")
    data = record.setting("data", "train")
    return {
        "folder": str(folder),
        "status": record.status,
        "step": int(losses[-1][0]) if losses else 0,
        "loss": record.last("loss"),
        "eval_loss": record.best("eval_loss"),
        "precision": str(record.precision.get("precision", "")),
        "model": Path(str(record.setting("model", "name") or "built")).name,
        "data": ", ".join(Path(str(d)).name for d in (data if isinstance(data, list) else [data])),
    }
