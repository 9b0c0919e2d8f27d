from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ....finding import Severity
from ..rule import Hit, Rule
from ..source import SourceFile, last_name, own_nodes
from .autocast_regions import autocast_regions, is_switched_off

LOSS = re.compile(r"loss|^(scale|accelerator|fabric|sum|mean)$", re.IGNORECASE)
OPTIMIZER = re.compile(r"optim|^opt(_\w+)?$|^(grad_)?scaler$", re.IGNORECASE)


class AutocastAroundBackward(Rule):
    """backward or an optimizer step inside an autocast region

    Why
    ---
    Autocast chooses dtypes for the forward pass; backward takes them over by itself. Run inside the region, hand-written backwards and
    recomputations see autocast a second time. An optimizer step inside it is worse: autocast keeps a low-precision copy of each weight
    until the region ends, so that a forward pass after the step multiplies with the weights from before it.

    Example
    -------
    ```python
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
    ```

    Use instead
    -----------
    ```python
    for batch in batches:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    ```

    Known problems
    --------------
    Only calls written inside the region are seen, not those of functions called from it. Regions with `enabled=False` are left alone.
    """

    code = "LT010"
    name = "autocast-around-backward"
    first_look = (15, 16)
    words = ("autocast",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for region in autocast_regions(file):
            inner = [n for n in own_nodes(region) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
            for call in sorted(inner, key=lambda n: n.lineno):
                told = _told(call)
                if told and not (told[2] is Severity.WARNING and (_stands_outside_again(file, call, region) or _of_zero(call))):
                    what, why, severity = told
                    yield Hit(
                        node=call,
                        message=f"{what} runs inside the autocast region of line {region.lineno}",
                        cause=why,
                        fix="do this outside: only the forward pass and the loss belong inside `with autocast`",
                        severity=severity,
                    )


def _stands_outside_again(file: SourceFile, call: ast.Call, region: ast.AST) -> bool:
    """Whether `with autocast(enabled=False)` stands between the region and the call: backward is right there, the cache is not."""
    parent = file.parents.get(call)
    while parent is not None and parent is not region:
        if isinstance(parent, ast.With) and any(_disables(item.context_expr) for item in parent.items):
            return True
        parent = file.parents.get(parent)
    return False


def _of_zero(call: ast.Call) -> bool:
    """`(logits * 0).sum().backward()`: a pass for its side effects, whose gradients are zero in every dtype."""
    assert isinstance(call.func, ast.Attribute)
    products = [n for n in ast.walk(call.func.value) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
    return any(isinstance(side, ast.Constant) and side.value == 0 for n in products for side in (n.left, n.right))


def _disables(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and "autocast" in last_name(node) and is_switched_off(node)


def _told(call: ast.Call) -> tuple[str, str, Severity] | None:
    """What the call is, why it does not belong in the region, how bad that is."""
    assert isinstance(call.func, ast.Attribute)
    receiver = last_name(call.func.value)
    if call.func.attr in ("backward", "manual_backward"):
        of_a_function = bool(call.args) and last_name(call.args[0]) == "ctx"
        of_a_loss = bool(call.args) and bool(LOSS.search(last_name(call.args[0])))  # engine.backward(loss)
        if not of_a_function and (LOSS.search(receiver) or of_a_loss or call.func.attr == "manual_backward"):
            why = "backward follows the dtypes that forward used; under autocast, hand-written backwards and recomputation are cast again"
            return f"{receiver}.backward", why, Severity.WARNING
    if call.func.attr == "step" and OPTIMIZER.search(receiver):
        why = (
            "autocast caches a low-precision copy of each weight until its region ends: "
            "a forward pass after this optimizer step still uses the stale copies"
        )
        return f"{receiver}.step", why, Severity.ERROR
    return None
