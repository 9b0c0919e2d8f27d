"""Trainers whose files are recognised but not checked. A note says so, because no output would look like a clean result."""

from __future__ import annotations

from typing import Any

# tool -> groups of keys; a file that has all keys of one group, at any depth of mappings up to three, is the tool's
_KEYS: dict[str, tuple[frozenset[str], ...]] = {
    "OneTrainer": (frozenset({"train_dtype", "fallback_train_dtype"}), frozenset({"training_method", "weight_dtype", "output_dtype"})),
    "diffusion-pipe": (frozenset({"pipeline_stages", "micro_batch_size_per_gpu"}), frozenset({"transformer_dtype", "adapter", "dtype"})),
    "ai-toolkit": (frozenset({"job", "config", "process"}),),
    "musubi-tuner": (frozenset({"dit", "fp8_base"}), frozenset({"dit", "blocks_to_swap"}), frozenset({"dit", "vae_dtype"})),
}


def unknown_tool(data: Any) -> str | None:
    """The name of the tool, or None for a file of none of these."""
    keys = _keys(data, 3)
    return next((tool for tool, groups in _KEYS.items() if any(group <= keys for group in groups)), None)


def _keys(data: Any, depth: int) -> set[str]:
    if not isinstance(data, dict) or depth == 0:
        return set()
    return {str(key) for key in data}.union(*(_keys(value, depth - 1) for value in data.values()))
