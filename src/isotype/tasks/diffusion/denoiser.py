"""Builds the denoiser for training. This module quantises the denoiser, adds the adapter and
Isotype's ops, applies the precision, and makes the denoiser use exact noise levels. The denoiser is
built either with its weights, or without them on the meta device.

diffusers can quantise only on a GPU. Therefore this module makes bitsandbytes' layers from the
loaded weights itself, one layer at a time, on the device of the run.

Flux computes `timestep.to(hidden_states.dtype) * 1000`. In bf16, 1000 different noise levels are
rounded to only 498 different values, and a level between 0 and 1000 has an error of up to 3.5. So
the forward of the denoiser object stores the exact level, and the sinusoidal embedding uses this
stored level. The classes of diffusers are not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ...config.schema import RunConfig
from ...dtypes import format_dtype, to_torch
from ...errors import UsageError
from ...instance_method import InstanceMethod
from ...model.adapter import attach_adapter
from ...model.load import require_bitsandbytes
from ...model.packed import (
    group_packed_tensors,
    insert_placeholder,
    pack_placeholders,
    read_tensor_parts,
)
from ...model.packed import quantise_layers as pack_layers
from ...ops.packed.recognise import SERVING_TENSORS
from ...optimize import Manifest, optimize
from ...precision.apply import apply_precision, denoiser_blocks, is_kept_in_fp32, names_kept_in_fp32
from ...precision.parts import Part, loading_device
from ...precision.precision import Precision
from ...precision.quantised_base import Quantisation
from ...training.memory.blocks import apply_offload
from ...training.memory.meta_results import ReuseMetaResults
from ...training.memory.outline import quantise_outline
from .families import Family
from .pipeline import PipelineFolder
from .text_encoders import attach_encoders, encoder_targets


def build_denoiser(
    denoiser: Any,
    family: Family,
    config: RunConfig,
    precision: Precision,
    *,
    device_type: str,
    part: Part | None = None,
) -> tuple[nn.Module, Manifest]:
    """Builds the model to train. Also returns the `Manifest`, which lists the modules that Isotype
    replaced in the model. If the model is sharded over several processes, `part` is the part of the
    weights that this process will keep.
    """
    denoiser.requires_grad_(config.adapter.kind == "none")
    if config.adapter.kind == "none":
        model: nn.Module = denoiser
    else:
        model = attach_adapter(
            denoiser,
            config.adapter,
            seed=config.train.seed,
            task_type=None,
            targets=adapter_targets(denoiser, family, config),
        )
    return model, install_ops_and_precision(
        model, denoiser, family, config, precision, device_type=device_type, part=part
    )


def install_ops_and_precision(
    model: nn.Module,
    denoiser: nn.Module,
    family: Family,
    config: RunConfig,
    precision: Precision,
    *,
    device_type: str,
    part: Part | None = None,
) -> Manifest:
    """Makes a denoiser use exact noise levels, Isotype's ops and the run's precision. The denoiser
    must already have its adapter.
    """
    family.prepare(denoiser)
    if family.exact_time_scale is not None:
        keep_time_exact(denoiser, family.exact_time_scale)
    if config.model.optimize:
        manifest = optimize(
            model, precision, device_type=device_type, lora_branch=config.model.lora_branch
        )
    else:
        manifest = Manifest(notes=["model.optimize: false"])
    if family.exact_time_scale is not None and precision.compute != "fp32":
        manifest.notes.append(
            f"{type(denoiser).__name__} rounds its noise level to {precision.compute}: this"
            " instance takes it in fp32"
        )
    if unused := family.unused_layers(denoiser):
        manifest.unused = unused
        manifest.notes.append(
            f"{type(denoiser).__name__} drops the result of {', '.join(unused)}: nothing is learnt"
            " there"
        )
    apply_precision(model, precision, device_type=device_type, part=part)
    return manifest


def adapter_targets(denoiser: Any, family: Family, config: RunConfig) -> list[str]:
    """Returns the names of the modules that get an adapter. For `all-linear`, these are the linear
    layers of the denoiser's blocks. If the text encoders are trained, layers of the text encoders
    are added.
    """
    configured = config.adapter.targets
    if configured != "all-linear":
        denoiser_targets = [configured] if isinstance(configured, str) else list(configured)
    else:
        denoiser_targets = [
            layer
            for layer in block_layers(denoiser, family.adapted_classes(denoiser))
            if not any(part in layer for part in family.frozen_layers)
        ]
    encoder_layers = encoder_targets(denoiser, family, config.adapter.text_encoder_rate)
    return denoiser_targets + encoder_layers


def load_frozen_denoiser(folder: PipelineFolder, precision: Precision, device: torch.device) -> Any:
    """Loads the denoiser of the folder to `device`. Its weights are frozen. Raises UsageError."""
    if (quantisation := folder.published_quantisation) is not None:
        return _load_published(folder, quantisation, precision, device)
    denoiser = folder.denoiser(to_torch(precision.unquantised)).requires_grad_(False)
    if precision.base == "nf4":
        quantise(denoiser, folder.family, precision, device)
    elif precision.packed:
        pack_layers(
            denoiser,
            set(quantised_layers(denoiser, folder.family, precision).values()),
            precision.base,
        )
    return denoiser.to(device)


def load_frozen_base(
    folder: PipelineFolder, config: RunConfig, precision: Precision, device: torch.device
) -> Any:
    """Loads the frozen denoiser. If the run trains the text encoders, they are attached to it."""
    denoiser = load_frozen_denoiser(folder, precision, device)
    if config.adapter.text_encoders:
        attach_encoders(denoiser, folder, folder.text_encoders(to_torch(precision.text_encoder)))
    return denoiser.to(device)


def load_for_samples(
    folder: PipelineFolder, config: RunConfig, precision: Precision, device: torch.device
) -> nn.Module:
    """Loads the denoiser of the folder without an adapter, with the run's precision. Its base is
    quantised and kept in host memory like that of the trained denoiser.
    """
    offload = config.model.offload
    model = load_frozen_base(folder, config, precision, loading_device(device, None, offload))
    install_ops_and_precision(
        model, model, folder.family, config, precision, device_type=device.type
    )
    return apply_offload(model, offload, device)


def outline_base(folder: PipelineFolder, config: RunConfig) -> Any:
    """Builds the same model as `load_frozen_base`, but on the meta device and without weights. It
    is not quantised.
    """
    return _with_encoder_outlines(folder.denoiser_outline(), folder, config)


def outline_frozen_base(folder: PipelineFolder, config: RunConfig, precision: Precision) -> Any:
    """Builds the same model as `load_frozen_base` on the meta device, without weights. Its layers
    are quantised like those of the model of `load_frozen_base`. Raises UsageError.
    """
    if (quantisation := folder.published_quantisation) is not None:
        return _with_encoder_outlines(
            _outline_published(folder, quantisation, precision), folder, config
        )
    outline = folder.denoiser_outline()
    if precision.packed:
        layers = quantised_layers(outline, folder.family, precision).values()
        if precision.base == "nf4":
            quantise_outline(outline, to_torch(precision.compute), layers=set(layers))
        else:
            pack_layers(outline, set(layers), precision.base)
    return _with_encoder_outlines(outline, folder, config)


def _with_encoder_outlines(outline: Any, folder: PipelineFolder, config: RunConfig) -> Any:
    if config.adapter.text_encoders:
        attach_encoders(
            outline, folder, dict(zip(folder.family.trainable_encoders, folder.encoder_outlines()))
        )
    return outline


def block_layers(denoiser: Any, classes: tuple[str, ...]) -> dict[str, nn.Linear]:
    """Returns a mapping from name to linear layer. It contains the layers inside modules whose
    class is in `classes`.
    """
    blocks = tuple(
        f"{name}." for name, module in denoiser.named_modules() if type(module).__name__ in classes
    )
    return {
        name: module
        for name, module in denoiser.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(blocks)
    }


def quantised_layers(denoiser: Any, family: Family, precision: Precision) -> dict[str, nn.Linear]:
    """Returns a mapping from name to linear layer. It contains the layers whose weights are packed
    in a packed base model. These are the linear layers of the blocks, except for layers that the
    model keeps in fp32.
    """
    in_fp32 = names_kept_in_fp32(denoiser, to_torch(precision.unquantised))
    layers = block_layers(denoiser, family.adapted_classes(denoiser))
    return {name: layer for name, layer in layers.items() if not is_kept_in_fp32(name, in_fp32)}


def quantise(denoiser: Any, family: Family, precision: Precision, device: torch.device) -> None:
    """Replaces the linear layers of the blocks by nf4 layers whose scales are quantised too. Raises
    UsageError if bitsandbytes is not installed.
    """
    for name, linear in quantised_layers(denoiser, family, precision).items():
        packed, nf4 = _place_nf4_layer(denoiser, name, linear, precision)
        packed.weight = nf4(
            linear.weight.data, requires_grad=False, quant_type="nf4", module=packed
        )
        packed.bias = linear.bias
        packed.to(device)  # quantises


def _place_nf4_layer(
    denoiser: Any, name: str, linear: nn.Linear, precision: Precision
) -> tuple[Any, Any]:
    """Replaces the layer `linear` by a layer of bitsandbytes that has no weight yet. Returns the
    new layer and the class of its weight.
    """
    require_bitsandbytes()
    import bitsandbytes

    packed = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=to_torch(precision.compute),
        quant_type="nf4",
        device="meta",
    )
    parent, _, child_name = name.rpartition(".")
    setattr(denoiser.get_submodule(parent), child_name, packed)
    denoiser.is_loaded_in_4bit = True  # PEFT reads this attribute
    return packed, bitsandbytes.nn.Params4bit


# --- a denoiser that was published in a quantised format. Its files are read tensor by tensor, on
# any device. diffusers' own quantisers are not used, because they need a GPU for bitsandbytes, and
# a package for each other format. `quantization_config` in config.json names the library; the files
# show which layers are packed

_NF4_SUFFIX = ".quant_state.bitsandbytes__nf4"
_DOWNLOAD_AGAIN = "get the folder again, or give the pipeline that it was quantised from"


def _outline_published(
    folder: PipelineFolder, quantisation: Quantisation, precision: Precision
) -> Any:
    """Builds the denoiser on the meta device. The headers of its files say which layers are packed.
    Raises UsageError.
    """
    denoiser = folder.denoiser_outline()
    layers = _place_waiting_layers(denoiser, folder, quantisation)
    if quantisation.packing is None:
        double = bool(quantisation.is_double_quantised)
        quantise_outline(
            denoiser,
            to_torch(precision.compute),
            layers={denoiser.get_submodule(name) for name in layers},
            double_quant=double,
        )
    else:
        pack_placeholders(denoiser, quantisation.packing)
    return denoiser


def _load_published(
    folder: PipelineFolder, quantisation: Quantisation, precision: Precision, device: torch.device
) -> Any:
    """Loads the frozen denoiser to `device`. Its packed layers contain the same bytes as the files.
    Raises UsageError.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        denoiser = folder.denoiser_class().from_config(folder.dense_config())
    layers = _place_waiting_layers(denoiser, folder, quantisation)
    tensors: dict[str, Tensor] = {}
    for file in folder.denoiser_files():
        with safe_open(file, framework="pt", device=str(device)) as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
    if quantisation.packing is None:
        for name, layer in layers.items():
            packed, nf4 = _place_nf4_layer(denoiser, name, layer, precision)
            weight = f"{name}.weight"
            quant_state = {
                key: tensors.pop(key) for key in list(tensors) if key.startswith(f"{weight}.")
            }
            packed.weight = tensors[weight] = nf4.from_prequantized(
                tensors[weight], quant_state, device=device, module=packed
            )
    tensors = {name: t for name, t in tensors.items() if not name.endswith(SERVING_TENSORS)}
    for name, buffer in denoiser.named_buffers():
        if buffer.is_floating_point() and name in tensors:
            # tables of positions must stay exact, as in `PipelineFolder.widen_buffers`
            tensors[name] = tensors[name].float()
    dtype = to_torch(precision.unquantised)
    in_fp32 = names_kept_in_fp32(denoiser, dtype)
    for name, parameter in denoiser.named_parameters():
        is_packed = name.rpartition(".")[0] in layers and not name.endswith(".bias")
        if not is_packed and parameter.is_floating_point() and name in tensors:
            tensors[name] = tensors[name].to(
                torch.float32 if is_kept_in_fp32(name, in_fp32) else dtype
            )
    unexpected_names = denoiser.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    missing_names = [name for name, p in denoiser.named_parameters() if p.is_meta]
    if missing_names or unexpected_names:
        problem = (
            f"{missing_names[0]} is missing"
            if missing_names
            else f"{unexpected_names[0]} belongs to no layer"
        )
        raise UsageError(
            f"model.name: {folder.path / folder.denoiser_part}: {problem}", fix=_DOWNLOAD_AGAIN
        )
    if quantisation.packing is not None:
        pack_placeholders(denoiser, quantisation.packing)
    return denoiser.to(device).requires_grad_(False).eval()


def _place_waiting_layers(
    denoiser: nn.Module, folder: PipelineFolder, quantisation: Quantisation
) -> dict[str, nn.Linear]:
    """Returns a mapping from name to packed layer. If Isotype itself reads their format, each of
    these layers is replaced in the denoiser by a placeholder, which gets the layer's tensors later.
    """
    label = f"model.name: {folder.path / folder.denoiser_part}"
    parts = read_tensor_parts(folder.denoiser_files())
    owners = group_packed_tensors(parts) if quantisation.packing is not None else {}
    names = list(owners) or [
        name.removesuffix(f".weight{_NF4_SUFFIX}") for name in parts if name.endswith(_NF4_SUFFIX)
    ]
    layers = dict[str, nn.Linear]()
    modules = dict(denoiser.named_modules())
    for name in names:
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            raise UsageError(
                f"{label}: {name} is packed, and is no linear layer of a {type(denoiser).__name__}",
                fix=_DOWNLOAD_AGAIN,
            )
        layers[name] = layer
        if quantisation.packing is not None:
            insert_placeholder(
                denoiser, name, layer, owners[name], quantisation.packing, f"{label}: {name}"
            )
    if not layers:
        raise UsageError(
            f"{label}: config.json says that it is quantised ({quantisation}), and its files have"
            " no"
            " packed tensor",
            fix=_DOWNLOAD_AGAIN,
        )
    return layers


# key in a denoiser's `__dict__` for the exact noise levels
_LEVELS_ATTRIBUTE = "_isotype_noise_levels"


class _ExactNoiseLevels:
    """A forward pre-hook for sinusoidal embeddings. It replaces a rounded noise level by the exact
    noise level. The hook is an object and not a function, so that `deepcopy` and pickling keep it.

    pending  the noise level and the guidance of the current forward pass, in the order in which the
             denoiser embeds them; empty between two passes
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.pending = list[Tensor]()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.pending:
            return None
        level = self.pending.pop(0)
        # Qwen-Image-Edit 2511 (`zero_cond_t`) embeds a second level, 0, for the picture before the
        # edit
        if len(args[0]) == 2 * len(level):
            level = torch.cat([level, level * 0])
        return (level.to(torch.float32) * self.scale, *args[1:])


def keep_time_exact(denoiser: nn.Module, scale: float) -> None:
    """Makes the sinusoidal embeddings of `denoiser` use the denoiser's inputs `timestep` and
    `guidance` in fp32, multiplied by `scale`. Call it before `apply_precision`.
    """
    levels = _ExactNoiseLevels(scale)
    denoiser.__dict__[_LEVELS_ATTRIBUTE] = levels
    InstanceMethod(_exact_forward, denoiser).install()
    for module in time_embeddings(denoiser):
        module.register_forward_pre_hook(levels)


def time_embeddings(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a denoiser that compute sinusoidal embeddings."""
    from diffusers.models.embeddings import Timesteps

    return [module for module in model.modules() if isinstance(module, Timesteps)]


def record_time_dtypes(model: nn.Module, observed: dict[tuple[str, str], str]) -> None:
    """Whenever a noise level is embedded, stores the dtype of the noise level and the dtype of its
    embedding in `observed`.
    """

    def record(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if args[0].is_floating_point():
            observed["timesteps", "noise level"] = format_dtype(args[0].dtype)
        observed["timesteps", "sinusoidal embedding"] = format_dtype(output.dtype)

    for module in time_embeddings(model):
        module.register_forward_hook(record)


def _exact_forward(denoiser: nn.Module, *args: Any, **kwargs: Any) -> Any:
    levels: _ExactNoiseLevels = getattr(denoiser, _LEVELS_ATTRIBUTE)
    levels.pending = [
        kwargs[name] for name in ("timestep", "guidance") if kwargs.get(name) is not None
    ]
    try:
        return type(denoiser).forward(denoiser, *args, **kwargs)
    finally:
        levels.pending = []


@torch.no_grad()
def count_output_bytes(run: Callable[[], Any]) -> int:
    """Returns the bytes of the results of all operators of a forward pass, including views.

    run  a function that runs a forward pass on the meta device
    """
    counter = _OutputBytes()
    with ReuseMetaResults(), counter:
        run()
    return counter.total


@torch.no_grad()
def count_block_flops(denoiser: nn.Module, run: Callable[[], Any]) -> list[float]:
    """Returns the FLOPs of each block of `denoiser` for matrix products, convolutions and
    attention.

    run  a function that runs a forward pass of `denoiser` on the meta device
    """
    blocks = set(denoiser_blocks(denoiser))
    with FlopCounterMode(display=False) as flop_counter:
        run()
    flops = flop_counter.get_flop_counts()
    root = type(denoiser).__name__
    names = [name for name, module in denoiser.named_modules() if module in blocks]
    return [sum(flops.get(f"{root}.{name}", {}).values()) for name in names]


class _OutputBytes(TorchDispatchMode):
    """Adds up the bytes of the results of all operators that run while this mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.total: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.total += sum(
            t.numel() * t.element_size()
            for t in tree_leaves(outputs)
            if isinstance(t, torch.Tensor)
        )
        return outputs
