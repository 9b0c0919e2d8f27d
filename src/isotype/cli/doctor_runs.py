"""The doctor's commands that run the code they are given: `trace`, `conform`, `kernels`."""

from __future__ import annotations

import contextlib
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ..errors import UsageError
from ..finding import Severity
from .doctor_reads import FailOn

_SCRIPT_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def register(doctor: typer.Typer) -> None:
    doctor.command("trace", help=_TRACE, context_settings=_SCRIPT_ARGUMENTS)(trace)
    doctor.command("conform", help=_CONFORM)(conform)
    doctor.command("kernels", help=_KERNELS)(kernels)


_TRACE = """Run a program unchanged; explain its dtype errors and find dtype faults that stay silent.

`isotype doctor trace train.py --lr 1e-4`  a script with its own arguments (ours come before it)

`isotype doctor trace case.py:run --json`  one function of a file, called without arguments
"""


def trace(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="SCRIPT.py|FILE.py:FUNCTION", help="What to run.")],
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout; what the program prints goes to stderr.")] = False,
    fail_on: FailOn = "error",
) -> None:
    from ..doctor.output import answer, threshold
    from ..doctor.trace.session import Target, plain_traceback, run, stdout_to_stderr

    parsed = Target.parse(target)
    arguments = list(context.args)
    if parsed.function is not None and arguments:
        # a function takes no arguments, so options after FILE.py:FUNCTION are Isotype's too
        with context.command.make_context("trace", [*arguments, target], parent=context.parent) as inner:
            if inner.args:
                raise UsageError(f"{target}: a function takes no arguments, got {' '.join(inner.args)}")
            # compared by name: newer versions of typer have their own copy of click's enum
            given = {key: value for key, value in inner.params.items() if _source(inner, key) != "DEFAULT"}
        json_output, fail_on = given.get("json_output", json_output), given.get("fail_on", fail_on)
        arguments = []
    least = threshold(fail_on)
    with stdout_to_stderr() if json_output else nullcontext():
        outcome = run(parsed, arguments)
    if outcome.error is not None and not isinstance(outcome.error, SystemExit):
        sys.stdout.flush()
        print(plain_traceback(outcome.error), file=sys.stderr, flush=True)
    status = answer(outcome.findings, subject=Path(target).name, json_output=json_output, fail_on=least)
    raise typer.Exit(status or outcome.status)


def _source(context: Any, key: str) -> str:
    """Where a parameter's value came from: COMMANDLINE, DEFAULT, ..."""
    return getattr(context.get_parameter_source(key), "name", "DEFAULT")


_CONFORM = """Check an autograd.Function, a module or any callable under every dtype combination that a trainer produces.

NAME is a `build()` that returns `(callable, inputs)`, or `(callable, inputs, {"reference": ..., "params": ..., "contract": ...})`;
or the function itself, with `--inputs`. Triton code runs in the repaired interpreter where there is no GPU.

    isotype doctor conform my_ops.py:build

    isotype doctor conform my_ops.py:SwiGLU --inputs "fp32[4 16], fp32[4 16], fp32[8 16]"

    isotype doctor conform torch.nn.functional:silu --inputs "bf16[4 16]" --json
"""


def conform(
    target: Annotated[str, typer.Argument(help="FILE.py:NAME or package.module:NAME; NAME defaults to `build`", show_default=False)],
    inputs: Annotated[Optional[str], typer.Option(help='Inputs for a function: "fp32[4 16], int[4] < 8, 0.5".')] = None,  # noqa: UP045
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    fail_on: FailOn = "error",
) -> None:
    # output of the checked file goes to stderr, so that it does not mix with the answer
    with contextlib.redirect_stdout(sys.stderr):
        from ..doctor.output import answer, threshold

        least = threshold(fail_on)
        from ..testing.amp.check import ampcheck
        from ..testing.amp.subjects import load_target, triton_interpreted_without_gpu

        loaded = load_target(target, inputs)
        with triton_interpreted_without_gpu():
            report = ampcheck(loaded.function, loaded.inputs, **loaded.options, raises=False)
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


_KERNELS = """Compile Triton kernels for every dtype and several GPUs, without a GPU, and explain what fails.

TARGET is a file or module (signatures inferred), `file.py:kernel`, or a `file.py:build` that returns a kernel with MATRIX, CONSTEXPRS
and TARGETS beside it, or (function, inputs): that function is called with CPU tensors while its launches are trapped.

    isotype doctor kernels kernels.py

    isotype doctor kernels kernels.py:silu_mul --arch sm_80,sm_90,sm_100,gfx942

    isotype doctor kernels my_package.ops.rms_norm --binary
"""


def kernels(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="file.py, module or file.py:name", show_default=False)],
    arch: Annotated[
        str, typer.Option("--arch", help="Architectures, with commas: sm_80,sm_90,sm_100,gfx942 (default: TARGETS in the file, or sm_90).")
    ] = "",
    binary: Annotated[
        bool,
        typer.Option("--binary", help="Also compile to machine code: registers, spills, shared memory (seconds per kernel and target)."),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    fail_on: FailOn = "error",
    notes: Annotated[bool, typer.Option("--notes", help="Also print notes in full.")] = False,
) -> None:
    import warnings

    from ..doctor.output import answer, threshold

    least = threshold(fail_on)
    targets = [word.strip() for word in arch.split(",") if word.strip()] or None
    warnings.filterwarnings("ignore", module="triton")
    # what imported code prints must not end up in the JSON
    with contextlib.redirect_stdout(sys.stderr):
        from ..doctor.kernels.target import check_target

        report = check_target(target, targets, binary=binary)
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
