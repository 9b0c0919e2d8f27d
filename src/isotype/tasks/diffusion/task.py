"""Implements `training.task.Task` for LoRA and full fine-tuning of a diffusion model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.schema import RunConfig
from ...data.bad_rows import BAD_ROWS_FILE, BadRowFile
from ...distributed.world import ALONE, World
from ...model.card import CARD_FILE
from ...optimize import Manifest
from ...precision.apply import inner_model
from ...precision.parts import Part
from ...precision.precision import Precision
from ...precision.quantised_base import check_base
from ...training.memory.plan import plan_persistent_memory
from ...training.task import (
    Check,
    Evaluation,
    HeaderRows,
    MeanSizes,
    MetricNames,
    ModelOutline,
    StepOutline,
    eval_mode,
    evaluation_batch_size,
)
from .batch_maker import BatchMaker
from .batches import Batch, PictureStream, PlacedRow, Row, group_by_shape
from .data import PictureData
from .denoiser import count_block_flops, count_output_bytes
from .description import lora_metadata, picture_card
from .facts import header_details, header_rows, plan_facts, plan_lines, run_records
from .loss import evaluate
from .model import (
    empty_batch,
    load_model,
    outline_forward,
    outline_model,
    run_largest_sample,
    second_denoiser_bytes,
)
from .resolved_run import ResolvedRun, open_pipeline
from .result import load_result, save_denoiser, save_lora
from .sample import Sample, sample
from .text_encoders import drop_untrained_encoders

REHEARSED_STEPS = 2  # number of denoising steps of a shortened sample


class DiffusionTask:
    """The task of a diffusion run. The other modules of this folder do the work for the data, the
    model, the samples and the results.

    run, data  exist after `check`
    """

    kind = "diffusion"

    run: ResolvedRun
    data: PictureData
    _batches: BatchMaker  # exists after `encode`

    def __init__(self, config: RunConfig) -> None:
        self.config = drop_untrained_encoders(config)
        self._observed: dict[tuple[str, str], str] = {}

    @property
    def roles(self) -> Mapping[str, str]:
        average = {} if self.config.train.ema is None else {"ema": "fp32"}
        return {
            "vae": "fp32",
            "text_encoder": "compute",
            "timesteps": "fp32",
            "latents": "fp32",
            **average,
        }

    def observed_dtypes(self) -> Iterable[tuple[str, str, str]]:
        return [(role, tensor, dtype) for (role, tensor), dtype in self._observed.items()]

    @property
    def metric_names(self) -> MetricNames:
        if self.run.frames == 1:
            return MetricNames(units="pictures", unit="pic", weight="compared")
        return MetricNames(units="clips", unit="clips", weight="compared")

    @property
    def base_name(self) -> str:
        return str(self.config.model.name)

    # before step 1

    def count_base_weights(self) -> int | None:
        # any error is reported by `check`
        with suppress(Exception):
            outline: nn.Module = open_pipeline(self.config).denoiser_outline()
            return sum(parameter.numel() for parameter in outline.parameters())
        return None

    def check(self, precision: Precision) -> None:
        self.run = ResolvedRun.open(self.config, precision)
        self.data = PictureData(self.run)

    def load_data(self) -> None:
        self.data.load()

    def encode(self, device: torch.device) -> None:
        self.data.encode(device)
        self._observed |= self.data.encoder.observed
        self._batches = BatchMaker(self.run, self.data.encoder.store, self._observed)

    def build_model(
        self, precision: Precision, device: torch.device, folder: Path, part: Part | None = None
    ) -> tuple[nn.Module, Manifest]:
        self.run = self.run.with_drawn_denoiser(folder)
        return load_model(self.run, precision, device, self._observed, part)

    @property
    def rows(self) -> int:
        return self.data.row_count

    @property
    def eval_rows(self) -> int:
        return self.data.evaluation_row_count

    def fingerprints(self) -> dict[str, str]:
        return self.data.fingerprints()

    def feed(self) -> PictureStream:
        return self.data.feed()

    def largest_rows(self, count: int) -> list[PlacedRow]:
        return self.data.largest_rows(count)

    @property
    def mean_sizes(self) -> MeanSizes:
        return MeanSizes()  # buckets have about the same number of pixels

    def outline_model(self, precision: Precision, *, device_type: str) -> ModelOutline:
        return outline_model(self.run, precision, device_type=device_type)

    def outline_largest_step(self, precision: Precision) -> StepOutline:
        rows = self.config.train.batch_size
        controls = self.data.control_count
        draws = len(self.data.pictures.eval) * self.config.diffusion.eval_draws
        evaluation_rows = min(evaluation_batch_size(self.config.train), draws)
        other_bytes = second_denoiser_bytes(self.run, precision) if self.samples else {}

        def evaluation(model: nn.Module, device: torch.device) -> None:
            with eval_mode(model):
                batch = empty_batch(self.run, evaluation_rows, device, controls)
                self.loss_sum(model, batch, dtype=precision.loss)

        return StepOutline(
            rows=rows,
            length=self.run.sizes.tokens,
            make_batch=lambda device: empty_batch(self.run, rows, device, controls),
            compute_loss_sum=partial(self.loss_sum, dtype=precision.loss),
            run_evaluation=evaluation if evaluation_rows else None,
            run_sample=partial(run_largest_sample, self.run, other_bytes) if other_bytes else None,
            block_flops=lambda _: [rows * flops for flops in self._block_flops],
        )

    def max_step_bytes(self, model: nn.Module, precision: Precision) -> int:
        train = self.config.train
        persistent_bytes = plan_persistent_memory(model, train, precision).persistent_bytes
        return persistent_bytes + 3 * train.batch_size * self._output_bytes

    @cached_property
    def _output_bytes(self) -> int:
        """The bytes of the results of all operators of a forward on one training picture."""
        _, run_forward = outline_forward(self.run, self.data.control_count)
        return count_output_bytes(run_forward)

    @cached_property
    def _block_flops(self) -> list[float]:
        """The FLOPs of each block of the denoiser for one training picture. They are counted only
        for a plan, because counting them takes longer than the forward itself.
        """
        return count_block_flops(*outline_forward(self.run, self.data.control_count))

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        return {}

    # training

    def prepare_training(
        self, model: nn.Module, device: torch.device, folder: Path, world: World, *, dtype: str
    ) -> list[tuple[str, str]]:
        return []

    def split_by_shape(self, rows: Sequence[PlacedRow]) -> list[list[PlacedRow]]:
        return list(group_by_shape(rows, lambda placed: placed.row).values())

    def collate(self, rows: Sequence[PlacedRow]) -> Batch:
        return self._batches.make_training_batch(rows)

    def prepare_step(
        self, model: nn.Module, batches: Iterable[Any], world: World, *, dtype: str
    ) -> Iterable[Any]:
        return batches

    def loss_sum(self, model: nn.Module, batch: Any, divisor: int = 1, *, dtype: str) -> Tensor:
        return self.run.losses(model, batch, dtype=dtype).sum() / divisor

    def evaluate(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        dtype: str,
        most: int | None = None,
        stride: int = 1,
        world: World = ALONE,
    ) -> Evaluation:
        rows = self.data.evaluation_rows or self.data.encoded_rows
        return self._evaluate(model, rows[:most:stride], device, dtype, world)

    def rehearse_evaluation(
        self, model: nn.Module, device: torch.device, *, dtype: str
    ) -> Evaluation | None:
        rows = self.data.evaluation_rows[: evaluation_batch_size(self.config.train)]
        if not rows:
            return None
        return self._evaluate(model, rows, device, dtype, ALONE)

    def _evaluate(
        self, model: nn.Module, rows: Sequence[Row], device: torch.device, dtype: str, world: World
    ) -> Evaluation:
        return evaluate(
            model,
            rows,
            draws=self.config.diffusion.eval_draws,
            batch_size=evaluation_batch_size(self.config.train),
            device=device,
            build_batch=self._batches.make_evaluation_batch,
            losses=partial(self.run.losses, dtype=dtype),
            noise_range=self.run.noise_range,
            world=world,
        )

    @property
    def samples(self) -> int:
        return len(self.config.run.samples)

    @property
    def sample_ratio(self) -> float | None:
        return None  # prompts have their own sizes and numbers of steps

    @property
    def sample_forwards(self) -> float | None:
        return None

    def sample(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        is_shortened: bool = False,
        world: World = ALONE,
    ) -> list[Sample]:
        settings = self.run.sample_settings
        prompts = self.run.prompts
        if is_shortened:
            prompts = [
                replace(prompt, overrides={**prompt.overrides, "steps": REHEARSED_STEPS})
                for prompt in prompts[:1]
            ]
        encoded = self.data.encoded_prompts(prompts)
        run = self.run
        return list(
            sample(
                model, run.folder, run.config, run.precision, encoded, settings, device, world=world
            )
        )

    # the result

    def save(self, model: Any, folder: Path, precision: Precision, *, step: int) -> None:
        if self.config.adapter.kind == "none":
            save_denoiser(model, folder, precision)
            return
        writes_comfyui_file = self.config.run.adapter_format == "comfyui"
        save_lora(
            model,
            folder,
            precision,
            self.run.folder,
            writes_comfyui_file=writes_comfyui_file,
            metadata=lora_metadata(self.data, step),
        )

    def write_card(
        self,
        model: Any,
        folder: Path,
        precision: Precision,
        *,
        step: int,
        observed: Mapping[str, Mapping[str, int]],
    ) -> None:
        card = picture_card(self.data, folder, precision, step=step, observed=observed)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")

    def reload(
        self, folder: Path, precision: Precision, device: torch.device, part: Part | None = None
    ) -> nn.Module:
        return load_result(folder, self.run.folder, self.config, precision, device, part)

    # what is shown and recorded

    def header(self) -> HeaderRows:
        return header_rows(self.data)

    def header_details(self) -> HeaderRows:
        return header_details(self.data)

    def records(self) -> Mapping[str, Any]:
        return run_records(self.data)

    def begin(self, folder: Path, *, is_resuming: bool) -> None:
        bad_rows = self.data.pictures.bad_pictures.rows.values()
        BadRowFile(folder / BAD_ROWS_FILE, resuming=is_resuming).write(bad_rows)

    def model_notes(
        self, model_outline: ModelOutline, precision: Precision
    ) -> tuple[str, list[str]]:
        class_name = type(inner_model(model_outline.model)).__name__
        return class_name, check_base(
            self.run.folder.published_quantisation, precision, self.base_name
        )

    def plan_facts(self) -> dict[str, Any]:
        return plan_facts(self.data)

    def plan_lines(self) -> list[str]:
        return plan_lines(self.data)
