"""Which denoiser trains under which preset: two optimizer steps on random numbers, observed as in a
run.

python benchmarks/diffusion_matrix.py           # seven classes x every preset x LoRA and full
                                                training, on tiny configurations
python benchmarks/diffusion_matrix.py --write   # also into benchmarks/results/diffusion_matrix.md
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)

from isotype.config.load import load
from isotype.dtypes import to_torch
from isotype.environment.hardware import detect
from isotype.errors import IsotypeError, UsageError
from isotype.model.build import resolve_precision
from isotype.observe import Observer
from isotype.precision.precision import PRESETS, Precision
from isotype.tasks.diffusion.batches import Batch
from isotype.tasks.diffusion.denoiser import build_denoiser, quantise
from isotype.tasks.diffusion.families import Conditioning, Family
from isotype.tasks.diffusion.families.flow import SD3, Flux, QwenImage, Sana
from isotype.tasks.diffusion.families.noise import SDXL, PixArtSigma
from isotype.tasks.diffusion.families.video import Wan
from isotype.tasks.diffusion.loss import Ddpm, FlowMatching, NoiseLevels, Objective, picture_losses
from isotype.training.step import assemble_stepper

TRAINS, REFUSED = "trains", "refused"
RESULT = Path(__file__).parent / "results" / "diffusion_matrix.md"


def sd3() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32, pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip


def flux() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def pixart() -> PixArtTransformer2DModel:
    return PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=16, sample_size=8,
        caption_channels=32,
    )  # fmt: skip


def sdxl() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1), projection_class_embeddings_input_dim=6 * 8 + 16, cross_attention_dim=32,
    )  # fmt: skip


def sana() -> SanaTransformer2DModel:
    return SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2, num_cross_attention_heads=2,
        cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=32, sample_size=8,
    )  # fmt: skip


def qwen_image() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def wan() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip


CLASSES: dict[str, tuple[Callable[[], Any], Family]] = {
    "SD3": (sd3, SD3()), "Flux": (flux, Flux()), "PixArt": (pixart, PixArtSigma()), "SDXL U-Net": (sdxl, SDXL()), "Sana": (sana, Sana()),
    "Qwen-Image": (qwen_image, QwenImage()), "Wan, one frame": (wan, Wan()),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """What became of a step: `trains`; `refused` before anything was loaded, with the code; or the
    error that ended it.
    """

    status: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.status} {self.detail}".strip()


def try_step(make: Callable[[], Any], family: Family, preset: str, *, full: bool) -> Cell:
    """A step of the denoiser that `make` gives, on 8 x 8 latents, on the CPU.

    full  trains every weight, else a LoRA of rank 4 on the blocks
    """
    settings = [
        f"precision.preset={preset}",
        f"adapter.kind={'none' if full else 'lora'}",
        "adapter.r=4",
        "train.batch_size=2",
    ]
    loaded = load(
        None,
        [*settings, "train.learning_rate=0.01", "model.device=cpu", "diffusion.timesteps=uniform"],
    )
    try:
        precision = resolve_precision(
            loaded.config, loaded.sources, detect("cpu"), {"timesteps": "fp32", "latents": "fp32"}
        ).precision
    except UsageError as error:
        return Cell(
            REFUSED, " ".join(dict.fromkeys(re.findall(r"\b[A-Z]{2}\d{3}\b", error.message)))
        )
    try:
        _step(make, family, precision, loaded.config)
    except IsotypeError as error:
        return Cell(error.code or "error", str(error).splitlines()[0][:100])
    except Exception as error:
        return Cell("fails", f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")
    return Cell(TRAINS)


def _step(make: Callable[[], Any], family: Family, precision: Precision, config: Any) -> None:
    """Raises DtypeError DT003 where a tensor is not as declared, AssertionError where no weight
    changed.
    """
    torch.manual_seed(0)
    full, device = config.adapter.kind == "none", torch.device("cpu")
    denoiser = make()
    for parameter in denoiser.parameters():  # buffers stay in fp32, as in a run
        parameter.data = parameter.data.to(
            to_torch(precision.trainable if full else precision.unquantised)
        )
    if precision.base == "nf4":
        quantise(denoiser.requires_grad_(False), family, precision, device)
    model, _ = build_denoiser(denoiser, family, config, precision, device_type="cpu")
    model.train()
    objective = plain_objective(family)

    def loss_sum(model: Any, batch: Batch, divisor: int = 1) -> torch.Tensor:
        return (
            picture_losses(
                model, family, objective, batch, Conditioning(), dtype=precision.loss
            ).sum()
            / divisor
        )

    stepper = assemble_stepper(model, config.train, precision, loss_sum)
    optimizer, accumulator = stepper.optimizer, stepper.accumulator
    batches = [random_batch(family, denoiser.config, precision) for _ in range(2)]
    observer = Observer(model, precision)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for step in (1, 2):  # B of a LoRA is zero at first, and A has no gradient then
        with observer.watch(step, optimizer=optimizer, gradient=accumulator.gradient) as seen:
            stepper(batches, step=step, learning_rate=0.01, watch_changes=False)
        seen.raise_if_violated()
    accumulator.close()
    still = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and torch.equal(p.detach(), before[name])
    ]
    assert len(still) < len(before), f"no weight changed, of {len(before)}"


def plain_objective(family: Family) -> Objective:
    """The family's first objective, with a linear schedule where it has one."""
    levels = NoiseLevels("uniform", 1.0)
    if family.objectives[0] == "flow_matching":
        return FlowMatching(levels)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    return Ddpm(family.objectives[0], levels, alphas.sqrt().float(), (1 - alphas).sqrt().float())


def random_batch(
    family: Family,
    config: Any,
    precision: Precision,
    *,
    rows: int = 2,
    side: int = 8,
    length: int = 4,
) -> Batch:
    """Latents and noise of 8 x 8, text in `precision.compute` as an encoder would leave it."""
    latents, noise = (
        torch.randn(rows, latent_channels(family, config), side, side) for _ in range(2)
    )
    dtype = to_torch(precision.compute)
    shapes = family.text_shapes(config, length)
    text = {
        name: torch.ones(rows, *shape) if name == "mask" else torch.randn(rows, *shape).to(dtype)
        for name, shape in shapes.items()
    }
    return Batch(latents, noise, torch.linspace(0.2, 0.8, rows), text)


def latent_channels(family: Family, config: Any) -> int:
    """C of the latents; a family that puts 2 x 2 of them in a token has four times as many input
    channels.
    """
    packs = family.pipeline in ("FluxPipeline", "QwenImagePipeline")
    return int(config["in_channels"]) // (4 if packs else 1)


def table(cells: dict[tuple[str, str, bool], Cell]) -> str:
    """In Markdown: a row a class and kind of training, a column a preset."""
    presets = list(PRESETS)
    lines = [f"| denoiser | trained | {' | '.join(presets)} |", f"|---|---|{'---|' * len(presets)}"]
    for name, full in itertools.product(CLASSES, (False, True)):
        row = " | ".join(str(cells[name, preset, full]) for preset in presets)
        lines.append(f"| {name} | {'every weight' if full else 'LoRA'} | {row} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Which denoiser trains under which preset.")
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULT.name}")
    asked = parser.parse_args()
    cells = {
        (name, preset, full): try_step(make, family, preset, full=full)
        for (name, (make, family)), preset, full in itertools.product(
            CLASSES.items(), PRESETS, (False, True)
        )
    }
    made = table(cells)
    print(made)
    if asked.write:
        head = (
            f"# Denoisers and presets\n\n"
            f"torch {torch.__version__}, on a CPU. Made by `python benchmarks/diffusion_matrix.py --write`.\n\n"
        )
        RESULT.write_text(head + made)
    return 0 if all(cell.status in (TRAINS, REFUSED) for cell in cells.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
