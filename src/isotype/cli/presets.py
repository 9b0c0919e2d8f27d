"""`isotype try` compares precisions by short runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def try_presets(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file of a run.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value ...]", help="Settings.", show_default=False),
    ] = None,
    presets: Annotated[
        str | None,
        typer.Option(
            "--presets",
            help=(
                "The precisions, with commas between them: presets, fp8, int8, or a preset with"
                " roles (nf4-lora compute=fp16)."
            ),
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Steps of each run.")] = 30,
    out: Annotated[Path, typer.Option("--out", help="The folder for try.json and try.md.")] = Path(
        "isotype-try"
    ),
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compare precisions: train the same run for some steps with each, and show speed, memory and
    held-out loss.

    Each precision is trained in a process of its own, with the same seed and the same held-out rows.
    The reference (fp32 if it fits, otherwise the first precision) is trained with a second seed too.
    A loss that differs by less than these two is "within noise". The runs are deleted.

    Examples:

        isotype try run.yaml

        isotype try run.yaml --presets bf16-lora,nf4-lora,fp8

        isotype try run.yaml --steps 100 train.batch_size=8
    """
    from ..entry.presets import compare_presets, result_lines

    def print_line(line: str) -> None:
        if not json_output:
            print(line, flush=True)

    names = [name.strip() for name in (presets or "").split(",") if name.strip()]
    comparison = compare_presets(
        file, settings or [], names=names, steps=steps, out=out, print_line=print_line
    )
    if json_output:
        print(json.dumps(comparison.to_json()))
    print_line("")
    for line in result_lines(comparison):
        print_line(line)
