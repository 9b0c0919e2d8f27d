"""Stacked experts with LoRA on them beside PEFT's own code over transformers' grouped products: time, memory, errors.

    python benchmarks/experts.py                          # one layer, 8 experts of which 2 a token, and 32 of which 4; routing fixed
    python benchmarks/experts.py --part model             # a whole step of a small Qwen3-MoE: AdamW, two layers
    python benchmarks/experts.py --device cuda --json

Contenders take turns in one process, in an order that alternates, on the same weights and inputs; ratios are between medians of one run.
Memory is the process's highest resident size during a step (allocator's peak on a GPU) less what it held before it. Errors are relative,
against the same layer in fp64 with the same routing: with free routing most of an error is rows that took another expert.

    PEFT            transformers' experts_implementation="grouped_mm" under PEFT's ParamWrapper
    Isotype         isotype.optimize(model)
    base products   the four products of every expert alone, the floor
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isotype import optimize
from isotype.environment.memory_limits import status_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lora import Step, compare, show

SHAPES = {"8 experts, top 2": (8, 2, 1024, 768, 1024), "32 experts, top 4": (32, 4, 512, 512, 384)}


def model_of(
    a: argparse.Namespace, experts: int, top: int, hidden: int, inner: int, *, layers: int = 1
) -> nn.Module:
    """A Qwen3-MoE with fp32 adapters on experts (and attention, for a whole step) over bf16
    weights.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=8192 if layers > 1 else 64, hidden_size=hidden, intermediate_size=inner, moe_intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64, num_experts=experts,
        num_experts_per_tok=top, decoder_sparse_step=1, mlp_only_layers=[], use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
    )
    attention = [f"{name}_proj" for name in "qkvo"] if layers > 1 else []
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(
        model,
        LoraConfig(r=a.rank, lora_alpha=32, target_modules=attention, target_parameters=stacks),
    )
    for name, p in sorted(model.named_parameters()):
        if ".lora_" in name:
            p.data = p.data.float()
            nn.init.normal_(p, std=0.02 if ".lora_B." in name else p.shape[1] ** -0.5)
    return model.to(a.device)


def experts_of(model: Any) -> nn.Module:
    found: nn.Module = model.base_model.model.model.layers[0].mlp.experts
    return found


def memory(a: argparse.Namespace, run: Step) -> float:
    """MiB above what was held before, after one run has warmed everything up."""
    run()
    if a.device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    ctypes.CDLL(None).malloc_trim(0)
    held = status_bytes("VmRSS")
    # 5 sets the highest resident size back to the present one
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return (status_bytes("VmHWM") - held) / 2**20


def compared(a: argparse.Namespace, steps: dict[str, Step]) -> dict[str, Any]:
    taken = compare(a, steps, a.rounds)
    found: dict[str, Any] = {
        name: {"ms": round(s * 1e3, 1), "MiB": round(memory(a, steps[name]))}
        for name, s in taken.items()
    }
    ours, theirs = found["Isotype"], found["PEFT"]
    found["PEFT's time over ours"] = round(theirs["ms"] / ours["ms"], 2)
    found["our memory over PEFT's"] = round(ours["MiB"] / theirs["MiB"], 2)
    return found


# --- one layer


class Layer:
    """One contender's forward and backward of one layer on given rows and routing."""

    def __init__(
        self,
        a: argparse.Namespace,
        experts: nn.Module,
        tokens: int,
        hidden: int,
        count: int,
        top: int,
    ) -> None:
        self.experts = experts
        p = next(p for p in experts.parameters() if p.dim() == 3)
        g = torch.Generator().manual_seed(1)
        drawn = [torch.randn(tokens, hidden, generator=g).bfloat16() for _ in range(2)]
        self.index = torch.rand(tokens, count, generator=g).topk(top, -1).indices.to(a.device)
        self.x, self.dy = (t.to(p.device, p.dtype) for t in drawn)
        self.w = torch.rand(tokens, top, generator=g).softmax(-1).bfloat16().to(p.device, p.dtype)
        self.x.requires_grad_()
        self.w.requires_grad_()

    def __call__(self) -> Tensor:
        self.experts.zero_grad()
        self.x.grad = self.w.grad = None
        y: Tensor = self.experts(self.x, self.index, self.w)
        y.backward(self.dy)
        return y

    def results(self) -> dict[str, Tensor]:
        made: dict[str, Any] = {"y": self().detach(), "dx": self.x.grad, "routing": self.w.grad}
        for kind in ("lora_A", "lora_B"):
            grads = [p.grad for name, p in sorted(self.experts.named_parameters()) if kind in name]
            made[f"d{kind}"] = torch.cat([g.double().flatten() for g in grads if g is not None])
        return made


def floor(
    a: argparse.Namespace, experts: int, top: int, tokens: int, hidden: int, inner: int
) -> Step:
    """The products with the base's matrices alone, as many rows for each expert."""
    rows = tokens * top // experts
    shapes = ((2 * inner, hidden), (hidden, inner), (inner, hidden), (hidden, 2 * inner))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=a.device)

    pairs = [(drawn(experts, rows, n), drawn(experts, n, m)) for m, n in shapes]
    return lambda: [torch.mm(x, w) for xs, ws in pairs for x, w in zip(xs, ws)]


def layer_part(a: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (count, top, tokens, hidden, inner) in SHAPES.items():
        model = model_of(a, count, top, hidden, inner)
        exact = copy.deepcopy(model).double()
        exact.get_base_model().set_experts_implementation("eager")
        fused = copy.deepcopy(model)
        optimize(fused)
        given = (tokens, hidden, count, top)
        layers = {
            who: Layer(a, experts_of(m), *given) for who, m in (("PEFT", model), ("Isotype", fused))
        }
        steps: dict[str, Step] = {
            **layers,
            "base products": floor(a, count, top, tokens, hidden, inner),
        }
        found[name] = compared(a, steps)
        truth = Layer(a, experts_of(exact), *given).results()
        for who, layer in layers.items():
            errors = {
                key: float((value.double() - truth[key]).norm() / truth[key].norm())
                for key, value in layer.results().items()
            }
            found[name][who]["errors"] = {key: f"{value:.1e}" for key, value in errors.items()}
    return found


# --- a whole step


def model_part(a: argparse.Namespace) -> dict[str, Any]:
    plain = model_of(a, 16, 4, 512, 384, layers=2)
    models = {"PEFT": plain, "Isotype": copy.deepcopy(plain)}
    optimize(models["Isotype"], "bf16-lora")
    ids = torch.randint(3, 8000, (2, 512), generator=torch.Generator().manual_seed(0)).to(a.device)

    def step_of(model: nn.Module) -> Step:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

        def step() -> None:
            with torch.autocast(a.device.split(":")[0], torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return compared(a, {name: step_of(model.train()) for name, model in models.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("layer", "model"), default="layer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    found = layer_part(a) if a.part == "layer" else model_part(a)
    if a.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
