from __future__ import annotations

import ast
from collections.abc import Iterator

from ....finding import Severity
from ..dataflow.functions import FunctionClass, function_classes
from ..dataflow.torch_names import LOWER
from ..rule import Hit, Rule
from ..source import SourceFile, last_name, own_nodes


class HalfDecoratedFunction(Rule):
    """custom_fwd without custom_bwd or the reverse, two devices, or custom_fwd beside setup_context

    Why
    ---
    The two decorators are one mechanism: custom_fwd notes on `ctx` whether autocast was on, custom_bwd reads that note. custom_bwd alone
    raises AttributeError in the first backward; so does custom_fwd on a forward with a separate `setup_context`, whose first argument is
    no `ctx`. custom_fwd alone leaves backward outside autocast, where its matrix products meet mixed dtypes. Decorators for two devices
    are each half a pair on either.

    Example
    -------
    ```python
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x, w): ...

    @staticmethod
    def backward(ctx, dy): ...
    ```

    Use instead
    -----------
    ```python
    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, dy): ...
    ```

    Fix safety
    ----------
    There is no automatic fix.

    Known problems
    --------------
    custom_fwd alone is reported only when backward has a matrix product, or hands its tensors to functions that may hold one;
    a setup_context with a decorator of its own beside staticmethod is taken to leave the note itself;
    with `cast_inputs` the forward ran without autocast and nothing is reported. Decorators of other packages count as the torch
    decorator that they are named after.
    """

    code = "LT003"
    name = "half-decorated-function"
    first_look = (0, 15)
    on = False
    words = ("custom_fwd", "custom_bwd")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for function in function_classes(file):
            hit = _fault(function)
            if hit:
                yield hit


def _fault(function: FunctionClass) -> Hit | None:
    fwd, bwd, name = function.custom_fwd, function.custom_bwd, function.cls.name
    if function.forward is None or function.backward is None:
        return None
    if fwd and function.setup_context is not None and len(function.setup_context.decorator_list) < 2:
        return Hit(
            node=fwd.node,
            message=f"{name}: custom_fwd on a forward with a separate setup_context raises AttributeError",
            cause="custom_fwd stores its note on the first argument of forward; with setup_context that is a tensor, not ctx",
            fix="merge setup_context into forward(ctx, ...), or cast by hand inside forward and backward",
            severity=Severity.ERROR,
        )
    if bwd and not fwd and not _hands_ctx_on(function.forward):
        return Hit(
            node=bwd.node,
            message=f"{name}: custom_bwd on backward, but no custom_fwd on forward",
            cause="custom_bwd reads the note that custom_fwd leaves on ctx (ctx._fwd_used_autocast): backward of this autograd.Function "
            "raises AttributeError",
            fix="decorate forward with torch.amp.custom_fwd for the same device_type",
            severity=Severity.ERROR,
        )
    if fwd and not bwd and fwd.cast_inputs is None and _multiplies(function.backward):
        return Hit(
            node=fwd.node,
            message=f"{name}: custom_fwd on forward, but no custom_bwd on backward",
            cause="backward of this autograd.Function runs outside autocast while its forward ran inside: its matmul gets a gradient of "
            "autocast's dtype and saved tensors of theirs",
            fix="decorate backward with torch.amp.custom_bwd for the same device_type",
        )
    if fwd and bwd and fwd.device and bwd.device and fwd.device != bwd.device:
        return Hit(
            node=bwd.node,
            message=f"{name}: custom_fwd is for {fwd.device!r} and custom_bwd for {bwd.device!r}",
            cause=f"each decorator acts for its own device_type only: under {fwd.device} autocast backward is not covered, and under "
            f"{bwd.device} autocast forward is not",
            fix="give custom_fwd and custom_bwd the same device_type",
        )
    return None


def _hands_ctx_on(forward: ast.FunctionDef) -> bool:
    """Whether forward calls another function's forward with its own ctx, which may leave the note there."""
    return any(isinstance(n, ast.Call) and any(last_name(a) == "ctx" for a in n.args) for n in own_nodes(forward))


def _multiplies(backward: ast.FunctionDef) -> bool:
    for node in own_nodes(backward):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return True
        if isinstance(node, ast.Call) and last_name(node.func) in LOWER:
            return True
    return False
