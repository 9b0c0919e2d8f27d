"""Saves the trained adapter or denoiser. An adapter is also saved in the format that diffusers
reads. Loads the saved file in the same way as a user would.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
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
from ...model.adapter_settings import ADAPTER_FILE, read_adapter_config
from ...model.lora_names import PEFT_PREFIX
from ...precision.parts import Part, loading_device
from ...precision.precision import Precision
from ...training.memory.blocks import apply_offload
from .denoiser import install_ops_and_precision, load_frozen_denoiser
from .families import Family
from .pipeline import PipelineFolder
from .text_encoders import PREFIX, attach_encoders, split_part

LORA_FILE = "pytorch_lora_weights.safetensors"
MODEL_FILE = "diffusion_pytorch_model.safetensors"


def save_lora(
    model: Any,
    folder: Path,
    precision: Precision,
    pipeline: PipelineFolder,
    *,
    writes_comfyui_file: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Saves the adapter as a PEFT folder. If the pipeline can load LoRA files, the adapter is also
    saved to a file with diffusers' names for the tensors. The metadata of this file contains the
    rank, alpha and the other settings. Without them, diffusers would use the rank as alpha.

    writes_comfyui_file  whether to write a file for ComfyUI too
    metadata             the entries about the training in the metadata of these files
    """
    from peft import PeftConfig

    save_adapter(model, folder, precision)
    metadata = dict(metadata or {}) | rank_metadata(folder)
    if writes_comfyui_file:
        write_comfyui(folder, folder / COMFYUI_FILE, pipeline.family, metadata)
    if not pipeline.family.loads_lora or is_lokr(folder):
        return
    # inference_mode is off, since otherwise its tensors load in the base's dtype
    settings = PeftConfig.from_pretrained(str(folder)).to_dict() | {"inference_mode": False}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / ADAPTER_FILE).items():
        part, inner_name = split_part(name.removeprefix(PEFT_PREFIX), pipeline.family)
        parts.setdefault(part, {})[inner_name] = tensor
    arguments: dict[str, Any] = {}
    for part, tensors in parts.items():
        # names are without `text_model.`, since diffusers removes it for an encoder without that
        # level; PEFT also matches the ends of names
        names = sorted(
            {name.rpartition(".lora_")[0].removeprefix("text_model.") for name in tensors}
        )
        if len(parts) == 1:
            part_settings = settings
        else:
            part_settings = _part_settings(settings, part, pipeline.family) | {
                "target_modules": names
            }
        arguments |= {
            f"{part}_lora_layers": tensors,
            f"{part}_lora_adapter_metadata": part_settings,
        }
    pipeline_class(pipeline).save_lora_weights(folder, **arguments)
    add_metadata(folder / LORA_FILE, metadata)


def _part_settings(settings: Mapping[str, Any], part: str, family: Family) -> dict[str, Any]:
    """Returns the settings of an adapter for one part of the pipeline. A pattern for ranks or
    alphas may be the full name of a module (`^NAME`). Then only the settings of the part that
    contains this module get the pattern, and the pattern uses the name that the module has within
    this part.
    """
    changed = dict(settings)
    for key in ("rank_pattern", "alpha_pattern"):
        changed[key] = {}
        for pattern, value in (settings.get(key) or {}).items():
            if not pattern.startswith("^"):
                changed[key][pattern] = value
                continue
            pattern_part, name = split_part(pattern[1:], family)
            if pattern_part == part:
                changed[key][f"^{name.removeprefix('text_model.')}"] = value
    return changed


def read_adapter_settings(adapter: Path, setting: str = "adapter") -> dict[str, Any]:
    """Reads the settings of a PEFT folder and checks them. Raises UsageError."""
    return read_adapter_config(adapter, setting)


def rank_metadata(adapter: Path) -> dict[str, str]:
    """Returns the rank and the alpha of a PEFT folder, under the names that kohya's scripts use in
    a file's metadata. If modules have different ranks, the rank is `Dynamic`, as in files of
    kohya's tools.
    """
    settings = read_adapter_settings(adapter)
    quantities = {
        "ss_network_dim": ("rank_pattern", settings.get("r")),
        "ss_network_alpha": ("alpha_pattern", settings.get("lora_alpha", settings.get("alpha"))),
    }
    return {
        key: "Dynamic" if settings.get(patterns) else f"{value:g}"
        for key, (patterns, value) in quantities.items()
        if value is not None
    }


def read_training_facts(file: Path) -> dict[str, str]:
    """Returns what the metadata of a LoRA file says about the training. The result is empty if
    there is no such file.
    """
    if not file.is_file():
        return {}
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
    return {key: value for key, value in metadata.items() if key.startswith(_FACT_PREFIXES)}


_FACT_PREFIXES = ("ss_", "modelspec.")
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header


def add_metadata(file: Path, metadata: Mapping[str, str]) -> None:
    """Adds entries to the metadata of a safetensors file, and sorts them. The library writes
    entries in an order that differs between processes, so without sorting, two equal runs would
    write different files.
    """
    target = file.with_name(f"{file.name}.new")
    with file.open("rb") as old, target.open("wb") as new:
        header = json.loads(old.read(int.from_bytes(old.read(_LENGTH_BYTES), "little")))
        entries = header.pop("__metadata__", {}) | dict(metadata)
        header = {"__metadata__": dict(sorted(entries.items())), **header}
        content = json.dumps(header, separators=(",", ":")).encode()
        content += b" " * (-len(content) % _LENGTH_BYTES)
        new.write(len(content).to_bytes(_LENGTH_BYTES, "little"))
        new.write(content)
        shutil.copyfileobj(old, new, 1 << 20)
    target.replace(file)


def is_lokr(adapter: Path) -> bool:
    """Returns True if a PEFT folder contains a LoKr adapter. PEFT loads such an adapter, because
    most pipelines of diffusers cannot read LoKr files.
    """
    return read_adapter_settings(adapter).get("peft_type") == "LOKR"


def save_denoiser(model: Any, folder: Path, precision: Precision) -> None:
    """Saves the denoiser as a folder that diffusers reads, in the dtype of
    `precision.save_model`.
    """
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
    """Loads the result of a run in the run's precision. The result is a denoiser or an adapter. For
    an adapter, its base denoiser is loaded too. An adapter is loaded with the pipeline's method
    `load_lora_weights`, or with PEFT if the pipeline has no such method.

    Raises  RunError SV001 if a tensor of the file is missing in the model or is different there;
            UsageError if the adapter belongs to another model
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
    """Wraps a denoiser to which diffusers has attached an adapter. The names of its parameters are
    then the same as with PEFT's wrapper.
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
    """Returns the shape of a linear layer's weight. When diffusers loads an adapter for Flux, it
    compares the adapter's shapes with this shape. A packed weight is stored as bytes, so its shape
    is read from its quantisation state.
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
    """Loads the adapter with diffusers and checks the loaded tensors. Raises RunError SV001.

    The check is needed for two reasons. If a tensor is missing in the file, diffusers leaves the
    model's tensor uninitialised. If a tensor of the file belongs to no part of the model, diffusers
    ignores it. diffusers also casts the adapter to the denoiser's dtype. So afterwards, each loaded
    tensor is replaced by the tensor from the file.

    encoders  the text encoders that the run trained, by the names of their parts; they are not in
              the denoiser yet
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
        f"{pipeline.family.denoiser}.{_saved_name(name)}": p
        for name, p in denoiser.named_parameters()
        if ".lora_" in name
    }
    for part, encoder in encoders.items():
        named_parameters = (
            (".".join(split_part(f"{PREFIX}{part}.{_saved_name(name)}", pipeline.family)), p)
            for name, p in encoder.named_parameters()
        )
        loaded |= {name: p for name, p in named_parameters if ".lora_" in name}
    _refuse_differences(
        saved,
        {name: p.detach() for name, p in loaded.items()},
        f"{folder / LORA_FILE}: load_lora_weights",
    )
    peft_file_tensors = load_file(folder / ADAPTER_FILE)
    peft_tensors = {
        ".".join(split_part(name.removeprefix(PEFT_PREFIX), pipeline.family)): t
        for name, t in peft_file_tensors.items()
    }
    _refuse_differences(saved, peft_tensors, f"{folder}: the PEFT file")
    for name, parameter in loaded.items():
        parameter.data = saved[name].to(parameter.device)
        parameter.requires_grad = True


def refuse_adapter_of_another_model(
    denoiser: nn.Module, folder: Path, setting: str = "adapter"
) -> None:
    """Raises UsageError if a matrix in a PEFT folder belongs to no module of this denoiser, or if
    the module has another size.

    denoiser  a denoiser with its weights, or on the meta device
    """
    modules = dict(denoiser.named_modules())
    for name, shape in read_shapes(folder / ADAPTER_FILE, setting).items():
        path, _, side = name.removesuffix(".weight").rpartition(".")
        path = path.removeprefix(PEFT_PREFIX)
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
    """Returns the shapes of the tensors in a file, by name. Raises UsageError."""
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
    """Returns the name under which PEFT saves a parameter of an adapter. PEFT leaves out the
    adapter's name `default`, and the ending `.weight` of DoRA's magnitude vector.
    """
    return name.replace(".default.", ".").replace(
        ".lora_magnitude_vector.weight", ".lora_magnitude_vector"
    )


def _refuse_differences(saved: dict[str, Tensor], loaded: dict[str, Tensor], source: str) -> None:
    different_names = sorted(set(saved) ^ set(loaded)) or [
        name
        for name in saved
        if not torch.equal(saved[name].to(loaded[name].dtype), loaded[name].cpu())
    ]
    if different_names:
        raise RunError(
            f"{source} does not agree with what was saved: {different_names[0]} ({len(different_names)} such)",
            code="SV001",
            fix="the checkpoints are untouched; report this with env.json",
        )


def pipeline_class(pipeline: PipelineFolder) -> Any:
    import diffusers

    return getattr(diffusers, pipeline.family.pipeline)


# --- files for ComfyUI. ComfyUI reads a LoRA's alpha only from tensors named `MODULE.alpha`;
# without such a tensor it multiplies the product of the matrices by 1. The file for diffusers has
# its alpha in the metadata, so ComfyUI would multiply the adapter's effect by rank / alpha. Modules
# of a U-Net have kohya's names (`lora_unet_down_blocks_0_...`). Modules of a transformer have
# diffusers' names after `transformer.`, which ComfyUI translates. If ComfyUI knows no such names
# for a model, the modules have ComfyUI's own names after `diffusion_model.`. Source: ComfyUI's
# comfy/lora.py, comfy/utils.py and comfy/weight_adapter/lora.py

COMFYUI_FILE = "comfyui.safetensors"
NO_DORA = "a DoRA, which is not written for ComfyUI: it scales by other lengths"
NO_FUSED_LOKR = (
    "ComfyUI stores queries, keys and values in one matrix, which has no exact LoKr of the three"
)
_UNET = {"lora_A": "lora_down", "lora_B": "lora_up"}


def write_comfyui(
    adapter: Path, out: Path, family: Family, metadata: Mapping[str, str] | None = None
) -> int:
    """Writes the adapter of a PEFT folder to the file `out`, and returns the number of its modules.

    metadata  the entries about the training; by default they are read from the folder's file for
              diffusers

    Raises  UsageError for a family whose adapters ComfyUI does not read
    """
    refuse_without_comfyui_support(family, is_lokr=is_lokr(adapter))
    tensors = comfyui_tensors(adapter, family)
    save_file(tensors, out)
    if metadata is None:
        metadata = read_training_facts(adapter / LORA_FILE)
    add_metadata(out, {"format": "pt", "pipeline": family.pipeline, **metadata})
    names = read_shapes(adapter / ADAPTER_FILE, "adapter")
    return len({name.rpartition(".lo")[0] for name in names if ".lo" in name})


def refuse_without_comfyui_support(family: Family, *, is_lokr: bool) -> None:
    """Raises UsageError for a family whose adapters ComfyUI does not read.

    is_lokr  whether the adapter is a LoKr
    """
    if family.comfyui_blocker:
        raise UsageError(
            f"comfyui: {family.pipeline}: {family.comfyui_blocker}",
            fix=f"{LORA_FILE}, in diffusers",
        )
    if is_lokr and family.comfyui_fused:
        raise UsageError(
            f"comfyui: {family.pipeline}: {NO_FUSED_LOKR}",
            fix=f"{ADAPTER_FILE}, in PEFT; or adapter.kind: lora",
        )


def comfyui_tensors(adapter: Path, family: Family) -> dict[str, Tensor]:
    """Returns the tensors of the ComfyUI file, by name. For each module, there are two matrices F[r
    in] and F[out r] in the adapter's dtype F, and alpha as fp32[]. ComfyUI multiplies by alpha / r.
    alpha is stored in fp32, because bf16 would round the alpha of an rsLoRA adapter, for example
    313.53 to 314.
    """
    settings = read_adapter_settings(adapter)
    if settings.get("use_dora"):
        raise UsageError(f"comfyui: {adapter}: {NO_DORA}", fix=f"{LORA_FILE}, in diffusers")
    if is_lokr(adapter):
        return _lokr_tensors(adapter, settings, family)
    tensors: dict[str, Tensor] = {}
    peft_tensors = load_file(adapter / ADAPTER_FILE)
    if family.comfyui_fused:
        peft_tensors, tensors = _fuse_modules(peft_tensors, settings, family)
    for name, tensor in peft_tensors.items():
        module, _, side = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".")
        file_name = comfyui_name(module, family)
        side = _UNET[side] if family.denoiser == "unet" else side
        tensors[f"{file_name}.{side}.weight"] = tensor
        if side in ("lora_A", "lora_down"):
            alpha = _comfyui_alpha(module, len(tensor), settings)
            tensors[f"{file_name}.alpha"] = torch.tensor(alpha, dtype=torch.float32)
    return tensors


def _comfyui_alpha(module: str, rank: int, settings: Mapping[str, Any]) -> float:
    """Returns the alpha of a module, so that alpha / rank is the scale of the module in PEFT."""
    alpha = module_setting(module, settings, "alpha_pattern", "lora_alpha")
    return alpha * (math.sqrt(rank) if settings.get("use_rslora") else 1.0)


def _fuse_modules(
    tensors: dict[str, Tensor], settings: Mapping[str, Any], family: Family
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fuses the adapters of modules whose weights ComfyUI stores in one matrix
    (`family.comfyui_fused`). The fused A has the rows of every A, and the fused B is a block
    diagonal matrix of every B, so that the change of the weight is exactly the same. Modules
    without an adapter have rows of zeros in the fused B.

    tensors   the tensors of the PEFT file
    Returns   the tensors that are not fused, with their names in the PEFT file, and the fused
              tensors with their names in the file for ComfyUI
    """
    other_tensors = dict(tensors)
    fused_tensors: dict[str, Tensor] = {}
    for fused_end, part_ends in family.comfyui_fused.items():
        pattern = re.compile(
            rf"(?P<block>.*)({'|'.join(map(re.escape, part_ends))})\.lora_A\.weight"
        )
        matches = [match for name in tensors if (match := pattern.fullmatch(name))]
        for block in dict.fromkeys(match["block"] for match in matches):
            modules = [f"{block}{end}" for end in part_ends]
            missing = [m for m in modules if f"{m}.lora_A.weight" not in tensors]
            if missing and family.fuses_unequal_outputs:
                raise UsageError(
                    f"comfyui: {family.pipeline}: ComfyUI stores queries, keys and values in one"
                    f" matrix, and {missing[0].removeprefix(PEFT_PREFIX)} has no adapter",
                    fix="adapter.targets: all-linear, or all three",
                )
            fused_name = f"{block.removeprefix(PEFT_PREFIX)}{fused_end}"
            fused_tensors |= _fuse_parts(
                [other_tensors.pop(f"{module}.lora_A.weight", None) for module in modules],
                [other_tensors.pop(f"{module}.lora_B.weight", None) for module in modules],
                [module.removeprefix(PEFT_PREFIX) for module in modules],
                settings,
                comfyui_name(fused_name, family),
            )
    return other_tensors, fused_tensors


def _fuse_parts(
    a_parts: Sequence[Tensor | None],
    b_parts: Sequence[Tensor | None],
    modules: Sequence[str],
    settings: Mapping[str, Any],
    name: str,
) -> dict[str, Tensor]:
    """Returns the tensors of one fused module for ComfyUI, with the name `name`. If the parts have
    different scales, B is multiplied by them in fp32.
    """
    known_a = [a for a in a_parts if a is not None]
    rank = sum(map(len, known_a))
    outputs = next(len(b) for b in b_parts if b is not None)
    sizes = [outputs if b is None else len(b) for b in b_parts]
    scales = [
        _comfyui_alpha(module, len(a), settings) / len(a)
        for module, a in zip(modules, a_parts, strict=True)
        if a is not None
    ]
    has_one_scale = len(set(scales)) == 1
    remaining_scales = iter(scales)
    columns = []
    for part, b in enumerate(b_parts):
        if b is None:
            continue
        scale = next(remaining_scales)
        rows = b if has_one_scale else b.float() * scale
        column = rows.new_zeros(sum(sizes), b.shape[1])
        start = sum(sizes[:part])
        column[start : start + len(rows)] = rows
        columns.append(column)
    alpha = rank * scales[0] if has_one_scale else float(rank)
    return {
        f"{name}.lora_A.weight": torch.cat(known_a),
        f"{name}.lora_B.weight": torch.cat(columns, 1),
        f"{name}.alpha": torch.tensor(alpha, dtype=torch.float32),
    }


def module_setting(module: str, settings: Mapping[str, Any], patterns: str, default: str) -> float:
    """Returns the alpha or the rank of a module. If one of `patterns` applies to this module in
    PEFT, returns the value of this pattern. Otherwise returns the default.
    """
    from peft.utils.other import get_pattern_key

    value_by_pattern: dict[str, float] = settings.get(patterns) or {}
    return float(
        value_by_pattern.get(get_pattern_key(list(value_by_pattern), module), settings[default])
    )


def comfyui_name(module: str, family: Family) -> str:
    """Returns the name that a module of the adapted model has in a file for ComfyUI."""
    if module.startswith(PREFIX):
        part, inner_name = split_part(module, family)
        number = (
            family.trainable_encoders.index(part) + 1 if len(family.trainable_encoders) > 1 else ""
        )
        return f"lora_te{number}_{inner_name.replace('.', '_')}"
    if family.denoiser == "unet":
        return f"lora_unet_{module.replace('.', '_')}"
    return f"{family.comfyui_prefix}.{replace_parts(module, family.comfyui_names)}"


def replace_parts(name: str, other_names: Mapping[str, str]) -> str:
    """Replaces parts of a module's name, in the order of the mapping."""
    for part, other_part in other_names.items():
        name = name.replace(part, other_part)
    return name


def _lokr_tensors(adapter: Path, settings: dict[str, Any], family: Family) -> dict[str, Tensor]:
    """Returns the factors of a LoKr adapter for ComfyUI. The smaller of the two factors is
    multiplied by PEFT's scale alpha / r, and no alpha is written, because ComfyUI does not use
    alpha as PEFT does. ComfyUI divides alpha by the rank of the factor that is stored as two
    matrices. If neither factor is stored as two matrices, ComfyUI ignores alpha.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(adapter / ADAPTER_FILE).items():
        module, _, side = name.removeprefix(PEFT_PREFIX).rpartition(".")
        alpha, rank = (
            module_setting(module, settings, f"{quantity}_pattern", key)
            for quantity, key in (("alpha", "alpha"), ("rank", "r"))
        )
        tensors[f"{comfyui_name(module, family)}.{side}"] = tensor * (
            alpha / rank if side in ("lokr_w1", "lokr_w1_a") else 1.0
        )
    return tensors
