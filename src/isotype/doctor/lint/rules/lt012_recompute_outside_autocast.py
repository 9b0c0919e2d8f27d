from __future__ import annotations

import ast
from collections.abc import Iterator

from ..dataflow.functions import FunctionClass, function_classes
from ..dataflow.plain import AUTOCAST
from ..rule import Hit, Rule
from ..source import Function, SourceFile, bindings, last_name, own_nodes


class RecomputeOutsideAutocast(Rule):
    """backward runs the forward code again, without forward's autocast

    Why
    ---
    A hand-written checkpoint keeps its inputs and calls the module again in backward, with gradients on. Backward runs outside autocast,
    so the second run computes in other dtypes than the first: fp32 where forward was bf16, or a refused product where an input was bf16
    and the weights are fp32. `torch.utils.checkpoint` keeps the autocast state for that reason.

    Example
    -------
    ```python
    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, dy)
        return None, x.grad
    ```

    Use instead
    -----------
    ```python
        with torch.enable_grad(), torch.autocast(x.device.type, dtype=ctx.autocast_dtype, enabled=ctx.autocast_enabled):
            y = ctx.run(x)
    ```
    with both noted in forward, or `torch.amp.custom_fwd` and `custom_bwd` on the pair, or `torch.utils.checkpoint.checkpoint`.

    Known problems
    --------------
    Recognised when forward keeps a callable on `ctx` that it also calls, or when both methods call the same module or function argument.
    An autocast context of one's own is recognised by the word autocast in its name.
    """

    code = "LT012"
    name = "recompute-outside-autocast"
    on = False
    by_name = True
    first_look = (4, 6)
    words = ("enable_grad", "set_grad_enabled")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for function in function_classes(file):
            hit = _fault(file, function)
            if hit:
                yield hit


def _fault(file: SourceFile, function: FunctionClass) -> Hit | None:
    forward, backward = function.forward, function.backward
    if forward is None or backward is None or (function.custom_fwd and function.custom_bwd):
        return None
    if any("autocast" in word for word in _words(backward)) or _restores_a_context(file, forward, backward):
        return None
    kept = _callables_kept(forward)
    local = _names_for(backward, kept)
    for node in _with_gradients(backward):
        for inner in own_nodes(node):
            if isinstance(inner, ast.Call) and _called(inner) in (kept | local):
                return Hit(
                    node=inner,
                    message=f"{function.cls.name}.backward recomputes `{file.snippet(inner, 40)}` outside autocast",
                    cause="backward of an autograd.Function runs outside autocast, and nothing here restores forward's autocast: the "
                    "recomputation runs in other dtypes than the forward pass it repeats, or a matmul in it gets mixed dtypes",
                    fix="re-enter autocast around the recomputation with the state noted in forward (torch.is_autocast_enabled, "
                    "torch.get_autocast_dtype), decorate with torch.amp.custom_fwd and custom_bwd, or use torch.utils.checkpoint",
                    scenario=AUTOCAST,
                )
    return None


def _with_gradients(backward: ast.FunctionDef) -> Iterator[ast.AST]:
    """The blocks that run with gradients on: `with enable_grad()`; all of it after `set_grad_enabled(True)` or under the decorator."""
    if any(last_name(d) == "enable_grad" for d in backward.decorator_list):
        yield backward
    for node in own_nodes(backward):
        if isinstance(node, ast.With) and any(last_name(i.context_expr) in ("enable_grad", "set_grad_enabled") for i in node.items):
            yield node
        elif isinstance(node, ast.Expr) and last_name(node.value) == "set_grad_enabled":
            yield backward


def _restores_a_context(file: SourceFile, forward: ast.FunctionDef, backward: ast.FunctionDef) -> bool:
    """`with ctx.region:`, or `with make_region(ctx):`, of what a function of this file that speaks of autocast made."""
    speaking = {f.name for f in file.functions() if any("autocast" in word for word in _words(f))}
    kept = {
        target.attr
        for node in own_nodes(forward)
        for target, value in bindings(node)
        if isinstance(target, ast.Attribute) and any(last_name(n) in speaking or "autocast" in last_name(n) for n in ast.walk(value))
    }
    entered = [item.context_expr for node in own_nodes(backward) if isinstance(node, ast.With) for item in node.items]
    return any(last_name(n) in kept | speaking for expression in entered for n in ast.walk(expression))


def _words(function: Function) -> Iterator[str]:
    for node in own_nodes(function):
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield last_name(node)


def _callables_kept(forward: ast.FunctionDef) -> set[str]:
    """`ctx.NAME` of a callable, or a list of them, that forward calls, as "ctx.NAME"."""
    arguments = {a.arg for a in (*forward.args.args, *forward.args.kwonlyargs)}
    called = {_plain_callee(n) for n in own_nodes(forward) if isinstance(n, ast.Call)}
    called_on_ctx = {_called(n) for n in own_nodes(forward) if isinstance(n, ast.Call)}
    for loop in own_nodes(forward):
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Name) and last_name(loop.target) in called:
            called.add(loop.iter.id)
    kept: set[str] = set()
    for node in own_nodes(forward):
        for target, value in bindings(node):
            if not isinstance(target, ast.Attribute) or not isinstance(value, ast.Name) or value.id not in arguments:
                continue
            if value.id in called or f"ctx.{target.attr}" in called_on_ctx:
                kept.add(f"ctx.{target.attr}")
    return kept


def _plain_callee(node: ast.Call) -> str:
    """`run(x)` and `module.forward(x)` -> run, module."""
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr in ("forward", "__call__"):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""


def _names_for(backward: ast.FunctionDef, kept: set[str]) -> set[str]:
    """Local names that stand for what was kept: `fn = ctx.fn`, `for layer in ctx.layers`."""
    found: set[str] = set()
    for node in own_nodes(backward):
        pairs = [(node.target, node.iter)] if isinstance(node, ast.For) else bindings(node)
        for target, value in pairs:
            if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and f"ctx.{value.attr}" in kept:
                found.add(target.id)
    return found


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr in ("forward", "__call__"):
        function = function.value
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"ctx.{function.attr}"
    return last_name(function)
