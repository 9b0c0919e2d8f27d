"""The memory that a LoRA of each picture and clip family needs, and the fastest settings with which
it fits on cards of 8 to 24 GB. The models have the published sizes. Nothing is downloaded.

    python benchmarks/diffusion_cards.py           # writes the table into docs/diffusion.md; 20 minutes
    python benchmarks/diffusion_cards.py Flux Wan  # only the rows of the models with these words in their names

The rows of a model are written when they are complete. If a model has the default sizes of its class
in diffusers 0.42, its entry has no settings.

Source  `transformer/config.json` or `unet/config.json` of the named models. We compared the sizes with
        configurations that these public files quote (November 2026): BFL's `flux2/model.py` (FLUX.2,
        klein), vllm-omni (LongCat), SGLang (Lumina 2), InvokeAI (Chroma), diffusers' conversion
        scripts (Sana, LTX-2), and copies of config.json in other projects (AuraFlow, whose table of
        positions has 9,216 entries, ERNIE-Image, HiDream, Ideogram 4, Kandinsky 5, Krea 2, LTX-Video,
        PixArt-alpha, Wan 2.1, Z-Image). Not compared: FLUX.1, SD3.5, Qwen-Image, SDXL, Stable Diffusion
        1.5 and PixArt-Sigma
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
from safetensors.torch import save_file

from isotype.config.load import load
from isotype.environment.hardware import lookup_hardware
from isotype.tasks.diffusion.families import FAMILIES
from isotype.tasks.diffusion.model import empty_batch, measure_forward_cost
from isotype.tasks.diffusion.task import DiffusionTask
from isotype.training.device_setup import check_run
from isotype.training.memory.blocks import get_frozen_blocks, plan_offload
from isotype.training.memory.device import memory_limit
from isotype.training.memory.plan import (
    MemoryPlan,
    plan_memory,
    plan_persistent_memory,
    plan_with_offload,
)
from isotype.training.memory.recomputation import (
    LAYERS,
    NONE,
    OFFLOAD,
    Checkpointing,
    checkpointable_layers,
)
from isotype.training.task import ModelOutline, StepOutline

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.diffusion_plans import FLUX_DEV, QWEN_IMAGE, SD35_LARGE, SDXL_BASE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "diffusion.md"
BEGIN, END = "<!-- cards -->\n", "<!-- end of cards -->"
CARDS = {8: "rtx4060", 12: "rtx3060-12gb", 16: "rtx4060ti-16gb", 24: "rtx4090"}
GIB = 2**30
BASES = ("nf4", "int8", "bf16")
# the estimated time of a step with a packed base, and with recomputation: a forward takes a third of
# a step
_BASE_TIME = {"bf16": 1.0, "int8": 1.04, "nf4": 1.04}
_RECOMPUTATION_TIME = 4 / 3


@dataclass(frozen=True)
class Model:
    """A published model.

    pipeline   the `_class_name` in model_index.json
    denoiser   the class of the denoiser
    settings   the settings in which the denoiser differs from the default sizes of its class
    frames     the number of frames of a clip
    """

    name: str
    pipeline: str
    denoiser: str
    settings: dict[str, Any] = field(default_factory=dict)
    frames: int = 1


KLEIN_4B = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680, "guidance_embeds": False,
}  # fmt: skip
KLEIN_9B = {
    "num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288, "guidance_embeds": False,
}  # fmt: skip
SD15 = {
    "sample_size": 64, "block_out_channels": (320, 640, 1280, 1280), "attention_head_dim": 8, "cross_attention_dim": 768,
}  # fmt: skip
HIDREAM = {
    "patch_size": 2, "in_channels": 16, "num_layers": 16, "num_single_layers": 32, "num_attention_heads": 20,
    "caption_channels": [4096, 4096], "text_emb_dim": 2048, "axes_dims_rope": (64, 32, 32), "max_resolution": (128, 128),
    "llama_layers": [*range(32), *[31] * 16],
}  # fmt: skip
KANDINSKY = {
    "in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 2560, "ff_dim": 10240, "num_visual_blocks": 50, "axes_dims": (32, 48, 48),
}  # fmt: skip
ERNIE = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 36, "ffn_hidden_size": 12288, "text_in_dim": 3072,
}  # fmt: skip
AURAFLOW_03 = {"pos_embed_max_size": 9216}
LONGCAT = {"num_layers": 10, "num_single_layers": 20}
WAN_SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
FLUX, FLUX2, QWEN = (
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
)
PIXART, UNET = "PixArtTransformer2DModel", "UNet2DConditionModel"
WAN, LTX = "WanTransformer3DModel", "LTXVideoTransformer3DModel"
MODELS = (
    Model("FLUX.1-dev", "FluxPipeline", FLUX, FLUX_DEV),
    Model("FLUX.1-Kontext-dev", "FluxKontextPipeline", FLUX, FLUX_DEV),
    Model("FLUX.2-dev", "Flux2Pipeline", FLUX2),
    Model("FLUX.2-klein-4B", "Flux2KleinPipeline", FLUX2, KLEIN_4B),
    Model("FLUX.2-klein-9B", "Flux2KleinPipeline", FLUX2, KLEIN_9B),
    Model("Qwen-Image", "QwenImagePipeline", QWEN, QWEN_IMAGE),
    Model("Qwen-Image-Edit", "QwenImageEditPipeline", QWEN, QWEN_IMAGE),
    Model("Qwen-Image-Edit-2509", "QwenImageEditPlusPipeline", QWEN, QWEN_IMAGE),
    Model("Z-Image", "ZImagePipeline", "ZImageTransformer2DModel"),
    Model("Chroma1-HD", "ChromaPipeline", "ChromaTransformer2DModel"),
    Model("SD 3.5 large", "StableDiffusion3Pipeline", "SD3Transformer2DModel", SD35_LARGE),
    Model("SDXL base 1.0", "StableDiffusionXLPipeline", UNET, SDXL_BASE),
    Model("Stable Diffusion 1.5", "StableDiffusionPipeline", UNET, SD15),
    Model("Sana 1.6B", "SanaPipeline", "SanaTransformer2DModel"),
    Model("AuraFlow 0.3", "AuraFlowPipeline", "AuraFlowTransformer2DModel", AURAFLOW_03),
    Model("Lumina-Image-2.0", "Lumina2Pipeline", "Lumina2Transformer2DModel", {"cap_feat_dim": 2304}),
    Model("HiDream-I1", "HiDreamImagePipeline", "HiDreamImageTransformer2DModel", HIDREAM),
    Model("PixArt-alpha XL", "PixArtAlphaPipeline", PIXART, {"caption_channels": 4096}),
    Model("PixArt-Sigma XL", "PixArtSigmaPipeline", PIXART, {"caption_channels": 4096}),
    Model("Krea 2", "Krea2Pipeline", "Krea2Transformer2DModel"),
    Model("ERNIE-Image", "ErnieImagePipeline", "ErnieImageTransformer2DModel", ERNIE),
    Model("Ideogram 4", "Ideogram4Pipeline", "Ideogram4Transformer2DModel"),
    Model("LongCat-Image", "LongCatImagePipeline", "LongCatImageTransformer2DModel", LONGCAT),
    Model("Kandinsky 5 T2I Lite", "Kandinsky5T2IPipeline", "Kandinsky5Transformer3DModel", KANDINSKY),
    Model("Wan 2.1 1.3B", "WanPipeline", WAN, WAN_SMALL, frames=33),
    Model("Wan 2.1 14B", "WanPipeline", WAN, frames=33),
    Model("LTX-Video 2B", "LTXPipeline", LTX, frames=33),
    Model("LTX-2 19B", "LTX2Pipeline", "LTX2VideoTransformer3DModel", frames=33),
)  # fmt: skip


def vae_settings(pipeline: str) -> dict[str, Any]:
    """Returns the settings of the VAE that decide the shape of the latents."""
    channels = 16
    if pipeline in (
        "StableDiffusionXLPipeline",
        "StableDiffusionPipeline",
        "AuraFlowPipeline",
    ) or pipeline.startswith("PixArt"):
        channels = 4
    elif (
        pipeline.startswith("Flux2")
        or pipeline in ("ErnieImagePipeline", "Ideogram4Pipeline")
        or pipeline == "SanaPipeline"
    ):
        channels = 32
    elif pipeline.startswith("LTX"):
        channels = 128
    return {
        "_class_name": FAMILIES[pipeline].latents.vae,
        "latent_channels": channels,
        "z_dim": channels,
        "block_out_channels": [128, 256, 512, 512],
        "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
        "temperal_downsample": [False, True, True],
        "spatial_compression_ratio": 32 if pipeline.startswith("LTX") else None,
        "temporal_compression_ratio": 8 if pipeline.startswith("LTX") else None,
    }


def default_settings(denoiser: str) -> dict[str, Any]:
    """Returns the defaults of the settings of a class of diffusers."""
    parameters = inspect.signature(getattr(diffusers, denoiser).__init__).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def write_folder(folder: Path, model: Model) -> Path:
    """Writes the folder of a pipeline with its configurations. Its weight files are empty."""
    family = FAMILIES[model.pipeline]
    if family.objectives[0] == "flow_matching":
        scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
    else:
        scheduler = {
            "_class_name": "DDPMScheduler",
            "num_train_timesteps": 1000,
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "prediction_type": "epsilon",
        }
    vae = vae_settings(model.pipeline)
    index = {
        "_class_name": model.pipeline,
        family.denoiser: ["diffusers", model.denoiser],
        "vae": ["diffusers", vae["_class_name"]],
        "scheduler": ["diffusers", scheduler["_class_name"]],
        **{part: ["transformers", "CLIPTokenizer"] for part in family.encoder_parts},
    }
    files = {
        "model_index.json": index,
        f"{family.denoiser}/config.json": {
            "_class_name": model.denoiser,
            **default_settings(model.denoiser),
            **model.settings,
        },
        "vae/config.json": vae,
        "scheduler/scheduler_config.json": scheduler,
    }
    for part in family.encoder_parts:
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    for part in (family.denoiser, "vae"):
        save_file({}, folder / part / "diffusion_pytorch_model.safetensors")
    return folder


@dataclass(frozen=True)
class Candidate:
    """Settings of a run, and what their plan says.

    base           the dtype of the base
    checkpointing  `none`, `layers` or `layers+offload`
    has_offload    whether the blocks are kept in host memory
    peak           the planned peak in bytes
    offload_times  for the memory of each card, the time of a step with blocks in host memory,
                   divided by the time without; empty without `has_offload`
    """

    base: str
    checkpointing: str
    has_offload: bool
    peak: int
    offload_times: dict[int, float] = field(default_factory=dict)

    def time(self, card_gib: int) -> float:
        """Estimates the time of a step, divided by the time of a bf16 step that recomputes nothing."""
        time = _BASE_TIME[self.base] * self.offload_times.get(card_gib, 1.0)
        return time if self.checkpointing == NONE else time * _RECOMPUTATION_TIME

    def fits(self, card_gib: int) -> bool:
        return self.peak <= memory_limit(lookup_hardware(CARDS[card_gib]).memory)

    def __str__(self) -> str:
        parts = [self.base]
        if self.checkpointing != NONE:
            parts.append(self.checkpointing)
        if self.has_offload:
            parts.append("blocks")
        return " + ".join(parts)


class Planner:
    """Plans steps of one model with one dtype of the base."""

    def __init__(self, folder: Path, model: Model, base: str) -> None:
        self.folder = folder
        self.base = base
        self.controls = int(FAMILIES[model.pipeline].edits_pictures)
        self.open_task(512, 1)
        self.outline: ModelOutline = self.task.outline_model(self.precision, device_type="cuda")
        self.layers = len(checkpointable_layers(self.outline.model))
        self.frozen = plan_persistent_memory(
            self.outline.model, self.config.train, self.precision
        ).frozen

    def open_task(self, side: int, frames: int) -> None:
        """Sets the size of the pictures or clips of the following plans."""
        settings = [
            f"model.name={self.folder}",
            "images.train=pictures",
            f"images.resolution={side}",
            f"images.frames={frames}",
            "adapter.r=16",
            f"precision.preset={'nf4-lora' if self.base == 'nf4' else 'bf16-lora'}",
            "train.batch_size=1",
            "train.accumulate=1",
            "run.folder=run",
        ]
        if self.base == "int8":
            settings.append("precision.base=int8")
        loaded = load(None, settings)
        self.config = loaded.config
        self.task = DiffusionTask(loaded.config)
        setup = check_run(self.task, loaded.sources, lookup_hardware("rtx4090"))
        self.precision = setup.resolved.precision

    def plan(self, checkpointing: str) -> MemoryPlan:
        run = self.task.run
        count = 0 if checkpointing == NONE else self.layers
        plan = plan_memory(
            self.outline,
            self.config.train,
            self.precision,
            StepOutline(
                rows=1,
                length=run.sizes.tokens,
                make_batch=lambda device: empty_batch(run, 1, device, self.controls),
                compute_loss_sum=partial(self.task.loss_sum, dtype=self.precision.loss),
            ),
            checkpointing=Checkpointing(checkpointing, tuple(range(count)), self.layers),
            device_type="cuda",
        )
        assert plan.not_simulated is None, plan.not_simulated
        return plan

    def saved_bytes(self) -> int:
        """Moves the blocks to host memory. Returns by how many bytes the peak is lower."""
        plan = plan_persistent_memory(self.outline.model, self.config.train, self.precision)
        if get_frozen_blocks(self.outline.model) is None:
            plan_with_offload(self.outline, plan)
        held = plan_persistent_memory(self.outline.model, self.config.train, self.precision)
        return self.frozen - held.frozen

    def offload_times(self, flops: Sequence[float]) -> dict[int, float]:
        """Returns the estimated times of the model after `plan_with_offload`."""
        times = {}
        for card_gib, card in CARDS.items():
            plan = plan_offload(
                self.outline.model,
                lookup_hardware(card),
                micro_batches=1,
                compute=self.precision.compute,
                flops=lambda _: flops,
            )
            assert plan is not None
            assert plan.time is not None
            times[card_gib] = plan.time
        return times


def plan_candidates(planners: Sequence[Planner], side: int, frames: int) -> list[Candidate]:
    """Plans pictures or clips of one size with all settings. Steps that recompute nothing are planned
    only if they may fit on the largest card.

    planners  those of nf4, int8 and bf16, in this order
    """
    candidates = []
    largest_memory = memory_limit(lookup_hardware(CARDS[max(CARDS)]).memory)
    least_other_bytes = 0.0
    for planner in planners:
        planner.open_task(side, frames)
        # the activations hardly depend on the dtype of the base
        if planner.frozen + 0.9 * least_other_bytes <= largest_memory:
            peak = planner.plan(NONE).peak
            candidates.append(Candidate(planner.base, NONE, False, peak))
            least_other_bytes = peak - planner.frozen
        if planner.layers:
            peak = planner.plan(LAYERS).peak
            candidates.append(Candidate(planner.base, LAYERS, False, peak))
    return candidates


def add_offload(
    planners: Sequence[Planner], candidates: Sequence[Candidate], side: int, frames: int
) -> list[Candidate]:
    """Adds to the candidates of one size those with blocks in host memory. If one of the cards is
    too small for all of them, the last one keeps the inputs of the blocks in host memory too.
    Afterwards nothing can be planned without blocks in host memory.
    """
    offloaded = []
    planner = planners[0]
    planner.open_task(side, frames)
    flops = measure_forward_cost(planner.task.run, planner.controls).blocks
    for planner in planners:
        recomputed = [c for c in candidates if (c.base, c.checkpointing) == (planner.base, LAYERS)]
        for candidate in recomputed:
            peak = candidate.peak - planner.saved_bytes()
            times = planner.offload_times(flops)
            offloaded.append(Candidate(planner.base, LAYERS, True, peak, times))
    if not any(candidate.fits(min(CARDS)) for candidate in offloaded):
        first = planners[0]
        first.open_task(side, frames)
        # the blocks are in host memory now, so that this plan does not count them
        peak = first.plan(OFFLOAD).peak
        offloaded.append(Candidate(first.base, OFFLOAD, True, peak, first.offload_times(flops)))
    return [*candidates, *offloaded]


def make_rows(folder: Path, model: Model) -> list[str]:
    """Returns the rows of a model: pictures of 1024 x 1024, and clips."""
    sizes = [("512 x 512", 512, 1), ("1024 x 1024", 1024, 1)]
    if model.frames > 1:
        sizes.append((f"{model.frames} x 640 x 640", 640, model.frames))
    planners = [Planner(folder, model, base) for base in BASES]
    total = planners[0].outline.total
    small = planners[:1]
    plans = {
        size: plan_candidates(planners if side != 512 else small, side, frames)
        for size, side, frames in sizes
    }
    rows = []
    small_text = ""
    for size, side, frames in sizes:
        candidates = plans[size]
        if planners[0].layers:
            candidates = add_offload(planners if side != 512 else small, candidates, side, frames)
        least = min(candidates, key=lambda candidate: candidate.peak)
        if side == 512:
            small_text = f"{least.peak / GIB:.1f}"
            continue
        cells = [
            f"`{model.pipeline}`",
            model.name,
            f"{total / 1e9:.1f}",
            size,
            small_text if frames == 1 else "",
            f"{least.peak / GIB:.1f} ({least})",
        ]
        for card_gib in CARDS:
            fitting = [candidate for candidate in candidates if candidate.fits(card_gib)]
            if not fitting:
                cells.append("does not fit")
                continue
            on_device = [candidate for candidate in fitting if not candidate.has_offload]
            # the inputs of the blocks are kept in host memory only if nothing else fits
            usual = [candidate for candidate in fitting if candidate.checkpointing != OFFLOAD]
            fastest = min(
                reversed(on_device or usual or fitting),
                key=lambda candidate: candidate.time(card_gib),
            )
            cells.append(f"{fastest}: {fastest.peak / GIB:.1f}")
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


HEAD = (
    "| `_class_name` in model_index.json | model | weights in 10^9 | size | least GiB at 512 x 512 | least GiB "
    "| card of 8 GB | 12 GB | 16 GB | 24 GB |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def write_rows(model: Model, rows: Sequence[str]) -> None:
    """Replaces the rows of a model in the page. The table has the order of `MODELS`."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    rows_by_name: dict[str, list[str]] = {}
    for row in table.splitlines()[len(HEAD) :]:
        rows_by_name.setdefault(row.split(" | ")[1], []).append(row)
    rows_by_name[model.name] = list(rows)
    lines = [*HEAD, *(row for each in MODELS for row in rows_by_name.get(each.name, []))]
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="a part of a model's name")
    words = parser.parse_args().words
    models = [m for m in MODELS if not words or any(word in m.name for word in words)]
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            rows = make_rows(write_folder(Path(folder), model), model)
        write_rows(model, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
