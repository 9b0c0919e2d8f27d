"""Defines the argument and the options that several commands for a trained run have: `isotype chat`,
`isotype sample` and `isotype eval`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[
    Path,
    typer.Argument(
        help="A run's folder, finished or not. The folder of an adapter (RUN/adapters/step_N) or of a model works too."
    ),
]
MaxTokens = Annotated[int, typer.Option("--tokens", min=1, help="Longest answer in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0.0,
        max=1.0,
        help="Sample from the most likely tokens up to this share of probability (top-p).",
    ),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def require_usable_folder(run: Path) -> None:
    """Raises UsageError for a folder that is not a run, an adapter or a model. The folder is
    checked before the model is loaded, because loading takes seconds.
    """
    from ..runs.folder import detect_model_folder, require_run, split_run_and_adapter

    if detect_model_folder(run) is None:
        require_run(split_run_and_adapter(run)[0])
