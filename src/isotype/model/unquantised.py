"""Which linear layers of a 4-bit base keep their dtype: those that transformers keeps, and those that the adapter trains in full.

PEFT trains a copy of each module in `modules_to_save`, and a packed weight has no gradient.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from ..config.schema import AdapterSection
from ..errors import UsageError
from ..precision.apply import is_quantised

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def trained_in_full(section: AdapterSection) -> list[str]:
    """Names, as `modules_to_save` has them, of what the run's adapter trains in full."""
    if section.kind == "none":
        return []
    return list(section.modules_to_save) if section.start_from is None else saved_in_full(Path(section.start_from))


def saved_in_full(folder: Path) -> list[str]:
    """The same of a saved adapter. A folder that cannot be read has none: `load_adapter` refuses it."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    names = settings.get("modules_to_save") if isinstance(settings, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def modules_in_full(model: nn.Module, names: Collection[str]) -> dict[str, nn.Module]:
    """Full name -> each module that PEFT trains in full for these names."""
    return {full: module for full, module in model.named_modules(remove_duplicate=False) if full.endswith(tuple(names))}


def kept_whole(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Patterns, as `llm_int8_skip_modules` takes them, of the layers that keep their dtype when `model` is quantised.

    model  not yet quantised; on the meta device for example
    names  `trained_in_full`
    """
    return sorted({*get_keys_to_not_convert(model), *modules_in_full(model, names)})


def layers_to_quantise(model: PreTrainedModel, kept: Sequence[str]) -> set[nn.Module]:
    patterns = [*kept, *(model._keep_in_fp32_modules or ())]
    return {m for full, m in model.named_modules() if type(m) is nn.Linear and should_convert_module(full, patterns)}


def kept_by_config(config: Any) -> list[str] | None:
    """`llm_int8_skip_modules` of a base that was saved quantised; None where it has none."""
    given = config.quantization_config
    kept = given.get("llm_int8_skip_modules") if isinstance(given, dict) else getattr(given, "llm_int8_skip_modules", None)
    return None if kept is None else list(kept)


def refuse_quantised(model: nn.Module, names: Collection[str], what: str) -> None:
    """Raises  UsageError where a base that was saved quantised has packed weights in what is to be trained in full"""
    for full, module in modules_in_full(model, names).items():
        packed = next((name for name, p in module.named_parameters() if is_quantised(p)), None)
        if packed is not None:
            raise UsageError(
                f"{what}: {full}.{packed} was saved quantised, and packed weights cannot be trained",
                fix="leave it out, or give the model it was quantised from: nf4-lora leaves unquantised what is trained in full",
            )
