"""`isotype inspect PATH` shows what the files of a model or adapter hold. `isotype doctor PATH` runs
the same inspection if the path is a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..finding import print_findings


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="The folder of a model or adapter, a .safetensors file or a .gguf file."
        ),
    ],
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

    Examples:

        isotype inspect runs/qwen/merged

        isotype inspect runs/qwen/adapter --json

        isotype inspect qwen-Q4_K_M.gguf --verbose
    """
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
