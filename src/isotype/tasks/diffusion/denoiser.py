"""The denoiser as it is trained: nf4 layers, adapter, exact noise levels, Isotype's ops, precision; with its weights or on the meta device.

diffusers quantises on a GPU only. Here bitsandbytes' layers are made from the loaded weights, one at a time, on the device of the run.

Flux computes `timestep.to(hidden_states.dtype) * 1000`: in bf16 1000 noise levels become 498, up to 3.5 of 1000 off. The instance's forward
records the exact level, and the sinusoidal embedding uses it. No class is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ...config.schema import RunConfig
from ...dtypes import to_torch
from ...errors import UsageError
from ...instance_method import InstanceMethod
from ...model.adapter import attach_adapter
from ...model.load import require_bitsandbytes
from ...model.packed import quantise as pack_layers
from ...optimize import Manifest, optimize
from ...precision.apply import apply_precision, denoiser_blocks, is_kept_in_fp32, names_kept_in_fp32
from ...precision.parts import Part
from ...precision.precision import Precision
from .families import Family
from .pipeline import PipelineFolder
from .published import load_published
from .text_encoders import put_encoders, targets_in


def built(
    denoiser: Any, family: Family, config: RunConfig, precision: Precision, *, device_type: str, part: Part | None = None
) -> tuple[nn.Module, Manifest]:
    """The model that is trained, and what Isotype replaced in it. `part`: what this process will keep of it, where several share it."""
    denoiser.requires_grad_(config.adapter.kind == "none")
    if config.adapter.kind == "none":
        model: nn.Module = denoiser
    else:
        model = attach_adapter(denoiser, config.adapter, seed=config.train.seed, task_type=None, targets=targets(denoiser, family, config))
    return model, put_under(model, denoiser, family, config, precision, device_type=device_type, part=part)


def put_under(
    model: nn.Module, denoiser: nn.Module, family: Family, config: RunConfig, precision: Precision, *, device_type: str,
    part: Part | None = None,
) -> Manifest:  # fmt: skip
    """Puts exact noise levels, ops and precision on a denoiser that has its adapter already."""
    family.prepare(denoiser)
    if family.time_scale is not None:
        keep_time_exact(denoiser, family.time_scale)
    if config.model.optimize:
        manifest = optimize(model, precision, device_type=device_type, lora_branch=config.model.lora_branch)
    else:
        manifest = Manifest(notes=["model.optimize: false"])
    if family.time_scale is not None and precision.compute != "fp32":
        manifest.notes.append(f"{type(denoiser).__name__} rounds its noise level to {precision.compute}: this instance takes it in fp32")
    if unused := family.unused(denoiser):
        manifest.unused = unused
        manifest.notes.append(f"{type(denoiser).__name__} drops the result of {', '.join(unused)}: nothing is learnt there")
    apply_precision(model, precision, device_type=device_type, part=part)
    return manifest


def targets(denoiser: Any, family: Family, config: RunConfig) -> list[str]:
    """The modules that get an adapter: with `all-linear` every linear layer of the denoiser's blocks; and of its text
    encoders, where they are trained."""
    given = config.adapter.targets
    if given != "all-linear":
        own = [given] if isinstance(given, str) else list(given)
    else:
        own = list(block_layers(denoiser, family.blocks_of(denoiser)))
    return own + targets_in(denoiser, family)


_ENCODERS = re.compile(r"text_?encoder|text_model|(^|[._])te[123]?($|[._])")  # as diffusers, transformers and kohya's scripts name them


def refuse_encoders(given: str | Sequence[str], folder: PipelineFolder) -> None:
    """Raises  UsageError for a name of `adapter.targets` that the denoiser does not have, and that means a text encoder or its layers"""
    denoiser = folder.denoiser_outline()
    unknown = [name for name in ([given] if isinstance(given, str) else given) if not _names_a_layer(name, denoiser)]
    encoders = folder.encoder_outlines() if unknown else []
    for name in unknown:
        if _ENCODERS.search(name) or any(_names_a_layer(name, encoder) for encoder in encoders):
            layers = block_layers(denoiser, folder.family.blocks_of(denoiser))
            ends = dict.fromkeys(re.sub(r".*?([^.]+(\.\d+)?)$", r"\1", layer) for layer in layers)
            trained = "adapter.text_encoders: true adapts the encoders beside it, or " if folder.family.text_encoders else ""
            raise UsageError(
                f"adapter.targets: {name} names a text encoder, and these are layers of the {folder.denoiser_part}",
                fix=f"{trained}adapter.targets: all-linear, or some of: {', '.join(list(ends)[:8])}",
            )


def _names_a_layer(name: str, model: nn.Module) -> bool:
    """Whether a module's name is `name`, ends in it, or matches it as a pattern."""
    try:
        pattern = re.compile(rf"(.*\.)?({name})")
    except re.error:
        pattern = re.compile(rf"(.*\.)?{re.escape(name)}")
    return any(pattern.fullmatch(module) for module, _ in model.named_modules())


def frozen_denoiser(folder: PipelineFolder, precision: Precision, device: torch.device) -> Any:
    """The folder's denoiser on `device`, without gradients. Raises UsageError."""
    if (found := folder.published) is not None:
        return load_published(folder, found, precision, device)
    loaded = folder.denoiser(to_torch(precision.unquantised)).requires_grad_(False)
    if precision.base == "nf4":
        quantise(loaded, folder.family, precision, device)
    elif precision.packed:
        pack_layers(loaded, set(quantised_layers(loaded, folder.family, precision).values()), precision.base)
    return loaded.to(device)


def frozen_base(folder: PipelineFolder, config: RunConfig, precision: Precision, device: torch.device) -> Any:
    """`frozen_denoiser`, with the text encoders in it where the run trains them."""
    loaded = frozen_denoiser(folder, precision, device)
    if config.adapter.text_encoders:
        put_encoders(loaded, folder, folder.text_encoders(to_torch(precision.text_encoder)))
    return loaded.to(device)


def base_outline(folder: PipelineFolder, config: RunConfig) -> Any:
    """The same without weights: on the meta device, and not quantised."""
    return with_encoder_outlines(folder.denoiser_outline(), folder, config)


def with_encoder_outlines(outline: Any, folder: PipelineFolder, config: RunConfig) -> Any:
    if config.adapter.text_encoders:
        put_encoders(outline, folder, dict(zip(folder.family.text_encoders, folder.encoder_outlines())))
    return outline


def block_layers(denoiser: Any, classes: tuple[str, ...]) -> dict[str, nn.Linear]:
    """name -> each linear layer below a module whose class is one of `classes`."""
    blocks = tuple(f"{name}." for name, module in denoiser.named_modules() if type(module).__name__ in classes)
    return {name: module for name, module in denoiser.named_modules() if isinstance(module, nn.Linear) and name.startswith(blocks)}


def quantised_layers(denoiser: Any, family: Family, precision: Precision) -> dict[str, nn.Linear]:
    """name -> each linear layer that a packed base packs: those of the blocks, but for what the model keeps in fp32."""
    in_fp32 = names_kept_in_fp32(denoiser, to_torch(precision.unquantised))
    layers = block_layers(denoiser, family.blocks_of(denoiser))
    return {name: layer for name, layer in layers.items() if not is_kept_in_fp32(name, in_fp32)}


def quantise(denoiser: Any, family: Family, precision: Precision, device: torch.device) -> None:
    """Puts nf4 layers with doubly quantised scales in place of the blocks' linear layers. Raises UsageError without bitsandbytes."""
    require_bitsandbytes()
    import bitsandbytes

    for name, linear in quantised_layers(denoiser, family, precision).items():
        packed = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=to_torch(precision.compute),
            compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8, device="meta",
        )  # fmt: skip
        packed.weight = bitsandbytes.nn.Params4bit(
            linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8, module=packed
        )
        packed.bias = linear.bias
        parent, _, last = name.rpartition(".")
        setattr(denoiser.get_submodule(parent), last, packed.to(device))  # quantises
    denoiser.is_loaded_in_4bit = True  # PEFT asks


_LEVELS = "_isotype_noise_levels"


class _Levels:
    """What one forward pass was given, in the order in which a denoiser embeds it; empty between passes."""

    def __init__(self, scale: float) -> None:
        self.scale, self.given = scale, list[Tensor]()


class _Exact:
    """Forward pre-hook of a sinusoidal embedding. An object, so that deepcopy and pickling keep it."""

    def __init__(self, levels: _Levels) -> None:
        self.levels = levels

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.levels.given:
            return None
        level = self.levels.given.pop(0)
        if len(args[0]) == 2 * len(level):  # Qwen-Image-Edit 2511 (`zero_cond_t`): of the picture before the edit it is 0
            level = torch.cat([level, level * 0])
        return (level.to(torch.float32) * self.levels.scale, *args[1:])


def keep_time_exact(denoiser: nn.Module, scale: float) -> None:
    """Makes the sinusoidal embeddings of `denoiser` take its `timestep` and `guidance` in fp32, times `scale`. Before `apply_precision`."""
    levels = _Levels(scale)
    denoiser.__dict__[_LEVELS] = levels
    InstanceMethod(_exact_forward, denoiser).put()
    for module in embeddings_of_time(denoiser):
        module.register_forward_pre_hook(_Exact(levels))


def embeddings_of_time(model: nn.Module) -> list[nn.Module]:
    """The sinusoidal embeddings of a denoiser."""
    from diffusers.models.embeddings import Timesteps

    return [module for module in model.modules() if isinstance(module, Timesteps)]


def _exact_forward(denoiser: nn.Module, *args: Any, **kwargs: Any) -> Any:
    levels: _Levels = getattr(denoiser, _LEVELS)
    levels.given = [kwargs[name] for name in ("timestep", "guidance") if kwargs.get(name) is not None]
    try:
        return type(denoiser).forward(denoiser, *args, **kwargs)
    finally:
        levels.given = []


@dataclass(frozen=True)
class ForwardCost:
    """made: bytes of everything that its operators make, views included; blocks: FLOPs of each block, in products, convolutions and
    attention"""

    made: int
    blocks: Sequence[float] = ()

    @classmethod
    def of(cls, denoiser: nn.Module, run: Callable[[], Any]) -> ForwardCost:
        """run  a forward pass of `denoiser` on the meta device"""
        blocks = set(denoiser_blocks(denoiser))
        with torch.no_grad(), _Made() as seen, FlopCounterMode(display=False) as counted:
            run()
        each, root = counted.get_flop_counts(), type(denoiser).__name__
        names = [name for name, module in denoiser.named_modules() if module in blocks]
        return cls(seen.made, [sum(each.get(f"{root}.{name}", {}).values()) for name in names])


class _Made(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.made += sum(t.numel() * t.element_size() for t in tree_leaves(made) if isinstance(t, torch.Tensor))
        return made
