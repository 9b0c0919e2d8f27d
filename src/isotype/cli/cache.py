"""`isotype doctor cache`: shows the stored tokenised data and compiled kernels, and removes them."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..wording import counted

if TYPE_CHECKING:
    from ..data.cache_folder import Entry


def cache(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder given as data.cache; the user's own by default.", show_default=False)
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove what is shown.")] = False,
    older: Annotated[
        float | None, typer.Option("--older", min=0.0, metavar="DAYS", help="Only what was not used for so many days.", show_default=False)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show the stored tokenised data and compiled C++ kernels, or remove them. Runs make again what they miss.

    Tokenised data takes at most ISOTYPE_CACHE_GB (20) gigabytes, and pictures that rows brought as bytes take as much: those go first that
    were not used for longest.

    Examples:

        isotype doctor cache

        isotype doctor cache --clear --older 30

        ISOTYPE_CACHE_GB=100 isotype train run.yaml
    """
    from ..data.cache_folder import cache_folder

    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder}: " + ("not a folder" if folder.exists() else "no such folder"))
    before = time.time() - older * 86400 if older is not None else float("inf")
    place = folder or cache_folder("auto")
    answer: dict[str, Any] = {"folder": None, "entries": []}
    if place is not None:
        answer = _tokens(place, clear, before, quiet=json_output)
    elif not json_output:
        print("no tokenised data is kept: ISOTYPE_CACHE=none")
    if folder is None:
        answer["kernels"] = _kernels(clear, before, quiet=json_output)
    if json_output:
        print(json.dumps(answer))


def _tokens(place: Path, clear: bool, before: float, *, quiet: bool) -> dict[str, Any]:
    from ..data.cache_folder import PICTURES, bound, entries, kept_pictures, remove
    from ..report.words import bytes_written

    most = bound()
    found = [entry for entry in entries(place, described=True) if entry.used <= before]
    gone = [entry for entry in found if remove(entry)] if clear else []
    total = sum(entry.bytes for entry in (gone if clear else found))
    if not quiet and clear:
        print(f"{place}: removed {_counted(len(gone), 'entry', 'entries')}, {bytes_written(total)}")
    elif not quiet:
        for entry in reversed(found):
            print(_line(entry))
        there = _counted(len(found), "entry", "entries")
        print(f"{place}: {there}, {bytes_written(total)}; at most {bytes_written(most)} are kept (ISOTYPE_CACHE_GB)")
    pictures = [entry for entry in kept_pictures(place / PICTURES) if entry.used <= before]
    pictures = [entry for entry in pictures if remove(entry)] if clear else pictures
    if not quiet and pictures:
        size = bytes_written(sum(entry.bytes for entry in pictures))
        print(f"{place / PICTURES}: {'removed ' if clear else ''}{_counted(len(pictures), 'picture', 'pictures')}, {size}")
    shown = [{"path": str(e.path), "source": e.source, "rows": e.rows, "bytes": e.bytes, "used": round(e.used)} for e in found]
    return {"folder": str(place), "bound": most, "bytes": total, "entries": shown, "removed": len(gone), "pictures": len(pictures)}


def _kernels(clear: bool, before: float, *, quiet: bool) -> dict[str, Any]:
    """A library is used by its compiler, processor and version of Isotype alone; a process that has loaded it keeps it."""
    from ..ops.cpp import built_files, folder
    from ..report.words import bytes_written

    libraries, total, removed = 0, 0, 0
    for path in built_files():
        with suppress(OSError):  # another process removed it
            stat = path.stat()
            if stat.st_mtime > before:
                continue
            if clear:
                path.unlink()
            libraries, total, removed = libraries + (path.suffix == ".so"), total + stat.st_size, removed + clear
    if not quiet:
        said = f"{_counted(libraries, 'compiled kernel', 'compiled kernels')}, {bytes_written(total)}"
        print(f"{folder()}: removed {said}" if clear else f"{folder()}: {said}")
    return {"folder": str(folder()), "libraries": libraries, "bytes": total, "removed": removed}


def _line(entry: Entry) -> str:
    from ..report.words import bytes_written

    rows = counted(entry.rows, "row") if entry.rows is not None else "? rows"
    age = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
    return f"{bytes_written(entry.bytes):>8}  {rows:>16}  last used {age}  {entry.source or entry.path.name}"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
