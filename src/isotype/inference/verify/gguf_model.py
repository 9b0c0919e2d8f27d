"""Reads the tensors of a GGUF file and gives them the names of the run's weights. Values are
dequantised, and rows and norms are converted back to the form that transformers uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import UsageError
from ...model.gguf import PLAIN_DTYPES, restore_rows
from ...model.gguf_header import Header, TensorEntry, read_header
from ...ops.packed.ggml import BLOCKS, decode_blocks
from ..adapter_file import LoraPair
from ..gguf_file import FAMILIES, Family, paired_heads
from .written_model import WrittenModel, WrittenTensor, adapter_model

# tensors that are settings: factors of the rotary embedding
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_EXPERTS = ".experts."  # stacked weights of a mixture's experts
_LORA_A = ".lora_a"
_LORA_B = ".lora_b"
_PART_BYTES = 1 << 19  # bytes of a tensor that are read and decoded at once


def read_gguf_header(path: Path) -> Header:
    """Reads the header of a GGUF file, including its long lists. Raises UsageError for a damaged
    file.
    """
    try:
        header = read_header(path, with_lists=True)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{path}: no whole GGUF file: {error}", fix="export it again with --out another file"
        ) from None
    kinds = {entry.kind for entry in header.tensors.values()} - {*BLOCKS, *PLAIN_DTYPES}
    if kinds:
        raise UsageError(
            f"{path}: tensors of type {', '.join(sorted(kinds))} are not read",
            fix=f"one of {', '.join([*PLAIN_DTYPES, *BLOCKS])}",
        )
    return header


def open_gguf(
    path: Path, config: Any, names: Iterable[str], read_base: Callable[[str], Tensor]
) -> WrittenModel:
    """Opens a GGUF file of a whole model or of an adapter.

    config     the configuration of the run's model
    names      the names of the run's weights
    read_base  returns a weight of the run's base, to which an adapter is added
    Raises     UsageError for a damaged file, and for a model of another architecture
    """
    import gguf

    header = read_gguf_header(path)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UsageError(
            f"{config.model_type}: how llama.cpp names this family's tensors is not known here",
            fix="isotype merge RUN --verify compares a folder",
        )
    architecture = getattr(gguf.MODEL_ARCH, family.architecture)
    expected = gguf.MODEL_ARCH_NAMES[architecture]
    stored = header.fields.get("general.architecture")
    if stored != expected:
        raise UsageError(
            f"{path}: a file of the architecture {stored}; the run's model is {expected}"
        )
    text_config = config.get_text_config()
    name_map = gguf.get_tensor_name_map(architecture, text_config.num_hidden_layers)
    gguf_names = {}
    stacked_names = {}
    for name in names:
        plain_name = name.replace(".language_model.", ".")
        gguf_name = name_map.get_name(plain_name, try_suffixes=(".weight", ".bias"))
        if _EXPERTS in plain_name:
            stacked_names[name] = _stacked_names(plain_name, name_map, header)
        elif gguf_name is not None:
            gguf_names[name] = gguf_name
    if header.fields.get("general.type") == "adapter":
        return _open_adapter(header, path, family, text_config, gguf_names, read_base)
    tensors = {}
    for name, gguf_name in gguf_names.items():
        entry = header.tensors.get(gguf_name)
        if entry is not None:
            read = partial(_read_weight, path, entry, name, family, text_config)
            tensors[name] = WrittenTensor(gguf_name, entry.kind, entry.shape, read)
    for name, parts in stacked_names.items():
        entries = [header.tensors[part] for part in parts if part in header.tensors]
        if entries and len(entries) == len(parts):
            tensors[name] = _stacked_tensor(path, parts, entries)
    stored_names = {
        *gguf_names.values(),
        *(part for parts in stacked_names.values() for part in parts),
    }
    unexpected = set(header.tensors) - stored_names - {*ROPE_TENSORS, "output.weight"}
    rope_entry = header.tensors.get(ROPE_TENSORS[0])
    return WrittenModel(
        f"GGUF, {_file_type(header)}",
        tensors,
        unexpected=sorted(unexpected),
        fields=header.fields,
        rope_factors=None if rope_entry is None else read_tensor_values(path, rope_entry),
    )


def _stacked_names(name: str, name_map: Any, header: Header) -> tuple[str, ...]:
    """Returns the names of the tensors that hold a stacked weight of experts. llama.cpp stores the
    gate projection and the up projection in two tensors; in newer files they may be in one tensor.
    """
    prefix, _, part = name.rpartition(_EXPERTS)
    if part != "gate_up_proj":
        return (f"{name_map.get_name(name)}.weight",)
    gate = f"{name_map.get_name(f'{prefix}{_EXPERTS}gate_proj')}.weight"
    fused = gate.replace("ffn_gate_exps", "ffn_gate_up_exps")
    if fused in header.tensors:
        return (fused,)
    return gate, gate.replace("ffn_gate_exps", "ffn_up_exps")


def _stacked_tensor(
    path: Path, names: Sequence[str], entries: Sequence[TensorEntry]
) -> WrittenTensor:
    """Returns the tensor of a stacked weight with the dimensions [experts, rows of all parts,
    columns].
    """
    first = entries[0].shape
    outer_shapes = {(entry.shape[:1], entry.shape[2:]) for entry in entries}
    shape = first
    if len(first) == 3 and len(outer_shapes) == 1:
        shape = (first[0], sum(entry.shape[1] for entry in entries), first[2])
    coarsest = min(entries, key=lambda entry: entry.size)
    read = partial(_read_stacked, path, entries)
    return WrittenTensor(" and ".join(names), coarsest.kind, shape, read)


def _read_stacked(path: Path, entries: Sequence[TensorEntry]) -> Tensor:
    return torch.cat([read_tensor_values(path, entry) for entry in entries], dim=1)


def _file_type(header: Header) -> str:
    """Returns the type of the whole file, such as Q4_K_M, which its setting `general.file_type`
    gives. A Q4_K_M file also has tensors of other types. Returns the type of most bytes for a file
    without this setting.
    """
    import gguf

    number = header.fields.get("general.file_type")
    known = {kind.value: kind.name for kind in gguf.LlamaFileType}
    name = known.get(number) if isinstance(number, int) else None
    if name is None:
        return _main_kind(header)
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _main_kind(header: Header) -> str:
    """Returns the type that holds most of the file's bytes."""
    sizes: dict[str, int] = {}
    for entry in header.tensors.values():
        sizes[entry.kind] = sizes.get(entry.kind, 0) + entry.size
    return max(sizes, key=lambda kind: sizes[kind], default="no tensors")


def _open_adapter(
    header: Header,
    path: Path,
    family: Family,
    config: Any,
    gguf_names: Mapping[str, str],
    read_base: Callable[[str], Tensor],
) -> WrittenModel:
    """Opens an adapter with the scale that llama.cpp uses, which is alpha divided by the rank of
    the layer.
    """
    alpha = float(header.fields.get("adapter.lora.alpha", 0.0))
    pairs = {}
    used = set()
    for name, gguf_name in gguf_names.items():
        a_name = gguf_name + _LORA_A
        b_name = gguf_name + _LORA_B
        if a_name not in header.tensors or b_name not in header.tensors:
            continue
        a = read_tensor_values(path, header.tensors[a_name])
        b = read_tensor_values(path, header.tensors[b_name])
        b = _restore_rows(b, name, config, family)
        pairs[name] = LoraPair(gguf_name, a, b, alpha / a.shape[0])
        used |= {a_name, b_name}
    return adapter_model(
        "GGUF, adapter alone",
        pairs,
        read_base,
        unexpected=sorted(set(header.tensors) - used),
        fields=header.fields,
    )


def read_tensor_values(path: Path, entry: TensorEntry) -> Tensor:
    """Returns the fp32 values of a tensor of a GGUF file. The file is read in parts and not mapped
    into memory, so that only the values stay in memory.
    """
    values = torch.empty(math.prod(entry.shape[:-1]), entry.shape[-1])
    with path.open("rb") as file:
        file.seek(entry.offset)
        for part in values.split(max(1, _PART_BYTES // max(1, entry.row_bytes))):
            raw = np.fromfile(file, np.uint8, len(part) * entry.row_bytes)
            part.copy_(_decode_rows(entry.kind, torch.from_numpy(raw).view(len(part), -1)))
    return values.view(entry.shape)


def _decode_rows(kind: str, rows: Tensor) -> Tensor:
    """Decodes rows of a tensor.

    rows  uint8[rows bytes]
    """
    if kind in BLOCKS:
        return decode_blocks(kind, rows, torch.float32)
    return rows.view(PLAIN_DTYPES[kind])


def _read_weight(path: Path, entry: TensorEntry, name: str, family: Family, config: Any) -> Tensor:
    value = read_tensor_values(path, entry)
    if family.norm_offset and name.endswith("norm.weight"):
        return value - family.norm_offset
    return _restore_rows(value, name, config, family)


def _restore_rows(value: Tensor, name: str, config: Any, family: Family) -> Tensor:
    """Reorders the rows of query and key weights into the order that transformers uses. A tensor of
    another shape is left as it is, and reported later.
    """
    heads = paired_heads(name.rpartition(".")[0], config, family)
    if heads is None or value.shape[0] % (2 * heads):
        return value
    return restore_rows(value, heads)
