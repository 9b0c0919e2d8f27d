"""Each op forward and backward beside its peers, in one run: time as a ratio, peak memory, gradient error against fp64, and the floor.

    python benchmarks/ops.py --op linear_cross_entropy --tokens 2048 --hidden 2048 --vocabulary 32000 --head frozen
    python benchmarks/ops.py --op all --threads 2

Peers: plain PyTorch, the head and loss of transformers under accelerate, `F.linear_cross_entropy` where torch has it, `torch.compile`d
PyTorch, and on a GPU Liger-Kernel where installed.
Rounds alternate between the peers, so that another process's load falls on all of them; the ratio is of medians. On a CPU `--clock cpu`
counts the process's own time, which a busy machine disturbs less than the wall clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from isotype import ops

Step = Callable[[], list[Tensor]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=["all", *OPS], default="all")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--head", choices=["frozen", "trainable"], default="frozen")
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="also time torch.compile of the plain ops (slow to compile)",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="also measure each peer's peak memory, each in a process of its own",
    )
    parser.add_argument(
        "--no-errors",
        action="store_true",
        help="leave out the gradient errors: fp64 takes minutes at a large vocabulary",
    )
    parser.add_argument(
        "--peer", action="append", help="beside isotype only this one; may be given several times"
    )
    parser.add_argument(
        "--only", help="run one peer once and print its peak memory in MiB (what --memory starts)"
    )
    return parser.parse_args()


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def step(f: Callable[..., Tensor | tuple[Tensor, ...]], leaves: list[Tensor]) -> Step:
    """Forward and backward of `f`; gives the gradients."""
    wanted = [x for x in leaves if x.requires_grad]

    def run() -> list[Tensor]:
        made = f(*leaves)
        outputs = made if isinstance(made, tuple) else (made,)
        return list(torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs]))

    return run


def plain_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def under_accelerate(o: argparse.Namespace, targets: Tensor) -> dict[str, Callable]:
    """The end of a causal LM's forward as `Accelerator(mixed_precision=...)` wraps it, by their own
    functions.

    Autocast, transformers' loss, then every narrow output made fp32: that copies the logits once
    more than the loss does.
    """
    try:
        from accelerate.utils.operations import convert_outputs_to_fp32
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError:
        return {}

    def forward(x: Tensor, w: Tensor) -> dict[str, Tensor]:
        with torch.autocast(o.device, DTYPES[o.dtype], enabled=o.dtype != "fp32"):
            logits = capped(F.linear(x[None], w), o.softcap)
            return {
                "loss": ForCausalLMLoss(logits, None, o.vocabulary, shift_labels=targets),
                "logits": logits,
            }

    wrapped = convert_outputs_to_fp32(forward)
    return {"transformers under accelerate": lambda x, w: wrapped(x, w)["loss"]}


def loss_inputs(o: argparse.Namespace, columns: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(o.tokens, columns, device=o.device).to(DTYPES[o.dtype]).requires_grad_()
    targets = torch.randint(0, o.vocabulary, (o.tokens,), device=o.device)
    targets[:: max(2, o.tokens // 16)] = -100
    return x, targets


def cross_entropy(o: argparse.Namespace) -> tuple[list[Tensor], dict[str, Callable], Callable]:
    x, targets = loss_inputs(o, o.vocabulary)
    peers: dict[str, Callable] = {
        "isotype": lambda x: ops.cross_entropy(x, targets, softcap=o.softcap),
        "plain": lambda x: plain_loss(capped(x, o.softcap), targets),
    }
    return [x], peers, lambda x: F.cross_entropy(capped(x, o.softcap), targets)


def capped(x: Tensor, softcap: float | None) -> Tensor:
    return softcap * torch.tanh(x / softcap) if softcap else x


def linear_cross_entropy(
    o: argparse.Namespace,
) -> tuple[list[Tensor], dict[str, Callable], Callable]:
    x, targets = loss_inputs(o, o.hidden)
    w = (
        torch.randn(o.vocabulary, o.hidden, device=o.device)
        .mul_(2 / o.hidden**0.5)
        .to(x.dtype)
        .requires_grad_(o.head == "trainable")
    )
    peers: dict[str, Callable] = {
        "isotype": lambda x, w: ops.linear_cross_entropy(x, w, targets, softcap=o.softcap),
        "plain": lambda x, w: plain_loss(capped(F.linear(x, w), o.softcap), targets),
    } | under_accelerate(o, targets)
    if hasattr(F, "linear_cross_entropy") and not o.softcap:
        peers["torch F.linear_cross_entropy"] = lambda x, w: F.linear_cross_entropy(x, w, targets)
    if o.device != "cpu":
        peers |= liger_head(o, targets)
    return [x, w], peers, lambda x, w: F.cross_entropy(capped(F.linear(x, w), o.softcap), targets)


def liger_head(o: argparse.Namespace, targets: Tensor) -> dict[str, Callable]:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return {}
    loss = LigerFusedLinearCrossEntropyLoss(softcap=o.softcap)
    return {"liger": lambda x, w: loss(w, x, targets)}


def rms_norm(o: argparse.Namespace) -> tuple[list[Tensor], dict[str, Callable], Callable]:
    x = torch.randn(o.tokens, o.hidden, device=o.device).to(DTYPES[o.dtype]).requires_grad_()
    w = torch.ones(o.hidden, device=o.device, dtype=x.dtype).requires_grad_()

    def plain(x: Tensor, w: Tensor) -> Tensor:
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        return w * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return [x, w], {"isotype": ops.rms_norm, "plain": plain}, plain


def gated(op: Callable, activation: Callable) -> Callable:
    def make(o: argparse.Namespace) -> tuple[list[Tensor], dict[str, Callable], Callable]:
        width = o.hidden * 11 // 4
        pair = [
            torch.randn(o.tokens, width, device=o.device).to(DTYPES[o.dtype]).requires_grad_()
            for _ in range(2)
        ]

        def plain(gate: Tensor, up: Tensor) -> Tensor:
            return activation(gate) * up

        return pair, {"isotype": op, "plain": plain}, plain

    return make


def tables(positions: int, size: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32[1 S R]."""
    angle = torch.outer(
        torch.arange(positions, device=device).float(),
        10000 ** -(torch.arange(size // 2, device=device) / (size // 2)),
    )
    return angle.cos()[None], angle.sin()[None]


def rope(o: argparse.Namespace) -> tuple[list[Tensor], dict[str, Callable], Callable]:
    heads, size = max(4, o.hidden // 128), 128
    positions = min(512, o.tokens)
    batch = o.tokens // positions

    def states(count: int) -> Tensor:
        x = torch.randn(batch, positions, count, size, device=o.device).to(DTYPES[o.dtype])
        return x.transpose(1, 2).detach().requires_grad_()

    cos, sin = tables(positions, size, o.device)
    q, k = states(heads), states(heads // 2)

    def half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c, s = (torch.cat((t, t), -1)[:, None].to(q.dtype) for t in (cos, sin))
        return q * c + half(q) * s, k * c + half(k) * s

    return [q, k], {"isotype": lambda q, k: ops.rope(q, k, cos, sin), "plain": plain}, plain


def attention(o: argparse.Namespace) -> tuple[list[Tensor], dict[str, Callable], Callable]:
    """Causal, sequences of 512 at most, heads of 64, as projections leave them; two query heads
    read a key head.
    """
    positions, heads = min(512, o.tokens), max(2, o.hidden // 64)
    leaves = [
        torch.randn(o.tokens // positions, positions, count, 64, device=o.device)
        .to(DTYPES[o.dtype])
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads, heads // 2, heads // 2)
    ]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return (
        leaves,
        {"isotype": lambda q, k, v: ops.attention(q, k, v, causal=True), "plain": plain},
        plain,
    )


OPS: dict[str, Callable] = {
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "rms_norm": rms_norm,
    "silu_mul": gated(lambda g, u: ops.silu_mul(g, u), F.silu),
    "gelu_mul": gated(lambda g, u: ops.gelu_mul(g, u), F.gelu),
    "gelu_mul_tanh": gated(
        lambda g, u: ops.gelu_mul(g, u, approximate="tanh"), lambda g: F.gelu(g, approximate="tanh")
    ),
    "rope": rope,
    "attention": attention,
}


def seconds(run: Step, o: argparse.Namespace) -> float:
    clock = time.perf_counter if o.clock == "wall" else time.process_time
    if o.device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    run()
    if o.device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def errors(leaves: list[Tensor], run: Step, truth: Callable) -> str:
    """Relative error of each gradient against fp64 on the same values; the fp64 copy of large
    inputs is skipped.
    """
    if sum(x.numel() for x in leaves) > 2**28:
        return "not measured (too large for fp64)"
    exact = step(truth, [x.detach().double().requires_grad_(x.requires_grad) for x in leaves])()
    return " ".join(
        f"{float((g.double() - e).norm() / e.norm()):.1e}" for g, e in zip(run(), exact)
    )


def bandwidth(device: str) -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(2**27, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * source.numel() / min(times)


def peak_flops(device: str, dtype: torch.dtype) -> float:
    """FLOPs a second of a large product."""
    n = 2048 if device == "cpu" else 8192
    a = torch.randn(n, n, device=device).to(dtype)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        a @ a
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


def floor_seconds(name: str, leaves: list[Tensor], o: argparse.Namespace) -> float:
    """The least time: the products at the measured peak, or each tensor and its gradient once
    through memory.
    """
    if name == "linear_cross_entropy":
        products = 3 if o.head == "trainable" else 2
        return (
            products
            * 2
            * o.tokens
            * o.hidden
            * o.vocabulary
            / peak_flops(o.device, DTYPES[o.dtype])
        )
    if name == "attention":
        batch, heads, positions, size = leaves[0].shape
        # two products forward and five backward, half of each behind the causal mask
        return 7 * batch * heads * positions**2 * size / peak_flops(o.device, DTYPES[o.dtype])
    moved = sum(x.numel() * x.element_size() for x in leaves)
    # forward reads its inputs, backward reads them and the output's gradient and writes theirs; row
    # ops also write an output
    return moved * (3 if name == "cross_entropy" else 4) / bandwidth(o.device)


def peak_memory(name: str, peer: str, o: argparse.Namespace) -> str:
    import subprocess
    import sys

    command = [sys.executable, __file__, "--op", name, "--only", peer]
    for key in ("tokens", "hidden", "vocabulary", "head", "softcap", "dtype", "device", "threads"):
        if getattr(o, key) is not None:
            command += [f"--{key}", str(getattr(o, key))]
    done = subprocess.run(command, capture_output=True, text=True)
    return (
        done.stdout.strip().splitlines()[-1]
        if done.returncode == 0
        else f"failed: {done.stderr.strip().splitlines()[-1]}"
    )


def only(name: str, o: argparse.Namespace) -> None:
    """One step of one peer; prints what it took above its inputs."""
    leaves, peers, _ = OPS[name](o)
    run = step(peers[o.only], leaves)
    if o.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        print(f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}")
        return
    before = resident(reset=True)
    run()
    print(f"{resident() - before:.0f}")


def resident(reset: bool = False) -> float:
    """The highest resident size so far in MiB; `reset` makes it the present one (Linux), so that
    making the inputs is not counted.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def compare(name: str, o: argparse.Namespace) -> None:
    torch.manual_seed(0)
    leaves, peers, truth = OPS[name](o)
    if o.compiled:
        peers["plain, compiled"] = torch.compile(peers["plain"])
    if o.peer:
        peers = {"isotype": peers["isotype"], **{peer: peers[peer] for peer in o.peer}}
    runs = {peer: step(f, leaves) for peer, f in peers.items()}
    times: dict[str, list[float]] = {peer: [] for peer in runs}
    for round_ in range(o.rounds + 1):
        for peer, run in runs.items():
            taken = seconds(run, o)
            # the first round compiles and warms up
            if round_:
                times[peer].append(taken)
    mine = statistics.median(times["isotype"])
    least = floor_seconds(name, leaves, o)
    print(
        f"\n{name}  {' '.join(str(list(x.shape)) for x in leaves)} {o.dtype} {o.device}  floor {least * 1e3:.1f} ms"
    )
    for peer, run in runs.items():
        median = statistics.median(times[peer])
        line = f"  {peer:38s} {median * 1e3:9.1f} ms   isotype is {median / mine:5.2f}x as fast"
        line += "" if o.no_errors else f"   gradient error {errors(leaves, run, truth)}"
        print(line + (f"   peak {peak_memory(name, peer, o)} MiB" if o.memory else ""))


def main() -> None:
    o = arguments()
    torch.set_num_threads(o.threads)
    names = list(OPS) if o.op == "all" else [o.op]
    for name in names:
        only(name, o) if o.only else compare(name, o)
    if not o.only:
        from isotype.ops.cpp import fallback_reasons

        for formula, why in fallback_reasons().items():
            print(f"plain PyTorch: {formula}: {why}")


if __name__ == "__main__":
    main()
