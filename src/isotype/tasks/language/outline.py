"""Builds the parts of a language run that a memory plan needs. These are the model on the meta
device, and a description of the largest training step, evaluation and sample. None of them contains
data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...config.schema import RunConfig
from ...data.rows import LoadedData, SamplePrompt, row_lengths
from ...dtypes import to_torch
from ...model.adapter import (
    layers_to_quantise,
    modules_trained_in_full,
    skip_modules_from_config,
    unquantised_patterns,
)
from ...model.architecture import AUTO, SCORE, attention_options, auto_class, explain_attention
from ...model.build import attach_trained_parts
from ...model.load import pack_outline, require_bitsandbytes
from ...model.served import ServedFormat, serve_adapters
from ...ops.attention import Documents
from ...optimize import optimize
from ...precision.apply import apply_precision, use_generate_dtype
from ...precision.precision import Precision
from ...precision.quantised_base import quantisation_from_config
from ...training.console import silence_library_warnings
from ...training.memory.blocks import apply_offload
from ...training.memory.outline import quantise_outline
from ...training.task import ModelOutline, StepOutline, eval_mode, evaluation_batch_size
from .batches import Batch, padded_length
from .objective import NextToken, Objective

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def outline_model(
    architecture: PretrainedConfig,
    config: RunConfig,
    precision: Precision,
    *,
    device_type: str,
    has_pictures: bool = False,
) -> ModelOutline:
    """Builds the model in the same way as `build_model`, but without its weights. Raises UsageError
    if the model has no module that the adapter's targets name.
    """
    trains_every_weight = config.adapter.kind == "none"
    dtype = precision.trainable if trains_every_weight else precision.unquantised
    # flash and flex are planned as sdpa: they use the same memory, but need packages or devices
    # that may be missing here
    requested = config.model.attention
    attention = attention_options(
        AUTO if requested in ("flash", "flex") else requested, torch.device(device_type)
    )
    with torch.device("meta"), silence_library_warnings():
        try:
            base = auto_class(
                architecture, has_score_head=config.train.objective == "reward"
            ).from_config(
                architecture,
                dtype=to_torch(dtype),
                trust_remote_code=config.model.trust_remote_code,
                **attention,
            )
        except (ValueError, ImportError) as error:
            raise (
                explain_attention(f"model {config.model.name or 'model.config'}", requested, error)
                or error
            ) from error
        base.config.use_cache = False
        # a score head finds a row's last token by the padding token; a run sets the tokenizer's
        # padding token here
        if hasattr(base, SCORE):
            base.config.get_text_config().pad_token_id = 0
        total = sum(p.numel() for p in base.parameters())
        if precision.base == "nf4" and not trains_every_weight:
            require_bitsandbytes()
            base_quantisation = quantisation_from_config(architecture)
            unquantised = (
                None if base_quantisation is None else skip_modules_from_config(architecture)
            )
            if unquantised is None:
                unquantised = unquantised_patterns(
                    base,
                    modules_trained_in_full(config.adapter) if base_quantisation is None else (),
                )
            quantise_outline(
                base,
                to_torch(precision.compute),
                double_quant=base_quantisation is None
                or bool(base_quantisation.is_double_quantised),
                layers=layers_to_quantise(base, unquantised),
            )
        elif precision.packed and not trains_every_weight:
            pack_outline(
                base, architecture, config.model, precision, modules_trained_in_full(config.adapter)
            )
        token_ids = range(len(config.adapter.train_tokens))
        model = attach_trained_parts(
            base, config, precision, has_pictures=has_pictures, token_ids=token_ids, notes=[]
        )
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if config.model.optimize:
        _fill_inverse_frequencies(base)
        optimize(model, precision, device_type=device_type, lora_branch=config.model.lora_branch)
    apply_precision(model, precision, device_type=device_type)
    if precision.served:
        serve_adapters(model, ServedFormat(precision.served, model))
    model.train()
    apply_offload(
        model, config.model.offload, torch.device("cpu" if device_type == "cpu" else "meta")
    )
    return ModelOutline(model, trainable, total + (0 if trains_every_weight else trainable))


def outline_largest_step(
    config: RunConfig,
    precision: Precision,
    data: LoadedData,
    prompts: Sequence[SamplePrompt],
    *,
    device_type: str = "cpu",
    objective: Objective | None = None,
) -> StepOutline:
    """Describes the largest training step, evaluation and sample of a run on this data."""
    longest = max((len(prompt.input_ids) for prompt in prompts), default=0)
    return outline_step(
        config,
        precision,
        length=len(data.longest(1)[0].input_ids),
        eval_rows=min(
            evaluation_batch_size(config.train),
            len(data.eval) if objective is None else len(objective.eval),
        ),
        eval_length=max(row_lengths(data.eval), default=0),
        sample_length=(
            longest + config.run.sample_tokens if longest and config.run.sample_every != 0 else 0
        ),
        device_type=device_type,
        objective=objective,
    )


def outline_step(
    config: RunConfig,
    precision: Precision,
    *,
    length: int,
    eval_rows: int = 0,
    eval_length: int = 0,
    sample_length: int = 0,
    device_type: str = "cpu",
    objective: Objective | None = None,
) -> StepOutline:
    """Describes the largest training step, evaluation and sample of a run. The caller gives their
    lengths in tokens.

    length         the length of the longest training row
    eval_rows      the number of rows in an evaluation pass; 0 if the run does not evaluate
    eval_length    the length of the longest evaluation row
    sample_length  the length of the longest prompt with its answer; 0 if the run generates no
                   samples
    If rows are packed, batches have the positions and bounds of documents in place of a mask.
    """
    learned_objective = objective or NextToken(config)
    packing = config.data.packing
    rows = config.train.batch_size * learned_objective.answers_per_row
    length = padded_length(length, device_type)

    def loss_sum(model: nn.Module, batch: Any, divisor: int = 1) -> Tensor:
        return learned_objective.loss_sum(
            model, learned_objective.outline_batch(batch), divisor, dtype=precision.loss
        )

    def evaluation(model: nn.Module, device: torch.device) -> None:
        with eval_mode(model):
            loss_sum(
                model,
                _empty_batch(
                    eval_rows * learned_objective.answers_per_row,
                    padded_length(eval_length, device_type),
                    device,
                    packing=packing,
                ),
            )

    def sampling(model: nn.Module, device: torch.device) -> None:
        """Runs the prompt and the answer in one pass. At the end of this pass, the cache has its
        largest size.
        """
        ids = torch.empty(1, sample_length, dtype=torch.long, device=device)
        with eval_mode(model), use_generate_dtype(model):
            outputs = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            del outputs

    return StepOutline(
        rows=rows,
        length=length,
        make_batch=lambda device: _empty_batch(rows, length, device, packing=packing),
        compute_loss_sum=loss_sum,
        run_evaluation=evaluation if eval_rows else None,
        run_sample=sampling if sample_length else None,
    )


def _empty_batch(rows: int, length: int, device: torch.device, *, packing: bool) -> Batch:
    ids_BT, mask_BT, labels_BT = (
        torch.empty(rows, length, dtype=torch.long, device=device) for _ in range(3)
    )
    mask, positions = (None, mask_BT) if packing else (mask_BT, None)
    supervised = rows * (length - 1)
    supervised_positions = torch.empty(supervised, dtype=torch.long, device=device)
    # assumes one document per row: more documents only enlarge the small tensor of their bounds
    if packing:
        documents = Documents.from_rows(rows, length, device)._replace(whole_rows=False)
    else:
        documents = None
    return Batch(
        ids_BT,
        mask,
        labels_BT,
        rows * length,
        supervised,
        positions,
        supervised_positions,
        documents,
    )


def _fill_inverse_frequencies(model: nn.Module) -> None:
    """Gives values to the frequencies of rotary modules, on the CPU. `optimize` runs such a module
    to find out how its tables repeat the frequencies. Any values are sufficient for
    this if the frequencies differ from each other.
    """
    for module in model.modules():
        for name, _ in module.named_buffers(recurse=False):
            if name.endswith("inv_freq"):
                buffer = module._buffers[name]
                assert buffer is not None
                module._buffers[name] = torch.linspace(1.0, 0.1, buffer.numel()).view(buffer.shape)
