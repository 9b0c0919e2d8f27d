"""Where autocast is switched on by a `with`: shared by the rules about what such a region holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..source import Function, SourceFile, keyword, last_name


def autocast_regions(file: SourceFile) -> Iterator[ast.With | Function]:
    """`with` statements and decorated functions that switch autocast on , not those with a literal `enabled=False`."""
    named = _named_contexts(file)
    for node in file.nodes(ast.With):
        for item in node.items:
            expression = item.context_expr
            if is_autocast_call(file, expression) or (isinstance(expression, ast.Name) and expression.id in named):
                yield node
                break
        else:
            if any(_enters(file, statement) for statement in node.body):  # a stack of contexts
                yield node
    for function in file.functions():
        if any(is_autocast_call(file, d) for d in function.decorator_list):
            yield function


def is_autocast_call(file: SourceFile, node: ast.AST) -> bool:
    """`torch.autocast(...)`, also imported under another name, and `accelerator.autocast()`; not switched off by a literal."""
    if not isinstance(node, ast.Call) or "autocast" not in (last_name(node.func), file.dotted(node.func).rpartition(".")[2]):
        return False
    return not is_switched_off(node)


def is_switched_off(call: ast.Call) -> bool:
    """Whether a literal switches this autocast off: `autocast("cuda", enabled=False)`."""
    return any(isinstance(v, ast.Constant) and v.value is False for v in (keyword(call, "enabled"), *call.args[:1]))


def _enters(file: SourceFile, node: ast.stmt) -> bool:
    """`stack.enter_context(torch.autocast(...))`."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and last_name(call.func) == "enter_context" and any(is_autocast_call(file, a) for a in call.args)


def _named_contexts(file: SourceFile) -> set[str]:
    """Names bound to an autocast context: `ctx = nullcontext() if cpu else torch.autocast("cuda", dtype)`."""
    return {
        target.id
        for node in file.nodes(ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and any(is_autocast_call(file, inner) for inner in ast.walk(node.value))
    }
