"""Whether `Dataset.save_to_disk` wrote a folder, and what it writes beside the data."""

from __future__ import annotations

from pathlib import Path

from ..config.sources import SPLITS

_STATE, _INFO = "state.json", "dataset_info.json"
BESIDE_DATA = frozenset((_STATE, _INFO, "dataset_infos.json", SPLITS))


def is_saved(name: str | Path) -> bool:
    """A `state.json` alone may be a user's own: the library writes its info and Arrow files with it, one of which may be missing."""
    folder = Path(name).expanduser()
    if (folder / SPLITS).is_file():
        return True
    return (folder / _STATE).is_file() and ((folder / _INFO).is_file() or any(folder.glob("*.arrow")))
