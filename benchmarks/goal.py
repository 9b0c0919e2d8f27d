"""One training step of a whole model with random weights: tokens a second, peak memory, back ends, and where its time goes.

    python benchmarks/goal.py --who isotype --base nf4 --tokens 4096 16384 --recompute layers+offload --keep attention
    python benchmarks/goal.py --who peft --base nf4 --tokens 4096 16384
    python benchmarks/goal.py --who isotype --layers 4 --tokens 4096 --profile --ledger    # a profile, beside what the ledger counts
    python benchmarks/goal.py --who isotype --model tiny --tokens 64 --device cpu          # the same code, to see that it runs

One process a contender. Weights are made on the device; LoRA of rank 16 on every projection, fp32 adapters, bf16 compute, AdamW, one row.

    isotype  the step of `isotype train`: its ops, `--recompute` and `--keep` as `train.gradient_checkpointing` and `train.keep_attention`
    peft     transformers and PEFT under bf16 autocast, with transformers' gradient checkpointing unless `--recompute none`
    unsloth  Unsloth with its own checkpointing, where it is installed; else a line that says why not

A row is printed for each length as soon as it is measured: the median of `--steps` steps, each waited for, after `--warmup` ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import lora as lora_bench
from benchmarks import unsloth_row

# a checkout that is not installed runs too
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

LLAMA = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False}  # fmt: skip
GEMMA = {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}  # fmt: skip
TINY = {**LLAMA, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"llama-8b": LLAMA, "gemma-2b": GEMMA, "tiny": TINY}
KEPT = {
    "attention": {"keep_attention": True},
    "nothing": {},
}
Step = Callable[[], float]


def base_model(a: argparse.Namespace) -> nn.Module:
    """Random bf16 weights on the device, NF4 where asked for; frozen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = MODELS[a.model] | ({"num_hidden_layers": a.layers} if a.layers else {})
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    with torch.device(a.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    model.config.use_cache = False
    if a.base == "nf4" and a.who != "unsloth":
        from isotype.proof.adapters import quantise_to_nf4

        quantise_to_nf4(model)
    return model.train()


def isotype_step(a: argparse.Namespace, length: int, model: nn.Module) -> tuple[Step, list[str]]:
    """The step of a run, and what the manifest says of attention."""
    from isotype.config.schema import TrainSection
    from isotype.data.rows import Row
    from isotype.optimize import optimize
    from isotype.precision import PRESETS
    from isotype.precision.apply import apply_precision
    from isotype.tasks.language.batches import collate
    from isotype.tasks.language.objective import batch_loss_sum
    from isotype.training.memory.recomputation import apply_checkpointing
    from isotype.training.step import assemble_stepper

    precision = PRESETS["nf4-lora" if a.base == "nf4" else "bf16-lora"]
    device = torch.device(a.device)
    manifest = optimize(model, precision, device_type=device.type)
    apply_precision(model, precision, device_type=device.type)
    apply_checkpointing(model, checkpointing_of(a, model))
    stepper = assemble_stepper(
        model, TrainSection(), precision, partial(batch_loss_sum, dtype=precision.loss)
    )
    ids = tuple(tokens(a, length).tolist())
    batch = collate([Row(ids, ids, 0)], pad_id=0, device_type=device.type).to(device)
    said = sorted({f"{e.part}: {e.reason}" for e in manifest.entries if e.part == "attention"}) + [
        str(e) for e in manifest.left
    ]
    return lambda: stepper([batch], step=1, learning_rate=1e-4, watch_changes=True).loss, [
        *said,
        *manifest.notes,
    ]


def checkpointing_of(a: argparse.Namespace, model: nn.Module) -> Any:
    from isotype.training.memory.recomputation import Checkpointing, checkpointable_layers

    if a.recompute == "none":
        return Checkpointing("none")
    layers = len(checkpointable_layers(model))
    return Checkpointing(a.recompute, tuple(range(layers)), layers, "asked", **KEPT[a.keep])


def plain_step(a: argparse.Namespace, length: int, model: nn.Module) -> Step:
    ids = tokens(a, length)[None].to(a.device)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True
    )

    def step() -> float:
        with torch.autocast(torch.device(a.device).type, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().item()

    return step


def tokens(a: argparse.Namespace, length: int) -> torch.Tensor:
    vocabulary = MODELS[a.model]["vocab_size"]
    return torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(1))


def contender(a: argparse.Namespace, length: int) -> tuple[Step, list[str]]:
    import peft

    model = base_model(a)
    if a.who == "unsloth":
        made = unsloth_row.adapted(
            model, rank=a.rank, length=length, nf4=a.base == "nf4", targets=lora_bench.TARGETS
        )
        return plain_step(a, length, made), []
    adapted: Any = peft.get_peft_model(
        model, peft.LoraConfig(r=a.rank, lora_alpha=2 * a.rank, target_modules=lora_bench.TARGETS)
    )
    adapted.to(a.device).train()
    if a.who == "isotype":
        return isotype_step(a, length, adapted)
    if a.recompute != "none":
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    return plain_step(a, length, adapted), []


def synchronize(a: argparse.Namespace) -> None:
    if a.device != "cpu":
        torch.cuda.synchronize()


def measured(a: argparse.Namespace, length: int) -> tuple[dict[str, Any], Step]:
    cuda = a.device != "cpu"
    begun = time.perf_counter()
    step, said = contender(a, length)
    synchronize(a)
    ready = time.perf_counter()
    losses = [step() for _ in range(a.warmup)]
    synchronize(a)
    first = time.perf_counter() - ready
    held = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(a.steps):
        synchronize(a)
        start = time.perf_counter()
        losses.append(step())
        synchronize(a)
        seconds.append(time.perf_counter() - start)
    row = {
        "who": a.who, "model": a.model, "base": a.base, "layers": a.layers, "tokens": length, "recompute": a.recompute, "keep": a.keep,
        "ms": round(1e3 * statistics.median(seconds), 2), "ms of each": [round(1e3 * s, 2) for s in seconds],
        "tokens/s": round(length / statistics.median(seconds)), "losses": [round(loss, 4) for loss in losses],
        "peak bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "held bytes": held, "seconds to build": round(ready - begun, 1), "seconds of the first steps": round(first, 1), "said": said,
    }  # fmt: skip
    return row, step


def profiled(a: argparse.Namespace, step: Step) -> str:
    """The kernels and operators of one step with the most time of their own."""
    from torch.profiler import ProfilerActivity, profile

    cuda = a.device != "cpu"
    with profile(
        activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    ) as seen:
        step()
        synchronize(a)
    timed = [
        (e.self_device_time_total if cuda else e.self_cpu_time_total, e.count, e.key)
        for e in seen.key_averages()
    ]
    whole = sum(t for t, _, _ in timed) or 1.0
    lines = [
        f"{t / 1e3:10.3f} ms {t / whole:6.1%} {count:6d} x {key[:110]}"
        for t, count, key in sorted(timed, reverse=True)[:40]
    ]
    return "\n".join([f"{whole / 1e3:10.3f} ms in all", *lines])


def counted(a: argparse.Namespace, length: int, row: dict[str, Any]) -> dict[str, Any]:
    """What the ledger counts for this step on an H200, and the measured shares of it."""
    from benchmarks.ledger import ledger_of

    ledger = ledger_of(
        length,
        kind=a.recompute,
        kept=a.keep,
        rank=a.rank,
        device=a.ledger,
        layers=a.layers or LLAMA["num_hidden_layers"],
        base=a.base,
    )
    ms = 1e3 * ledger.seconds(ledger.rows)
    found = {
        "ms": round(ms, 2),
        "peak bytes": ledger.peak,
        "measured ms / counted": round(row["ms"] / ms, 3),
    }
    return found | (
        {"measured peak / counted": round(row["peak bytes"] / ledger.peak, 3)}
        if row["peak bytes"]
        else {}
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--who", choices=("isotype", "peft", "unsloth"), required=True)
    parser.add_argument("--model", choices=list(MODELS), default="llama-8b")
    parser.add_argument("--base", choices=("bf16", "nf4"), default="bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--layers", type=int, default=0, help="default: the model's own")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--recompute", choices=("none", "layers", "layers+offload"), default="layers"
    )
    parser.add_argument(
        "--keep",
        choices=list(KEPT),
        default="nothing",
        help="of the recomputed layers, isotype alone",
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--profile", action="store_true", help="prints the operators of one more step"
    )
    parser.add_argument(
        "--ledger",
        nargs="?",
        const="h200",
        help="also counts the step for this device; llama-8b, isotype",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="write every row here, after each")
    a = parser.parse_args()
    if a.device != "cpu" and not torch.cuda.is_available():
        print(
            "no CUDA device: --device cpu --model tiny --tokens 64 runs the same code",
            file=sys.stderr,
        )
        return 2
    if a.keep != "nothing" and (a.who != "isotype" or a.recompute == "none"):
        parser.error("--keep is of isotype's recomputed layers")
    if a.ledger and (a.who, a.model) != ("isotype", "llama-8b"):
        parser.error("--ledger counts isotype's llama-8b")
    if a.who == "unsloth" and (reason := unsloth_row.why_not(a.device)):
        print(f"Unsloth left out: {reason}")
        return unsloth_row.LEFT_OUT
    if a.base == "nf4" and not lora_bench.has_bitsandbytes():
        print("left out: bitsandbytes is not installed, and --base nf4 needs it")
        return unsloth_row.LEFT_OUT
    rows: list[dict[str, Any]] = []
    for length in a.tokens:
        row, step = measured(a, length)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if a.profile:
            row["profile"] = profiled(a, step)
            print(row["profile"], flush=True)
        if a.ledger:
            row["ledger"] = counted(a, length, row)
            print(json.dumps(row["ledger"]), flush=True)
        if a.json:
            with open(a.json, "w") as file:
                json.dump(rows, file, indent=1)
        del step
        if a.device != "cpu":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
