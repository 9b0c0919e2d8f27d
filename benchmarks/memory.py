"""The planned memory of a run beside the peak of its process, and the CPU time of a step, for each
preset.

    python -m benchmarks.memory                        # a Llama of 106M, every preset, 1 x 256 tokens
    python -m benchmarks.memory --cases bf16-pure/none bf16-mixed/none torch-bf16/none
    python -m benchmarks.memory --malloc kept --json out.json

A case is a preset and an adapter: `bf16-lora/lora`, or `bf16-pure/none` for full fine-tuning.
`int8/lora` and `fp8/lora` are `bf16-lora/lora` with `precision.base` set to int8 or fp8. One
process plans it (`isotype plan`), and another one trains it (`isotype.train`). The peak is the
highest resident size of that process in the preflight, in step 1 (whose dtypes are observed) and in
the later steps. It is measured as in `benchmarks/lora.py`: Linux sets the highest resident size
back before each part. By default the C library returns freed memory to the system, as in a run whose
memory is scarce; with `--malloc kept` it keeps it. `torch-bf16/none` is a plain loop over
transformers' model in bf16 with torch's fused AdamW, which keeps gradients and states in bf16 and
rounds to nearest.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.whole_run import write_inputs

from isotype.environment.memory_limits import status_bytes

CASES = (
    "bf16-pure/none",
    "bf16-mixed/none",
    "fp16-mixed/none",
    "fp32/none",
    "bf16-lora/lora",
    "nf4-lora/lora",
    "int8/lora",
    "fp8/lora",
    "fp32/lora",
    "torch-bf16/none",
)
PACKED_BASES = ("int8", "fp8")
TORCH = "torch-bf16"
MIB = 1 << 20
# part of a run -> (module, attribute) of the function whose peak it is
PARTS = {
    "preflight": ("isotype.training.run", "_TrainingRun._run_preflight"),
    "steps": ("isotype.training.loop", "Loop._step"),
}
Measures = dict[str, list[tuple[int, float]]]


def measured(function: Callable[..., Any], values: list[tuple[int, float]]) -> Callable[..., Any]:
    """Returns the function with a measurement: it adds the highest resident size and the CPU time
    of each call to `values`.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # 5 sets the highest resident size back to the present one
        Path("/proc/self/clear_refs").write_text("5")
        start = time.process_time()
        result = function(*args, **kwargs)
        values.append((status_bytes("VmHWM"), time.process_time() - start))
        return result

    return call


def settings(arguments: argparse.Namespace, case: str, folder: Path) -> dict[str, Any]:
    preset, adapter = case.split("/")
    precision = {"precision.preset": preset}
    if preset in PACKED_BASES:
        precision = {"precision.preset": "bf16-lora", "precision.base": preset}
    return {
        "model.name": str(folder / "model"),
        "data.train": str(folder / "train.jsonl"),
        "data.eval": str(folder / "eval.jsonl"),
        "data.max_length": arguments.length,
        "data.cache": "none",
        "data.loss_on": "all",
        "adapter.kind": adapter,
        **precision,
        "train.steps": arguments.steps,
        "train.batch_size": arguments.batch,
        "train.eval_every": arguments.steps,
        "train.learning_rate": 1e-4,
        "run.folder": str(folder / f"run-{preset}-{adapter}"),
        "run.sample_every": 0,
    }


def train(arguments: argparse.Namespace, case: str, folder: Path) -> Measures:
    """Trains with `isotype.train` in this process, and measures its parts."""
    from isotype.entry.train import train as entry
    from isotype.training.memory.device import return_freed_blocks

    if arguments.malloc == "returned":
        return_freed_blocks()
    measures: Measures = {}
    for name, (module_name, attribute) in PARTS.items():
        owner: Any = import_module(module_name)
        *path, last = attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, measured(getattr(owner, last), measures.setdefault(name, [])))
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings(arguments, case, folder).items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    entry(**sections)
    return measures


def train_torch(arguments: argparse.Namespace, folder: Path) -> Measures:
    """Trains the bf16 model with torch's AdamW in a plain loop, on rows of the full length."""
    import torch
    from transformers import AutoModelForCausalLM

    from isotype.training.memory.device import return_freed_blocks

    if arguments.malloc == "returned":
        return_freed_blocks()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (arguments.batch, arguments.length)
    ids = torch.randint(3, arguments.vocabulary, shape, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    measures: Measures = {"steps": []}
    run = measured(step, measures["steps"])
    for _ in range(arguments.steps):
        run()
    return measures


def plan(arguments: argparse.Namespace, case: str, folder: Path) -> dict[str, Any]:
    assignments = [f"{key}={value}" for key, value in settings(arguments, case, folder).items()]
    command = [sys.executable, "-m", "isotype", "plan", "--json", *assignments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{case} cannot be planned:\n{done.stdout[-500:]}{done.stderr[-2000:]}")
    memory: dict[str, Any] = json.loads(done.stdout)["memory"]
    return memory


def run_case(arguments: argparse.Namespace, case: str, folder: Path) -> dict[str, Any]:
    """Plans and trains a case, each in a process of its own. Sizes are in MiB."""
    is_torch = case.startswith(TORCH)
    memory = {} if is_torch else plan(arguments, case, folder)
    command = [sys.executable, __file__, *sys.argv[1:], "--child", case, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr[-2000:]}")
    measures: Measures = json.loads(done.stdout.splitlines()[-1])
    first, *later = measures["steps"]
    row = {
        "preflight": max((peak for peak, _ in measures.get("preflight", [])), default=0) // MIB,
        "first step": first[0] // MIB,
        "later steps": max(peak for peak, _ in later) // MIB,
        "CPU s per step": round(statistics.median(seconds for _, seconds in later), 2),
    }
    if not is_torch:
        peak = max(row["preflight"], row["first step"], row["later steps"])
        row["planned"] = memory["peak_with_process"] // MIB
        row["step, planned"] = memory["peak"] // MIB
        row["measured / planned"] = round(peak / row["planned"], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "hidden": 768,
        "layers": 12,
        "vocabulary": 14000,
        "batch": 1,
        "length": 256,
        "rows": 200,
        "steps": 4,
        "threads": 1,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--malloc", choices=("returned", "kept"), default="returned")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        if arguments.child.startswith(TORCH):
            measures = train_torch(arguments, arguments.folder)
        else:
            measures = train(arguments, arguments.child, arguments.folder)
        print("\n" + json.dumps(measures))
        return
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        write_inputs(arguments, Path(name), tokenizer_size=1024)
        for case in arguments.cases:
            rows[case] = run_case(arguments, case, Path(name))
            values = "  ".join(f"{key} {value}" for key, value in rows[case].items())
            print(f"{case:16s} {values}", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}, {arguments.threads} threads")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
