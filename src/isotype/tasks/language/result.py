"""Saves what was trained, and loads it as a user would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config.schema import ModelSection
from ...dtypes import to_torch
from ...model.adapter import load_adapter
from ...model.load import Source, load_base
from ...optimize import optimize
from ...precision.apply import apply_precision
from ...precision.precision import Precision


def save_model(model: Any, folder: Path, precision: Precision) -> None:
    """An ordinary Hugging Face folder in `save_model`'s dtype."""
    dtype = to_torch(precision.save_model)
    state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")  # else dtype="auto" would widen it to what it was trained in
    file.write_text(json.dumps(config, indent=2) + "\n")
    (folder / "precision.json").write_text(precision.as_file())


def load_result(folder: Path, source: Source, precision: Precision, *, config: ModelSection, device: torch.device) -> nn.Module:
    """The saved adapter on a freshly loaded base, or the saved model, under the run's precision."""
    if (folder / "adapter_config.json").is_file():
        base = load_base(source, precision, attention=config.attention, device=device, trainable=False)
        model: nn.Module = load_adapter(base, folder)
    else:
        model = load_base(Source(str(folder)), precision, attention=config.attention, device=device, trainable=True)
    if config.optimize:
        optimize(model, precision, lora_branch=config.lora_branch)
    apply_precision(model, precision, device_type=device.type)
    return model
