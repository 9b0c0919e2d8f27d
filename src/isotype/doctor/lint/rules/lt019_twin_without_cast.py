# ruff: noqa: SIM905 - the table is read and edited as words
from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..dataflow.plain import PURE
from ..rule import Hit, Rule
from ..source import SourceFile, last_name
from .low_dtypes import is_upcast
from .twins import twin_calls, twin_functions

_NEEDS_PRECISION = frozenset(
    "softmax log_softmax logsumexp log log1p exp mean sum var pow rsqrt sqrt norm cos sin cross_entropy nll_loss mse_loss cumsum "
    "softplus".split()
)
_NARROWING = frozenset({"type_as", "half", "bfloat16"})
_SPARES_PRECISION = re.compile(r"dtype|float|fp32|fp16|bf16|half|autocast|precision|upcast|amp")


class TwinWithoutCast(Rule):
    """one branch, function or call casts, and its twin does the same without the cast

    Why
    ---
    Two branches of one `if` that differ by a cast only were the same code once, and one of them was mended: a softmax, a logarithm or a
    sum that needed fp32 in one needs it in the other. So do two functions of one family: `resample_nhwc` casts its argument to fp32 before
    it interpolates, `resample` does not. And of two calls of one module, `decode(latents.to(dtype))` and `decode(latents)`, the second gets
    what the first was not trusted with.

    Example
    -------
    ```python
    if mask is None:
        p = torch.softmax(scores.float(), dim=-1).to(scores.dtype)
    else:
        p = torch.softmax(scores, dim=-1)
    ```

    Use instead
    -----------
    ```python
        p = torch.softmax(scores.float(), dim=-1).to(scores.dtype)
    ```
    in both.

    Known problems
    --------------
    Off by default: how often it is right has not been measured on enough code. Only branches of one `if` whose test says nothing of
    dtypes are compared, and only statements with a function that loses in low precision; functions whose names begin alike and that call
    the same such function on an argument of the same name; calls in one class, or in one function, of the same module with the same name.
    """

    code = "LT019"
    name = "twin-without-cast"
    in_tests = False
    on = False

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for node in file.nodes(ast.If):
            if node.orelse and not _SPARES_PRECISION.search(ast.unparse(node.test)):
                yield from _twins(file, node)
        yield from twin_functions(file)
        yield from twin_calls(file)


def _twins(file: SourceFile, node: ast.If) -> Iterator[Hit]:
    others = {_bare(s): s for s in node.orelse if _is_simple(s)}
    for one in node.body:
        twin = others.get(_bare(one)) if _is_simple(one) else None
        if twin is None or _widens(file, one) == _widens(file, twin) or not _loses(one):
            continue
        cast, plain = (one, twin) if _widens(file, one) else (twin, one)
        yield Hit(
            node=plain,
            message=f"`{file.snippet(plain, 60)}` is computed without the cast to fp32 that its twin in line {cast.lineno} has",
            cause=f"`{file.snippet(cast, 70)}` in the other branch of `if {file.snippet(node.test, 40)}` does the same in float32",
            fix="cast here as well, or in neither branch",
            scenario=PURE,
        )


def _is_simple(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Assign, ast.Return, ast.AugAssign)) and node.value is not None


def _loses(node: ast.stmt) -> bool:
    return any(isinstance(n, ast.Call) and last_name(n.func) in _NEEDS_PRECISION for n in ast.walk(node))


def _widens(file: SourceFile, node: ast.stmt) -> bool:
    return any(isinstance(n, ast.Call) and is_upcast(file, n) for n in ast.walk(node))


def _bare(node: ast.stmt) -> str:
    """The statement as text, without any cast."""
    return ast.unparse(ast.fix_missing_locations(_WithoutCasts().visit(ast.parse(ast.unparse(node)))))


class _WithoutCasts(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords = [k for k in node.keywords if k.arg != "dtype"]
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in _NARROWING | {"float"} and len(node.args) < 2:
                return node.func.value
            if node.func.attr == "to" and (not node.args or "dtype" in ast.unparse(node.args[0]) or "torch." in ast.unparse(node.args[0])):
                return node.func.value
        return node
