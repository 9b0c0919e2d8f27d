"""`isotype quickstart`: trains a small model and an adapter, offline, and writes their reports; with `--diffusion` a model that draws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..environment.hardware import wait_passively


def quickstart(
    folder: Annotated[Path | None, typer.Option("--folder", help="Where everything goes: quickstart, or quickstart-diffusion.")] = None,
    diffusion: Annotated[bool, typer.Option("--diffusion", help="Pictures: a small Flux, then a LoRA for a new shape.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Progress on stderr, one JSON object on stdout.")] = False,
) -> None:
    """Train a small model on Python's own documentation, then a LoRA adapter on questions about it: offline, minutes on a CPU.

    Leaves the text (or pictures), both configuration files, both runs and their reports in the folder. If the command is repeated, it
    continues where it stopped.

    Examples:

        isotype quickstart

        isotype quickstart --folder /tmp/try

        isotype quickstart --diffusion
    """
    wait_passively(always=True)
    folder = folder or Path("quickstart-diffusion" if diffusion else "quickstart")
    if diffusion:
        from ..quickstart import quickstart_pictures

        status = quickstart_pictures(folder, json_output=json_output)
    else:
        from ..quickstart import quickstart as start

        status = start(folder, json_output=json_output)
    raise typer.Exit(status)
