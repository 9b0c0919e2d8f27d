"""`isotype trace`: runs a program unchanged and says which tensor got which dtype where, and what went wrong."""

from __future__ import annotations

import traceback
from pathlib import Path

import typer

from ..errors import UsageError
from .app import DOCTOR

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
        fail_on: str = typer.Option("error", help="Exit 1 from this severity on: error, warning or note."),
    ) -> None:
        from ..doctor.trace.program import Target, run, stdout_to_stderr
        from ..doctor.output import answer
        from ..finding import Severity

        parsed = Target.parse(target)
        arguments = list(context.args)
        if parsed.function is not None and arguments:
            # nothing here is the program's: options may stand behind FILE.py:FUNCTION too
            inner = context.command.make_context("trace", [*arguments, target], parent=context.parent)
            if inner.args:
                raise UsageError(f"{target}: a function takes no arguments, got {' '.join(inner.args)}")
            json_output, fail_on = json_output or inner.params["json_output"], inner.params["fail_on"] if "fail_on" in " ".join(arguments).replace("-", "_") else fail_on
        try:
            level = Severity.parse(fail_on)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if json_output:
            with stdout_to_stderr():
                outcome = run(parsed, arguments if parsed.function is None else ())
        else:
            outcome = run(parsed, arguments if parsed.function is None else ())
        if outcome.error is not None and not isinstance(outcome.error, SystemExit):
            traceback.print_exception(outcome.error)
        status = answer(outcome.findings, subject=Path(target).name, json_output=json_output, fail_on=level)
        raise typer.Exit(status or outcome.status)
