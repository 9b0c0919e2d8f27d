"""The fused LoRA beside PEFT's own code: time, saved bytes, and what the adapters cost, as ratios of one run.

    python benchmarks/lora.py                                             # CPU, one linear and a 4-layer Llama, 2 x 256 tokens
    python benchmarks/lora.py --layers 12 --hidden 768 --batch 4 --length 512
    python benchmarks/lora.py --device cuda --hidden 4096 --intermediate 14336 --layers 4 --batch 4 --length 1024 --json

Contenders take turns in one process, in an order that alternates, on the same weights and inputs: fp32 adapters, bf16 base, bf16
autocast. Time is the median of the process's CPU time on a CPU, which other processes disturb less than the clock, and of device
events on a GPU. Saved bytes are those of distinct storages that autograd holds for backward, weights left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn

from isotype.lora import fuse_lora


def seconds(device: str, run: Callable[[], object]) -> float:
    if device == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def compare(device: str, runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for i in range(rounds):
        for name in list(runs) if i % 2 == 0 else list(runs)[::-1]:
            taken[name].append(seconds(device, runs[name]))
    return {name: statistics.median(values) for name, values in taken.items()}


def saved_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Bytes held for backward, each storage once, without the model's own parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(held.values())


def report(a: argparse.Namespace, base: nn.Module, adapted: nn.Module, forward: Callable[[nn.Module], torch.Tensor]) -> dict[str, Any]:
    fused = copy.deepcopy(adapted)
    lines = fuse_lora(fused)
    assert lines, "no LoRA layer"
    assert all(line.op for line in lines), [str(line) for line in lines if not line.op]
    models = {"no adapter": base, "PEFT": adapted, "fused": fused}

    def under_autocast(model: nn.Module) -> torch.Tensor:
        with torch.autocast(a.device, dtype=torch.bfloat16):
            return forward(model)

    def step(model: nn.Module) -> Callable[[], object]:
        return lambda: under_autocast(model).backward()

    timed = compare(a.device, {name: step(model) for name, model in models.items()}, a.rounds)
    memory = {name: saved_bytes(model, lambda m=model: under_autocast(m)) for name, model in models.items()}
    return {
        "seconds": {name: round(value, 5) for name, value in timed.items()},
        "PEFT time / fused time": round(timed["PEFT"] / timed["fused"], 2),
        "adapters' cost, fused / PEFT": round((timed["fused"] - timed["no adapter"]) / (timed["PEFT"] - timed["no adapter"]), 2),
        "saved bytes, fused / PEFT": round(memory["fused"] / memory["PEFT"], 2),
    }


class OneLinear(nn.Module):
    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(features, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


def with_adapter(a: argparse.Namespace, model: nn.Module, targets: Any) -> nn.Module:
    made = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=a.rank, target_modules=targets, lora_dropout=a.dropout))
    return made.to(a.device)


def one_linear(a: argparse.Namespace) -> dict[str, Any]:
    base = OneLinear(a.hidden, a.hidden).to(a.device, torch.bfloat16).requires_grad_(False)
    x = torch.randn(a.batch, a.length, a.hidden, device=a.device, dtype=torch.bfloat16, requires_grad=True)
    return report(a, base, with_adapter(a, base, ["proj"]), lambda model: model(x).float().sum())


def llama(a: argparse.Namespace) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=a.vocabulary, hidden_size=a.hidden, intermediate_size=a.intermediate or a.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=a.layers, num_attention_heads=a.hidden // 64, num_key_value_heads=max(a.hidden // 128, 1), use_cache=False,
    )  # fmt: skip
    base = LlamaForCausalLM(config).to(a.device, torch.bfloat16).requires_grad_(False)
    ids = torch.randint(3, a.vocabulary, (a.batch, a.length), device=a.device)
    targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    adapted = with_adapter(a, base, targets)
    # without an adapter nothing would need a gradient: the first norm's weight makes every activation need one
    base.model.layers[0].input_layernorm.weight.requires_grad_()
    return report(a, base, adapted, lambda model: model(input_ids=ids, labels=ids).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"hidden": 512, "intermediate": 0, "layers": 4, "batch": 2, "length": 256, "rank": 16, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    torch.manual_seed(0)
    results = {"shape": {k: v for k, v in vars(a).items() if k != "json"}, "linear": one_linear(a), "llama": llama(a)}
    if a.json:
        print(json.dumps(results, indent=1))
        return
    for part, values in results.items():
        print(part, *(f"  {key:32s} {value}" for key, value in values.items()), sep="\n")


if __name__ == "__main__":
    main()
