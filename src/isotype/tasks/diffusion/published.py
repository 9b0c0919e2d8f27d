"""A denoiser that was published quantised: read by its own tensors, on any device.

diffusers loads these with its quantisers, which need a GPU for bitsandbytes and a package for each of the others. `quantization_config` in
the denoiser's config.json says the library, the files which layers are packed.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ...dtypes import to_torch
from ...errors import UsageError
from ...model.load import require_bitsandbytes
from ...model.packed import pack, packed_owners, parts_of_files, wait_at
from ...ops.packed.recognise import OF_ACTIVATIONS
from ...precision.apply import is_kept_in_fp32, names_kept_in_fp32
from ...precision.precision import Precision
from ...precision.quantised_base import Quantisation
from ...training.memory.outline import quantise_outline
from .pipeline import PipelineFolder

_NF4 = ".quant_state.bitsandbytes__nf4"
_AGAIN = "get the folder again, or give the pipeline that it was quantised from"


def outline_published(folder: PipelineFolder, found: Quantisation, precision: Precision) -> Any:
    """The denoiser on the meta device, packed as the headers of its files have it. Raises UsageError."""
    denoiser = folder.denoiser_outline()
    layers = _wait(denoiser, folder, found)
    if found.packing is None:
        double = bool(found.double)
        quantise_outline(denoiser, to_torch(precision.compute), layers={denoiser.get_submodule(name) for name in layers}, double=double)
    else:
        pack(denoiser, found.packing)
    return denoiser


def load_published(folder: PipelineFolder, found: Quantisation, precision: Precision, device: torch.device) -> Any:
    """The denoiser on `device`, frozen, its packed layers with the bytes of their files. Raises UsageError."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        denoiser = folder.denoiser_class().from_config(folder.dense_config())
    layers = _wait(denoiser, folder, found)
    tensors: dict[str, Tensor] = {}
    for file in folder.denoiser_files():
        with safe_open(file, framework="pt", device=str(device)) as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
    if found.packing is None:
        for name, layer in layers.items():
            _put_nf4(denoiser, name, layer, tensors, to_torch(precision.compute), device)
    tensors = {name: t for name, t in tensors.items() if not name.endswith(OF_ACTIVATIONS)}
    for name, buffer in denoiser.named_buffers():
        if buffer.is_floating_point() and name in tensors:
            tensors[name] = tensors[name].float()  # tables of positions stay exact, as in `widen_buffers`
    dtype = to_torch(precision.unquantised)
    in_fp32 = names_kept_in_fp32(denoiser, dtype)
    for name, parameter in denoiser.named_parameters():
        waits = name.rpartition(".")[0] in layers and not name.endswith(".bias")
        if not waits and parameter.is_floating_point() and name in tensors:
            tensors[name] = tensors[name].to(torch.float32 if is_kept_in_fp32(name, in_fp32) else dtype)
    unread = denoiser.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    absent = [name for name, p in denoiser.named_parameters() if p.is_meta]
    if absent or unread:
        what = f"{absent[0]} is missing" if absent else f"{unread[0]} belongs to no layer"
        raise UsageError(f"model.name: {folder.path / folder.denoiser_part}: {what}", fix=_AGAIN)
    if found.packing is not None:
        pack(denoiser, found.packing)
    return denoiser.to(device).requires_grad_(False).eval()


def _wait(denoiser: nn.Module, folder: PipelineFolder, found: Quantisation) -> dict[str, nn.Linear]:
    """Each packed layer by its name; where the packing is read here, layers that wait for their tensors take their places."""
    where = f"model.name: {folder.path / folder.denoiser_part}"
    parts = parts_of_files(folder.denoiser_files())
    owners = packed_owners(parts) if found.packing is not None else {}
    names = list(owners) or [name.removesuffix(f".weight{_NF4}") for name in parts if name.endswith(_NF4)]
    layers = dict[str, nn.Linear]()
    modules = dict(denoiser.named_modules())
    for name in names:
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            raise UsageError(f"{where}: {name} is packed, and is no linear layer of a {type(denoiser).__name__}", fix=_AGAIN)
        layers[name] = layer
        if found.packing is not None:
            wait_at(denoiser, name, layer, owners[name], found.packing, f"{where}: {name}")
    if not layers:
        raise UsageError(f"{where}: config.json says that it is quantised ({found}), and its files have no packed tensor", fix=_AGAIN)
    return layers


def _put_nf4(
    denoiser: Any, name: str, like: nn.Linear, tensors: dict[str, Tensor], compute: torch.dtype, device: torch.device
) -> None:  # fmt: skip
    """Puts bitsandbytes' layer in the place of `like`, and takes its tensors out of `tensors`."""
    require_bitsandbytes()
    import bitsandbytes

    packed = bitsandbytes.nn.Linear4bit(
        like.in_features, like.out_features, bias=like.bias is not None, compute_dtype=compute, quant_type="nf4", device="meta"
    )
    weight = f"{name}.weight"
    beside = {key: tensors.pop(key) for key in list(tensors) if key.startswith(f"{weight}.")}
    packed.weight = bitsandbytes.nn.Params4bit.from_prequantized(tensors[weight], beside, device=device, module=packed)
    tensors[weight] = packed.weight
    parent, _, last = name.rpartition(".")
    setattr(denoiser.get_submodule(parent), last, packed)
    denoiser.is_loaded_in_4bit = True  # PEFT asks
