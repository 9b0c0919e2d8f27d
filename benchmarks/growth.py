"""How a training step grows with length, rank, vocabulary, layers and rows, beside transformers with
PEFT: CPU time, the floor, and memory, for LoRA and for full fine-tuning.

    python -m benchmarks.growth                     # all rows; most of the time is that of 8,192 tokens
    python -m benchmarks.growth length rank         # these rows only
    python -m benchmarks.growth --write             # also writes benchmarks/results/growth.md

Each row changes one size of the same Llama. Each contender of a row is a forked process, so that its
memory is its own. The time is the fastest of the steps after a warm-up, in CPU seconds. The floor is
the time of the step's matrix products and attention at the speed of the best bf16 product of
2048 x 2048 x 2048, measured at the start. Memory is what a step takes beyond what is resident before
it. Full fine-tuning has fp32 weights under autocast. `load` is the load of the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from isotype.environment.memory_limits import status_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import lora

RESULT = Path(__file__).parent / "results" / "growth.md"
BASE = {"hidden": 512, "intermediate": 1536, "layers": 4, "vocabulary": 8192, "batch": 2, "length": 512, "rank": 16}  # fmt: skip
# each row changes one size of BASE; long rows are taken one at a time
ROWS: dict[str, list[dict[str, Any]]] = {
    "length": [{}, {"length": 2048, "batch": 1}, {"length": 8192, "batch": 1}],
    "rank": [{"rank": 8}, {"rank": 64}, {"rank": 256}],
    "vocabulary": [{"vocabulary": 128000}],
    "layers": [{"layers": 8}],
    "batch": [{"batch": 8}],
    "full": [{}, {"length": 2048, "batch": 1}],
}
CONTENDERS = ("PEFT", "Isotype")


def sizes_of(changes: dict[str, Any]) -> argparse.Namespace:
    """Returns the sizes of a row as the arguments of benchmarks/lora.py."""
    fixed = {"device": "cpu", "base": "bf16", "dropout": 0.0, "heads": 0, "key_heads": 0}
    return argparse.Namespace(**{**fixed, "clock": "cpu", **BASE, **changes})


def build(sizes: argparse.Namespace, who: str, *, full: bool) -> nn.Module:
    if not full:
        return lora.contender(sizes, who, checkpointing=False)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(lora.config_of(sizes))
    if who == "Isotype":
        lora.optimized(model, lora=False)
    return model.train()


def measure(sizes: argparse.Namespace, who: str, *, full: bool, steps: int) -> dict[str, float]:
    """Returns the CPU seconds, the step memory in bytes and the first loss of a contender."""
    model = build(sizes, who, full=full)
    step = lora.step_of(sizes, model)
    loss = step()
    seconds = []
    for _ in range(steps):
        ctypes.CDLL(None).malloc_trim(0)
        # 5 sets the highest resident size back to the present one
        Path("/proc/self/clear_refs").write_text("5")
        held = status_bytes("VmRSS")
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
        peak = status_bytes("VmHWM") - held
    return {"seconds": min(seconds), "memory": peak, "loss": loss}


def run_in_fork(function: Callable[[], Any]) -> Any:
    """Returns the result of the function, which runs in a forked process. The process has the
    imports of this one, but no threads and no memory of earlier rows.
    """
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(write, json.dumps(function()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(process, 0)
    if not text:
        raise SystemExit("a forked process failed; its error is printed above")
    return json.loads(text)


def floor_flops(sizes: argparse.Namespace, *, full: bool) -> float:
    """Returns the FLOPs of a step. In full fine-tuning, each weight takes part in three products."""
    if not full:
        return lora.flops(sizes, False)
    tokens = sizes.batch * sizes.length
    weights = sizes.layers * (4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.intermediate)
    attention = sizes.layers * tokens * sizes.length * sizes.hidden
    return 6 * tokens * (weights + sizes.hidden * sizes.vocabulary) + 7 * attention


def describe(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in changes.items()) or "the sizes above"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for module in ("peft", "isotype.optimize", "isotype.lora"):
        import_module(module)  # once, and not in each forked process
    peak = run_in_fork(lambda: lora.peak_flops(sizes_of({})))
    title = (
        f"Llama, {', '.join(f'{name} {value:,}' for name, value in BASE.items())}; bf16;"
        f" {arguments.threads} thread(s); best product {peak / 1e9:.0f} GFLOP/s"
    )
    lines = [
        "| row | PEFT, s | Isotype, s | PEFT / Isotype | Isotype / floor | memory, MB | Isotype / PEFT |"
        " losses | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print(title, *lines, sep="\n", flush=True)
    for name in arguments.rows or ROWS:
        for changes in ROWS[name]:
            sizes = sizes_of(changes)
            full = name == "full"
            load = os.getloadavg()[0]
            values = {
                who: run_in_fork(partial(measure, sizes, who, full=full, steps=arguments.steps))
                for who in CONTENDERS
            }
            theirs, ours = values["PEFT"], values["Isotype"]
            floor = floor_flops(sizes, full=full) / peak
            kind = "full, " if full else ""
            lines.append(
                f"| {kind}{describe(changes)} | {theirs['seconds']:.2f} | {ours['seconds']:.2f} |"
                f" {theirs['seconds'] / ours['seconds']:.2f} | {ours['seconds'] / floor:.2f} |"
                f" {theirs['memory'] / 1e6:.0f}, {ours['memory'] / 1e6:.0f} |"
                f" {ours['memory'] / theirs['memory']:.2f} |"
                f" {theirs['loss']:.4f}, {ours['loss']:.4f} | {load:.0f} |"
            )
            print(lines[-1], flush=True)
    if arguments.write:
        text = (
            "# Growth of a step\n\nThe table is the output of `python -m benchmarks.growth --write`, which explains its columns."
            f" torch {torch.__version__}, transformers {transformers.__version__}.\n\n{title}.\n\n"
        )
        RESULT.write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
