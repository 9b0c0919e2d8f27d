"""`isotype cache`: what is kept of tokenised data, and how to let it go."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .app import RUNS

if TYPE_CHECKING:
    from ..data.cache_folder import Entry


def register(app: typer.Typer) -> None:
    app.command(name="cache", rich_help_panel=RUNS)(cache)


def cache(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder given as data.cache; the user's own by default.", show_default=False)
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove the entries.")] = False,
    older: Annotated[
        float | None, typer.Option("--older", min=0.0, metavar="DAYS", help="Only those unused for so many days.", show_default=False)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what is kept of tokenised data, or clear it. Runs tokenise again what they miss.

    It holds at most ISOTYPE_CACHE_GB (20) gigabytes: those entries go first that were not used for longest.

    Examples:

        isotype cache

        isotype cache --clear --older 30

        ISOTYPE_CACHE_GB=100 isotype train run.yaml
    """
    from ..data.cache_folder import bound, cache_folder, entries, remove
    from ..report.words import bytes_written

    place = folder or cache_folder("auto")
    if place is None:
        raise UsageError("ISOTYPE_CACHE=none: nothing is kept", fix="isotype cache FOLDER for a folder given as data.cache")
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder}: " + ("not a folder" if folder.exists() else "no such folder"))
    most, now = bound(), time.time()
    found = [e for e in entries(place, described=True) if older is None or now - e.used >= older * 86400]
    gone = [entry for entry in found if remove(entry)] if clear else []
    total = sum(entry.bytes for entry in (gone if clear else found))
    if json_output:
        shown = [{"path": str(e.path), "source": e.source, "rows": e.rows, "bytes": e.bytes, "used": round(e.used)} for e in found]
        print(json.dumps({"folder": str(place), "bound": most, "bytes": total, "entries": shown, "removed": len(gone)}))
        return
    if clear:
        print(f"{place}: removed {_entries(gone)}, {bytes_written(total)}")
        return
    for entry in reversed(found):
        rows = f"{entry.rows:,} rows" if entry.rows is not None else "? rows"
        age = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{bytes_written(entry.bytes):>8}  {rows:>16}  last used {age}  {entry.source or entry.path.name}")
    print(f"{place}: {_entries(found)}, {bytes_written(total)}; at most {bytes_written(most)} are kept (ISOTYPE_CACHE_GB)")


def _entries(found: list[Entry]) -> str:
    return f"{len(found)} {'entry' if len(found) == 1 else 'entries'}"
