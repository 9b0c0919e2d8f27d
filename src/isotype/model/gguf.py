"""Reads GGUF files of llama.cpp as base models. This module converts their settings and names to
those of transformers, and keeps the quantised blocks unchanged.

The Llama and Qwen families and Gemma 3 are supported. A rotary embedding combines the rows of query
and key weights in pairs. In a Llama file, the two rows of a pair are neighbours. In transformers,
one row is in the first half of the rows, and the other row is in the second half. So these rows are
reordered, which does not change the blocks inside a row. The embedding is not a linear layer. It is
dequantised when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..config.sources import gguf_file
from ..environment.install import install_command
from ..errors import UsageError
from ..ops.packed import PackedState
from ..ops.packed.ggml import BLOCKS
from ..ops.packed.recognise import TensorHeader, recognise_layout
from ..precision.packing import Packing
from .gguf_header import read_header
from .pre_tokenizers import build_pre_tokenizer, find_splitting
from .value_ranges import check_config_size, check_gguf_fields, check_model_config

# kind of a tensor in GGUF -> dtype, for kinds without blocks
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Family:
    """Describes how a model family of llama.cpp is converted to transformers.

    model_type      the family's name in transformers
    permutes_rows   whether rows of q and k are stored in neighbouring pairs
    fixed_settings  settings that are fixed in llama.cpp's code and not stored in the file
    norm_offset     a number that llama.cpp's files add to the weights of norms, and transformers'
                    files do not
    settings        settings that only this family has, as a mapping of their names in the file to
                    their names in transformers
    layer_tensors   tensors that have another name in transformers than in the other families
    """

    model_type: str
    permutes_rows: bool = False
    fixed_settings: Mapping[str, Any] | None = None
    norm_offset: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)
    layer_tensors: Mapping[str, str] = field(default_factory=dict)


# llama.cpp's name of a family -> how it is converted
FAMILIES = {
    "llama": Family("llama", permutes_rows=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3moe": Family(
        "qwen3_moe",
        fixed_settings={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma3": Family(
        "gemma3_text",
        norm_offset=1.0,
        settings={"attention.sliding_window": "sliding_window"},
        layer_tensors={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}
# constants of llama.cpp for Gemma 3: the rotary base of layers with a sliding window, and the
# number of layers of the 27B. The 27B computes its attention scale from the hidden size; smaller
# models compute it from the size of a head
_LOCAL_ROPE_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62
_MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
# llama.cpp's name of a stack of experts -> the name in transformers
_EXPERT_TENSORS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_SETTINGS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim", "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
# settings that are read separately, or follow from the tensors
_HANDLED_SETTINGS = (
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout",
)  # fmt: skip
_ROPE_FACTORS = "rope_freqs.weight"
# tensors without which a file is no language model
_REQUIRED_TENSORS = ("token_embd.weight", "output_norm.weight")
USE_DENSE_MODEL = "the dense model that it was made from, with precision.base: nf4, fp8 or int8"


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a GGUF file.

    kind   `Q4_K`, `F32`, ...
    data   uint8[O bytes], or uint8[E O bytes] for experts; mapped from the file until it is used
    shape  the shape of the values
    """

    kind: str
    data: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _File:
    fields: Mapping[str, Any]
    tensors: Mapping[str, _Tensor]
    family: Family

    def architecture_field(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.fields['general.architecture']}.{key}", default)


def read_file(file: Path) -> _File:
    """Opens a GGUF file.

    Raises  UsageError for a file that is damaged or split, and for a family or a kind of blocks
            that is not supported
    """
    return _read_cached(file, file.stat().st_mtime_ns)


@lru_cache(2)
def _read_cached(file: Path, _changed: int) -> _File:
    try:
        header = read_header(file)
        fields = dict(header.fields)
        architecture = str(fields["general.architecture"])
        if not architecture.isprintable():
            raise ValueError(f"general.architecture: {architecture!a:.60}")
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(
            f"model {file}: no whole GGUF file: {error}",
            fix="get the file again from where it came",
        ) from None
    check_gguf_fields(fields, architecture, f"model {file}")
    # this is llama.cpp's default; some classes of transformers have another
    if (heads := fields.get(f"{architecture}.attention.head_count")) is not None:
        fields.setdefault(f"{architecture}.attention.head_count_kv", heads)
    family = FAMILIES.get(architecture)
    if family is None:
        raise UsageError(
            f"model {file}: GGUF files of {architecture} are not read: {', '.join(FAMILIES)} are",
            fix=dense_copy_instructions(file),
        )
    if int(fields.get("split.count", 1)) > 1:
        raise UsageError(
            f"model {file}: a part of {fields['split.count']}",
            fix="llama.cpp/build/bin/llama-gguf-split --merge joins them",
        )
    kinds = sorted({entry.kind for entry in header.tensors.values()} - {*BLOCKS, *PLAIN_DTYPES})
    if kinds:
        raise UsageError(
            f"model {file}: {', '.join(kinds)} is not read: {', '.join(BLOCKS)} are",
            fix=dense_copy_instructions(file),
        )
    if absent := [name for name in _REQUIRED_TENSORS if name not in header.tensors]:
        raise UsageError(
            f"model {file}: its tensor {absent[0]} is missing",
            fix="get the file again from where it came",
        )
    _check_block_count(fields.get(f"{architecture}.block_count"), header.tensors, file)
    content = torch.from_numpy(np.memmap(file, mode="c"))
    tensors = {}
    for name, entry in header.tensors.items():
        data = content[entry.offset : entry.offset + entry.size]
        rows = data.view(*entry.shape[:-1], entry.row_bytes)
        tensors[name] = _Tensor(entry.kind, rows, entry.shape)
    return _File(fields, tensors, family)


def _check_block_count(count: int | None, tensor_names: Iterable[str], file: Path) -> None:
    """Raises UsageError if the number of layers in the header differs from the number of layers for
    which the file has tensors.
    """
    matches = (re.match(r"blk\.(\d{1,6})\.", name) for name in tensor_names)
    layers = {int(match[1]) for match in matches if match is not None}
    if count is not None and layers != set(range(count)):
        raise UsageError(
            f"model {file}: block_count: {count}, expected the number of blocks with tensors,"
            f" {len(layers)}",
            fix="get the file again from where it came",
        )


def _printable_text(value: Any) -> str:
    """Returns the first 60 characters of a value of the header, for a message. Line breaks and
    control characters are written as escapes.
    """
    text = str(value)[:60]
    return text if text.isprintable() else ascii(text)


def dense_copy_instructions(file: Path) -> str:
    """Describes how the user can make a dense copy of a file."""
    load_call = f"from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}"
    save_call = "save_pretrained('DENSE')"
    load_options = "quantization_config=GgufConfig(dequantize=True), dtype='bfloat16'"
    return (
        f"transformers can dequantise it: AutoModelForCausalLM.{load_call}, {load_options}).{save_call};"
        f" AutoTokenizer.{load_call}).{save_call}; then model.name: DENSE, and precision.base: nf4,"
        " fp8 or int8 packs it again"
    )


def read_architecture(
    name: str, revision: str | None = None, *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Reads the configuration of a folder, a hub id or a GGUF file. Raises UsageError for a value
    outside its range, and for a GGUF file with a setting that is not supported.
    """
    path = gguf_file(name)
    if path is None:
        check_config_size(Path(name) / "config.json", f"model {name}")
        settings, _ = PretrainedConfig.get_config_dict(name, revision=revision)
        check_model_config(settings, f"model {name}: config.json")
        config: PretrainedConfig = AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
        return config
    file = read_file(path)
    family = file.family
    names = _SETTINGS | dict(family.settings)
    fields = file.fields
    tensors = file.tensors
    architecture = f"{fields['general.architecture']}."
    architecture_fields = {
        name.removeprefix(architecture): value
        for name, value in fields.items()
        if name.startswith(architecture)
    }
    experts = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    unread = {
        name
        for name in architecture_fields
        if name not in (*names, *_HANDLED_SETTINGS)
        or (name in experts and family.fixed_settings is None)
    }
    if unread_settings := [
        f"{architecture}{name}: {_printable_text(architecture_fields[name])}"
        for name in sorted(unread)
        if architecture_fields[name]
    ]:
        raise UsageError(
            f"model {path}: its setting {unread_settings[0]} is not read", fix=USE_DENSE_MODEL
        )
    optional_settings = (*experts, "attention.key_length")
    if absent := [
        name for name in names if name not in architecture_fields and name not in optional_settings
    ]:
        raise UsageError(
            f"model {path}: its setting {architecture}{absent[0]} is missing",
            fix="get the file again from where it came",
        )
    settings = {
        setting: architecture_fields[name]
        for name, setting in names.items()
        if architecture_fields.get(name)
    }
    head_dim = settings.setdefault(
        "head_dim", settings["hidden_size"] // settings["num_attention_heads"]
    )
    rotary_channels = file.architecture_field("rope.dimension_count", head_dim)
    if rotary_channels != head_dim:
        raise UsageError(
            f"model {path}: rotary angles for {rotary_channels} of {head_dim} channels are not read",
            fix=USE_DENSE_MODEL,
        )
    token_keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {
        f"{name}_token_id": fields.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in token_keys.items()
    }
    if family.permutes_rows:
        settings["attention_bias"] = "blk.0.attn_q.bias" in tensors
    settings["rope_parameters"] = _rope_parameters(file, path, head_dim)
    if family.model_type == "gemma3_text":
        settings |= _gemma3_settings(settings)
    built = AutoConfig.for_model(
        family.model_type,
        **settings,
        **ids,
        **(family.fixed_settings or {}),
        vocab_size=tensors["token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in tensors,
        dtype=torch.bfloat16,
    )
    kinds = sorted({t.kind for t in tensors.values() if t.kind in BLOCKS})
    if not kinds:
        raise UsageError(
            f"model {path}: a GGUF file without blocks: its weights are not packed",
            fix=dense_copy_instructions(path),
        )
    built.quantization_config = {"quant_method": "gguf", "kinds": kinds}
    built.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]]
    return built


def _gemma3_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of Gemma 3 that are constants in llama.cpp."""
    local_rope = {"rope_type": "default", "rope_theta": _LOCAL_ROPE_THETA}
    if settings["num_hidden_layers"] == _GEMMA3_27B_LAYERS:
        scale = settings["hidden_size"] // settings["num_attention_heads"]
    else:
        scale = settings["head_dim"]
    return {
        "query_pre_attn_scalar": scale,
        "rope_parameters": {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": local_rope,
        },
    }


def _rope_parameters(file: _File, path: Path, head_dim: int) -> dict[str, Any]:
    """Returns transformers' rotary parameters. The file stores Llama 3's scaling as a tensor. The
    scaling factor is computed from this tensor.
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(file.architecture_field("rope.freq_base", 10000.0)),
    }
    scaling = file.architecture_field("rope.scaling.type", "none")
    if scaling in ("linear", "yarn"):
        if scaling == "yarn":
            original = file.architecture_field("rope.scaling.original_context_length")
        else:
            original = None
        rope |= {
            "rope_type": scaling,
            "factor": float(file.architecture_field("rope.scaling.factor", 1.0)),
        }
        if original:
            rope["original_max_position_embeddings"] = int(original)
    elif scaling != "none":
        raise UsageError(
            f"model {path}: rope.scaling.type: {_printable_text(scaling)} is not read",
            fix=USE_DENSE_MODEL,
        )
    if _ROPE_FACTORS in file.tensors:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        factors = file.tensors[_ROPE_FACTORS].data.view(torch.float32).flatten()
        unscaled = 1.0 / (
            rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        )
        rope |= {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        llama_config = AutoConfig.for_model(
            "llama", head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072
        )
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](llama_config, torch.device("cpu"))
        if factors.shape != unscaled.shape or not torch.allclose(
            unscaled / scaled, factors, rtol=1e-4
        ):
            raise UsageError(
                f"model {path}: {_ROPE_FACTORS} are not those of Llama 3.1 and later",
                fix=USE_DENSE_MODEL,
            )
    return rope


def read_tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Returns the dtype and shape of every tensor, by its name in transformers. The name of a
    tensor with quantised blocks ends in the kind of the blocks, such as `Q4_K`, and not in
    `weight`.
    """
    return {
        name: TensorHeader(value.dtype, tuple(value.shape))
        for name, tensor, _ in _rename_tensors(path)
        if not _is_packed_embedding(name)
        for value in (_tensor_values(tensor),)
    }


def _is_packed_embedding(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return owner == _MODEL_TENSORS["token_embd"] and last in BLOCKS


def load_tensors(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Loads the tensors with transformers' names. The tensors stay memory-mapped, except for the
    embedding, which is dequantised to `dtype`[V H].
    """
    result = {}
    norm_offset = read_file(path).family.norm_offset
    for name, tensor, heads in _rename_tensors(path):
        value = _tensor_values(tensor)
        if norm_offset and name.endswith("norm.weight"):
            value = value.float() - norm_offset
        owner, _, last = name.rpartition(".")
        if _is_packed_embedding(name):
            name = f"{owner}.weight"
            layout = recognise_layout(
                name,
                {last: TensorHeader(value.dtype, tuple(value.shape))},
                Packing("gguf", "gguf", ""),
                (tensor.shape[0], tensor.shape[1]),
            )
            value = PackedState(layout, "gguf", {}).dequantise(value, dtype)
        result[name] = restore_rows(value, heads) if heads else value
    return result


def restore_rows(value: Tensor, heads: int) -> Tensor:
    """Reorders the rows of a query or key weight for transformers. In each head, the first rows of
    all neighbouring pairs become the first half, and the second rows become the second half.

    value  [heads*D ...]
    """
    pairs = value.view(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def _tensor_values(tensor: _Tensor) -> Tensor:
    if tensor.kind in BLOCKS:
        return tensor.data
    return tensor.data.view(PLAIN_DTYPES[tensor.kind]).view(tensor.shape)


def _rename_tensors(path: Path) -> Iterator[tuple[str, _Tensor, int]]:
    """Yields for each tensor its name in transformers, the tensor, and its number of attention
    heads. Stacked experts are split into one tensor per expert. The number of heads is only given
    for query and key weights whose rows the file stores in neighbouring pairs, because these rows
    have to be reordered. It is 0 for other tensors.

    Raises  UsageError for a tensor that has no name in transformers
    """
    file = read_file(path)
    if file.family.permutes_rows:
        heads_of = {
            "attn_q": file.architecture_field("attention.head_count"),
            "attn_k": file.architecture_field("attention.head_count_kv"),
        }
    else:
        heads_of = {}
    layer_tensors = _LAYER_TENSORS | dict(file.family.layer_tensors)
    for gguf_name, tensor in file.tensors.items():
        if gguf_name == _ROPE_FACTORS:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", gguf_name)
        layer, name, suffix = match.groups() if match else (None, "", "")
        suffix = tensor.kind if tensor.kind in BLOCKS else suffix
        if layer is not None and name in _EXPERT_TENSORS:
            for expert in range(tensor.shape[0]):
                expert_tensor = _Tensor(tensor.kind, tensor.data[expert], tensor.shape[1:])
                yield (
                    f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERT_TENSORS[name]}.{suffix}",
                    expert_tensor,
                    0,
                )
            continue
        if layer is None:
            transformers_name = _MODEL_TENSORS.get(name)
        else:
            transformers_name = layer_tensors.get(name)
        if transformers_name is None:
            raise UsageError(
                f"model {path}: its tensor {gguf_name} has no place in a {file.family.model_type}",
                fix=USE_DENSE_MODEL,
            )
        full_name = f"{transformers_name}.{suffix}"
        if layer is not None:
            full_name = f"model.layers.{layer}.{full_name}"
        yield full_name, tensor, int(heads_of.get(name) or 0)


def load_gguf_tokenizer(path: Path) -> Any:
    """Builds the tokenizer of a file with transformers. The field `tokenizer.ggml.pre` of the file
    names one of llama.cpp's rules for splitting text. The tokenizer splits text by this rule.
    Raises UsageError for an unknown name.

    `AutoTokenizer` would read the whole file once more to find the model's family. That takes 22.8 s
    for Gemma's 262,144 tokens; `PreTrainedTokenizerFast` takes 2.7 s.
    """
    fields = read_file(path).fields
    name = fields.get("tokenizer.ggml.pre")
    splitting = find_splitting(name)
    is_byte_level = fields.get("tokenizer.ggml.model") == "gpt2"
    if is_byte_level and splitting is None:
        message = (
            f"model {path}: how its tokenizer splits text (tokenizer.ggml.pre: {_printable_text(name)})"
            " is not known"
        )
        raise UsageError(message, fix="model.tokenizer: the folder or hub id of the dense model")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    except ImportError:  # transformers before 5.23 reads a file with the package gguf
        raise UsageError(
            f"model {path}: reading its tokenizer needs the package gguf",
            fix=install_command("gguf"),
        ) from None
    if is_byte_level and splitting is not None:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = build_pre_tokenizer(splitting)
        backend.model.ignore_merges = splitting.ignores_merges
    return tokenizer
