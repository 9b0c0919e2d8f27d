"""Saves a fully trained model, loads a result in the same way as a user would, and evaluates it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config.schema import AdapterSection, ModelSection, RunConfig
from ...data.rows import row_lengths
from ...distributed.world import ALONE, World
from ...dtypes import to_torch
from ...model.adapter import (
    freeze_vision,
    is_trained_on_text_class,
    load_adapter,
    read_modules_to_save,
)
from ...model.export import cast_tensors, embedding_and_head, refuse_wrong_tying, write_config
from ...model.load import Source, load_base
from ...model.served import round_frozen, serve_adapters
from ...optimize import optimize
from ...precision.apply import apply_precision
from ...precision.parts import Part
from ...precision.precision import Precision
from ...training.memory.blocks import apply_offload
from ...training.task import Evaluation, IdleBatch, eval_mode
from .batches import split_by_pictures
from .objective import NextToken, Objective


def save_model(model: Any, folder: Path, precision: Precision) -> None:
    """Saves the model as an ordinary Hugging Face folder, in the dtype `precision.save_model`."""
    dtype = to_torch(precision.save_model)
    names = embedding_and_head(model)
    state = model.state_dict()
    is_tied = state[names[0]].data_ptr() == state[names[1]].data_ptr() if names else None
    model.save_pretrained(folder, state_dict=cast_tensors(state, dtype))
    write_config(folder, dtype, tied=is_tied)
    if names:
        refuse_wrong_tying(folder, *names)


def load_result(
    folder: Path,
    source: Source,
    precision: Precision,
    *,
    config: ModelSection,
    device: torch.device,
    part: Part | None = None,
    adapter: AdapterSection | None = None,
) -> nn.Module:
    """Loads the result of a run in the run's precision. The result is a model or an adapter. For an
    adapter, its base model is loaded too.

    If the base model comes with its own code (remote code), this code is saved next to the model.
    The saved code is executed only if the run executed the code of the base model.

    part     the part of the weights that this process will keep, if several processes share the
             model
    adapter  the run's adapter settings; they say which parts of a vision-language model were frozen
    """
    served = None
    if (folder / "adapter_config.json").is_file():
        source = replace(source, text_only=is_trained_on_text_class(folder))
        base = load_base(
            source,
            precision,
            attention=config.attention,
            device=device,
            trainable=False,
            keeps_file_dtype=part is not None,
            part=part,
            full_modules=read_modules_to_save(folder),
            offload=config.offload,
        )
        model: nn.Module = load_adapter(base, folder)
        served = round_frozen(model, precision)
    else:
        saved = Source(
            str(folder),
            trust_remote_code=source.trust_remote_code,
            has_score_head=source.has_score_head,
        )
        model = load_base(
            saved,
            precision,
            attention=config.attention,
            device=device,
            trainable=True,
            keeps_file_dtype=part is not None,
            part=part,
        )
        freeze_vision(model, adapter or AdapterSection(), precision)
    if config.optimize:
        optimize(model, precision, device_type=device.type, lora_branch=config.lora_branch)
    apply_precision(model, precision, device_type=device.type, part=part)
    serve_adapters(model, served)
    return apply_offload(model, config.offload, device)


def evaluate(
    model: nn.Module,
    rows: Sequence[Any],
    *,
    batch_size: int,
    pad_id: int,
    device: torch.device,
    loss_dtype: str = "fp32",
    world: World = ALONE,
    objective: Objective | None = None,
) -> Evaluation:
    """Returns the mean loss over the rows, and the objective's metrics. The rows are sorted by
    length to reduce padding. Sums are computed in fp64. `weight` of the result is the sum of the
    weights of the batches.

    objective  by default `NextToken`

    The batches are divided among the processes of `world`. All processes make the same number of
    forward passes, because they run the forward of a sharded model together. If a process has no
    batch left, it computes the first row again, and this loss is not counted.
    """
    objective = objective or NextToken(RunConfig())
    lengths = row_lengths(rows)
    by_length = sorted(range(len(rows)), key=lambda i: lengths[i])
    total = torch.zeros(1 + len(objective.metric_names.measures), dtype=torch.float64)
    weight = 0

    def batches() -> Iterator[Any]:
        for turn in range(0, len(by_length), world.size * batch_size):
            start = turn + world.rank * batch_size
            pass_rows = [rows[i] for i in by_length[start : start + batch_size] or by_length[:1]]
            for rows_of_one_kind in split_by_pictures(pass_rows):
                batch = objective.collate(
                    rows_of_one_kind, pad_id=pad_id, device_type=device.type
                ).to(device)
                yield batch if start < len(by_length) else IdleBatch(batch)

    with eval_mode(model):
        for batch in objective.prepare_step(model, batches(), world, dtype=loss_dtype):
            is_idle = isinstance(batch, IdleBatch)
            sums = (
                objective.loss_sum(model, batch.batch if is_idle else batch, dtype=loss_dtype)
                .double()
                .cpu()
            )
            total += 0.0 * sums if is_idle else sums
            weight += batch.weight
    *totals, total_weight = world.sum([*total.tolist(), weight])
    loss, *measures = (value / max(1, total_weight) for value in totals)
    return Evaluation(
        loss,
        int(total_weight),
        measures=objective.metric_names.compute_metrics(
            dict(zip(objective.metric_names.measures, measures))
        ),
    )
