"""GGUF files of llama.cpp as bases: their architecture and tensors in transformers' names, the
blocks as they are in the file.

Families of the Llama and Qwen kind. llama.cpp has rows of q and k of a Llama in neighbouring pairs,
where transformers has halves: rows are put back, which leaves each row's blocks as they are. The
embedding is no linear layer, and is widened when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..config.sources import gguf_file
from ..errors import UsageError
from ..ops.packed import PackedState
from ..ops.packed.ggml import BLOCKS
from ..ops.packed.recognise import Part, recognise
from ..precision.packing import Packing

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Family:
    """model_type: of transformers; permuted: rows of q and k are in pairs; own: settings that
    llama.cpp has in its code.
    """

    model_type: str
    permuted: bool = False
    own: Mapping[str, Any] | None = None


# by llama.cpp's name
FAMILIES = {
    "llama": Family("llama", permuted=True), "qwen2": Family("qwen2"), "qwen3": Family("qwen3"),
    "qwen3moe": Family("qwen3_moe", own={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}),
}  # fmt: skip
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_SETTINGS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim", "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
# read apart, or told by the tensors
_BESIDE = (
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout",
)  # fmt: skip
_FACTORS = "rope_freqs.weight"
DENSE = "the dense model that it was made from, with precision.base: nf4, fp8 or int8"


@dataclass(frozen=True)
class _Tensor:
    """kind: `Q4_K`, `F32`, ...; data: uint8[O bytes], [E O bytes] of experts, a part of the file
    until it is used; shape: of the values.
    """

    kind: str
    data: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _File:
    fields: Mapping[str, Any]
    tensors: Mapping[str, _Tensor]
    family: Family

    def of(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.fields['general.architecture']}.{key}", default)


def read(file: Path) -> _File:
    """Raises  UsageError for a file that is damaged or a part of several, a family or a kind of
    blocks that is not read, and no package.
    """
    return _read(file, file.stat().st_mtime_ns)


@lru_cache(2)
def _read(file: Path, _changed: int) -> _File:
    try:
        import gguf
    except ImportError:
        raise UsageError(
            f"model {file}: reading it needs the package gguf", fix="pip install 'isotype[gguf]'"
        ) from None
    try:
        opened = gguf.GGUFReader(file, "c")
        short = (
            name
            for name in opened.fields
            if not name.startswith("tokenizer.") or name.endswith(("_id", ".model", ".pre"))
        )
        fields = {name: opened.fields[name].contents() for name in short}
        tensors = {
            t.name: _Tensor(
                t.tensor_type.name,
                torch.from_numpy(t.data).view(torch.uint8),
                tuple(int(n) for n in reversed(t.shape)),
            )
            for t in opened.tensors
        }
        architecture = str(fields["general.architecture"])
        # llama.cpp's default, and not every class's own
        if (heads := fields.get(f"{architecture}.attention.head_count")) is not None:
            fields.setdefault(f"{architecture}.attention.head_count_kv", heads)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise UsageError(
            f"model {file}: no whole GGUF file: {error}",
            fix="get the file again from where it came",
        ) from None
    family = FAMILIES.get(architecture)
    if family is None:
        raise UsageError(
            f"model {file}: GGUF files of {architecture} are not read: {', '.join(FAMILIES)} are",
            fix=dense_copy(file),
        )
    if int(fields.get("split.count", 1)) > 1:
        raise UsageError(
            f"model {file}: a part of {fields['split.count']}",
            fix="llama.cpp/build/bin/llama-gguf-split --merge joins them",
        )
    kinds = sorted({t.kind for t in tensors.values()} - {*BLOCKS, *_PLAIN})
    if kinds:
        raise UsageError(
            f"model {file}: {', '.join(kinds)} is not read: {', '.join(BLOCKS)} are",
            fix=dense_copy(file),
        )
    return _File(fields, tensors, family)


def dense_copy(file: Path) -> str:
    """What to run for a dense copy of a file."""
    of = f"from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}"
    saved = "save_pretrained('DENSE')"
    wide = "quantization_config=GgufConfig(dequantize=True), dtype='bfloat16'"
    return (
        f"transformers widens it: AutoModelForCausalLM.{of}, {wide}).{saved};"
        f" AutoTokenizer.{of}).{saved}; then model.name: DENSE, and precision.base: nf4, fp8 or"
        " int8 packs it again"
    )


def read_architecture(
    name: str, revision: str | None = None, *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The configuration of a folder or hub id, or of a GGUF file. Raises UsageError for a file with
    a setting that is not read.
    """
    path = gguf_file(name)
    if path is None:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
        return found
    file = read(path)
    of = file.of
    fields = file.fields
    tensors = file.tensors
    architecture = f"{fields['general.architecture']}."
    own = {
        name.removeprefix(architecture): value
        for name, value in fields.items()
        if name.startswith(architecture)
    }
    experts = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    unread = {
        name
        for name in own
        if name not in (*_SETTINGS, *_BESIDE) or (name in experts and file.family.own is None)
    }
    if strange := [f"{architecture}{name}: {own[name]}" for name in sorted(unread) if own[name]]:
        raise UsageError(f"model {path}: its setting {strange[0]} is not read", fix=DENSE)
    may_lack = (*experts, "attention.key_length")
    if absent := [name for name in _SETTINGS if name not in own and name not in may_lack]:
        raise UsageError(
            f"model {path}: its setting {architecture}{absent[0]} is missing",
            fix="get the file again from where it came",
        )
    settings = {theirs: own[name] for name, theirs in _SETTINGS.items() if own.get(name)}
    head = settings.setdefault(
        "head_dim", settings["hidden_size"] // settings["num_attention_heads"]
    )
    if of("rope.dimension_count", head) != head:
        raise UsageError(
            f"model {path}: rotary angles for {of('rope.dimension_count')} of {head} channels are"
            " not read",
            fix=DENSE,
        )
    special = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {
        f"{name}_token_id": fields.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in special.items()
    }
    if file.family.permuted:
        biased = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    else:
        biased = {}
    made = AutoConfig.for_model(
        file.family.model_type,
        **settings,
        **ids,
        **biased,
        **(file.family.own or {}),
        vocab_size=tensors["token_embd.weight"].shape[0],
        rope_parameters=_rope(file, path, head),
        tie_word_embeddings="output.weight" not in tensors,
        dtype=torch.bfloat16,
    )
    kinds = sorted({t.kind for t in tensors.values() if t.kind in BLOCKS})
    if not kinds:
        raise UsageError(
            f"model {path}: a GGUF file without blocks: its weights are not packed",
            fix=dense_copy(path),
        )
    made.quantization_config = {"quant_method": "gguf", "kinds": kinds}
    made.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[file.family.model_type]]
    return made


def _rope(file: _File, path: Path, head: int) -> dict[str, Any]:
    """transformers' rotary parameters. Llama 3's scaling is a tensor in the file, of which the
    factor is found again.
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(file.of("rope.freq_base", 10000.0)),
    }
    kind = file.of("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        if kind == "yarn":
            original = file.of("rope.scaling.original_context_length")
        else:
            original = None
        rope |= {"rope_type": kind, "factor": float(file.of("rope.scaling.factor", 1.0))}
        rope |= {"original_max_position_embeddings": int(original)} if original else {}
    elif kind != "none":
        raise UsageError(f"model {path}: rope.scaling.type: {kind} is not read", fix=DENSE)
    if _FACTORS in file.tensors:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        factors = file.tensors[_FACTORS].data.view(torch.float32).flatten()
        plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.float32) / head))
        rope |= {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        like = AutoConfig.for_model(
            "llama", head_dim=head, rope_parameters=rope, max_position_embeddings=131072
        )
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](like, torch.device("cpu"))
        if factors.shape != plain.shape or not torch.allclose(plain / scaled, factors, rtol=1e-4):
            raise UsageError(
                f"model {path}: {_FACTORS} are not those of Llama 3.1 and later", fix=DENSE
            )
    return rope


def parts(path: Path) -> dict[str, Part]:
    """Name -> dtype and shape of every tensor, in transformers' names; blocks have the name of
    their kind in the place of `weight`.
    """
    return {
        name: Part(value.dtype, tuple(value.shape))
        for name, t, _ in _named(path)
        if not _widened(name)
        for value in (_values(t),)
    }


def _widened(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return owner == _OUTSIDE["token_embd"] and last in BLOCKS


def tensors(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same tensors, parts of the file, and the embedding, `dtype`[V H]."""
    made = {}
    for name, t, heads in _named(path):
        value = _values(t)
        owner, _, last = name.rpartition(".")
        if _widened(name):
            name = f"{owner}.weight"
            layout = recognise(
                name,
                {last: Part(value.dtype, tuple(value.shape))},
                Packing("gguf", "gguf", ""),
                (t.shape[0], t.shape[1]),
            )
            value = PackedState(layout, "gguf", {}).widen(value, dtype)
        if heads:
            made[name] = (
                value.view(heads, -1, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
            )
        else:
            made[name] = value
    return made


def _values(t: _Tensor) -> Tensor:
    if t.kind in BLOCKS:
        return t.data
    return t.data.view(_PLAIN[t.kind]).view(t.shape)


def _named(path: Path) -> Iterator[tuple[str, _Tensor, int]]:
    """Each tensor under its name in transformers; of experts, each one's; with the heads whose rows
    are in pairs, or 0.

    Raises  UsageError for a tensor without a name there
    """
    file = read(path)
    if file.family.permuted:
        heads_of = {
            "attn_q": file.of("attention.head_count"),
            "attn_k": file.of("attention.head_count_kv"),
        }
    else:
        heads_of = {}
    for full, t in file.tensors.items():
        if full == _FACTORS:
            continue
        at = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", full)
        layer, name, last = at.groups() if at else (None, "", "")
        last = t.kind if t.kind in BLOCKS else last
        if layer is not None and name in _EXPERTS:
            for expert in range(t.shape[0]):
                one = _Tensor(t.kind, t.data[expert], t.shape[1:])
                yield f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS[name]}.{last}", one, 0
            continue
        theirs = (_OUTSIDE if layer is None else _IN_LAYER).get(name)
        if theirs is None:
            raise UsageError(
                f"model {path}: its tensor {full} has no place in a {file.family.model_type}",
                fix=DENSE,
            )
        yield (
            f"model.layers.{layer}.{theirs}.{last}" if layer is not None else f"{theirs}.{last}",
            t,
            int(heads_of.get(name) or 0),
        )


def tokenizer_in(path: Path) -> Any:
    """The tokenizer of a file, as transformers builds it. Raises UsageError where that would split
    text in another way than the model's.
    """
    kind, split = (read(path).fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS as KNOWN,
        )
    except ImportError:  # before 5.23 it split every text as GPT-2
        KNOWN = {}
    if kind == "gpt2" and split not in (*KNOWN, "gpt-2"):
        what = (
            f"model {path}: how its tokenizer splits text (tokenizer.ggml.pre: {split}) is not"
            " known"
        )
        raise UsageError(what, fix="model.tokenizer: the folder or hub id of the dense model")
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
