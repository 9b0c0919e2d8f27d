"""What `isotype doctor trace` costs a step: the same training with and without it, in turns, as a ratio.

    python benchmarks/trace.py                       # a step of small tensors (all Python) and one of matrix products
    python benchmarks/trace.py --size small --steps 64 --rounds 3

The first steps are watched op by op, later ones now and then (`docs/doctor/trace.md`), so both are given, and the whole run.
Time is the process's own (one thread), the smallest of the rounds for each step; `modes` is a run under the two modes of PyTorch
that a trace of every op needs, with nothing in them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import isotype

# hidden, layers, sequences, tokens of each
SIZES = {"small": (64, 2, 4, 16), "large": (512, 4, 8, 64)}
WATCHED = 8  # steps that are watched op by op


class Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def empty_modes() -> Iterator[None]:
    with Functions(), Dispatches():
        yield


def training(size: str, steps: int, around: AbstractContextManager[Any]) -> list[float]:
    """Seconds of every step: a transformer under bf16 autocast, clipped, stepped by AdamW."""
    hidden, layers, sequences, tokens = SIZES[size]
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(256, hidden),
        nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        nn.Linear(hidden, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = torch.randint(0, 256, (sequences, tokens + 1))
    taken = []
    with around:
        for _ in range(steps):
            start = time.process_time()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            taken.append(time.process_time() - start)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=["all", *SIZES], default="all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'size':6s} {'':6s} {'first steps':>20s} {'later steps':>20s} {f'all {args.steps}':>20s}"
    )
    for size in SIZES if args.size == "all" else [args.size]:
        training(size, 3, nullcontext())
        ways = {"plain": nullcontext, "modes": empty_modes, "traced": isotype.trace}
        best = {name: [float("inf")] * args.steps for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                best[name] = [
                    min(pair) for pair in zip(best[name], training(size, args.steps, way()))
                ]
        for name in ways:
            row = [
                (
                    sum(best[name][part]) / len(best[name][part]),
                    sum(best["plain"][part]) / len(best[name][part]),
                )
                for part in (slice(1, WATCHED), slice(WATCHED, None), slice(None))
            ]
            print(
                f"{size:6s} {name:6s} "
                + " ".join(f"{1e3 * own:9.2f} ms {own / plain:6.2f}x" for own, plain in row)
            )


if __name__ == "__main__":
    main()
