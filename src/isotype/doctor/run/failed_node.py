"""Finds the node of autograd's graph that raised an error in backward, if it is an operator of C++.
Such an operator has no Python frame.

After the error, each node of the graph computes gradients of zeros, in the order of the engine. The
failed node is the first one that raises the same error. The nodes that had run before are freed, and
raise another error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from .autocast import AutocastState
from .compiled import has_other_processes
from .forward_calls import ForwardCall, read_forward_call
from .frames import CallFrame
from .graph import read_grad_fn

ENGINE_CALL = "_engine_run_backward"  # the function that calls the C++ engine of autograd
_MAX_SECONDS = 5.0  # for all nodes together: a checkpoint computes its forward again for them
_SAVED = "_saved_"
# results of forward that a node keeps; the program does not know their dtypes
_RESULTS = ("result", "running_", "output")


@dataclass(frozen=True, slots=True, eq=False)
class FailedNode:
    """A node of autograd's graph that raised an error.

    name            such as `SparseAddmmBackward0`
    gradient_dtype  the dtype of the gradient that it got, which is that of its result in forward
    saved           the floating-point operands that it kept in forward, by their names
    call            the call that made the node; None if no recorded call did
    accepted_dtype  the dtype of a gradient with which the node raises no error, or None
    needs_vmap      whether the node raises the error under `torch.vmap` only
    """

    name: str
    gradient_dtype: torch.dtype
    gradient_shape: tuple[int, ...]
    saved: dict[str, torch.Tensor]
    call: ForwardCall | None
    accepted_dtype: torch.dtype | None
    needs_vmap: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """nodes  the nodes that compute gradients in C++, in the order of the engine
    indices   node -> the indices of its results that the graph uses
    readers   node -> the nodes that use its results
    """

    nodes: list[Any]
    indices: dict[Any, set[int]]
    readers: dict[Any, list[Any]]


def find_failed_node(
    message: str, frames: Sequence[CallFrame], autocast: AutocastState
) -> FailedNode | None:
    """Returns the node that raised the error with a message, or None if an operator of C++ did not
    raise it in backward.

    Nothing is computed if the program consists of several processes, because the others have ended.
    """
    if frames[-1].function != ENGINE_CALL or has_other_processes():
        return None
    graph = _read_graph(frames[-1].variables.get("t_outputs", ()))
    is_in_vmap = any(_is_vmap(frame) for frame in frames)
    region: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if autocast.is_on:
        region = torch.autocast(autocast.device or "cpu", dtype=autocast.dtype)
    end = time.monotonic() + _MAX_SECONDS
    with region, torch.no_grad():
        for node in graph.nodes:
            if time.monotonic() > end:
                return None
            error = _run(node, graph.indices[node])
            needs_vmap = False
            if is_in_vmap and error is None:
                error = _run(node, graph.indices[node], in_vmap=True)
                needs_vmap = error is not None
            if error is not None and str(error) == message:
                return _describe(node, graph, needs_vmap)
    return None


def _is_vmap(frame: CallFrame) -> bool:
    files = (
        os.path.join("torch", "_functorch", "vmap.py"),
        os.path.join("torch", "_vmap_internals.py"),
    )
    return frame.file.endswith(files)


def _read_graph(outputs: Sequence[Any]) -> _Graph:
    indices: dict[Any, set[int]] = {}
    readers: dict[Any, list[Any]] = {}
    pending: list[Any] = []
    for output in outputs:
        node, index = _read_edge(output)
        if node is not None:
            indices.setdefault(node, set()).add(index)
            pending.append(node)
    visited: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        for operand, index in node.next_functions:
            if operand is not None:
                indices.setdefault(operand, set()).add(index)
                readers.setdefault(operand, []).append(node)
                pending.append(operand)
    nodes = [node for node in visited if _is_operator(node)]
    nodes.sort(key=lambda node: -node._sequence_nr())
    return _Graph(nodes, indices, readers)


def _read_edge(output: Any) -> tuple[Any, int]:
    """Returns the node of a tensor or an edge from which backward started, and its index there."""
    if isinstance(output, GradientEdge):
        return output.node, output.output_nr
    return read_grad_fn(output), output.output_nr


def _is_operator(node: Any) -> bool:
    """True for a node that computes in C++, and does not write a gradient into a parameter."""
    is_function = isinstance(node, torch.autograd.function.BackwardCFunction)
    return not is_function and type(node).__name__ != "AccumulateGrad"


def _run(
    node: Any, indices: set[int], dtype: torch.dtype | None = None, *, in_vmap: bool = False
) -> Exception | None:
    """Returns the error that a node raises for gradients of zeros, or None.

    dtype    the dtype of the gradients, if it is not that of the node's results
    in_vmap  whether the node gets a batch of gradients, under `torch.vmap`
    """
    results = node._input_metadata
    try:
        gradients = {
            index: torch.zeros(
                (1, *results[index].shape) if in_vmap else results[index].shape,
                dtype=dtype or results[index].dtype,
                device=results[index].device,
            )
            for index in indices
        }

        def compute(values: dict[int, torch.Tensor]) -> list[torch.Tensor]:
            computed = node(*(values.get(index) for index in range(len(results))))
            computed = computed if isinstance(computed, tuple) else (computed,)
            return [value for value in computed if isinstance(value, torch.Tensor)]

        if in_vmap:
            torch.vmap(compute)(gradients)
        else:
            compute(gradients)
    except Exception as error:
        return error
    return None


def _describe(node: Any, graph: _Graph, needs_vmap: bool) -> FailedNode:
    indices = graph.indices[node]
    result = node._input_metadata[min(indices)]
    saved = _read_saved_tensors(node)
    others = dict.fromkeys(tensor.dtype for tensor in saved.values())
    accepted = [
        dtype
        for dtype in others
        if dtype != result.dtype and not needs_vmap and _run(node, indices, dtype) is None
    ]
    return FailedNode(
        type(node).__name__,
        result.dtype,
        tuple(result.shape),
        saved,
        _find_call(node, graph),
        accepted[0] if accepted else None,
        needs_vmap,
    )


def _read_saved_tensors(node: Any) -> dict[str, torch.Tensor]:
    tensors = {}
    for attribute in dir(node):
        name = attribute.removeprefix(_SAVED)
        if name == attribute or name.startswith(_RESULTS):
            continue
        with contextlib.suppress(RuntimeError):  # the tensor is freed or was changed in place
            value = getattr(node, attribute)
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                tensors[name] = value
    return tensors


def _find_call(node: Any, graph: _Graph) -> ForwardCall | None:
    """Returns the call that made a node. A call notes itself in the nodes of its results only; other
    nodes of this call are between those and its operands.
    """
    number = node._sequence_nr()
    for reader in _iterate_readers(node, graph):
        call = read_forward_call(reader)
        if call is not None:
            return call if call.first_number <= number else None
    return None


def _iterate_readers(node: Any, graph: _Graph) -> Iterator[Any]:
    """Yields a node and the nodes that use its results, the nearest first."""
    pending, visited = [node], set()
    while pending:
        reader = pending.pop(0)
        if reader not in visited:
            visited.add(reader)
            yield reader
            pending.extend(graph.readers.get(reader, ()))
