"""Tokens a second and peak memory of `isotype`'s step beside HF Trainer with PEFT: the same model, rows, batch, adapter, learning rate.

    python benchmarks/train.py                      # CPU: a 20M Llama, 4 x 256 tokens, rank 16
    python benchmarks/train.py --layers 12 --hidden 768 --length 512 --steps 6 --json out.json

Each contender runs in its own process, the order alternates, and the ratio is taken between medians of the same run. Losses are
compared too: a faster step that computes something else is no result. Step memory is the highest resident size of the process
(allocator peak on a GPU) during the measured steps, less what it held after the warm-up, as in `lora.py`: freed memory is returned to
the system and the highest size is reset before the measured steps.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from isotype.environment.memory_limits import status_bytes

CONTENDERS = ("isotype", "without optimize", "hf-trainer")


class StepMemory:
    """Measures the memory that the steps after the warm-up take beyond what the process holds."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.held = 0
        self.peak = 0

    def begin(self) -> None:
        import torch

        if self.device == "cpu":
            ctypes.CDLL(None).malloc_trim(0)
            # 5 sets the highest resident size back to the present one
            Path("/proc/self/clear_refs").write_text("5")
            self.held = status_bytes("VmRSS")
        else:
            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated()

    def end(self) -> None:
        import torch

        if self.device == "cpu":
            self.peak = status_bytes("VmHWM") - self.held
        else:
            self.peak = torch.cuda.max_memory_allocated() - self.held


def model_and_rows(a: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The same random Llama and the same random rows for every contender."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from isotype.data.rows import Row

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=a.vocabulary, hidden_size=a.hidden, intermediate_size=a.hidden * 8 // 3 // 64 * 64, num_hidden_layers=a.layers,
        num_attention_heads=a.hidden // 64, num_key_value_heads=a.hidden // 64, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, a.vocabulary, (a.batch * (a.steps + a.warmup), a.length), generator=g)
    return model, [Row(tuple(row), tuple(row), 0) for row in ids.tolist()]


def run_isotype(a: argparse.Namespace, who: str) -> dict[str, Any]:
    """The step of `isotype train`; "without optimize" is `model.optimize: false`."""
    import torch

    from isotype.config.schema import AdapterSection, TrainSection
    from isotype.model.adapter import attach_adapter
    from isotype.optimize import optimize
    from isotype.precision import PRESETS
    from isotype.precision.apply import apply_precision
    from isotype.tasks.language.batches import collate
    from isotype.tasks.language.objective import batch_loss_sum
    from isotype.training.step import assemble_stepper

    base, rows = model_and_rows(a)
    device = torch.device(a.device)
    model = attach_adapter(base.to(device), AdapterSection(r=a.rank), seed=0)
    precision, train = PRESETS["bf16-lora"], TrainSection(learning_rate=1e-4, batch_size=a.batch)
    if who == "isotype":
        optimize(model, precision)
    apply_precision(model, precision, device_type=device.type)
    step = assemble_stepper(model, train, precision, partial(batch_loss_sum, dtype=precision.loss))
    model.train()
    memory, seconds, losses = StepMemory(a.device), [], []
    for i in range(a.steps + a.warmup):
        if i == a.warmup:
            memory.begin()
        batch = collate(rows[i * a.batch : (i + 1) * a.batch], pad_id=0).to(device)
        start = time.perf_counter()
        losses.append(step([batch], step=i + 1, learning_rate=1e-4, watch_changes=True).loss)
        seconds.append(time.perf_counter() - start)
    memory.end()
    return {"seconds": seconds[a.warmup :], "losses": losses, "memory_bytes": memory.peak}


def run_trainer(a: argparse.Namespace) -> dict[str, Any]:
    import tempfile

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    base, rows = model_and_rows(a)
    torch.manual_seed(0)
    model = get_peft_model(
        base,
        LoraConfig(r=a.rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    memory = StepMemory(a.device)
    times: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if len(times) == a.warmup:
                memory.begin()
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter() - self.start)
            # what the trainer does after the last step belongs to no step
            memory.end()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any
        ) -> None:
            if "loss" in logs:
                losses.append(logs["loss"])

    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out, per_device_train_batch_size=a.batch, max_steps=a.steps + a.warmup, learning_rate=1e-4, lr_scheduler_type="constant",
            bf16=True, use_cpu=a.device == "cpu", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, weight_decay=0.0,
        )  # fmt: skip
        data = [
            {
                "input_ids": list(r.input_ids),
                "labels": list(r.labels),
                "attention_mask": [1] * len(r.input_ids),
            }
            for r in rows
        ]
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[Clock()])
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
        trainer.train()
    return {"seconds": times[a.warmup :], "losses": losses, "memory_bytes": memory.peak}


def measure(a: argparse.Namespace, who: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--only", who], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{who} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "layers": 6,
        "hidden": 384,
        "vocabulary": 8192,
        "batch": 4,
        "length": 256,
        "rank": 16,
        "steps": 8,
        "warmup": 2,
        "rounds": 3,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="write everything measured here")
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.only:
        print(json.dumps(run_trainer(a) if a.only == "hf-trainer" else run_isotype(a, a.only)))
        return
    found: dict[str, list[dict[str, Any]]] = {who: [] for who in CONTENDERS}
    for i in range(a.rounds):
        for who in CONTENDERS if i % 2 == 0 else CONTENDERS[::-1]:
            found[who].append(measure(a, who))
    import torch

    tokens = a.batch * a.length
    summary = {}
    for who, runs in found.items():
        median = statistics.median(s for run in runs for s in run["seconds"])
        memory = statistics.median(run["memory_bytes"] for run in runs)
        summary[who] = {
            "seconds": median,
            "tokens_per_second": tokens / median,
            "memory_bytes": memory,
            "losses": runs[0]["losses"],
        }
    ours, theirs = summary["isotype"], summary["hf-trainer"]
    print(
        f"Llama {a.layers} x {a.hidden}, vocabulary {a.vocabulary}, {a.batch} x {a.length} tokens, rank {a.rank}, {a.device},"
        f" {torch.get_num_threads()} thread(s), load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':17s}{'tokens/s':>10s}{'step memory':>14s}{'first loss':>12s}{'last loss':>12s}")
    for who, row in summary.items():
        losses = f"{row['losses'][0]:12.4f}{row['losses'][-1]:12.4f}"
        print(
            f"{who:17s}{row['tokens_per_second']:10.0f}{row['memory_bytes'] / 1e6:11.0f} MB{losses}"
        )
    speed, memory = (ours[key] / theirs[key] for key in ("tokens_per_second", "memory_bytes"))
    print(f"{'ratio':17s}{speed:10.2f}{memory:11.2f}")
    if a.json:
        with open(a.json, "w") as f:
            json.dump({"settings": vars(a), "summary": summary, "runs": found}, f, indent=1)


if __name__ == "__main__":
    main()
