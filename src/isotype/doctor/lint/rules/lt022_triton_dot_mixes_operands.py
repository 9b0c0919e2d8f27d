from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from ....finding import Severity
from ..rule import Hit, Rule
from ..source import SourceFile, keyword
from ..triton.kernel import Kernel, KernelEvent, is_activation
from ..triton.kernels import kernels
from ..triton.launches import against, leads, mixed


class TritonDotMixesOperands(Rule):
    """tl.dot gets one operand in fp32 and the other as it was loaded

    Why
    ---
    "Both operands must be same dtype": `tl.dot` does not promote. A probability computed in fp32 times a value loaded from a bf16
    pointer compiles as long as the pointer is fp32. A float argument multiplied into one operand has the same effect.

    Example
    -------
    ```python
    p = tl.exp(scores.to(tl.float32) - m)
    acc += tl.dot(p, tl.load(v_ptr + rows))
    ```

    Use instead
    -----------
    ```python
    v = tl.load(v_ptr + rows)
    acc += tl.dot(p.to(v.dtype), v)
    ```

    Fix safety
    ----------
    There is no automatic fix: casting down uses the tensor cores, casting up keeps precision.

    Known problems
    --------------
    Two operands loaded from two pointers are reported where an autograd.Function is followed to a launch that hands them two dtypes.
    Pointers whose name does not say that they hold activations or weights are left alone.
    """

    code = "LT022"
    name = "triton-dot-mixes-operands"
    severity = Severity.ERROR
    on = False
    by_name = True
    first_look = (0, 1)
    words = ("triton",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for kernel in kernels(file):
            for event in kernel.events:
                if event.kind == "dot_of_pointers":
                    yield _of_two_pointers(file, kernel, event)
                if event.kind != "dot":
                    continue
                if isinstance(event.node, ast.Call) and keyword(event.node, "input_precision") is not None:
                    continue  # says how fp32 operands are multiplied: both are meant to be fp32
                pointer = event.before.loaded or event.after.loaded
                wide = event.after if event.before.loaded else event.before
                if pointer is not None and not (wide.type == "fp32" and is_activation(pointer)):
                    continue
                yield Hit(
                    node=event.node,
                    message=f"tl.dot gets {event.before} and {event.after}",
                    cause="both operands of tl.dot must have the same dtype, it does not promote: fp32 against the pointer's element type "
                    "fails to compile as soon as that is bf16 or fp16",
                    fix="cast one operand: `.to(other.dtype)`, and apply a float scale after the dot",
                    elsewhere=partial(against, file, kernel, event),
                    leads=partial(leads, file, kernel, event),
                )


def _of_two_pointers(file: SourceFile, kernel: Kernel, event: KernelEvent) -> Hit:
    return Hit(
        node=event.node,
        message=f"tl.dot gets {event.before} and {event.after}, which a launch makes two dtypes",
        cause="both operands of tl.dot must have the same dtype, it does not promote; an autograd.Function without custom_fwd and "
        "custom_bwd hands over a gradient in autocast's dtype beside what it saved in another",
        fix="cast in the kernel, `.to(other.dtype)`, or cast the tensors to one dtype before the launch",
        leads=partial(mixed, file, kernel, event),
        only_reached=True,
    )
