"""The configuration of each layer. transformers refuses to read from a model's configuration what differs between its layers."""

from __future__ import annotations

from typing import Any


def layer_settings(config: Any) -> list[Any]:
    """One configuration for each layer of the text model; where all layers are alike, the same one. Empty without a count of layers."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", 0)
    return list(text.per_layer_config) if count and hasattr(text, "per_layer_config") else [text] * count
