"""The 81 cells of the fused LoRA beside plain PEFT: activation x weight x adapter dtype, times
autocast.

In a cell, both run forward and backward on the same values; the error of a gradient is its relative
distance (2-norm) to fp64's, and `share` is the worst of fused error over PEFT's error across x,
every A and B, the weights and biases. At most 1 means at least as near to fp64.
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
import torch.nn.functional as F
from torch import Tensor, nn

from isotype.dtypes import TRAINING_FLOATS, eps, format_dtype, to_torch
from isotype.errors import DtypeError
from isotype.lora import fuse_lora
from isotype.lora.mlp import run_gated_mlp
from isotype.ops import silu_mul

TOKENS, FEATURES, RANK = 192, 64, 8


@dataclass(frozen=True)
class Cell:
    """One combination; autocast is None where it is off."""

    x: str
    weight: str
    adapter: str
    autocast: str | None

    def context(self, kind: str) -> AbstractContextManager[Any]:
        return (
            nullcontext()
            if self.autocast is None
            else torch.autocast(kind, dtype=to_torch(self.autocast))
        )

    def __str__(self) -> str:
        return f"x {self.x}  weight {self.weight}  adapter {self.adapter}  autocast {self.autocast or 'off'}"


@dataclass(frozen=True)
class Outcome:
    """What happened in a cell.

    op            the row of OPS
    peft, fused   the output's dtype, or the error's first line in angle brackets
    ran           the fused op that made the outputs, or PEFT where its code did
    share         worst fused error / PEFT error over the gradients; None where either did not run
    worst         the tensor that had it
    """

    op: str
    cell: Cell
    peft: str
    fused: str
    ran: str
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


# op -> the projections of one input with their out features
OPS = {
    "linear": {"proj": 48},
    "qkv": {"q_proj": 48, "k_proj": 24, "v_proj": 24},
    "gate_up": {"gate_proj": 80, "up_proj": 80},
    "mlp": {"gate_proj": 80, "up_proj": 80, "down_proj": FEATURES},
}
# Equal products round equally; a percent is what the order of two sums may shift.
EQUAL = 1.01
# an MLP rounds in between: a bias's 80 sums of one draw are noise, and one draw says little of
# which of two codes is nearer
DRAWS = {"mlp": 3}
# what made an output, by its grad_fn: one function for each projection, or one for all of them
FUSED = {
    "LoraLinearBackward": "lora_linear",
    "LoraGroupBackward": "lora_group",
    "LoraMlpBackward": "lora_mlp",
}


class Block(nn.Module):
    """The layers of an op; all are called with one tensor, except an MLP's down."""

    def __init__(self, op: str, bias: bool) -> None:
        super().__init__()
        self.op, self.fused = op, False
        for child, out in OPS[op].items():
            self.add_module(
                child, nn.Linear(80 if child == "down_proj" else FEATURES, out, bias=bias)
            )

    def forward(self, x: Tensor) -> list[Tensor]:
        layers = list(self.children())
        if self.op != "mlp":
            return [layer(x) for layer in layers]
        y = run_gated_mlp(layers, x, "silu_mul") if self.fused else None
        if y is not None:
            return [y]
        gate, up = (layer(x) for layer in layers[:2])
        # PEFT's MLP has the model's own activation; the fused one has the op where one function
        # does not serve
        return [layers[2](silu_mul(gate, up) if self.fused else F.silu(gate) * up)]


def peft_block(
    op: str = "linear",
    *,
    device: str = "cpu",
    bias: bool = True,
    scale: float = 1.5,
    trainable: bool = True,
) -> Block:
    """An op's projections under PEFT's LoRA layers in fp32, with values of a trained size in B."""
    import peft

    torch.manual_seed(0)
    # a float is taken
    config = peft.LoraConfig(r=RANK, lora_alpha=scale * RANK, target_modules=list(OPS[op]))
    block = peft.get_peft_model(Block(op, bias), config).base_model.model
    for layer in block.children():
        nn.init.normal_(layer.lora_B.default.weight, std=0.2)
        layer.base_layer.requires_grad_(trainable)
    return block.to(device)


def in_cell(block: Block, cell: Cell) -> Block:
    """A copy of the block with its weights in the cell's dtypes."""
    made = copy.deepcopy(block)
    for layer in made.children():
        layer.base_layer.to(to_torch(cell.weight))
        for part in (layer.lora_A, layer.lora_B):
            part.to(to_torch(cell.adapter))
    return made


def outs(op: str) -> list[int]:
    """Features of each output."""
    return [OPS[op]["down_proj"]] if op == "mlp" else list(OPS[op].values())


def gradients(
    block: Block, x: Tensor, dys: Sequence[Tensor], context: AbstractContextManager[Any]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(outputs, gradients by name); backward runs outside autocast, as trainers run it."""
    x = x.detach().clone().requires_grad_()
    with context:
        ys = block(x)
    torch.autograd.backward(ys, [dy.to(y.dtype) for dy, y in zip(dys, ys)])
    found = {
        "x": x.grad,
        **{
            key.replace(".default", "").replace(".weight", ""): p.grad
            for key, p in block.named_parameters()
        },
    }
    return ys, {key: value for key, value in found.items() if value is not None}


def exact(block: Block, x: Tensor, dys: Sequence[Tensor]) -> dict[str, Tensor]:
    """The gradients of the same values in fp64."""
    return gradients(
        copy.deepcopy(block).double(), x.double(), [dy.double() for dy in dys], nullcontext()
    )[1]


def run(
    block: Block, x: Tensor, dys: Sequence[Tensor], cell: Cell
) -> tuple[str, dict[str, Tensor], str]:
    """(output dtype, gradients, the op that ran), or (<error>, nothing, "") where the cell is
    refused.
    """
    try:
        ys, grads = gradients(block, x, dys, cell.context(x.device.type))
    except (RuntimeError, DtypeError) as error:
        return f"<{type(error).__name__}: {str(error).splitlines()[0]}>", {}, ""
    ran = dict.fromkeys(FUSED.get(type(y.grad_fn).__name__, "PEFT") for y in ys)
    return " ".join(dict.fromkeys(format_dtype(y.dtype) for y in ys)), grads, " ".join(ran)


def error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm())


def measure(cell: Cell, *, block: Block | None = None) -> Outcome:
    """Runs one cell with PEFT's code and fused. A gradient's error is its root mean square over
    DRAWS of the inputs.
    """
    plain = in_cell(block if block is not None else peft_block(), cell)
    device = next(plain.parameters()).device
    fused = copy.deepcopy(plain)
    fuse_lora(fused)
    fused.fused = True
    squares: dict[str, list[float]] = {}
    draws = DRAWS.get(plain.op, 1)
    for seed in range(1, 1 + draws):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(2, TOKENS // 2, FEATURES, generator=g).to(device, to_torch(cell.x))
        # the gradient reaches both as an output's own dtype would hold it
        out_dtype = to_torch(cell.autocast or cell.x)
        dys = [
            torch.randn(2, TOKENS // 2, out, generator=g).to(device, out_dtype)
            for out in outs(plain.op)
        ]
        peft_word, peft_grads, _ = run(plain, x, dys, cell)
        fused_word, fused_grads, ran = run(fused, x, dys, cell)
        if not (peft_grads and fused_grads):
            return Outcome(plain.op, cell, peft_word, fused_word, ran, None, None)
        truth = exact(plain, x, dys)
        for key, value in fused_grads.items():
            sums = squares.setdefault(key, [0.0, 0.0])
            sums[0] += error(value, truth[key]) ** 2 / draws
            sums[1] += error(peft_grads[key], truth[key]) ** 2 / draws
    # an error below what fp32 sums leave is no error: one part in 2^23, times a few
    floor = (4 * eps("fp32")) ** 2
    shares = {
        key: (max(mine, floor) / max(theirs, floor)) ** 0.5
        for key, (mine, theirs) in squares.items()
    }
    worst = max(shares, key=lambda key: shares[key])
    return Outcome(plain.op, cell, peft_word, fused_word, ran, shares[worst], worst)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        f"{'autocast':9s} {'x':5s} {'weight':7s} {'adapter':8s} {'PEFT':9s} {'fused':9s} {'by':12s} error fused/PEFT"
    ]
    for o in outcomes:
        peft, fused = (
            word if not word.startswith("<") else "refused" for word in (o.peft, o.fused)
        )
        share = "" if o.share is None else f"{o.share:.2f}  ({o.worst})"
        lines.append(
            f"{o.cell.autocast or 'off':9s} {o.cell.x:5s} {o.cell.weight:7s} {o.cell.adapter:8s} {peft:9s} {fused:9s} {o.ran:12s} {share}"
        )
    both = [o for o in outcomes if o.share is not None]
    lines.append("")
    lines.append(f"PEFT runs {sum(o.peft_runs for o in outcomes)} of {len(outcomes)} cells")
    ran_fused = sum(o.ran in FUSED.values() for o in outcomes)
    lines.append(
        f"fused runs {sum(o.fused_runs for o in outcomes)} of {len(outcomes)}, {ran_fused} of them fused"
    )
    same = sum(o.peft == o.fused for o in both)
    nearer = sum(o.share is not None and o.share <= EQUAL for o in both)
    lines.append(
        f"output in PEFT's dtype in {same} of {len(both)}; every gradient at least as near to fp64, up to a percent, in {nearer}"
    )
    if both:
        lines.append(
            f"worst error {max(o.share for o in both if o.share is not None):.3f} of PEFT's"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/lora_matrix.py",
        description="The 81 cells of fused LoRA beside PEFT.",
    )
    parser.add_argument(
        "--op",
        choices=[*OPS, "all"],
        default="all",
        help="what is fused (default: all, one table each)",
    )
    parser.add_argument("--device", default="cpu", help="where to run: cpu (default) or cuda")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object: op -> a list of cells"
    )
    options = parser.parse_args(arguments)
    outcomes: dict[str, list[Outcome]] = {}
    for op in OPS if options.op == "all" else (options.op,):
        block = peft_block(op, device=options.device)
        outcomes[op] = [measure(cell, block=block) for cell in cells()]
    if options.json:
        print(
            json.dumps({op: [asdict(o) for o in rows] for op, rows in outcomes.items()}, indent=1)
        )
    else:
        print("\n\n".join("\n".join([op, *table(rows)]) for op, rows in outcomes.items()))
    return (
        0
        if all(o.ran in FUSED.values() for rows in outcomes.values() for o in rows if o.peft_runs)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
