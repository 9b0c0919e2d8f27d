"""`isotype quickstart`: from nothing to a tuned model and its report, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import ENGINE


def register(app: typer.Typer) -> None:
    app.command(name="quickstart", rich_help_panel=ENGINE)(quickstart)


def quickstart(
    folder: Annotated[Path, typer.Option("--folder", help="Where everything goes.")] = Path("quickstart"),
    json_output: Annotated[bool, typer.Option("--json", help="Progress on stderr, one JSON object on stdout.")] = False,
) -> None:
    """Train a small model on Python's own documentation, then a LoRA adapter on questions about it: offline, minutes on a CPU.

    Leaves the text, both configuration files, both runs and their reports in the folder. Given again, it goes on where it was.

    Examples:

        isotype quickstart

        isotype quickstart --folder /tmp/try
    """
    from ..quickstart import quickstart as start

    raise typer.Exit(start(folder, json_output=json_output))
