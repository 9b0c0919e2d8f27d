"""The folder of the cache of tokenised rows: its location, its entries and its size limit. Imports neither torch nor numpy.

When a new entry exceeds the limit, the least recently used entries are removed. An entry that a run has mapped may be removed too: the
system retains its content until that run ends. Pictures that rows bring as bytes lie in the folder below, within a limit of the same size.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError

BOUND = "ISOTYPE_CACHE_GB"
DEFAULT_GB = 20.0
_OURS = re.compile(r"[0-9a-f]{32}\.safetensors")  # a name that `cache.entry_key` makes
PICTURES = "pictures"  # below the folder of entries
IN_USE = 24 * 3600  # seconds since a picture was last read in which it stays: a run reads each again in its next epoch


@dataclass(frozen=True)
class Entry:
    """One source's rows, or one picture. `used` is the time of the last use."""

    path: Path
    bytes: int
    used: float


def cache_folder(setting: str) -> Path | None:
    """Where entries lie: a folder as given; `auto` is ISOTYPE_CACHE or the user's cache folder; None for `none`."""
    if setting == "none":
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    if given := os.environ.get("ISOTYPE_CACHE"):
        return None if given == "none" else Path(given).expanduser() / "tokens"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "isotype" / "tokens"


def bound() -> int:
    """Bytes that a cache folder may hold: ISOTYPE_CACHE_GB, else 20 GB. Raises UsageError for what is no size."""
    given = os.environ.get(BOUND)
    try:
        gigabytes = float(given) if given else DEFAULT_GB
        return int(gigabytes * 1e9) if gigabytes >= 0 else _refuse(given)
    except (ValueError, OverflowError):
        return _refuse(given)


def _refuse(given: str | None) -> int:
    raise UsageError(f"{BOUND}={given}: expected gigabytes, a number of at least 0", fix=f"{BOUND}=20")


def entries(folder: Path) -> list[Entry]:
    """The whole entries of a folder, those that were not used for longest first."""
    found = []
    for path in folder.glob("*.safetensors"):
        if not _OURS.fullmatch(path.name):  # somebody's weights
            continue
        try:
            stat = path.stat()
        except OSError:  # another run removed it
            continue
        found.append(Entry(path, stat.st_size, stat.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def kept_pictures(folder: Path) -> list[Entry]:
    """The pictures that rows brought as bytes, those that were not read for longest first."""
    found = []
    for path in folder.glob("*.picture"):
        try:
            stat = path.stat()
        except OSError:  # another run removed it
            continue
        found.append(Entry(path, stat.st_size, max(stat.st_atime, stat.st_mtime)))
    return sorted(found, key=lambda entry: entry.used)


def evict(folder: Path, *, keep: Path, most: int) -> list[Entry]:
    """Removes the least recently used entries, but never `keep`, until the folder holds at most `most` bytes; returns those removed."""
    return _evict(entries(folder), most, lambda entry: entry.path == keep)


def evict_pictures(folder: Path, *, most: int) -> list[Entry]:
    """The same of pictures, but never one that was read within a day: another run may need it again."""
    begin = time.time() - IN_USE
    return _evict(kept_pictures(folder), most, lambda entry: entry.used > begin)


def _evict(there: Sequence[Entry], most: int, stays: Callable[[Entry], bool]) -> list[Entry]:
    total, gone = sum(entry.bytes for entry in there), []
    for entry in there:
        if total <= most:
            break
        if not stays(entry) and remove(entry):
            total -= entry.bytes
            gone.append(entry)
    return gone


def remove(entry: Entry) -> bool:
    """Whether the entry was removed: some systems refuse to remove a memory-mapped file."""
    try:
        entry.path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
