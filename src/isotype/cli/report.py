"""`isotype ls` lists runs. `isotype report RUN` writes the report of a run again, also of a failed
run. `isotype watch RUN` shows the report in a browser while the run trains.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from ..wording import align_columns, remove_control_characters


def report(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Write here instead of RUN/report.html.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help='Print `{"report": PATH}`.')] = False,
) -> None:
    """Write report.html of a run: curves, declared and observed precision, preflight, data and
    samples.

    The page is one file and needs no network. Its only script is the slider for pictures. The page
    is built from the files in the run folder, so that failed and running runs have a report too.

    Examples:

        isotype report runs/my-run

        isotype report runs/my-run --out /tmp/page.html
    """
    from ..report import write_report

    written = write_report(run, out)
    print(json.dumps({"report": str(written)}) if json_output else f"report    {written}")


def watch(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="Serve at this port; 0 takes a free one."),
    ] = 0,
    json_output: Annotated[bool, typer.Option("--json", help='Print `{"url": URL}`.')] = False,
) -> None:
    """Show a run in a browser while it trains: curves, observed precision, samples, the last lines
    of its log, and a button to stop the run.

    The command prints a local address with a token. The server only reads the files of the run, so
    the run may belong to another terminal or be finished. The command waits for a run that has not
    begun. The button saves and stops the run, like Ctrl-C in its terminal. Ctrl-C in the terminal
    of this command stops the server, but not the run.

    Examples:

        isotype watch runs/qwen

        isotype watch runs/qwen --port 8000      # remote: ssh -L 8000:127.0.0.1:8000 HOST
    """
    from ..report.live import WatchServer, wait_for_run

    def print_wait(reason: str) -> None:
        message = f"waiting   {run}: {reason}; Ctrl-C ends the command"
        print(message, file=sys.stderr, flush=True)

    with suppress(KeyboardInterrupt):
        wait_for_run(run, print_wait)
        with WatchServer(run, port) as server:
            print(
                json.dumps({"url": server.url}) if json_output else f"watch     {server.url}",
                flush=True,
            )
            server.serve_forever()


def ls(
    folder: Annotated[Path, typer.Argument(help="Where to look, two levels deep.")] = Path("runs"),
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List runs: status, steps, losses, precision, data.

    Examples:

        isotype ls

        isotype ls quickstart --json
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: " + ("not a folder" if folder.exists() else "no such folder"),
            fix="isotype ls FOLDER, where runs are",
        )
    runs = [
        _describe_run(path.parent)
        for path in sorted(
            [
                *folder.glob("resolved.yaml"),
                *folder.glob("*/resolved.yaml"),
                *folder.glob("*/*/resolved.yaml"),
            ]
        )
    ]
    if json_output:
        print(json.dumps({"runs": runs}))
        return
    if not runs:
        print(f"{folder}: no runs here, nor two levels below")
        return
    rows = [
        list(_COLUMNS.values()),
        *([_format_cell(run[key]) for key in _COLUMNS] for run in runs),
    ]
    # a narrow screen cuts the last columns, which are model and data
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in align_columns(
        rows, right_aligned=[list(_COLUMNS).index(name) for name in ("step", "loss", "eval_loss")]
    ):
        print(line[:width].rstrip())


_COLUMNS = {"folder": "run", "status": "status", "step": "step", "loss": "loss", "eval_loss": "eval loss", "precision": "precision",
            "model": "model", "data": "data"}  # fmt: skip


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}"
    return remove_control_characters(str(value))


def _describe_run(folder: Path) -> dict[str, Any]:
    from ..config.sources import short_source_names
    from ..report.record import dict_or_empty, read_run_summary

    try:
        record = read_run_summary(folder)
    except UsageError as error:
        row = dict.fromkeys(_COLUMNS)
        return row | {"folder": str(folder), "status": f"cannot be read: {error.message}"}
    # the settings of the last start as JSON; resolved.yaml takes a hundred times as long to parse
    settings = dict_or_empty(record.plan.get("settings")) or record.settings
    status = record.status
    if record.damaged:
        status = f"{status}, damaged: {record.damaged[0].partition(':')[0]}"
    if record.truncated_files:
        status = f"{status}: {record.truncated_files[0]}"
    losses = record.curve("loss")

    def setting(section: str, key: str) -> Any:
        return dict_or_empty(settings.get(section)).get(key)

    return {
        "folder": str(folder),
        "status": status,
        "step": int(losses[-1][0]) if losses else 0,
        "loss": record.last_value("loss"),
        "eval_loss": record.best_evaluation,
        "precision": str(record.precision.get("precision", "")),
        "model": Path(str(setting("model", "name") or "built")).name,
        "data": short_source_names(setting("data", "train") or setting("images", "train")),
    }
