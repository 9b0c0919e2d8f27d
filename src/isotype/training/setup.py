"""From a resolved configuration to a loop that is ready to run: device, precision, tokenizer, data, model, adapter, optimizer."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config.schema import RunConfig
from ..data.load import load_data
from ..data.prompts import prompts_from
from ..data.rows import LoadedData, SamplePrompt
from ..environment.hardware import Hardware, detect
from ..model.adapter import attach_adapter, check_branch
from ..model.load import Source, base_notes, base_source, check_vocabulary, load_architecture, load_base, load_tokenizer
from ..optimize import Manifest, optimize
from ..optimize.base import base_notes as manifest_notes
from ..precision.accumulate import GradientAccumulator
from ..precision.apply import apply_precision
from ..precision.precision import Precision
from ..precision.quantised_base import check_share
from ..precision.resolve import Resolved, resolve
from ..runs.folder import RunFolder
from .memory.auto_recomputation import auto_checkpointing
from .memory.bound import most_bytes
from .memory.device import memory_there, other_memory, return_freed_blocks, shown
from .memory.pauses import Pauses
from .memory.plan import MemoryPlan, outline, plan_memory
from .memory.recomputation import AUTO, NONE, Checkpointing, apply_checkpointing, as_configured, check_settings, checkpointable
from .optimizer import build_optimizer
from .step import Stepper

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Prepared:
    """Everything but the loop's own bookkeeping."""

    hardware: Hardware
    device: torch.device
    resolved: Resolved
    tokenizer: PreTrainedTokenizerBase
    data: LoadedData
    prompts: list[SamplePrompt]
    source: Source
    model: nn.Module
    manifest: Manifest
    stepper: Stepper
    checkpointing: Checkpointing


def resolve_precision(config: RunConfig, sources: Mapping[str, str], hardware: Hardware) -> Resolved:
    """The contract of this configuration on this hardware. Raises UsageError with every contradiction."""
    return resolve(
        config.precision.model_dump(),
        device=hardware,
        adapter=config.adapter.kind,
        optimizer=config.train.optimizer,
        sources=sources,
    )


def prepare(config: RunConfig, sources: Mapping[str, str], folder: RunFolder) -> Prepared:
    """Cheap things first, so that a mistake costs seconds: precision, tokenizer, data, and only then the model."""
    hardware = detect(config.model.device)
    device = torch.device("cuda" if hardware.kind in ("cuda", "rocm") else "cpu")
    check_settings(config.train, device_type=device.type)
    resolved = resolve_precision(config, sources, hardware)
    check_branch(config, resolved.precision)
    seed_everything(config.train.seed, deterministic=config.train.deterministic)
    tokenizer = load_tokenizer(config.model)
    data = load_data(config.data, tokenizer, seed=config.train.seed)
    if data.chat_template is not None:
        tokenizer.chat_template = data.chat_template
    prompts = prompts_from(config.run.samples, tokenizer, chat_template=data.chat_template) if config.run.samples else list(data.prompts)
    source = base_source(config.model, tokenizer, folder=folder.base, seed=config.train.seed, dtype=_base_dtype(config, resolved.precision))
    model, manifest = build_model(config, resolved.precision, source, tokenizer, device)
    checkpointing = choose_checkpointing(
        config, resolved.precision, hardware, model, tokenizer, data, device, Pauses.of(config, data, prompts)
    )
    apply_checkpointing(model, checkpointing)
    accumulator = GradientAccumulator(model.parameters(), dtype=resolved.precision.grads, reduce=resolved.precision.reduce)
    optimizer = build_optimizer(model, config.train, resolved.precision, accumulator.gradient)
    # building drew from the generators by a path that a resumed run may not take again
    seed_everything(config.train.seed, deterministic=config.train.deterministic)
    stepper = Stepper(model, optimizer, accumulator, resolved.precision, config.train)
    return Prepared(hardware, device, resolved, tokenizer, data, prompts, source, model, manifest, stepper, checkpointing)


def build_model(
    config: RunConfig, precision: Precision, source: Source, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[nn.Module, Manifest]:
    """The model as it will be trained: loaded, with its adapter and Isotype's ops, under its precision; and what ran in whose place."""
    every_weight = config.adapter.kind == "none"
    base = load_base(source, precision, attention=config.model.attention, device=device, trainable=every_weight)
    notes = base_notes(source, precision)
    if precision.base == "nf4":
        check_share(base.requires_grad_(False), consent=config.model.allow_unquantised, kept_in=precision.unquantised)
    check_vocabulary(base, tokenizer)
    base.config.use_cache = False
    model: nn.Module = base if every_weight else attach_adapter(base, config.adapter, seed=config.train.seed)
    # before the precision, which wraps the forward that the ops look at
    manifest = (
        optimize(model, precision, lora_branch=config.model.lora_branch)
        if config.model.optimize
        else Manifest(notes=["model.optimize: false", *manifest_notes(model, precision)])
    )
    manifest.notes += notes
    apply_precision(model, precision, device_type=device.type)
    return model, manifest


def choose_checkpointing(
    config: RunConfig, precision: Precision, hardware: Hardware, model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: LoadedData,
    device: torch.device, pauses: Pauses,
) -> Checkpointing:  # fmt: skip
    """As configured; `auto` plans the step on the longest rows, unless a bound on it is far below the memory there is."""
    train = config.train
    has, besides = memory_there(hardware.memory, device), other_memory(model, device)
    length = len(data.longest(1)[0].input_ids)
    most = most_bytes(model, train, precision, length=length) + besides
    near = most > has // 2
    if near and has and device.type == "cpu":
        return_freed_blocks()  # else the process would grow past the plan
    if train.gradient_checkpointing != AUTO:
        return as_configured(model, train)
    if not near:
        return Checkpointing(NONE, reason=f"auto: the step cannot take more than {shown(most)} of {shown(has)}")
    made = outline(load_architecture(config.model, tokenizer), config, precision, device_type=device.type)

    def simulate(checkpointing: Checkpointing) -> MemoryPlan:
        return plan_memory(
            made,
            train,
            precision,
            length=length,
            checkpointing=checkpointing,
            device_type=device.type,
            packing=config.data.packing,
            pauses=pauses,
        )

    found, _ = auto_checkpointing(simulate, layers=len(checkpointable(model)), has=has, besides=besides, device_type=device.type)
    return found


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Python's, NumPy's and torch's generators; `deterministic` also forbids algorithms that are not."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _base_dtype(config: RunConfig, precision: Precision) -> str:
    return precision.trainable if config.adapter.kind == "none" else precision.unquantised
