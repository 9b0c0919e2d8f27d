"""`model.embedding: host`: the weight of the input embedding in pinned host memory, of which a GPU reads the rows that it looks up.

A GPU can address pinned memory of the host. The weight becomes a tensor of the GPU over that memory, so that PyTorch's own lookup reads the
rows through the bus, in order with the GPU's other work, and no other code needs a case for it: the weight says that it is on the GPU, and
whoever reads all of it (a digest, a file) gets its values. PyTorch's allocator of pinned memory rounds up to a power of two.

In a plan, where tensors have no values, such a weight is one element expanded to the weight's shape: it takes no memory of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..config.kind import NOT_ON_HOST
from ..errors import UsageError
from ..precision.apply import inner_model, is_quantised

Place = Callable[[Tensor], Tensor]


def keep_on_host(model: nn.Module, place: Place) -> None:
    """Moves the weight of the model's input embedding with `place`. Raises UsageError for a model that has other uses for it.

    model  as it was loaded, without an adapter: whether that trains the embedding is known later (`refuse_trained_embedding`)
    """
    if why := why_not_of(model):
        raise _refused(why)
    weight = _embedding(model).weight
    weight.data = place(weight.detach())


def refuse_trained_embedding(model: nn.Module) -> None:
    """Raises  UsageError where an adapter trains the input embedding or has matrices of its own for it."""
    if any(p.requires_grad for p in _embedding(model).parameters()):
        raise _refused("the adapter trains the input embedding")


def why_not_of(model: nn.Module) -> str | None:
    """Why this model's input embedding cannot wait in host memory; None where it is only looked up."""
    embedding = _embedding(model)
    if embedding is None:
        return "the model has no input embedding"
    if not isinstance(embedding, nn.Embedding) or is_quantised(embedding.weight):
        return f"the input embedding is a {type(embedding).__name__}, which may do more than look rows up"
    weight = embedding.weight
    if sum(p is weight for _, p in model.named_parameters(remove_duplicate=False)) > 1:
        return "the head has the same weight, and multiplies by all of it"
    return None


def _embedding(model: nn.Module) -> Any:
    """None where the model, or its family in transformers, has none."""
    ask = getattr(inner_model(model), "get_input_embeddings", None)
    try:
        return None if ask is None else ask()
    except NotImplementedError:
        return None


def _refused(why: str) -> UsageError:
    return UsageError(f"model.embedding: host: {why}", fix=NOT_ON_HOST)


class _Memory:
    """The bytes of a pinned tensor, for `torch.as_tensor`: the tensor that it makes keeps this object, and with it the memory."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        size = host.numel() * host.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def in_pinned_memory(weight: Tensor) -> Tensor:
    """The values of `weight` in pinned host memory, as a tensor of the current CUDA device. Raises UsageError where that cannot be had."""
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        host = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True).copy_(weight)
        seen = torch.as_tensor(_Memory(host), device=device).view(weight.dtype).view(weight.shape)
        # a copy would have another address; the last row is read as a lookup reads it
        same = seen.data_ptr() == host.data_ptr() and torch.equal(seen[-1:].clone().cpu(), host[-1:])
    except (RuntimeError, TypeError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _refused(f"{device} cannot read pinned host memory: {first}") from error
    if not same:
        raise _refused(f"{device} does not read pinned host memory where it lies")
    return seen


def outlined_on_host(weight: Tensor) -> Tensor:
    """What stands for `weight` in host memory in a plan."""
    return torch.empty((1,) * weight.dim(), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def is_outlined_on_host(weight: Tensor) -> bool:
    return weight.is_meta and weight.dim() > 1 and not any(weight.stride())


def bytes_on_host(model: nn.Module) -> int:
    """Of an outline's weights in host memory."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if is_outlined_on_host(p))
