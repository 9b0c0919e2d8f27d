"""`isotype inspect PATH` shows what the files of a model or adapter hold. `isotype doctor PATH` runs
the same inspection if the path is a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..finding import print_findings


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="The folder of a model or adapter, a .safetensors file or a .gguf file."
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option("--against", help="Compare the weights with those of this folder or file."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base", help="With --against: the base of an adapter, if its settings name a hub id."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="One line for each tensor, not for each pattern.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what the files of a model or adapter hold, and find faults that no program reports.

    The command reads every tensor, in parts. It shows dtypes and shapes, values that are not finite
    or that fp16 cannot hold, scales of quantised weights, tied weights, the tokens that end an
    answer, and the chat template. It asks transformers which weights of the class in config.json
    the files lack. No code of the folder is run, and the model is not loaded.

    The exit status is 0 without an error, 1 with one, and 2 if the files cannot be read.

    `--against OTHER` compares the weights of both paths, after dequantisation and renaming: a
    merged model with the adapter (and its base), a GGUF file with the folder that it was made from,
    two adapters. It names the weights that differ by more than the rounding of their dtypes. The
    exit status is 0 if they are the same, 1 if not, and 2 if they cannot be compared.

    Examples:

        isotype inspect runs/qwen/merged

        isotype inspect runs/qwen/adapter --json

        isotype inspect qwen-Q4_K_M.gguf --verbose

        isotype inspect merged --against runs/qwen/adapter --base Qwen2.5-0.5B

        isotype inspect qwen-q8_0.gguf --against merged
    """
    if against is not None:
        _compare(path, against, base, is_verbose=verbose, json_output=json_output)
        return
    if base is not None:
        raise UsageError("--base has no effect without --against")
    from ..inference.inspection.inspect import inspect_checkpoint
    from ..inference.inspection.report import report_json, report_lines

    inspection = inspect_checkpoint(path)
    extra = {}
    if json_output:
        extra = report_json(inspection, is_verbose=verbose)
    else:
        print("\n".join(report_lines(inspection, is_verbose=verbose)) + "\n")
    raise typer.Exit(
        print_findings(inspection.findings, subject=str(path), json_output=json_output, **extra)
    )


def _compare(
    path: Path, against: Path, base: Path | None, *, is_verbose: bool, json_output: bool
) -> None:
    """Compares two checkpoints, and exits with 1 if they differ. Raises UsageError."""
    from ..inference.inspection.compare import compare_checkpoints

    if is_verbose:
        raise UsageError("--verbose has no effect with --against", fix="--json")
    comparison = compare_checkpoints(path, against, base)
    print(json.dumps(comparison.to_json()) if json_output else "\n".join(comparison.lines()))
    if not comparison.is_same:
        raise typer.Exit(1)
