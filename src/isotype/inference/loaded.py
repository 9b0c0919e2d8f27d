"""A finished or running run, loaded as it was trained: its base, its adapter or newest whole checkpoint, its precision, its template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..checkpoint.folder import fault
from ..checkpoint.snapshot import restore_model
from ..checkpoint.store import CheckpointStore
from ..config.load import load
from ..config.schema import ModelSection, RunConfig
from ..errors import UsageError
from ..hardware import detect
from ..precision.precision import Precision
from ..training.folder import RESOLVED, RunFolder
from ..training.model import Source, load_tokenizer
from ..training.setup import build_model, resolve_precision
from ..training.strangers import refuse_code_of
from ..training.verify import load_result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedRun:
    """`taken` says which weights these are: `adapter`, `model` or `checkpoint step_N`."""

    folder: Path
    config: RunConfig
    precision: Precision
    source: Source
    tokenizer: PreTrainedTokenizerBase
    model: nn.Module
    device: torch.device
    taken: str


def load_run(folder: Path) -> LoadedRun:
    """Raises  UsageError when the folder is no run, or has neither a result nor a whole checkpoint yet."""
    run = RunFolder(folder)
    if not run.is_run:
        raise UsageError(f"{folder}: no {RESOLVED} there: not a run folder")
    loaded = load(folder / RESOLVED, resolved=True)
    refuse_code_of(loaded, folder)
    config = loaded.config
    hardware = detect(config.model.device)
    device = torch.device("cpu" if hardware.kind == "cpu" else "cuda")
    precision = resolve_precision(config, loaded.sources, hardware).precision
    source = _source(config, run)
    result = next((folder / name for name in ("adapter", "model") if fault(folder / name) is None), None)
    if result is not None:
        tokenizer = load_tokenizer(ModelSection(name=str(result)))
        model = load_result(result, source, precision, config=config.model, device=device)
        return LoadedRun(folder, config, precision, source, tokenizer, model.eval(), device, result.name)
    store = CheckpointStore(run.checkpoints)
    step, passed = store.newest_whole()
    if step is None:
        raise UsageError(f"{folder}: neither a result nor a whole checkpoint yet" + "".join(f"; {reason}" for reason in passed))
    tokenizer = load_tokenizer(config.model)
    model, _ = build_model(config, precision, source, tokenizer, device)
    restore_model(model, store.load(step).tensors)
    return LoadedRun(folder, config, precision, source, tokenizer, model.eval(), device, f"checkpoint step_{step}")


def _source(config: RunConfig, run: RunFolder) -> Source:
    if config.model.init == "random":
        return Source(str(run.base))
    assert config.model.name is not None, "a run with a pretrained base has its name"
    return Source(config.model.name, config.model.revision, config.model.trust_remote_code)
