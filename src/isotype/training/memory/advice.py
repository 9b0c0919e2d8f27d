"""Advice for a step that does not fit into memory: nothing that the settings have already."""

from __future__ import annotations

from ...config.schema import RunConfig
from .recomputation import AUTO, NONE


def less_memory(config: RunConfig, checkpointing: str) -> str:
    """checkpointing  what the run recomputes, or `train.gradient_checkpointing` where that was not decided yet"""
    ways = ["train.gradient_checkpointing: layers"] if checkpointing in (NONE, AUTO) else []
    if config.train.batch_size > 1:
        ways.append("a smaller train.batch_size with more train.accumulate (the result is the same)")
    ways.append("a smaller data.max_length" if config.images.train is None else "a smaller images.resolution")
    if (config.precision.base or config.precision.preset) not in ("nf4", "nf4-lora"):
        ways.append("--preset qlora")
    return ", ".join(ways[:-1]) + (", or " if ways[1:] else "") + ways[-1]
