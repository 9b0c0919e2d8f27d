"""CF018: what does not belong inside an autocast region, found in a program's syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ....finding import Finding, Place, Severity

CODE = "CF018"
_WORTH_PARSING = re.compile(r"autocast.*\.(?:backward|manual_backward|step)\(", re.DOTALL)
_LOSS = re.compile(r"loss|^(scale|accelerator|fabric|sum|mean)$", re.IGNORECASE)
_OPTIMIZER = re.compile(r"optim|^opt(_\w+)?$|^(grad_)?scaler$", re.IGNORECASE)
_OTHER_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def autocast_around_backward(text: str, shown: str) -> Iterator[Finding]:
    """backward or an optimizer step inside an autocast region

    **Why it matters.** Autocast chooses dtypes for the forward pass; backward takes them over by
    itself. Run inside the region, hand-written backwards and recomputations see autocast a second
    time. An optimizer step inside it is worse: autocast keeps a low-precision copy of each weight
    until the region ends, so that a forward pass after the step multiplies with the weights from
    before it.

    **Example.** `with torch.autocast("cuda", dtype=torch.bfloat16):` around a loop with
    `loss.backward()` and `optimizer.step()`.

    **What to do.** Close the region after the loss: only the forward pass and the loss belong
    inside `with autocast`.

    **Known problems.** Only calls written inside the region are seen, not those of functions called
    from it. Regions with `enabled=False` are left alone; of a folder files of tests are not read.
    """
    if not _WORTH_PARSING.search(text):
        return
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return  # the reader of calls reports it
    renamed = {
        a.asname
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom)
        for a in n.names
        if a.name == "autocast" and a.asname
    }
    for region, symbol in _regions(tree, {"autocast", *renamed}):
        for call, switched_off_between in _calls(region):
            if (told := _told(call)) is None:
                continue
            what, why, severity = told
            if severity is Severity.WARNING and (switched_off_between or _of_zero(call)):
                continue
            yield Finding(
                code=CODE,
                severity=severity,
                message=f"{what} runs inside the autocast region of line {region.lineno}",
                place=Place(file=shown, line=call.lineno, symbol=symbol),
                cause=why,
                fix=(
                    "do this outside: only the forward pass and the loss belong inside `with"
                    " autocast`"
                ),
            )


def _regions(tree: ast.Module, names: set[str]) -> Iterator[tuple[ast.With | ast.FunctionDef, str]]:
    """`with` statements and decorated functions that switch autocast on, each with the name of the
    function around it.
    """

    def switches_on(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and _last_name(node) in names and not _is_off(node)

    contexts = {  # ctx = nullcontext() if cpu else torch.autocast("cuda", dtype)
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(map(switches_on, ast.walk(node.value)))
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def opens(node: ast.With) -> bool:
        given = [item.context_expr for item in node.items]
        entered = [  # stack.enter_context(torch.autocast(...))
            argument
            for s in node.body
            if isinstance(s, ast.Expr)
            and isinstance(s.value, ast.Call)
            and _last_name(s.value) == "enter_context"
            for argument in s.value.args
        ]
        return any(map(switches_on, (*given, *entered))) or any(
            isinstance(e, ast.Name) and e.id in contexts for e in given
        )

    def visit(node: ast.AST, within: str) -> Iterator[tuple[ast.With | ast.FunctionDef, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{within}.{child.name}".lstrip(".")
            else:
                name = within
            if (isinstance(child, ast.With) and opens(child)) or (
                isinstance(child, ast.FunctionDef) and any(map(switches_on, child.decorator_list))
            ):
                yield child, name
            else:
                yield from visit(child, name)

    yield from visit(tree, "")


def _calls(region: ast.AST, switched_off: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """Method calls of a region, not those of functions defined inside it, and whether
    `autocast(enabled=False)` stands between.
    """
    for child in ast.iter_child_nodes(region):
        if isinstance(child, _OTHER_SCOPES):
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            yield child, switched_off
        if isinstance(child, ast.With):
            given = [item.context_expr for item in child.items]
        else:
            given = []
        off = any(
            isinstance(e, ast.Call) and "autocast" in _last_name(e) and _is_off(e) for e in given
        )
        yield from _calls(child, switched_off or off)


def _told(call: ast.Call) -> tuple[str, str, Severity] | None:
    """What the call is, why it does not belong in the region, how bad that is."""
    assert isinstance(call.func, ast.Attribute)
    receiver = _last_name(call.func.value)
    given = _last_name(call.args[0]) if call.args else ""
    if call.func.attr in ("backward", "manual_backward"):
        # loss.backward(), engine.backward(loss)
        of_a_loss = _LOSS.search(receiver) or _LOSS.search(given)
        if given != "ctx" and (of_a_loss or call.func.attr == "manual_backward"):
            why = (
                "backward follows the dtypes that forward used; under autocast, hand-written"
                " backwards and recomputation are cast again"
            )
            return f"{receiver}.backward", why, Severity.WARNING
    if call.func.attr == "step" and _OPTIMIZER.search(receiver):
        why = (
            "autocast caches a low-precision copy of each weight until its region ends: "
            "a forward pass after this optimizer step still uses the stale copies"
        )
        return f"{receiver}.step", why, Severity.ERROR
    return None


def _of_zero(call: ast.Call) -> bool:
    """`(logits * 0).sum().backward()`: a pass for its side effects, whose gradients are zero in
    every dtype.
    """
    products = [
        n for n in ast.walk(call.func) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)
    ]
    return any(
        isinstance(side, ast.Constant) and side.value == 0
        for n in products
        for side in (n.left, n.right)
    )


def _is_off(call: ast.Call) -> bool:
    """`autocast("cuda", enabled=False)`, with a literal."""
    given = [k.value for k in call.keywords if k.arg == "enabled"] + call.args[:1]
    return any(isinstance(v, ast.Constant) and v.value is False for v in given)


def _last_name(node: ast.AST) -> str:
    """`a.b.c` -> c; `c` -> c; a call answers for its function; anything else is ""."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""
