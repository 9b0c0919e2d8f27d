"""`isotype diff RUN1 RUN2`: which settings differ, and what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .app import RUNS


def register(app: typer.Typer) -> None:
    app.command(name="diff", rich_help_panel=RUNS)(diff)


def diff(
    first: Annotated[Path, typer.Argument(help="A run's folder.")],
    second: Annotated[Path, typer.Argument(help="Another run's folder.")],
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compare two runs key by key, and their losses.

    Examples:

        isotype diff runs/one runs/two
    """
    from ..config.compare import compare
    from ..config.load import load
    from ..report.record import read_run

    for run in (first, second):
        if not (run / "resolved.yaml").is_file():
            raise UsageError(f"{run}: no resolved.yaml there: not a run folder")
    one, two = (load(run / "resolved.yaml", resolved=True).config for run in (first, second))
    changes = [c for c in compare(one, two) if c.key != "run.folder"]
    records = [read_run(run) for run in (first, second)]
    results = [
        {
            "loss": r.curve("loss")[-1][1] if r.curve("loss") else None,
            "eval_loss": min((v for _, v in r.curve("eval_loss")), default=None),
            "steps": int(r.curve("loss")[-1][0]) if r.curve("loss") else 0,
            "trained_seconds": r.result.get("trained_seconds"),
        }
        for r in records
    ]
    if json_output:
        settings = {c.key: [c.old, c.new] for c in changes}
        print(json.dumps({"settings": settings, "results": {str(first): results[0], str(second): results[1]}}))
        return
    width = max([len(c.key) for c in changes] + [len("trained_seconds")]) + 2
    print(f"{'':{width}}{first!s:>24}  {second!s:>24}")
    for c in changes:
        print(f"{c.key:{width}}{c.old!s:>24}  {c.new!s:>24}")
    for key in results[0]:
        print(f"{key:{width}}" + "  ".join(f"{_shown(r[key]):>24}" for r in results))


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
