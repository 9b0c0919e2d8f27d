"""Finds models that were loaded without a dtype, and whose results another model gets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..evidence import Evidence, Operand
from ..modules import floating_weight_dtypes
from ..producer import Producer
from ..recorded_calls import find_deciding_weight
from ..recorded_origins import find_tensor_origin, list_origins
from ..weight_origin import WeightOrigin


def reload_models(
    evidence: Evidence, operand: Operand, weight: Operand, producer: Producer
) -> list[str]:
    """Returns code that loads a model in the dtype of the layer that failed, if the operand has its
    dtype from the weights of this model, and the call that loaded it names no dtype. A cast at the
    layer would mend one of the places where the two models meet. The other models of the program
    that were loaded in this dtype in the same way are included. Returns an empty list if the model
    may get floats, which would have another dtype than its weights then.
    """
    source = _find_source(operand, producer)
    origin = None if source is None else find_tensor_origin(source)
    if origin is None or not origin.is_load_without_dtype or weight.weight is None:
        return []
    target = find_tensor_origin(weight.weight)
    if target is not None and (target.is_load_without_dtype or target.location == origin.location):
        return []
    models = list(_iterate_models(evidence))
    loaded = [m for m in models if _has_origin(m, origin, operand.dtype)]
    if not loaded or not _takes_integers(max(loaded, key=_count_weights)):
        return []
    origins = {origin.location: origin}
    for model in models:
        for load in list_origins(model.modules(), operand.dtype):
            if load.is_load_without_dtype:
                origins.setdefault(load.location, load)
    codes = {location: load.with_dtype(weight.dtype) for location, load in origins.items()}
    return [f"`{code}` at {location}" for location, code in codes.items() if code]


def _find_source(operand: Operand, producer: Producer) -> torch.Tensor | None:
    """Returns a weight of the model from which an operand has its dtype."""
    module = producer.module
    if module is not None and floating_weight_dtypes(module) == {operand.dtype}:
        return next(p for p in module.parameters() if p.dtype == operand.dtype)
    return None if operand.tensor is None else find_deciding_weight(operand.tensor)


def _iterate_models(evidence: Evidence) -> Iterator[nn.Module]:
    """Yields the models of the frames, and the parts of a pipeline that is a module itself."""
    for root in evidence.names.roots:
        yield root
        yield from root.children()


def _has_origin(model: nn.Module, origin: WeightOrigin, dtype: torch.dtype) -> bool:
    """True if one call loaded all weights of a model."""
    if floating_weight_dtypes(model) != {dtype}:
        return False
    return [o.location for o in list_origins(model.modules(), dtype)] == [origin.location]


def _count_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _takes_integers(model: nn.Module) -> bool:
    """True if the first layer of a model is an embedding, such as that of token ids."""
    layers = (module for module in model.modules() if list(module.parameters(recurse=False)))
    return isinstance(next(layers, None), nn.Embedding)
