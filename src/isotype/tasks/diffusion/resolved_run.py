"""Determines all settings of a diffusion run before its data is read. From the configuration, it
finds the pipeline, the sizes of the pictures, the objective and the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from ...config.schema import RunConfig
from ...config.sources import PictureSource, picture_sources
from ...errors import UsageError
from ...model.load import read_config
from ...precision.precision import Precision
from .batches import Batch
from .families import Conditioning, Family, SampleSettings
from .lora_file import LoraFile, read_lora_file
from .loss import Objective, build_objective, picture_losses
from .picture_sizes import RunSizes, Size
from .pipeline import PipelineFolder
from .sample import Prompt
from .setting_checks import refuse_incompatible_settings


@dataclass(frozen=True)
class StartFile:
    """The LoRA file of `adapter.start_from`, written as a PEFT folder from which the adapter is
    loaded. The folder exists as long as the object.
    """

    lora: LoraFile
    folder: TemporaryDirectory[str]

    @classmethod
    def open(cls, config: RunConfig, pipeline: PipelineFolder) -> StartFile | None:
        """Reads the file. Returns None if `adapter.start_from` is not a file. Raises UsageError."""
        if config.adapter.start_from is None or config.adapter.kind == "none":
            return None
        path = Path(config.adapter.start_from)
        if not path.is_file():
            return None
        start = cls(read_lora_file(path, pipeline, config), TemporaryDirectory("isotype-start"))
        start.lora.write_peft_folder(Path(start.folder.name))
        return start

    def with_peft_folder(self, config: RunConfig) -> RunConfig:
        adapter = config.adapter.model_copy(update={"start_from": self.folder.name})
        return config.model_copy(update={"adapter": adapter})


@dataclass(frozen=True)
class ResolvedRun:
    """The settings of a diffusion run, and everything that can be computed from them before the
    data is read.

    folder   the pipeline, with this run's schedule and settings of the denoiser
    sources  the sources of the pictures for training, regularisation and evaluation
    prompts  the prompts of the samples
    start    the LoRA file of `adapter.start_from`, if it is a file
    """

    config: RunConfig
    precision: Precision
    folder: PipelineFolder
    sources: list[PictureSource]
    prompts: list[Prompt]
    start: StartFile | None = None

    @classmethod
    def open(cls, config: RunConfig, precision: Precision) -> ResolvedRun:
        """Opens the pipeline and checks the settings. Raises UsageError if the settings do not fit
        the pipeline or contradict each other.
        """
        pipeline = open_pipeline(config)
        sources = _read_picture_sources(config)
        if any(source.controls or "control" in (source.columns or {}) for source in sources):
            pipeline = pipeline.for_pairs()
        start = StartFile.open(config, pipeline)
        if start is not None:
            config = start.with_peft_folder(config)
        run = cls(
            config,
            precision,
            pipeline,
            sources,
            [Prompt.parse(entry) for entry in config.run.samples],
            start,
        )
        start_name = None if start is None else start.lora.path
        refuse_incompatible_settings(
            config, run.folder, precision, run.sources, run.prompts, start_name
        )
        _ = run.objective  # raises UsageError
        run._check_sizes()
        return run

    def with_drawn_denoiser(self, folder: Path) -> ResolvedRun:
        """If `model.init` is `random`, returns a copy of this run whose denoiser has random
        weights. The weights are in `folder`. If they do not exist there, they are generated first.
        Otherwise returns the run itself.
        """
        if self.config.model.init != "random":
            return self
        pipeline = self.folder.draw_denoiser(folder, seed=self.config.train.seed)
        return replace(self, folder=pipeline)

    @property
    def family(self) -> Family:
        return self.folder.family

    @cached_property
    def downscale(self) -> int:
        """The number of pixels per latent pixel in each direction."""
        return self.family.latents.downscale(self.folder.config("vae"))

    @property
    def max_text_length(self) -> int:
        """Returns the largest number of tokens of a caption, or 0 if the tokenizer's own limit is
        used.
        """
        return self.config.diffusion.max_text_length or self.family.max_text_length or 0

    @cached_property
    def sizes(self) -> RunSizes:
        side_multiple = self.downscale * self.family.latent_side_multiple
        return RunSizes(self.config.images, self.sources, side_multiple, self.frame_step)

    @cached_property
    def frame_step(self) -> int:
        """The number of frames of a clip that the VAE combines into one latent frame."""
        return self.family.latents.frame_step(self.folder.config("vae"))

    @property
    def frame_rate(self) -> float:
        """Returns the number of frames per second of clips and samples."""
        return self.config.images.frame_rate or self.family.frame_rate or 1.0

    @property
    def frames(self) -> int:
        """Returns the number of frames of the longest clips; 1 if the run trains on pictures."""
        frame_counts = [source.frames for source in self.sources]
        return max(frame_counts, default=self.config.images.frames)

    @property
    def noise_range(self) -> tuple[float, float]:
        """Returns the noise levels at which the pipeline uses the denoiser: the lowest and the
        highest.
        """
        return self.family.noise_range(self.folder.index)

    @cached_property
    def objective(self) -> Objective:
        section = self.config.diffusion
        lowest, highest = self.noise_range
        limits = {
            "least_noise": max(lowest, section.least_noise),
            "most_noise": min(highest, section.most_noise),
        }
        return build_objective(
            section.model_copy(update=limits),
            self.folder.config("scheduler"),
            supported=self.family.objectives,
            tokens=self.sizes.tokens,
        )

    @property
    def sample_settings(self) -> SampleSettings:
        """Returns the settings of the samples. A prompt may override them."""
        run = self.config.run
        side = run.sample_size or self.config.images.resolution
        return SampleSettings(
            Size(side, side),
            run.sample_steps,
            run.sample_guidance,
            self.config.train.seed,
            run.sample_frames or self.frames,
            self.frame_rate,
        )

    def losses(self, model: nn.Module, batch: Batch, *, dtype: str) -> Tensor:
        """Returns the loss of each picture of a batch, float[N] in `dtype`."""
        settings = self.config.diffusion
        huber_c = settings.huber_c if settings.loss == "huber" else None
        conditioning = Conditioning(
            settings.guidance,
            self.downscale,
            batch.lengths,
            batch.crop,
            batch.controls,
            self.frame_step,
            self.frame_rate,
        )
        return picture_losses(
            model, self.family, self.objective, batch, conditioning, dtype=dtype, huber_c=huber_c
        )

    def _check_sizes(self) -> None:
        """Raises UsageError if the model does not support the size of a picture or of a sample."""
        sample_sides = [
            ("run.samples: size", side)
            for prompt in self.prompts
            if "size" in prompt.overrides
            for side in prompt.overrides["size"].sides
        ]
        max_side_tokens: Any = self.folder.config(self.folder.denoiser_part).get(
            "pos_embed_max_size"
        )
        self.sizes.check_sizes(
            [("run.sample_size", self.sample_settings.size.height), *sample_sides],
            None if max_side_tokens is None else int(max_side_tokens),
        )


def open_pipeline(config: RunConfig) -> PipelineFolder:
    """Opens the pipeline that `model.name` names. If the pipeline is a single file, the markers in
    this file determine the noise schedule. If `model.init` is `random`, the denoiser gets the
    configuration from `model.config`. Raises UsageError.
    """
    pipeline = PipelineFolder.open(
        str(config.model.name), revision=config.model.revision, vae=config.model.vae
    )
    pipeline = pipeline.with_markers(
        objective=config.diffusion.objective, shift=config.diffusion.shift
    )
    pipeline = pipeline.for_expert(config.diffusion.expert)
    if config.model.init == "random":
        return pipeline.with_random_denoiser(read_config(config.model.config))
    if config.model.config is not None:
        raise UsageError(
            "model.config: has no effect without model.init: random", fix="model.init: random"
        )
    return pipeline


def _read_picture_sources(config: RunConfig) -> list[PictureSource]:
    return [
        source
        for split in ("train", "regularisation", "eval")
        for source in picture_sources(config.images, split)
    ]
