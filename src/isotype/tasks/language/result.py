"""Saves what was trained, and loads it as a user would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config.schema import ModelSection
from ...dtypes import to_torch
from ...model.adapter import load_adapter
from ...model.load import Source, load_base
from ...model.saved_form import cast_once, embedding_and_head, refuse_untrue_config, write_config
from ...model.unquantised import saved_in_full
from ...optimize import optimize
from ...precision.apply import apply_precision
from ...precision.parts import Part
from ...precision.precision import Precision


def save_model(model: Any, folder: Path, precision: Precision) -> None:
    """An ordinary Hugging Face folder in `save_model`'s dtype."""
    dtype = to_torch(precision.save_model)
    names, state = embedding_and_head(model), model.state_dict()
    tied = state[names[0]].data_ptr() == state[names[1]].data_ptr() if names else None
    model.save_pretrained(folder, state_dict=cast_once(state, dtype))
    write_config(folder, dtype, tied=tied)
    if names:
        refuse_untrue_config(folder, *names)


def load_result(
    folder: Path, source: Source, precision: Precision, *, config: ModelSection, device: torch.device, part: Part | None = None
) -> nn.Module:
    """The saved adapter on a freshly loaded base, or the saved model, under the run's precision.

    Code that came with the base lies beside a saved model, and is trusted there as it was in the base.

    part  what this process will keep of the model, where several share it
    """
    if (folder / "adapter_config.json").is_file():
        base = load_base(
            source, precision, attention=config.attention, device=device, trainable=False, mapped=part is not None, part=part,
            embedding=config.embedding, in_full=saved_in_full(folder),
        )  # fmt: skip
        model: nn.Module = load_adapter(base, folder)
    else:
        saved = Source(str(folder), trust_remote_code=source.trust_remote_code)
        model = load_base(saved, precision, attention=config.attention, device=device, trainable=True, mapped=part is not None, part=part)
    if config.optimize:
        optimize(model, precision, device_type=device.type, lora_branch=config.lora_branch)
    apply_precision(model, precision, device_type=device.type, part=part)
    return model
