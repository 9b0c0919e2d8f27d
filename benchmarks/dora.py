"""One linear layer with DoRA beside PEFT's own code, and with LoRA: time, memory, errors.

    python benchmarks/dora.py                   # 768 -> 2048, rank 16, 1024 tokens, bf16, one thread
    python benchmarks/dora.py --device cuda --json

Contenders take turns in one process, in an order that alternates; ratios are between medians of one run. Memory is the process's highest
resident size during a step (allocator's peak on a GPU) less what it held before it. Errors are relative, against PEFT's layer in fp64.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isotype.lora import fuse_lora

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.experts import compared
from benchmarks.lora import Step, show


def layer_of(a: argparse.Namespace, *, dora: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(a.features, a.out, bias=False)).to(torch.bfloat16)
    model = get_peft_model(
        model, LoraConfig(r=a.rank, lora_alpha=32, target_modules=["0"], use_dora=dora)
    )
    layer = model.base_model.model[0]
    for p in layer.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    nn.init.normal_(layer.lora_B["default"].weight, std=0.01)
    return model.to(a.device)


class Pass:
    """Forward and backward on given rows."""

    def __init__(self, a: argparse.Namespace, model: nn.Module, *, autocast: bool = True) -> None:
        self.model, self.autocast, self.device = model, autocast, a.device.split(":")[0]
        g = torch.Generator().manual_seed(1)
        p = next(iter(model.parameters()))
        self.x, self.dy = (
            torch.randn(a.tokens, n, generator=g).bfloat16().to(p.device, p.dtype)
            for n in (a.features, a.out)
        )
        self.x.requires_grad_()

    def __call__(self) -> Tensor:
        self.model.zero_grad()
        self.x.grad = None
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            y: Tensor = self.model(self.x)
        y.backward(self.dy)
        return y

    def results(self) -> dict[str, Tensor]:
        made: dict[str, Any] = {"y": self().detach(), "dx": self.x.grad}
        return made | {
            name.split(".")[-3]: p.grad
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "features": 768,
        "out": 2048,
        "tokens": 1024,
        "rank": 16,
        "rounds": 9,
        "threads": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    theirs = layer_of(a, dora=True)
    ours, plain = copy.deepcopy(theirs), layer_of(a, dora=False)
    for model in (ours, plain):
        fuse_lora(model)
    passes = {"PEFT": Pass(a, theirs), "Isotype": Pass(a, ours)}
    steps: dict[str, Step] = {**passes, "Isotype's LoRA": Pass(a, plain)}
    found = compared(a, steps)
    truth = Pass(a, copy.deepcopy(theirs).double(), autocast=False).results()
    for who, one in passes.items():
        errors = {
            key: float((value.double() - truth[key]).norm() / truth[key].norm())
            for key, value in one.results().items()
        }
        found[who]["errors"] = {key: f"{value:.1e}" for key, value in errors.items()}
    print(json.dumps(found)) if a.json else show(found)


if __name__ == "__main__":
    main()
