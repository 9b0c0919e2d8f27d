"""`isotype explain`: a code's page, or the cause of an error in a log. Imports no torch."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .app import DOCTOR

_CODE = re.compile(r"^[A-Za-z]{2,3}\d{3}$")


def register(app: typer.Typer) -> None:
    app.command(
        name="explain",
        rich_help_panel=DOCTOR,
        help="The cause of an error in a log, or the page of a code.\n\n"
        "    isotype explain < train.log\n\n"
        "    isotype explain train.log\n\n"
        '    isotype explain "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"\n\n'
        "    isotype explain CF001",
    )(explain)


def explain(
    what: Annotated[
        list[str] | None,
        typer.Argument(help="A code (CF001), a log file, or an error's text; standard input when left out.", show_default=False),
    ] = None,
    list_codes: bool = typer.Option(False, "--list", help="List every code with its title."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    given = list(what or [])
    if list_codes or (not given and sys.stdin.isatty()):
        _list(json_output)
        return
    if len(given) == 1 and _CODE.match(given[0]) and not Path(given[0]).exists():
        _page(given[0].upper(), json_output)
        return
    from ..doctor.explain import explain as explain_lines
    from ..doctor.output import answer

    source: str | None = None
    if not given or given == ["-"]:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal's stream, or a test's that has the method
        findings = explain_lines(sys.stdin)
    elif len(given) == 1 and _is_file(given[0]):
        source = given[0]
        try:
            with open(source, encoding="utf-8", errors="replace") as log:
                findings = explain_lines(log, source=source)
        except OSError as error:
            raise UsageError(f"{source}: {error.strerror}") from error
    else:
        text = " ".join(given)
        if len(given) == 1 and re.fullmatch(r"[\w./~-]+\.(?:log|txt|out|err)", text):
            raise UsageError(f"{text}: no such file")
        findings = explain_lines(text.splitlines())
    raise typer.Exit(answer(findings, subject=source or "explain", json_output=json_output))


def _is_file(text: str) -> bool:
    try:
        if Path(text).is_dir():
            raise UsageError(f"{text} is a folder: give a log file")
        return Path(text).exists()
    except OSError:  # a pasted text is longer than a file name may be
        return False


def _page(code: str, json_output: bool) -> None:
    from ..pages import codes, page

    text = page(code)
    if text is None:
        near = [c for c in codes() if c[:2] == code[:2]]
        raise UsageError(
            f"{code} is not a code" + (f"; {code[:2]} codes are {', '.join(near)}" if near else "; isotype explain --list shows all")
        )
    print(json.dumps({"findings": [], "code": code, "page": text}, indent=1) if json_output else text.rstrip())


def _list(json_output: bool) -> None:
    from ..pages import codes, page

    titles = {code: (page(code) or "").partition("\n")[0].removeprefix("# ").removeprefix(code).lstrip(": ") for code in codes()}
    print(
        json.dumps({"findings": [], "codes": titles}, indent=1)
        if json_output
        else "\n".join(f"{code}  {title}" for code, title in titles.items())
    )
