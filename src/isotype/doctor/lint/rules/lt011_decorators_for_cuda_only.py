from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..dataflow.functions import function_classes
from ..repository import Repository
from ..rule import Hit, Rule
from ..source import SourceFile, last_name
from .evidence import details, first_of_each, operands

OTHER_DEVICES = frozenset({"cpu", "xpu", "npu", "mps", "hpu"})


class DecoratorsForCudaOnly(Rule):
    """custom_fwd and custom_bwd for "cuda", or a question about CUDA's autocast, in code that any device can run

    Why
    ---
    The decorators act for the device they name. Under CPU, XPU or NPU autocast a function decorated for "cuda" is not decorated at all,
    and its backward meets a bf16 gradient with fp32 saved tensors. `torch.cuda.amp.custom_fwd`, besides being deprecated, names "cuda" too.
    `torch.is_autocast_enabled()` without an argument answers for CUDA: a function that asks it before it casts CPU tensors casts none.

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
    or casts inside forward and backward, which hold on every device; `torch.is_autocast_enabled(x.device.type)`.

    Known problems
    --------------
    Decorators: reported only when the methods were followed to a product that is refused without them, in a file that speaks of another
    device ("cpu", "xpu", ...) and uses no Triton and no CUDA extension. Questions: only in a function that asks for the CPU's dtype too,
    in a repository that opens autocast for a CPU. Where nothing is cast, fp32 is computed: slower than asked for, and seldom wrong.
    """

    code = "LT011"
    name = "decorators-for-cuda-only"
    on = False
    by_name = True
    first_look = (0, 2)
    words = ("custom_fwd", "is_autocast_enabled()")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        yield from _asked_of_cuda(file)
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


def _asked_of_cuda(file: SourceFile) -> Iterator[Hit]:
    """`torch.is_autocast_enabled()` in a function that goes on to ask for the dtype of the CPU's autocast."""
    for function in file.functions():
        calls = [n for n in file.own(function) if isinstance(n, ast.Call)]
        asked = next((c for c in calls if file.dotted(c.func) == "torch.is_autocast_enabled" and not (c.args or c.keywords)), None)
        about = [c for c in calls if last_name(c.func) == "get_autocast_cpu_dtype" or _of_the_cpu(c, "get_autocast_dtype")]
        if asked is None or not about or any(last_name(c.func) == "is_autocast_cpu_enabled" or _of_the_cpu(c) for c in calls):
            continue
        yield Hit(
            node=asked,
            message="torch.is_autocast_enabled() without an argument answers for CUDA, and this function is for the CPU as well",
            cause=f"line {about[0].lineno} asks for the dtype of the CPU's autocast, in a branch that is taken only where CUDA's is on: "
            "under CPU autocast nothing is cast",
            fix="torch.is_autocast_enabled(tensor.device.type)",
            leads=partial(_opened_for_the_cpu, file, f"line {about[0].lineno} asks for the dtype of the CPU's autocast"),
        )


def _opened_for_the_cpu(file: SourceFile, here: str, repository: Repository | None) -> tuple[str, str]:
    """Where the repository opens autocast on a CPU; else "" and what is missing."""
    if repository is None:
        return here, ""
    spot = repository.autocast_of_the_cpu(Path(file.path))
    return (f"{spot} opens autocast for the CPU, or for any device", "") if spot else ("", f"{here}, but nothing here opens it")


def _of_the_cpu(call: ast.Call, name: str = "is_autocast_enabled") -> bool:
    return last_name(call.func) == name and any(isinstance(a, ast.Constant) and a.value == "cpu" for a in call.args)
