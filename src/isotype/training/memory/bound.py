"""A cheap upper bound on a step's memory: if it is far below the available memory, no plan is needed."""

from __future__ import annotations

from torch import nn

from ...config.schema import TrainSection
from ...dtypes import to_torch
from ...model.architecture import layer_settings
from ...precision.apply import is_quantised
from ...precision.precision import Precision
from .plan import optimizer_bytes
from .quantised_outline import scales_of


def most_bytes(model: nn.Module, train: TrainSection, precision: Precision, *, length: int) -> int:
    """An upper bound on the bytes of a step on `train.batch_size` rows of `length` (padded) tokens, even without recomputation: the sum of
    weights, gradients and states, six fp32 copies of the input and output of every matrix, and the full attention scores."""
    widths = [width for module in model.modules() for width in _widths(module)]
    tokens = train.batch_size * length
    layers = layer_settings(getattr(model, "config", None))
    scores = sum(getattr(layer, "num_attention_heads", 0) for layer in layers) * tokens * length
    largest = max((a * b for a, b in zip(widths[::2], widths[1::2])), default=0)
    return held_bytes(model, train, precision) + 24 * tokens * sum(widths) + 16 * scores + 32 * largest


def held_bytes(model: nn.Module, train: TrainSection, precision: Precision) -> int:
    """Weights, gradients and optimizer states."""
    parameters = list(model.parameters())
    held = sum(t.numel() * t.element_size() for p in parameters for t in (p, *scales_of(p)))
    trained = [p for p in parameters if p.requires_grad]
    return held + sum(p.numel() * to_torch(precision.grads).itemsize + optimizer_bytes(p.numel(), train, precision) for p in trained)


def _widths(module: nn.Module) -> tuple[int, ...]:
    """(in, out) of a module with a matrix; a 4-bit one has no other shape."""
    weight = module._parameters.get("weight")
    if weight is None or (weight.ndim < 2 and not is_quantised(weight)):
        return ()
    features = tuple(int(n) for name in ("in_features", "out_features") if (n := getattr(module, name, None)) is not None)
    if features:
        return features
    return int(weight.shape[-1]), int(weight.shape[-2])
