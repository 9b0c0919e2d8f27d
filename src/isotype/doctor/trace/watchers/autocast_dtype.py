"""The dtype of an autocast that names none: who set it for the whole process, and whether a forward then ran in another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....dtypes import name as dtype_name
from ....finding import Finding, Severity
from ..context import Context
from ..source import TORCH, Site, callers, in_library, own_line, place_of
from ..watcher import Watcher

_SETTERS = ("set_autocast_dtype", "set_autocast_cpu_dtype", "set_autocast_gpu_dtype")


@dataclass(frozen=True, slots=True)
class Left:
    before: torch.dtype
    after: torch.dtype
    setter: Site
    module: str


class AutocastDtype(Watcher):
    """Follows `torch.set_autocast_dtype`, and which dtype a model's forwards had under autocast before."""

    order = 10

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._ran: dict[int, torch.dtype] = {}  # id of a root module -> dtype of its first training forward under autocast
        self._set: tuple[torch.dtype, Site] | None = None  # the dtype in force, when a function of the program set it
        self._left: dict[Site, Left] = {}
        self._undo: list[tuple[str, Any]] = []

    def start(self) -> None:
        for name in _SETTERS:
            if hasattr(torch, name):
                self._watch(name)

    def stop(self) -> None:
        for name, function in self._undo:
            setattr(torch, name, function)
        self._undo.clear()

    def _watch(self, name: str) -> None:
        function = getattr(torch, name)

        def watched(*args: Any) -> Any:
            stack = callers(2)
            if stack and not stack[0].file.startswith(TORCH):  # torch.autocast sets it too, and puts it back
                dtype, setter = args[-1], own_line(stack) or stack[0]
                self._set = (dtype, setter) if setter.code.co_name != "<module>" and not in_library(setter.file) else None
            return function(*args)

        self._undo.append((name, function))
        setattr(torch, name, watched)

    def root_called(self, module: torch.nn.Module) -> None:
        device = self._context.device
        if not torch.is_autocast_enabled(device) or not torch.is_grad_enabled():
            return
        dtype = torch.get_autocast_dtype(device)
        usual = self._ran.setdefault(id(module), dtype)
        if self._set is None or usual == dtype or dtype != self._set[0] or self._set[1] in self._left:
            return
        setter = self._set[1]
        if setter.code not in {site.code for site in callers(2)}:
            self._left[setter] = Left(usual, dtype, setter, type(module).__name__)

    def findings(self) -> list[Finding]:
        return [_finding(left) for left in self._left.values()]


def _finding(left: Left) -> Finding:
    before, after, setter = dtype_name(left.before), dtype_name(left.after), left.setter
    return Finding(
        code="TR017",
        severity=Severity.WARNING,
        message=f"the dtype of autocast was left at {after} by {setter.function}",
        place=place_of(setter),
        cause=f"{setter.function} set it for the whole process and has ended: {left.module}, which was trained under autocast in {before}, "
        f"has been trained in {after} since then wherever `torch.autocast` is opened without dtype="
        + (", and fp16 needs a loss scale" if left.after == torch.float16 else ""),
        fix=f"pass dtype= to torch.autocast in {setter.function} in place of setting it, and where the model is trained",
        details=(("set at", f"{setter}: {setter.text}"),),
    )
