"""`isotype doctor PATH`: runs every part of the doctor that applies to the files there."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..finding import Severity, exit_code, worst_first
from .app import DOCTOR
from .shared_options import refuse_two_forms, threshold

HELP = """Check a folder with every part of the doctor: configurations, logs, Triton kernels.

Files with kernels are imported to compile them, each in a separate process with limits on time and memory; `--static` leaves them out.

Examples:

    isotype doctor .

    isotype doctor my_trainer --static --fail-on warning

    isotype doctor . --sarif > isotype.sarif
"""


def register(app: typer.Typer) -> None:
    app.command("doctor", help=HELP, rich_help_panel=DOCTOR)(doctor)


def doctor(
    path: Annotated[Path, typer.Argument(help="A folder or a file.")] = Path("."),
    static: Annotated[bool, typer.Option("--static", help="Import nothing: leave kernels out.")] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Time for compiling kernels; those that are not reached are counted.")
    ] = 120.0,
    fail_on: Annotated[str, typer.Option("--fail-on", help="Exit 1 from this severity on: error, warning or note.")] = "error",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0.")] = False,
) -> None:
    from ..doctor.everything import count, visit
    from ..doctor.output import answer

    least = threshold(fail_on)
    refuse_two_forms(json_output, sarif)
    tell, wipe = _progress()
    try:
        visits = visit(path, static=static, seconds=seconds, tell=tell)
    finally:
        wipe()
    findings = [finding for one in visits for finding in one.findings]
    if sarif:
        from ..doctor.sarif import as_sarif

        print(json.dumps(as_sarif(worst_first(findings)), indent=1))
        raise typer.Exit(exit_code(findings, least))
    shown = findings if json_output else [f for f in findings if f.severity > Severity.NOTE]
    parts = [{"part": one.part, "subject": one.subject, "findings": len(one.findings)} for one in visits]
    status = answer(shown, subject=str(path), json_output=json_output, fail_on=least, parts=parts)
    if not json_output:
        for one in visits:
            left_out = [f for f in one.findings if f.code == "KN000"]
            notes = sum(f.severity == Severity.NOTE for f in one.findings) - len(left_out)
            told = count(len(one.findings) - notes - len(left_out), "finding")
            codes = Counter(f.code for f in worst_first(one.findings) if f.severity > Severity.NOTE)
            told += f" ({', '.join(f'{number} {code}' for code, number in codes.items())})" if len(one.findings) > 1 and codes else ""
            told += f", {count(notes, 'note')} (isotype {one.part} shows them)" if notes else ""
            print(f"  {one.part:9}{one.subject}: {told}" if one.looked_at else f"  {one.part:9}{one.subject}")
            for finding in left_out[:5]:
                print(f"           {finding.place}: {finding.message}")
            if len(left_out) > 5:
                print(f"           and {len(left_out) - 5} more (--json)")
        if not any(one.looked_at for one in visits):
            print("  nothing here is a configuration, a Python file, a log (*.log, *.err, *.out) or a Triton kernel")
    raise typer.Exit(status)


def _progress() -> tuple[Callable[[str], None], Callable[[], None]]:
    """Shows the progress on stderr: on a terminal in one line that is overwritten, elsewhere in a new line every ten seconds."""
    terminal, last = sys.stderr.isatty(), [time.monotonic()]

    def tell(line: str) -> None:
        if terminal:
            sys.stderr.write("\r\x1b[2K" + line[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()
        elif time.monotonic() - last[0] > 10:
            last[0] = time.monotonic()
            print(line, file=sys.stderr)

    def wipe() -> None:
        if terminal:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    return tell, wipe
