"""Writes adapters and whole models as GGUF files for llama.cpp and Ollama, with the package `gguf`.

In Llama and similar families, llama.cpp's rotary embedding rotates pairs of neighbouring rows.
transformers pairs a row of the first half with a row of the second half. The rows of query and key
weights are therefore reordered. transformers adds 1 to the weights of Gemma's norms in the layer; a
GGUF file stores the weights with this 1 already added.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from ..errors import UsageError
from ..model.gguf import read_architecture
from ..model.gguf_header import read_header
from ..model.load import explain_loading_errors
from ..model.pre_tokenizers import match_splitting
from ..model.served import GGUF_FAMILIES, gguf_type
from .adapter_file import read_base_name, read_pairs
from .ollama import adds_bos

# the number of a type in `general.file_type`
TYPES = {"F16": 1, "BF16": 32, "Q8_0": 7, "Q5_0": 8, "Q4_0": 2}
BASE_TYPE = "base"  # the value of --type for the types of a base that was published as a GGUF file
# key in the file's metadata: the dtype in which the adapter was merged
MERGE_DTYPE_KEY = "isotype.merge_dtype"
_FP16_MAX = 65504.0  # the largest fp16


@dataclass(frozen=True)
class Family:
    """The name of a model family in llama.cpp, and how llama.cpp stores its weights.

    architecture  the name of gguf's MODEL_ARCH
    permutes_rows  whether llama.cpp expects the rows of the query and key weights in neighbouring
                   pairs
    norm_offset   value that is added to the weights of norms
    """

    architecture: str
    permutes_rows: bool = False
    norm_offset: float = 0.0


# the model's `model_type` -> how it is written to a GGUF file
FAMILIES = {
    "llama": Family("LLAMA", permutes_rows=True),
    "mistral": Family("LLAMA", permutes_rows=True),
    "qwen2": Family("QWEN2"),
    "qwen3": Family("QWEN3"),
    "gemma2": Family("GEMMA2", norm_offset=1.0),
    "gemma3_text": Family("GEMMA3", norm_offset=1.0),
    "phi3": Family("PHI3"),
    # adapters alone; the families above are GGUF_FAMILIES, of which whole models are written
    "mixtral": Family("LLAMA", permutes_rows=True),
    "qwen2_moe": Family("QWEN2MOE"),
    "qwen3_moe": Family("QWEN3MOE"),
    "gemma": Family("GEMMA"),
    "gemma3": Family("GEMMA3"),
    "granite": Family("GRANITE", permutes_rows=True),
    "olmo": Family("OLMO", permutes_rows=True),
    "olmo2": Family("OLMO2"),
    "olmo3": Family("OLMO2"),
    "smollm3": Family("SMOLLM3", permutes_rows=True),
    "starcoder2": Family("STARCODER2"),
    "seed_oss": Family("SEED_OSS"),
}


def llama_cpp(model: Path | str, kind: str) -> str:
    """Returns the commands of llama.cpp that write types and models that this module does not
    write.
    """
    convert = f"python llama.cpp/convert_hf_to_gguf.py {model} --outfile"
    if kind in ("F16", "BF16", "Q8_0"):
        return f"{convert} {kind}.gguf --outtype {kind.lower()}"
    return (
        f"{convert} whole.gguf --outtype auto && llama.cpp/build/bin/llama-quantize whole.gguf"
        f" {kind}.gguf {kind}"
    )


def export_adapter(adapter: Path, out: Path) -> int:
    """Writes a LoRA adapter, and returns the number of its layers. Matrices stay fp32.

    llama.cpp multiplies the product of a layer's matrices by `alpha / rank of the layer`. So the
    alpha that a layer needs is its scale times its rank, for example alpha * sqrt(r) for rsLoRA.
    The file has only one alpha. If a layer needs another alpha, its B is multiplied by the alpha
    that it needs and divided by the alpha of the file.

    Raises  UsageError for a family or layer whose name in llama.cpp is not known, and for an
            adapter that contains more than pairs of LoRA matrices
    """
    import gguf

    pairs = read_pairs(adapter, "llama.cpp")
    base = read_base_name(adapter)
    config = read_base_architecture(base)
    family = FAMILIES.get(config.model_type)
    if family is None:
        command = (
            f"python llama.cpp/convert_lora_to_gguf.py {adapter} --base {base} --outfile {out}"
        )
        raise UsageError(
            f"{config.model_type}: how llama.cpp names this family's tensors is not known here",
            fix=command,
        )
    text_config = config.get_text_config()
    architecture = getattr(gguf.MODEL_ARCH, family.architecture)
    names = gguf.get_tensor_name_map(architecture, text_config.num_hidden_layers)
    alpha = pairs[0].scale * pairs[0].rank

    matrices = []
    for pair in pairs:
        gguf_name = names.get_name(pair.module.replace(".language_model.", "."))
        if gguf_name is None:
            raise UsageError(
                f"{adapter}: llama.cpp has no name for {pair.module}",
                fix="isotype merge writes a whole model",
            )
        b = _reorder_rows(pair.rescaled_b(alpha / pair.rank), pair.module, text_config, family)
        matrices += [
            _whole_tensor(f"{gguf_name}.weight.lora_a", pair.a),
            _whole_tensor(f"{gguf_name}.weight.lora_b", b),
        ]

    header = [
        ("add_type", "adapter"),
        ("add_string", "adapter.type", "lora"),
        ("add_float32", "adapter.lora.alpha", alpha),
    ]
    _write_file(out, gguf.MODEL_ARCH_NAMES[architecture], header, matrices)
    return len(pairs)


def read_base_architecture(base: str) -> PreTrainedConfig:
    """Reads the configuration of an adapter's base. Raises UsageError if it is not on this machine
    and the hub does not have it.
    """
    with explain_loading_errors(base, "base", None):
        return read_architecture(base)


def export_model(
    folder: Path,
    out: Path,
    kind: str,
    weights: Mapping[str, WeightToWrite] | None = None,
    base: Path | None = None,
) -> int:
    """Writes a model as one file, with tokenizer and template. Returns the number of tensors.

    folder   a Hugging Face folder with the configuration, the tokenizer and the weights
    kind     the type of matrices, one of TYPES, or BASE_TYPE. Vectors stay fp32. `gguf_type`
             lists the matrices that get a wider type
    weights  the weights by their names in transformers; None means those of `folder`
    base     the GGUF file whose types BASE_TYPE takes. Weights that are not in `weights` are copied
             from this file
    Raises   UsageError for an unknown family or tokenizer, for F16 if weights are outside the range
             of fp16, and for a type of `base` that cannot be written
    """
    import gguf

    config = AutoConfig.from_pretrained(folder)
    refuse_model(config, llama_cpp(folder, kind))
    family = FAMILIES[config.model_type]
    architecture = getattr(gguf.MODEL_ARCH, family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    factors = rope_factors(config)
    tensors = []
    if factors is not None:
        tensors.append(_whole_tensor("rope_freqs.weight", factors))
    merge_dtype = None if weights is None else "fp32"
    if weights is None:
        weights = _read_folder(folder)
    base_tensors = {} if base is None else _base_tensors(base)
    has_head = "lm_head.weight" in weights and not config.tie_word_embeddings
    for name, weight in weights.items():
        if name == "lm_head.weight" and not has_head:
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise UsageError(
                f"{folder}: llama.cpp has no name for {name}", fix=llama_cpp(folder, kind)
            )
        base_tensor = base_tensors.pop(gguf_name, None)
        if base_tensor is not None and not weight.is_changed:
            tensors.append(base_tensor)
            continue
        if base_tensor is not None:
            _refuse_unwritable(base_tensor)
            type_name = base_tensor.kind
        else:
            is_head = name == ("lm_head.weight" if has_head else "model.embed_tokens.weight")
            plain_kind = "Q8_0" if kind == BASE_TYPE else kind
            type_name = gguf_type(plain_kind, weight.shape, is_head=is_head)
        norm_offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        order = partial(
            _reorder_rows,
            module=name.rpartition(".")[0],
            config=config,
            family=family,
            norm_offset=norm_offset,
        )
        tensors.append(_StoredTensor(gguf_name, weight.shape, weight.read, type_name, order))

    header: list[tuple[Any, ...]] = [
        *header_keys(config),
        *tokenizer_keys(folder, config.vocab_size, llama_cpp(folder, kind)),
    ]
    if kind in TYPES:
        header.append(("add_file_type", TYPES[kind]))
    if merge_dtype is not None:
        header.append(("add_string", MERGE_DTYPE_KEY, merge_dtype))
    _write_file(out, gguf.MODEL_ARCH_NAMES[architecture], header, tensors)
    return len(tensors)


@dataclass(frozen=True)
class WeightToWrite:
    """A weight of a model in transformers' form.

    read        a function that returns the values of the weight
    is_changed  whether training could change the weight
    """

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    is_changed: bool = True


def _read_folder(folder: Path) -> dict[str, WeightToWrite]:
    """Returns the weights in the safetensors files of a folder."""
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118  # not a mapping
            part = file.get_slice(name)
            weights[name] = WeightToWrite(tuple(part.get_shape()), partial(_read_slice, part))
    return weights


def _read_slice(part: Any) -> Tensor:
    value: Tensor = part[:]
    return value


def _base_tensors(file: Path) -> dict[str, _StoredTensor]:
    """Returns the tensors of a GGUF file, whose blocks are copied unchanged."""
    tensors = {}
    content = np.memmap(file, mode="r")
    for name, entry in read_header(file).tensors.items():
        blocks = content[entry.offset : entry.offset + entry.size]
        tensors[name] = _StoredTensor(name, entry.shape, _no_values, entry.kind, blocks=blocks)
    return tensors


def _no_values() -> Tensor:
    raise AssertionError("the blocks of this tensor are copied")


def _refuse_unwritable(tensor: _StoredTensor) -> None:
    """Raises UsageError for a type that the package gguf cannot quantise to."""
    if tensor.kind in (*TYPES, "F32", "Q4_1", "Q5_1"):
        return
    raise UsageError(
        f"{tensor.name} is {tensor.kind} in the base: an adapter changed it, and the package gguf has"
        f" no quantiser for {tensor.kind}",
        fix="--type Q8_0, Q5_0 or Q4_0, or --type BF16 and then llama-quantize",
    )


def refuse_model(config: PreTrainedConfig, command: str) -> None:
    """Raises UsageError for a model that this module cannot write. `command` is the command of
    llama.cpp that may convert the model.
    """
    family = FAMILIES.get(config.model_type)
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        rope_settings = [rope]
    else:
        rope_settings = [settings for settings in rope.values() if isinstance(settings, dict)]
    scaled = [
        settings["rope_type"]
        for settings in rope_settings
        if settings.get("rope_type", "default") != "default"
    ]
    local_theta, full_attention_interval = {"gemma2": (None, 2), "gemma3_text": (1e4, 6)}.get(
        config.model_type, (None, 0)
    )
    types = getattr(config, "layer_types", None) or []
    is_unusual = full_attention_interval and (
        any(
            (kind == "full_attention")
            != (i % full_attention_interval == full_attention_interval - 1)
            for i, kind in enumerate(types)
        )
        or getattr(config, "query_pre_attn_scalar", None) != config.head_dim
        or (local_theta and rope["sliding_attention"]["rope_theta"] != local_theta)
    )
    blocker = ""
    if family is None or config.model_type not in GGUF_FAMILIES:
        blocker = f": whole models are written of {', '.join(GGUF_FAMILIES)}"
    elif scaled and not (scaled == ["llama3"] and family.architecture == "LLAMA"):
        blocker = f" with rope_type {scaled[0]}: not written here"
    elif is_unusual:
        blocker = " with another order of layers, scale or rotary base than released models"
    elif getattr(config, "sliding_window", None) and config.model_type in (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
    ):
        blocker = " with a sliding window: llama.cpp attends to everything in this family"
    if blocker:
        raise UsageError(f"{config.model_type}{blocker}", fix=command)


def header_keys(config: PreTrainedConfig) -> list[tuple[str, Any]]:
    """Returns the sizes and settings of a model as pairs. The first value of a pair is the name of
    a method of gguf's writer, and the second value is the argument for this method.
    """
    model_config: Any = config
    head_size = (
        getattr(model_config, "head_dim", None)
        or model_config.hidden_size // model_config.num_attention_heads
    )
    keys = {
        "context_length": model_config.max_position_embeddings,
        "embedding_length": model_config.hidden_size,
        "block_count": model_config.num_hidden_layers,
        "feed_forward_length": model_config.intermediate_size,
        "head_count": model_config.num_attention_heads,
        "head_count_kv": model_config.num_key_value_heads,
        "key_length": head_size,
        "value_length": head_size,
        "rope_dimension_count": int(
            head_size * (model_config.rope_parameters.get("partial_rotary_factor") or 1)
        ),
        # Gemma 3 has a rotary base for each kind of layer; llama.cpp has the local one, 10,000, as
        # a constant
        "rope_freq_base": model_config.rope_parameters.get(
            "full_attention", model_config.rope_parameters
        )["rope_theta"],
        "layer_norm_rms_eps": model_config.rms_norm_eps,
        "vocab_size": model_config.vocab_size,
        "rope_scaling_orig_ctx_len": (
            model_config.original_max_position_embeddings
            if model_config.model_type == "phi3"
            else None
        ),
        "sliding_window": (
            model_config.sliding_window or 0
            if model_config.model_type in ("gemma2", "gemma3_text", "phi3")
            else None
        ),
        "expert_count": (
            getattr(model_config, "num_experts", None)
            or getattr(model_config, "num_local_experts", None)
        ),
        "expert_used_count": getattr(model_config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(model_config, "moe_intermediate_size", None),
        "attn_logit_softcapping": getattr(model_config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(model_config, "final_logit_softcapping", None),
    }
    return [(f"add_{name}", value) for name, value in keys.items() if value is not None]


def rope_factors(config: PreTrainedConfig) -> Tensor | None:
    """Returns the factors by which llama.cpp divides the rotary frequencies for Llama 3's scaling.
    Each factor is the frequency without this scaling, divided by the frequency with this scaling.
    Both are computed with transformers.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = 2 * scaled.shape[0]
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    factors: Tensor = plain / scaled
    return factors


def _reorder_rows(
    tensor: Tensor, module: str, config: Any, family: Family, norm_offset: float = 0.0
) -> Tensor:
    """Reorders the rows of query and key weights if llama.cpp expects another order for the family.
    In transformers, one row of a pair is in the first half of a head's rows, and the other row is
    in the second half. Afterwards, the two rows are neighbours. Biases and LoRA's B are reordered
    like weights.

    norm_offset  a number that is added to the tensor if the tensor is the weight of a norm
    """
    if norm_offset:
        return tensor + norm_offset
    heads = paired_heads(module, config, family)
    if heads is None:
        return tensor
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        .transpose(1, 2)
        .reshape(tensor.shape)
    )


def paired_heads(module: str, config: Any, family: Family) -> int | None:
    """Returns the number of attention heads if llama.cpp stores the rows of this module in
    neighbouring pairs; None if the rows stay in order.
    """
    if not family.permutes_rows:
        return None
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(module.rpartition(".")[2])


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor of the output file. Its values are read when they are written, so that the model
    need not fit into memory.

    read    a function that returns the values in the order of transformers
    order   a function that converts the fp32 values to the order of llama.cpp
    blocks  the bytes of a tensor that is copied from another GGUF file
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    kind: str = "F32"
    order: Callable[[Tensor], Tensor] = lambda value: value
    blocks: np.ndarray[Any, Any] | None = None

    def content(self, out: Path) -> np.ndarray[Any, Any]:
        """Returns the bytes of this tensor in ggml's format. Raises UsageError if a value is too
        large for F16.
        """
        import gguf

        if self.blocks is not None:
            return self.blocks
        value = self.order(self.read().float().cpu())
        if self.kind == "F16" and float(value.abs().max()) > _FP16_MAX:
            raise UsageError(
                f"{out}: {self.name} has values beyond fp16's {_FP16_MAX:.0f}",
                fix="--type BF16 keeps them",
            )
        return gguf.quants.quantize(
            value.contiguous().numpy(), gguf.GGMLQuantizationType[self.kind]
        )


def _whole_tensor(name: str, value: Tensor) -> _StoredTensor:
    return _StoredTensor(name, tuple(value.shape), lambda: value)


def _write_file(
    out: Path,
    architecture: str,
    header: Sequence[tuple[Any, ...]],
    tensors: Sequence[_StoredTensor],
) -> None:
    """Writes the file completely or not at all. `header` contains the names of methods of gguf's
    writer, each with its arguments.
    """
    import gguf

    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".gguf-") as temporary:
            file = Path(temporary) / out.name
            writer = gguf.GGUFWriter(str(file), architecture)
            for method, *arguments in header:
                getattr(writer, method)(*arguments)
            for tensor in tensors:
                raw = gguf.GGMLQuantizationType[tensor.kind]
                block, size = gguf.GGML_QUANT_SIZES[raw]
                writer.add_tensor_info(
                    tensor.name,
                    tensor.shape,
                    np.dtype(np.float32),
                    math.prod(tensor.shape) // block * size,
                    raw_dtype=raw,
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                writer.write_tensor_data(tensor.content(out))
            writer.close()
            file.replace(out)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}") from None


# --- the tokenizer. Before it merges tokens, llama.cpp splits a text with its own code, which is
# chosen by a name (`tokenizer.ggml.pre`). `model.pre_tokenizers` finds the name under which it splits
# as the tokenizer does. A tokenizer that splits otherwise is refused

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def tokenizer_keys(folder: Path | str, vocabulary: int, command: str) -> list[tuple[str, Any]]:
    """Returns the parts of a tokenizer as pairs: its tokens, its merges or scores, its special
    tokens and its chat template. The first value of a pair is the name of a method of gguf's
    writer, and the second value is the argument for this method.

    vocabulary  number of rows of the model's embedding; ids without a token get an unused token
    command     the llama.cpp command that the error message suggests, because llama.cpp supports
                more tokenizers
    Raises      UsageError for a tokenizer that would give other tokens in llama.cpp
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if getattr(tokenizer, "is_fast", False):
        content = json.loads(tokenizer.backend_tokenizer.to_str())
    else:
        content = {}
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise UsageError(
            f"{folder}: a tokenizer of kind {model.get('type') or type(tokenizer).__name__}: not"
            " written here",
            fix=command,
        )
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    tokens = {index: token for token, index in model["vocab"].items()} | {
        index: token["content"] for index, token in added.items()
    }
    if max(tokens) >= vocabulary:
        raise UsageError(
            f"{folder}: the tokenizer has {max(tokens) + 1} tokens, the model {vocabulary} rows"
        )
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in model["merges"]
    ]
    is_sentencepiece = bool(model.get("byte_fallback"))
    split_name = "default" if is_sentencepiece else _split_name(folder, tokenizer, command)
    padded_tokens = [tokens.get(index, f"[PAD{index}]") for index in range(vocabulary)]
    keys: list[tuple[str, Any]] = [
        ("add_tokenizer_model", "llama" if is_sentencepiece else "gpt2"),
        ("add_tokenizer_pre", split_name),
        ("add_token_list", padded_tokens),
        (
            "add_token_types",
            [
                _token_type(i, tokens.get(i), added, is_sentencepiece, model.get("unk_token"))
                for i in range(vocabulary)
            ],
        ),
        ("add_add_bos_token", adds_bos(tokenizer)),
        ("add_add_eos_token", False),
    ]
    if is_sentencepiece:
        # llama.cpp merges the pair whose result has the highest score, so scores follow the order
        # of the merges
        ranks: dict[str, int] = {}
        for rank, (first, second) in enumerate(merges):
            ranks.setdefault(first + second, rank)
        keys.append(
            ("add_token_scores", [-float(ranks.get(token, len(merges))) for token in padded_tokens])
        )
        keys.append(("add_add_space_prefix", _begins_with_space(content)))
    else:
        keys.append(("add_token_merges", [" ".join(merge) for merge in merges]))
    if isinstance(tokenizer.chat_template, str):
        keys.append(("add_chat_template", tokenizer.chat_template))
    special = {
        name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")
    }
    return [
        *keys,
        *((f"add_{name}_token_id", index) for name, index in special.items() if index is not None),
    ]


def _token_type(
    index: int,
    token: str | None,
    added: dict[int, Any],
    is_sentencepiece: bool,
    unknown: str | None,
) -> int:
    if token is None:
        return _UNUSED
    if is_sentencepiece and len(token) == 6 and token.startswith("<0x"):
        return _BYTE
    if token == unknown:
        return _UNKNOWN
    if index in added:
        return _CONTROL if added[index]["special"] else _USER_DEFINED
    return _NORMAL


def _component_steps(component: dict[str, Any] | None, list_key: str) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer; a Sequence has several."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return list(component[list_key])
    return [component]


def _split_name(folder: Path | str, tokenizer: Any, command: str) -> str:
    splitting = match_splitting(tokenizer.backend_tokenizer)
    if splitting is None:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        steps = _component_steps(content.get("pre_tokenizer"), "pretokenizers")
        names = ", ".join(step["type"] for step in steps) or "no pre-tokenizer"
        raise UsageError(
            f"{folder}: llama.cpp splits no text as this tokenizer does ({names})", fix=command
        )
    return splitting.names[0]


def _begins_with_space(content: dict[str, Any]) -> bool:
    steps = [
        *_component_steps(content.get("normalizer"), "normalizers"),
        *_component_steps(content.get("pre_tokenizer"), "pretokenizers"),
    ]
    return any(
        step["type"] == "Prepend"
        or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
