"""Replacing a method on one trainer, and putting it back (no class is touched); and finds methods that a user has defined."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

_ABSENT = object()


class Methods:
    """The methods of one trainer that are wrapped, in order."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.before: list[tuple[str, Any]] = []
        self.originals: dict[str, Callable[..., Any]] = {}

    def wrap(self, name: str, around: Callable[..., Any]) -> None:
        """`around(original, *args, **kwargs)` is called instead of `trainer.name`; `original` is the bound method that was there."""
        trainer, original = self.trainer, getattr(self.trainer, name)
        self.originals[name] = original
        self.before.append((name, trainer.__dict__.get(name, _ABSENT)))

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(trainer, name, MethodType(wrapped, trainer))

    def original(self, name: str) -> Callable[..., Any]:
        """The bound method below the wrapper."""
        return self.originals[name]

    def restore(self) -> None:
        for name, before in reversed(self.before):
            if before is _ABSENT:
                delattr(self.trainer, name)
            else:
                setattr(self.trainer, name, before)
        self.before.clear()


def overridden(trainer: Any, method: str) -> str | None:
    """`Class.method at file:line` where a user's own class, not transformers' or TRL's, defines this method."""
    for cls in type(trainer).__mro__:
        if method in cls.__dict__:
            if cls.__module__.partition(".")[0] in ("transformers", "trl"):
                return None
            function = inspect.unwrap(cls.__dict__[method])
            code = getattr(function, "__code__", None)
            at = f" at {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else ""
            return f"{cls.__name__}.{method}{at}"
    return None


def defined_in(trainer: Any, method: str) -> str:
    """The module of the class that defines this method; empty where the trainer itself has another one."""
    return "" if method in trainer.__dict__ else next(cls.__module__ for cls in type(trainer).__mro__ if method in cls.__dict__)
