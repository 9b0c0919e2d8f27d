"""Finds out whether a base model is already quantised, by which library and to which format. Also
checks whether the quantisation agrees with the declared precision.

The module reads this from the configuration of a saved model before it is loaded, or from the
layers of a loaded model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..dtypes import format_dtype
from ..errors import UsageError
from .apply import inner_model
from .packing import DTYPES_ON_LOAD, PACKED_DTYPES, UNREAD_FIX, Packing, UnreadPacking, read_packing
from .precision import Precision
from .vision import LANGUAGE, vision_parts

CONSENT_KEY = "model.allow_unquantised"
# a larger share of matrices without quantisation is reported
MAX_UNQUANTISED_SHARE = 0.10


@dataclass(frozen=True)
class Quantisation:
    """Describes how a base model is quantised.

    library           the library's name in transformers
    weight_format     nf4, fp4, another dtype of packed weights, or the name of the library
    compute, storage  the dtypes of matrix products and of stored numbers; None if unknown
    packing           how the weights of the checkpoint are packed, if its files are read
    unread_reason     the reason why the checkpoint's files are not read
    is_loaded         whether this describes a loaded model, whose layers are packed
    """

    library: str
    weight_format: str
    compute: str | None = None
    storage: str | None = None
    is_double_quantised: bool | None = None
    packing: Packing | None = None
    unread_reason: str = ""
    is_loaded: bool = False

    def __str__(self) -> str:
        parts = [
            self.weight_format
            if self.library == self.weight_format
            else f"{self.weight_format} by {self.library}"
        ]
        if self.is_loaded:
            parts = [f"{self.weight_format}, as its files have it"]
        if self.packing is not None:
            parts.append(self.packing.layout)
        if self.is_double_quantised is not None:
            parts.append("double-quantised" if self.is_double_quantised else "not double-quantised")
        if self.compute:
            parts.append(f"products in {self.compute}")
        if self.storage not in (None, "uint8", "int8"):
            parts.append(f"stored in {self.storage}")
        return ", ".join(parts)


def quantisation_from_config(config: Any) -> Quantisation | None:
    """Reads the quantisation from a transformers configuration. Returns None for a model that is
    not quantised.
    """
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else None
    settings = getattr(config, "quantization_config", None) or getattr(
        text_config, "quantization_config", None
    )
    if settings is None:
        return None
    return quantisation_from_settings(
        settings if isinstance(settings, Mapping) else settings.to_dict()
    )


def quantisation_from_config_file(settings: Mapping[str, Any]) -> Quantisation | None:
    """Reads the quantisation from the content of config.json, where it may be part of
    `text_config`. Returns None for a model that is not quantised.
    """
    text_settings = settings.get("text_config")
    for section in (settings, text_settings if isinstance(text_settings, dict) else {}):
        value = section.get("quantization_config")
        if isinstance(value, dict):
            return quantisation_from_settings(value)
    return None


def quantisation_from_settings(settings: Mapping[str, Any]) -> Quantisation:
    """Reads the quantisation from `quantization_config`."""
    method = settings.get("quant_method", "unknown")
    library = str(getattr(method, "value", method)).lower()
    if library != "bitsandbytes" or settings.get("load_in_8bit"):
        try:
            packing = read_packing(settings)
        except UnreadPacking as reason:
            return Quantisation(library, library, unread_reason=str(reason))
        return Quantisation(library, packing.dtype_name, packing=packing)
    return Quantisation(
        library,
        str(settings.get("bnb_4bit_quant_type", "fp4")),
        compute=_dtype_name(settings.get("bnb_4bit_compute_dtype")),
        storage=_dtype_name(settings.get("bnb_4bit_quant_storage")),
        is_double_quantised=bool(settings.get("bnb_4bit_use_double_quant")),
    )


def detect_quantisation(model: nn.Module) -> Quantisation | None:
    """Finds the quantisation of a loaded model. This is the format that most of its layers have."""
    counts: Counter[Quantisation] = Counter()
    for module in model.modules():
        weight = module._parameters.get("weight")
        state = getattr(weight, "quant_state", None)
        # stacked experts have packed parameters too, under other names
        packed_names = [
            packed_name
            for p in module._parameters.values()
            if (packed_name := getattr(getattr(p, "quant_state", None), "dtype_name", None))
        ]
        if packed_names:
            counts[Quantisation("", packed_names[0], is_loaded=True)] += len(packed_names)
        elif state is not None and hasattr(module, "compute_dtype"):
            compute = None if module.compute_dtype is None else _dtype_name(module.compute_dtype)
            assert weight is not None
            counts[
                Quantisation(
                    "bitsandbytes",
                    state.quant_type,
                    compute,
                    _dtype_name(weight.dtype),
                    state.nested,
                )
            ] += 1
        elif type(weight).__name__ == "Int8Params":
            counts[Quantisation("bitsandbytes", "int8")] += 1
    if counts:
        return counts.most_common(1)[0][0]
    return quantisation_from_config(getattr(model, "config", None))


def check_base(
    quantisation: Quantisation | None, precision: Precision, model_name: str
) -> list[str]:
    """If the base model was saved quantised, returns the lines to print before training starts.
    Returns an empty list for other base models.

    Raises  UsageError if the base model does not agree with `precision`
    """
    if quantisation is None:
        refuse_unquantisable(precision.base, f"model {model_name}")
        return []
    if quantisation.unread_reason:
        raise UsageError(f"model {model_name}: {quantisation.unread_reason}", fix=UNREAD_FIX)
    if quantisation.weight_format not in ("nf4", *PACKED_DTYPES):
        reason = f"no precision declares {quantisation.weight_format}: its error is a third larger than nf4's"
        raise UsageError(
            f"model {model_name}: its weights are {quantisation.weight_format}, and {reason}",
            fix=UNREAD_FIX,
        )
    if precision.base != quantisation.weight_format:
        fix = f"precision.base: {quantisation.weight_format}, or precision.preset: auto without precision.base"
        raise UsageError(
            f"model {model_name}: its weights are {quantisation.weight_format} already, declared base"
            f" {precision.base}",
            fix=fix,
        )
    notes = [f"the base came quantised: {quantisation}"]
    if quantisation.compute not in (None, precision.compute):
        notes[0] += f"; here products are in {precision.compute}, as declared"
    if quantisation.packing is not None and quantisation.packing.rounds_activations:
        notes[0] += "; its rounding of activations is for serving and is no part of training"
    return notes


def refuse_unquantisable(base: str, model: str) -> None:
    """Raises UsageError if models cannot be quantised to the dtype `base` when they are loaded."""
    if base in PACKED_DTYPES and base not in DTYPES_ON_LOAD:
        raise UsageError(
            f"{model}: its weights are not quantised, declared base {base}",
            fix="precision.base: nf4, fp8 or int8 quantises them when they are loaded",
        )


def unquantised_share(model: nn.Module) -> tuple[float, str]:
    """Looks for frozen matrices that are not quantised. Returns their share of the elements of all
    frozen matrices, and the name of the largest of them.

    For example, stacked experts are not quantised by bitsandbytes. Some matrices are not counted,
    because QLoRA never quantises them. These are embeddings, the head, and the vision tower and the
    projector of a vision-language model. The frozen copies of modules that an adapter trains in
    full are not counted either.
    """
    excluded = {
        id(p)
        for m in model.modules()
        if isinstance(m, nn.Embedding)
        for p in m.parameters(recurse=False)
    }
    get_head: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    excluded |= {id(p) for p in head.parameters()} if head is not None else set()
    inner = inner_model(model)
    if (parts := vision_parts(inner)) is not None:
        excluded |= {
            id(p) for name, p in inner.named_parameters() if parts.part_kind(name) != LANGUAGE
        }
    unpacked_elements = packed_elements = largest_size = 0
    largest = ""
    for full_name, parameter in model.named_parameters():
        if ".original_module." in full_name:
            continue
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            packed_elements += state.shape.numel()
        elif type(parameter).__name__ == "Int8Params":
            packed_elements += parameter.numel()
        elif id(parameter) not in excluded and parameter.ndim >= 2 and not parameter.requires_grad:
            unpacked_elements += parameter.numel()
            if parameter.numel() > largest_size:
                largest_size = parameter.numel()
                largest = full_name
    return unpacked_elements / max(1, unpacked_elements + packed_elements), largest


def check_share(model: nn.Module, *, is_allowed: bool, dtype_name: str) -> list[str]:
    """Returns lines about a 4-bit base model if more than 10% of it is not quantised. They are
    printed before training starts. Raises UsageError for such a model if the user has not allowed
    it (`is_allowed`).
    """
    share, largest = unquantised_share(model)
    if share <= MAX_UNQUANTISED_SHARE:
        return []
    text = f"{share:.0%} of the base's matrices stay {dtype_name}, not nf4, such as {largest}"
    if not is_allowed:
        raise UsageError(
            f"{text}; bitsandbytes quantises linear layers only",
            fix=f"{CONSENT_KEY}: true to train on it as it is, or precision.preset: bf16-lora",
        )
    return [f"{text} ({CONSENT_KEY}: true)"]


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else format_dtype(str(dtype))
