"""A whole run, from the start of the process to the saved adapter, with the CPU time of each part,
beside TRL's SFTTrainer with PEFT on the same model, rows and settings.

    python -m benchmarks.whole_run                          # a Llama of 33M, 40 steps of 4 rows
    python -m benchmarks.whole_run --hidden 1536 --layers 20 --steps 2 --batch 2 --length 128
    python -m benchmarks.whole_run --only isotype --json out.json
    python -m benchmarks.whole_run --precision fp32         # on a CPU without bf16 instructions
    python -m benchmarks.whole_run --only isotype --build   # with an empty folder for compiled kernels

Both train a LoRA adapter of all linear layers (bf16 by default), evaluate the same held-out rows as
often, and save. The imports of the libraries, which both need, and those of the program itself are
separate parts. The part `data` is reading, rendering and tokenising all rows. Isotype also checks the
run before step 1, observes dtypes, saves checkpoints, and loads its adapter again. Each contender is
one process with the same number of threads. CPU time is that of the process and of the processes it
started.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

CONTENDERS = ("isotype", "trl")
# part of a run -> (module, attribute) of the function whose time it is
PARTS = {
    "data": ("isotype.tasks.language.task", "LanguageTask.load_data"),
    "model": ("isotype.training.setup", "build_model"),
    "preflight": ("isotype.training.run", "_TrainingRun._run_preflight"),
    "steps": ("isotype.training.loop", "Loop._step"),
    "evaluation, samples, checkpoints": (
        "isotype.training.loop",
        "Loop._evaluate_sample_save",
    ),
    "save and check at the end": ("isotype.training.run", "finish"),
    "report": ("isotype.training.run", "_TrainingRun._write_report"),
}


def cpu_seconds() -> float:
    """CPU seconds of this process and of its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure_part(name: str, module_name: str, attribute: str, seconds: dict[str, float]) -> None:
    """Adds the CPU time of each call of a function to `seconds[name]`."""
    owner: Any = import_module(module_name)
    *path, last = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    function: Callable[..., Any] = getattr(owner, last)

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        start = cpu_seconds()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + cpu_seconds() - start

    setattr(owner, last, measured)


def write_inputs(
    arguments: argparse.Namespace, folder: Path, *, tokenizer_size: int | None = None
) -> None:
    """Writes a model with random weights, its tokenizer, and the rows as conversations.

    tokenizer_size  the number of tokens of the tokenizer; the model then has the vocabulary
                    `arguments.vocabulary`. By default both have the same size
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from isotype.data.stdlib import stdlib_pairs
    from isotype.quickstart.text import train_tokenizer

    pairs = stdlib_pairs()[: arguments.rows]
    texts = [f"{pair.question} {pair.answer}" for pair in pairs]
    tokenizer = train_tokenizer(texts, vocabulary=tokenizer_size or arguments.vocabulary)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary if tokenizer_size else len(tokenizer),
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = []
    for pair in pairs:
        turns = [
            {"role": "user", "content": pair.question},
            {"role": "assistant", "content": pair.answer},
        ]
        lines.append(json.dumps({"messages": turns}) + "\n")
    eval_count = max(1, len(lines) // 20)
    (folder / "train.jsonl").write_text("".join(lines[eval_count:]))
    (folder / "eval.jsonl").write_text("".join(lines[:eval_count]))


def import_libraries() -> dict[str, float]:
    """Imports PyTorch, the model's class and PEFT. Returns the CPU seconds since the start of the
    process.
    """
    for name in ("torch", "transformers.models.llama.modeling_llama", "peft"):
        import_module(name)
    return {"imports of libraries": cpu_seconds()}


def run_isotype(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains with `isotype.train` in this process."""
    from isotype.environment.hub_kernels import disable_hub_kernels

    disable_hub_kernels()  # imports bitsandbytes as a run does
    seconds = import_libraries()
    import isotype
    from isotype.entry import train as entry

    import_module("isotype.tasks.choose")
    import_module("isotype.tasks.language.task")
    seconds["imports of Isotype"] = cpu_seconds() - seconds["imports of libraries"]
    for name, (module_name, attribute) in PARTS.items():
        measure_part(name, module_name, attribute, seconds)
    run = entry.train(
        model=str(folder / "model"),
        data={
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "max_length": arguments.length,
            "cache": "none",
            "loss_on": "all",
        },
        adapter={"kind": "lora", "r": 16},
        precision="fp32" if arguments.precision == "fp32" else "bf16-lora",
        train={
            "steps": arguments.steps,
            "batch_size": arguments.batch,
            "eval_every": arguments.steps,
        },
        run={"folder": str(folder / "isotype"), "sample_every": arguments.samples},
    )
    evaluations = [row["eval_loss"] for row in run.record.metrics if "eval_loss" in row]
    return {"parts": seconds, "loss": evaluations[-1], "version": isotype.__version__}


def run_trl(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains with TRL's SFTTrainer and PEFT."""
    seconds = import_libraries()
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    seconds["imports of TRL"] = cpu_seconds() - seconds["imports of libraries"]
    is_bf16 = arguments.precision == "bf16"
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    start = cpu_seconds()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    seconds["model"] = cpu_seconds() - start
    start = cpu_seconds()
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "eval")}
    rows = load_dataset("json", data_files=files, cache_dir=str(folder / "cache"))
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=arguments.batch,
        max_length=arguments.length,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        bf16=is_bf16,
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=arguments.steps,
        eval_on_start=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        gradient_checkpointing=False,
        seed=0,
    )
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=rows["train"],
        eval_dataset=rows["eval"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    seconds["data, adapter and trainer"] = cpu_seconds() - start
    start = cpu_seconds()
    trainer.train()
    seconds["steps and evaluation"] = cpu_seconds() - start
    start = cpu_seconds()
    trainer.save_model(str(folder / "trl" / "adapter"))
    seconds["save"] = cpu_seconds() - start
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return {"parts": seconds, "loss": losses[-1]}


def measure(contender: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs a contender in a process of its own."""
    options = [f"--{name}={value}" for name, value in vars(arguments).items() if name in SIZES]
    options.append(f"--precision={arguments.precision}")
    command = [sys.executable, "-m", "benchmarks.whole_run", "--worker", contender, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    if arguments.build:
        environment["ISOTYPE_CACHE"] = str(folder / "kernels")
    process = subprocess.run(
        [*command, "--folder", str(folder)],
        env=environment,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"{contender} ended with status {process.returncode}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


SIZES = {
    "hidden": 512, "layers": 8, "vocabulary": 8192, "rows": 400, "steps": 40, "batch": 4, "length": 256, "samples": 0,
    "threads": 1,
}  # fmt: skip


def worker(arguments: argparse.Namespace) -> None:
    run = run_isotype if arguments.worker == "isotype" else run_trl
    started = time.perf_counter()
    result = run(arguments, arguments.folder)
    total = cpu_seconds()
    parts = result["parts"]
    parts["rest"] = total - sum(parts.values())
    seconds = time.perf_counter() - started
    print(json.dumps({**result, "cpu_seconds": total, "wall_seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--build", action="store_true", help="compile the kernels in the run")
    parser.add_argument("--only", choices=CONTENDERS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments)
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(arguments, folder)
        for contender in CONTENDERS if arguments.only is None else (arguments.only,):
            load = os.getloadavg()[0]
            result = measure(contender, arguments, folder)
            results[contender] = {**result, "load": load}
            total = result["cpu_seconds"]
            print(
                f"{contender}: {total:.1f} CPU s, {result['wall_seconds']:.0f} s, evaluation loss"
                f" {result['loss']:.4f}; {arguments.threads} thread(s), load {load:.1f}"
            )
            for part, seconds in result["parts"].items():
                rows_text = ""
                if part.startswith("data"):
                    rows_text = f"  {arguments.rows / seconds:,.0f} rows per CPU second"
                print(f"  {part:<36}{seconds:7.1f}  {seconds / total:6.1%}{rows_text}", flush=True)
    if len(results) == len(CONTENDERS):
        ratio = results["trl"]["cpu_seconds"] / results["isotype"]["cpu_seconds"]
        print(f"isotype takes 1/{ratio:.2f} of TRL's CPU time")
    if arguments.json:
        sizes = {name: getattr(arguments, name) for name in (*SIZES, "precision")}
        text = json.dumps({"sizes": sizes, "results": results}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
