"""`isotype report RUN` writes the report of a run again, also of one that failed; `isotype watch RUN` shows it in a browser as it grows."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write here instead of RUN/report.html.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help='Print `{"report": PATH}`.')] = False,
) -> None:
    """Write report.html of a run: curves, precision declared and observed, preflight, data, samples.

    The page is one file, no network; its one script is the slider through pictures. It is made from the files in the run folder, so a run
    that failed or is still going has it too.

    Examples:

        isotype report runs/my-run

        isotype report runs/my-run --out /tmp/page.html
    """
    from ..report import write_report

    written = write_report(run, out)
    print(json.dumps({"report": str(written)}) if json_output else f"report    {written}")


def watch(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Serve at this port; 0 takes a free one.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help='Print `{"url": URL}`.')] = False,
) -> None:
    """Show a run in a browser while it goes on: curves, observed precision, samples, the last lines of its log, and a button to stop it.

    Prints an address of this machine with a token. Only the run's files are read, so it may be the run of another terminal or a finished
    one. The button saves and stops the run, as Ctrl-C in its terminal does. Ctrl-C here ends the page, and not the run.

    Examples:

        isotype watch runs/qwen

        isotype watch runs/qwen --port 8000      # on a remote machine: ssh -L 8000:127.0.0.1:8000 HOST, then open the address here
    """
    from ..report.live import WatchServer

    with WatchServer(run, port) as server:
        print(json.dumps({"url": server.url}) if json_output else f"watch     {server.url}", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
