"""Reads a LoRA from the file that `adapter.start_from` names, and writes it as a PEFT folder, from
which training starts.

A module of the model has different names in the files of diffusers, of PEFT, of kohya's scripts and
of ComfyUI. `comfyui_name` returns ComfyUI's name, and is also used to write files. Some families
list the names of the original model, which musubi-tuner uses (`original_names`). Other names of
original models, as kohya's scripts use them for SDXL and Flux, are converted by the pipeline's own
`lora_state_dict`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...config.schema import RunConfig
from ...errors import UsageError
from ...model.adapter_settings import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from ...model.lora_names import (
    ALPHA_SUFFIX,
    OTHER_KINDS,
    PAIR_SUFFIXES,
    PEFT_PREFIX,
    detect_lora_format,
)
from ...wording import first_line, pluralise
from .denoiser import outline_base
from .families import Family
from .pipeline import PipelineFolder
from .result import comfyui_name, module_setting, pipeline_class, replace_parts
from .text_encoders import PREFIX, split_part

SETTING = "adapter.start_from"
_NAMES_SHOWN = 3  # names of tensors that a message lists


@dataclass(frozen=True)
class LoraModule:
    """`alpha / rank * b @ a` is added to the weight of one module.

    a  F[r in], or F[r in h w] for a convolution
    b  F[out r]
    """

    a: Tensor
    b: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class LoraFile:
    """The content of a LoRA file, with the names that the modules have in the model.

    has_alphas  whether the file contains alphas; without them alpha is the rank
    """

    path: Path
    format: str
    modules: Mapping[str, LoraModule]
    has_alphas: bool

    def __str__(self) -> str:
        ranks = _describe_range({module.rank for module in self.modules.values()})
        alphas = _describe_range({module.alpha for module in self.modules.values()})
        alpha_text = f"alpha {alphas}" if self.has_alphas else "no alpha in the file: alpha = rank"
        return (
            f"{SETTING}: {self.path.name} ({self.format}):"
            f" {pluralise(len(self.modules), 'module')}, rank {ranks}, {alpha_text}"
        )

    def write_peft_folder(self, folder: Path) -> None:
        """Writes the adapter as a PEFT folder. The most frequent rank and the most frequent alpha
        are the defaults. Modules with another rank or alpha have an entry in `rank_pattern` or
        `alpha_pattern`.
        """
        from peft import LoraConfig

        ranks = {name: module.rank for name, module in self.modules.items()}
        alphas = {name: module.alpha for name, module in self.modules.items()}
        rank = Counter(ranks.values()).most_common(1)[0][0]
        alpha = Counter(alphas.values()).most_common(1)[0][0]
        settings = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT takes a float, its annotation says int
            target_modules=sorted(self.modules),
            rank_pattern={f"^{name}": r for name, r in ranks.items() if r != rank},
            alpha_pattern={f"^{name}": a for name, a in alphas.items() if a != alpha},
        )
        content = settings.to_dict() | {"target_modules": sorted(self.modules)}
        tensors = {}
        for name, module in self.modules.items():
            # copies, because modules from one fused layer share their matrix A
            tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = module.a.contiguous().clone()
            tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = module.b.contiguous().clone()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG_FILE).write_text(
            json.dumps(content, indent=2) + "\n", encoding="utf-8"
        )


def read_lora_file(path: Path, pipeline: PipelineFolder, config: RunConfig) -> LoraFile:
    """Reads the LoRA of a file for the model of a run. Raises UsageError for a file that cannot be
    read, for an adapter that is not a LoRA, and for tensors that belong to no module.
    """
    tensors, metadata = _read_tensors(path)
    family = pipeline.family
    if family.trainable_encoders:
        # the encoders of the file are found even if they are not trained; a later check says so
        adapter = config.adapter.model_copy(update={"text_encoders": True})
        config = config.model_copy(update={"adapter": adapter})
    layers = _adaptable_layers(outline_base(pipeline, config))
    modules_by_name: dict[str, tuple[str, ...]] = {}
    for module in layers:
        for file_name in _file_names(module, family):
            modules_by_name[file_name] = (module,)
    modules_by_name.update(_fused_modules(layers, family))
    sizes = {name: len(_weight(layer)) for name, layer in layers.items()}
    pairs, rest = _match(tensors, modules_by_name, sizes)
    if rest:
        converted = _convert_by_diffusers(path, rest, pipeline)
        more_pairs, rest = _match(converted, modules_by_name, sizes)
        pairs |= more_pairs
    if rest:
        _refuse_unknown(path, list(rest), family.pipeline)
    has_alphas = any(name.endswith(ALPHA_SUFFIX) for name in tensors)
    settings = _read_adapter_metadata(path, metadata)
    modules = {}
    for name, (a, b, alpha) in sorted(pairs.items()):
        if alpha is None:
            alpha = _alpha_from_metadata(settings, name, len(a), family)
        modules[name] = _shaped_module(path, name, layers[name], a, b, alpha)
    return LoraFile(
        path, detect_lora_format(tensors, metadata), modules, has_alphas or bool(settings)
    )


def _describe_range(numbers: set[int] | set[float]) -> str:
    if len(numbers) == 1:
        return f"{next(iter(numbers)):g}"
    return f"{min(numbers):g} to {max(numbers):g}"


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors and the metadata of a file. Raises UsageError."""
    if path.suffix != ".safetensors":
        raise UsageError(
            f"{SETTING}: {path}: expected a .safetensors file or a PEFT folder",
            fix="the same LoRA as .safetensors; a pickle can run code",
        )
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{SETTING}: {path}: {first_line(error)}") from None
    for name in tensors:
        for part, kind in OTHER_KINDS.items():
            if part in name:
                raise UsageError(
                    f"{SETTING}: {path} is a {kind} ({name}), and only a LoRA is read from a file",
                    fix="the PEFT folder of the run that trained it",
                )
    return tensors, metadata


def _adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
    }


def _file_names(module: str, family: Family) -> Iterator[str]:
    """Yields the names that a module of the model has in the files of several programs."""
    yield f"{PEFT_PREFIX}{module}"
    yield comfyui_name(module, family)
    if module.startswith(PREFIX):
        part, inner_name = split_part(module, family)
        yield f"{part}.{inner_name}"
        yield f"{part}.{inner_name.removeprefix('text_model.')}"
        return
    yield module
    yield f"{family.denoiser}.{module}"
    yield f"lora_transformer_{module.replace('.', '_')}"
    yield from _original_file_names(module)
    yield from _original_file_names(_original_name(module, family))


def _original_name(module: str, family: Family) -> str:
    """Returns the name of a module in the original model, if the family lists other names."""
    return replace_parts(module, family.original_names or family.comfyui_names)


def _original_file_names(name: str) -> Iterator[str]:
    """Yields the names of a module in the files of ComfyUI and of kohya's scripts, which use the
    module's name in the original model.
    """
    yield f"diffusion_model.{name}"
    yield f"lora_unet_{name.replace('.', '_')}"


def _fused_modules(layers: Mapping[str, nn.Module], family: Family) -> dict[str, tuple[str, ...]]:
    """Returns the modules whose weights are one matrix in the original model, by the names that this
    matrix has in files.
    """
    modules_by_name = {}
    for fused_end, part_ends in family.comfyui_fused.items():
        for module in layers:
            if not module.endswith(part_ends[0]):
                continue
            block = module.removesuffix(part_ends[0])
            parts = tuple(f"{block}{end}" for end in part_ends)
            for name in _original_file_names(_original_name(f"{block}{fused_end}", family)):
                modules_by_name[name] = parts
    return modules_by_name


# (A, B, alpha); alpha is None if the file does not have it
_Pair = tuple[Tensor, Tensor, float | None]


def _match(
    tensors: Mapping[str, Tensor],
    modules_by_name: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int],
) -> tuple[dict[str, _Pair], dict[str, Tensor]]:
    """Returns the two matrices and the alpha (None if there is none) of each module, and the
    tensors that belong to no module. Modules that are fused in the file have the same matrix A; each
    of them gets its rows of the matrix B.

    sizes  the number of outputs of each module
    """
    rest = dict(tensors)
    pairs: dict[str, _Pair] = {}
    for name in tensors:
        for a_suffix, b_suffix in PAIR_SUFFIXES:
            file_name = name.removesuffix(a_suffix)
            modules = modules_by_name.get(file_name)
            b_name = f"{file_name}{b_suffix}"
            if file_name == name or modules is None or b_name not in rest:
                continue
            alpha = rest.pop(f"{file_name}{ALPHA_SUFFIX}", None)
            a = rest.pop(name)
            b_parts = _split_rows(rest.pop(b_name), [sizes[module] for module in modules])
            for module, b in zip(modules, b_parts, strict=True):
                pairs[module] = (a, b, None if alpha is None else float(alpha))
    return pairs, rest


def _split_rows(b: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Splits the matrix B of fused modules. If it has another size, `_shaped_module` raises."""
    return b.split(sizes) if len(b) == sum(sizes) else b.tensor_split(len(sizes))


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _convert_by_diffusers(
    path: Path, tensors: Mapping[str, Tensor], pipeline: PipelineFolder
) -> dict[str, Tensor]:
    """Converts the names of the original models to the names that diffusers uses. Returns the
    tensors unchanged if the pipeline cannot read LoRA files. The matrices are in fp32, because some
    converters multiply them by alpha / rank.
    """
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    from ...training.console import silence_library_warnings

    if not pipeline.family.loads_lora:
        return dict(tensors)
    config = pipeline.config(pipeline.denoiser_part)
    try:
        with silence_library_warnings():
            result = pipeline_class(pipeline).lora_state_dict(
                {name: tensor.float() for name, tensor in tensors.items()},
                unet_config=SimpleNamespace(**config),
                return_alphas=True,
            )
    except Exception as error:  # a converter can raise any exception for names it does not know
        _refuse_unknown(path, list(tensors), pipeline.family.pipeline, error)
    converted, alphas = result if isinstance(result, tuple) else (result, None)
    if pipeline.family.denoiser == "unet":
        converted = convert_unet_state_dict_to_peft(converted)
    for name, alpha in (alphas or {}).items():
        # an alpha has the name of its module, or that of its first matrix
        matrix = name.removesuffix(ALPHA_SUFFIX)
        if not matrix.endswith(".weight"):
            matrix = f"{matrix}.lora.down.weight"
        (matrix,) = convert_unet_state_dict_to_peft({matrix: None})
        module = matrix.removesuffix(".lora_A.weight")
        converted[f"{module}{ALPHA_SUFFIX}"] = torch.tensor(float(alpha))
    return dict(converted)


def _refuse_unknown(
    path: Path, names: list[str], pipeline: str, error: Exception | None = None
) -> None:
    name_list = ", ".join(sorted(names)[:_NAMES_SHOWN])
    if len(names) > _NAMES_SHOWN:
        name_list += f", ... ({len(names)} such)"
    raise UsageError(
        f"{SETTING}: {path}: these tensors match nothing in this {pipeline}: {name_list}",
        fix="the model that the LoRA was trained on, or a LoRA of this model",
    ) from error


def _read_adapter_metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings of PEFT that diffusers writes into a file. Each key begins with the part
    of the pipeline, as in `transformer.lora_alpha`. Raises UsageError.
    """
    text = metadata.get("lora_adapter_metadata")
    if text is None:
        return {}
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise UsageError(f"{SETTING}: {path}: its lora_adapter_metadata cannot be read")
    return settings


def _alpha_from_metadata(
    settings: Mapping[str, Any], module: str, rank: int, family: Family
) -> float:
    """Returns the alpha that the file's metadata contains for a module, or the rank if the metadata
    contains no alpha.
    """
    part, inner_name = split_part(module, family)
    prefix = f"{part}."
    part_settings = {
        key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)
    }
    if "lora_alpha" not in part_settings:
        return float(rank)
    alpha = module_setting(inner_name, part_settings, "alpha_pattern", "lora_alpha")
    if part_settings.get("use_rslora"):
        return alpha * math.sqrt(rank)
    return alpha


def _shaped_module(
    path: Path, name: str, layer: nn.Module, a: Tensor, b: Tensor, alpha: float
) -> LoraModule:
    """Returns the matrices of a module in the shapes that they have in PEFT. Raises UsageError for
    sizes that do not fit the layer.
    """
    weight = _weight(layer)
    rank = len(a)
    a_shape = (rank, *weight.shape[1:])
    b_shape = (len(weight), rank, *(1 for _ in weight.shape[2:]))
    if a.numel() != math.prod(a_shape) or b.numel() != math.prod(b_shape):
        raise UsageError(
            f"{SETTING}: {path}: {name}: matrices of {list(a.shape)} and {list(b.shape)}, and the"
            f" weight is {list(weight.shape)}",
            fix="the model that the LoRA was trained on, or a LoRA of this model",
        )
    return LoraModule(a.reshape(a_shape), b.reshape(b_shape), alpha)
