"""Adapters and whole models as GGUF files, which llama.cpp and Ollama read; written with the package `gguf`.

llama.cpp rotates neighbouring pairs in families of the Llama kind, where transformers rotates halves: rows of q and k are put in its
order. Its norms of Gemma have the 1 added that transformers adds in the layer.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from ..errors import UsageError
from ..model.gguf import read_architecture
from .adapter_file import read_pairs, read_settings
from .gguf_tokenizer import tokenizer_keys

if TYPE_CHECKING:
    from gguf import GGUFWriter

TYPES = ("F16", "BF16", "Q8_0")
_OVER = 65504.0  # the largest fp16


@dataclass(frozen=True)
class Family:
    """How llama.cpp names a family and lays its weights out.

    architecture  the name of gguf's MODEL_ARCH
    permuted      rows of q and k are in pairs
    norm          is added to the weights of norms
    whole         whole models are written: a test reads one back with transformers
    """

    architecture: str
    permuted: bool = False
    norm: float = 0.0
    whole: bool = False


FAMILIES = {
    "llama": Family("LLAMA", permuted=True, whole=True),
    "mistral": Family("LLAMA", permuted=True, whole=True),
    "qwen2": Family("QWEN2", whole=True),
    "qwen3": Family("QWEN3", whole=True),
    "gemma2": Family("GEMMA2", norm=1.0, whole=True),
    "gemma3_text": Family("GEMMA3", norm=1.0, whole=True),
    "phi3": Family("PHI3", whole=True),
    # adapters alone
    "mixtral": Family("LLAMA", permuted=True),
    "qwen2_moe": Family("QWEN2MOE"),
    "qwen3_moe": Family("QWEN3MOE"),
    "gemma": Family("GEMMA"),
    "gemma3": Family("GEMMA3"),
    "granite": Family("GRANITE", permuted=True),
    "olmo": Family("OLMO", permuted=True),
    "olmo2": Family("OLMO2"),
    "olmo3": Family("OLMO2"),
    "smollm3": Family("SMOLLM3", permuted=True),
    "starcoder2": Family("STARCODER2"),
    "seed_oss": Family("SEED_OSS"),
}
WHOLE = tuple(name for name, family in FAMILIES.items() if family.whole)


def llama_cpp(model: Path | str, kind: str) -> str:
    """The commands of llama.cpp that write what is not written here."""
    convert = f"python llama.cpp/convert_hf_to_gguf.py {model} --outfile"
    if kind in TYPES:
        return f"{convert} {kind}.gguf --outtype {kind.lower()}"
    return f"{convert} whole.gguf --outtype auto && llama.cpp/build/bin/llama-quantize whole.gguf {kind}.gguf {kind}"


def export_adapter(adapter: Path, out: Path) -> int:
    """Writes a LoRA adapter; returns the number of its layers. Matrices keep their fp32.

    llama.cpp scales with `alpha / rank of the layer`, so alpha is written as scale times rank: for rsLoRA alpha * sqrt(r). A layer whose
    own product is another has the quotient in its B.
    Raises  UsageError for a family or a layer without a known name, and for what is more than pairs of matrices
    """
    import gguf

    pairs, base = read_pairs(adapter, "llama.cpp"), str(read_settings(adapter).get("base_model_name_or_path"))
    config = read_architecture(base)
    family = FAMILIES.get(config.model_type)
    if family is None:
        command = f"python llama.cpp/convert_lora_to_gguf.py {adapter} --base {base} --outfile {out}"
        raise UsageError(f"{config.model_type}: how llama.cpp names this family's tensors is not known here", fix=command)
    text = config.get_text_config()
    architecture = getattr(gguf.MODEL_ARCH, family.architecture)
    names = gguf.get_tensor_name_map(architecture, text.num_hidden_layers)
    alpha = pairs[0].scale * pairs[0].rank

    matrices = []
    for pair in pairs:
        theirs = names.get_name(pair.module.replace(".language_model.", "."))
        if theirs is None:
            raise UsageError(f"{adapter}: llama.cpp has no name for {pair.module}", fix="isotype merge writes a whole model")
        b = _ordered(pair.b_for(alpha / pair.rank), pair.module, text, family)
        matrices += [_Written(f"{theirs}.weight.lora_a", pair.a), _Written(f"{theirs}.weight.lora_b", b)]

    def head(writer: GGUFWriter) -> None:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)

    _write(out, gguf.MODEL_ARCH_NAMES[architecture], head, matrices)
    return len(pairs)


def export_model(folder: Path, out: Path, kind: str) -> int:
    """Writes a Hugging Face folder as one file, tokenizer and template included; returns the number of tensors.

    kind    F16, BF16 or Q8_0, of matrices; vectors stay fp32. A matrix whose rows are no multiple of 32 is F16 where Q8_0 is asked for
    Raises  UsageError for a family or a tokenizer that is not known, and weights beyond fp16 in F16
    """
    import gguf

    config = AutoConfig.from_pretrained(folder)
    refuse_model(config, llama_cpp(folder, kind))
    family = FAMILIES[config.model_type]
    architecture = getattr(gguf.MODEL_ARCH, family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    factors = _rope_factors(config)
    tensors = [] if factors is None else [_Written("rope_freqs.weight", factors)]
    for name, stored in _stored(folder):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise UsageError(f"{folder}: llama.cpp has no name for {name}", fix=llama_cpp(folder, kind))
        shape = stored.get_shape()
        own = "F32" if len(shape) < 2 else "F16" if kind == "Q8_0" and shape[1] % 32 else kind
        norm = family.norm if name.endswith("norm.weight") else 0.0
        order = partial(_ordered, module=name.rpartition(".")[0], config=config, family=family, norm=norm)
        tensors.append(_Written(theirs, stored, own, order))

    def head(writer: GGUFWriter) -> None:
        _add_header(writer, config)
        writer.add_file_type({"F16": 1, "Q8_0": 7, "BF16": 32}[kind])
        for method, value in tokenizer_keys(folder, config.vocab_size, llama_cpp(folder, kind)):
            getattr(writer, method)(value)

    _write(out, gguf.MODEL_ARCH_NAMES[architecture], head, tensors)
    return len(tensors)


def refuse_model(config: PreTrainedConfig, command: str) -> None:
    """Raises  UsageError for a model that cannot be written whole, with the `command` of llama.cpp that may convert it"""
    family = FAMILIES.get(config.model_type)
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    scaled = [part["rope_type"] for part in parts if part.get("rope_type", "default") != "default"]
    window = getattr(config, "sliding_window", None) and config.model_type in ("llama", "mistral", "qwen2", "qwen3")
    if family is None or not family.whole:
        raise UsageError(f"{config.model_type}: whole models are written of {', '.join(WHOLE)}", fix=command)
    if scaled and not (scaled == ["llama3"] and family.architecture == "LLAMA"):
        raise UsageError(f"{config.model_type} with rope_type {scaled[0]}: not written here", fix=command)
    local, every = {"gemma2": (None, 2), "gemma3_text": (1e4, 6)}.get(config.model_type, (None, 0))
    types = getattr(config, "layer_types", None) or []
    if every and (
        any((kind == "full_attention") != (i % every == every - 1) for i, kind in enumerate(types))
        or getattr(config, "query_pre_attn_scalar", None) != config.head_dim
        or (local and rope["sliding_attention"]["rope_theta"] != local)
    ):
        raise UsageError(f"{config.model_type} with another order of layers, scale or rotary base than released models", fix=command)
    if window:
        raise UsageError(f"{config.model_type} with a sliding window: llama.cpp attends to everything in this family", fix=command)


def _add_header(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    c: Any = config
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(int(head * (c.rope_parameters.get("partial_rotary_factor") or 1)))
    # Gemma 3 has a base for each kind of layer; llama.cpp has the local one, 10,000, as a constant
    writer.add_rope_freq_base(c.rope_parameters.get("full_attention", c.rope_parameters)["rope_theta"])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    if c.model_type == "phi3":
        writer.add_rope_scaling_orig_ctx_len(c.original_max_position_embeddings)
    if c.model_type in ("gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(c.sliding_window or 0)
    for add, cap in (
        (writer.add_attn_logit_softcapping, getattr(c, "attn_logit_softcapping", None)),
        (writer.add_final_logit_softcapping, getattr(c, "final_logit_softcapping", None)),
    ):
        if cap is not None:
            add(cap)


def _rope_factors(config: PreTrainedConfig) -> Tensor | None:
    """By what llama.cpp divides each frequency under Llama 3's scaling: transformers' own frequencies without and with it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = 2 * scaled.shape[0]
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    factors: Tensor = plain / scaled
    return factors


def _ordered(tensor: Tensor, module: str, config: Any, family: Family, norm: float = 0.0) -> Tensor:
    """Rows of q and k from halves to neighbouring pairs, where the family has them so; bias and LoRA's B as the weight.

    norm  is added
    """
    if norm:
        return tensor + norm
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module.rpartition(".")[2])
    if not family.permuted or heads is None:
        return tensor
    return tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class _Written:
    """A tensor of the file, read when it is written: a model need not fit into memory.

    stored  the tensor, or its place in a safetensors file
    order   makes the values that are written of it, in fp32
    """

    name: str
    stored: Any
    kind: str = "F32"
    order: Callable[[Tensor], Tensor] = lambda value: value

    @property
    def shape(self) -> list[int]:
        return list(self.stored.shape if isinstance(self.stored, Tensor) else self.stored.get_shape())

    def content(self, out: Path) -> np.ndarray[Any, Any]:
        """The bytes as ggml has them. Raises UsageError."""
        import gguf

        value = self.order((self.stored if isinstance(self.stored, Tensor) else self.stored[:]).float())
        if self.kind == "F16" and float(value.abs().max()) > _OVER:
            raise UsageError(f"{out}: {self.name} has values beyond fp16's {_OVER:.0f}", fix="--type BF16 keeps them")
        return gguf.quants.quantize(value.contiguous().numpy(), gguf.GGMLQuantizationType[self.kind])


def _stored(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and place of each tensor."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        tensors = safe_open(file, framework="pt")
        for name in tensors.keys():  # noqa: SIM118  # not a mapping
            yield name, tensors.get_slice(name)


def _write(out: Path, architecture: str, head: Callable[[GGUFWriter], None], tensors: Sequence[_Written]) -> None:
    """The file as a whole, or not at all."""
    import gguf

    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".gguf-") as aside:
            file = Path(aside) / out.name
            writer = gguf.GGUFWriter(str(file), architecture)
            head(writer)
            for one in tensors:
                raw = gguf.GGMLQuantizationType[one.kind]
                block, size = gguf.GGML_QUANT_SIZES[raw]
                writer.add_tensor_info(one.name, one.shape, np.dtype(np.float32), math.prod(one.shape) // block * size, raw_dtype=raw)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for one in tensors:
                writer.write_tensor_data(one.content(out))
            writer.close()
            file.replace(out)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}") from None
