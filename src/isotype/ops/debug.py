"""ISOTYPE_DEBUG=1 compares every call of an op with its contract. It is read when the ops are imported; without it they are unchanged."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..dtypes import TensorSpec, name
from ..errors import DtypeError, ShapeError
from .backend import autocast_dtype
from .contract import OpContract

F = TypeVar("F", bound=Callable[..., Any])


def checked_in_debug(contract: OpContract) -> Callable[[F], F]:
    """For a public op: itself, or with ISOTYPE_DEBUG=1 the op with `held_to(contract)` around it."""
    return held_to(contract) if os.environ.get("ISOTYPE_DEBUG") == "1" else lambda op: op


def held_to(contract: OpContract) -> Callable[[Callable[..., Any]], Any]:
    """The function with its outputs' dtypes and shapes, and the dtypes of its gradients, compared with what is declared.

    An output whose dtype the caller names (`out_dtype`) is not compared, nor anything in a compiled graph. A gradient is compared where the
    op's autograd function returns it for the argument itself, before PyTorch casts it.
    Raises  DtypeError AC014, ShapeError AC014; for a gradient from `backward`
    """

    def around(op: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(op)

        @functools.wraps(op)
        def checked(*args: Any, **kwargs: Any) -> Any:
            made = op(*args, **kwargs)
            if torch.compiler.is_compiling():
                return made
            given = signature.bind(*args, **kwargs).arguments
            tensors = {key: given[key] for key in contract.inputs if type(given.get(key)) in (Tensor, torch.nn.Parameter)}
            outputs = made if isinstance(made, tuple) else (made,)
            if tensors and given.get("out_dtype") is None:
                _compare(op.__name__, contract, tensors, [out for out in outputs if type(out) is Tensor])
            return made

        return checked

    return around


def _compare(op: str, contract: OpContract, tensors: dict[str, Tensor], outputs: Sequence[Tensor]) -> None:
    letters: dict[str, str] = {}
    sizes: dict[str, Any] = {}
    # an op takes some inputs in other shapes than the declared one (tables without a batch): sizes are then not known
    whole = len(tensors) == len(contract.inputs)
    for key, tensor in tensors.items():
        contract.inputs[key].dtype_fault(name(tensor.dtype), letters)
        whole = contract.inputs[key].shape_fault(tuple(tensor.shape), sizes) is None and whole
    autocast = autocast_dtype(next(iter(tensors.values())))
    for i, (out, spec) in enumerate(zip(outputs, contract.outputs)):
        declared = _lowered(spec, contract, autocast)
        fault = declared.dtype_fault(name(out.dtype), dict(letters))
        if fault is not None:
            raise DtypeError(f"{op}: output {i} is {name(out.dtype)}, its contract says {fault} ({contract.signature})", code="AC014")
        shape = spec.shape_fault(tuple(out.shape), dict(sizes)) if whole else None
        if shape is not None:
            raise ShapeError(f"{op}: output {i} {list(out.shape)}: {shape} ({contract.signature})", code="AC014")
        if out.grad_fn is not None:
            _watch_gradients(op, contract, tensors, letters, out.grad_fn)


def _lowered(spec: TensorSpec, contract: OpContract, autocast: torch.dtype | None) -> TensorSpec:
    """The output's spec under this autocast: a free letter becomes its dtype, or fp32, as the contract says."""
    if autocast is None or not spec.free or contract.autocast == "ignored":
        return spec
    return replace(spec, dtype=name(autocast) if contract.autocast == "follows" else "fp32")


def _watch_gradients(op: str, contract: OpContract, tensors: dict[str, Tensor], letters: dict[str, str], node: Any) -> None:
    """Compares what the op's own backward returns; `node` is the output's, which may be a view of the function's result."""
    while not isinstance(node, BackwardCFunction):
        before = [parent for parent, _ in node.next_functions if parent is not None]
        if len(before) != 1:
            return
        node = before[0]
    declared: dict[int, tuple[str, str]] = {}
    for position, (parent, number) in enumerate(node.next_functions):
        for key, word in contract.grads.items():
            if parent is not None and key in tensors and _is_of(parent, number, tensors[key]):
                declared[position] = key, letters.get(word, word)

    backward = node.apply

    def compared(*upstream: Any) -> Any:
        made = backward(*upstream)
        for position, (key, wanted) in declared.items():
            found = made[position] if isinstance(made, tuple) else made
            if found is not None and name(found.dtype) != wanted:
                raise DtypeError(f"{op}: the gradient of {key} leaves in {name(found.dtype)}, its contract says {wanted}", code="AC014")
        return made

    if declared:
        # the engine looks `apply` up on the instance; a hook of the node sees the gradients after PyTorch has cast them
        node.apply = compared  # type: ignore[method-assign]  # on the instance, for this call alone


def _is_of(node: Any, number: int, tensor: Tensor) -> bool:
    """Whether gradients that arrive at this edge are the tensor's."""
    if tensor.grad_fn is not None:
        return bool(node is tensor.grad_fn and number == tensor.output_nr)
    return getattr(node, "variable", None) is tensor
