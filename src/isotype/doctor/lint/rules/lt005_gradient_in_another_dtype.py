from __future__ import annotations

import ast
from collections.abc import Iterator

from ....finding import Severity
from ..dataflow.functions import function_classes
from ..dataflow.values import Items, Tensor
from ..rule import Hit, Rule
from ..source import SourceFile
from .evidence import details


class GradientInAnotherDtype(Rule):
    """backward returns a gradient in another dtype than its tensor has

    Why
    ---
    Autograd casts such a gradient without a word, so `.grad.dtype` looks right. A bf16 gradient for an fp32 weight has been rounded
    already; an fp32 gradient for a bf16 activation takes twice the memory until it is cast.

    Example
    -------
    ```python
    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return (dy.float() * x.float()).sum(-1, keepdim=True).expand_as(x)     # fp32 for a bf16 x
    ```

    Use instead
    -----------
    ```python
        return (dy.float() * x.float()).sum(-1, keepdim=True).expand_as(x).to(x.dtype)
    ```

    Fix safety
    ----------
    There is no automatic fix.

    Known problems
    --------------
    Off by default: nothing fails, and functions that rely on autograd's cast are common. Only pure bf16 inputs are looked at.
    """

    code = "LT005"
    name = "gradient-in-another-dtype"
    severity = Severity.NOTE
    on = False
    words = ("autograd",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for function in function_classes(file):
            if function.forward is None:
                continue
            skip = 1 if function.setup_context is None else 0
            names = [a.arg for a in function.forward.args.args][skip:]
            seen: set[int] = set()
            for event in function.events:
                if event.kind != "returned" or event.phase != "backward" or event.scenario.autocast or event.node.lineno in seen:
                    continue
                value = event.value
                values = value.known if isinstance(value, Items) and value.known is not None else [value]
                wrong = [
                    f"{name} gets {v.dtype}"
                    for name, v in zip(names, values)
                    if isinstance(v, Tensor) and v.floating and v.dtype != event.scenario.inputs
                ]
                if wrong and isinstance(event.node, ast.Return):
                    seen.add(event.node.lineno)
                    yield Hit(
                        node=event.node,
                        message=f"gradients in another dtype than their tensors: {', '.join(wrong)} with {event.scenario}",
                        cause="autograd casts a gradient to its tensor's dtype silently: memory, or precision already lost",
                        fix="return each gradient in its tensor's dtype: `.to(x.dtype)`",
                        details=details(event),
                    )
