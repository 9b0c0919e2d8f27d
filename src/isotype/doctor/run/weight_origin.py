"""The call of the user's code that gave weights their dtype."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import torch

from .expressions import node_keyword
from .frames import source_text

# the function of PEFT that casts all weights to fp32 that are not quantised
PREPARATION = "prepare_model_for_kbit_training"
ADAPTER_KEYWORD = "autocast_adapter_dtype"  # of PEFT's functions; False keeps the base's dtype
ADAPTER_FUNCTIONS = ("get_peft_model", "add_adapter", "load_adapter")
# the names of the argument of `from_pretrained` that sets the dtype
DTYPE_KEYWORDS = ("dtype", "torch_dtype")
_MAX_TEXT = 100  # characters of an expression that a sentence quotes


@dataclass(frozen=True, slots=True)
class WeightOrigin:
    """The expression that gave a group of weights their dtype.

    kind      `cast`, `preparation` (by PEFT), `library` (a cast in a function of a library),
              `checkpoint` (its dtype is kept), `loading` (in a dtype that the call gives),
              `assignment` (of the tensors of a checkpoint), `construction`, `default` (without a
              dtype), or `adapters` (PEFT keeps adapters in the dtype of their base)
    text      the source code of the expression
    location  the file and line of the expression
    call      the call, if the expression is one
    function  the library's function that casts, and its place, for the kind `library`
    """

    kind: str
    text: str
    location: str
    call: ast.Call | None = None
    function: str = ""

    def describe(self, weights: str, dtype_name: str) -> str:
        """Returns what the expression did to `weights`, as a part of a sentence."""
        text = self.text
        if len(text) > _MAX_TEXT:
            text = f"{text[:_MAX_TEXT]}..."
        return f"`{text}` ({self.location}) {self.describe_action(weights, dtype_name)}"

    def describe_action(self, weights: str, dtype_name: str) -> str:
        """Returns the sentence of `describe` without the expression."""
        actions = {
            "checkpoint": f"keeps {weights} in {dtype_name}, the dtype of the checkpoint",
            "loading": f"loads {weights} in {dtype_name}",
            "construction": f"builds {weights} in {dtype_name}",
            "adapters": f"builds {weights} in {dtype_name}, the dtype of the base",
            "default": f"builds {weights} in {dtype_name}, the default dtype",
            "assignment": f"gives {weights} {dtype_name}, the dtype of the checkpoint",
            "library": f"made {weights} {dtype_name}, in {self.function}",
        }
        return actions.get(self.kind, f"made {weights} {dtype_name}")

    @property
    def is_load_without_dtype(self) -> bool:
        """True for a call that loads a model and names no dtype."""
        if self.call is None or self.kind != "loading":
            return self.call is not None and self.kind == "checkpoint"
        names = {keyword.arg for keyword in self.call.keywords}
        return names.isdisjoint((*DTYPE_KEYWORDS, None))

    @property
    def removable_text(self) -> str:
        """The part of a cast that a fix leaves out: `.half()` of `Model(8).half()`, and otherwise the
        whole call.
        """
        match self.call:
            case ast.Call(ast.Attribute(ast.Call() as receiver)):
                return source_text(self.call).removeprefix(source_text(receiver))
        return self.text

    @property
    def short_text(self) -> str:
        """The source code for a row of a table: `Model(...).half()` for `Model(8, 16).half()`."""
        match self.call:
            case ast.Call(ast.Attribute(ast.Call(function))):
                return f"{ast.unparse(function)}(...){self.removable_text}"
        return self.text if len(self.text) <= _MAX_TEXT else f"{self.text[:_MAX_TEXT]}..."

    def with_dtype(self, dtype: torch.dtype) -> str:
        """Returns the source code of the call with another dtype, or "" if it casts weights that
        exist, or is no call.
        """
        if self.call is None or self.kind in ("cast", "library", "preparation"):
            return ""
        if ast.unparse(self.call.func).endswith("Parameter") and self.call.args:
            cast = ast.Attribute(self.call.args[0], "to", ast.Load())
            data = ast.Call(cast, [ast.parse(str(dtype), mode="eval").body], [])
            call = ast.Call(self.call.func, [data, *self.call.args[1:]], self.call.keywords)
            return source_text(call)
        if self.kind == "default":
            return f"{self.text}.to({dtype})"
        match self.call:
            case ast.Call(
                ast.Name("setattr"), [owner, name, ast.Call(_, [content, *_]) as parameter]
            ):
                data_cast = ast.parse(f"({ast.unparse(content)}).to({dtype})", mode="eval").body
                rest = parameter.args[1:]
                value = ast.Call(parameter.func, [data_cast, *rest], parameter.keywords)
                return source_text(ast.Call(self.call.func, [owner, name, value], []))
        function = self.call.func
        if self.kind == "adapters":
            keywords = [key for key in self.call.keywords if key.arg != ADAPTER_KEYWORD]
            call = ast.Call(function, self.call.args, keywords)  # the default is fp32
            return source_text(call)
        is_cast = self.kind == "construction" and node_keyword(self.call, "dtype") is None
        if is_cast and isinstance(function, ast.Attribute):
            return f"{ast.unparse(function.value)}.to({dtype})"
        keywords = [key for key in self.call.keywords if key.arg not in DTYPE_KEYWORDS]
        # models of diffusers have the older name; those of transformers are of kind `checkpoint`
        has_older_name = self.kind == "loading" and self.is_load_without_dtype
        keyword = "torch_dtype" if has_older_name else "dtype"
        keywords.append(ast.keyword(keyword, ast.parse(str(dtype), mode="eval").body))
        call = ast.Call(function, self.call.args, keywords)
        return source_text(call)
