"""A LoRA step of a Flux denoiser here and in a plain loop of diffusers and PEFT, in turn in one
process, on the same draws.

    python benchmarks/diffusion.py [--preset bf16-lora] [--steps 6]

The plain loop is what diffusers' example script does: the denoiser in bf16, the adapter in fp32,
autocast, torch's AdamW. Reported: the ratio of the steps' CPU time (medians), the bytes that a
forward pass keeps for backward, what a step takes at its peak, and both losses.

The peak is the highest resident size of a process during its third step, less what it held before
that step (weights, adapter, states of the optimizer): gradients, what is kept for backward, all
working memory. Each loop has a process of its own, and both give freed memory back at once, so that
what an earlier step freed does not hide what this one takes. On Linux only.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig, get_peft_model
from torch import Tensor

from isotype.config.load import load
from isotype.environment.hardware import detect
from isotype.environment.memory_limits import status_bytes
from isotype.model.build import resolve_precision
from isotype.tasks.diffusion.batches import Batch
from isotype.tasks.diffusion.denoiser import build_denoiser
from isotype.tasks.diffusion.families import Conditioning
from isotype.tasks.diffusion.families.flow import Flux, pack_latents, position_ids, unpack_latents
from isotype.tasks.diffusion.loss import FlowMatching, NoiseLevels, picture_losses
from isotype.training.step import assemble_stepper

RANK, RATE = 16, 1e-4


def denoiser(width: int) -> FluxTransformer2DModel:
    """Flux's blocks at a small width, with its heads of 128."""
    torch.manual_seed(0)
    made: FluxTransformer2DModel = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=2, num_single_layers=4, attention_head_dim=128, num_attention_heads=width // 128,
        joint_attention_dim=512, pooled_projection_dim=256, guidance_embeds=True, axes_dims_rope=(16, 56, 56),
    )  # fmt: skip
    return made


def linears(model: torch.nn.Module, blocks: tuple[str, ...]) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(blocks)
    ]


def draws(count: int, *, side: int, text: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        latents, noise = (torch.randn(1, 16, side, side, generator=generator) for _ in range(2))
        words = {
            "text": torch.randn(1, text, 512, generator=generator).bfloat16(),
            "pooled": torch.randn(1, 256, generator=generator).bfloat16(),
        }
        made.append(Batch(latents, noise, torch.rand(1, generator=generator), words))
    return made


def ours(model: Any, preset: str) -> tuple[Callable[[Batch], float], Callable[[Batch], Tensor]]:
    settings = [
        f"precision.preset={preset}",
        f"adapter.r={RANK}",
        f"adapter.alpha={RANK}",
        "train.batch_size=1",
        "model.device=cpu",
    ]
    loaded = load(None, [*settings, f"train.learning_rate={RATE}"])
    precision = resolve_precision(
        loaded.config, loaded.sources, detect("cpu"), {"timesteps": "fp32", "latents": "fp32"}
    ).precision
    trained, manifest = build_denoiser(model, Flux(), loaded.config, precision, device_type="cpu")
    print(manifest, file=sys.stderr)  # stdout has the JSON alone
    objective = FlowMatching(NoiseLevels("uniform", 1.0))

    def loss_sum(model: Any, batch: Batch, divisor: int = 1) -> Tensor:
        return (
            picture_losses(
                model, Flux(), objective, batch, Conditioning(guidance=3.5), dtype=precision.loss
            ).sum()
            / divisor
        )

    stepper = assemble_stepper(trained.train(), loaded.config.train, precision, loss_sum)

    def step(batch: Batch) -> float:
        return stepper([batch], step=1, learning_rate=RATE, watch_changes=False).loss

    return step, lambda batch: loss_sum(trained, batch)


def plain(
    model: Any, targets: list[str]
) -> tuple[Callable[[Batch], float], Callable[[Batch], Tensor]]:
    """diffusers and PEFT, as the example script has them."""
    model.requires_grad_(False).to(torch.bfloat16)
    torch.manual_seed(0)
    trained: Any = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets)
    ).train()
    parameters = [p for p in trained.parameters() if p.requires_grad]
    for p in parameters:
        p.data = p.data.float()
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)

    def forward(batch: Batch) -> Tensor:
        sigma = batch.sigma.view(-1, 1, 1, 1)
        noisy = (1.0 - sigma) * batch.latents + sigma * batch.noise
        height, width = noisy.shape[-2:]
        with torch.autocast("cpu", torch.bfloat16):
            made = trained(
                hidden_states=pack_latents(noisy.bfloat16()), timestep=batch.sigma, guidance=torch.full((1,), 3.5),
                pooled_projections=batch.text["pooled"], encoder_hidden_states=batch.text["text"],
                txt_ids=torch.zeros(batch.text["text"].shape[1], 3), img_ids=position_ids(height // 2, width // 2, noisy.device),
                return_dict=False,
            )[0]  # fmt: skip
        target = batch.noise - batch.latents
        return (
            ((unpack_latents(made, height, width).float() - target.float()) ** 2)
            .reshape(len(target), -1)
            .mean(1)
            .mean()
        )

    def step(batch: Batch) -> float:
        loss = forward(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, forward


def kept_bytes(forward: Callable[[Batch], Tensor], batch: Batch, model: Any) -> int:
    """Bytes that a forward pass saves for backward, each storage once, without the model's own
    weights.
    """
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(batch)
    return sum(seen.values())


def peak_of(step: Callable[[Batch], float], batches: list[Batch]) -> int:
    """Bytes that this process takes in the last batch's step, above what it held before."""
    *first, last = batches
    for batch in first:
        step(batch)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    # sets the highest resident size back to the present one
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    step(last)
    return status_bytes("VmHWM") - before


def peaks() -> list[int]:
    """The peak of a step here and in the plain loop, by a process each."""
    giving_back = {
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        "MALLOC_TOP_PAD_": "0",
    }
    commands = [
        [sys.executable, __file__, *sys.argv[1:], "--peak-of", name] for name in ("ours", "plain")
    ]
    answers = [
        subprocess.run(
            c, env={**os.environ, **giving_back}, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for c in commands
    ]
    return [int(answer.splitlines()[-1]) for answer in answers]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="A LoRA step of Flux here and in a plain diffusers + PEFT loop."
    )
    parser.add_argument("--preset", default="bf16-lora")
    parser.add_argument(
        "--steps", type=int, default=6, help="measured steps of each, after one that is not"
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument(
        "--side", type=int, default=32, help="of the latents: tokens are a quarter of its square"
    )
    parser.add_argument(
        "--peak-of",
        choices=("ours", "plain"),
        help="print the bytes that a step of one of them takes, and nothing else",
    )
    asked = parser.parse_args()
    blocks = ("transformer_blocks.", "single_transformer_blocks.")
    if asked.peak_of:
        model = denoiser(asked.width)
        step, _ = (
            ours(model, asked.preset)
            if asked.peak_of == "ours"
            else plain(model, linears(model, blocks))
        )
        print(peak_of(step, draws(3, side=asked.side, text=64)))
        return 0
    mine, its = denoiser(asked.width), denoiser(asked.width)
    targets = linears(its, blocks)
    batches = draws(asked.steps + 1, side=asked.side, text=64)
    (our_step, our_forward), (plain_step, plain_forward) = (
        ours(mine, asked.preset),
        plain(its, targets),
    )
    memory = (
        kept_bytes(our_forward, copy.deepcopy(batches[0]), mine),
        kept_bytes(plain_forward, batches[0], its),
    )
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    losses: dict[str, list[float]] = {"ours": [], "plain": []}
    for number, batch in enumerate(batches):
        for name, step in (("ours", our_step), ("plain", plain_step)):
            before = time.process_time()
            losses[name].append(step(batch))
            if number:
                times[name].append(time.process_time() - before)
    peak = peaks()
    seconds = {name: statistics.median(values) for name, values in times.items()}
    print(json.dumps({
        "torch": torch.__version__, "threads": torch.get_num_threads(), "preset": asked.preset, "tokens": (asked.side // 2) ** 2 + 64,
        "cpu_seconds": {name: round(value, 4) for name, value in seconds.items()},
        "steps_per_second_ratio": round(seconds["plain"] / seconds["ours"], 3),
        "kept_mib": [round(n / 2**20, 1) for n in memory], "kept_ratio": round(memory[0] / memory[1], 3),
        "step_peak_mib": [round(n / 2**20, 1) for n in peak], "step_peak_ratio": round(peak[0] / peak[1], 3),
        "losses": {name: [round(v, 5) for v in values] for name, values in losses.items()},
    }, indent=1))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
