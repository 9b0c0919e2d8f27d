"""`isotype lint PATH...`: dtype faults in source code, found without importing it; with `--prove`, also by executing parts of it in a
separate process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .app import DOCTOR
from .shared_options import refuse_two_forms, threshold

HELP = """Find dtype faults in source code; nothing is imported, and nothing is run without `--prove`.

Each finding says how sure it is. `reached`: a caller in the repository, or the contract of a framework, leads there. `proved`: the
function was also executed, and failed or lost precision. `possible`: nobody is seen to lead there; shown by `--possible` only, as notes.

Examples:

    isotype lint src train.py

    isotype lint src --fix                      # apply the fixes that are safe

    isotype lint src --select LT002,LT004       # these rules only

    isotype lint src --sarif > isotype.sarif    # for code scanning

    isotype lint src --prove                    # execute what can be cut out of the files, in a process of its own

    isotype lint src --possible                 # also what nothing is seen to reach, as notes

    isotype lint --rules                        # every rule, and whether it is on

Silence one line with `# isotype: ignore[LT004] reason`, a file with `# isotype: ignore-file[LT004] reason`; configure in
`[tool.isotype.lint]` of pyproject.toml (select, extend-select, ignore, exclude, possible, per-file-ignores). Exit status 1 when there is a
finding of `--fail-on` severity or worse.
"""


def lint(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files and folders; the current folder when none is given.", show_default=False)
    ] = None,
    fix: bool = typer.Option(False, "--fix", help="Apply the safe fixes, then report what is left (needs the extra `fix`)."),
    unsafe_fixes: bool = typer.Option(False, "--unsafe-fixes", help="With --fix: also those that change computed values."),
    select: str = typer.Option("", help="Only these codes or prefixes, comma separated; ALL includes those off by default."),
    extend_select: str = typer.Option("", help="These as well."),
    ignore: str = typer.Option("", help="Never these."),
    exclude: str = typer.Option("", help="Glob patterns of files and folders to leave out, comma separated."),
    possible: bool = typer.Option(False, "--possible", help="Also show, as notes, findings of the grade `possible`."),
    prove: bool = typer.Option(
        False, "--prove", help="Execute functions cut out of the files, in a bounded process of its own without network (needs torch)."
    ),
    config: Annotated[Path | None, typer.Option(help="A pyproject.toml; else the nearest with [tool.isotype].", show_default=False)] = None,
    fail_on: str = typer.Option("warning", help="Exit 1 from this severity on: error, warning or note."),
    json_output: bool = typer.Option(False, "--json", help="Print one JSON object."),
    sarif: bool = typer.Option(False, "--sarif", help="Print SARIF 2.1.0."),
    rules: bool = typer.Option(False, "--rules", help="List the rules and exit."),
) -> None:
    from ..doctor.lint.command import describe_rules, lint_command
    from ..doctor.output import answer
    from ..doctor.sarif import as_sarif
    from ..finding import exit_code

    if rules:
        print(describe_rules(json_output))
        return
    least = threshold(fail_on)
    refuse_two_forms(json_output, sarif)
    if unsafe_fixes and not fix:
        raise UsageError("--unsafe-fixes does something only together with --fix")
    run = lint_command(
        paths or [Path(".")],
        config_file=config,
        select=select.split(","),
        extend_select=extend_select.split(","),
        ignore=ignore.split(","),
        exclude=[pattern.strip() for pattern in exclude.split(",") if pattern.strip()],
        possible=possible,
        prove=prove,
        fix=("unsafe" if unsafe_fixes else "safe") if fix else None,
    )
    if sarif:
        print(json.dumps(as_sarif(run.findings), indent=1))
        raise typer.Exit(exit_code(run.findings, least))
    status = answer(
        run.findings,
        subject=run.subject,
        json_output=json_output,
        fail_on=least,
        files=run.files,
        fixed=run.fixed,
        rules=run.rules,
        possible=run.unsaid,
    )
    raise typer.Exit(status)


def register(app: typer.Typer) -> None:
    app.command("lint", help=HELP, rich_help_panel=DOCTOR)(lint)
