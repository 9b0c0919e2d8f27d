"""The fused LoRA beside PEFT's own code: tokens a second, what the adapters cost, blocks alone, and memory of the step.

    python benchmarks/lora.py --part blocks          # a linear, Q/K/V and a gated MLP alone
    python benchmarks/lora.py --part model           # the whole step
    python benchmarks/lora.py --part checkpointing   # the same with gradient checkpointing
    python benchmarks/lora.py --part memory          # a process for each contender
    python benchmarks/lora.py --part host --threads 1    # CPU time and calls where there is next to nothing to compute: a layer, a step
    python benchmarks/lora.py --part model --base nf4 --profile operators.txt    # QLoRA, with the operators of a step of each contender
    python benchmarks/lora.py --part model --rows PEFT Isotype Unsloth --device cuda    # Unsloth: a process of its own, on a GPU
    python benchmarks/lora.py --device cuda --hidden 4096 --intermediate 14336 --layers 4 --length 1024 --json

A Llama of 162M parameters (12 layers of 768, MLP 3072, 12 heads, vocabulary 32,000), 4 x 512 tokens, rank 16 on every linear layer, fp32
adapters over frozen bf16 weights, bf16 autocast, AdamW. Contenders take turns in one process, in an order that alternates, on the same
weights and inputs; ratios are between medians of one run.

    PEFT           plain transformers and PEFT
    PEFT, our ops  the model optimized, LoRA layers left to PEFT
    Isotype        isotype.optimize(model)
    no adapter     the same optimized model without adapters; its first norm is trained so that backward runs through all of it
    Unsloth        Unsloth's own Llama with its own checkpointing, after the others and in a process of its own, since importing it
                   patches torch and transformers; where it cannot run, its row says why not

Memory of the step is the process's highest resident size during a step (allocator's peak on a GPU) less what it held before it, weights
and optimizer states, after one step has warmed everything up; beside it, what autograd holds for backward, weights left out.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import ctypes
import importlib.util
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import unsloth_row

MODEL = ("PEFT", "PEFT, our ops", "Isotype", "no adapter")
ROWS = (*MODEL, unsloth_row.NAME)
TARGETS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
Step = Callable[[], object]


def seconds(a: argparse.Namespace, run: Step) -> float:
    if a.device == "cpu":
        clock = time.process_time if a.clock == "cpu" else time.perf_counter
        start = clock()
        run()
        return clock() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def compare(a: argparse.Namespace, runs: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of each contender."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for i in range(rounds):
        for name in list(runs) if i % 2 == 0 else list(runs)[::-1]:
            taken[name].append(seconds(a, runs[name]))
    return {name: statistics.median(values) for name, values in taken.items()}


def peak_flops(a: argparse.Namespace) -> float:
    """FLOPs a second of the best bf16 product of 2048 x 2048 x 2048 (8192 on a GPU): what the floor
    divides by. On a CPU without bf16 instructions it is the best fp32 product.
    """
    from isotype.ops.widened_products import emulated_dtypes

    n = 2048 if a.device == "cpu" else 8192
    dtype = torch.bfloat16
    if a.base == "fp32" or (a.device == "cpu" and dtype in emulated_dtypes()):
        dtype = torch.float32
    x, y = (torch.randn(n, n, device=a.device, dtype=dtype) for _ in range(2))
    x @ y
    return 2 * n**3 / min(seconds(a, lambda: x @ y) for _ in range(5))


def adapted(a: argparse.Namespace, model: nn.Module, targets: list[str]) -> nn.Module:
    import peft

    torch.manual_seed(0)
    made = peft.get_peft_model(
        copy.deepcopy(model),
        peft.LoraConfig(r=a.rank, lora_alpha=32, target_modules=targets, lora_dropout=a.dropout),
    )
    return made.to(a.device)


def optimized(model: nn.Module, *, lora: bool = True) -> nn.Module:
    from isotype import optimize
    from isotype.lora import unfuse_lora

    manifest = optimize(model)
    left = [str(entry) for entry in manifest.left]
    assert not left, left
    if not lora:
        unfuse_lora(model)
    return model


def heads(a: argparse.Namespace) -> int:
    """Llama's geometry from 2,048 features on: heads of 128, one key head for four; below, heads of
    64, each with its own key head.
    """
    return a.heads or a.hidden // (128 if a.hidden >= 2048 else 64)


def key_heads(a: argparse.Namespace) -> int:
    return a.key_heads or (heads(a) // 4 if a.hidden >= 2048 else heads(a))


def config_of(a: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=a.vocabulary, hidden_size=a.hidden, intermediate_size=a.intermediate, num_hidden_layers=a.layers,
        num_attention_heads=heads(a), num_key_value_heads=key_heads(a), use_cache=False,
    )  # fmt: skip


# --- the whole step


def contender(a: argparse.Namespace, who: str, checkpointing: bool) -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    dtype = torch.float32 if a.base == "fp32" else torch.bfloat16
    model = LlamaForCausalLM(config_of(a)).to(a.device, dtype).requires_grad_(False)
    if a.base == "nf4":
        from isotype.proof.adapters import quantise_to_nf4

        quantise_to_nf4(model)
    if who == "no adapter":
        model.model.layers[0].input_layernorm.weight.requires_grad_()
    else:
        model = adapted(a, model, TARGETS)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if who != "PEFT":
        optimized(model, lora=who != "PEFT, our ops")
    return model.train()


def has_bitsandbytes() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def profiled(a: argparse.Namespace, steps: dict[str, Step]) -> str:
    """The 30 operators of each contender's step with most time of their own."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if a.device != "cpu" else [])
    order = "self_cpu_time_total" if a.device == "cpu" else "self_device_time_total"
    tables = []
    for who, step in steps.items():
        with profile(activities=kinds) as seen:
            step()
        tables.append(f"{who}\n{seen.key_averages().table(sort_by=order, row_limit=30)}\n")
    return "\n".join(tables)


def step_of(a: argparse.Namespace, model: nn.Module) -> Callable[[], float]:
    ids = torch.randint(
        3, a.vocabulary, (a.batch, a.length), generator=torch.Generator().manual_seed(1)
    ).to(a.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> float:
        with torch.autocast(a.device, dtype=torch.bfloat16, enabled=a.base != "fp32"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().item()

    return step


def flops(a: argparse.Namespace, checkpointing: bool) -> float:
    """Of one step with adapters: frozen weights take part in two products, adapters in three,
    causal attention in half of seven.
    """
    tokens = a.batch * a.length
    square, wide = a.hidden**2, a.hidden * a.intermediate
    keys = a.hidden // heads(a) * key_heads(a)
    weights = a.layers * (2 * square + 2 * a.hidden * keys + 3 * wide)
    ranks = a.layers * a.rank * (6 * a.hidden + 2 * keys + 3 * (a.hidden + a.intermediate))
    attention = a.layers * tokens * a.length * a.hidden
    forward = 2 * tokens * (weights + ranks) + 2 * attention
    head = 2 * tokens * a.hidden * a.vocabulary
    return (
        (2 if checkpointing else 1) * forward
        + 2 * tokens * (weights + 2 * ranks)
        + 5 * attention
        + 2 * head
    )


def model_part(a: argparse.Namespace, checkpointing: bool) -> dict[str, Any]:
    rows = ("PEFT", "Isotype") if checkpointing else tuple(who for who in a.rows if who in MODEL)
    steps = {who: step_of(a, contender(a, who, checkpointing)) for who in rows}
    losses = {who: step() for who, step in steps.items()}
    timed = compare(a, steps, a.rounds)
    if a.profile is not None:
        a.profile.write_text(profiled(a, steps))
    tokens = a.batch * a.length
    found: dict[str, Any] = {
        "tokens/s": {who: round(tokens / value) for who, value in timed.items()},
        "first loss": {who: round(loss, 4) for who, loss in losses.items()},
    }
    if {"PEFT", "Isotype"} <= set(rows):
        found["tokens/s, Isotype / PEFT"] = round(timed["PEFT"] / timed["Isotype"], 2)
    if "Isotype" in rows:
        floor = flops(a, checkpointing) / peak_flops(a)
        found["floor, s (FLOPs at the measured peak)"] = round(floor, 2)
        found["Isotype's step / floor"] = round(timed["Isotype"] / floor, 2)
    if not checkpointing and set(rows) == set(MODEL):
        base = timed["no adapter"]
        found["adapters' cost in the optimized model, Isotype / PEFT"] = round(
            (timed["Isotype"] - base) / (timed["PEFT, our ops"] - base), 2
        )
    if unsloth_row.NAME in a.rows and not checkpointing:
        del steps
        found[unsloth_row.NAME] = theirs = unsloths(a)
        if isinstance(theirs, dict) and "Isotype" in rows:
            found["tokens/s, Isotype / Unsloth"] = round(
                found["tokens/s"]["Isotype"] / theirs["tokens/s"], 2
            )
    return found


def unsloths(a: argparse.Namespace) -> dict[str, Any] | str:
    """Tokens a second and memory of Unsloth's step at these shapes, from a process of its own; or
    why it has none, in one line.
    """
    if reason := unsloth_row.why_not(a.device, importing=False):
        return reason
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--only", unsloth_row.NAME],
        capture_output=True,
        text=True,
    )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        said = done.stderr.strip() or done.stdout.strip() or "it said nothing"
        return f"it failed: {said.splitlines()[-1]}"[:300]
    return dict(json.loads(last))


def unsloth_part(a: argparse.Namespace) -> dict[str, Any]:
    """In its own process: a few steps of its model."""
    if reason := unsloth_row.why_not(a.device):
        sys.exit(reason)
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(config_of(a)).to(a.device, torch.bfloat16)
    step = step_of(
        a,
        unsloth_row.adapted(
            base, rank=a.rank, length=a.length, nf4=a.base == "nf4", targets=TARGETS
        ),
    )
    loss = step()
    taken = compare(a, {unsloth_row.NAME: step}, a.rounds)[unsloth_row.NAME]
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return {
        "tokens/s": round(a.batch * a.length / taken), "first loss": round(loss, 4),
        "step MB": round((torch.cuda.max_memory_allocated() - held) / 1e6),
    }  # fmt: skip


# --- what a layer costs the host


def host_part(a: argparse.Namespace) -> dict[str, Any]:
    """CPU time and calls of a layer's forward, for 8 tokens of 128 features: what is left is
    Python, dispatch and launches. Beside them the calls of functions written in Python of a layer's
    forward and backward, for 64 tokens and rank 8.

    CPU time, whatever `--clock` says; ratios are medians over pairs that take turns.
    """
    small = argparse.Namespace(
        **{**vars(a), "hidden": 128, "intermediate": 192, "layers": 8, "vocabulary": 96, "batch": 1, "length": 8}
    )  # fmt: skip
    ids = torch.randint(3, small.vocabulary, (1, small.length)).to(a.device)
    models = {who: contender(small, who, False) for who in ("PEFT", "Isotype")}

    def forward(who: str) -> None:
        with torch.autocast(torch.device(a.device).type, torch.bfloat16):
            models[who](input_ids=ids, labels=ids, use_cache=False)

    def milliseconds(who: str) -> float:
        start = time.process_time()
        forward(who)
        return (time.process_time() - start) * 1e3 / small.layers

    for who in models:
        for _ in range(5):
            forward(who)
    pairs = [{who: milliseconds(who) for who in models} for _ in range(20 * a.rounds)]
    return {
        "forward of a layer, ms of CPU time": {
            who: round(statistics.median(p[who] for p in pairs), 3) for who in models
        },
        "Isotype / PEFT": round(statistics.median(p["Isotype"] / p["PEFT"] for p in pairs), 2),
        "calls of a layer's forward": {
            who: calls(lambda who=who: forward(who)) // small.layers for who in models
        },
        "Python calls of a layer, forward and backward": {
            who: calls_of_a_layer(small, who) for who in models
        },
        **{
            f"step of 32 layers, recomputing {kind}": host_of_a_step(a, kind)
            for kind in ("none", "layers")
        },
    }


def host_of_a_step(a: argparse.Namespace, recompute: str) -> dict[str, Any]:
    """CPU time and calls (built-in functions included) of whole steps as `benchmarks/goal.py` takes
    them: 32 layers of 64 features, rank 16, 16 tokens. Ours is the step of `isotype train`, with
    its checks; PEFT's a plain loop with fused AdamW.
    """
    from benchmarks import goal

    shape = {
        "model": "tiny",
        "base": "bf16",
        "layers": 32,
        "rank": 16,
        "recompute": recompute,
        "keep": "nothing",
        "device": a.device,
    }
    steps = {
        who: goal.contender(argparse.Namespace(who=name, **shape), 16)[0]
        for who, name in (("PEFT", "peft"), ("Isotype", "isotype"))
    }

    def milliseconds(step: Step) -> float:
        start = time.process_time()
        step()
        return (time.process_time() - start) * 1e3

    for step in steps.values():
        for _ in range(3):
            step()
    pairs = [{who: milliseconds(step) for who, step in steps.items()} for _ in range(5 * a.rounds)]
    return {
        "ms of CPU time": {
            who: round(statistics.median(p[who] for p in pairs), 1) for who in steps
        },
        "Isotype / PEFT": round(statistics.median(p["Isotype"] / p["PEFT"] for p in pairs), 2),
        "calls": {who: calls(step) for who, step in steps.items()},
    }


def calls_of_a_layer(small: argparse.Namespace, who: str) -> int:
    """Of functions written in Python, in a step's forward and backward: what a step of six layers
    makes more than one of two, a layer.
    """
    ids = torch.randint(3, small.vocabulary, (1, 64)).to(small.device)

    def counted(layers: int) -> int:
        model, count = (
            contender(
                argparse.Namespace(**{**vars(small), "rank": 8, "layers": layers}), who, False
            ),
            0,
        )

        def step() -> None:
            with torch.autocast(torch.device(small.device).type, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()

        def seen(frame: object, event: str, given: object) -> None:
            nonlocal count
            count += event == "call"

        for _ in range(3):
            step()
        sys.setprofile(seen)
        try:
            step()
        finally:
            sys.setprofile(None)
        return count

    return (counted(6) - counted(2)) // 4


def calls(run: Callable[[], object]) -> int:
    """Calls of functions, built-in ones included."""
    profile = cProfile.Profile()
    profile.runcall(run)
    return int(pstats.Stats(profile).total_calls)


# --- blocks alone


class Projections(nn.Module):
    """Linear layers of one input."""

    def __init__(self, names: list[str], features: int) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(features, features, bias=False))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.children())


def blocks(a: argparse.Namespace) -> dict[str, tuple[nn.Module, list[str]]]:
    from transformers.models.llama.modeling_llama import LlamaMLP

    return {
        "linear": (Projections(["o_proj"], a.hidden), ["o_proj"]),
        "qkv": (Projections(TARGETS[:3], a.hidden), TARGETS[:3]),
        "mlp": (LlamaMLP(config_of(a)), TARGETS[4:]),
    }


def block_part(a: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    x = torch.randn(
        a.batch, a.length, a.hidden, device=a.device, dtype=torch.bfloat16, requires_grad=True
    )
    for name, (base, targets) in blocks(a).items():
        base.to(a.device, torch.bfloat16).requires_grad_(False)
        # an MLP's activation is part of the block: its optimized form beside PEFT's own code
        models = {
            "PEFT": adapted(a, base, targets),
            "Isotype": adapted(a, base, targets),
            "no adapter": copy.deepcopy(base),
        }
        for who in ("Isotype", "no adapter"):
            place_block(models[who])

        def step(model: nn.Module) -> Step:
            def run() -> None:
                with torch.autocast(a.device, dtype=torch.bfloat16):
                    y = model(x)
                ys = y if isinstance(y, tuple) else (y,)
                torch.autograd.backward(ys, ys)
                model.zero_grad()
                x.grad = None

            return run

        timed = compare(a, {who: step(model) for who, model in models.items()}, a.block_rounds)
        held = {who: saved_bytes(model, x) for who, model in models.items()}
        found[name] = {
            "ms": {who: round(1000 * value, 2) for who, value in timed.items()},
            "PEFT / Isotype": round(timed["PEFT"] / timed["Isotype"], 2),
            "adapters' cost, Isotype / PEFT": round(
                (timed["Isotype"] - timed["no adapter"]) / (timed["PEFT"] - timed["no adapter"]), 2
            ),
            "saved bytes, Isotype / PEFT": round(held["Isotype"] / held["PEFT"], 2),
        }
    return found


def place_block(model: nn.Module) -> None:
    from isotype.lora import fuse_lora
    from isotype.optimize import gated

    for path, module in model.named_modules():
        if gated.is_candidate(module):
            gated.place_gated_mlp(path, module)
    fuse_lora(model)


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes held for backward, each storage once, without the model's own parameters and the input."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return t

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast(x.device.type, dtype=torch.bfloat16),
    ):
        kept = model(x)
    del kept
    return sum(held.values())


# --- memory, one process for each contender


def step_memory(a: argparse.Namespace, who: str, checkpointing: bool) -> dict[str, float]:
    from isotype.environment.memory_limits import status_bytes

    model = contender(a, who, checkpointing)
    step = step_of(a, model)
    step()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    if a.device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)
        before = status_bytes("VmRSS")
        # 5 sets the highest resident size back to the present one
        Path("/proc/self/clear_refs").write_text("5")
        step()
        peak = status_bytes("VmHWM") - before
    else:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step()
    return {"step MB": round(peak / 1e6), "saved MB": round(sum(held.values()) / 1e6)}


def memory_part(a: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for checkpointing in (False, True):
        rows = (
            ("PEFT", "Isotype") if checkpointing else tuple(who for who in a.rows if who in MODEL)
        )
        here = {}
        for who in rows:
            command = [
                sys.executable,
                __file__,
                *sys.argv[1:],
                "--only",
                who,
                *(["--checkpointed"] if checkpointing else []),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{who} failed:\n{done.stderr[-2000:]}")
            here[who] = json.loads(done.stdout.splitlines()[-1])
        if not {"PEFT", "Isotype"} <= set(rows):
            found["with checkpointing" if checkpointing else "without"] = here
            continue
        ratio = round(here["Isotype"]["step MB"] / max(1, here["PEFT"]["step MB"]), 2)
        found["with checkpointing" if checkpointing else "without"] = {
            **here,
            "step memory, Isotype / PEFT": ratio,
        }
    return found


def show(values: Any, indent: int = 2) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            print(f"{' ' * indent}{key}")
            show(value, indent + 2)
        else:
            line = (
                "  ".join(f"{k} {v}" for k, v in value.items())
                if isinstance(value, dict)
                else value
            )
            print(f"{' ' * indent}{key:58s} {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "hidden": 768,
        "intermediate": 3072,
        "layers": 12,
        "vocabulary": 32000,
        "batch": 4,
        "length": 512,
        "rank": 16,
    }
    for name, default in {
        **sizes,
        "rounds": 3,
        "block-rounds": 15,
        "threads": torch.get_num_threads(),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--part",
        choices=("blocks", "model", "checkpointing", "memory", "host", "all"),
        default="all",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=ROWS,
        help="PEFT, Isotype and perhaps others: fewer take less time",
    )
    parser.add_argument(
        "--heads",
        type=int,
        default=0,
        help="default: heads of 128 from 2,048 features on, of 64 below",
    )
    parser.add_argument(
        "--key-heads",
        type=int,
        default=0,
        help="default: a quarter of the heads from 2,048 features on, all below",
    )
    parser.add_argument(
        "--base",
        choices=("bf16", "nf4", "fp32"),
        default="bf16",
        help="of the whole step; nf4 is QLoRA, fp32 runs without autocast",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        help="writes the operators of one step of each contender of --part model to this file",
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: the process's own time, for a machine that others use",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpointed", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    if a.base == "nf4" and not has_bitsandbytes():
        print("left out: bitsandbytes is not installed, and --base nf4 needs it")
        sys.exit(unsloth_row.LEFT_OUT)
    if list(a.rows) == [unsloth_row.NAME] and (
        reason := unsloth_row.why_not(a.device, importing=False)
    ):
        print(f"Unsloth left out: {reason}")
        sys.exit(unsloth_row.LEFT_OUT)
    if torch.device(a.device).type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--device {a.device}: there is no GPU here (torch {torch.__version__})")
    if a.only == unsloth_row.NAME:
        print(json.dumps(unsloth_part(a)))
        return
    if a.only:
        print(json.dumps(step_memory(a, a.only, a.checkpointed)))
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "blocks": lambda: block_part(a),
        "model": lambda: model_part(a, False),
        "checkpointing": lambda: model_part(a, True),
        "memory": lambda: memory_part(a),
        "host": lambda: host_part(a),
    }
    found = {name: run() for name, run in parts.items() if a.part in (name, "all")}
    settings = {
        k: v
        for k, v in vars(a).items()
        if k not in ("json", "only", "checkpointed", "part", "profile")
    }
    if a.json:
        print(json.dumps({"settings": settings, **found}, indent=1))
        return
    print("  ".join(f"{k} {v}" for k, v in settings.items()))
    for part, values in found.items():
        print(part)
        show(values)


if __name__ == "__main__":
    main()
