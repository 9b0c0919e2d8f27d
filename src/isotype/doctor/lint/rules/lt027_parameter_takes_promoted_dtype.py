from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..dataflow.plain import FP32_WEIGHTS
from ..rule import Hit, Rule
from ..source import SourceFile, bindings, last_name

_MIXES = frozenset("mul add sub div matmul mm addmm".split())  # noqa: SIM905
_CASTS = frozenset("to type type_as float half bfloat16 astype copy_".split())  # noqa: SIM905
_RESHAPES = frozenset("transpose t permute reshape view unsqueeze squeeze flatten expand contiguous detach clone get_base_layer".split())  # noqa: SIM905
_OF_AN_ADAPTER = re.compile(r"merge|lora|adapter|ia3|delta|fuse", re.IGNORECASE)


class ParameterTakesPromotedDtype(Rule):
    """a merge writes weight times adapter to `weight.data`, in the promoted dtype

    Why
    ---
    `weight.data = weight.data * factor` replaces the tensor, and its dtype with it. With fp32 adapters on a bf16 model, which is what
    PEFT makes by default, each merged layer becomes fp32, and the next product with bf16 activations raises. `weight.data.mul_(factor)`
    keeps the dtype.

    Example
    -------
    ```python
    def merge(self):
        layer.weight.data = layer.weight.data * self.scale_vector
    ```

    Use instead
    -----------
    ```python
    def merge(self):
        layer.weight.data = (layer.weight.data * self.scale_vector).to(layer.weight.dtype)
    ```

    Known problems
    --------------
    Off by default: how often it is right has not been measured on enough code. Only code that names merging or adapters is looked at, and
    only a sum or product of names: what a function returns may have been cast inside it.
    """

    code = "LT027"
    name = "parameter-takes-promoted-dtype"
    in_tests = False
    on = False
    words = (".data",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for node in file.nodes(ast.Assign):
            target = node.targets[0]
            if not (isinstance(target, ast.Attribute) and target.attr == "data" and last_name(target.value) in ("weight", "bias")):
                continue
            others = [other for other in _mixed_with(node.value, ast.unparse(target)) if not _returned_by_a_function(file, node, other)]
            if others and _OF_AN_ADAPTER.search(file.symbol(node) or ""):
                yield Hit(
                    node=node,
                    message=f"`{file.snippet(target, 40)}` takes the promoted dtype of itself and `{file.snippet(others[0], 40)}`",
                    cause=f"assigning to .data replaces the tensor: with a bf16 weight and an fp32 `{file.snippet(others[0], 40)}` the "
                    "weight is fp32 from then on, and a product with bf16 activations raises",
                    fix=f"cast the result: `(...).to({file.snippet(target.value, 40)}.dtype)`, or write in place",
                    scenario=FP32_WEIGHTS,
                    reached="a merge replaces a base weight by its product with an adapter, which peft keeps in fp32",
                )


def _mixed_with(value: ast.expr, own: str) -> list[ast.expr]:
    """The other tensors of `own * other`, `torch.add(own, other)`, where nothing in it is cast."""
    if isinstance(value, ast.BinOp):
        sides = [value.left, value.right]
    elif isinstance(value, ast.Call) and last_name(value.func) in _MIXES:
        sides = [
            *value.args,
            *([value.func.value] if isinstance(value.func, ast.Attribute) and last_name(value.func.value) != "torch" else []),
        ]
    else:
        return []
    if any(isinstance(n, ast.Call) and (last_name(n.func) in _CASTS or n is not value) for n in ast.walk(value)):
        return []
    texts = [ast.unparse(side) for side in sides]
    if not any(text in (own, own.removesuffix(".data")) for text in texts):
        return []
    return [side for side, text in zip(sides, texts) if text not in (own, own.removesuffix(".data")) and _is_tensor(side)]


def _returned_by_a_function(file: SourceFile, at: ast.stmt, node: ast.expr) -> bool:
    """Whether a name in it was bound to what a function returned, which may have cast it; one that only reshapes has not."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    bound = (pair for n in file.own(file.function_of(at) or file.tree) for pair in bindings(n))
    return any(
        isinstance(target, ast.Name)
        and target.id in names
        and any(isinstance(n, ast.Call) and last_name(n) not in _RESHAPES for n in ast.walk(value))
        for target, value in bound
    )


def _is_tensor(node: ast.expr) -> bool:
    """A name or attribute that does not say that it is a number."""
    named = last_name(node.value) if isinstance(node, ast.Subscript) else last_name(node)
    if isinstance(node, ast.BinOp):
        return _is_tensor(node.left) or _is_tensor(node.right)
    return bool(named) and not re.search(r"scal(e|ing)$|alpha|ratio|multiplier|strength|eps", named)
