from __future__ import annotations

import ast
from collections.abc import Iterator

from ..dataflow.functions import function_classes
from ..rule import Hit, Rule
from ..source import SourceFile
from .evidence import details, first_of_each, operands

OTHER_DEVICES = frozenset({"cpu", "xpu", "npu", "mps", "hpu"})


class DecoratorsForCudaOnly(Rule):
    """custom_fwd and custom_bwd for "cuda" around code that any device can run

    Why
    ---
    The decorators act for the device they name. Under CPU, XPU or NPU autocast a function decorated for "cuda" is not decorated at all,
    and its backward meets a bf16 gradient with fp32 saved tensors. `torch.cuda.amp.custom_fwd`, besides being deprecated, names "cuda" too.

    Example
    -------
    ```python
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x, w): ...
    ```

    Use instead
    -----------
    ```python
    custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=torch.accelerator.current_accelerator().type)
    ```
    or casts inside forward and backward, which hold on every device.

    Known problems
    --------------
    Reported only when the methods were followed to a product that is refused without the decorators, in a file that speaks of another
    device ("cpu", "xpu", ...) and uses no Triton and no CUDA extension.
    """

    code = "LT011"
    name = "decorators-for-cuda-only"
    words = ("custom_fwd",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        if any(name.split(".")[0] == "triton" or "cuda" in name.rpartition(".")[2] for name in file.imports.values()):
            return
        if not any(isinstance(n.value, str) and n.value in OTHER_DEVICES for n in file.nodes(ast.Constant)):
            return
        for function in function_classes(file):
            for event in first_of_each(function.hard_coded, "matmul", phase="backward"):
                assert function.custom_fwd is not None
                yield Hit(
                    node=function.custom_fwd.node,
                    message=f'{function.cls.name}: custom_fwd and custom_bwd are for "cuda" only, and backward needs them on any device',
                    cause=f"under autocast of another device_type (cpu, xpu) the decorators do nothing for this autograd.Function, and the "
                    f"matmul in line {event.node.lineno} gets mixed dtypes: {operands(event)}",
                    fix="name the device_type at run time, or cast the operands inside backward",
                    details=details(event),
                )
                break
