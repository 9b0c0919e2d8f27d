"""`isotype doctor PATH`: everything that applies to what is there."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..finding import Severity
from .app import DOCTOR

HELP = """Everything the doctor can say about a folder: configurations, source code, logs, Triton kernels.

Kernels are compiled, for which their files are imported; `--static` leaves that out.

Examples:

    isotype doctor .

    isotype doctor my_trainer --static --fail-on warning
"""


def register(app: typer.Typer) -> None:
    app.command("doctor", help=HELP, rich_help_panel=DOCTOR)(doctor)


def doctor(
    path: Annotated[Path, typer.Argument(help="A folder or a file.")] = Path("."),
    static: Annotated[bool, typer.Option("--static", help="Import nothing: leave kernels out.")] = False,
    fail_on: Annotated[str, typer.Option("--fail-on", help="Exit 1 from this severity on: error, warning or note.")] = "error",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from ..doctor.everything import visit
    from ..doctor.output import answer

    try:
        threshold = Severity.parse(fail_on)
    except ValueError as error:
        raise UsageError(f"--fail-on: {error}") from None
    # what imported files print must not mix with the answer
    with contextlib.redirect_stdout(sys.stderr):
        visits = visit(path, static=static)
    findings = [finding for one in visits for finding in one.findings]
    shown = findings if json_output else [f for f in findings if f.severity > Severity.NOTE]
    parts = [{"part": one.part, "subject": one.subject, "findings": len(one.findings)} for one in visits]
    status = answer(shown, subject=str(path), json_output=json_output, fail_on=threshold, parts=parts)
    if not json_output:
        for one in visits:
            notes = sum(f.severity == Severity.NOTE for f in one.findings)
            told = f"{len(one.findings) - notes} findings" + (f", {notes} notes (isotype {one.part} shows them)" if notes else "")
            print(f"  {one.part:9}{one.subject}: {told}")
    raise typer.Exit(status)
