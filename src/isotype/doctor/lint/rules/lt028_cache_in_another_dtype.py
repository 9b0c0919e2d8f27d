from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..dataflow.arguments import INTEGER
from ..dataflow.plain import PURE
from ..repository import Repository
from ..rule import Hit, Rule
from ..source import Function, SourceFile, keyword, last_name

_CACHE = re.compile(r"(^|_)(kv|k|v|key|value|keys|values|attention|decoding)_?caches?$|^caches?_[kv]$", re.IGNORECASE)
_BUILDS = re.compile(r"(kv|key_value)_?caches?$", re.IGNORECASE)
_ALLOCATES = frozenset({"zeros", "empty", "ones", "full"})
_INTEGERS = re.compile(r"^(idx|ids|tokens?|x_ids)$")


class CacheInAnotherDtype(Rule):
    """a cache of keys and values is allocated in torch's default dtype, or in that of the token ids

    Why
    ---
    `torch.zeros(shape, device=ids.device)` is fp32 whatever the model is, and `dtype=ids.dtype` is int64. Keys of a bf16 model that are
    written into it raise ("index_copy_(): self and source expected to have the same dtype"), or are cast and met again in another dtype
    by attention.

    Example
    -------
    ```python
    self.kv_cache = torch.zeros(2, batch, heads, length, dim, device=ids.device)
    ```

    Use instead
    -----------
    ```python
    self.kv_cache = torch.zeros(2, batch, heads, length, dim, device=x.device, dtype=x.dtype)
    ```

    Known problems
    --------------
    Off by default: how often it is right has not been measured on enough code. A repository that sets torch's default dtype anywhere is
    left alone.
    """

    code = "LT028"
    name = "cache-in-another-dtype"
    in_tests = False
    on = False
    words = ("ache",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for call in file.nodes(ast.Call):
            if last_name(call.func) not in _ALLOCATES or not file.dotted(call.func).startswith("torch."):
                continue
            function, name = file.function_of(call), _stored_as(file, call)
            if function is None or not name or keyword(call, "device") is None:
                continue
            dtype = keyword(call, "dtype")
            of_ids = _of_integers(file, function, dtype)
            if dtype is None or of_ids:
                made = f"in the dtype of `{of_ids}`, whole numbers" if of_ids else "without dtype: fp32"
                yield Hit(
                    node=call,
                    message=f"`{name}` is allocated {made}",
                    cause="keys and values of a bf16 model are written to it, or compared with what is read from it, in another dtype",
                    fix="give it the dtype of the keys: dtype=x.dtype of an activation, or an argument",
                    scenario=PURE,
                    elsewhere=None if of_ids else _default_is_set,
                )


def _stored_as(file: SourceFile, call: ast.Call) -> str:
    """The cache's name: the attribute or variable that the allocation is part of, or the function that returns it."""
    node: ast.AST = call
    while isinstance(node := file.parents[node], ast.expr | ast.comprehension):
        if isinstance(node, ast.Call):
            return ""
    if isinstance(node, ast.Assign):
        return next((last_name(t) for t in node.targets if _CACHE.search(last_name(t))), "")
    function = file.function_of(call)
    return function.name if isinstance(node, ast.Return) and function is not None and _BUILDS.search(function.name) else ""


def _of_integers(file: SourceFile, function: Function, dtype: ast.expr | None) -> str:
    """The ids whose dtype this is, also by a name given to it before."""
    named = {t.id: v for n in file.own(function) if isinstance(n, ast.Assign) for t, v in _pairs(n) if isinstance(t, ast.Name)}
    value = named.get(dtype.id, dtype) if isinstance(dtype, ast.Name) else dtype
    owner = last_name(value.value) if isinstance(value, ast.Attribute) and value.attr == "dtype" else ""
    return owner if INTEGER.search(owner) or _INTEGERS.search(owner) else ""


def _pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        return list(zip(target.elts, node.value.elts))
    return [(target, node.value)]


def _default_is_set(repository: Repository | None) -> str:
    texts = repository.texts.values() if repository is not None else ()
    return "this repository sets torch's default dtype" if any(b"set_default_dtype(" in text for text in texts) else ""
