"""Which layers' adapters PEFT would not find again in a saved file.

When PEFT loads an adapter it applies the renamings by which transformers reads the checkpoints of the model's family. Some of them match
names that already are the model's own: `mlp.shared_expert.`, a regular expression, also matches Laguna's `mlp.shared_experts`. PEFT then
warns of missing keys, and the adapters of these layers begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn

_PREFIX, _SUFFIX = "base_model.model.", ".lora_A.weight"


def lost_when_loaded(model: nn.Module, config: LoraConfig, layers: Iterable[str]) -> list[str]:
    """Those of `layers`, names in `model`, whose adapters PEFT loads under another name."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers as converted
    except ImportError:  # a version that renames nothing
        return []

    names = {f"{_PREFIX}{layer}{_SUFFIX}": layer for layer in layers}
    found: set[Any] = set()
    for name in names:  # one at a time: some of these conversions stack or cut what belongs together
        try:
            found |= set(converted(model, config, {name: torch.empty(1, 1)}))
        except (RuntimeError, ValueError, IndexError, KeyError):
            found.add(name)
    return [layer for name, layer in names.items() if name not in found]
