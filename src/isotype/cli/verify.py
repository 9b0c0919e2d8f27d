"""`isotype verify RUN --file FILE` compares a written file with the run. `isotype export --verify`
and `isotype merge --verify` make the same comparison for the file that they write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError

if TYPE_CHECKING:
    from ..inference.verify.result import Verification

VerifyOption = Annotated[
    bool,
    typer.Option("--verify", help="Read the result back, and compare its loss with the run's."),
]
RowsOption = Annotated[
    int | None,
    typer.Option("--verify-rows", min=1, help="The number of evaluation rows; 32 by default."),
]
KeepOption = Annotated[
    float | None,
    typer.Option(
        "--keep",
        min=0.0,
        max=1.0,
        help="The share of what was learnt that has to remain; 0.9 by default.",
    ),
]


def verify(
    run: Annotated[Path, typer.Argument(help="The run's folder, or an adapter in it.")],
    file: Annotated[
        Path,
        typer.Option(
            "--file", help="The file or folder that isotype export, merge or llama.cpp wrote."
        ),
    ],
    verify_rows: RowsOption = None,
    keep: KeepOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check that a written file is the model that the run trained.

    The file is read back tensor by tensor, and its model runs in fp32 on the run's held-out rows.
    The report has the losses of the base, of the trained model and of the file, and the share of
    what was learnt that the file keeps. It also has the causes of the difference, and every tensor
    and setting that differs. The exit status is 0 if the file is the trained model, 1 if the file
    is not, and 2 if the file cannot be compared.

    Examples:

        isotype verify runs/qwen --file runs/qwen/qwen-q8_0.gguf

        isotype verify runs/qwen --file merged --verify-rows 100 --keep 0.95

        isotype verify runs/qwen --file qwen-Q4_K_M.gguf --json    # written by llama-quantize
    """
    from ..training.console import quiet_libraries

    quiet_libraries()
    verification = verify_written(run, file, verify_rows, keep)
    if json_output:
        print(json.dumps(verification.to_json()))
    else:
        print("\n".join(verification.lines()))
    if not verification.is_same:
        raise typer.Exit(1)


def refuse_idle_options(is_verified: bool, verify_rows: int | None, keep: float | None) -> None:
    """Raises UsageError if options of the comparison are given without `--verify`."""
    options = {"--verify-rows": verify_rows, "--keep": keep}
    for option, value in options.items():
        if value is not None and not is_verified:
            raise UsageError(f"{option} has no effect without --verify")


def verify_written(
    run: Path, file: Path, verify_rows: int | None, keep: float | None
) -> Verification:
    """Compares a file with its run, and stores the result in the run's folder. Raises UsageError."""
    from ..inference.loaded import load_run
    from ..inference.verify.measure import DEFAULT_ROWS, MIN_KEPT, verify_file
    from ..inference.verify.result import store_result
    from ..runs.folder import RunFolder

    loaded = load_run(run)
    verification = verify_file(
        loaded,
        file,
        row_count=DEFAULT_ROWS if verify_rows is None else verify_rows,
        min_kept=MIN_KEPT if keep is None else keep,
    )
    if RunFolder(loaded.folder).is_run:
        store_result(loaded.folder, verification)
    return verification
