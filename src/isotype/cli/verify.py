"""`isotype verify RUN --file FILE` compares a written file with the run, and `--served URL` a running
server. `isotype export --verify` and `isotype merge --verify` make the same comparison for the file
that they write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RunError, UsageError

if TYPE_CHECKING:
    from ..inference.loaded import LoadedRun
    from ..inference.served.result import ServedResult
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
        Path | None,
        typer.Option(
            "--file", help="The file or folder that isotype export, merge or llama.cpp wrote."
        ),
    ] = None,
    served: Annotated[
        str | None,
        typer.Option("--served", help="The address of a running server: http://127.0.0.1:8080."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model to ask, if the server has several."),
    ] = None,
    verify_rows: RowsOption = None,
    keep: KeepOption = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.1, help="Seconds for one request; 60 by default."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check that a written file, or a running server, is the model that the run trained.

    A file is read back tensor by tensor, and its model runs in fp32 on the run's held-out rows.
    The report shows the losses of the base, of the trained model and of the file, and how much of
    the run's improvement the file keeps. It also shows the causes of the difference, and lists
    every tensor and setting that differs.

    A server (llama.cpp, Ollama, vLLM, SGLang, LM Studio, or another one with the OpenAI interface)
    gets the run's own prompts. The command compares prompt, tokens, first token, system message,
    tools, the switch for thinking, answers, log-probabilities and end one by one. It reads a key
    from the environment variable ISOTYPE_SERVER_KEY, and sends it to this address only.

    The exit status is 0 if the file or server is the trained model, 1 if not, and 2 if no
    comparison is possible.

    Examples:

        isotype verify runs/qwen --file runs/qwen/qwen-q8_0.gguf

        isotype verify runs/qwen --file merged --verify-rows 100 --keep 0.95

        isotype verify runs/qwen --file qwen-Q4_K_M.gguf --json    # written by llama-quantize

        isotype verify runs/qwen --served http://127.0.0.1:8080

        isotype verify runs/qwen --served http://127.0.0.1:11434 --model qwen
    """
    from ..training.console import quiet_libraries

    if (file is None) == (served is None):
        raise UsageError("isotype verify needs either --file or --served")
    if served is None:
        _refuse_server_options({"--model": model, "--timeout": timeout})
    quiet_libraries()
    result: Verification | ServedResult
    if file is not None:
        result = verify_written(run, file, verify_rows, keep)
    else:
        assert served is not None
        result = verify_served(run, served, model, verify_rows, keep, timeout)
    if json_output:
        print(json.dumps(result.to_json()))
    else:
        print("\n".join(result.lines()))
    if not result.is_same:
        raise typer.Exit(1)


def _refuse_server_options(options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise UsageError(f"{option} has no effect without --served")


def _store_result(run: LoadedRun, name: str, content: dict[str, Any]) -> None:
    """Stores a result in the run's folder. If this folder cannot be written, because the run is
    another user's, prints a warning: the result was measured and is shown.
    """
    from ..inference.verify.result import store_result

    try:
        store_result(run, name, content)
    except (RunError, UsageError) as error:
        print(f"warning   {error.message}; the result is only shown here", file=sys.stderr)


def verify_served(
    run: Path,
    url: str,
    model: str | None,
    verify_rows: int | None,
    keep: float | None,
    timeout: float | None,
) -> ServedResult:
    """Compares a running server with the run, and stores the result in the run's folder. The list
    of the server's models is requested before the run is loaded. Raises UsageError.
    """
    from ..inference.served.connect import connect
    from ..inference.served.http import DEFAULT_SECONDS, Connection, parse_address

    address = parse_address(url)
    connection = Connection(address, seconds=DEFAULT_SECONDS if timeout is None else timeout)
    server = connect(connection, model)

    from ..inference.loaded import load_run
    from ..inference.served.compare import compare_server
    from ..inference.served.compute import compute_expectations
    from ..inference.verify.measure import DEFAULT_ROWS, MIN_KEPT

    loaded = load_run(run, as_served=False)
    expectations = compute_expectations(
        loaded, DEFAULT_ROWS if verify_rows is None else verify_rows
    )
    min_kept = MIN_KEPT if keep is None else keep
    result = compare_server(expectations, server, url=address.url, min_kept=min_kept)
    _store_result(loaded, address.url, result.to_json())
    return result


def refuse_idle_options(is_verified: bool, verify_rows: int | None, keep: float | None) -> None:
    """Raises UsageError if options of the comparison are given without `--verify`."""
    options = {"--verify-rows": verify_rows, "--keep": keep}
    for option, value in options.items():
        if value is not None and not is_verified:
            raise UsageError(f"{option} has no effect without --verify")


def verify_written(
    run: Path,
    file: Path,
    verify_rows: int | None,
    keep: float | None,
    *,
    load: Callable[[Path], LoadedRun] | None = None,
) -> Verification:
    """Compares a file with its run, and stores the result in the run's folder. Raises UsageError.

    load  loads the run
    """
    from ..inference.loaded import load_run
    from ..inference.verify.measure import DEFAULT_ROWS, MIN_KEPT, verify_file

    loaded = load_run(run, as_served=False) if load is None else load(run)
    verification = verify_file(
        loaded,
        file,
        row_count=DEFAULT_ROWS if verify_rows is None else verify_rows,
        min_kept=MIN_KEPT if keep is None else keep,
    )
    _store_result(loaded, verification.file, verification.to_json())
    return verification
