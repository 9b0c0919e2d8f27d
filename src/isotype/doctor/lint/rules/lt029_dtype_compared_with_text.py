from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..rule import Hit, Rule
from ..source import SourceFile, last_name

_WORDS = frozenset("bfloat16 float16 float32 half float bf16 fp16 fp32 torch.bfloat16 torch.float16 torch.float32".split())  # noqa: SIM905
_OF_TORCH = re.compile(r"(^|_)(model|module|weight|param|parameter|unet|vae|transformer|tensor|hidden_states|base_layer|lm_head)$")


class DtypeComparedWithText(Rule):
    """a torch dtype is compared with text, which is never equal

    Why
    ---
    `model.dtype == "bfloat16"` is false whatever the dtype is: a torch.dtype equals no text. The branch for bf16 is never taken, and the
    other one casts to what the author meant for fp16.

    Example
    -------
    ```python
    if model.config.torch_dtype == "bfloat16":
        model = model.to(torch.bfloat16)
    ```

    Use instead
    -----------
    ```python
    if model.config.torch_dtype == torch.bfloat16:
    ```

    Known problems
    --------------
    Off by default: how often it is right has not been measured on enough code. Only names that say model, weight or parameter, and the
    configuration of a model, are looked at: dtypes of NumPy and pandas do equal text, and a configuration that was just read from a file
    holds text.
    """

    code = "LT029"
    name = "dtype-compared-with-text"
    on = False
    words = ("dtype",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for node in file.nodes(ast.Compare):
            if len(node.ops) != 1 or not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                continue
            for one, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
                if isinstance(other, ast.Constant) and other.value in _WORDS and _is_torch_dtype(one):
                    yield Hit(
                        node=node,
                        message=f"`{file.snippet(one, 50)}` is a torch.dtype and equals no text",
                        cause=f"the comparison with {other.value!r} has the same result for every dtype, and one branch is never taken",
                        fix=f"compare with torch.{_name(str(other.value))}",
                    )


def _is_torch_dtype(node: ast.expr) -> bool:
    """`model.dtype`, `layer.weight.dtype`, `model.config.torch_dtype`, and the same by getattr."""
    if isinstance(node, ast.Call) and last_name(node.func) == "getattr" and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
        owner, attribute = node.args[0], str(node.args[1].value)
    elif isinstance(node, ast.Attribute):
        owner, attribute = node.value, node.attr
    else:
        return False
    if attribute not in ("dtype", "torch_dtype"):
        return False
    if isinstance(owner, ast.Attribute) and owner.attr == "config":
        return bool(_OF_TORCH.search(last_name(owner.value)))
    return bool(_OF_TORCH.search(last_name(owner))) and attribute == "dtype"


def _name(text: str) -> str:
    word = text.removeprefix("torch.")
    return {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}.get(word, word)
