"""`isotype trace`: runs a program unchanged and says which tensor got which dtype where, and what went wrong."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from .app import DOCTOR
from .shared_options import threshold

_HELP = """Run a program unchanged; explain its dtype errors and find dtype faults that stay silent.

`isotype trace train.py --lr 1e-4`  a script with its own arguments (ours come before it)

`isotype trace case.py:run --json`  one function of a file, called without arguments

`isotype trace --map map.html train.py`  also draws the precision map
"""


def register(app: typer.Typer) -> None:
    @app.command(
        "trace",
        help=_HELP,
        rich_help_panel=DOCTOR,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    def trace(
        context: typer.Context,
        target: str = typer.Argument(..., metavar="SCRIPT.py|FILE.py:FUNCTION", help="What to run."),
        json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout; what the program prints goes to stderr."),
        map_file: Annotated[
            Path | None, typer.Option("--map", metavar="FILE.html", help="Draw the precision map there: one HTML file, no network.")
        ] = None,
        fail_on: str = typer.Option("error", help="Exit 1 from this severity on: error, warning or note."),
    ) -> None:
        from ..doctor.output import answer
        from ..doctor.trace.session import Target, plain_traceback, run, stdout_to_stderr

        parsed = Target.parse(target)
        arguments = list(context.args)
        if parsed.function is not None and arguments:
            # a function takes no arguments, so options after FILE.py:FUNCTION are Isotype's too
            with context.command.make_context("trace", [*arguments, target], parent=context.parent) as inner:
                if inner.args:
                    raise UsageError(f"{target}: a function takes no arguments, got {' '.join(inner.args)}")
                # compared by name: newer versions of typer have their own copy of click's enum
                given = {key: value for key, value in inner.params.items() if _source(inner, key) != "DEFAULT"}
            json_output, map_file = given.get("json_output", json_output), given.get("map_file", map_file)
            fail_on = given.get("fail_on", fail_on)
            arguments = []
        least = threshold(fail_on)
        if map_file is not None and not map_file.resolve().parent.is_dir():
            raise UsageError(f"--map {map_file}: no such folder")
        with stdout_to_stderr() if json_output else nullcontext():
            outcome = run(parsed, arguments, map=map_file)
        if outcome.error is not None and not isinstance(outcome.error, SystemExit):
            sys.stdout.flush()
            print(plain_traceback(outcome.error), file=sys.stderr, flush=True)
        status = answer(outcome.findings, subject=Path(target).name, json_output=json_output, fail_on=least)
        raise typer.Exit(status or outcome.status)


def _source(context: Any, key: str) -> str:
    """Where a parameter's value came from: COMMANDLINE, DEFAULT, ..."""
    return getattr(context.get_parameter_source(key), "name", "DEFAULT")
