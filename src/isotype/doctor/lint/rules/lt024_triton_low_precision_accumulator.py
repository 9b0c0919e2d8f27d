from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ..rule import Hit, Rule
from ..source import SourceFile
from ..triton.kernel import Kernel, KernelEvent, is_activation
from ..triton.kernels import kernels
from ..triton.launches import against, leads


class TritonLowPrecisionAccumulator(Rule):
    """a kernel sums over a loop, or over its programs, in less than fp32

    Why
    ---
    Tensor cores accumulate one `tl.dot` in fp32; an accumulator of fp16, bf16 or the pointer's element type rounds after each round of
    the loop, and overflows at 65504 in fp16. The error grows with the length of the loop, and no test at a small size shows it.

    Example
    -------
    ```python
    acc = tl.zeros((M, N), dtype=c_ptr.dtype.element_ty)
    for k in range(0, K, BLOCK_K):
        acc += tl.dot(a, b)
    ```

    Use instead
    -----------
    ```python
    acc = tl.zeros((M, N), dtype=tl.float32)
    ...
    tl.store(c_ptr + offsets, acc.to(c_ptr.dtype.element_ty))
    ```

    Fix safety
    ----------
    There is no automatic fix: the store may rely on the accumulator's dtype.

    Known problems
    --------------
    `tl.atomic_add` into a buffer is reported where a launch is followed that hands it a low precision.
    How long a loop is that is not written out in numbers is not known here. An accumulator of a pointer's element type is reported where
    something shows that the pointer holds floats: its name, a cast of what is loaded from it, a product or an fp32 value added.
    """

    code = "LT024"
    name = "triton-low-precision-accumulator"
    on = False
    by_name = True
    first_look = (9, 30)
    words = ("triton",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for kernel in kernels(file):
            for event in kernel.events:
                said = _said(kernel, event)
                if said is not None:
                    message, cause, fix = said
                    yield Hit(
                        node=event.node,
                        message=message,
                        cause=cause,
                        fix=fix,
                        elsewhere=partial(against, file, kernel, event),
                        leads=partial(leads, file, kernel, event),
                        only_reached=event.kind in ("atomic", "reread"),
                    )


def _said(kernel: Kernel, event: KernelEvent) -> tuple[str, str, str] | None:
    """Message, cause and fix; None for an event that is none of this rule's."""
    name, held = event.name, event.before
    if event.kind == "atomic":
        return (
            f"tl.atomic_add sums into {name} in its element type, which a launch makes bf16",
            f"each program adds its part to {name}, and each addition rounds to the buffer's dtype: in bf16 (8 bits) parts below "
            "1/256 of the sum are lost, and the result depends on the order",
            "allocate the buffer in torch.float32 where the kernel is launched, and cast it afterwards",
        )
    if event.kind == "reread":
        return (
            f"{kernel.node.name} reads back what it stored in {name}, and stores it again: it was rounded in between",
            f"a value that was stored in {name} has been rounded to its element type, bf16 (8 bits) for a bf16 buffer: what is "
            "added to or taken from it afterwards meets the rounding error, and a small difference is lost",
            "keep the value in tl.float32 until its last store, or compute it again",
        )
    if event.kind == "sum":
        return (
            f"tl.{name} adds in {held}: what it adds was cast down first",
            f"tl.{name} adds in the dtype of its argument, {held}: in bf16 (8 bits) parts below 1/256 of the sum are lost, "
            "also if the variable that takes the result has another dtype",
            f"cast the argument: tl.{name}((...).to(tl.float32), ...), or leave out the cast before the sum",
        )
    if event.kind == "accumulator" and _sums_floats(kernel, event):
        return (
            f"`{name}` accumulates over a loop in {held}",
            f"every addition rounds to {held}: bf16 keeps 8 bits, fp16 overflows at 65504; tl.float32 does neither",
            "tl.zeros(..., dtype=tl.float32), and cast once at the store",
        )
    return None


def _sums_floats(kernel: Kernel, event: KernelEvent) -> bool:
    """Whether the accumulator holds floats for certain: pointers may as well be to counts."""
    pointer = event.before.loaded
    if event.after.type in ("int", "bool"):
        return False
    if pointer is None or event.after.type in ("fp32", "fp16", "bf16"):
        return True
    return is_activation(pointer) or pointer in kernel.casts | kernel.floats
