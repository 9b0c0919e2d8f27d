"""CF018 finds calls that must not be inside an autocast region. The rule searches the syntax tree
of a program.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ....finding import Finding, Place, Severity

CODE = "CF018"
_RELEVANT_CODE = re.compile(r"autocast.*\.(?:backward|manual_backward|step)\(", re.DOTALL)
_LOSS_NAME = re.compile(r"loss|^(scale|accelerator|fabric|sum|mean)$", re.IGNORECASE)
_OPTIMIZER_NAME = re.compile(r"optim|^opt(_\w+)?$|^(grad_)?scaler$", re.IGNORECASE)
_OTHER_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def autocast_around_backward(text: str, display_path: str) -> Iterator[Finding]:
    """backward or an optimizer step inside an autocast region

    **Why it matters.** Autocast chooses dtypes for the forward pass, and backward uses the same
    dtypes. If backward runs inside the region, autocast applies a second time to hand-written
    backwards and to recomputations. An optimizer step inside the region is worse. Autocast keeps a
    low-precision copy of each weight until the region ends, so that a forward pass after the step
    uses the old weights.

    **Example.** `with torch.autocast("cuda", dtype=torch.bfloat16):` around a loop with
    `loss.backward()` and `optimizer.step()`.

    **What to do.** Close the region after the loss: only the forward pass and the loss belong
    inside `with autocast`.

    **Known problems.** Only calls that are written inside the region are found, not calls in
    functions that the region calls. Regions with `enabled=False` are skipped. In a folder, test
    files are not read.
    """
    if not _RELEVANT_CODE.search(text):
        return
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return  # `read_calls` reports it
    aliases = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == "autocast" and alias.asname
    }
    for region, symbol in _find_autocast_regions(tree, {"autocast", *aliases}):
        for call, is_disabled_between in _method_calls(region):
            if (violation := _classify_call(call)) is None:
                continue
            call_name, cause, severity = violation
            if severity is Severity.WARNING and (is_disabled_between or _has_zero_factor(call)):
                continue
            yield Finding(
                code=CODE,
                severity=severity,
                message=f"{call_name} runs inside the autocast region of line {region.lineno}",
                place=Place(file=display_path, line=call.lineno, symbol=symbol),
                cause=cause,
                fix=(
                    "do this outside: only the forward pass and the loss belong inside `with"
                    " autocast`"
                ),
            )


def _find_autocast_regions(
    tree: ast.Module, names: set[str]
) -> Iterator[tuple[ast.With | ast.FunctionDef, str]]:
    """Returns the `with` statements and decorated functions that switch autocast on, each with the
    qualified name of the enclosing function or class.
    """

    def enables_autocast(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and _last_name(node) in names and not _is_disabled(node)

    context_names = {  # ctx = nullcontext() if cpu else torch.autocast("cuda", dtype)
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(map(enables_autocast, ast.walk(node.value)))
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def opens_region(node: ast.With) -> bool:
        context_expressions = [item.context_expr for item in node.items]
        entered_contexts = [  # stack.enter_context(torch.autocast(...))
            argument
            for statement in node.body
            if isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and _last_name(statement.value) == "enter_context"
            for argument in statement.value.args
        ]
        return any(map(enables_autocast, (*context_expressions, *entered_contexts))) or any(
            isinstance(expression, ast.Name) and expression.id in context_names
            for expression in context_expressions
        )

    def visit(node: ast.AST, scope: str) -> Iterator[tuple[ast.With | ast.FunctionDef, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{scope}.{child.name}".lstrip(".")
            else:
                name = scope
            if (isinstance(child, ast.With) and opens_region(child)) or (
                isinstance(child, ast.FunctionDef)
                and any(map(enables_autocast, child.decorator_list))
            ):
                yield child, name
            else:
                yield from visit(child, name)

    yield from visit(tree, "")


def _method_calls(region: ast.AST, is_disabled: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """Yields the method calls in an autocast region. Each call comes with a flag that tells whether
    it is inside `autocast(enabled=False)`. Functions that are defined inside the region are
    skipped.
    """
    for child in ast.iter_child_nodes(region):
        if isinstance(child, _OTHER_SCOPES):
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            yield child, is_disabled
        if isinstance(child, ast.With):
            context_expressions = [item.context_expr for item in child.items]
        else:
            context_expressions = []
        disables_autocast = any(
            isinstance(expression, ast.Call)
            and "autocast" in _last_name(expression)
            and _is_disabled(expression)
            for expression in context_expressions
        )
        yield from _method_calls(child, is_disabled or disables_autocast)


def _classify_call(call: ast.Call) -> tuple[str, str, Severity] | None:
    """If a call does not belong inside an autocast region, returns its name, the cause and the
    severity. Returns None for other calls.
    """
    assert isinstance(call.func, ast.Attribute)
    receiver = _last_name(call.func.value)
    first_argument = _last_name(call.args[0]) if call.args else ""
    if call.func.attr in ("backward", "manual_backward"):
        # loss.backward(), engine.backward(loss)
        is_loss = _LOSS_NAME.search(receiver) or _LOSS_NAME.search(first_argument)
        if first_argument != "ctx" and (is_loss or call.func.attr == "manual_backward"):
            cause = (
                "backward follows the dtypes that forward used; under autocast, hand-written"
                " backwards and recomputation are cast again"
            )
            return f"{receiver}.backward", cause, Severity.WARNING
    if call.func.attr == "step" and _OPTIMIZER_NAME.search(receiver):
        cause = (
            "autocast caches a low-precision copy of each weight until its region ends: "
            "a forward pass after this optimizer step still uses the stale copies"
        )
        return f"{receiver}.step", cause, Severity.ERROR
    return None


def _has_zero_factor(call: ast.Call) -> bool:
    """True if a loss is multiplied by 0, as in `(logits * 0).sum().backward()`. The gradients of
    such a loss are zero in every dtype.
    """
    products = [
        node
        for node in ast.walk(call.func)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    ]
    return any(
        isinstance(side, ast.Constant) and side.value == 0
        for n in products
        for side in (n.left, n.right)
    )


def _is_disabled(call: ast.Call) -> bool:
    """True if a literal argument switches autocast off, as in `autocast("cuda", enabled=False)`."""
    enabled_values = [
        keyword.value for keyword in call.keywords if keyword.arg == "enabled"
    ] + call.args[:1]
    return any(isinstance(value, ast.Constant) and value.value is False for value in enabled_values)


def _last_name(node: ast.AST) -> str:
    """Returns the last part of a dotted name, for example `c` for `a.b.c`. For a call, returns the
    last part of the function's name. For any other node, returns "".
    """
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""
