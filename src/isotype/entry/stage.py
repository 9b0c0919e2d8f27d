"""One stage of a quickstart: an ordinary run, which is not repeated when it is finished, and resumed when it was interrupted."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..training.callbacks import Callback


def run_stage(run: Path, file: Path, *, json_output: bool, callbacks: Sequence[Callback] = ()) -> int:
    """Trains as `file` says, in the folder `run`. Returns the exit status: 0, or 130 when interrupted and saved.

    callbacks    called after steps, evaluations, saves and samples
    json_output  everything goes to stderr, since stdout belongs to the one object that the quickstart prints at its end
    """
    from ..config.load import load
    from .start import start

    with contextlib.redirect_stdout(sys.stderr) if json_output else contextlib.nullcontext():
        if finished(run):
            print(f"done before: {run}")
            return 0
        return start(load(file, [], {}), resume=run if (run / "resolved.yaml").is_file() else None, callbacks=callbacks).status


def finished(run: Path) -> bool:
    try:
        done: bool = json.loads((run / "result.json").read_text(encoding="utf-8")).get("status") == "done"
        return done
    except (OSError, ValueError, AttributeError):
        return False


def quoted(value: object) -> str:
    """A YAML scalar: JSON's strings are YAML's double-quoted ones."""
    return json.dumps(str(value))
