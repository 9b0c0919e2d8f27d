"""Which attention implementation a model runs: the one that was asked for, or the best that its family has."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..errors import UsageError

AUTO = "auto"
# our word -> transformers' name; `auto` names none: transformers then takes sdpa where the class has it, else eager
IMPLEMENTATIONS = {AUTO: None, "sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2", "flex": "flex_attention"}
_WORDS = {name: word for word, name in IMPLEMENTATIONS.items()}
_REFUSED = re.compile(r"attn_implementation|scaled_dot_product_attention|flex_attention|Flash ?Attention", re.IGNORECASE)


def attention_options(attention: str, device: torch.device) -> dict[str, Any]:
    """The attention arguments for `from_pretrained`. Raises UsageError for an implementation that trains only on a GPU."""
    if attention in ("flash", "flex") and device.type == "cpu":
        raise UsageError(f"model.attention: {attention} trains on a GPU only, and this run is on the CPU", fix="model.attention: auto")
    name = IMPLEMENTATIONS[attention]
    return {} if name is None else {"attn_implementation": name}


def is_known(model: Any) -> bool:
    """Whether the model's configuration states its attention, as those of transformers do; diffusers' do not."""
    return hasattr(getattr(model, "config", None), "_attn_implementation")


def taken(model: Any) -> str:
    """The word for what `model` runs with, as `model.attention` takes it; another library's name as it is."""
    name = getattr(model.config, "_attn_implementation", None) or "eager"
    return _WORDS.get(name) or str(name)


def said(model: Any, asked: str) -> str:
    """A header line: the implementation, and the reason if it is not the requested one; "" for a model that is not from transformers."""
    if not is_known(model):
        return ""
    word = taken(model)
    if asked != AUTO:
        return word
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    why = f"{type(inner).__name__} has no sdpa" if word == "eager" else "the best this family has"
    return f"{word} (auto: {why})"


def explain(model: str, attention: str, error: BaseException) -> UsageError | None:
    """One line for an implementation that the family or the machine lacks; None for errors about something else."""
    text = str(error)
    if attention == AUTO or not _REFUSED.search(text):
        return None
    if attention == "flash" and ("install" in text or "package" in text):
        first = next(line.strip() for line in text.splitlines() if line.strip())
        return UsageError(f"model.attention: flash: {first}", fix="pip install flash-attn, or model.attention: auto")
    family = re.match(r"(\w+) does not support", text.strip())
    who = family[1] if family else model
    return UsageError(f"model.attention: {attention}: {who} does not have it in transformers", fix="model.attention: auto")
