"""The file operations of a process, counted and met: an audit hook hears of each right before it is done."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .child import Child
from .workshop import Workshop

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def before_operation(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """For a child: `act` right before it changes files for the `number`th time."""
    seen = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        seen[0] += seen[0] < number and _is_change(event, arguments)
        if seen[0] == number:
            seen[0] += 1  # what `act` does is an event itself
            act()

    return lambda: sys.addaudithook(hook)


_COUNTED: dict[tuple[int, str], int] = {}


def operations_of(workshop: Workshop, recipe: str) -> int:
    """How often an undisturbed run of `recipe` changes files."""
    key = (id(workshop), recipe)
    if key not in _COUNTED:
        folder, into, seen = workshop.new_folder(), workshop.folder / "count", [0]

        def before() -> None:
            sys.addaudithook(lambda event, arguments: seen.__setitem__(0, seen[0] + _is_change(event, arguments)))

        def after() -> None:
            into.write_text(str(seen[0]))

        Child(["train", str(workshop.settings(folder, recipe))], workshop.log(), before=before, after=after).wait()
        _COUNTED[key] = int(into.read_text()) - 1  # the count itself is written
        shutil.rmtree(folder)
    return _COUNTED[key]


def _is_change(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        path, _, flags = arguments
        return (
            isinstance(flags, int)
            and bool(flags & _WRITES)
            and isinstance(path, str | Path)
            and not str(path).startswith(("/dev/", "/proc/"))
        )
    return event in _CHANGES
