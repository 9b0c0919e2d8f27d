"""FLOPs of a training step, for model FLOP utilisation. Matrix products only, as the usual 6 N T does, but for frozen weights too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ...model.layer_settings import layer_settings
from ...precision.apply import is_quantised


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one token through forward and backward, and what attention adds for a row of length T (times T squared).

    A product with an M-element weight costs 2 M forward, 2 M for the input's gradient, 2 M for the weight's own where it is trained.
    Attention's two products cost 4 T T d a layer forward and twice that backward, halved because causal.
    Source: Kaplan et al. 2020, section 2.1, with the weight gradient of frozen weights left out.
    """

    per_token: float
    per_square: float

    def of(self, rows: int, length: int) -> float:
        return rows * (length * self.per_token + length**2 * self.per_square)


def step_flops(model: nn.Module, config: Any) -> StepFlops:
    """Counts every Linear of `model` (adapters included); `config` is a transformers configuration."""
    per_token = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            elements = module.in_features * module.out_features
            trained = weight.requires_grad and not is_quantised(weight)
            per_token += elements * (6 if trained else 4)
    return StepFlops(per_token, sum(map(_attention_width, layer_settings(config))) * 4 * 3 / 2)


def _attention_width(layer: Any) -> int:
    """Heads times head size of one layer's configuration."""
    heads = getattr(layer, "num_attention_heads", 0)
    return heads * (getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 0) // max(1, heads))
