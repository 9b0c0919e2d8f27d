"""The ledger of one step of Llama-3.1-8B QLoRA on an H200, counted without a GPU, beside Unsloth's published code at the same shapes.

    python benchmarks/ledger.py --tokens 4096 --out benchmarks/results/2026-11-23-ledger-4096.md

It is what `isotype plan --device h200 --ledger` prints for a run with one row of so many tokens, every linear layer adapted at rank 16,
and the kind of recomputation given. No weights are made; a minute or two on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date
from pathlib import Path

from transformers import AutoConfig

from isotype.config.load import load
from isotype.environment.hardware import by_name
from isotype.precision.precision import Precision
from isotype.tasks.language.outline import outline, step_outline
from isotype.training.ledger.step import Ledger, step_ledger
from isotype.training.memory.plan import plan_memory
from isotype.training.memory.recomputation import Checkpointing

LLAMA_31_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
KEPT = {
    "all": {"keep_attention": True, "keep_projections": True, "halves": True},
    "attention": {"keep_attention": True},
    "nothing": {},
}


def ledger_of(
    tokens: int, *, kind: str, kept: str, rank: int, device: str, layers: int, base: str = "nf4", embedding: str = "device"
) -> Ledger:
    given = [
        f"precision.preset={base}-lora",
        f"adapter.r={rank}",
        f"model.embedding={embedding}",
        "train.batch_size=1",
        "train.accumulate=1",
    ]
    config = load(None, given).config
    precision = Precision.preset(f"{base}-lora")
    made = outline(
        AutoConfig.for_model(**{**LLAMA_31_8B, "num_hidden_layers": layers}), config, precision, device_type="cuda"
    )  # fmt: skip
    what = Checkpointing(kind, tuple(range(layers)), layers, "asked", **KEPT[kept]) if kind != "none" else Checkpointing(kind)
    largest = step_outline(config, precision, length=tokens, device_type="cuda")
    memory = plan_memory(made, config.train, precision, largest, checkpointing=what, device_type="cuda")
    if memory.not_simulated:
        sys.exit(f"the step could not be simulated: {memory.not_simulated}")
    return step_ledger(made, config.train, precision, by_name(device), largest, rank=rank, checkpointing=what, memory=memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kind", default="layers+offload", choices=["none", "layers", "layers+offload"])
    parser.add_argument("--kept", default="all", choices=list(KEPT))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--embedding", default="device", choices=["device", "host"], help="as model.embedding")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    ledger = ledger_of(
        asked.tokens, kind=asked.kind, kept=asked.kept, rank=asked.rank, device=asked.device, layers=asked.layers, embedding=asked.embedding
    )
    command = f"python benchmarks/ledger.py --tokens {asked.tokens}" + (" --embedding host" if asked.embedding == "host" else "")
    text = (
        f"# {date.today()}, the ledger of Llama-3.1-8B QLoRA at {asked.tokens:,} tokens, counted, nothing measured\n\n"
        f"rank {asked.rank}, one row, `{asked.kind}` that keeps {asked.kept}, {asked.device.upper()} as published: "
        f"`{command}`, which counts as `isotype plan --device {asked.device} --ledger` does.\n\n"
        f"```\n{ledger.as_text()}\n```\n"
    )
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    print(text[text.rindex("in all  ") :] if asked.out else text)


if __name__ == "__main__":
    main()
