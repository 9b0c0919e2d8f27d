"""What `model.embedding: host` cannot be combined with. Imports no torch."""

from __future__ import annotations

from ..errors import UsageError
from .schema import RunConfig

NOT_ON_HOST = "model.embedding: device"


def wants_embedding_on_host(config: RunConfig) -> bool:
    return config.model.embedding == "host"


def is_kept_on_host(embedding: str, device_type: str) -> bool:
    """Of `model.embedding`. On a CPU, where a run from a GPU may be loaded, the embedding is in host memory anyway."""
    return embedding == "host" and device_type != "cpu"


def why_not_on_host(config: RunConfig, *, device_type: str) -> str | None:
    """Which setting keeps the input embedding from waiting in host memory; or None. A model may have a reason of its own."""
    reasons = {
        "moves the input embedding to host memory, and on a CPU it is there already": device_type == "cpu",
        "cannot run with adapter.kind: none, which trains the embedding": config.adapter.kind == "none",
        "cannot run with model.add_tokens, which trains the embedding": bool(config.model.add_tokens),
        f"cannot run with parallel.kind: {config.parallel.kind}, where each process holds a part of every weight": (
            config.parallel.kind in ("shard", "hybrid")
        ),
    }
    return next((why for why, given in reasons.items() if given), None)


def check_embedding(config: RunConfig, *, device_type: str) -> None:
    """Raises  UsageError for settings with which the input embedding cannot wait in host memory, before anything is loaded."""
    if wants_embedding_on_host(config) and (why := why_not_on_host(config, device_type=device_type)):
        raise UsageError(f"model.embedding: host {why}", fix=NOT_ON_HOST)
