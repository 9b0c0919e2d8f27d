"""A mask that holds the starts of packed documents, instead of a mask of positions x positions.

transformers hands a mask of four dimensions to every layer as it is. This one holds the documents' bounds, which `attention` alone reads:
only a model all of whose attention layers run that op is given one (`attention.why_no_document_mask`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.attention import Documents


class DocumentMask(Tensor):
    """int32[1 1 1 E+1], `documents.bounds`."""

    documents: Documents

    @staticmethod
    def __new__(cls, documents: Documents) -> DocumentMask:
        made = torch.Tensor._make_subclass(cls, documents.bounds.view(1, 1, 1, -1))
        made.documents = documents
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # a C function, where Tensor has a class method


PLAIN_LAYERS = {"full_attention", "sliding_attention"}


def why_mask_is_read(model: Any) -> str | None:
    """What in this model reads a mask of padding besides a causal attention, or None.

    With None, padding on the right needs no mask: no real token attends to a later position.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "is_encoder_decoder", False):
        return "its encoder attends to both sides"
    if getattr(text, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    if getattr(text, "output_router_logits", False):
        return "its routers' balancing loss leaves padding out"
    others = sorted(set(getattr(text, "layer_types", None) or []) - PLAIN_LAYERS)
    if others:
        return f"it has layers of {', '.join(others)}"
    for name, module in model.named_modules():
        if getattr(module, "is_causal", True) is False:
            return f"{name} is not causal"
        if isinstance(module, nn.Conv1d) or hasattr(module, "A_log"):
            return f"{name} is a {type(module).__name__}, which mixes neighbouring positions"
    return None if getattr(text, "model_type", None) else "its configuration is unknown"
