"""Rotary tables that depend on nothing but the batch at hand.

With dynamic rotary embeddings transformers makes the table anew for a batch with more positions than all before, and keeps it for
later batches that are longer than the original positions. The loss of a row then depends on the rows before it, those of an evaluation
among them, and a resumed or reloaded model, which begins with the first table, has another loss.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def forget_longer_batches(model: nn.Module) -> None:
    """Lets every forward of a dynamic rotary embedding begin with the first table. A batch has the values that a fresh model gives it."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic" and hasattr(module, "original_inv_freq"):
            module.register_forward_pre_hook(_first_table)


def _first_table(module: Any, _: object) -> None:
    if module.max_seq_len_cached > module.original_max_seq_len:
        module.register_buffer("inv_freq", module.original_inv_freq.to(module.inv_freq.device), persistent=False)
        module.max_seq_len_cached = module.original_max_seq_len
