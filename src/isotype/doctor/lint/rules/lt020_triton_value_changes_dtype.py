from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from ....finding import Severity
from ..rule import Edit, FixSafety, Hit, Rule
from ..source import SourceFile, last_name
from ..triton.kernel import Kernel, KernelEvent, is_activation
from ..triton.kernels import kernels
from ..triton.launches import against, leads


class TritonValueChangesDtype(Rule):
    """a Triton value changes its dtype inside a run-time branch or loop

    Why
    ---
    A run-time `if` or `for` in a kernel must leave every variable with the type it had. A value loaded from a bf16 pointer and cast to
    fp32 inside the branch does not: "initial value for `x` is of type bf16, but the then block redefines it as fp32". With an fp32
    pointer the same kernel compiles, so the fault waits for the first bf16 model. A branch on a `tl.constexpr` is decided while
    compiling and may change types: a flag that lost its `constexpr` turns a working kernel into a failing one.

    Example
    -------
    ```python
    x = tl.load(x_ptr + cols)
    if DO_SCALE:
        x = scale * x.to(tl.float32)
    ```

    Use instead
    -----------
    ```python
    x = tl.load(x_ptr + cols).to(tl.float32)
    if DO_SCALE:
        x = scale * x
    ```

    Fix safety
    ----------
    Safe: `.to(tl.float32)` is put after the load. For fp32 pointers it does nothing, for others the kernel did not compile.

    Known problems
    --------------
    Reported only where the kernel itself casts values of that pointer to fp32 somewhere, or the pointer's name says that it holds
    activations or weights: one that is always fp32 needs no cast.
    """

    code = "LT020"
    name = "triton-value-changes-dtype"
    on = False
    by_name = True
    first_look = (0, 6)
    severity = Severity.ERROR
    fix_safety = FixSafety.SAFE
    words = ("triton",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for kernel in kernels(file):
            for event in kernel.events:
                if event.kind in ("branch", "loop") and _fails(kernel, event):
                    yield _hit(file, kernel, event)


def _fails(kernel: Kernel, event: KernelEvent) -> bool:
    """Whether the two types certainly differ for some caller."""
    before, after = event.before, event.after
    if before.loaded:
        return before.loaded in kernel.casts or is_activation(before.loaded)
    if after.loaded:  # widened first, then as loaded: if the pointer is always fp32, both are correct
        return after.loaded in kernel.casts and is_activation(after.loaded)
    return True


def _hit(file: SourceFile, kernel: Kernel, event: KernelEvent) -> Hit:
    flags = _flags(kernel, event.test) if event.test is not None else []
    before, after = str(event.before), str(event.after)
    block = f"the run-time branch `if {file.snippet(event.test, 40)}`" if event.test is not None else "a run-time loop"
    lost = (
        f"; {', '.join(flags)} {'is' if len(flags) == 1 else 'are'} not tl.constexpr, so the branch is taken at run time" if flags else ""
    )
    start = event.before.node
    load = start if isinstance(start, ast.Call) and last_name(start.func) == "load" else None
    source = f"tl.load in line {load.lineno}" if load is not None else "its first assignment"
    constexpr = f", or declare `{flags[0]}: tl.constexpr`" if flags else ""
    mendable = load is not None and event.after.type == "fp32" and file.imports.get("tl") == "triton.language"
    return Hit(
        node=event.node,
        message=f"`{event.name}` is {before} before {block} and {after} after it",
        cause=f"a value may not change its type in a run-time branch or loop: {source} gives `{event.name}` {before}, and this "
        f"redefines it as {after.replace('fp32', 'float32')}{lost}. It compiles for fp32 pointers and fails for bf16",
        fix=f"cast at load: `tl.load(...).to(tl.float32)`, and leave the dtype alone inside{constexpr}",
        edit=Edit.at("append", load, ".to(tl.float32)") if load is not None and mendable else None,
        elsewhere=partial(against, file, kernel, event),
        leads=partial(leads, file, kernel, event),
    )


def _flags(kernel: Kernel, test: ast.expr) -> list[str]:
    """Parameters in the test that are written like compile-time flags."""
    names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    return sorted(n for n in names if n.isupper() and n in kernel.parameters and n not in kernel.constexprs)
