"""A LoRA step over packed weights beside the same step over dense ones, and the time that one
weight takes to be widened.

    python benchmarks/packed.py --threads 1

A Llama of 4 layers of 1,024, LoRA of rank 16 on every linear layer, 4 x 256 tokens, bf16 compute:
forward, backward and update. Contenders take turns in one process; times are the process's own,
ratios medians of pairs. "plain" widens by PyTorch's operators, as where there is no compiler. nf4
is bitsandbytes' own operator on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import isotype
from isotype.lora.quantised import PackedLinear
from isotype.ops.backend import force_backend
from isotype.ops.packed import PackedState, dequantise_packed, pack_along_rows, pack_weight
from isotype.ops.packed.formats import Layout
from isotype.ops.packed.ggml import BLOCKS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import lora as lora_bench


def fp8_blocks(weight: Tensor) -> tuple[Tensor, PackedState]:
    rows, columns = weight.shape
    layout = Layout(
        "scaled", (rows, columns), ("weight", torch.float8_e4m3fn, (rows, columns)), (128, 128)
    )
    scale = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)).float() / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (weight / wide).to(torch.float8_e4m3fn).view(torch.uint8), PackedState(
        layout, "fp8", {"weight_scale": scale}
    )


def mxfp4(weight: Tensor) -> tuple[Tensor, PackedState]:
    """Random numbers of 4 bits of about the weight's size: what they are changes no time."""
    rows, columns = weight.shape
    layout = Layout(
        "mxfp4", (rows, columns), ("weight_packed", torch.uint8, (rows, columns // 2)), (1, 32)
    )
    scale = torch.full((rows, columns // 32), 127 - 8, dtype=torch.uint8)
    return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8), PackedState(
        layout, "mxfp4", {"weight_scale": scale}
    )


def gptq(weight: Tensor, *, act_order: bool = False) -> tuple[Tensor, PackedState]:
    """Random numbers of 4 bits in groups of 128, as a layer holds them once it is loaded."""
    rows, columns = weight.shape
    shape = (columns // 8, rows)
    layout = Layout(
        "gptq", (rows, columns), ("qweight", torch.int32, shape), (1, 128), 4, first_zero=1
    )
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)
    tensors = {
        "qzeros": torch.full((columns // 128, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((columns // 128, rows), 0.005, dtype=torch.float16),
    }
    if act_order:
        tensors["g_idx"] = torch.arange(columns, dtype=torch.int32)[torch.randperm(columns)] // 128
    made, state = pack_along_rows(words, PackedState(layout, "int4", tensors))
    return made.view(torch.uint8), state


def ggml(weight: Tensor, kind: str) -> tuple[Tensor, PackedState]:
    """The blocks of a GGUF file, all of one number: what they are changes no time."""
    rows, columns = weight.shape
    numbers, size, halves = BLOCKS[kind]
    blocks = torch.full((rows * columns // numbers, size), 0x55, dtype=torch.uint8)
    for at in halves:
        blocks[:, at : at + 2] = torch.tensor([1e-5], dtype=torch.float16).view(torch.uint8)
    shape = (rows, columns // numbers * size)
    return blocks.view(shape), PackedState(
        Layout("ggml", (rows, columns), (kind, torch.uint8, shape), (1, numbers)), "gguf", {}
    )


FORMATS: dict[str, Callable[[Tensor], tuple[Tensor, PackedState]]] = {
    "fp8, blocks of 128 x 128": fp8_blocks,
    "fp8, a scale a row": lambda weight: pack_weight(weight, "fp8"),
    "int8, a scale a row": lambda weight: pack_weight(weight, "int8"),
    "mxfp4": mxfp4,
    "GPTQ and AWQ, 4 bits": gptq,
    "GPTQ with act-order": partial(gptq, act_order=True),
    "GGUF Q8_0": partial(ggml, kind="Q8_0"),
    "GGUF Q4_K": partial(ggml, kind="Q4_K"),
}


def packed_layers(model: nn.Module, pack: Callable[[Tensor], tuple[Tensor, PackedState]]) -> None:
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(
                    parent,
                    name,
                    PackedLinear(
                        child.in_features, child.out_features, *pack(child.weight.data.float())
                    ),
                )


def adapted(model: nn.Module) -> Callable[[], object]:
    made = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=lora_bench.TARGETS))
    isotype.optimize(made)
    optimizer = torch.optim.AdamW(
        [p for p in made.parameters() if p.requires_grad], lr=1e-4, fused=True
    )
    ids = torch.randint(3, 2000, (4, 256), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = made(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
    )
    base = LlamaForCausalLM(config).bfloat16().requires_grad_(False).train()
    models: dict[str, Any] = {"dense": copy.deepcopy(base), "nf4": copy.deepcopy(base)}
    from isotype.proof.adapters import quantise_to_nf4

    quantise_to_nf4(models["nf4"])
    for name, pack in FORMATS.items():
        packed_layers(models.setdefault(name, copy.deepcopy(base)), pack)
    steps = {name: adapted(model) for name, model in models.items()}
    for step in steps.values():
        step()
    taken = [{name: seconds(step) for name, step in steps.items()} for _ in range(a.rounds)]
    weight = torch.randn(2816, 1024)
    print(
        "| base | step, of the dense one's | widening 2816 x 1024, ms | plain, ms |\n|---|---|---|---|"
    )
    for name in steps:
        ratio = statistics.median(t[name] / t["dense"] for t in taken)
        cells = ["", ""]
        if name in FORMATS:
            bytes_, state = FORMATS[name](weight)
            for i, path in enumerate(("cpp", "eager")):
                with force_backend(path):
                    cells[i] = (
                        f"{1e3 * min(seconds(partial(dequantise_packed, bytes_, state, torch.bfloat16)) for _ in range(5)):.2f}"
                    )
        print(f"| {name} | {ratio:.2f} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
