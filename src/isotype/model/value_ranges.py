"""Checks that the numbers in a model's config.json or in the header of a GGUF file are within their
ranges. The check runs before a model is built, so that a damaged or hostile file is refused with an
error message of one line.

The ranges are wide. They only exclude values that no real model has, such as a hidden size of a
billion. Building a model with such a value would use all memory or never finish.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..runs.value_limits import check_limits

MAX_CONFIG_BYTES = 32 << 20  # largest size of adapter_config.json
_FETCH_AGAIN = "get the file again from where it came"


@dataclass(frozen=True)
class Range:
    """The range of numbers that a key may have.

    is_integer    whether the value must be an integer
    accepts_list  whether the value may be a list of such numbers, one per layer or per side
    """

    lowest: float
    highest: float
    is_integer: bool = True
    accepts_list: bool = False

    def contains(self, value: Any) -> bool:
        if isinstance(value, list) and self.accepts_list:
            return all(self.contains_number(item) for item in value)
        return self.contains_number(value)

    def contains_number(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.is_integer and not isinstance(value, int):
            return False
        return self.lowest <= value <= self.highest  # False for NaN

    def __str__(self) -> str:
        kind = "an integer" if self.is_integer else "a number"
        text = f"{kind} from {self.lowest:,} to {self.highest:,}"
        return f"{text}, or a list of these" if self.accepts_list else text


@dataclass(frozen=True)
class Texts:
    """Allows a text as the value of a key, or a list of texts if `is_list` is true."""

    is_list: bool = False

    def contains(self, value: Any) -> bool:
        if self.is_list:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        return isinstance(value, str)

    def __str__(self) -> str:
        return "a list of texts" if self.is_list else "a text"


_WIDTH = Range(1, 1 << 18)
_WIDTH_OR_LIST = Range(1, 1 << 20, accepts_list=True)
_LAYERS = Range(1, 2048)
_HEADS = Range(1, 1 << 13)
_HEADS_OR_LIST = Range(1, 1 << 13, accepts_list=True)
_EXPERTS = Range(0, 1 << 16)
_SIDE = Range(0, 1 << 16, accepts_list=True)
_POSITIONS = Range(1, 1 << 31, is_integer=False)
_TOKEN = Range(-1, 1 << 26, accepts_list=True)
_EPSILON = Range(0, 1, is_integer=False)
_SHARE = Range(0, 1, is_integer=False)
_FACTOR = Range(-1e6, 1e6, is_integer=False)
_DEVIATION = Range(0, 1e4, is_integer=False)
_THETA = Range(1e-3, 1e15, is_integer=False)

# key of config.json -> its range. A key that is absent or null keeps the family's default
RANGES: Mapping[str, Range | Texts] = {
    **dict.fromkeys(("architectures", "layer_types"), Texts(is_list=True)),
    **dict.fromkeys(("model_type", "hidden_act", "hidden_activation"), Texts()),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "out_hidden_size"), _WIDTH),
    **dict.fromkeys(("embed_dim", "intermediate_size", "moe_intermediate_size", "ffn_dim", "encoder_ffn_dim",
                     "decoder_ffn_dim"), _WIDTH_OR_LIST),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
                    _HEADS_OR_LIST),
    "num_key_value_heads": _HEADS_OR_LIST,
    "head_dim": Range(0, 1 << 16),
    "vocab_size": Range(1, 1 << 26),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), _EXPERTS),
    "num_experts_per_tok": Range(0, 1 << 16, accepts_list=True),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "original_max_position_embeddings"), _POSITIONS),
    **dict.fromkeys(("image_size", "patch_size", "num_channels", "in_channels"), _SIDE),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), _TOKEN),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), _EPSILON),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop",
                     "embd_pdrop", "attn_pdrop", "dropout", "activation_dropout"), _SHARE),
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), _DEVIATION),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), _THETA),
    **dict.fromkeys(("logit_scale", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
                     "routed_scaling_factor", "final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"), _FACTOR),
}  # fmt: skip
# keys of `rope_parameters` and `rope_scaling`
_ROPE_RANGES: Mapping[str, Range] = {
    "factor": Range(1e-6, 1e6, is_integer=False),
    "rope_theta": _THETA,
    "original_max_position_embeddings": _POSITIONS,
    "partial_rotary_factor": Range(0, 16, is_integer=False),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), Range(1e-6, 1e6, is_integer=False)),
}
# key of a GGUF header, without the name of the architecture -> its range
GGUF_RANGES: Mapping[str, Range | Texts] = {
    "context_length": _POSITIONS,
    "embedding_length": _WIDTH,
    "block_count": _LAYERS,
    "feed_forward_length": Range(0, 1 << 20),  # 0 in a model that has only experts
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _HEADS,
    "attention.layer_norm_rms_epsilon": _EPSILON,
    "attention.key_length": Range(1, 1 << 16),
    "attention.value_length": Range(1, 1 << 16),
    "expert_count": _EXPERTS,
    "expert_used_count": _EXPERTS,
    "expert_feed_forward_length": Range(0, 1 << 20),
    "vocab_size": RANGES["vocab_size"],
    "rope.dimension_count": Range(1, 1 << 16),
    "rope.freq_base": _THETA,
    "rope.scaling.factor": Range(0, 1e6, is_integer=False),
    "rope.scaling.original_context_length": _POSITIONS,
}
# key of a GGUF header that has no name of an architecture
GGUF_GENERAL_RANGES: Mapping[str, Range | Texts] = {
    "general.alignment": Range(4, 1 << 20),
    "split.count": Range(0, 1 << 16),
    **{f"tokenizer.ggml.{name}_token_id": Range(0, 1 << 26) for name in ("bos", "eos", "padding")},
}
# (a key, the key whose value must be a multiple of the first key's value)
_DIVISORS = (("num_key_value_heads", "num_attention_heads"),)
# (a key, the keys whose values are the largest value that the first key may have)
_PARTS = (("num_experts_per_tok", ("num_experts", "num_local_experts", "n_routed_experts")),)


def check_model_config(config: Mapping[str, Any], label: str) -> None:
    """Raises UsageError for a value of config.json that is outside its range, and for a file that
    is nested too deep or holds too many values.

    label  the words before the key in a message, such as `model FOLDER: config.json`
    """
    try:
        check_limits(config)
    except ValueError as error:
        raise UsageError(f"{label}: {error}", fix=_FETCH_AGAIN) from None
    for prefix, section in _config_sections(config, ""):
        ranges = _ROPE_RANGES if prefix.startswith(_ROPE_KEYS) else RANGES
        for key, value in section.items():
            check_value(f"{label}: {prefix}{key}", value, ranges.get(key))
        for key, multiple_key in _DIVISORS:
            _check_divisor(f"{label}: {prefix}{key}", section.get(key), section.get(multiple_key))
        for key, total_keys in _PARTS:
            totals = [section[name] for name in total_keys if isinstance(section.get(name), int)]
            part = section.get(key)
            if totals and isinstance(part, int) and part > max(totals):
                message = f"{label}: {prefix}{key}: {part}, expected at most {max(totals)}"
                raise UsageError(f"{message}, the number of experts", fix=_FETCH_AGAIN)


_ROPE_KEYS = ("rope_parameters", "rope_scaling")


def _config_sections(
    config: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the settings of the model, of its parts (`text_config`) and of its rotary embeddings,
    each with the prefix of its keys in messages.
    """
    yield prefix, config
    for key, value in config.items():
        is_part = key.endswith("_config") and key != "quantization_config"
        if isinstance(value, dict) and is_part:
            yield from _config_sections(value, f"{prefix}{key}.")
        elif isinstance(value, dict) and key in _ROPE_KEYS:
            yield f"{key}.", value


def check_value(label: str, value: Any, value_range: Range | Texts | None) -> None:
    """Raises UsageError for a value outside its range. If the key has no range, only NaN is
    refused. None means that the file does not contain the value.
    """
    if value is None:
        return
    if value_range is None:
        if isinstance(value, float) and math.isnan(value):
            raise UsageError(f"{label}: NaN, expected a number", fix=_FETCH_AGAIN)
        return
    if not value_range.contains(value):
        raise UsageError(
            f"{label}: {describe_value(value)}, expected {value_range}", fix=_FETCH_AGAIN
        )


def describe_value(value: Any) -> str:
    """Returns the value in the form in which messages show it. This is one line of at most 60
    characters.
    """
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys"
    if isinstance(value, list) and len(value) > 4:
        return f"a list of {len(value)} values"
    return repr(value)[:60]


def _check_divisor(label: str, divisor: Any, multiple: Any) -> None:
    if not isinstance(divisor, int) or not isinstance(multiple, int):
        return
    if multiple % divisor:
        raise UsageError(
            f"{label}: {divisor}, expected a divisor of the {multiple} attention heads",
            fix=_FETCH_AGAIN,
        )


def check_config_size(file: Path, label: str) -> None:
    """Raises UsageError for a file that is too large to be settings, without reading it."""
    if file.is_file() and (size := file.stat().st_size) > MAX_CONFIG_BYTES:
        message = f"{label}: {file.name} has {size:,} bytes, expected at most {MAX_CONFIG_BYTES:,}"
        raise UsageError(message, fix=_FETCH_AGAIN)


def check_gguf_fields(fields: Mapping[str, Any], architecture: str, label: str) -> None:
    """Raises UsageError for a value of a GGUF header that is outside its range."""
    for key, value in fields.items():
        value_range = GGUF_GENERAL_RANGES.get(key)
        if key.startswith(f"{architecture}."):
            value_range = GGUF_RANGES.get(key.removeprefix(f"{architecture}."))
        check_value(f"{label}: {key}", value, value_range)
    prefix = f"{architecture}.attention.head_count"
    _check_divisor(f"{label}: {prefix}_kv", fields.get(f"{prefix}_kv"), fields.get(prefix))
