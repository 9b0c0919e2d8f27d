from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from ....finding import Severity
from ..rule import Edit, FixSafety, Hit, Rule
from ..source import SourceFile
from ..triton.kernels import is_activation, kernels
from ..triton.launches import against, leads


class TritonMathInLowPrecision(Rule):
    """tl.exp, tl.log and their like get a value as it was loaded

    Why
    ---
    Triton's exp, log, sqrt, sin, cos and sigmoid exist for fp32 and fp64 only: for a bf16 pointer the kernel does not compile ("Expected
    dtype ['fp32', 'fp64'] but got bf16").

    Example
    -------
    ```python
    x = tl.load(x_ptr + offsets)
    y = x * tl.exp(-x)
    ```

    Use instead
    -----------
    ```python
    x = tl.load(x_ptr + offsets).to(tl.float32)
    ```

    Fix safety
    ----------
    Safe: `.to(tl.float32)` is put after the load. For fp32 pointers it does nothing, for others the kernel did not compile.

    Known problems
    --------------
    Reported only for values cast to bf16 or fp16, and for pointers whose name says that they hold activations or weights: a log-sum-exp
    or a gate is often fp32 by the launcher's doing.
    """

    code = "LT023"
    name = "triton-math-in-low-precision"
    on = False
    by_name = True
    first_look = (2, 9)
    severity = Severity.ERROR
    fix_safety = FixSafety.SAFE
    words = ("triton",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for kernel in kernels(file):
            mended: set[ast.AST] = set()
            for event in kernel.events:
                pointer = event.before.loaded
                if event.kind != "math" or (pointer is not None and not is_activation(pointer)):
                    continue
                load = _load_of(file, kernel.node, pointer) if pointer is not None else None
                held = f"the element type of {pointer}" if pointer is not None else str(event.before.type)
                when = f"with bf16 or fp16 in {pointer}, " if pointer is not None else ""
                new = load is not None and load not in mended and file.imports.get("tl") == "triton.language"
                yield Hit(
                    node=event.node,
                    message=f"tl.{event.name} of a value in {held}",
                    cause=f"Triton's math functions take fp32 (float32) or fp64 only: {when}tl.{event.name} does not compile",
                    fix="upcast at load: `tl.load(...).to(tl.float32)`, and cast down at the store",
                    edit=Edit.at("append", load, ".to(tl.float32)") if load is not None and new else None,
                    elsewhere=partial(against, file, kernel, event),
                    leads=partial(leads, file, kernel, event),
                )
                if load is not None:
                    mended.add(load)


def _load_of(file: SourceFile, kernel: ast.FunctionDef, pointer: str) -> ast.Call | None:
    """The only load of this pointer, when there is but one and nothing follows it."""
    loads = [
        n
        for n in file.own(kernel)
        if isinstance(n, ast.Call)
        and file.dotted(n.func) == "triton.language.load"
        and any(isinstance(inner, ast.Name) and inner.id == pointer for a in n.args for inner in ast.walk(a))
    ]
    return loads[0] if len(loads) == 1 and not isinstance(file.parents.get(loads[0]), ast.Attribute) else None
