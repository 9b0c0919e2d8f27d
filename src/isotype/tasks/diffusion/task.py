"""LoRA and full fine-tuning of a diffusion model, as the training code sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.schema import RunConfig
from ...config.sources import PictureSource, picture_sources
from ...data.bad_rows import FILE, BadRowFile
from ...distributed.world import ALONE, World
from ...dtypes import name as dtype_name
from ...dtypes import to_torch
from ...errors import UsageError
from ...model.load import read_config
from ...optimize import Manifest
from ...precision.apply import inner_model
from ...precision.parts import Part, loading_device
from ...precision.precision import Precision
from ...precision.quantised_base import check_base
from ...training.memory.blocks import apply_offload
from ...training.memory.plan import held_memory
from ...training.task import (
    Check,
    Evaluation,
    MetricNames,
    Outline,
    StepOutline,
    eval_mode,
    micro_batch,
)
from .batches import (
    Batch,
    DrawnRow,
    PictureStream,
    PlacedRow,
    Row,
    group_by_size,
    row_generator,
    stack_rows,
)
from .caption_lengths import CutCaptions, count_cut_captions
from .denoiser import (
    ForwardCost,
    build_denoiser,
    install_ops_and_precision,
    load_frozen_base,
    outline_base,
    outline_frozen_base,
    record_time_dtypes,
)
from .encode import Encoder, Store, TextInput, entry_key, free_memory
from .families import Conditioning, SampleSettings
from .loss import EvaluationDraw, Objective, build_objective, evaluate, picture_losses
from .pictures import (
    MissingPicture,
    RunPictures,
    collect_pictures,
    refuse_other_class_pictures,
    write_class_pictures,
)
from .pipeline import PipelineFolder
from .pixels import RunSizes
from .refused import refuse_unfit
from .result import load_result, save_denoiser, save_lora
from .sample import Prompt, Sample, control_thumbnails, prompt_text_inputs, sample

EMPTY = ""
REHEARSED_STEPS = 2  # of a shortened sample


class DiffusionTask:
    """Pictures with captions, a loss for each noised latent, sampled pictures. Implements
    `training.task.Task`.
    """

    kind = "diffusion"
    metric_names = MetricNames(units="pictures", unit="pic", weight="compared")

    folder: PipelineFolder
    sizes: RunSizes
    precision: Precision
    objective: Objective
    pictures: RunPictures
    encoder: Encoder
    train_rows: list[Row] | None = None
    evaluation_rows: list[Row]
    text: dict[TextInput, str]

    def __init__(self, config: RunConfig) -> None:
        self.config = config
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

    @property
    def base_name(self) -> str:
        return str(self.config.model.name)

    # before step 1

    def check(self, precision: Precision) -> None:
        config = self.config
        self.precision = precision
        pipeline = PipelineFolder.open(self.base_name, revision=config.model.revision)
        self.folder = pipeline.with_markers(
            objective=config.diffusion.objective, shift=config.diffusion.shift
        )
        if config.model.init == "random":
            self.folder = self.folder.with_random_denoiser(read_config(config.model.config))
        elif config.model.config is not None:
            raise UsageError(
                "model.config: has no effect without model.init: random", fix="model.init: random"
            )
        refuse_unfit(config, self.folder, precision, self.sources, self.prompts)
        family = self.folder.family
        self.sizes = RunSizes(config.images, self.sources, self.downscale * family.downscale)
        self.objective = build_objective(
            config.diffusion,
            self.folder.config("scheduler"),
            offered=family.objectives,
            tokens=self.sizes.tokens,
        )
        sample_sizes = [
            ("run.samples: size", int(prompt.overrides["size"]))
            for prompt in self.prompts
            if "size" in prompt.overrides
        ]
        max_positions: Any = self.folder.config(self.folder.denoiser_part).get("pos_embed_max_size")
        self.sizes.refuse(
            [("run.sample_size", self.sample_settings().size), *sample_sizes],
            None if max_positions is None else int(max_positions),
        )

    @property
    def downscale(self) -> int:
        """Pixels in a latent pixel, in each direction."""
        return self.folder.family.latents.downscale(self.folder.config("vae"))

    @cached_property
    def sources(self) -> list[PictureSource]:
        return [
            source
            for side in ("train", "regularisation", "eval")
            for source in picture_sources(self.config.images, side)
        ]

    @property
    def text_length(self) -> int:
        return self.config.diffusion.max_text_length or self.folder.family.max_text_length or 0

    @cached_property
    def cut_captions(self) -> CutCaptions:
        captions = (
            caption for picture in self.pictures.all_pictures for caption in picture.captions
        )
        return count_cut_captions(captions, self.folder, self.text_length)

    def load_data(self) -> None:
        self.pictures = collect_pictures(
            self.config.images, seed=self.config.train.seed, pairs=self.folder.family.edits_pictures
        )
        if self.pictures.to_draw and self.config.model.init == "random":
            raise UsageError(
                "images.regularisation: draw: a model of fresh weights draws noise",
                fix="a folder of pictures, or model.init: pretrained",
            )
        refuse_other_class_pictures(
            picture_sources(self.config.images, "regularisation"),
            self.pictures.to_draw,
            self._class_picture_facts(),
        )

    def encode(self, device: torch.device) -> None:
        """Writes latents and text embeddings of the run into its store and frees the encoders.
        Raises UsageError.
        """
        pictures = self.pictures
        self.encoder = encoder = self.make_encoder(device)
        self.text = encoder.encode_captions(self._text_inputs())
        # none where another process has drawn them
        if missing := [picture for picture in pictures.to_draw if not picture.path.is_file()]:
            self._draw_class_pictures(missing, device)
            free_memory(device)
        rows = encoder.encode_pictures(
            pictures.all_pictures, self.text, self.sizes, pictures.bad, seed=self.config.train.seed
        )
        pictures.bad.settle(
            sum(map(bool, rows)),
            fix="replace or remove these files; the others are encoded already",
        )
        encoder.store.enforce_bound()
        split = len(pictures.train)
        self.train_rows, self.evaluation_rows = (
            [row for picture_rows in part for row in picture_rows]
            for part in (rows[:split], rows[split:])
        )
        self._observed |= encoder.observed

    def _class_picture_facts(self) -> dict[str, Any]:
        """What shapes class pictures beside their caption; a model on this disk by its whole path."""
        settings = self.sample_settings()
        path = Path(self.base_name).expanduser()
        model = str(path.resolve()) if path.exists() else self.base_name
        return {
            "model": model,
            "steps": settings.steps,
            "guidance": settings.guidance,
            "seed": settings.seed,
        }

    def _draw_class_pictures(self, missing: Sequence[MissingPicture], device: torch.device) -> None:
        """With the base model and the run's settings of samples, under the run's precision; it is
        freed before the pictures are encoded.
        """
        config = self.config
        settings = self.sample_settings()
        model = load_frozen_base(
            self.folder, config, self.precision, loading_device(device, None, config.model.offload)
        )
        install_ops_and_precision(
            model, model, self.folder.family, config, self.precision, device_type=device.type
        )
        model = apply_offload(model, config.model.offload, device)
        overrides = [
            {
                "seed": settings.seed + picture.number,
                "size": picture.size or config.images.resolution,
            }
            for picture in missing
        ]
        prompts = [
            Prompt(picture.caption, overrides=override)
            for picture, override in zip(missing, overrides)
        ]
        write_class_pictures(
            missing,
            self._class_picture_facts(),
            (sample.png for sample in self.draw(model, device, prompts, settings)),
        )

    def _text_inputs(self) -> list[TextInput]:
        """What is encoded as text: every caption, the empty one, and what is sampled."""
        text_input = self.encoder.text_input
        drops_captions = self.config.images.caption_dropout > 0
        inputs = [] if self.folder.family.encodes_control else [TextInput(EMPTY)]
        for picture in self.pictures.all_pictures:
            inputs += [text_input(caption, picture.control) for caption in picture.captions]
            inputs += [text_input(EMPTY, picture.control)] if drops_captions else []
        return list(dict.fromkeys([*inputs, *prompt_text_inputs(self.prompts, self.encoder)]))

    def make_encoder(self, device: torch.device) -> Encoder:
        return Encoder(
            self.folder,
            self.precision,
            device,
            Store.open(self.config.images.cache),
            self.text_length,
            keeps_tokens=self.config.adapter.text_encoders,
        )

    def build_model(
        self, precision: Precision, device: torch.device, folder: Path, part: Part | None = None
    ) -> tuple[nn.Module, Manifest]:
        self.draw_base(folder)
        return self.load_model(precision, device, part)

    def draw_base(self, folder: Path) -> None:
        """With `model.init: random`: takes the denoiser in `folder`, where its weights are drawn
        unless they are there already.
        """
        if self.config.model.init == "random":
            self.folder = self.folder.draw_denoiser(folder, seed=self.config.train.seed)

    def load_model(
        self, precision: Precision, device: torch.device, part: Part | None = None
    ) -> tuple[nn.Module, Manifest]:
        """The model that is trained, with the folder's weights."""
        if self.config.adapter.kind == "none":
            denoiser = self.folder.denoiser(to_torch(precision.trainable)).to(
                loading_device(device, part)
            )
        else:
            denoiser = load_frozen_base(
                self.folder,
                self.config,
                precision,
                loading_device(device, part, self.config.model.offload),
            )
        model, manifest = build_denoiser(
            denoiser, self.folder.family, self.config, precision, device_type=device.type, part=part
        )
        manifest.notes += check_base(self.folder.published, precision, self.base_name)
        record_time_dtypes(model, self._observed)
        return apply_offload(model, self.config.model.offload, device), manifest

    def observed_dtypes(self) -> Iterable[tuple[str, str, str]]:
        return [(role, tensor, dtype) for (role, tensor), dtype in self._observed.items()]

    @property
    def rows(self) -> int:
        """Of an epoch; before the pictures are encoded those are counted too that will turn out to
        be bad.
        """
        if self.train_rows is not None:
            return len(self.train_rows)
        return sum(picture.repeats for picture in self.pictures.train)

    @property
    def eval_rows(self) -> int:
        if self.train_rows is None:
            return len(self.pictures.eval)
        return len(self.evaluation_rows)

    def feed(self) -> PictureStream:
        train = self.config.train
        return PictureStream(
            self._encoded(),
            seed=train.seed,
            shuffle=self.config.images.shuffle,
            step_rows=train.batch_size * train.accumulate,
        )

    def _encoded(self) -> list[Row]:
        assert self.train_rows is not None, "pictures are encoded before the model is built"
        return self.train_rows

    def largest_rows(self, count: int) -> list[PlacedRow]:
        most = max(self._encoded(), key=lambda row: row.size.area).size
        rows = [row for row in self._encoded() if row.size == most]
        return [PlacedRow(row, i) for i, row in enumerate((rows * count)[:count])]

    def outline(self, precision: Precision, *, device_type: str) -> Outline:
        trains_every_weight = self.config.adapter.kind == "none"
        total = sum(p.numel() for p in self.folder.denoiser_outline().parameters())
        is_frozen_or_published = not trains_every_weight or self.folder.published is not None
        if is_frozen_or_published:
            denoiser = outline_frozen_base(self.folder, self.config, precision)
        else:
            denoiser = outline_base(self.folder, self.config)
        with torch.device("meta"):
            model, _ = build_denoiser(
                denoiser, self.folder.family, self.config, precision, device_type=device_type
            )
            apply_offload(
                model,
                self.config.model.offload,
                torch.device("cpu" if device_type == "cpu" else "meta"),
            )
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return Outline(model, trainable, total + (0 if trains_every_weight else trainable))

    def step_outline(self, precision: Precision) -> StepOutline:
        rows = self.config.train.batch_size
        draws = min(
            micro_batch(self.config.train),
            len(self.pictures.eval) * self.config.diffusion.eval_draws,
        )

        def evaluation(model: nn.Module, device: torch.device) -> None:
            with eval_mode(model):
                self.loss_sum(model, self.empty_batch(draws, device), dtype=precision.loss)

        return StepOutline(
            rows=rows,
            length=self.sizes.tokens,
            batch=lambda device: self.empty_batch(rows, device),
            loss_sum=partial(self.loss_sum, dtype=precision.loss),
            evaluation=evaluation if draws else None,
            block_flops=lambda _: [rows * flops for flops in self.forward_cost.blocks],
        )

    def empty_batch(self, rows: int, device: torch.device) -> Batch:
        """The shapes and dtypes of a batch of the largest pictures."""
        config, channels = (
            self.folder.config(self.folder.denoiser_part),
            self.folder.family.latents.channels(self.folder.config("vae")),
        )
        sides = (self.sizes.largest_side // self.downscale,) * 2
        dtype = to_torch(self.precision.latents)
        text_dtype = to_torch(self.precision.text_encoder)
        length = self.folder.family.text_tokens(self.folder.clip_length(), self.text_length)
        latents, noise = (
            torch.empty(rows, channels, *sides, dtype=dtype, device=device) for _ in range(2)
        )
        shapes = self.folder.family.text_shapes(config, length)
        texts = {
            name: torch.empty(rows, *shape, dtype=text_dtype, device=device)
            for name, shape in shapes.items()
        }
        if self.config.adapter.text_encoders:
            encoders = len(self.folder.family.trainable_encoders)
            texts = {
                "ids": torch.zeros(rows, encoders, length, dtype=torch.long, device=device),
                "captioned": torch.ones(rows, dtype=torch.bool, device=device),
            }
        lengths = (length,) * rows if self.folder.family.keeps_text_lengths else ()
        control = torch.empty_like(latents) if self.folder.family.edits_pictures else None
        return Batch(
            latents,
            noise,
            torch.empty(rows, dtype=dtype, device=device),
            texts,
            lengths=lengths,
            control=control,
        )

    def max_step_bytes(self, model: nn.Module, precision: Precision) -> int:
        train = self.config.train
        return (
            held_memory(model, train, precision).held
            + 3 * train.batch_size * self.forward_cost.output_bytes
        )

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        return {}

    # training

    def prepare_training(
        self, model: nn.Module, device: torch.device, folder: Path, world: World, *, dtype: str
    ) -> list[tuple[str, str]]:
        return []

    def split_by_shape(self, rows: Sequence[PlacedRow]) -> list[list[PlacedRow]]:
        return list(group_by_size(rows, lambda placed: placed.row.size).values())

    def collate(self, rows: Sequence[PlacedRow]) -> Batch:
        config = self.config
        drawn = []
        for placed in rows:
            generator = row_generator("train", config.train.seed, placed.position)
            row = placed.row
            sigma = self.objective.draw(generator, self.sizes.count_tokens(row.size))
            dropped, mirrored, window, caption = torch.rand(4, generator=generator).tolist()
            keys = row.mirrored if row.mirrored and mirrored < 0.5 else row.latents
            entry = self.encoder.store.get(keys[int(window * len(keys))])
            eps, noise = (torch.randn(entry["mean"].shape, generator=generator) for _ in range(2))
            if (offset := config.diffusion.noise_offset) > 0:
                noise = noise + offset * torch.randn(len(noise), 1, 1, generator=generator)
            if dropped < config.images.caption_dropout:
                text = row.empty
            else:
                text = row.text[int(caption * len(row.text))]
            drawn.append(self._draw_row(row, entry, noise, sigma, text, eps=eps))
        return self._stack(drawn)

    def _draw_row(
        self,
        row: Row,
        entry: dict[str, Tensor],
        noise: Tensor,
        sigma: float,
        text: str,
        *,
        eps: Tensor | None,
    ) -> DrawnRow:
        """eps: standard deviations of the posterior beside its mean; None: the mean"""
        x_CHW = entry["mean"] if eps is None else entry["mean"] + entry["std"] * eps
        texts = self.encoder.store.get(text)
        mask = entry.get("mask")
        control = entry.get("control")
        return DrawnRow(x_CHW, noise, sigma, texts, entry["cut"], mask, row.weight, control)

    def _stack(self, drawn: Sequence[DrawnRow]) -> Batch:
        batch = stack_rows(
            drawn,
            dtype=to_torch(self.precision.latents),
            keeps_text_lengths=self.folder.family.keeps_text_lengths,
        )
        for name in ("latents", "noise", "sigma"):
            self._observed["latents", name] = dtype_name(getattr(batch, name).dtype)
        return batch

    def losses(self, model: nn.Module, batch: Batch, *, dtype: str) -> Tensor:
        if self.config.diffusion.loss == "huber":
            huber = self.config.diffusion.huber_c
        else:
            huber = None
        conditioning = Conditioning(
            self.config.diffusion.guidance, self.downscale, batch.lengths, batch.crop, batch.control
        )
        return picture_losses(
            model, self.folder.family, self.objective, batch, conditioning, dtype=dtype, huber=huber
        )

    def loss_sum(self, model: nn.Module, batch: Any, divisor: int = 1, *, dtype: str) -> Tensor:
        return self.losses(model, batch, dtype=dtype).sum() / divisor

    def prepare_step(
        self, model: nn.Module, batches: Iterable[Any], world: World, *, dtype: str
    ) -> Iterable[Any]:
        return batches

    @cached_property
    def forward_cost(self) -> ForwardCost:
        """Of one training picture in the denoiser without adapter, in fp32."""
        denoiser = outline_base(self.folder, self.config)
        batch = self.empty_batch(1, torch.device("meta"))
        self.folder.family.prepare(denoiser)
        batch = replace(
            batch,
            text={
                name: t.float() if t.is_floating_point() else t for name, t in batch.text.items()
            },
        )
        return ForwardCost.measure(denoiser, lambda: self.losses(denoiser, batch, dtype="fp32"))

    def fingerprints(self) -> dict[str, str]:
        def key(rows: Sequence[Row]) -> str:
            return entry_key(
                [
                    [[row.latents, row.mirrored, row.text, row.weight] for row in rows],
                    str(self.objective),
                ]
            )

        return {"training": key(self._encoded()), "evaluation": key(self.evaluation_rows)}

    def evaluate(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        dtype: str,
        most: int | None = None,
        world: World = ALONE,
    ) -> Evaluation:
        return self._evaluate(
            model, (self.evaluation_rows or self._encoded())[:most], device, dtype, world
        )

    def rehearse_evaluation(
        self, model: nn.Module, device: torch.device, *, dtype: str
    ) -> Evaluation | None:
        if self.evaluation_rows:
            return self._evaluate(
                model, self.evaluation_rows[: micro_batch(self.config.train)], device, dtype
            )
        return None

    def _evaluate(
        self,
        model: nn.Module,
        rows: Sequence[Row],
        device: torch.device,
        dtype: str,
        world: World = ALONE,
    ) -> Evaluation:
        return evaluate(
            model,
            rows,
            draws=self.config.diffusion.eval_draws,
            batch_size=micro_batch(self.config.train),
            device=device,
            build_batch=self._fixed_batch,
            losses=lambda model, batch: self.losses(model, batch, dtype=dtype),
            world=world,
        )

    def _fixed_batch(self, draws: Sequence[EvaluationDraw]) -> Batch:
        """The batch of fixed draws: the posterior's mean of the first window, noise by the draw's
        number, the row's first caption.
        """
        drawn = []
        for number, row, level in draws:
            entry = self.encoder.store.get(row.latents[0])
            noise = torch.randn(
                entry["mean"].shape,
                generator=row_generator("evaluation", self.config.train.seed, number),
            )
            drawn.append(self._draw_row(row, entry, noise, level, row.text[0], eps=None))
        return self._stack(drawn)

    @property
    def samples(self) -> int:
        return len(self.config.run.samples)

    def sample(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        shortened: bool = False,
        world: World = ALONE,
    ) -> list[Sample]:
        prompts = self.prompts[:1] if shortened else self.prompts
        if shortened:
            prompts = [
                replace(prompt, overrides={**prompt.overrides, "steps": REHEARSED_STEPS})
                for prompt in prompts
            ]
        return list(self.draw(model, device, prompts, self.sample_settings(), world=world))

    @cached_property
    def prompts(self) -> list[Prompt]:
        return [Prompt.parse(entry) for entry in self.config.run.samples]

    def sample_settings(self) -> SampleSettings:
        run = self.config.run
        return SampleSettings(
            run.sample_size or self.config.images.resolution,
            run.sample_steps,
            run.sample_guidance,
            self.config.train.seed,
        )

    def draw(
        self,
        model: nn.Module,
        device: torch.device,
        prompts: Sequence[Prompt],
        settings: SampleSettings,
        *,
        world: World = ALONE,
    ) -> Iterator[Sample]:
        """A picture for each prompt, whose embeddings are in the store, each as it is drawn."""
        get = self.encoder.store.get
        texts = [
            [
                get(self.text[text_input])
                for text_input in prompt_text_inputs([prompt], self.encoder)
            ]
            for prompt in prompts
        ]
        encoded_prompts = [
            (prompt, text, negative) for prompt, (text, negative) in zip(prompts, texts)
        ]
        return sample(
            model, self.folder, self.precision, encoded_prompts, settings, device, world=world
        )

    # the result

    def save(self, model: Any, folder: Path, precision: Precision) -> None:
        if self.config.adapter.kind != "none":
            save_lora(
                model,
                folder,
                precision,
                self.folder,
                comfyui=self.config.run.adapter_format == "comfyui",
            )
        else:
            save_denoiser(model, folder, precision)

    def reload(
        self, folder: Path, precision: Precision, device: torch.device, part: Part | None = None
    ) -> nn.Module:
        return load_result(folder, self.folder, self.config, precision, device, part)

    # what is told

    def header(self) -> list[tuple[str, str]]:
        encoded_count = self.encoder.encoded_count
        cached_count = self.encoder.cached_count
        if self.encoder.store.folder:
            location = f" in {self.encoder.store.folder}"
        else:
            location = " in memory"
        first, levels, *more = self.plan_lines()
        cached = f"{encoded_count} latents and embeddings made, {cached_count} found{location}"
        return [("data", first), *(("", line) for line in (*more, cached, levels))]

    def records(self) -> Mapping[str, Any]:
        count_by_size = {
            str(size): count
            for size, count in sorted(Counter(row.size for row in self._encoded()).items())
        }
        return {
            "data.json": {
                **self.plan_facts(),
                "train_pictures_by_size": count_by_size,
                "files_not_read": self.pictures.other_files,
                "cut_captions": self.cut_captions.number,
                "first_cut_caption": self.cut_captions.first or None,
                "unmasked_pictures": len(self.pictures.unmasked_pictures()),
                "made": self.encoder.encoded_count,
                "found": self.encoder.cached_count,
            },
            "examples.json": {
                "examples": self.pictures.examples(),
                "before": control_thumbnails(self.prompts),
            },
        }

    def begin(self, folder: Path, *, resuming: bool) -> None:
        BadRowFile(folder / FILE, resuming=resuming).write(self.pictures.bad.rows.values())

    def model_notes(self, outline: Outline, precision: Precision) -> tuple[str, list[str]]:
        return type(inner_model(outline.model)).__name__, check_base(
            self.folder.published, precision, self.base_name
        )

    def plan_facts(self) -> dict[str, Any]:
        pictures = self.pictures
        sizes = self.sizes
        objective = self.objective
        return {
            "train_pictures": self.rows,
            "eval_pictures": self.eval_rows,
            "regularisation_pictures": pictures.regularisation,
            "masked_pictures": sum(picture.mask is not None for picture in pictures.train),
            "bad_pictures": len(pictures.bad.rows),
            "captions": len(
                {caption for picture in pictures.all_pictures for caption in picture.captions}
            ),
            "buckets": len(sizes.all_sizes),
            "resolutions": [side for _, side in sizes.resolutions],
            "latent_tokens": sizes.tokens,
            "objective": objective.kind,
            "timesteps": objective.levels.timesteps,
            "shift": objective.levels.shift,
        }

    def plan_lines(self) -> list[str]:
        facts = self.plan_facts()
        sizes = self.sizes
        kinds = [
            f"{facts[f'{kind}_pictures']:,} {kind}"
            for kind in ("regularisation", "masked")
            if facts[f"{kind}_pictures"]
        ]
        of_these = f" ({', '.join(kinds)})" if kinds else ""
        lines = [
            (
                f"{facts['train_pictures']:,} training pictures{of_these},"
                f" {facts['eval_pictures']:,} for evaluation,"
                f" {' and '.join(f'{side} x {side}' for side in facts['resolutions'])} pixels,"
                f" {facts['latent_tokens']:,} latent tokens each"
            ),
            f"{self.objective}; evaluated at {self.config.diffusion.eval_draws} fixed ones",
        ]
        lines += self.folder.marker_lines()
        if self.cut_captions.number:
            lines.append(str(self.cut_captions))
        lines += self.pictures.unmasked_lines()
        lines += self.pictures.other_file_lines()
        if facts["buckets"] > len(sizes.resolutions):
            lines.append(f"aspect buckets: {', '.join(map(str, sorted(sizes.all_sizes)))}")
        if self.pictures.to_draw:
            lines.append(
                f"{len(self.pictures.to_draw)} class pictures are drawn by the base model, once"
            )
        if facts["bad_pictures"]:
            lines.append(f"{facts['bad_pictures']} bad pictures are left out (images.on_bad_row)")
        return lines
