"""Inputs for a wrapper: the calls that given ones stand for, and where there are none, a few usual shapes until a call reaches a launch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

_ROWS, _COLUMNS = 16, 64
_INDEX = ("label", "target", "idx", "index", "ids", "positions")
_VECTOR = ("weight", "bias", "gamma", "beta", "scale", "w", "b")
_SHAPES = ((_ROWS, _COLUMNS), (2, _ROWS, _COLUMNS), (2, 4, _ROWS, _COLUMNS), (_COLUMNS,), (_COLUMNS, _COLUMNS))


def several(inputs: Any) -> list[Any]:
    """The calls that `inputs` stands for: a list whose items are tuples or dicts is several, anything else is one."""
    import torch

    if isinstance(inputs, list) and inputs and all(isinstance(i, (tuple, dict)) for i in inputs):
        return inputs
    if inputs is None:
        return [()]
    return [(inputs,)] if isinstance(inputs, torch.Tensor) else [inputs]


def guessed_inputs(function: Callable[..., Any], target: Any) -> dict[str, Any] | tuple[Any, ...] | None:
    """The first guess with which a call launches a kernel and raises nothing, else the first that launches one, else None."""
    from .calls import call_trapped

    fallback = None
    for inputs in _guesses(function):
        calls = call_trapped(function, inputs, target, mixed=False, backward=False)
        if calls.launches and not calls.refused:
            return inputs
        if calls.launches and fallback is None:
            fallback = inputs
    return fallback


def _guesses(function: Callable[..., Any]) -> Iterator[dict[str, Any] | tuple[Any, ...]]:
    forward = getattr(function, "forward", None) if isinstance(function, type) and hasattr(function, "apply") else None
    positional = forward is not None
    signature = inspect.signature(forward or function)
    parameters = list(signature.parameters.values())[1 if positional else 0 :]
    wanted = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for shape in _SHAPES:
        for vectors in (True, False):
            made = {p.name: _value(p, shape, vectors, first=p is wanted[0]) for p in wanted}
            yield tuple(made.values()) if positional else made


def _value(parameter: Any, shape: tuple[int, ...], vectors: bool, *, first: bool) -> Any:
    import torch

    name, annotation = parameter.name.lower(), str(parameter.annotation)
    if "Tensor" not in annotation:
        if annotation.endswith("float'>") or annotation == "float" or "eps" in name:
            return 1e-5 if "eps" in name else 1.0
        if annotation.endswith("bool'>") or annotation == "bool":
            return False
        if annotation.endswith("int'>") or annotation == "int":
            return _COLUMNS if any(w in name for w in ("dim", "size", "block")) else 1
    if any(w in name for w in _INDEX):
        return torch.zeros(shape[:-1] or (_ROWS,), dtype=torch.int64)
    if vectors and not first and (name in _VECTOR or name.endswith(tuple(f"_{w}" for w in _VECTOR))):
        return torch.randn(shape[-1])
    return torch.randn(shape)
