"""The 81 cells: activation x weight x adapter dtype, times autocast, for the fused LoRA beside plain PEFT. `python -m isotype.lora.matrix`

In a cell, both run forward and backward on the same values; the error of a gradient is its relative distance (2-norm) to fp64's, and
`share` is the worst of fused error over PEFT's error across x, A, B and a trainable weight. At most 1 means at least as near to fp64.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import TRAINING_FLOATS, eps, name, to_torch
from ..errors import DtypeError
from . import attach

TOKENS, FEATURES, OUT, RANK = 192, 64, 48, 8


@dataclass(frozen=True)
class Cell:
    """One combination; autocast is None where it is off."""

    x: str
    weight: str
    adapter: str
    autocast: str | None

    def context(self, kind: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(kind, dtype=to_torch(self.autocast))

    def __str__(self) -> str:
        return f"x {self.x}  weight {self.weight}  adapter {self.adapter}  autocast {self.autocast or 'off'}"


@dataclass(frozen=True)
class Outcome:
    """What happened in a cell.

    peft, fused   the output's dtype, or the error's first line in angle brackets
    ran_fused     whether the fused op ran, not PEFT's code behind it
    share         worst fused error / PEFT error over the gradients; None where either did not run
    worst         the tensor that had it
    """

    cell: Cell
    peft: str
    fused: str
    ran_fused: bool
    share: float | None
    worst: str | None

    @property
    def peft_runs(self) -> bool:
        return not self.peft.startswith("<")

    @property
    def fused_runs(self) -> bool:
        return not self.fused.startswith("<")


def cells() -> Iterator[Cell]:
    for autocast in (None, "bf16", "fp16"):
        for x, weight, adapter in itertools.product(TRAINING_FLOATS, repeat=3):
            yield Cell(x, weight, adapter, autocast)


class _OneLinear(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(FEATURES, OUT, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


def peft_layer(*, device: str = "cpu", bias: bool = True, scale: float = 1.5, trainable: bool = True) -> Any:
    """A PEFT LoRA layer in fp32 with values of a trained size in B."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=scale * RANK, target_modules=["proj"])  # type: ignore[arg-type]  # a float is taken
    layer = peft.get_peft_model(_OneLinear(bias), config).base_model.model.proj  # type: ignore[arg-type]
    nn.init.normal_(layer.lora_B.default.weight, std=0.2)
    layer.base_layer.requires_grad_(trainable)
    return layer.to(device)


def in_cell(layer: Any, cell: Cell) -> Any:
    """A copy of the layer with its weights in the cell's dtypes."""
    made = copy.deepcopy(layer)
    made.base_layer.to(to_torch(cell.weight))
    for part in (made.lora_A.default, made.lora_B.default):
        part.to(to_torch(cell.adapter))
    return made


def gradients(layer: Any, x: Tensor, dy: Tensor, context: AbstractContextManager[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """(y, gradients by name); backward runs outside autocast, as trainers run it."""
    x = x.detach().clone().requires_grad_()
    with context:
        y = layer(x)
    y.backward(dy.to(y.dtype))
    found = {
        "x": x.grad,
        "A": layer.lora_A.default.weight.grad,
        "B": layer.lora_B.default.weight.grad,
        "weight": layer.base_layer.weight.grad,
    }
    return y.detach(), {key: value for key, value in found.items() if value is not None}


def exact(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The gradients of the same values in fp64."""
    return gradients(copy.deepcopy(layer).double(), x.double(), dy.double(), nullcontext())[1]


def run(layer: Any, x: Tensor, dy: Tensor, cell: Cell) -> tuple[str, dict[str, Tensor]]:
    """(output dtype, gradients), or (<error>, nothing) where PyTorch or Isotype refuses the cell."""
    try:
        y, grads = gradients(layer, x, dy, cell.context(x.device.type))
    except (RuntimeError, DtypeError) as error:
        return f"<{type(error).__name__}: {str(error).splitlines()[0]}>", {}
    return name(y.dtype), grads


def error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm())


def measure(cell: Cell, *, device: str = "cpu", layer: Any = None) -> Outcome:
    """Runs one cell with PEFT's code and fused."""
    plain = in_cell(layer if layer is not None else peft_layer(device=device), cell)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS // 2, FEATURES, generator=g).to(device, to_torch(cell.x))
    # the gradient reaches both as an output's own dtype would hold it
    dy = torch.randn(2, TOKENS // 2, OUT, generator=g).to(device, to_torch(cell.autocast or cell.x))
    fused = copy.deepcopy(plain)
    placed = attach.fuse_lora(fused)
    peft_word, peft_grads = run(plain, x, dy, cell)
    fused_word, fused_grads = run(fused, x, dy, cell)
    share, worst = None, None
    if peft_grads and fused_grads:
        truth = exact(plain, x, dy)
        shares = {}
        for key, value in fused_grads.items():
            # an error below what fp32 sums leave is no error: one part in 2^23, times a few
            floor = 4 * eps("fp32")
            shares[key] = max(error(value, truth[key]), floor) / max(error(peft_grads[key], truth[key]), floor)
        worst = max(shares, key=lambda key: shares[key])
        share = shares[worst]
    return Outcome(cell, peft_word, fused_word, all(line.op for line in placed), share, worst)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [f"{'autocast':9s} {'x':5s} {'weight':7s} {'adapter':8s} {'PEFT':9s} {'fused':9s} error fused/PEFT"]
    for o in outcomes:
        peft, fused = (word if not word.startswith("<") else "refused" for word in (o.peft, o.fused))
        share = "" if o.share is None else f"{o.share:.2f}  ({o.worst})"
        lines.append(f"{o.cell.autocast or 'off':9s} {o.cell.x:5s} {o.cell.weight:7s} {o.cell.adapter:8s} {peft:9s} {fused:9s} {share}")
    both = [o for o in outcomes if o.share is not None]
    lines.append("")
    lines.append(f"PEFT runs {sum(o.peft_runs for o in outcomes)} of {len(outcomes)} cells")
    ran_fused = sum(o.fused_runs and o.ran_fused for o in outcomes)
    lines.append(f"fused runs {sum(o.fused_runs for o in outcomes)} of {len(outcomes)}, {ran_fused} of them fused")
    same = sum(o.peft == o.fused for o in both)
    nearer = sum(o.share is not None and o.share <= 1.0 for o in both)
    lines.append(f"output in PEFT's dtype in {same} of {len(both)}; every gradient at least as near to fp64 in {nearer}")
    if both:
        lines.append(f"worst error {max(o.share for o in both if o.share is not None):.3f} of PEFT's")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m isotype.lora.matrix", description="The 81 cells of the fused LoRA beside plain PEFT.")
    parser.add_argument("--device", default="cpu", help="where to run: cpu (default) or cuda")
    parser.add_argument("--json", action="store_true", help="one JSON object a cell, in a list")
    options = parser.parse_args(arguments)
    layer = peft_layer(device=options.device)
    outcomes = [measure(cell, device=options.device, layer=layer) for cell in cells()]
    print(json.dumps([asdict(o) for o in outcomes], indent=1) if options.json else "\n".join(table(outcomes)))
    return 0 if all(o.fused_runs for o in outcomes if o.peft_runs) else 1


if __name__ == "__main__":
    sys.exit(main())
