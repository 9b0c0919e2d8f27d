"""`isotype doctor PATH_OR_LOG`: runs every part of the doctor that applies; `isotype doctor check` and the like are the parts."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import UsageError
from ..finding import Severity, worst_first
from ..wording import counted
from . import doctor_parts
from .app import DOCTOR, prepare
from .doctor_parts import FailOn, Json

if TYPE_CHECKING:
    from ..data.cache_folder import Entry

_LOOK = "look"  # the command behind `isotype doctor PATH`

HELP = """Find dtype faults in any training code, configuration or log.

`isotype doctor PATH_OR_LOG` looks at what it is given and runs what applies: check on configurations and programs, explain on logs (also
from standard input), kernels on files with Triton kernels. It names the command for what only you can run: conform, trace.

    isotype doctor .

    isotype doctor train.log

    python train.py 2>&1 | isotype doctor

    isotype doctor my_trainer --static --fail-on warning

    isotype doctor check configs/ --device t4

    isotype doctor explain CF001

Files with kernels are imported to compile them, each in a separate process with limits on time and memory; `--static` leaves them out.
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
    doctor.command()(cache)
    doctor.command(_LOOK, help=HELP, hidden=True)(look)
    app.add_typer(doctor, name="doctor", rich_help_panel=DOCTOR)


def look(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH_OR_LOG", help="A folder, a file, `-` (standard input), an error's text, a code.", show_default=False),
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="Import nothing: leave kernels out.")] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Time for compiling kernels; those that are not reached are counted.")
    ] = 120.0,
    fail_on: FailOn = "error",
    json_output: Json = False,
) -> None:
    from ..doctor.front_door import Visit, count, visit, visit_log
    from ..doctor.output import answer, threshold

    least = threshold(fail_on)
    subject = " ".join(what or ["-"])
    visits: list[Visit]
    if doctor_parts.CODE.match(subject) and not Path(subject).exists():
        doctor_parts.show_page(subject.upper(), json_output)
        return
    if subject == "-":
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal's stream, or a test's that has the method
        subject, visits = "standard input", [visit_log(sys.stdin)]
    elif " " in subject and not Path(subject[:200]).exists():
        if what and len(what) > 1 and any(Path(one).exists() for one in what):
            raise UsageError(f"one path at a time, got {len(what)}", fix="isotype doctor check PATH PATH, or the folder that holds them")
        subject, visits = "the text", [visit_log(subject.splitlines())]
    else:
        tell, wipe = _progress()
        try:
            visits = visit(Path(subject), static=static, seconds=seconds, tell=tell)
        finally:
            wipe()
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
            left_out = [f for f in one.findings if f.code == "KN000"]
            notes = sum(f.severity == Severity.NOTE for f in one.findings) - len(left_out)
            told = count(len(one.findings) - notes - len(left_out), "finding")
            codes = Counter(f.code for f in worst_first(one.findings) if f.severity > Severity.NOTE)
            told += f" ({', '.join(f'{number} {code}' for code, number in codes.items())})" if len(one.findings) > 1 and codes else ""
            told += f", {count(notes, 'note')}{'' if whole else f' (isotype doctor {one.part} shows them)'}" if notes else ""
            print(f"  {one.part:9}{one.subject}: {told}" if one.looked_at else f"  {one.part:9}{one.subject}")
            for finding in left_out[:5]:
                print(f"           {finding.place}: {finding.message}")
            if len(left_out) > 5:
                print(f"           and {len(left_out) - 5} more (--json)")
        if not any(one.looked_at for one in visits):
            print("  nothing here is a configuration, a program, a log (*.log, *.err, *.out) or a Triton kernel")
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


def cache(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder given as data.cache; the user's own by default.", show_default=False)
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove what is shown.")] = False,
    older: Annotated[
        float | None, typer.Option("--older", min=0.0, metavar="DAYS", help="Only what was not used for so many days.", show_default=False)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show the stored tokenised data and compiled C++ kernels, or remove them. Runs make again what they miss.

    Tokenised data takes at most ISOTYPE_CACHE_GB (20) gigabytes, and pictures that rows brought as bytes take as much: those go first that
    were not used for longest.

    Examples:

        isotype doctor cache

        isotype doctor cache --clear --older 30

        ISOTYPE_CACHE_GB=100 isotype train run.yaml
    """
    from ..data.cache_folder import cache_folder

    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder}: " + ("not a folder" if folder.exists() else "no such folder"))
    before = time.time() - older * 86400 if older is not None else float("inf")
    place = folder or cache_folder("auto")
    answer: dict[str, Any] = {"folder": None, "entries": []}
    if place is not None:
        answer = _tokens(place, clear, before, quiet=json_output)
    elif not json_output:
        print("no tokenised data is kept: ISOTYPE_CACHE=none")
    if folder is None:
        answer["kernels"] = _kernels(clear, before, quiet=json_output)
    if json_output:
        print(json.dumps(answer))


def _tokens(place: Path, clear: bool, before: float, *, quiet: bool) -> dict[str, Any]:
    from ..data.cache_folder import PICTURES, bound, entries, kept_pictures, remove
    from ..report.words import bytes_written

    most = bound()
    found = [entry for entry in entries(place, described=True) if entry.used <= before]
    gone = [entry for entry in found if remove(entry)] if clear else []
    total = sum(entry.bytes for entry in (gone if clear else found))
    if not quiet and clear:
        print(f"{place}: removed {_counted(len(gone), 'entry', 'entries')}, {bytes_written(total)}")
    elif not quiet:
        for entry in reversed(found):
            print(_line(entry))
        there = _counted(len(found), "entry", "entries")
        print(f"{place}: {there}, {bytes_written(total)}; at most {bytes_written(most)} are kept (ISOTYPE_CACHE_GB)")
    pictures = [entry for entry in kept_pictures(place / PICTURES) if entry.used <= before]
    pictures = [entry for entry in pictures if remove(entry)] if clear else pictures
    if not quiet and pictures:
        size = bytes_written(sum(entry.bytes for entry in pictures))
        print(f"{place / PICTURES}: {'removed ' if clear else ''}{_counted(len(pictures), 'picture', 'pictures')}, {size}")
    shown = [{"path": str(e.path), "source": e.source, "rows": e.rows, "bytes": e.bytes, "used": round(e.used)} for e in found]
    return {"folder": str(place), "bound": most, "bytes": total, "entries": shown, "removed": len(gone), "pictures": len(pictures)}


def _kernels(clear: bool, before: float, *, quiet: bool) -> dict[str, Any]:
    """A library is used by its compiler, processor and version of Isotype alone; a process that has loaded it keeps it."""
    from ..ops.cpp import built_files, folder
    from ..report.words import bytes_written

    libraries, total, removed = 0, 0, 0
    for path in built_files():
        with suppress(OSError):  # another process removed it
            stat = path.stat()
            if stat.st_mtime > before:
                continue
            if clear:
                path.unlink()
            libraries, total, removed = libraries + (path.suffix == ".so"), total + stat.st_size, removed + clear
    if not quiet:
        said = f"{_counted(libraries, 'compiled kernel', 'compiled kernels')}, {bytes_written(total)}"
        print(f"{folder()}: removed {said}" if clear else f"{folder()}: {said}")
    return {"folder": str(folder()), "libraries": libraries, "bytes": total, "removed": removed}


def _line(entry: Entry) -> str:
    from ..report.words import bytes_written

    rows = counted(entry.rows, "row") if entry.rows is not None else "? rows"
    age = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
    return f"{bytes_written(entry.bytes):>8}  {rows:>16}  last used {age}  {entry.source or entry.path.name}"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
