"""Finds out how transformers would load a folder: the class, the dtype, the weights that are
missing, and the tensors that the class does not use. The model is built on the meta device, so that
no weight is read.

Weights that were saved quantised are recognised by the reader that trains on them (`ops.packed`),
because the quantisers of transformers need a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from ...data.render import render_text
from ...dtypes import format_dtype, to_torch
from ...errors import UsageError
from ...model.architecture import auto_class
from ...model.packed import group_packed_tensors, plain_config
from ...model.value_ranges import check_model_config
from ...ops.packed.recognise import (
    FP8,
    PACKED_TENSOR_NAMES,
    SERVING_TENSORS,
    TensorHeader,
    recognise_layout,
)
from ...precision.packing import Packing
from ...precision.quantised_base import Quantisation, quantisation_from_config_file
from ...training.console import quiet_libraries, silence_library_warnings
from ...wording import first_line
from .checkpoint import CONFIG_FILE, Checkpoint, StoredTensor

# bitsandbytes stores the parts of a 4-bit weight under the name of the weight; gpt-oss stores the
# blocks and scales of stacked experts under the name of their parameter
_NF4_PARTS = re.compile(r"^(?P<owner>.+)\.weight\.(?P<part>absmax|quant_map|nested_\w+|quant_state\.\w+)$")  # fmt: skip
_STACK_PARTS = re.compile(r"^(?P<owner>.+\.experts\.\w+_proj)_(?P<part>blocks|scales)$")
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.\w+$")
# names of tensors with packed numbers, which need scales
_CODE_NAMES = ("weight_packed", "qweight", "_weight_qdata", "blocks")
# tensors that bitsandbytes needs beside a packed weight
_NF4_REQUIRED = ("absmax", "quant_map", "quant_state")
_SENTINEL = "\U000f0f0e\U000f0f0f"  # characters that no chat template contains
# a conversation that is rendered to find the token that ends an answer
_PROBE = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": _SENTINEL})


@dataclass
class Scales:
    """Lists the quantised weights of a model, and problems with their scales.

    quantised  the layers whose weight is quantised, with all its tensors
    missing    for each layer with a problem, the tensor that is missing or has another shape
    orphaned   scales and zero points of layers whose weight is not quantised, or has no weight
    """

    quantised: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    orphaned: list[str] = field(default_factory=list)


@dataclass
class Loading:
    """Describes how transformers would load a folder.

    problem      why this cannot be found out; "" if there is no problem
    diffusers_class  the class of a model of diffusers
    dtype        the dtype in which the weights are loaded
    missing      weights of the class that the files do not have; they get random values
    unexpected   tensors that the class does not use
    mismatched   tensors with another shape than in the class
    narrowed     tensors that the class keeps in fp32, and that the files have in fewer bits; without
                 matrices such as a router's weight
    ties         for each weight that is tied to another weight, the name of that weight
    turn_end     the text of the special token that ends an answer in the chat template
    model        the model on the meta device; None if it could not be built
    """

    problem: str = ""
    diffusers_class: str = ""
    class_name: str = ""
    dtype: str = ""
    quantisation: Quantisation | None = None
    scales: Scales = field(default_factory=Scales)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    narrowed: list[str] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    turn_end: str = ""
    config: Any = None
    model: Any = None


def ask_transformers(checkpoint: Checkpoint) -> Loading:
    """Finds out how transformers would load a folder. Raises UsageError for a config.json with
    values outside their ranges.
    """
    loading = Loading()
    settings = checkpoint.config
    if not settings:
        loading.problem = f"no {CONFIG_FILE}, so that the class is not known"
        return loading
    check_model_config(settings, f"{checkpoint.path / CONFIG_FILE}")
    loading.quantisation = quantisation_from_config_file(settings)
    if "_class_name" in settings and "model_type" not in settings:
        loading.problem = "a model of diffusers"
        loading.diffusers_class = str(settings["_class_name"])
        loading.scales = find_scales(checkpoint.tensors.values(), loading.quantisation)
        return loading
    quiet_libraries()
    with silence_library_warnings():
        loading.model = _build_model(checkpoint, loading)
        loading.turn_end = _find_turn_end(checkpoint)
    loading.scales = find_scales(checkpoint.tensors.values(), loading.quantisation, loading.model)
    orphaned = set(loading.scales.orphaned)
    loading.unexpected = [name for name in loading.unexpected if name not in orphaned]
    return loading


def _build_model(checkpoint: Checkpoint, loading: Loading) -> Any:
    """Loads the model on the meta device. Returns None if transformers cannot load the folder."""
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
        class_name = (getattr(config, "architectures", None) or [""])[0]
        model_class = getattr(transformers, str(class_name), None) or auto_class(config)
        loading.config = config
        model, report = model_class.from_pretrained(
            checkpoint.path,
            config=plain_config(config),
            dtype="auto",
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            use_safetensors=True,
        )
    except Exception as error:  # transformers raises errors of any type for a wrong folder
        loading.problem = first_line(error)
        return None
    loading.class_name = type(model).__name__
    loading.dtype = format_dtype(model.dtype)
    owners = group_by_owner(checkpoint.tensors.values())
    layers = {owner for owner, parts in owners.items() if has_codes(parts)}
    # the class stacks the weights of experts that the files store one by one
    layers |= {_ONE_EXPERT.sub(".experts", owner) for owner in layers}
    loading.missing = _other_names(report["missing_keys"], layers)
    loading.unexpected = _other_names(report["unexpected_keys"], layers)
    mismatched = {str(key[0]): key for key in report["mismatched_keys"]}
    loading.mismatched = [
        f"{name} {list(mismatched[name][1])}, the class has {list(mismatched[name][2])}"
        for name in _other_names(mismatched, layers)
    ]
    loading.ties = dict(model.all_tied_weights_keys)
    for name, parameter in model.state_dict(keep_vars=True).items():
        stored = checkpoint.tensors.get(name)
        is_narrow = stored is not None and stored.dtype in ("bf16", "fp16")
        # DeepSeek-V3 publishes the weights of its routers in bf16, and the class computes in fp32
        is_matrix = parameter.dim() > 1 and name.endswith(".weight")
        if (
            is_narrow
            and not is_matrix
            and parameter.dtype == torch.float32
            and loading.dtype != "fp32"
        ):
            loading.narrowed.append(name)
    return model


def _other_names(names: Iterable[str], layers: set[str]) -> list[str]:
    """Returns the names of tensors that do not belong to one of these layers."""
    return sorted(
        name for name in names if _split_name(name)[0] not in layers and name not in layers
    )


def _split_name(name: str) -> tuple[str, str]:
    """Returns the layer of a tensor, and the tensor's name inside the layer."""
    if match := _NF4_PARTS.match(name):
        return match["owner"], f"weight.{match['part']}"
    if match := _STACK_PARTS.match(name):
        return match["owner"], match["part"]
    owner, _, last = name.rpartition(".")
    return owner, last


def group_by_owner(tensors: Iterable[StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Returns the tensors of each layer whose weight is quantised, or that has scales."""
    owners: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        owner, last = _split_name(tensor.name)
        owners.setdefault(owner, {})[last] = tensor
    return {owner: parts for owner, parts in owners.items() if _is_quantised(parts)}


def _is_quantised(parts: Mapping[str, StoredTensor]) -> bool:
    if "blocks" in parts or any(name.startswith("weight.") for name in parts):
        return True
    headers = {f"layer.{name}": header for name, header in tensor_headers(parts).items()}
    return bool(group_packed_tensors(headers))


def has_codes(parts: Mapping[str, StoredTensor]) -> bool:
    """Returns True if these tensors of a layer include a quantised weight."""
    weight = parts.get("weight")
    code_dtypes = (*FP8, torch.int8, torch.uint8, torch.int32)
    if weight is not None and torch_dtype(weight.dtype) in code_dtypes:
        return True
    return any(name in parts for name in _CODE_NAMES)


def weight_parts(parts: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns those tensors of a layer that store its quantised weight."""
    other_names = ("bias", *SERVING_TENSORS)
    return {name: tensor for name, tensor in parts.items() if name not in other_names}


def find_linear(model: Any, path: str) -> nn.Linear | None:
    """Returns the linear layer at this path; None if the model has none there.

    model  the model on the meta device; None if it could not be built
    """
    layer = None
    with suppress(AttributeError):
        layer = None if model is None else model.get_submodule(path)
    return layer if isinstance(layer, nn.Linear) else None


def tensor_headers(parts: Mapping[str, StoredTensor]) -> dict[str, TensorHeader]:
    return {
        name: TensorHeader(torch_dtype(tensor.dtype), tensor.shape)
        for name, tensor in parts.items()
    }


def torch_dtype(name: str) -> torch.dtype:
    if name == "fp8_e8m0":
        return torch.float8_e8m0fnu
    with suppress(ValueError):
        return to_torch(name)
    return torch.uint8


def find_scales(
    tensors: Iterable[StoredTensor], quantisation: Quantisation | None, model: Any = None
) -> Scales:
    """Returns which quantised weights have their scales, and which scales have no quantised weight.

    model  the model on the meta device, which has the shapes of the weights
    """
    scales = Scales()
    packing = None if quantisation is None else quantisation.packing
    for owner, parts in group_by_owner(tensors).items():
        if not has_codes(parts):
            names = (*PACKED_TENSOR_NAMES, *SERVING_TENSORS)
            is_part = [name in names or name.startswith("weight.") for name in parts]
            scales.orphaned += [parts[name].name for name, part in zip(parts, is_part) if part]
        elif problem := _missing_part(owner, parts, packing, model):
            scales.missing[owner] = problem
        else:
            scales.quantised.append(owner)
    return scales


def _missing_part(
    owner: str, parts: Mapping[str, StoredTensor], packing: Packing | None, model: Any
) -> str:
    """Returns which tensor of a quantised weight is missing or has another shape; "" if none."""
    if any(name.startswith("weight.") for name in parts):
        absent = [
            part
            for part in _NF4_REQUIRED
            if not any(name.startswith(f"weight.{part}") for name in parts)
        ]
        return f"weight.{absent[0]} is missing" if absent else ""
    layer = find_linear(model, owner)
    if packing is not None and layer is not None:
        headers = tensor_headers(weight_parts(parts))
        try:
            recognise_layout(owner, headers, packing, (layer.out_features, layer.in_features))
        except UsageError as error:
            return error.message.removeprefix(f"{owner}.")
        return ""
    has_scale = any("scale" in name for name in parts if name not in SERVING_TENSORS)
    if has_scale or "SCB" in parts:
        return ""
    return f"no scale beside it; the file has {', '.join(sorted(parts))}"


def _find_turn_end(checkpoint: Checkpoint) -> str:
    """Returns the special token that the chat template writes after an answer; "" if there is no
    template, or no special token after an answer.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            checkpoint.path, trust_remote_code=False, local_files_only=True
        )
        if not tokenizer.chat_template:
            return ""
        text = render_text(tokenizer, list(_PROBE))
        rest = text.partition(_SENTINEL)[2]
        positions = {
            token: rest.index(token) for token in tokenizer.get_added_vocab() if token in rest
        }
    except Exception:  # templates may reject the probe, and tokenizers be damaged, with any error
        return ""
    return min(positions, key=lambda token: positions[token], default="")
