"""Reads a checkpoint that is a single .safetensors file, such as Pony, Illustrious, or Flux without
its encoders.

The settings and tokenizers are read from a pipeline's folder next to the file. The name of the
folder is the file's name without the ending. If there is no such folder, the settings and
tokenizers are downloaded from the hub. This is possible if diffusers recognises the model family of
the file. The VAE and the text encoders are read from the file too, unless the folder contains their
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...config.kind import PIPELINE_FILE
from ...errors import UsageError
from ...precision.apply import is_kept_in_fp32, names_kept_in_fp32

_FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_model(file: Path, model_class: Any, settings: Path, part: str, dtype: torch.dtype) -> Any:
    """Reads a part of the pipeline (denoiser or VAE) from the file, with the weights in `dtype`.
    Buffers, and weights that the class of this part keeps in fp32, are in fp32 and are not rounded.
    Raises the errors of diffusers, and ValueError if weights are missing in the file.
    """
    try:
        model = model_class.from_single_file(
            _read_checkpoint(file, _parameter_names(model_class, settings, part)),
            config=str(settings),
            subfolder=part,
            local_files_only=True,
            dtype=widest_dtype(file),
        )
    except NotImplementedError:  # a weight that stayed on the meta device
        raise ValueError(f"{file.name} does not have all weights of the {part}") from None
    fp32_names = names_kept_in_fp32(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(
            torch.float32 if is_kept_in_fp32(name, fp32_names) else dtype
        )
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            module, _, last = name.rpartition(".")
            model.get_submodule(module)._buffers[last] = buffer.float()
    # the file's weights are not quantised, even if the settings are those of a quantised denoiser
    model._internal_dict = type(model.config)(
        {key: value for key, value in model.config.items() if key != "quantization_config"}
    )
    return model


UNET_PREFIX = "model.diffusion_model."
# the prefix of files in which tools saved the denoiser alone; diffusers does not know it
_SHORT_PREFIX = "diffusion_model."


def _parameter_names(model_class: Any, settings: Path, part: str) -> set[str]:
    """Returns the names of all tensors of a part, as diffusers names them."""
    config = model_class.load_config(str(settings), subfolder=part, local_files_only=True)
    with torch.device("meta"):
        return set(model_class.from_config(config).state_dict())


def _checkpoint_names(names: Iterable[str], model_names: set[str]) -> dict[str, str]:
    """Maps the names of tensors in a file to the names that diffusers' reader expects. The names
    may begin with a prefix that the reader does not know. If the rest of the names are diffusers'
    own names, the prefix is removed.

    model_names  diffusers' names of the tensors that are read
    """
    names = list(names)
    for prefix in (UNET_PREFIX, _SHORT_PREFIX):
        without_prefix = {
            name: name.removeprefix(prefix) for name in names if name.startswith(prefix)
        }
        if 2 * len(model_names.intersection(without_prefix.values())) > len(model_names):
            return without_prefix
    return {
        name: UNET_PREFIX + name.removeprefix(_SHORT_PREFIX)
        if name.startswith(_SHORT_PREFIX)
        else name
        for name in names
    }


def _read_checkpoint(file: Path, model_names: set[str]) -> str | dict[str, Tensor]:
    """Returns what diffusers' reader gets as its input: the path of the file or, if the reader does
    not know the names of the file's tensors, the tensors under new names.
    """
    checkpoint_names = _checkpoint_names(read_headers(file), model_names)
    if all(name == checkpoint_name for name, checkpoint_name in checkpoint_names.items()):
        return str(file)
    tensors = load_file(file)
    return {renamed: tensors[name] for name, renamed in checkpoint_names.items()}


def refuse_other_family(
    file: Path, kinds: Mapping[str, Any], settings: Path, pipeline: str
) -> None:
    """Raises UsageError if diffusers cannot read the parts from the file. The function uses only
    the names and shapes of the tensors in the file.

    kinds  a mapping from part to class, for the parts that the file contains
    """
    from ...training.console import silence_library_warnings

    headers = read_headers(file)
    for part, kind in kinds.items():
        try:
            with silence_library_warnings():
                names = _checkpoint_names(headers, _parameter_names(kind, settings, part))
                kind.from_single_file(
                    {
                        renamed: torch.empty(headers[name][1], device="meta")
                        for name, renamed in names.items()
                    },
                    config=str(settings),
                    subfolder=part,
                    local_files_only=True,
                    device="meta",
                )
        except Exception as error:  # a file of another family can raise any exception
            message = next(
                (line.strip() for line in str(error).splitlines() if line.strip()),
                type(error).__name__,
            )
            fix = (
                f"the settings of its own family in {file.with_suffix('')}; of a file without"
                " VAE and text encoders their weights too"
            )
            if part == "vae" and not any(name.startswith(_VAE_PREFIXES) for name in headers):
                fix = (
                    "model.vae: the file or the folder of its VAE; of a file without text encoders"
                    f" their weights in {file.with_suffix('')}"
                )
            raise UsageError(
                f"model.name: {file}: diffusers does not read it as the {part} of a {pipeline}:"
                f" {message[:200]}",
                fix=fix,
            ) from error


_VAE_PREFIXES = ("first_stage_model.", "vae.")  # beginnings of the names of the VAE's tensors
# the beginning or a part of a tensor's name -> what a file with such a tensor is
_OTHER_MODELS = {
    "control_model.": "a ControlNet",
    "controlnet_": "a ControlNet",
    "input_hint_block.": "a ControlNet",
    "zero_convs.": "a ControlNet",
    ".lora_down.": "a LoRA",
    ".lora_A.": "a LoRA",
    ".lokr_w1": "a LoKr",
}
# the end of the name of a denoiser's first layer -> input channels -> what such a denoiser is
_OTHER_INPUTS = {
    "input_blocks.0.0.weight": {
        8: "an InstructPix2Pix model (8 input channels: noise, picture before the edit)",
        9: "an inpainting model (9 input channels: noise, mask, masked picture)",
    },
    "img_in.weight": {
        128: "a Flux control model (128 input channels: noise, depth or edges)",
        384: "a Flux Fill model (384 input channels: noise, masked picture, mask)",
    },
}


def refuse_other_models(file: Path) -> None:
    """Raises UsageError for a file that does not contain a denoiser which generates pictures from a
    caption alone. Such files are a ControlNet, a LoRA, or a denoiser that gets pictures or masks as
    additional channels.
    """
    for name, (_, shape) in read_headers(file).items():
        kind = next((kind for part, kind in _OTHER_MODELS.items() if part in name), None)
        for layer, kinds in _OTHER_INPUTS.items():
            if name.endswith(layer) and len(shape) > 1:
                kind = kinds.get(shape[1], kind)
        if kind is None:
            continue
        fix = "a checkpoint that draws from captions"
        if "LoRA" in kind:
            fix = "its base as model.name, and adapter.start_from: this file"
        raise UsageError(f"model.name: {file} is {kind}, and is not trained ({name})", fix=fix)


def find_settings_repository(file: Path) -> str:
    """Returns the repository on the hub that contains the settings for this file. It is found from
    the names of the tensors. Raises UsageError if the model family is unknown.
    """
    from diffusers.loaders.single_file_utils import (
        DIFFUSERS_DEFAULT_PIPELINE_PATHS,
        infer_diffusers_model_type,
    )

    headers = read_headers(file)
    try:
        kind = infer_diffusers_model_type(
            {
                renamed: torch.empty(headers[name][1], device="meta")
                for name, renamed in _checkpoint_names(headers, set()).items()
            }
        )
    except Exception as error:  # diffusers reads tensors that this file may not have
        raise _unknown_family_error(file) from error
    defaults: Any = DIFFUSERS_DEFAULT_PIPELINE_PATHS.get(kind, {})
    if "pretrained_model_name_or_path" not in defaults or (
        kind == "v1" and not any(".input_blocks." in name for name in headers)
    ):
        raise _unknown_family_error(file)
    return str(defaults["pretrained_model_name_or_path"])


def _unknown_family_error(file: Path) -> UsageError:
    return UsageError(
        f"model.name: {file}: diffusers does not know this file's family by its tensors",
        fix=(
            f"a pipeline's folder of that family as {file.with_suffix('')}: {PIPELINE_FILE}, the"
            " settings and tokenizers of its parts"
        ),
    )


def read_headers(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Returns a mapping from the name of each tensor to its dtype and its shape. The dtype has the
    name that the file uses. Raises UsageError.
    """
    if file.suffix != ".safetensors":
        if file.suffix in (".ckpt", ".pt", ".pth", ".bin"):
            reason = "a pickle can run code"
        else:
            reason = "expected one, or a pipeline's folder"
        raise UsageError(
            f"model.name: {file}: not a .safetensors file: {reason}",
            fix="the same checkpoint as .safetensors",
        )
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
            return {
                name: (header.get_dtype(), header.get_shape()) for name, header in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise UsageError(f"model.name: {file}: {str(error).splitlines()[0]}") from None


def widest_dtype(file: Path) -> torch.dtype:
    """Returns the widest dtype of the weights in the file. Raises UsageError if the weights are in
    fp8, or if they are packed (8-bit integers).
    """
    # a tensor without elements is a marker, and its dtype says nothing about the weights
    dtype_names = {
        dtype_name for dtype_name, shape in read_headers(file).values() if 0 not in shape
    }
    if unsupported_dtypes := sorted(
        dtype_name
        for dtype_name in dtype_names
        if dtype_name.startswith("F8") or dtype_name in ("U8", "I8")
    ):
        raise UsageError(
            f"model.name: {file}: {unsupported_dtypes[0]} weights in a single file are not read",
            fix="the bf16 or fp16 file, and precision.base: fp8 or nf4",
        )
    return next(
        (dtype for dtype_name, dtype in _FLOAT_DTYPES.items() if dtype_name in dtype_names),
        torch.float32,
    )


def write_with_unet(
    original: Path, unet: Mapping[str, Tensor], config: Mapping[str, Any], out: Path
) -> bool:
    """Writes a copy of a checkpoint that is a single file. In the copy, `unet` replaces the U-Net.
    The tensors have the same names as in the original file, and diffusers can read these names. If
    the file does not use the names of the original code of Stable Diffusion and SDXL, writes
    nothing and returns False.

    config  the configuration of the U-Net
    """
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    with safe_open(original, framework="pt") as opened:
        metadata = opened.metadata()
        names = opened.keys()
        tensors = {name: opened.get_tensor(name) for name in names}
    if not any(name.startswith(UNET_PREFIX) for name in tensors):
        return False
    unet_tensors = convert_ldm_unet_checkpoint(tensors, dict(config))
    name_by_id = {id(tensor): name for name, tensor in tensors.items()}
    changed_tensors = {
        name_by_id[id(tensor)]: unet[name].reshape(tensor.shape).contiguous()
        for name, tensor in unet_tensors.items()
    }
    save_file({**tensors, **changed_tensors}, out, metadata=metadata)
    return True
