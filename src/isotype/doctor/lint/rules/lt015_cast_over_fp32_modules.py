from __future__ import annotations

import ast
from collections.abc import Iterator

from ..rule import Hit, Rule
from ..source import SourceFile, keyword, last_name
from .low_dtypes import casts_low

KEEP_LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_RETURN_SELF = ("to", "eval", "cuda", "train", "requires_grad_")


class CastOverFp32Modules(Rule):
    """a whole model is cast to low precision after part of it was put in fp32

    Why
    ---
    `model.to(torch.bfloat16)` casts everything: the norms or the router just put in fp32, and the modules that a class lists in
    `_keep_in_fp32_modules`, which only `from_pretrained(dtype=...)` respects. Nothing says so; the model trains with the precision that
    someone had taken care to avoid.

    Example
    -------
    ```python
    model.router.float()
    model.to(torch.bfloat16)
    ```

    Use instead
    -----------
    ```python
    model.to(torch.bfloat16)
    model.router.float()
    ```

    Known problems
    --------------
    Seen within one function, and for classes of the same file that list modules to be kept in fp32.
    """

    code = "LT015"
    name = "cast-over-fp32-modules"

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        keeping = {c.name for c in file.nodes(ast.ClassDef) if _keeps_some(c)}
        for function in [file.tree, *file.functions()]:
            nodes = [n for n in file.own(function) if isinstance(n, (ast.Call, ast.Assign))]
            nodes.sort(key=lambda n: (n.lineno, isinstance(n, ast.Assign), n.col_offset))  # a value before the name that gets it
            yield from _in_order(file, nodes, keeping)


def _in_order(file: SourceFile, nodes: list[ast.Call | ast.Assign], keeping: set[str]) -> Iterator[Hit]:
    raised: dict[str, ast.Call] = {}  # model name -> the cast of one of its parts to fp32
    parts = _loop_names(file, nodes)
    built: dict[str, str] = {}  # model name -> its class
    for node in nodes:
        if isinstance(node, ast.Assign):
            made = _class_of(node.value, keeping)
            for target in node.targets:
                if isinstance(target, ast.Name):
                    built.pop(target.id, None)
                    if made:
                        built[target.id] = made
            continue
        if not isinstance(node.func, ast.Attribute):
            continue
        receiver = node.func.value
        if _casts_to_fp32(file, node):
            root = _root(receiver) if isinstance(receiver, ast.Attribute) else last_name(receiver)
            root = parts.get(root or "", root if isinstance(receiver, ast.Attribute) else None)
            if root and _in_place(file, node, receiver):
                raised[root] = node
        elif casts_low(file, node):
            whole = _same_module(receiver)
            name = whole.id if isinstance(whole, ast.Name) else None
            made = built.get(name or "") or _class_of(receiver, keeping)
            if name in raised:
                part = raised[name]
                yield _hit(file, node, f"`{file.snippet(part, 40)}` (line {part.lineno})", f"move it before line {part.lineno}")
            elif made:
                yield _hit(
                    file,
                    node,
                    f"the modules in {made}._keep_in_fp32_modules",
                    f"load with {made}.from_pretrained(..., dtype=...) or cast the listed modules back to float32 afterwards",
                )


def _hit(file: SourceFile, node: ast.Call, undone: str, fix: str) -> Hit:
    return Hit(
        node=node,
        message=f"`{file.snippet(node, 40)}` casts the whole model, and undoes {undone}",
        cause="module.to(dtype) casts every floating parameter and buffer, those meant to stay in fp32 (float32) as well",
        fix=fix,
    )


def _keeps_some(cls: ast.ClassDef) -> bool:
    for item in cls.body:
        targets = item.targets if isinstance(item, ast.Assign) else [item.target] if isinstance(item, ast.AnnAssign) else []
        if any(last_name(t) in KEEP_LISTS for t in targets):
            value = getattr(item, "value", None)
            return isinstance(value, (ast.List, ast.Tuple, ast.Set)) and bool(value.elts)
    return False


def _class_of(node: ast.expr, keeping: set[str]) -> str | None:
    """The class that a call builds, when it is one of `keeping`."""
    if not isinstance(node, ast.Call):
        return None
    name = last_name(node.func)
    if isinstance(node.func, ast.Attribute) and name in (*_RETURN_SELF, "from_pretrained", "from_config"):
        inner = node.func.value
        name = last_name(inner) if not isinstance(inner, ast.Call) else (_class_of(inner, keeping) or "")
    return name if name in keeping else None


def _same_module(node: ast.expr) -> ast.expr:
    """`model.cuda().eval()` -> model."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RETURN_SELF:
        node = node.func.value
    return node


def _casts_to_fp32(file: SourceFile, node: ast.Call) -> bool:
    assert isinstance(node.func, ast.Attribute)
    if node.func.attr == "float" and not node.args:
        return True
    given = [*node.args, keyword(node, "dtype")]
    return node.func.attr == "to" and any(file.dotted(a) in ("torch.float32", "torch.float") for a in given if a is not None)


def _root(node: ast.Attribute) -> str | None:
    """`model.layers.norm` -> model; `self.norm` -> self, which counts where `self` itself is cast."""
    current: ast.expr = node
    while isinstance(current, ast.Attribute):
        current = current.value
    return current.id if isinstance(current, ast.Name) else None


def _loop_names(file: SourceFile, nodes: list[ast.Call | ast.Assign]) -> dict[str, str]:
    """A loop's name for a part -> the model: `for m in model.modules()`, `for name, p in model.named_parameters()`."""
    found: dict[str, str] = {}
    for node in nodes:
        loop = file.parents.get(node)
        if isinstance(loop, ast.For) and loop.iter is node and last_name(node).endswith(("modules", "children", "parameters")):
            target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
            receiver = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
            if isinstance(receiver, ast.Name):
                found[last_name(target)] = receiver.id
    return found


def _in_place(file: SourceFile, node: ast.Call, receiver: ast.expr) -> bool:
    """A module's cast: nothing uses its result, but for the name it already has. A tensor's would be used."""
    parent = file.parents.get(node)
    if isinstance(parent, ast.Assign):
        return len(parent.targets) == 1 and ast.unparse(parent.targets[0]) == ast.unparse(receiver)
    return isinstance(parent, ast.Expr)
