"""`isotype report RUN`: writes the page of a run again, also of one that died."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .app import RUNS


def register(app: typer.Typer) -> None:
    app.command(name="report", rich_help_panel=RUNS)(report)


def report(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write here instead of RUN/report.html.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help='Print `{"report": PATH}`.')] = False,
) -> None:
    """Write report.html of a run: curves, precision declared and observed, samples, data, how to load the result.

    One file, no network, no script. It is made from the files in the run folder, so a run that failed or is still going has one too.

    Examples:

        isotype report runs/my-run

        isotype report runs/my-run --out /tmp/page.html
    """
    from ..report import write_report

    path = write_report(run, out)
    print(json.dumps({"report": str(path)}) if json_output else f"report    {path}")
