from __future__ import annotations

from collections.abc import Iterator

from ....finding import Severity
from ..dataflow.events import Event
from ..dataflow.functions import FunctionClass, function_classes
from ..rule import Hit, Rule
from ..source import SourceFile
from .evidence import details, dtypes, first_of_each_function, operands


class BackwardMixesDtypes(Rule):
    """a hand-written backward multiplies the gradient with a saved tensor of another dtype

    Why
    ---
    Under autocast the output of `forward` is bf16 while the inputs that it saved are fp32, and the gradient arrives in the output's
    dtype. `backward` runs outside autocast, as trainers call it, so its matrix products are not cast: "mat1 and mat2 must have the same
    dtype". The rule runs both methods on dtypes, fp32 and bf16 inputs, with autocast and without, and reports a product that would be
    refused. A function without custom_fwd and custom_bwd is not reported for that alone: casting to the gradient's dtype, computing
    gradients in forward, and re-entering autocast are all as good.

    Example
    -------
    ```python
    class Project(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()            # bf16 under autocast

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors    # fp32
            return dy @ w, dy.t() @ x   # bf16 @ fp32
    ```

    Use instead
    -----------
    ```python
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, x, w): ...

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, dy): ...
    ```
    or cast in backward: `dy @ w.to(dy.dtype)`.

    Fix safety
    ----------
    There is no automatic fix: which of the two remedies is right depends on the precision that the products should have.

    Known problems
    --------------
    Which arguments are weights, and may be fp32 while activations are bf16, is read from their names. Results of functions outside the
    package (kernels, extensions) have no dtype here, and nothing is said of what they meet.
    """

    code = "LT002"
    name = "backward-mixes-dtypes"
    on = False
    by_name = True
    first_look = (19, 38)
    in_tests = False
    severity = Severity.WARNING
    words = ("autograd",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for function in function_classes(file):
            backward = [e for e in function.events if e.phase == "backward"]
            for event, also in first_of_each_function(file, backward, "matmul", "attention"):
                yield _hit(file, function, event, also)


def _hit(file: SourceFile, function: FunctionClass, event: Event, also: list[int]) -> Hit:
    decorated = function.custom_fwd is not None and function.custom_bwd is not None
    autocast = event.scenario.autocast and not decorated
    why = (
        "an autograd.Function without custom_fwd and custom_bwd runs its backward outside autocast, where a matmul casts nothing"
        if autocast
        else "an autograd.Function gets its gradient in the dtype that forward returned, and this matmul casts nothing"
    )
    remedy = (
        "decorate forward with torch.amp.custom_fwd(device_type=...) and backward with torch.amp.custom_bwd(device_type=...), or "
        if autocast
        else ""
    )
    label = event.operands[1][0]
    return Hit(
        node=event.node,
        message=f"{function.cls.name}.backward: {event.operation} gets {dtypes(event)} with {event.scenario}",
        cause=f"{why}: {operands(event)}",
        fix=f"{remedy}cast the operands to one dtype, for example `{label}.to({event.operands[0][0]}.dtype)`",
        details=details(event, file, also),
        scenario=event.scenario,
        symbol=event.symbol,
    )
