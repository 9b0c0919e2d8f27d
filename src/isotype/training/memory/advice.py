"""Advice for a step that does not fit into memory: nothing that the settings have already."""

from __future__ import annotations

from torch import nn

from ...config.kind import wants_embedding_on_host, why_not_on_host
from ...config.schema import RunConfig
from ...model.host_embedding import why_not_of
from .recomputation import AUTO, NONE


def less_memory(config: RunConfig, checkpointing: str, *, device_type: str = "cpu", model: nn.Module | None = None) -> str:
    """checkpointing  what the run recomputes, or `train.gradient_checkpointing` where that was not decided yet
    model  of the run, where it is known
    """
    ways = ["train.gradient_checkpointing: layers"] if checkpointing in (NONE, AUTO) else []
    if config.train.batch_size > 1:
        ways.append("a smaller train.batch_size with more train.accumulate (the result is the same)")
    ways.append("a smaller data.max_length" if config.images.train is None else "a smaller images.resolution")
    if not wants_embedding_on_host(config) and config.images.train is None and why_not_on_host(config, device_type=device_type) is None:
        if model is None:
            ways.append("model.embedding: host (if head and embedding are two weights)")
        elif why_not_of(model) is None:
            ways.append("model.embedding: host")
    if (config.precision.base or config.precision.preset) not in ("nf4", "nf4-lora"):
        ways.append("--preset qlora")
    return ", ".join(ways[:-1]) + (", or " if ways[1:] else "") + ways[-1]
