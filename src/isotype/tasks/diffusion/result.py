"""Saves what was trained, also as the file that diffusers reads, and loads that file as a user
would.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...config.schema import RunConfig
from ...dtypes import to_torch
from ...errors import RunError, UsageError
from ...lora.quantised import PackedLinear
from ...model.adapter import load_adapter, save_adapter
from ...precision.parts import Part, loading_device
from ...precision.precision import Precision
from ...training.memory.blocks import apply_offload
from .denoiser import install_ops_and_precision, load_frozen_denoiser
from .families import Family
from .pipeline import PipelineFolder
from .text_encoders import PREFIX, attach_encoders, split_part

LORA_FILE = "pytorch_lora_weights.safetensors"
MODEL_FILE = "diffusion_pytorch_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def save_lora(
    model: Any,
    folder: Path,
    precision: Precision,
    pipeline: PipelineFolder,
    *,
    comfyui: bool = False,
) -> None:
    """A PEFT folder, and beside it the adapter under diffusers' names where the pipeline can load
    that. That file's metadata has rank, alpha and the other settings: without them diffusers would
    take the rank as alpha. `comfyui`: one more file, for ComfyUI.
    """
    from peft import PeftConfig

    save_adapter(model, folder, precision)
    if comfyui:
        write_comfyui(folder, folder / COMFYUI_FILE, pipeline.family)
    if not pipeline.family.loads_lora or is_lokr(folder):
        return
    # else its tensors load in the base's dtype
    settings = PeftConfig.from_pretrained(str(folder)).to_dict() | {"inference_mode": False}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        part, inner_name = split_part(name.removeprefix(_PEFT_PREFIX), pipeline.family)
        parts.setdefault(part, {})[inner_name] = tensor
    arguments: dict[str, Any] = {}
    for part, tensors in parts.items():
        # of an encoder without `text_model`, whose flat names diffusers makes of the file's, the
        # ends of names fit too
        names = sorted(
            {name.rpartition(".lora_")[0].removeprefix("text_model.") for name in tensors}
        )
        own_settings = settings if len(parts) == 1 else settings | {"target_modules": names}
        arguments |= {f"{part}_lora_layers": tensors, f"{part}_lora_adapter_metadata": own_settings}
    pipeline_class(pipeline).save_lora_weights(folder, **arguments)


def read_adapter_settings(adapter: Path, setting: str = "adapter") -> dict[str, Any]:
    """Those of a PEFT folder. Raises UsageError."""
    file = adapter / "adapter_config.json"
    try:
        settings: dict[str, Any] = dict(json.loads(file.read_text(encoding="utf-8")))
        return settings
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{setting}: {file}: {str(error).splitlines()[0]}",
            fix="a PEFT folder, as runs/NAME/adapter",
        ) from None


def is_lokr(adapter: Path) -> bool:
    """Of a PEFT folder. Most pipelines of diffusers read no such file: it is loaded by PEFT."""
    return read_adapter_settings(adapter).get("peft_type") == "LOKR"


def save_denoiser(model: Any, folder: Path, precision: Precision) -> None:
    """A diffusers model's folder in `save_model`'s dtype."""
    dtype = to_torch(precision.save_model)
    model.save_config(folder)
    tensors = {
        name: (t.to(dtype) if t.is_floating_point() else t).contiguous().cpu()
        for name, t in model.state_dict().items()
    }
    save_file(tensors, folder / MODEL_FILE, metadata={"format": "pt"})


def load_result(
    folder: Path,
    pipeline: PipelineFolder,
    config: RunConfig,
    precision: Precision,
    device: torch.device,
    part: Part | None = None,
) -> nn.Module:
    """The saved adapter on a freshly loaded denoiser by `load_lora_weights` (by PEFT where the
    pipeline has none), or the saved denoiser, under the run's precision.

    Raises  RunError SV001 when a tensor of the file is missing in the model, or differs; UsageError
            for the adapter of another model
    """
    model: nn.Module
    if config.adapter.text_encoders:
        encoders = pipeline.text_encoders(to_torch(precision.text_encoder))
    else:
        encoders = {}
    if (folder / "adapter_config.json").is_file():
        denoiser = load_frozen_denoiser(
            pipeline, precision, loading_device(device, part, config.model.offload)
        )
        if pipeline.family.loads_lora and not is_lokr(folder):
            load_adapter_as_diffusers(denoiser, folder, pipeline, encoders)
            model = NamedAsPeft(denoiser)
        else:
            model = load_adapter(denoiser, folder)
    else:
        denoiser = pipeline.denoiser_class().from_pretrained(
            str(folder), dtype=to_torch(precision.trainable), use_safetensors=True
        )
        pipeline.widen_buffers(denoiser)
        model = denoiser
    if encoders:
        attach_encoders(denoiser, pipeline, encoders)
    model.to(loading_device(device, part, config.model.offload))
    install_ops_and_precision(
        model, denoiser, pipeline.family, config, precision, device_type=device.type, part=part
    )
    return apply_offload(model, config.model.offload, device).eval()


class NamedAsPeft(nn.Module):
    """A denoiser that diffusers put an adapter on, whose parameters have the names that PEFT's
    wrapper gives them.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = denoiser

    def get_base_model(self) -> nn.Module:
        inner = self.base_model.model
        assert isinstance(inner, nn.Module)
        return inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_base_model()(*args, **kwargs)


def _layer_shape(
    calculate_shape: Callable[..., torch.Size],
    model: nn.Module,
    base_module: nn.Module | None = None,
    base_weight_param_name: str | None = None,
) -> torch.Size:
    """The shape of a linear layer's weight, which diffusers asks for to compare an adapter of Flux
    with it; a packed weight is bytes.
    """
    layer = base_module or model.get_submodule(str(base_weight_param_name).rpartition(".")[0])
    if isinstance(layer, PackedLinear):
        return layer.weight.quant_state.shape
    return calculate_shape(
        model=model, base_module=base_module, base_weight_param_name=base_weight_param_name
    )


def load_adapter_as_diffusers(
    denoiser: Any, folder: Path, pipeline: PipelineFolder, encoders: Mapping[str, nn.Module]
) -> None:
    """Loads the adapter as diffusers does, and checks it: diffusers leaves tensors that the file
    lacks uninitialised, and ignores tensors that no part of the model takes. Raises RunError SV001.

    diffusers narrows the adapter to the denoiser's dtype; afterwards each tensor is the file's own.

    encoders  part -> text encoder, of a run that trained them; not yet in the denoiser
    """
    if not encoders:
        refuse_adapter_of_another_model(denoiser, folder)
    pipe = pipeline.pipeline_for_sampling(denoiser, None, encoders)
    if hasattr(pipe, "_calculate_module_shape"):
        pipeline_kind = type(pipe)
        pipe.__class__ = type(
            pipeline_kind.__name__,
            (pipeline_kind,),
            {
                "_calculate_module_shape": partial(
                    _layer_shape, pipeline_kind._calculate_module_shape
                )
            },
        )
    pipe.load_lora_weights(folder, weight_name=LORA_FILE, adapter_name="default")
    saved = load_file(folder / LORA_FILE)
    loaded = {
        f"{pipeline.denoiser_part}.{_saved_name(name)}": p
        for name, p in denoiser.named_parameters()
        if ".lora_" in name
    }
    for part, encoder in encoders.items():
        named_parameters = (
            (".".join(split_part(f"{PREFIX}{part}.{_saved_name(n)}", pipeline.family)), p)
            for n, p in encoder.named_parameters()
        )
        loaded |= {name: p for name, p in named_parameters if ".lora_" in name}
    _compare(
        saved,
        {name: p.detach() for name, p in loaded.items()},
        f"{folder / LORA_FILE}: load_lora_weights",
    )
    stored = load_file(folder / "adapter_model.safetensors")
    peft = {
        ".".join(split_part(name.removeprefix(_PEFT_PREFIX), pipeline.family)): t
        for name, t in stored.items()
    }
    _compare(saved, peft, f"{folder}: the PEFT file")
    for name, parameter in loaded.items():
        parameter.data = saved[name].to(parameter.device)
        parameter.requires_grad = True


def refuse_adapter_of_another_model(
    denoiser: nn.Module, folder: Path, setting: str = "adapter"
) -> None:
    """Raises UsageError where a matrix of a PEFT folder belongs to no module of this denoiser, or
    to one of another size.

    denoiser  with its weights, or on the meta device
    """
    modules = dict(denoiser.named_modules())
    for name, shape in read_shapes(folder / "adapter_model.safetensors", setting).items():
        path, _, side = name.removesuffix(".weight").rpartition(".")
        path = path.removeprefix(_PEFT_PREFIX)
        module = modules.get(path)
        if side not in ("lora_A", "lora_B") or (
            module is not None and not isinstance(module, nn.Linear)
        ):
            continue
        if module is None:
            reason = "no such module"
        elif side == "lora_A" and module.in_features != shape[1]:
            reason = f"{module.in_features} inputs, the adapter takes {shape[1]}"
        elif side == "lora_B" and module.out_features != shape[0]:
            reason = f"{module.out_features} outputs, the adapter gives {shape[0]}"
        else:
            continue
        raise UsageError(
            f"{setting}: {folder}: an adapter of another model than this {type(denoiser).__name__}:"
            f" {path}: {reason}",
            fix="take the base it was trained on",
        )


def read_shapes(file: Path, setting: str) -> dict[str, list[int]]:
    """name -> shape of a file's tensors. Raises UsageError."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118  # not a mapping
    except FileNotFoundError:
        raise UsageError(
            f"{setting}: {file}: no such file", fix="a PEFT folder, as runs/NAME/adapter"
        ) from None
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{setting}: {file}: {str(error).splitlines()[0]}") from None


def _saved_name(name: str) -> str:
    """The name of an adapter's parameter as PEFT writes it: without the adapter's own name, and
    DoRA's lengths as a bare tensor.
    """
    return name.replace(".default.", ".").replace(
        ".lora_magnitude_vector.weight", ".lora_magnitude_vector"
    )


def _compare(saved: dict[str, Tensor], loaded: dict[str, Tensor], source: str) -> None:
    different = sorted(set(saved) ^ set(loaded)) or [
        n for n in saved if not torch.equal(saved[n].to(loaded[n].dtype), loaded[n].cpu())
    ]
    if different:
        raise RunError(
            f"{source} does not agree with what was saved: {different[0]} ({len(different)} such)",
            code="SV001",
            fix="the checkpoints are untouched; report this with env.json",
        )


def pipeline_class(pipeline: PipelineFolder) -> Any:
    import diffusers

    return getattr(diffusers, pipeline.family.pipeline)


# --- ComfyUI takes a LoRA's alpha from tensors named `MODULE.alpha` only, and 1 times the product
# of the matrices without one: the file that diffusers reads, whose alpha is in its metadata, would
# act there at rank / alpha of its strength. Modules of a U-Net have kohya names
# (`lora_unet_down_blocks_0_...`), a transformer's those of diffusers after `transformer.`, which
# ComfyUI maps to its own. Source: ComfyUI's comfy/lora.py and comfy/weight_adapter/lora.py

COMFYUI_FILE = "comfyui.safetensors"
NO_DORA = "a DoRA, which is not written for ComfyUI: it scales by other lengths"
_UNET = {"lora_A": "lora_down", "lora_B": "lora_up"}


def write_comfyui(adapter: Path, out: Path, family: Family) -> int:
    """Writes the adapter of a PEFT folder to the file `out`; returns the number of its modules.

    Raises  UsageError for a family whose adapters ComfyUI does not read
    """
    refuse_unread(family)
    tensors = comfyui_tensors(adapter, family)
    save_file(tensors, out, metadata={"format": "pt", "pipeline": family.pipeline})
    return len({name.rpartition(".lo")[0] for name in tensors if ".lo" in name})


def refuse_unread(family: Family) -> None:
    """Raises  UsageError for a family whose adapters ComfyUI does not read"""
    if family.comfyui_blocker:
        raise UsageError(
            f"comfyui: {family.pipeline}: {family.comfyui_blocker}",
            fix="pytorch_lora_weights.safetensors, in diffusers",
        )


def comfyui_tensors(adapter: Path, family: Family) -> dict[str, Tensor]:
    """name -> F[r in], F[out r] of each module, F the dtype of the adapter, and its alpha, fp32[]:
    a program multiplies by alpha / r, and bf16 would round the 313.53 of rsLoRA to 314.
    """
    settings = read_adapter_settings(adapter)
    if settings.get("use_dora"):
        raise UsageError(f"comfyui: {adapter}: {NO_DORA}", fix=f"{LORA_FILE}, in diffusers")
    if is_lokr(adapter):
        return _lokr_tensors(adapter, settings, family)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, _, side = name.removeprefix(_PEFT_PREFIX).removesuffix(".weight").rpartition(".")
        comfyui_name = _comfyui_name(module, family)
        side = _UNET[side] if family.denoiser == "unet" else side
        tensors[f"{comfyui_name}.{side}.weight"] = tensor
        if side in ("lora_A", "lora_down"):
            rank = len(tensor)
            alpha = _module_setting(module, settings, "alpha_pattern", "lora_alpha")
            tensors[f"{comfyui_name}.alpha"] = torch.tensor(
                alpha * (math.sqrt(rank) if settings.get("use_rslora") else 1.0),
                dtype=torch.float32,
            )
    return tensors


def _module_setting(module: str, settings: Mapping[str, Any], patterns: str, default: str) -> float:
    """A module's alpha or rank, by the pattern that PEFT takes."""
    from peft.utils.other import get_pattern_key

    value_by_pattern: dict[str, float] = settings.get(patterns) or {}
    return float(
        value_by_pattern.get(get_pattern_key(list(value_by_pattern), module), settings[default])
    )


def _comfyui_name(module: str, family: Family) -> str:
    if module.startswith(PREFIX):
        part, inner_name = split_part(module, family)
        number = (
            family.trainable_encoders.index(part) + 1 if len(family.trainable_encoders) > 1 else ""
        )
        return f"lora_te{number}_{inner_name.replace('.', '_')}"
    if family.denoiser == "unet":
        return f"lora_unet_{module.replace('.', '_')}"
    module = f"{family.comfyui_prefix}.{module}"
    for part, comfyui_part in family.comfyui_names.items():
        module = module.replace(part, comfyui_part)
    return module


def _lokr_tensors(adapter: Path, settings: dict[str, Any], family: Family) -> dict[str, Tensor]:
    """The factors with PEFT's scale, alpha / r, in the small one and no alpha: ComfyUI divides an
    alpha by the rank of a factor that is kept as two matrices, and ignores it where both are whole.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, _, side = name.removeprefix(_PEFT_PREFIX).rpartition(".")
        alpha, rank = (
            _module_setting(module, settings, f"{quantity}_pattern", key)
            for quantity, key in (("alpha", "alpha"), ("rank", "r"))
        )
        tensors[f"{_comfyui_name(module, family)}.{side}"] = tensor * (
            alpha / rank if side in ("lokr_w1", "lokr_w1_a") else 1.0
        )
    return tensors
