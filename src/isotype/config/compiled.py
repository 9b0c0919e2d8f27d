"""What `model.compile: layers` cannot be combined with. Imports no torch."""

from __future__ import annotations

from ..errors import UsageError
from .schema import RunConfig


def wants_compiled(config: RunConfig) -> bool:
    return config.model.compile == "layers"


def check_compile(config: RunConfig) -> None:
    """Raises  UsageError for settings with which compiled layers cannot run, or which would have no effect, before anything is loaded."""
    if not wants_compiled(config):
        return
    train = config.train
    reasons = {
        "model.trust_remote_code: true": ("nothing is known of a model's own code", config.model.trust_remote_code),
        "data.packing: true": ("a graph's attention cannot read where packed documents begin", config.data.packing),
        "train.gradient_checkpointing: layers+offload": (
            "copies to host memory run between layers and inside them", train.gradient_checkpointing == "layers+offload"
        ),
        f"train.keep_attention: {train.keep_attention}": (
            "a graph is the same for forward and recompute, which leaves nothing out", bool(train.keep_attention)
        ),
        "run.observe_every: 1": ("observed steps run uncompiled, and these would be all", config.run.observe_every == 1),
        f"parallel.kind: {config.parallel.kind}": (
            "gathering a layer's weights inside a graph was never tested", config.parallel.kind in ("shard", "hybrid")
        ),
    }  # fmt: skip
    for setting, (reason, given) in reasons.items():
        if given:
            raise UsageError(f"model.compile: layers cannot run with {setting}: {reason}", fix=f"model.compile: none, or no {setting}")
