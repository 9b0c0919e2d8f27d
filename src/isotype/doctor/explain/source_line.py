"""What a traceback's own line of code says: the function that was called and the tensors it was given."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from .log import Frame
from .situation import Situation, is_library

PRODUCTS = frozenset(
    {"mm", "bmm", "matmul", "dot", "vdot", "mv", "inner", "outer", "einsum", "tensordot", "addmm", "addmv", "addbmm", "baddbmm"}
    | {"sspaddmm", "smm", "multi_dot", "chain_matmul", "@"}
)
_NO_TENSORS = frozenset({"backward", "step", "generate", "forward", "apply", "train", "evaluate", "update"})


@dataclass(frozen=True)
class Call:
    """function: `einsum`, `grid_sample`, `@`; tensors: the arguments that can be tensors, as written; in_place: writes into the first."""

    function: str
    tensors: tuple[str, ...]
    frame: Frame
    in_place: bool = False

    @property
    def place(self) -> str:
        """The call's line of code, and where it stands."""
        return f"{self.frame.code} at {self.frame.file}:{self.frame.line}" if self.frame.file else f"the text quotes {self.frame.code}"

    @property
    def is_product(self) -> bool:
        return self.function.rstrip("_") in PRODUCTS


def failing_call(situation: Situation) -> Call | None:
    """The call on the user's innermost line, where it goes straight into torch; None behind a layer or another library.

    Without a traceback: the call that the text quotes.
    """
    if situation.quoted is not None:
        return _call(situation.quoted)
    for frame in reversed(situation.frames):
        if not is_library(frame.file):
            return _call(frame)
        file = frame.file.replace("\\", "/")
        if not re.search(r"/torch/(?:functional|nn/functional|_tensor|_ops|_jit_internal|overrides|sparse/\w+|linalg/\w+)\.py$", file):
            return None
    return None


def _call(frame: Frame) -> Call | None:
    code = re.sub(r"^(?:return|assert|yield|await|elif|if|while|with)\s+|:$", "", frame.code.strip())
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = [call for node in ast.walk(tree) if (call := _of(node, frame))]
    products = [call for call in found if call.is_product]
    if len(products) > 1:
        return None
    return next(iter(products or found), None)


def _of(node: ast.AST, frame: Frame) -> Call | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return Call("@", (_source(node.left), _source(node.right)), frame)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    owner, name = _source(node.func.value), node.func.attr
    given = [*node.args, *(k.value for k in node.keywords if k.arg in ("input", "other", "mat2", "vec2", "weight", "grid", "tensor2"))]
    tensors = [_source(arg) for arg in given if not isinstance(arg, ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Starred)]
    if not re.match(r"^(?:torch(?:\.\w+)*|F|nn\.functional)$", owner):
        if name.rstrip("_") not in PRODUCTS:
            return None
        tensors.insert(0, owner)
    if len(tensors) < 2 or name in _NO_TENSORS:
        return None
    return Call(name, tuple(tensors), frame, in_place=name.endswith("_"))


def _source(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."
