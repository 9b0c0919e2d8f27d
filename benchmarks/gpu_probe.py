"""What this machine's GPU and libraries are: versions, whether kernels run, which attention PyTorch
takes, products and copies.

    python benchmarks/gpu_probe.py --json probe.json
    python benchmarks/gpu_probe.py --device cpu --tiny     # the same code, to see that it runs

Each line is printed as soon as it is known; a question that fails has its error as its line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

PACKAGES = (
    "torch", "triton", "transformers", "peft", "accelerate", "bitsandbytes", "datasets", "pydantic", "unsloth", "unsloth_zoo", "trl",
    "liger-kernel", "cut-cross-entropy", "flash-attn",
)  # fmt: skip
# of Llama-3.1-8B at 4,096 tokens: tokens x out x in
PRODUCTS = {"q": (4096, 4096, 4096), "k": (4096, 1024, 4096), "gate": (4096, 14336, 4096), "down": (4096, 4096, 14336),
            "head": (2048, 128256, 4096), "8192 cubed": (8192, 8192, 8192)}  # fmt: skip
SDP = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {
        "cuda of torch": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    }


def compilers() -> dict[str, str]:
    found = {}
    for name, options in (
        ("gcc", ["--version"]),
        ("g++", ["--version"]),
        ("nvcc", ["--version"]),
        ("nvidia-smi", ["-L"]),
    ):
        path = shutil.which(name)
        done = (
            subprocess.run([path, *options], capture_output=True, text=True, timeout=30)
            if path
            else None
        )
        lines = done.stdout.strip().splitlines() if done else []
        found[name] = (lines[-1] if name == "nvcc" else lines[0]) if lines else "none"
    return found


def device(a: argparse.Namespace) -> dict[str, Any]:
    if a.device == "cpu":
        return {"name": "CPU"}
    p = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "name": p.name, "capability": f"{p.major}.{p.minor}", "multiprocessors": p.multi_processor_count, "GiB": round(total / 2**30, 1),
        "free GiB": round(free / 2**30, 1), "count": torch.cuda.device_count(),
    }  # fmt: skip


def kernels(a: argparse.Namespace) -> str:
    from isotype.ops.backend import kernel_unavailable_reason

    return (
        "not asked on a CPU"
        if a.device == "cpu"
        else kernel_unavailable_reason(torch.device(a.device, 0)) or "run"
    )


def attention(a: argparse.Namespace) -> dict[str, str]:
    """What PyTorch's scaled_dot_product_attention would take, and what our op takes, causal, bf16,
    with and without gradients.
    """
    from isotype.ops.attention import choose_backend

    found = {}
    for length in (64,) if a.tiny else (4096, 16384):
        for depth in (64, 128, 256):
            q = torch.empty(
                1, 8, length, depth, dtype=torch.bfloat16, device=a.device, requires_grad=True
            )
            k = torch.empty(
                1, 2, length, depth, dtype=torch.bfloat16, device=a.device, requires_grad=True
            )
            theirs = SDP.get(
                torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=True), "?"
            )
            ours = [
                choose_backend(q.dtype, q, k, k, None, causal=True, is_packed=packed)
                for packed in (False, True)
            ]
            found[f"{length} x {depth}"] = f"PyTorch {theirs}, here {ours[0]}, packed {ours[1]}"
    return found


def seconds(a: argparse.Namespace, run: Callable[[], object]) -> float:
    """Of one run: the best of three times ten."""
    repeat, best = (1 if a.tiny else 10), float("inf")
    run()
    for _ in range(3):
        synchronize(a)
        start = time.perf_counter()
        for _ in range(repeat):
            run()
        synchronize(a)
        best = min(best, (time.perf_counter() - start) / repeat)
    return best


def synchronize(a: argparse.Namespace) -> None:
    if a.device != "cpu":
        torch.cuda.synchronize()


def products(a: argparse.Namespace) -> dict[str, str]:
    """TFLOP/s in bf16, and of the first with an fp32 result."""
    found = {}
    for name, (m, n, k) in PRODUCTS.items():
        m, n, k = (min(d, 64) if a.tiny else d for d in (m, n, k))
        x, w = (torch.randn(rows, k, device=a.device, dtype=torch.bfloat16) for rows in (m, n))
        found[name] = f"{2 * m * n * k / seconds(a, lambda x=x, w=w: x @ w.t()) / 1e12:.1f} TFLOP/s"
        if a.device != "cpu":
            took = seconds(a, lambda x=x, w=w: torch.mm(x, w.t(), out_dtype=torch.float32))
            found[f"{name}, fp32 result"] = f"{2 * m * n * k / took / 1e12:.1f} TFLOP/s"
    return found


def copies(a: argparse.Namespace) -> dict[str, str]:
    size = 2**20 if a.tiny else 2**30
    here = torch.empty(size, dtype=torch.uint8, device=a.device)
    other = torch.empty_like(here)
    found = {
        "on the device": f"{2 * size / seconds(a, lambda: other.copy_(here)) / 1e9:.0f} GB/s, read and written"
    }
    if a.device != "cpu":
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found["to pinned memory"] = (
            f"{size / seconds(a, lambda: host.copy_(here, non_blocking=True)) / 1e9:.1f} GB/s"
        )
        found["from pinned memory"] = (
            f"{size / seconds(a, lambda: here.copy_(host, non_blocking=True)) / 1e9:.1f} GB/s"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes of a test: the figures then mean nothing"
    )
    parser.add_argument("--json", help="write everything here, after each answer")
    a = parser.parse_args()
    if a.device != "cpu" and not torch.cuda.is_available():
        print(
            f"no CUDA device (torch {torch.__version__}): --device cpu --tiny runs the same code",
            file=sys.stderr,
        )
        return 2
    questions: dict[str, Callable[[], Any]] = {
        "versions": versions, "compilers": compilers, "device": lambda: device(a), "Triton's kernels": lambda: kernels(a),
        "attention": lambda: attention(a), "products": lambda: products(a), "copies": lambda: copies(a),
    }  # fmt: skip
    found: dict[str, Any] = {}
    failed = 0
    for name, ask in questions.items():
        try:
            found[name] = ask()
        except Exception as error:
            found[name], failed = f"failed: {type(error).__name__}: {error}", 1
        lines = (
            [f"  {k:24s} {v}" for k, v in found[name].items()]
            if isinstance(found[name], dict)
            else [f"  {found[name]}"]
        )
        print("\n".join([name, *lines]), flush=True)
        if a.json:
            with open(a.json, "w") as file:
                json.dump(found, file, indent=1)
    return failed


if __name__ == "__main__":
    sys.exit(main())
