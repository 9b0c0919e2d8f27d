"""Attaches a LoRA adapter through PEFT, freezes the rest, and saves it as a plain PEFT folder with its precision beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config.schema import AdapterSection
from ..dtypes import to_torch
from ..errors import UsageError
from ..precision.precision import Precision

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def attach_adapter(model: PreTrainedModel, section: AdapterSection, *, seed: int) -> PeftModel:
    """A PeftModel over `model` with one trainable adapter, new or continued from `start_from`."""
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(seed)
    if section.start_from is not None:
        if not (Path(section.start_from) / "adapter_config.json").is_file():
            raise UsageError(f"adapter.start_from: {section.start_from} has no adapter_config.json: not a PEFT folder")
        try:
            return PeftModel.from_pretrained(model, section.start_from, is_trainable=True)
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"adapter.start_from: {section.start_from} does not fit this model: {str(error).splitlines()[0]}",
                fix="take the base model it was trained on (base_model_name_or_path in its adapter_config.json)",
            ) from error
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # PEFT takes a float, its annotation says int
        lora_dropout=section.dropout,
        target_modules=section.targets,
        use_rslora=section.rslora,
        modules_to_save=list(section.modules_to_save) or None,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UsageError(
            f"adapter.targets: {section.targets}: {str(error).splitlines()[0]}", fix=f"all-linear, or some of: {', '.join(linear)}"
        ) from error


def save_adapter(model: PeftModel, folder: Path, precision: Precision) -> None:
    """A plain PEFT folder in `save_adapter`'s dtype, and `precision.json`, since adapter files carry no precision metadata."""
    dtype = to_torch(precision.save_adapter)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    state = {name: t.to(dtype) if name in trained else t for name, t in model.state_dict().items()}
    model.save_pretrained(str(folder), state_dict=state)
    (folder / "precision.json").write_text(precision.as_file())


def trainable_share(model: nn.Module) -> tuple[int, int]:
    """(trainable elements, all elements); a packed 4-bit weight counts as what it stands for."""
    trainable = total = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        n = parameter.numel() if state is None else state.shape.numel()
        total += n
        trainable += n if parameter.requires_grad else 0
    return trainable, total
