"""The same steps on one process and on two processes, each with one thread.

    python -m benchmarks.two_processes                  # a Llama of 33M, LoRA and full training

Every run trains on the same rows in the same steps. The efficiency is the time of the steps on one
process divided by twice the time on two processes. The first steps are not counted. The machine
must be idle, and must have a core for each process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.whole_run import write_inputs

# what is trained -> (`adapter.kind`, preset)
KINDS = {"LoRA": ("lora", "bf16-lora"), "all weights": ("none", "bf16-mixed")}
FIRST_STEPS = 3


def measure_steps(arguments: argparse.Namespace, kind: str, processes: int, folder: Path) -> float:
    """Trains once, and returns the seconds of the steps after the first ones."""
    adapter, preset = KINDS[kind]
    run_folder = folder / f"{adapter}_{processes}"
    launcher = [sys.executable, "-m", "isotype"]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(processes), "-m", "isotype"]
    settings = {
        "model.name": folder / "model",
        "model.device": "cpu",
        "data.train": folder / "train.jsonl",
        "data.eval": folder / "eval.jsonl",
        "data.max_length": 256,
        "adapter.kind": adapter,
        "precision.preset": preset,
        "train.steps": arguments.steps,
        "train.batch_size": 4,
        "train.accumulate": 4,
        "train.eval_every": arguments.steps,
        "run.folder": run_folder,
    }
    command = [*launcher, "train", *(f"{key}={value}" for key, value in settings.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "loss" in row]
    return sum(float(step["seconds"]) for step in steps[FIRST_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(arguments, folder)
        for kind in KINDS:
            one, two = (measure_steps(arguments, kind, n, folder) for n in (1, 2))
            print(
                f"{kind}: {one:.1f} s on one process, {two:.1f} s on two, efficiency"
                f" {one / (2 * two):.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
