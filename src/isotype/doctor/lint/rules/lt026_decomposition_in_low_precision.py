from __future__ import annotations

import ast
from collections.abc import Iterator

from ..dataflow.plain import PURE
from ..rule import Hit, Rule
from ..source import Function, SourceFile, bindings, last_name
from .low_dtypes import is_upcast

# none of these has a bf16 or fp16 kernel, on a CPU or on CUDA (torch 2.13)
_NO_HALF = frozenset(
    ["svd", "svdvals", "qr", "eig", "eigh", "eigvals", "eigvalsh", "cholesky", "solve", "solve_triangular", "inv", "pinv", "lstsq", "lu"]
    + ["lu_factor", "det", "slogdet"]
)


class DecompositionInLowPrecision(Rule):
    """a matrix is cast to fp32 for torch.linalg, and another, or the same on another device, is not

    Why
    ---
    `torch.linalg.svd`, `qr`, `solve`, `inv` and their like have no bf16 or fp16 kernels: "linalg_svd_cpu not implemented for 'BFloat16'".
    A function that casts one of its matrices knows that low precision comes here. The other matrix comes from the same model, and raises.
    A cast under a test for the CPU leaves the GPU without one, where these kernels are missing, too.

    Example
    -------
    ```python
    if weight.dtype == torch.bfloat16:
        weight = weight.float()
    u, s, v = torch.linalg.svd(weight)
    u2, s2, v2 = torch.linalg.svd(merged)      # still bf16
    ```

    Use instead
    -----------
    ```python
    u2, s2, v2 = torch.linalg.svd(merged.float())
    ```

    Known problems
    --------------
    Off by default: how often it is right has not been measured on enough code. A function without any cast to fp32 is left alone: most
    are called with fp32 matrices only.
    """

    code = "LT026"
    name = "decomposition-in-low-precision"
    in_tests = False
    on = False
    words = ("linalg", "svd", "solve")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for function in file.functions():
            calls = [n for n in file.own(function) if isinstance(n, ast.Call) and _decomposes(file, n)]
            if not calls:
                continue
            wide, narrow_test = _Widened(file, function), _cast_on_the_cpu_only(file, function)
            covered = [call for call in calls if wide.has(call)]
            for call in calls:
                on_cpu = narrow_test is not None and narrow_test.lineno < call.lineno
                if on_cpu or (covered and not wide.has(call)):
                    yield _hit(file, call, narrow_test if on_cpu else covered[0], on_cpu=on_cpu)  # type: ignore[arg-type]  # on_cpu is only true with a test


def _hit(file: SourceFile, call: ast.Call, other: ast.AST, *, on_cpu: bool) -> Hit:
    line = other.lineno  # type: ignore[attr-defined]  # a test or a call: both have a line
    what = f"`{file.snippet(call.args[0], 40)}`"
    how = f"is cast to fp32 on the CPU only (line {line})" if on_cpu else f"is not cast to fp32, as the matrix in line {line} is"
    return Hit(
        node=call,
        message=f"{last_name(call.func)}: {what} {how}",
        cause=f"torch.linalg.{last_name(call.func)} has no bf16 or fp16 kernel on any device, and the cast in line {line} shows that such "
        "matrices come here",
        fix=f"cast it as well: `{last_name(call.func)}({file.snippet(call.args[0], 30)}.float())`",
        scenario=PURE,
        reached=f"the cast in line {line} reckons with low precision",
    )


def _decomposes(file: SourceFile, call: ast.Call) -> bool:
    dotted = file.dotted(call.func)
    return (
        bool(call.args) and last_name(call.func) in _NO_HALF and dotted.startswith(("torch.linalg.", "torch.svd", "torch.qr", "torch.inv"))
    )


class _Widened:
    """Which names of a function hold fp32, line by line: those that a cast made so, and what was computed from them since."""

    def __init__(self, file: SourceFile, function: Function) -> None:
        self.file = file
        self.since: dict[str, int] = {}
        for node in sorted((n for n in file.own(function) if isinstance(n, ast.Assign)), key=lambda n: n.lineno):
            for target, value in bindings(node):
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                if self._wide(value, node.lineno):
                    self.since.update({t.id: node.lineno for t in targets if isinstance(t, ast.Name) and t.id not in self.since})

    def _wide(self, value: ast.expr, line: int) -> bool:
        for node in ast.walk(value):
            if isinstance(node, ast.Name) and self.since.get(node.id, line) < line:
                return True
            if isinstance(node, ast.Call) and is_upcast(self.file, node):
                return True
        return False

    def has(self, call: ast.Call) -> bool:
        return any(self._wide(argument, call.lineno) for argument in call.args)


def _cast_on_the_cpu_only(file: SourceFile, function: Function) -> ast.If | None:
    """`if x.device.type == "cpu" and x.dtype in (...): x = x.float()`, also by a name for the test."""
    named = {t.id: v for n in file.own(function) for t, v in bindings(n) if isinstance(t, ast.Name)}
    for node in (n for n in file.own(function) if isinstance(n, ast.If) and not n.orelse):
        test = named.get(node.test.id, node.test) if isinstance(node.test, ast.Name) else node.test
        text = ast.unparse(test)
        casts = any(isinstance(n, ast.Call) and is_upcast(file, n) for statement in node.body for n in ast.walk(statement))
        if (
            casts
            and "'cpu'" in text
            and "==" in text
            and "float16" in text
            and isinstance(test, ast.BoolOp)
            and isinstance(test.op, ast.And)
        ):
            return node
    return None
