"""`isotype doctor PATH_OR_LOG`: runs every part of the doctor that applies; `isotype doctor check` and the like are the parts."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import UsageError
from ..finding import Severity, answer, threshold, worst_first
from ..wording import counted
from . import doctor_parts
from .app import DOCTOR, prepare
from .doctor_parts import FailOn, Json

_LOOK = "look"  # the command behind `isotype doctor PATH`

HELP = """Find dtype faults in any training code, configuration or log.

`isotype doctor PATH_OR_LOG` looks at what it is given and runs what applies: check on configurations and programs, explain on logs (also
from standard input). It imports and runs nothing, and names the command for what only you can run: kernels, conform, trace.

    isotype doctor .

    isotype doctor train.log

    python train.py 2>&1 | isotype doctor

    isotype doctor my_trainer --fail-on warning

    isotype doctor check configs/ --device t4

    isotype doctor explain CF001
"""


class _Doctor(TyperGroup):
    """A first word that is no command is something to look at; without any, standard input is, if it is not a terminal."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        asks_for_help = bool({"-h", "--help"} & set(arguments[:1]))
        if not asks_for_help and (arguments or not sys.stdin.isatty()) and arguments[:1] not in [[name] for name in self.commands]:
            arguments = [_LOOK, *arguments]
        return super().parse_args(context, arguments)


def register(app: typer.Typer) -> None:
    doctor = typer.Typer(cls=_Doctor, no_args_is_help=True, help=HELP, rich_markup_mode="markdown")

    @doctor.callback()
    def part(context: typer.Context) -> None:
        prepare(f"doctor {context.invoked_subcommand}")

    for command in (doctor_parts.check, doctor_parts.explain, doctor_parts.env):
        doctor.command()(command)
    doctor.command(context_settings=doctor_parts.SCRIPT_ARGUMENTS)(doctor_parts.trace)
    doctor.command()(doctor_parts.conform)
    doctor.command()(doctor_parts.kernels)
    doctor.command(_LOOK, help=HELP, hidden=True)(look)
    app.add_typer(doctor, name="doctor", rich_help_panel=DOCTOR)


def look(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH_OR_LOG", help="A folder, a file, `-` (standard input), an error's text, a code.", show_default=False),
    ] = None,
    fail_on: FailOn = "error",
    json_output: Json = False,
) -> None:
    from ..doctor.front_door import Visit, visit, visit_log

    least = threshold(fail_on)
    subject = " ".join(what or ["-"])
    visits: list[Visit]
    if doctor_parts.CODE.match(subject) and not Path(subject).exists():
        doctor_parts.show_page(subject.upper(), json_output)
        return
    if subject == "-":
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal's stream, or a test's that has the method
        subject, visits = "standard input", [visit_log(sys.stdin)]
    elif what and what[0].isidentifier() and not Path(what[0]).exists() and (len(what) == 1 or any(Path(one).exists() for one in what)):
        commands = "check, explain, env, trace, conform and kernels"
        raise UsageError(f"{what[0]}: no such file or folder, and no command of isotype doctor, which has {commands}")
    elif " " in subject and not Path(subject[:200]).exists():
        if what and len(what) > 1 and any(Path(one).exists() for one in what):
            raise UsageError(f"one path at a time, got {len(what)}", fix="isotype doctor check PATH PATH, or the folder that holds them")
        subject, visits = "the text", [visit_log(subject.splitlines())]
    else:
        visits = visit(Path(subject))
    findings = [finding for one in visits for finding in one.findings]
    whole = json_output or [one.part for one in visits] == ["explain"]  # of one log alone notes are told too
    shown = findings if whole else [f for f in findings if f.severity > Severity.NOTE]
    if not json_output:
        for table in filter(None, (one.shown for one in visits)):
            print(table + "\n")
    parts = [{"part": one.part, "subject": one.subject, "findings": len(one.findings)} for one in visits]
    status = answer(shown, subject=subject, json_output=json_output, fail_on=least, parts=parts)
    if not json_output:
        for one in visits:
            notes = sum(f.severity == Severity.NOTE for f in one.findings)
            told = counted(len(one.findings) - notes, "finding")
            codes = Counter(f.code for f in worst_first(one.findings) if f.severity > Severity.NOTE)
            told += f" ({', '.join(f'{number} {code}' for code, number in codes.items())})" if len(one.findings) > 1 and codes else ""
            told += f", {counted(notes, 'note')}{'' if whole else f' (isotype doctor {one.part} shows them)'}" if notes else ""
            print(f"  {one.part:9}{one.subject}: {told}" if one.looked_at else f"  {one.part:9}{one.subject}")
        if not any(one.looked_at for one in visits):
            print("  nothing here is a configuration, a program, a log (*.log, *.err, *.out) or a Triton kernel")
    raise typer.Exit(status)
