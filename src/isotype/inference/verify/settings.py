"""Compares the settings of a written model with those of the run. These are the settings of the
rotary embedding, the norms, the tokenizer, the special tokens and the chat template.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from ...errors import UsageError
from ...model.pre_tokenizers import find_splitting
from ..gguf_file import FAMILIES, header_keys, rope_factors, tokenizer_keys
from ..loaded import LoadedRun
from .tensors import Difference
from .written_model import WrittenModel

_TEXT_SHOWN = 60  # characters of a value in a message
# keys of a GGUF file that describe the file and not the model
_IGNORED = ("general.", "tokenizer.ggml.token_type", "tokenizer.ggml.padding_token_id")
# architecture -> whether llama.cpp divides by the sum of the chosen experts' weights; no key says so
_NORMALISES_EXPERTS = {"qwen2moe": False, "qwen3moe": True}
_SPLIT_KEY = "tokenizer.ggml.pre"  # key in a GGUF file: how a text is split before it is tokenised
# what llama.cpp assumes for a key that the file lacks
_DEFAULTS = {
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_eos_token": False,
    "rope.freq_base": 10000.0,
}
# keys that a file must have if the run has a value
_NEEDED = (
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.chat_template",
    "attention.layer_norm_rms_epsilon",
)
# settings of config.json that decide the model's output
_CONFIG_KEYS = (
    "rope_parameters",
    "rms_norm_eps",
    "layer_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
    "hidden_act",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts_per_tok",
)

# the settings among these that decide which tensors exist
_SHAPE_KEYS = ("tie_word_embeddings", "vocab_size")


def compare_gguf_settings(
    run: LoadedRun, config: Any, written: WrittenModel
) -> tuple[list[Difference], list[str]]:
    """Compares the header of a GGUF file with the settings of the run. Returns the differences, and
    messages about settings that could not be compared.
    """
    import gguf

    if written.adapter_only:
        return [], []
    architecture = str(written.fields["general.architecture"])
    family = FAMILIES[config.model_type]
    writer = gguf.GGUFWriter(
        "", gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, family.architecture)]
    )
    notes = []
    keys = header_keys(config)
    try:
        keys += tokenizer_keys(str(run.tokenizer.name_or_path), config.vocab_size, "")
    except UsageError as error:
        notes.append(f"the tokenizer is not compared: {error.message}")
    for method, value in keys:
        getattr(writer, method)(value)
    differences = []
    expected_fields = {key: field.value for key, field in writer.kv_data[0].items()}
    for key, expected in expected_fields.items():
        if key.startswith(_IGNORED):
            continue
        short_key = key.removeprefix(f"{architecture}.")
        value = written.fields.get(key, _DEFAULTS.get(short_key))
        is_absent = value is None and short_key not in _NEEDED
        if is_absent or _is_same_setting(key, value, expected):
            continue
        differences.append(setting_difference(key, value, expected))
    expected_norm = getattr(config, "norm_topk_prob", None)
    normalises = _NORMALISES_EXPERTS.get(architecture, expected_norm)
    if normalises != expected_norm:
        differences.append(setting_difference("norm_topk_prob", normalises, expected_norm))
    scaling = written.fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        key = f"{architecture}.rope.scaling.type"
        differences.append(setting_difference(key, scaling, "none"))
    if "tokenizer.chat_template" not in expected_fields and not notes:
        template = written.fields.get("tokenizer.chat_template")
        if template is not None:
            differences.append(setting_difference("tokenizer.chat_template", template, None))
    return differences, notes


def _is_same_setting(key: str, value: Any, expected: Any) -> bool:
    if key == _SPLIT_KEY and value != expected:
        splitting = find_splitting(value)
        return splitting is not None and expected in splitting.names
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(value, expected, rel_tol=1e-6)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_is_same_item, value, expected))
    return bool(value == expected)


def _is_same_item(value: Any, expected: Any) -> bool:
    if isinstance(expected, bytes):
        expected = expected.decode("utf-8", errors="replace")
    return bool(value == expected)


def setting_difference(key: str, value: Any, expected: Any) -> Difference:
    """Returns the difference of one setting, with both values in its message."""
    if isinstance(value, list) and isinstance(expected, list):
        changed = [i for i, pair in enumerate(zip(value, expected)) if not _is_same_item(*pair)]
        first = changed[0] if changed else min(len(value), len(expected))
        value = f"{len(value)} entries, entry {first} is {_item_text(value, first)}"
        expected = f"{len(expected)} entries, entry {first} is {_item_text(expected, first)}"
    if isinstance(value, str) and isinstance(expected, str):
        start = _first_difference(value, expected)
        if max(len(value), len(expected)) > _TEXT_SHOWN:
            value = f"{value[start : start + _TEXT_SHOWN]!r} at character {start}"
            expected = f"{expected[start : start + _TEXT_SHOWN]!r}"
    message = f"the file has {_value_text(value)}, the run {_value_text(expected)}"
    return Difference("setting", key, message, file_value=value, run_value=expected)


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    text = str(value)
    return text if len(text) <= 2 * _TEXT_SHOWN else f"{text[: 2 * _TEXT_SHOWN]}..."


def _item_text(items: list[Any], index: int) -> str:
    return repr(items[index]) if index < len(items) else "absent"


def _first_difference(first: str, second: str) -> int:
    limit = min(len(first), len(second))
    return next((i for i in range(limit) if first[i] != second[i]), limit)


def _changed_settings(config: Any, file_config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, the file's value, the run's value) of the settings that differ."""
    for key in _CONFIG_KEYS:
        value = _read_setting(file_config, key)
        expected = _read_setting(config, key)
        if value != expected:
            yield key, value, expected


def _read_setting(config: Any, key: str) -> Any:
    """Returns a setting of the text model. Some vision-language models have it only in the outer
    configuration.
    """
    value = getattr(config.get_text_config(), key, None)
    return getattr(config, key, None) if value is None else value


def compare_folder_settings(
    run: LoadedRun, config: Any, folder: Path, file_config: Any
) -> tuple[list[Difference], list[str]]:
    """Compares config.json, generation_config.json and the tokenizer of a folder with those of the
    run. Raises UsageError if one of these files cannot be read.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: {error}") from None
    differences = [
        setting_difference(f"config.json: {key}", value, expected)
        for key, value, expected in _changed_settings(config, file_config)
    ]
    run_tokenizer: Any = run.tokenizer
    if tokenizer.get_vocab() != run_tokenizer.get_vocab():
        pair = (len(tokenizer), len(run_tokenizer))
        differences.append(setting_difference("tokenizer: tokens", *pair))
    for key in ("bos_token", "eos_token", "pad_token", "chat_template"):
        value = getattr(tokenizer, key)
        expected = getattr(run_tokenizer, key)
        if value != expected:
            differences.append(setting_difference(f"tokenizer: {key}", value, expected))
    ids = tokenizer("a")["input_ids"]
    run_ids = run_tokenizer("a")["input_ids"]
    if ids != run_ids and tokenizer.get_vocab() == run_tokenizer.get_vocab():
        differences.append(setting_difference("tokenizer: tokens of 'a'", ids, run_ids))
    differences += _compare_end_tokens(run, folder)
    return differences, []


def _compare_end_tokens(run: LoadedRun, folder: Path) -> list[Difference]:
    """Compares the end tokens of the run with the end tokens of the written folder."""
    model: Any = run.model
    expected = model.generation_config.eos_token_id
    try:
        value = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        value = None
    if _id_set(value) == _id_set(expected):
        return []
    return [setting_difference("generation_config.json: eos_token_id", str(value), str(expected))]


def _id_set(ids: Any) -> set[int]:
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, list) else {ids}


def apply_gguf_settings(config: Any, written: WrittenModel) -> Any | None:
    """Returns the run's configuration with two values from a GGUF file: the base of the rotary
    embedding and the epsilon of the norms. Returns None if the file has the same two values as the
    run.
    """
    architecture = str(written.fields.get("general.architecture"))
    changed = copy.deepcopy(config)
    text_config = changed.get_text_config()
    epsilon = written.fields.get(f"{architecture}.attention.layer_norm_rms_epsilon")
    theta = written.fields.get(f"{architecture}.rope.freq_base", _DEFAULTS["rope.freq_base"])
    rope = text_config.rope_parameters
    rope = rope.get("full_attention", rope)
    is_changed = not math.isclose(theta, rope["rope_theta"], rel_tol=1e-6)
    norm = getattr(text_config, "norm_topk_prob", None)
    if _NORMALISES_EXPERTS.get(architecture, norm) != norm:
        text_config.norm_topk_prob = not norm
        is_changed = True
    experts_per_token = written.fields.get(f"{architecture}.expert_used_count")
    if experts_per_token not in (None, getattr(text_config, "num_experts_per_tok", None)):
        text_config.num_experts_per_tok = experts_per_token
        is_changed = True
    rope["rope_theta"] = theta
    if epsilon is not None and not math.isclose(epsilon, text_config.rms_norm_eps, rel_tol=1e-6):
        text_config.rms_norm_eps = epsilon
        is_changed = True
    return changed if is_changed else None


def apply_folder_settings(config: Any, file_config: Any) -> Any | None:
    """Returns the run's configuration with the values of a folder's config.json for all settings
    that change the model's output. Returns None if these values are the same as in the run.
    """
    values = {
        key: value
        for key, value, _ in _changed_settings(config, file_config)
        if key not in _SHAPE_KEYS
    }
    if not values:
        return None
    changed = copy.deepcopy(config)
    text_config = changed.get_text_config()
    for key, value in values.items():
        setattr(text_config, key, value)
    return changed


def compare_rope_factors(config: Any, stored: torch.Tensor | None) -> list[Difference]:
    """Compares the tensor that contains the factors of Llama 3's rotary scaling."""
    expected = rope_factors(config)
    if expected is None and stored is None:
        return []
    if expected is None or stored is None:
        value = None if stored is None else "a tensor"
        run_value = None if expected is None else "a tensor"
        return [setting_difference("rope_freqs.weight", value, run_value)]
    if stored.shape == expected.shape and torch.allclose(stored, expected, rtol=1e-4):
        return []
    name = "rope_freqs.weight"
    return [setting_difference(name, f"{float(stored.max()):g}", f"{float(expected.max()):g}")]
