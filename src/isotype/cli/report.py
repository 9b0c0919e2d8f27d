"""`isotype report RUN`: writes the report of a run again, also of a run that failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write here instead of RUN/report.html; the picture goes beside it.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help='Print `{"report": PATH, "picture": PATH}`.')] = False,
) -> None:
    """Write report.html and report.png of a run: curves, precision declared and observed, preflight, data, samples, how to load the result.

    The page is one file, no network, no script; the picture shows its essentials in a chat window. Both are made from the files in the run
    folder, so a run that failed or is still going has them too.

    Examples:

        isotype report runs/my-run

        isotype report runs/my-run --out /tmp/page.html
    """
    from ..report import write_report

    written = write_report(run, out)
    if json_output:
        print(json.dumps({"report": str(written.page), "picture": str(written.picture) if written.picture else None}))
        return
    print(f"report    {written.page}")
    print(f"picture   {written.picture or f'not written: {written.why_no_picture}'}")
