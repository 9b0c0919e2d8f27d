"""From an exception to the line of the user's own code, and the dtypes of the tensors that the failing expression names."""

from __future__ import annotations

import ast
import linecache
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from ...dtypes import name
from ...finding import Place

_TESTING = Path(__file__).resolve().parents[1]
_NOT_USERS = tuple(str(folder) for folder in (Path(torch.__file__).parent, _TESTING, Path(sysconfig.get_paths()["stdlib"])))


def is_users(file: str) -> bool:
    """Whether code in this file may be at fault: not torch, Triton, NumPy, the standard library or ampcheck itself."""
    if "site-packages" in file or "dist-packages" in file:
        inside = file.replace("\\", "/").split("-packages/")[-1].split("/")[0]
        return inside not in ("torch", "triton", "numpy", "functorch", "_pytest", "pluggy")
    return not file.startswith(_NOT_USERS) and not file.startswith("<")


@dataclass(frozen=True)
class Failure:
    """Where an exception began in the user's code.

    function  `Class.forward` or `Class.backward` when the way there leads through a hand-written Function
    operands  the tensors the failing expression names: name -> tensor
    chain     user frames from the outermost to the innermost, as `file:line symbol`
    """

    place: Place
    source: str
    function: str | None
    operands: dict[str, Tensor]
    chain: tuple[str, ...]
    raised_by_hand: bool

    @property
    def expression(self) -> str:
        return self.source.split("#")[0].strip()


def failure_of(error: BaseException) -> Failure | None:
    """None when no frame between them is the user's."""
    frames = list(_frames(error.__traceback__))
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:  # a Triton kernel: its own line is in the cause
        error = error.__cause__
        frames += list(_frames(error.__traceback__))
    mine = [(tb.tb_frame, tb) for tb in frames if is_users(tb.tb_frame.f_code.co_filename)]
    if not mine:
        return None
    frame, tb = mine[-1]
    span = _span(tb)
    function = next((f.f_code.co_qualname for f, _ in reversed(mine) if _is_function_method(f)), None)
    source = _source(frame.f_code.co_filename, span[0], span[1])
    return Failure(
        place=Place(file=frame.f_code.co_filename, line=span[0], symbol=symbol_of(frame)),
        source=source,
        function=_clean(function) if function else None,
        operands=_operands(frame, span),
        chain=tuple(f"{f.f_code.co_filename}:{t.tb_lineno} {symbol_of(f)}" for f, t in mine),
        raised_by_hand=frames[-1].tb_frame is frame and _is_raise(source),
    )


def _frames(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def symbol_of(frame: FrameType) -> str:
    return _clean(frame.f_code.co_qualname)


def owner_of(frame: FrameType | None) -> str | None:
    """`Class.forward` or `Class.backward` of the hand-written Function this frame belongs to or was called from."""
    while frame is not None:
        if is_users(frame.f_code.co_filename) and _is_function_method(frame):
            return symbol_of(frame)
        frame = frame.f_back
    return None


def _clean(qualname: str) -> str:
    return qualname.split("<locals>.")[-1]


def _is_function_method(frame: FrameType) -> bool:
    first = frame.f_code.co_varnames[:1]
    owner = frame.f_code.co_qualname.rpartition(".")[0]
    return frame.f_code.co_name in ("forward", "backward", "vjp", "setup_context") and bool(owner) and first != ("self",)


def _span(tb: TracebackType) -> tuple[int, int, int | None, int | None]:
    """Lines and columns of the instruction that failed."""
    positions = list(tb.tb_frame.f_code.co_positions())
    index = tb.tb_lasti // 2
    if index < len(positions):
        line, end_line, column, end_column = positions[index]
        if line is not None:
            return line, end_line or line, column, end_column
    return tb.tb_lineno, tb.tb_lineno, None, None


def _source(file: str, first: int, last: int) -> str:
    return " ".join(linecache.getline(file, n).strip() for n in range(first, last + 1)).strip()


def _is_raise(source: str) -> bool:
    return source.startswith(("raise ", "assert ")) or source == "raise"


def _operands(frame: FrameType, span: tuple[int, int, int | None, int | None]) -> dict[str, Tensor]:
    file = frame.f_code.co_filename
    first, last, column, end_column = span
    lines = [linecache.getline(file, n) for n in range(first, last + 1)]
    if column is not None and end_column is not None and lines:
        encoded = [line.encode() for line in lines]
        encoded[-1] = encoded[-1][:end_column]
        encoded[0] = encoded[0][column:]
        text = b"".join(encoded).decode(errors="replace")
    else:
        text = "".join(lines)
    known: dict[str, Any] = {**frame.f_globals, **frame.f_locals}
    found: dict[str, Tensor] = {}
    for word in _names(text):
        value = known.get(word)
        if isinstance(value, Tensor):
            found[word] = value
    return found


def _names(text: str) -> list[str]:
    """Names an expression or a statement uses, in order."""
    for candidate in (text, textwrap.dedent(text), f"({text.strip()})", text.strip().rstrip(":") + ": pass"):
        try:
            tree = ast.parse(candidate)
        except SyntaxError:
            continue
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        return list(dict.fromkeys(node.id for node in sorted(found, key=lambda n: (n.lineno, n.col_offset))))
    return []


def shown(tensor: Tensor) -> str:
    """`bf16[2 3 4]`"""
    return f"{name(str(tensor.dtype))}[{' '.join(map(str, tensor.shape))}]"
