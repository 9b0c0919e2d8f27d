"""The one line that a command ended by Ctrl-C says, at whatever moment: what it leaves behind. Imports nothing: imports are such moments.

A command that writes something tells it with `leaving`, around the code that writes; of the others, `_LEFT` says what holds at any time.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_BEGUN = "nothing was begun, and the same command starts again"
_RUN = "the run is as it was"
_LEFT = {
    "train": _BEGUN, "plan": _BEGUN, "quickstart": _BEGUN, "merge": _BEGUN, "eval": _RUN, "sample": _RUN, "chat": _RUN,
}  # fmt: skip
_inside: list[leaving] = []
_said = False


def said() -> None:
    """The command has told what it leaves: a later Ctrl-C, while it ends, adds no line."""
    global _said
    _said = True


class leaving:
    """A context in which an interrupted command leaves `what`: words, or a function that looks when it is asked."""

    def __init__(self, what: str | Callable[[], str]) -> None:
        self.what = what

    def __enter__(self) -> None:
        _inside.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # what ends by an interrupt stays, for the line about it
        if not by_interrupt(error):
            _inside.remove(self)


def by_interrupt(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or came of it: command lines and libraries turn it into other ones."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def line(arguments: list[str]) -> str:
    """What is said, by the arguments of the command line; empty where the command has said it."""
    if _said:
        return ""
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    if _inside:
        what = _inside[-1].what
        return f"interrupted: {what if isinstance(what, str) else what()}"
    name = f"isotype {command}".rstrip()
    return f"interrupted: {name} did not finish" + (f"; {_LEFT[command]}" if command in _LEFT else "")
