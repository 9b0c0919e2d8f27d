"""A failed compilation as the recognisers see it, and the words they share."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from ..fault import Fault
from ..observe import Frame
from ..provenance import Origin


@dataclass(frozen=True)
class Scene:
    """A failure as the recognisers see it: the innermost function of the user's, the node at which it stopped, the message."""

    frame: Frame
    node: ast.AST
    message: str
    kernel: str

    def fault(self, code: str, variable: str, message: str, *, cause: str, fix: str, line: int | None = None, **more: Any) -> Fault:
        place = self.frame.line(self.node) if line is None else line
        return Fault(code, self.frame.file, place, self.kernel, variable, message, cause, fix, **more)

    def at(self, found: Origin | None) -> str:
        """` (case.py:12)` of an origin."""
        return f" ({self.frame.file.rsplit('/', 1)[-1]}:{found.line})" if found else ""


def scalar_word(text: str) -> str:
    """`fp32` of `fp32[constexpr[256]]` (Triton 3.9) and of `<[256], fp32>` (older)."""
    text = text.strip()
    if old := re.fullmatch(r"<\[.*\], *(.+)>", text):
        return old[1]
    return {"int1": "bool"}.get(word := re.split(r"\[", text, maxsplit=1)[0], word)


def origin_facts(scene: Scene, *found: Origin | None) -> tuple[tuple[str, str], ...]:
    return tuple(("comes from", f"{o.text}{scene.at(o)}") for o in found if o is not None)
