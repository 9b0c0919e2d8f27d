"""The memory plan of real diffusion architectures, from their configurations alone: no weights, no download.

    python benchmarks/diffusion_plans.py FOLDER     # writes pipelines' folders without weights; isotype plan takes them
    python benchmarks/diffusion_plans.py --least    # writes the table of least memory into docs/memory.md; four minutes
    python benchmarks/diffusion_plans.py --measure [wan fp32 ...]  # compares plans of small models with peaks of runs

`--measure` trains a LoRA of four small denoisers with random weights (or of those with these names) on
this CPU, in fp32 on pictures of 192 x 192 and in bf16 on pictures of 96 x 96, without and with
recomputation, with one and two pictures per step. Each run is planned and trained in a process of its
own. Both begin as a fork of a process that has already imported the libraries. The peak is the highest
resident size in the preflight and in the steps, as in benchmarks/memory.py. Freed memory is returned
to the system.

Source  the `transformer/config.json` files of black-forest-labs/FLUX.1-dev, stabilityai/stable-diffusion-3.5-large and Qwen/Qwen-Image,
        `unet/config.json` of stabilityai/stable-diffusion-xl-base-1.0
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from safetensors.torch import save_file

from isotype.config.load import load
from isotype.config.schema import RunConfig
from isotype.environment.hardware import detect, lookup_hardware
from isotype.model.build import resolve_precision
from isotype.model.packed import quantise_layers as pack_layers
from isotype.precision.precision import Precision
from isotype.tasks.choose import plan_run, train
from isotype.tasks.diffusion.batches import Batch
from isotype.tasks.diffusion.denoiser import ForwardCost, build_denoiser, quantised_layers
from isotype.tasks.diffusion.families import Conditioning, Family
from isotype.tasks.diffusion.families.flow import SD3, Flux, QwenImage
from isotype.tasks.diffusion.families.noise import SDXL
from isotype.tasks.diffusion.loss import picture_losses
from isotype.training.memory.blocks import apply_offload, plan_offload
from isotype.training.memory.device import return_freed_blocks
from isotype.training.memory.outline import quantise_outline
from isotype.training.memory.plan import plan_memory, plan_persistent_memory
from isotype.training.memory.recomputation import LAYERS, Checkpointing, checkpointable_layers
from isotype.training.task import ModelOutline, StepOutline

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.diffusion_matrix import plain_objective
from benchmarks.memory import PARTS, measured

FLUX_DEV = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
}  # fmt: skip
SD35_LARGE = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 38, "attention_head_dim": 64, "num_attention_heads": 38,
    "joint_attention_dim": 4096, "caption_projection_dim": 2432, "pooled_projection_dim": 2048, "out_channels": 16,
    "pos_embed_max_size": 192, "qk_norm": "rms_norm",
}  # fmt: skip
QWEN_IMAGE = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 3584, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
SDXL_BASE = {
    "sample_size": 128, "in_channels": 4, "out_channels": 4, "block_out_channels": (320, 640, 1280), "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048, "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any], Family]] = {
    "FLUX.1-dev": (FluxTransformer2DModel, FLUX_DEV, Flux()),
    "stable-diffusion-3.5-large": (SD3Transformer2DModel, SD35_LARGE, SD3()),
    "Qwen-Image": (QwenImageTransformer2DModel, QWEN_IMAGE, QwenImage()),
    "stable-diffusion-xl-base-1.0": (UNet2DConditionModel, SDXL_BASE, SDXL()),
}
_FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
_VAE = {
    "_class_name": "AutoencoderKL",
    "latent_channels": 16,
    "block_out_channels": [128, 256, 512, 512],
}


def outlined(name: str, *settings: str) -> tuple[torch.nn.Module, int, RunConfig, Precision]:
    """A denoiser on the meta device with a LoRA of rank 16 on every linear layer of its blocks, and
    how many weights it has without.
    """
    kind, architecture, family = ARCHITECTURES[name]
    loaded = load(None, [*settings, "adapter.r=16", "model.device=cpu"])
    precision = resolve_precision(loaded.config, loaded.sources, detect("cpu")).precision
    with torch.device("meta"):
        denoiser = kind(**architecture)
        total = sum(p.numel() for p in denoiser.parameters())
        layers = set(quantised_layers(denoiser, family, precision).values())
        if precision.base == "nf4":
            quantise_outline(denoiser, torch.bfloat16, layers=layers)
        elif precision.packed:
            pack_layers(denoiser, layers, precision.base)
        model, _ = build_denoiser(denoiser, family, loaded.config, precision, device_type="cuda")
    return (
        apply_offload(model, loaded.config.model.offload, torch.device("meta")),
        total,
        loaded.config,
        precision,
    )


def held(name: str, preset: str) -> tuple[int, int, int]:
    """(all weights, trained weights, held bytes)."""
    model, total, config, precision = outlined(name, f"precision.preset={preset}")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return total, trained, plan_persistent_memory(model, config.train, precision).persistent_bytes


BASES = {
    "bf16": "precision.preset=bf16-lora",
    "fp8": "precision.base=fp8",
    "nf4": "precision.preset=nf4-lora",
}
CARD, SIDE = "rtx4090", 128  # latent pixels of a picture of 1024 x 1024
BATCHES = (1, 2, 4)


def least(name: str, base: str, offload: str) -> str:
    """Cells of a row: the peak of a step on one picture, and with blocks in host memory what is
    there and moved, and the counted times.
    """
    kind, architecture, family = ARCHITECTURES[name]
    model, total, config, precision = outlined(name, BASES[base], f"model.offload={offload}")
    settings = {"joint_attention_dim": 0, **architecture}
    length = family.count_text_tokens(77, family.max_text_length or 77)

    def batch(device: torch.device) -> Batch:
        latents, noise = (
            torch.empty(1, 4 if isinstance(family, SDXL) else 16, SIDE, SIDE, device=device)
            for _ in range(2)
        )
        shapes = family.text_shapes(settings, length)
        text = {
            word: torch.empty(1, *shape, dtype=torch.bfloat16, device=device)
            for word, shape in shapes.items()
        }
        return Batch(
            latents,
            noise,
            torch.empty(1, device=device),
            text,
            lengths=(length,) if family.keeps_text_lengths else (),
        )

    def loss_sum(model: torch.nn.Module, batch: Batch, divisor: int = 1) -> torch.Tensor:
        asked = Conditioning(1.0, 8, batch.lengths, batch.crop)
        return (
            picture_losses(model, family, plain_objective(family), batch, asked, dtype="fp32").sum()
            / divisor
        )

    blocks, tokens = len(checkpointable_layers(model)), (SIDE // family.latent_side_multiple) ** 2
    plan = plan_memory(
        ModelOutline(model.train(), 0, total), config.train, precision,
        StepOutline(rows=1, length=tokens, make_batch=batch, compute_loss_sum=loss_sum),
        checkpointing=Checkpointing(LAYERS, tuple(range(blocks)), blocks), device_type="cuda",
    )  # fmt: skip
    assert plan.not_simulated is None, plan.not_simulated
    with torch.device("meta"):
        plain = kind(**architecture)
    whole = batch(torch.device("meta"))
    whole = replace(whole, text={word: tensor.float() for word, tensor in whole.text.items()})
    cost = ForwardCost.measure(plain, lambda: loss_sum(plain, whole))
    cells = [f"{plan.peak / 2**30:.1f}"]
    for pictures in BATCHES:
        work = [pictures * one for one in cost.blocks]
        found = plan_offload(
            model,
            lookup_hardware(CARD),
            micro_batches=1,
            compute=precision.compute,
            flops=lambda _, work=work: work,
        )
        if found is None:
            break
        if pictures == 1:
            cells += [
                f"{found.share:.0%}",
                f"{found.host / 2**30:.1f}",
                f"{found.moved / 2**30:.1f}",
            ]
        cells.append(f"{found.time:.2f}")
    return " | ".join(cells)


def table() -> str:
    lines = [
        "| model | base | GiB at the peak | with `blocks` | frozen weights on the device | GiB in host memory "
        "| GiB moved per step | computed time | 2 pictures | 4 pictures |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ARCHITECTURES:
        for base in BASES:
            lines.append(
                f"| {name} | {base} | {least(name, base, 'none')} | {least(name, base, 'blocks')} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines)


def write_folder(folder: Path, name: str) -> Path:
    """A pipeline's folder with its configurations. Its files of weights contain no tensors:
    `isotype plan` reads none, but refuses a local folder without such files.
    """
    kind, settings, family = ARCHITECTURES[name]
    pooled = {
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
    }
    index = {
        "_class_name": family.pipeline,
        "transformer": ["diffusers", kind.__name__],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    parts = {
        part: pooled.get(part, ["transformers", "CLIPTokenizer"]) for part in family.encoder_parts
    }
    files = {
        "transformer/config.json": {"_class_name": kind.__name__, **settings}, "vae/config.json": _VAE,
        "scheduler/scheduler_config.json": {**_FLOW, "shift": 3.0},
        "model_index.json": {**index, **parts, "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]},
    }  # fmt: skip
    for part in family.encoder_parts:
        (folder / part).mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(json.dumps(content))
    for part in ("transformer", "vae"):
        save_file({}, folder / part / "diffusion_pytorch_model.safetensors")
    return folder


SMALL = {
    "flux": (
        "transformer",
        "FluxTransformer2DModel",
        {
            "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 128, "num_attention_heads": 4,
            "axes_dims_rope": (16, 56, 56),
        },
    ),
    "sdxl": (
        "unet",
        "UNet2DConditionModel",
        {
            "block_out_channels": (96, 192, 384), "layers_per_block": 2, "norm_num_groups": 32, "attention_head_dim": (3, 6, 12),
            "transformer_layers_per_block": (1, 2, 4),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        },
    ),
    "wan": (
        "transformer",
        "WanTransformer3DModel",
        {"num_attention_heads": 4, "attention_head_dim": 128, "ffn_dim": 2048, "num_layers": 6},
    ),
    "ernie_image": (
        "transformer",
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 512, "num_attention_heads": 4, "num_layers": 6, "ffn_hidden_size": 1536, "rope_axes_dim": (32, 48, 48),
        },
    ),
}  # fmt: skip
# preset -> the side of the pictures in pixels. Processors without bf16 instructions need a minute per
# step in bf16 with the larger size
MEASURED_SIDES = {"fp32": 192, "bf16-lora": 96}


def write_small_pipeline(folder: Path, name: str) -> Path:
    """Writes the tiny pipeline of the tests with a larger denoiser. Its weights are random."""
    import diffusers
    from tests.tasks.diffusion import models, tiny

    if name in tiny.MAKES:
        tiny.make(name, folder)
    else:
        getattr(models, name)(folder)
    part, class_name, settings = SMALL[name]
    denoiser_class = getattr(diffusers, class_name)
    config = {**denoiser_class.load_config(folder / part), **settings}
    torch.manual_seed(0)
    denoiser = denoiser_class.from_config(config)
    for parameter in denoiser.parameters():
        if parameter.ndim > 1 and not parameter.any():
            # a projection that begins with zeros would let no gradient through
            torch.nn.init.normal_(parameter, std=0.02)
    denoiser.save_pretrained(folder / part)
    return folder


def run_in_fork(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of `function`, which runs in a fork of this process."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        os.close(receiver)
        try:
            result = function()
        except BaseException as error:
            result = {"error": repr(error)}
        os.write(sender, json.dumps(result).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    result = json.loads(content)
    if "error" in result:
        sys.exit(f"a measured run failed: {result['error']}")
    return result


def plan_small_run(settings: Sequence[str]) -> dict[str, Any]:
    plan = plan_run(load(None, list(settings))).to_dict()
    return plan["memory"] | {"parameters": plan["parameters"]["total"]}


def train_small_run(settings: Sequence[str]) -> dict[str, Any]:
    """Returns the highest resident sizes of the preflight and of the steps."""
    return_freed_blocks()
    measures: dict[str, list[tuple[int, float]]] = {}
    for part, (module_name, attribute) in PARTS.items():
        class_name, method = attribute.split(".")
        owner = getattr(import_module(module_name), class_name)
        values = measures.setdefault(part, [])
        setattr(owner, method, measured(getattr(owner, method), values))
    status = train(load(None, list(settings)))
    assert status == 0
    return {part: max(peak for peak, _ in values) for part, values in measures.items()}


def measure(names: Sequence[str], presets: Sequence[str]) -> None:
    """Prints the planned and the measured peak of each run, in MiB."""
    from tests.tasks.diffusion.models import pictures

    with tempfile.TemporaryDirectory() as place:
        images = pictures(Path(place, "pictures"))
        for name in names:
            run_in_fork(
                lambda name=name: {"folder": str(write_small_pipeline(Path(place, name), name))}
            )
        for name in names:
            for preset, checkpointing, rows in product(presets, ("none", "layers"), (1, 2)):
                settings = [
                    f"model.name={place}/{name}", f"images.train={images}", f"images.resolution={MEASURED_SIDES[preset]}",
                    "images.eval_split=0.2", "images.cache=none", "images.limit=6", "diffusion.eval_draws=1",
                    "adapter.r=16", f"precision.preset={preset}", f"train.gradient_checkpointing={checkpointing}",
                    f"train.batch_size={rows}", "train.accumulate=1", "train.steps=2", "train.eval_every=2", "run.report=false",
                    "model.device=cpu", f"run.folder={place}/run-{name}-{preset}-{checkpointing}-{rows}",
                ]  # fmt: skip
                if name != "sdxl":
                    settings.append("diffusion.max_text_length=8")
                planned = run_in_fork(lambda settings=settings: plan_small_run(settings))
                peaks = run_in_fork(lambda settings=settings: train_small_run(settings))
                peak = max(peaks.values())
                print(
                    f"{name:12} {preset:10} {checkpointing:7} {rows}  planned {planned['peak_with_process'] >> 20:5}"
                    f" (step {planned['peak'] >> 20:5})  preflight {peaks['preflight'] >> 20:5}"
                    f"  steps {peaks['steps'] >> 20:5}  measured / planned {peak / planned['peak_with_process']:.3f}",
                    flush=True,
                )


def write_table() -> None:
    page = Path(__file__).parents[1] / "docs" / "memory.md"
    text = page.read_text(encoding="utf-8")
    made = re.sub(
        r"(<!-- least memory -->\n).*(\n<!-- end of least memory -->)",
        partial(_between, table()),
        text,
        flags=re.DOTALL,
    )
    page.write_text(made, encoding="utf-8")


def _between(middle: str, found: re.Match[str]) -> str:
    return found[1] + middle + found[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--least", action="store_true")
    words = [*SMALL, *MEASURED_SIDES]
    parser.add_argument("--measure", nargs="*", choices=words, metavar="NAME")
    arguments = parser.parse_args()
    if arguments.least:
        write_table()
        return 0
    if arguments.measure is not None:
        names = [name for name in SMALL if name in arguments.measure]
        presets = [preset for preset in MEASURED_SIDES if preset in arguments.measure]
        measure(names or list(SMALL), presets or list(MEASURED_SIDES))
        return 0
    for name in ARCHITECTURES:
        for preset in ("bf16-lora", "nf4-lora"):
            total, trained, taken = held(name, preset)
            print(
                f"{name:28} {preset:10} {total / 1e9:7.3f} B weights, {trained / 1e6:6.1f} M trained, held {taken / 2**30:6.2f} GiB"
            )
    for name in ("FLUX.1-dev", "stable-diffusion-3.5-large") if arguments.folder else ():
        print(f"isotype plan: model.name: {write_folder(arguments.folder / name, name)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
