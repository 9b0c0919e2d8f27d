"""Represents a written model by its tensors. Each tensor has the name of the run's weight, and a
function that reads its values.

A folder of safetensors is read here; `gguf_model` reads GGUF files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...dtypes import format_dtype
from ...errors import UsageError
from ...model.architecture import auto_class
from ...model.packed import group_packed_tensors, plain_config, slice_header
from ...ops.packed.formats import Layout
from ...ops.packed.recognise import build_state, recognise_layout
from ...precision.quantised_base import Quantisation, quantisation_from_config
from ..adapter_file import LoraPair, read_pairs

_KINDS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_KINDS_BY_SAFETENSORS = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F32"}


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor of a file.

    name   its name in the file
    kind   F32, F16, BF16, Q8_0, ...
    shape  the shape of its values, in the order of the run's weight
    read   returns the values, fp32, in the order of the run's weight
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass
class WrittenModel:
    """A file or folder that holds a model.

    description   its format, for the report
    tensors       the tensors, by the names of the run's weights
    unexpected    names of tensors that the run's model does not have
    merge_dtype   the dtype to which the merged weights were rounded before this file was written
    adapter_only  whether it holds only an adapter, which is added to the run's base
    fields        the settings in the header of a GGUF file
    rope_factors  the tensor of a GGUF file by which rotary frequencies are divided
    folder        the folder of configuration and tokenizer files; None for a GGUF file
    config        the configuration in that folder
    """

    description: str
    tensors: Mapping[str, WrittenTensor]
    unexpected: list[str] = field(default_factory=list)
    merge_dtype: str = "fp32"
    adapter_only: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    rope_factors: Tensor | None = None
    folder: Path | None = None
    config: Any = None

    def read(self, name: str) -> Tensor:
        """Returns the values of a weight of the run."""
        return self.tensors[name].read()


def open_folder(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], *, text_only: bool
) -> WrittenModel:
    """Opens a Hugging Face folder. Quantised weights are dequantised when they are read. Raises
    UsageError for a damaged file.

    shapes     the shapes of the run's weights by their names
    text_only  whether the run trained the text-only class of its family
    """
    stored: dict[str, WrittenTensor] = {}
    parts: dict[str, Any] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder}: no .safetensors file there")
    for path in files:
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"{path}: no whole safetensors file: {error}", fix="write the model again"
            ) from None
        for name in file.keys():  # noqa: SIM118  # not a mapping
            part = file.get_slice(name)
            kind = _KINDS_BY_SAFETENSORS.get(part.get_dtype(), part.get_dtype())
            stored[name] = WrittenTensor(name, kind, tuple(part.get_shape()), partial(_read, part))
            parts[name] = part
    config = _read_config(folder)
    quantisation = quantisation_from_config(config)
    description = _read_dtype(folder)
    if quantisation is not None:
        description = quantisation.weight_format
        stored = _replace_packed(folder, stored, parts, shapes, quantisation)
        config = plain_config(config)
    names = list(shapes)
    if not set(names) <= set(stored):
        stored = _load_converted(folder, config, stored, text_only=text_only)
    if not set(names) & set(stored):
        raise UsageError(f"{folder}: a model of another architecture: it has no tensor of this run")
    return WrittenModel(
        f"folder, {description}",
        {name: stored[name] for name in names if name in stored},
        unexpected=sorted(set(stored) - set(names) - {"lm_head.weight"}),
        merge_dtype=_read_dtype(folder),
        folder=folder,
        config=config,
    )


def _replace_packed(
    folder: Path,
    stored: Mapping[str, WrittenTensor],
    parts: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    quantisation: Quantisation,
) -> dict[str, WrittenTensor]:
    """Returns the tensors of a quantised model. A quantised weight takes the place of the tensors
    that store it.

    parts  the slices of the files by the names of the tensors
    """
    packing = quantisation.packing
    if packing is None:
        reason = quantisation.unread_reason or f"is {quantisation.weight_format}"
        raise UsageError(f"{folder}: {reason}", fix="a folder of compressed-tensors")
    tensors = dict(stored)
    headers = {name: slice_header(part) for name, part in parts.items()}
    for owner, owner_headers in group_packed_tensors(headers).items():
        name = f"{owner}.weight"
        if name not in shapes:
            continue
        for part_name in owner_headers:
            tensors.pop(f"{owner}.{part_name}", None)
        layout = recognise_layout(owner, owner_headers, packing, shapes[name][:2])  # type: ignore[arg-type]  # a matrix
        owner_parts = {part_name: parts[f"{owner}.{part_name}"] for part_name in owner_headers}
        read = partial(_read_packed, owner, owner_parts, layout, packing.dtype_name)
        tensors[name] = WrittenTensor(name, packing.dtype_name, shapes[name], read)
    return tensors


def _read_packed(owner: str, parts: Mapping[str, Any], layout: Layout, dtype_name: str) -> Tensor:
    tensors = {name: part[:] for name, part in parts.items()}
    state = build_state(owner, layout, dtype_name, tensors)
    packed = tensors[layout.packed_tensor[0]].contiguous().view(torch.uint8)
    return state.dequantise(packed, torch.float32)


def _read(part: Any) -> Tensor:
    value: Tensor = part[:]
    return value.float()


def _read_dtype(folder: Path) -> str:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return format_dtype(str(config.get("dtype") or config.get("torch_dtype") or "fp32"))
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder / 'config.json'}: {error}") from None


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: {error}") from None


def _load_converted(
    folder: Path, config: Any, stored: Mapping[str, WrittenTensor], *, text_only: bool
) -> dict[str, WrittenTensor]:
    """Returns the tensors under the names that transformers gives them when it loads the folder.
    Families with stacked experts store one tensor per expert. A tensor that the file lacks is left
    out.
    """
    model, report = auto_class(config, text_only=text_only).from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    absent = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    persistent = model.state_dict(keep_vars=True)
    converted = {
        name: WrittenTensor(
            name,
            _KINDS.get(format_dtype(tensor.dtype), "F32"),
            tuple(tensor.shape),
            partial(_widen, tensor),
        )
        for name, tensor in tensors.items()
        if name in persistent and name not in absent
    }
    unexpected = [stored[name] for name in report["unexpected_keys"] if name in stored]
    return converted | {tensor.name: tensor for tensor in unexpected}


def _widen(tensor: Tensor) -> Tensor:
    return tensor.detach().float()


def open_adapter_folder(folder: Path, read_base: Callable[[str], Tensor]) -> WrittenModel:
    """Opens the folder of a PEFT adapter, such as the folder that `export --to vllm` writes. Raises
    UsageError."""
    pairs = {f"{pair.module}.weight": pair for pair in read_pairs(folder, "isotype verify")}
    return adapter_model("adapter, PEFT", pairs, read_base)


def adapter_model(
    description: str,
    pairs: Mapping[str, LoraPair],
    read_base: Callable[[str], Tensor],
    *,
    unexpected: list[str] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> WrittenModel:
    """Returns an adapter as a model, which has the weights of the run's base plus the changes by
    the adapter.
    """
    tensors = {}
    for name, pair in pairs.items():
        kind = _KINDS.get(format_dtype(pair.b.dtype), "F32")
        read = partial(_add_pair, pair, name, read_base)
        tensors[name] = WrittenTensor(pair.module, kind, pair.shape, read)
    return WrittenModel(
        description,
        tensors,
        unexpected=unexpected or [],
        adapter_only=True,
        fields=fields or {},
    )


def _add_pair(pair: LoraPair, name: str, read_base: Callable[[str], Tensor]) -> Tensor:
    base = read_base(name)
    return base + pair.change().to(base.device)
