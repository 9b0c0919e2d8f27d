"""Arguments for a function that has no caller: tensors, numbers and dtypes, as the interpreter classifies its parameters.

Shapes are tried until the function runs in fp32. What it then does in other dtypes is due to the dtypes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....dtypes import to_torch
from ..dataflow import arguments
from ..dataflow.events import Scenario
from ..dataflow.paths import Path
from ..dataflow.values import Dtype, Made, Scalar
from ..dataflow.values import Tensor as Followed
from ..source import Function, SourceFile

LONG = 2048  # positions or rows: enough for what low precision loses in them
_ONE_DIMENSION = re.compile(r"(^|_)(bias|gamma|beta|b|eps|norm_weight|scale|inv_freq|freqs)$")
_SMALL = re.compile(r"head|group|expert|layer|depth|num_|n_|stride|kernel|topk|top_k")
_COUNT = re.compile(r"seq|len|max_|position|length|end|frames|(^|_)[tn]$")
_FRACTION = re.compile(r"eps|dropout|drop|prob|(^|_)p$|alpha|beta|scal|temperature|std|lr|smoothing")
_CALLABLE = re.compile(r"(^|_)(fn|func|function|module|mlp|layer|run|run_function|forward_func|block)$")


@dataclass(frozen=True, slots=True)
class Scheme:
    """activations, weights: shapes; given: whether optional tensors are handed over."""

    activations: tuple[int, ...]
    weights: tuple[int, ...]
    given: bool


def schemes(long: bool) -> Iterator[Scheme]:
    """long: with many rows or positions, for what only adds up."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    if long:
        shapes = [
            ((LONG, 16), (16, 16)), ((1, LONG, 16), (16, 16)), ((1, LONG, 16), (16,)), ((1, 4, LONG, 16), (16, 16)), ((LONG,), (16,)),
            ((1, LONG), (16,)), ((1, LONG, 4, 16), (16,)),
        ]  # fmt: skip
    else:
        shapes = [
            ((16, 16), (16, 16)), ((2, 16, 16), (16, 16)), ((2, 4, 16, 16), (16, 16)), ((16, 16), (16,)), ((2, 16, 16), (16,)),
            ((16,), (16,)), ((2, 4, 16, 16), (16,)), ((2, 16, 16), (4, 16, 16)), ((2, 16, 4, 16), (16,)), ((2, 16, 8, 8), (16, 16, 3, 3)),
        ]  # fmt: skip
    for given in (True, False):
        for activations, weights in shapes:
            yield Scheme(activations, weights, given)


class Arguments:
    """Values for a function's parameters; they are the same for all dtypes."""

    def __init__(self, file: SourceFile, function: Function, skip: int, scenario: Scenario, scheme: Scheme) -> None:
        spec = function.args
        self.positional = [*spec.posonlyargs, *spec.args][skip:]
        self.keywords = spec.kwonlyargs
        self.scheme, self.scenario = scheme, scenario
        path = Path() if scheme.given else _AllAbsent()
        self.kinds = arguments.bind(file, function, [*self.positional, *self.keywords], scenario, path, module=True)
        self.defaults = arguments.defaults_of(function)

    def make(self, dtype: torch.dtype | None, seed: int = 0) -> tuple[list[Any], dict[str, Any]]:
        """dtype: of every floating tensor; None for those of the scenario."""
        generator = torch.Generator().manual_seed(seed)
        values = {a.arg: self._value(a, dtype, generator) for a in (*self.positional, *self.keywords)}
        return [values[a.arg] for a in self.positional], {a.arg: values[a.arg] for a in self.keywords}

    def _value(self, argument: ast.arg, dtype: torch.dtype | None, generator: torch.Generator) -> Any:
        name, kind = argument.arg, self.kinds.get(argument.arg)
        if isinstance(kind, Followed):
            return self._tensor(name, kind, dtype, generator)
        if isinstance(kind, Dtype):
            return dtype or to_torch(kind.word or self.scenario.inputs)
        default = self.defaults.get(name)
        if isinstance(default, ast.Constant):
            return default.value
        if isinstance(default, ast.expr):
            try:
                return ast.literal_eval(default)
            except ValueError:
                pass
        if _CALLABLE.search(name):
            torch.manual_seed(0)
            return nn.Linear(16, 16).to(dtype or to_torch(self.scenario.weights))
        if isinstance(kind, Scalar) and kind.value is None:
            return None
        if "device" in name:
            return torch.device("cpu")
        return number(name, long=LONG in self.scheme.activations)

    def _tensor(self, name: str, kind: Followed, dtype: torch.dtype | None, generator: torch.Generator) -> Any:
        shape = self.scheme.weights if kind.made is Made.PARAMETER else self.scheme.activations
        if kind.dtype is None and (kind.positional or arguments.INTEGER.search(name)):
            count = shape[0] if len(shape) == 1 else shape[-2]
            return torch.arange(count) % (LONG if kind.positional else 16)
        if _ONE_DIMENSION.search(name):
            shape = shape[-1:]
        values = torch.randn(shape, generator=generator).to(torch.bfloat16)  # exact in every dtype that is tried
        wanted = dtype or (to_torch(kind.dtype) if kind.dtype else torch.float32)
        return values.to(wanted).requires_grad_()


class _AllAbsent(Path):
    """Takes every optional tensor for None."""

    def take(self, test: str) -> bool:
        return test.endswith(" is None")


def number(name: str, *, long: bool = False) -> Any:
    """A number for a parameter of this name."""
    word = name.lower()
    if _FRACTION.search(word):
        return 1e-5 if "eps" in word else 0.0 if "drop" in word else 0.5
    if word.startswith(("is_", "use_", "has_", "with_", "return_", "add_", "enable_")):
        return False
    if "theta" in word or "base" in word:
        return 10000.0
    if _SMALL.search(word):
        return 4
    return LONG if long and _COUNT.search(word) else 16


class Configuration:
    """A configuration whose every option is a plausible number."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if any(word in name for word in ("bias", "use_", "is_")):
            return False
        if name.endswith("head_dim"):
            return 4
        return number(name)

    def get(self, name: str, default: Any = None) -> Any:
        return default


def tensors_in(value: Any) -> list[Tensor]:
    """The floating tensors in what a function returned."""
    from torch.utils import _pytree as pytree

    flat, _ = pytree.tree_flatten(value)
    return [t for t in flat if isinstance(t, Tensor) and t.is_floating_point()]
