"""`isotype kernels`: every Triton kernel of a file, a module or a test run, compiled for its dtype matrix without a GPU."""

from __future__ import annotations

import sys

import typer

from ..errors import UsageError
from ..finding import Severity
from .app import DOCTOR
from .shared_options import threshold

_HELP = """Compile Triton kernels for every dtype and several GPUs, without a GPU, and explain what fails.

TARGET is a file or module (signatures inferred), `file.py:kernel`, a wrapper `file.py:function` (called with CPU tensors while its
launches are trapped), a `file.py:build` that returns a kernel with MATRIX, CONSTEXPRS and TARGETS beside it or (function, inputs),
or `-- pytest ...` to record the launches of tests.

    isotype kernels kernels.py
    isotype kernels kernels.py:silu_mul --arch sm_80,sm_90,sm_100,gfx942
    isotype kernels my_package.ops.rms_norm --binary
    isotype kernels -- pytest tests/test_ops.py -k norm
"""


def register(app: typer.Typer) -> None:
    app.command("kernels", help=_HELP, rich_help_panel=DOCTOR)(kernels)


def kernels(
    target: list[str] = typer.Argument(  # noqa: B008
        ..., metavar="TARGET", help="file.py, module, file.py:name, or `-- pytest ...`", show_default=False
    ),
    arch: str = typer.Option(
        "", "--arch", help="Architectures, with commas: sm_80,sm_90,sm_100,gfx942 (default: TARGETS in the file, or sm_90)."
    ),
    binary: bool = typer.Option(
        False, "--binary", help="Also compile to machine code: registers, spills, shared memory (takes seconds per kernel and target)."
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
    fail_on: str = typer.Option("error", "--fail-on", help="Exit 1 from this severity on: error, warning or note."),
    notes: bool = typer.Option(False, "--notes", help="Also print notes in full: latent combinations, int32 offsets."),
) -> None:
    import contextlib
    import warnings

    from ..doctor.output import answer

    least = threshold(fail_on)
    targets = [word.strip() for word in arch.split(",") if word.strip()] or None
    warnings.filterwarnings("ignore", module="triton")
    # what imported code prints must not end up in the JSON
    with contextlib.redirect_stdout(sys.stderr):
        if target[0] == "pytest":
            from ..doctor.kernels.recorder import check_pytest

            report = check_pytest(target[1:], targets, binary=binary)
        elif len(target) > 1:
            raise UsageError(f"one TARGET at a time, got {len(target)}: {' '.join(target)} (write `-- pytest ...` to record tests)")
        else:
            from ..doctor.kernels.target import check_target

            report = check_target(target[0], targets, binary=binary)
    names = ", ".join(report.kernels[:6]) + (f" and {len(report.kernels) - 6} more" if len(report.kernels) > 6 else "")
    subject = f"{len(report.kernels)} kernel{'s' if len(report.kernels) != 1 else ''} ({names}), {report.compiled} compilations"
    shown = report.findings
    if not json_output:
        hidden = [] if notes else [f for f in shown if f.severity == Severity.NOTE]
        shown = [f for f in shown if f not in hidden]
        for remark in dict.fromkeys([*report.remarks, *report.usages]):
            print(f"  {remark}")
        if hidden:
            subject += f"; {len(hidden)} note{'s' if len(hidden) != 1 else ''} not shown (--notes)"
    facts = {name: getattr(report, name) for name in ("kernels", "compiled", "failed", "usages", "remarks")}
    status = answer(shown, subject=subject, json_output=json_output, fail_on=least, **facts)
    raise typer.Exit(status)
