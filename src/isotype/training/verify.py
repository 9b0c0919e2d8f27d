"""Proof before a run calls itself done: what was saved, loaded into a fresh base, has the loss that the trained model had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config.schema import ModelSection
from ..data.rows import Row
from ..dtypes import eps
from ..errors import RunError
from ..model.adapter import load_adapter
from ..model.load import Source, load_base
from ..optimize import optimize
from ..precision.apply import apply_precision
from ..precision.precision import Precision
from .evaluate import evaluate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 16  # enough that a wrong adapter cannot hide, few enough for a CPU


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


def check_rows(rows: Sequence[Row]) -> Sequence[Row]:
    return rows[:ROWS]


def saved_dtype_error(precision: Precision, *, adapter: bool) -> float:
    """How far a loss may move, relatively: nothing but rounding to the saved dtype, and nothing at all where that is the trained one."""
    saved = precision.save_adapter if adapter else precision.save_model
    return 1e-6 if saved in ("fp32", precision.trainable) else eps(saved)


def verify_result(
    folder: Path, source: Source, precision: Precision, rows: Sequence[Row], *, trained_loss: float, batch_size: int,
    tokenizer: PreTrainedTokenizerBase, config: ModelSection, device: torch.device, adapter: bool,
) -> float:  # fmt: skip
    """Returns the reloaded loss. Raises RunError SV001 when it is not the trained one."""
    model = load_result(folder, source, precision, config=config, device=device)
    loss = evaluate(
        model, check_rows(rows), batch_size=batch_size, pad_id=tokenizer.pad_token_id, device=device, loss_dtype=precision.loss
    ).loss
    allowed = saved_dtype_error(precision, adapter=adapter) * max(1.0, abs(trained_loss))
    if not abs(loss - trained_loss) <= allowed:
        raise RunError(
            f"{folder} was saved, but loaded into a fresh base its loss is {loss:.6f} where training had {trained_loss:.6f}",
            code="SV001", fix="the checkpoints are untouched; report this with env.json",
        )  # fmt: skip
    return loss
