"""Measures training steps on the card. It compares their time and memory with the steps of PEFT,
Unsloth and Liger. It also compares their memory with the prediction of `isotype plan`.

All libraries do the same work. They train LoRA of rank 16 on every linear layer of the decoder,
with fp32 adapters, bf16 compute, AdamW, one row of tokens and no recomputation. PEFT runs under
autocast. Weights are random. Each step is measured until the card has finished it, and the result
is the median of several steps. If a model does not fit into the card's memory, it gets as many
layers as fit.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config.schema import TrainSection
from ..data.rows import Row as TokenRow
from ..environment.hardware import detect
from ..optimize import optimize
from ..precision import PRESETS
from ..precision.apply import apply_precision
from ..runs.folder import RunFolder
from ..tasks.language.batches import collate
from ..tasks.language.objective import batch_loss_sum
from ..training.step import assemble_stepper, peak_memory
from .adapters import (
    RANK,
    SIZES_8B,
    TARGETS,
    TINY_SIZES,
    add_adapters,
    build_llama,
    quantise_to_nf4,
)
from .learning import write_model
from .parts import ResultRow, Scale

Step = Callable[[], float]  # runs one training step and returns the loss
TOKENS = 2048  # of one step
TINY_TOKENS = 32  # of one step if `Scale.is_tiny`
WARMUP_STEPS = 3  # steps before the measurement
MEASURED_STEPS = 7
LEARNING_RATE = 1e-4
GiB = 1 << 30
SIZES_HALF_BILLION = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SIZES_8B_WITH_HEAD = SIZES_8B | {"vocab_size": 128256, "num_hidden_layers": 32}
# the memory of one layer's activations at TOKENS, and of logits and their gradient in fp32, which
# PEFT needs; measured at neither, so generous
_ACTIVATIONS_OF_LAYER = int(1.5 * GiB)
_LOGITS_BYTES = 4 * GiB


def measure_half_billion(scale: Scale) -> Iterator[ResultRow]:
    yield from _compare(scale, SIZES_HALF_BILLION, "bf16-lora", ("isotype", "peft"))


def measure_8b(scale: Scale) -> Iterator[ResultRow]:
    yield from _compare(scale, SIZES_8B_WITH_HEAD, "bf16-lora", ("isotype", "peft"))


def measure_8b_nf4(scale: Scale) -> Iterator[ResultRow]:
    yield from _compare(scale, SIZES_8B_WITH_HEAD, "nf4-lora", ("isotype", "peft"))


def measure_unsloth(scale: Scale) -> Iterator[ResultRow]:
    """Measures Unsloth. This runs in its own process, because Unsloth changes torch and
    transformers when it is imported.
    """
    yield from _compare(scale, SIZES_8B_WITH_HEAD, "nf4-lora", ("unsloth",))


def measure_liger(scale: Scale) -> Iterator[ResultRow]:
    """Measures Liger. This runs in its own process, because Liger replaces functions of
    transformers' modules.
    """
    if torch.device(scale.device).type == "cpu":
        yield {"name": "liger", "skipped": "its kernels need a GPU"}
        return
    yield from _compare(scale, SIZES_8B_WITH_HEAD, "bf16-lora", ("liger",))


def _compare(
    scale: Scale, sizes: dict[str, Any], preset: str, contenders: tuple[str, ...]
) -> Iterator[ResultRow]:
    sizes = dict(TINY_SIZES) if scale.is_tiny else fitting_sizes(sizes, scale.device, preset)
    for contender in contenders:
        row = _measure(scale, sizes, preset, contender)
        yield {"name": contender, "preset": preset, "layers": sizes["num_hidden_layers"], **row}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def fitting_sizes(sizes: dict[str, Any], device: str, preset: str) -> dict[str, Any]:
    """Returns these sizes with as many layers as fit into the card's memory."""
    hidden, intermediate = sizes["hidden_size"], sizes["intermediate_size"]
    head_size = hidden // sizes["num_attention_heads"]
    layer_weights = hidden * (
        2 * hidden + 2 * sizes["num_key_value_heads"] * head_size + 3 * intermediate
    )
    bytes_per_weight = 0.6 if preset == "nf4-lora" else 2.0
    layer_bytes = layer_weights * bytes_per_weight + _ACTIVATIONS_OF_LAYER * hidden / 4096
    embedding_bytes = sizes["vocab_size"] * hidden * 4
    free = detect(device).memory - embedding_bytes - _LOGITS_BYTES
    layers = max(1, min(sizes["num_hidden_layers"], int(free / layer_bytes)))
    return sizes | {"num_hidden_layers": layers}


def _measure(scale: Scale, sizes: dict[str, Any], preset: str, contender: str) -> ResultRow:
    tokens = TINY_TOKENS if scale.is_tiny else TOKENS
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, sizes["vocab_size"], (tokens,), generator=generator)
    if contender == "unsloth":
        step = _unsloth_step(sizes, ids)
    else:
        model = build_llama(sizes, scale.device)
        if preset == "nf4-lora":
            quantise_to_nf4(model)
        if contender == "liger":
            use_liger(model)
        model = add_adapters(model)
        if contender == "isotype":
            step = _isotype_step(model, ids, preset, scale.device)
        else:
            step = _autocast_step(model, ids.to(scale.device))
    device = torch.device(scale.device)
    is_gpu = device.type == "cuda"
    losses = [step() for _ in range(1 if scale.is_tiny else WARMUP_STEPS)]
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(1 if scale.is_tiny else MEASURED_STEPS):
        _wait(is_gpu)
        start = time.perf_counter()
        losses.append(step())
        _wait(is_gpu)
        seconds.append(time.perf_counter() - start)
    row: ResultRow = {
        "tokens": tokens,
        "ms": 1e3 * statistics.median(seconds),
        "losses": losses,
        "peak_GiB": peak_memory(device) / GiB,
    }
    if is_gpu:
        row["gpu_ms"] = _gpu_milliseconds(step)
    return row


def _wait(is_gpu: bool) -> None:
    if is_gpu:
        torch.cuda.synchronize()


def _gpu_milliseconds(step: Step) -> float:
    """Returns how long the GPU computes during one step. If the step takes longer, the GPU had to
    wait for the CPU.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = profiler.key_averages()
    return sum(float(event.self_device_time_total) for event in events) / 1e3


def _isotype_step(model: Any, ids: torch.Tensor, preset: str, device_name: str) -> Step:
    """Returns the step of `isotype train`."""
    device = torch.device(device_name)
    precision = PRESETS[preset]
    optimize(model, precision, device_type=device.type)
    apply_precision(model, precision, device_type=device.type)
    stepper = assemble_stepper(
        model, TrainSection(), precision, partial(batch_loss_sum, dtype=precision.loss)
    )
    row = TokenRow(tuple(ids.tolist()), tuple(ids.tolist()), 0)
    batch = collate([row], pad_id=0, device_type=device.type).to(device)

    def step() -> float:
        return float(stepper([batch], step=1, learning_rate=LEARNING_RATE, watch_changes=True).loss)

    return step


def _autocast_step(model: Any, ids: torch.Tensor) -> Step:
    """Returns the usual training step, which uses PEFT under autocast and the loss of transformers."""
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=LEARNING_RATE,
        fused=True,
    )
    batch = ids[None]

    def step() -> float:
        with torch.autocast(batch.device.type, dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(
            [parameter for parameter in model.parameters() if parameter.requires_grad], 1.0
        )
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def use_liger(model: Any) -> None:
    """Lets a Llama model run Liger's kernels, in this process only."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)


def _unsloth_step(sizes: dict[str, Any], ids: torch.Tensor) -> Step:
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        build_llama(sizes, "cuda").save_pretrained(folder / "model")
        model, _ = FastLanguageModel.from_pretrained(
            str(folder / "model"), max_seq_length=len(ids), load_in_4bit=True, dtype=torch.bfloat16
        )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=TARGETS,
        use_gradient_checkpointing=False,
    )
    return _autocast_step(model, ids.to("cuda"))


def measure_memory(scale: Scale) -> Iterator[ResultRow]:
    """Runs a few steps, and compares their memory with the plan of the same configuration."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {} if scale.is_tiny else {**SIZES_HALF_BILLION, "vocab_size": 32768}
        write_model(folder, **sizes)
        (folder / "run.yaml").write_text(_memory_config(scale), encoding="utf-8")
        planned = json.loads(_run_isotype(folder, "plan", "run.yaml", "--json"))
        _run_isotype(folder, "train", "run.yaml")
        rows = RunFolder(folder / "run").metrics.read_text(encoding="utf-8").splitlines()
        peaks = [json.loads(row).get("memory_bytes", 0) for row in rows]
    planned_peak = planned["memory"]["peak_with_process"]
    ratio = max(peaks) / planned_peak
    yield {
        "name": "measured peak over planned peak",
        "planned_GiB": planned_peak / GiB,
        "measured_GiB": max(peaks) / GiB,
        "ratio": ratio,
    }


def _memory_config(scale: Scale) -> str:
    return (
        "model: {init: random, config: model, tokenizer: model, device: "
        f"{scale.device}}}\n"
        "data: {train: text.txt, max_length: 128, eval_split: 0}\n"
        "train: {steps: 3, batch_size: 4}\n"
        "run: {folder: run, sample_every: 0}\n"
    )


def _run_isotype(folder: Path, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, "-m", "isotype", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or process.stdout.strip().splitlines()
        raise RuntimeError(f"isotype {arguments[0]}: {lines[-1] if lines else 'no output'}")
    return process.stdout
