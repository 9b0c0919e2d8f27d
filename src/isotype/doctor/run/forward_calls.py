"""Notes in autograd's graph which call of the program's forward made a node. An error in a C++
operator of backward has no Python frame of its own, and this note leads back to the line.

The note is an entry of the node's `metadata`, so that it is freed together with the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .graph import read_grad_fn
from .running_code import RunningCode

_KEY = "isotype_forward_call"


@dataclass(frozen=True, slots=True, eq=False)
class ForwardCall:
    """A call of a PyTorch function whose result has a node in autograd's graph.

    running          the innermost frame that does not belong to PyTorch
    first_number     the sequence number of the first node that the call could make
    argument_dtypes  the dtype of each argument; None for an argument that is no tensor
    autocast         the dtype of autocast on the device of the result; None if it was off
    region           the calls that entered the innermost region of autocast
    """

    running: RunningCode
    first_number: int
    argument_dtypes: tuple[torch.dtype | None, ...]
    autocast: torch.dtype | None
    region: tuple[RunningCode, ...]


def list_new_nodes(outputs: Sequence[torch.Tensor], first_number: int) -> list[Any]:
    """Returns the nodes of the results of a call that this call made."""
    nodes = [read_grad_fn(output) for output in outputs]
    return [node for node in nodes if node is not None and node._sequence_nr() >= first_number]


def make_forward_call(
    running: RunningCode,
    first_number: int,
    args: Sequence[Any],
    device: str,
    region: tuple[RunningCode, ...],
) -> ForwardCall:
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    dtypes = tuple(
        argument.dtype if isinstance(argument, torch.Tensor) else None for argument in args
    )
    return ForwardCall(running, first_number, dtypes, autocast, region)


def note_forward_call(nodes: Sequence[Any], call: ForwardCall) -> None:
    """Writes the call that made nodes of autograd's graph into these nodes."""
    for node in nodes:
        node.metadata[_KEY] = call


def read_forward_call(node: Any) -> ForwardCall | None:
    """Returns the call that `note_forward_call` wrote into a node."""
    call = node.metadata.get(_KEY)
    return call if isinstance(call, ForwardCall) else None
