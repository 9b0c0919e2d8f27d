"""Which architectures learn to predict the next token: decoders. Others are refused before their weights are read."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError

DECODERS = "a decoder-only model (Llama, Qwen, Gemma, ...)"


def refuse_other_objectives(architecture: Any, name: str) -> None:
    """Raises  UsageError for a model in which a position sees later ones, or which needs an encoder's input."""
    family = getattr(architecture, "model_type", "") or "this model"
    if getattr(architecture, "is_encoder_decoder", False):
        raise UsageError(
            f"model {name}: {family} is an encoder-decoder (seq2seq) model, which is not offered yet: "
            "missing are batches with an input for the encoder and labels for the decoder",
            fix=DECODERS,
        )
    if family == "xlnet":
        raise UsageError(
            f"model {name}: xlnet learns tokens in permuted orders: its loss is of a position's own token, not the next",
            fix=DECODERS,
        )
    if _sees_later_tokens(architecture, family):
        raise UsageError(
            f"model {name}: {family} is an encoder: every position sees the later ones, so next-token training would teach it to copy",
            fix=f"{DECODERS}; a model that was trained as a decoder has is_decoder: true in config.json",
        )
    if _has_no_language_model(architecture, family):
        kinds = ", ".join(getattr(architecture, "architectures", None) or []) or "config.json names no architecture"
        raise UsageError(
            f"model {name}: {family} is no language model ({kinds}): transformers has no next-token head for it",
            fix="a decoder-only language model (Llama, Qwen, Gemma, ...)",
        )


def _has_no_language_model(architecture: Any, family: str) -> bool:
    """Whether transformers knows the family, and knows no causal language model of it; a model's own code may have one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if getattr(architecture, "auto_map", None):
        return False
    return family in CONFIG_MAPPING_NAMES and family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _sees_later_tokens(architecture: Any, family: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    causal = getattr(architecture, "is_decoder", False) or getattr(architecture, "causal", False)
    return family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not causal
