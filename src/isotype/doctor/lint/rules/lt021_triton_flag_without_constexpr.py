from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ....finding import Severity
from ..rule import Hit, Rule
from ..source import SourceFile, last_name
from ..triton.kernel import Kernel
from ..triton.kernels import kernels

FLAG = re.compile(r"^(HAS|USE|IS|DO|STORE|SAVE|WITH|RETURN|ENABLE|APPLY|CAUSAL|EVEN|OUTPUT)(_|$)")


class TritonFlagWithoutConstexpr(Rule):
    """a kernel parameter that has to be known while compiling is not `tl.constexpr`

    Why
    ---
    Shapes of blocks must be constexpr: without it the kernel does not compile. A flag without it makes a branch run at run time, where no
    value may change its dtype, and costs a branch in every program. Both happen when a signature is copied and the annotation lost.

    Example
    -------
    ```python
    @triton.jit
    def kernel(x_ptr, n, HAS_BIAS, BLOCK: tl.constexpr):
        if HAS_BIAS:
            ...
    ```

    Use instead
    -----------
    ```python
    def kernel(x_ptr, n, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    ```

    Fix safety
    ----------
    There is no automatic fix: a flag that varies from launch to launch would be compiled twice.

    Known problems
    --------------
    A flag whose branch changes no dtype is a note only; where a dtype changes, LT020 says so. Only kernels launched in the same file are
    looked at. A flag is recognised by its name (HAS_BIAS, USE_SCALE, in capitals) beside others that are constexpr.
    """

    code = "LT021"
    name = "triton-flag-without-constexpr"
    words = ("triton",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        # what another kernel calls gets its caller's constexprs, annotated or not; what is launched does not
        launched = {last_name(n.value) for n in file.nodes(ast.Subscript)}
        for kernel in kernels(file):
            if kernel.node.name not in launched:
                continue
            for name in kernel.parameters:
                if name in kernel.constexprs:
                    continue
                shape = _as_shape(file, kernel, name)
                branch = _as_flag(file, kernel, name)
                if shape is not None:
                    yield Hit(
                        node=shape,
                        message=f"`{name}` is the size of a block, and is not tl.constexpr",
                        cause=f"{file.snippet(shape, 50)} needs its shape while compiling; `{name}` has no tl.constexpr annotation",
                        fix=f"declare `{name}: tl.constexpr`",
                        severity=Severity.ERROR,
                    )
                elif branch is not None:
                    yield Hit(
                        node=branch,
                        message=f"the flag `{name}` lost its tl.constexpr: this branch is taken at run time",
                        cause=f"other parameters of {kernel.node.name} are constexpr, `{name}` is not; in a run-time branch no value may "
                        "change its dtype, and both sides are compiled",
                        fix=f"declare `{name}: tl.constexpr`",
                        severity=Severity.NOTE,
                    )


def _as_shape(file: SourceFile, kernel: Kernel, name: str) -> ast.expr | None:
    for node in file.own(kernel.node):
        if not isinstance(node, ast.Call) or not file.dotted(node.func).startswith("triton.language"):
            continue
        called = last_name(node.func)
        if called == "arange" and any(isinstance(inner, ast.Name) and inner.id == name for a in node.args for inner in ast.walk(a)):
            return node
        shape = node.args[0] if called in ("zeros", "full") and node.args else None
        if isinstance(shape, (ast.Tuple, ast.List)) and any(
            isinstance(inner, ast.Name) and inner.id == name for e in shape.elts for inner in ast.walk(e)
        ):
            return node
    return None


def _as_flag(file: SourceFile, kernel: Kernel, name: str) -> ast.stmt | None:
    if not (name.isupper() and FLAG.match(name) and kernel.constexprs):
        return None
    own = file.own(kernel.node)
    if any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in own):
        return None
    for node in sorted((n for n in own if isinstance(n, ast.If)), key=lambda n: n.lineno):
        test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
        if isinstance(test, ast.Name) and test.id == name:
            return node
    return None
