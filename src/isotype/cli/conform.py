"""`isotype conform FILE.py:NAME`: a differentiable function under every dtype combination a trainer produces."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Optional

import typer

from .app import DOCTOR
from .shared_options import threshold


def register(app: typer.Typer) -> None:
    app.command(name="conform", rich_help_panel=DOCTOR)(conform)


def conform(
    target: Annotated[str, typer.Argument(help="FILE.py:NAME or package.module:NAME; NAME defaults to `build`", show_default=False)],
    inputs: Annotated[Optional[str], typer.Option(help='inputs for a function: "fp32[4 16], int[4] < 8, 0.5"')] = None,  # noqa: UP045
    compile_backend: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--compile", help="also under torch.compile with this backend, e.g. aot_eager (slower, so off unless asked for)"),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    fail_on: Annotated[str, typer.Option(help="exit 1 at this severity: error, warning or note")] = "error",
) -> None:
    """Check an autograd.Function, a module or any callable under mixed precision.

    NAME is a `build()` that returns `(callable, inputs)`, or `(callable, inputs, {"reference": ..., "params": ..., "contract": ...})`;
    or the function itself, with `--inputs`. Triton code runs in the repaired interpreter where there is no GPU.

    Examples:

        isotype conform my_ops.py:build

        isotype conform my_ops.py:SwiGLU --inputs "fp32[4 16], fp32[4 16], fp32[8 16]"

        isotype conform torch.nn.functional:silu --inputs "bf16[4 16]" --json
    """
    least = threshold(fail_on)
    # output of the checked file goes to stderr, so that it does not mix with the answer
    with contextlib.redirect_stdout(sys.stderr):
        from ..doctor.output import answer
        from ..testing.amp.check import ampcheck
        from ..testing.amp.subjects import load_target, triton_interpreted_without_gpu

        loaded = load_target(target, inputs)
        with triton_interpreted_without_gpu():
            report = ampcheck(loaded.function, loaded.inputs, **loaded.options, compile=compile_backend, raises=False)
    status = answer(
        report.findings,
        subject=f"{target} ({report.tried} runs)",
        json_output=json_output,
        fail_on=least,
        subject_name=report.subject,
        tried=report.tried,
        refused=dict(report.refused),
        skipped=list(report.skipped),
    )
    raise typer.Exit(status)
