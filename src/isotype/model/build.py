"""Builds the model for training. This module loads the model, attaches its adapter, inserts
Isotype's ops, and applies the precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..config.kind import DIFFUSION, detect_run_kind
from ..config.schema import ModelSection, RunConfig
from ..config.sources import gguf_file
from ..environment.hardware import Hardware
from ..errors import UsageError
from ..optimize import Manifest, optimize
from ..optimize.manifest import base_notes as notes_of_optimize
from ..precision.apply import apply_precision
from ..precision.parts import Part
from ..precision.precision import Precision
from ..precision.quantised_base import check_share, quantisation_from_config_file
from ..precision.resolution import Resolved, resolve
from ..precision.vision import vision_parts
from .adapter import (
    attach_adapter,
    check_vision,
    freeze_vision,
    modules_trained_in_full,
    refuse_packed_experts_without_ops,
)
from .gguf import read_architecture
from .load import Source, load_base
from .served import round_frozen, serve_adapters
from .targets import target_notes
from .tokens import align_special_tokens, check_vocabulary, trained_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_model(
    config: RunConfig,
    precision: Precision,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    part: Part | None = None,
    has_pictures: bool = False,
) -> tuple[nn.Module, Manifest]:
    """Returns the model, and a list of the modules that Isotype's ops replaced.

    device        the device of the run. The weights of a sharded model stay on the CPU until they
                  are split
    part          the rows of a sharded model that this process will keep
    has_pictures  whether rows have pictures
    """
    trains_every_weight = config.adapter.kind == "none"
    # with an adapter the base is loaded in its declared dtype, because PEFT rounds the adapter's
    # initial values to this dtype, and copies the modules of `modules_to_save` in it
    keeps_file_dtype = part is not None and trains_every_weight
    notes: list[str] = []
    if source.has_score_head:
        torch.manual_seed(config.train.seed)  # the score head is initialised at random
    base = load_base(
        source,
        precision,
        attention=config.model.attention,
        device=device,
        trainable=trains_every_weight,
        keeps_file_dtype=keeps_file_dtype,
        part=part,
        notes=notes,
        full_modules=modules_trained_in_full(config.adapter),
        offload=config.model.offload,
    )
    check_vocabulary(base, tokenizer)
    align_special_tokens(base, tokenizer)
    base.config.use_cache = False
    if has_pictures and part is not None:
        raise UsageError(
            "parallel.kind: shard: a process without a picture in its batch would not run the"
            " tower",
            fix="parallel.kind: replicate",
        )
    token_ids = trained_token_ids(tokenizer, config.adapter.train_tokens)
    model = attach_trained_parts(
        base, config, precision, has_pictures=has_pictures, token_ids=token_ids, notes=notes
    )
    served = round_frozen(model, precision)
    if precision.base == "nf4":
        check_share(
            base, is_allowed=config.model.allow_unquantised, dtype_name=precision.unquantised
        )
    # the ops are inserted first, because they read the model's forward, which the precision
    # replaces by a wrapper
    if config.model.optimize:
        manifest = optimize(
            model, precision, device_type=device.type, lora_branch=config.model.lora_branch
        )
    else:
        manifest = Manifest(notes=["model.optimize: false", *notes_of_optimize(model, precision)])
    manifest.notes += notes
    apply_precision(model, precision, device_type=device.type, part=part)
    manifest.notes += serve_adapters(model, served)
    if config.train.embedding_noise is not None:
        add_embedding_noise(model, config.train.embedding_noise)
    return model, manifest


def attach_trained_parts(
    base: Any,
    config: RunConfig,
    precision: Precision,
    *,
    has_pictures: bool,
    token_ids: Sequence[int],
    notes: list[str],
) -> nn.Module:
    """Attaches the adapter to the base, or freezes the vision parts in a run that trains all other
    weights. The base may be on the meta device.

    notes  a list to which this function appends lines for the run's header
    """
    check_vision(base, config.adapter, has_pictures=has_pictures)
    if not has_pictures and vision_parts(base) is not None:
        notes.append(
            f"{type(base).__name__} is trained on text: its vision tower is frozen and does not run"
        )
    if config.adapter.kind == "none":
        notes += freeze_vision(base, config.adapter, precision)
        model: nn.Module = base
        return model
    adapted = attach_adapter(
        base,
        config.adapter,
        seed=config.train.seed,
        new_tokens=bool(config.model.add_tokens),
        has_pictures=has_pictures,
        token_ids=token_ids,
    )
    notes += target_notes(adapted, config.adapter)
    if not config.model.optimize:
        refuse_packed_experts_without_ops(adapted)
    return adapted


def add_embedding_noise(model: Any, alpha: float) -> None:
    """Implements NEFTune (Jain et al. 2023). In training, uniform noise from -m to m is added to
    the input embeddings, with m = alpha / sqrt(number of tokens in a row x embedding width).
    """

    def add_noise(module: nn.Module, args: Any, embedded: Tensor) -> Tensor | None:
        """embedded: F[rows tokens width]"""
        if not module.training or not torch.is_grad_enabled():
            return None
        most = alpha / (embedded.shape[-2] * embedded.shape[-1]) ** 0.5
        return embedded + torch.empty_like(embedded).uniform_(-most, most)

    model.get_input_embeddings().register_forward_hook(add_noise)


def resolve_precision(
    config: RunConfig,
    sources: Mapping[str, str],
    hardware: Hardware,
    task_roles: Mapping[str, str] | None = None,
    *,
    needs_bf16: str = "",
) -> Resolved:
    """Determines every dtype of a run from its configuration and the hardware. Raises UsageError,
    which lists every contradiction.

    task_roles  the roles (purposes of tensors) that only this kind of run has. Each is mapped to
                its default dtype, or to another role that has the same dtype
    needs_bf16  as in `resolve`
    """
    is_diffusion = detect_run_kind(config) == DIFFUSION
    parts = ("transformer", "unet") if is_diffusion else ("",)
    settings = _read_settings(config.model, parts)
    return resolve(
        config.precision.model_dump(),
        device=hardware,
        adapter=config.adapter.kind,
        optimizer=config.train.optimizer,
        sources=sources,
        task_roles=task_roles,
        checkpoint=_published_quantisation(settings),
        family=str(settings.get("model_type") or ""),
        served=config.adapter.serve_as or "",
        micro_batches=config.train.accumulate,
        needs_bf16=needs_bf16,
    )


def _read_settings(section: ModelSection, parts: Sequence[str]) -> dict[str, Any]:
    """Returns the `config.json` of a base. The result is empty if no such file can be read; loading
    the model reports the error later.

    parts  subfolders of the model's folder; the first one that contains a configuration is read. ""
           means the model's folder itself
    """
    if section.name is None or section.init == "random":
        return {}
    settings: dict[str, Any] = {}
    if gguf_file(section.name) is not None:
        settings = read_architecture(section.name).to_dict()
    elif Path(section.name).expanduser().is_file():  # a checkpoint in one file
        return {}
    for part in parts:
        with suppress(OSError, ValueError):
            settings = (
                settings
                or PretrainedConfig.get_config_dict(
                    section.name, revision=section.revision, subfolder=part
                )[0]
            )
    return settings


def _published_quantisation(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """If the base was published quantised, returns the name of its dtype and a description.
    Otherwise returns None.
    """
    quantisation = quantisation_from_config_file(settings)
    if quantisation is None or quantisation.unread_reason or quantisation.weight_format == "fp4":
        return None
    return (quantisation.weight_format, str(quantisation))
