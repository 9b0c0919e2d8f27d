"""`isotype ls`: the runs in a folder, or what two of them differ in."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError


def ls(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Where to look, two levels deep (runs); with --diff two runs.", show_default=False)
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Compare two runs: settings, precision, losses.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List runs: status, steps, losses, precision, data. With --diff compare two, key by key.

    A dtype is of the tensors observed in that role; how many there were depends on steps and lengths, and is not compared.

    Examples:

        isotype ls

        isotype ls quickstart --json

        isotype ls --diff runs/one runs/two
    """
    given = folders or [Path("runs")]
    if diff:
        if len(given) != 2:
            raise UsageError(f"--diff compares two runs, got {len(given)}", fix="isotype ls --diff RUN RUN")
        _diff(*given, json_output=json_output)
        return
    if len(given) > 1:
        raise UsageError("one folder at a time", fix="isotype ls FOLDER, or isotype ls --diff RUN RUN")
    folder = given[0]
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


def _diff(first: Path, second: Path, *, json_output: bool) -> None:
    from ..config.compare import compare
    from ..config.load import load
    from ..config.yaml_text import write_value
    from ..report.record import read_run
    from ..report.verdicts import precision_differences
    from ..runs.folder import require_run

    one, two = (load(require_run(run) / "resolved.yaml", resolved=True).config for run in (first, second))
    changes = [c for c in compare(one, two) if c.key != "run.folder"]
    records = [read_run(run) for run in (first, second)]
    results = [
        {
            "loss": r.last("loss"),
            "eval_loss": r.best_evaluation,
            "steps": int(r.curve("loss")[-1][0]) if r.curve("loss") else 0,
            "trained_seconds": r.result.get("trained_seconds"),
        }
        for r in records
    ]
    missing = [str(run) for run, record in zip((first, second), records) if not record.precision.get("declared")]
    precision = {} if missing else precision_differences(records[0].precision, records[1].precision)
    if json_output:
        settings = {c.key: [c.old, c.new] for c in changes}
        results_of = {str(first): results[0], str(second): results[1]}
        print(json.dumps({"settings": settings, "precision": precision or None, "results": results_of}))
        return
    rows = [(c.key, write_value(c.old), write_value(c.new)) for c in changes]
    rows += [(f"{of} {role}", _in_words(a), _in_words(b)) for of, roles in precision.items() for role, (a, b) in roles.items()]
    width = max(len(key) for key in (*(key for key, *_ in rows), "trained_seconds")) + 2
    rows += [(key, _shown(results[0][key]), _shown(results[1][key])) for key in results[0]]
    column = max(len(text) for text in (str(first), str(second), *(value for _, *values in rows for value in values)))
    print(f"{'':{width}}{first!s:>{column}}  {second!s:>{column}}")
    for key, one_value, two_value in rows:
        print(f"{key:{width}}{one_value:>{column}}  {two_value:>{column}}".rstrip())
    if not changes:
        print("every setting is the same")
    if missing:
        print(f"no precision was recorded in {' and '.join(dict.fromkeys(missing))}: it is not compared")
    elif not any(precision.values()):
        print("declared and observed dtypes are the same")


def _in_words(value: str | list[str] | None) -> str:
    return " ".join(value) if isinstance(value, list) else value or "not observed"


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
