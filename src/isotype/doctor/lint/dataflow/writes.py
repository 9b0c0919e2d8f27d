"""Writes into tensors: at indices, and sums in place."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from .values import (
    UNFOLLOWED,
    UNKNOWN,
    Env,
    Items,
    Mapping,
    Tensor,
)

if TYPE_CHECKING:
    from .interpreter import Interpreter


def scatter_call(run: Interpreter, name: str, args: list[Any], nodes: list[ast.expr], kwargs: dict[str, Any], node: ast.Call) -> Any:
    first = args[0] if args else UNKNOWN
    if not isinstance(first, Tensor):
        return UNKNOWN
    position = 2 if name.startswith(("index_put", "masked_scatter")) else 3
    source = kwargs.get("src", kwargs.get("source", kwargs.get("values", args[position] if len(args) > position else None)))
    if isinstance(source, Tensor) and first.floating and source.floating and first.dtype != source.dtype and source.zero_dim is False:
        label = run.text(nodes[position]) if len(nodes) > position else "source"
        run.refuse("scatter", node, name, (run.text(nodes[0]), first), (label, source))
    return first


def write_at_index(run: Interpreter, target: ast.Subscript, node: ast.stmt, owner: Tensor, index: Any, value: Any) -> None:
    """`x[i] = v` casts `v` for numbers and slices; for a tensor of integers it is index_put_, which does not."""
    indices = index.known if isinstance(index, Items) and index.known is not None else [index]
    indices = [i.element() if isinstance(i, Items) else i for i in indices]  # what nonzero and where hand back
    by_tensor = any(isinstance(i, Tensor) and i.dtype in ("int64", "int32") for i in indices)
    if (
        by_tensor
        and isinstance(value, Tensor)
        and owner.floating
        and value.floating
        and value.dtype != owner.dtype
        and value.zero_dim is False
    ) and isinstance(node, ast.Assign):
        run.refuse("scatter", node, "index_put_", (run.text(target.value), owner), (run.text(node.value), value))


def note_in_place(
    run: Interpreter, target: ast.expr, node: ast.expr | ast.stmt, before: Tensor, added: Any, source: ast.expr, env: Env
) -> None:
    """An in-place sum in a loop, into something that was there before the loop: a name of the function that has the loop, or a buffer
    that reached this place as an argument or in a dict or list."""
    if isinstance(target, ast.Subscript) and is_whole(target.slice):
        target = target.value
    if isinstance(target, ast.Name) and _outlives(run, target.id, env):
        label = target.id
    elif before.buffer is not None and _kept(run, target, env) and not _inside(run, before.buffer):
        label = run.text(target)
    else:
        return
    if isinstance(node, ast.AugAssign) and not isinstance(node.op, (ast.Add, ast.Sub)):
        return
    if isinstance(added, Tensor) or added is UNKNOWN:
        part = added if isinstance(added, Tensor) else UNFOLLOWED
        run.emit("accumulate", node, "+=", (label, before), (run.text(source), part), value=before.buffer)


def is_whole(index: ast.expr) -> bool:
    """`[:]` and `[...]`."""
    return (isinstance(index, ast.Slice) and index.lower is index.upper is index.step is None) or (
        isinstance(index, ast.Constant) and index.value is ...
    )


def _outlives(run: Interpreter, name: str, env: Env) -> bool:
    """Whether the name had a value before some loop that is being run."""
    holder = env.holder(name)
    return any(name in loop.bound and loop.env is holder for loop in run.loops)


def _kept(run: Interpreter, target: ast.expr, env: Env) -> bool:
    """An argument of a function called from the loop, or an element of a dict or list; a part of a tensor is another one each time."""
    if isinstance(target, ast.Subscript):
        return isinstance(run.evaluate(target.value, env), (Mapping, Items))
    return isinstance(target, ast.Name) and bool(run.loops) and run.loops[-1].env is not env.holder(target.id)


def _inside(run: Interpreter, buffer: ast.AST) -> bool:
    """Whether the buffer is allocated anew in each round of the innermost loop."""
    return any(node is buffer for node in ast.walk(run.loops[-1].node)) if run.loops else True


def note_accumulation(run: Interpreter, name: str, node: ast.Assign, value: ast.expr, env: Env) -> None:
    """`acc = acc + part` in a loop, where `acc` was there before the loop."""
    if not _outlives(run, name, env):
        return
    if isinstance(value, ast.IfExp):  # acc = part if acc is None else acc + part
        for arm in (value.body, value.orelse):
            note_accumulation(run, name, node, arm, env)
        return
    parts: list[ast.expr] = []
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        parts = [value.left, value.right]
    elif isinstance(value, ast.Call) and run.file.dotted(value.func) == "torch.add":
        parts = value.args[:2]
    own = [p for p in parts if isinstance(p, ast.Name) and p.id == name]
    before = env.names.get(name)
    if len(parts) == 2 and len(own) == 1 and isinstance(before, Tensor):
        other = parts[1] if parts[0] is own[0] else parts[0]
        run.emit("accumulate", node, "+", (name, before), (run.text(other), UNFOLLOWED), value=before.buffer)
