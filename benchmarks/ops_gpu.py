"""The ops on a GPU beside every peer that is installed, in one run: the curve of the head over its logits' budget, and shares of bandwidth.

    python benchmarks/ops_gpu.py                       # an H200's sizes
    python benchmarks/ops_gpu.py --device cpu --tiny   # the same code at sizes of a test, to see that it runs

Heads: (8192 tokens, hidden 4096, V 128256) and Gemma's (8192, 2304, 256000, softcap 30), frozen and trainable, isotype's with 64, 256
and 1024 MiB of logits. Logits are trained-like: each token's target stands out, as a trained model's does. Elementwise ops run on tensors
of 512 MiB, cross-entropy on 1 GiB; their share is of the measured copy bandwidth. The gradient's error is against fp64 on the same values.
A peer that is missing, or fails, has its line with the reason (Unsloth's head is Cut Cross-Entropy). Every peer has its own copy of the
inputs: some overwrite them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

import ops as bench
from isotype import ops

MIB = 2**20
Peers = dict[str, Callable]


@dataclass(frozen=True)
class Head:
    tokens: int
    hidden: int
    vocabulary: int
    softcap: float | None = None


HEADS = [Head(8192, 4096, 128256), Head(8192, 2304, 256000, 30.0)]
TINY_HEADS = [Head(64, 32, 500), Head(64, 16, 700, 30.0)]
BUDGETS = [64, 256, 1024]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test: the figures then mean nothing")
    parser.add_argument("--part", choices=["all", "head", "elementwise"], default="all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="torch.compile of plain among the peers")
    return parser.parse_args()


# --- peers: each is imported when asked for, and may not be there


def peer(make: Callable[[], Callable]) -> Callable:
    """What `make` gives, or a function that raises why there is none."""
    try:
        return make()
    except Exception as error:
        reason = f"not installed: {error}" if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"

        def missing(*_: Tensor) -> Tensor:
            raise RuntimeError(reason)

        return missing


def head_peers(head: Head, targets: Tensor, compiled: bool) -> Peers:
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return bench.plain_loss(bench.capped(F.linear(x, w), head.softcap), targets)

    def torchs() -> Callable:
        if head.softcap or not hasattr(F, "linear_cross_entropy"):
            raise ImportError("F.linear_cross_entropy has no softcap" if head.softcap else "this torch has no F.linear_cross_entropy")
        return lambda x, w: F.linear_cross_entropy(x, w, targets)

    def liger() -> Callable:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(softcap=head.softcap)
        return lambda x, w: loss(w, x, targets)

    def cut() -> Callable:
        from cut_cross_entropy import linear_cross_entropy

        return lambda x, w: linear_cross_entropy(x, w, targets, softcap=head.softcap)

    def trl() -> Callable:
        from trl.trainer import utils

        function, size = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE
        keep = targets != -100

        def loss(x: Tensor, w: Tensor) -> Tensor:
            return -function.apply(x[keep], w, None, targets[keep], 1.0, size, head.softcap, 1.0, ("log_probs",))[0].sum() / keep.sum()

        return loss

    peers: Peers = {"plain": plain}
    if compiled:
        peers["plain, compiled"] = torch.compile(plain)
    makers = {"torch F.linear_cross_entropy": torchs, "Liger-Kernel": liger, "Cut Cross-Entropy": cut, "TRL's chunked loss": trl}
    return peers | {name: peer(make) for name, make in makers.items()}


def elementwise_peers(name: str) -> Peers:
    def norm() -> Callable:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)

    def silu() -> Callable:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply

    def gelu() -> Callable:
        from liger_kernel.ops.geglu import LigerGELUMulFunction

        return LigerGELUMulFunction.apply

    makers = {"rms_norm": norm, "silu_mul": silu, "gelu_mul_tanh": gelu}
    return {"Liger-Kernel": peer(makers[name])} if name in makers else {}


def loss_peers(targets: Tensor) -> Peers:
    def liger() -> Callable:
        from liger_kernel.transformers import LigerCrossEntropyLoss

        loss = LigerCrossEntropyLoss()
        return lambda x: loss(x, targets)

    def unsloth() -> Callable:
        from unsloth.kernels.cross_entropy_loss import Fast_CrossEntropyLoss

        return lambda x: Fast_CrossEntropyLoss.apply(x, targets, 0, 0).sum() / (targets != -100).sum()

    return {"Liger-Kernel": peer(liger), "Unsloth": peer(unsloth)}


# --- measuring


@dataclass
class Measured:
    """times in seconds; the peak above the inputs in MiB (None on a CPU); the gradients of the last run"""

    times: list[float]
    peak: float | None
    grads: list[Tensor]


def measure(f: Callable, leaves: list[Tensor], o: argparse.Namespace) -> Measured | str:
    """One peer on its own copy of the inputs, or why it cannot run."""
    run = bench.step(f, [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves])
    cuda = o.device != "cpu"
    clock = SimpleNamespace(clock="wall", device=o.device)
    try:
        for _ in range(1 if o.tiny else 3):  # compiles, tunes and warms up
            run()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        times = [bench.seconds(run, clock) for _ in range(1 if o.tiny else o.rounds)]
        peak = (torch.cuda.max_memory_allocated() - before) / MIB if cuda else None
        return Measured(times, peak, run())
    except Exception as error:  # a peer's failure is a line of the table
        text = str(error).strip() or type(error).__name__
        return text.splitlines()[0][:100]


def exact_head_gradients(head: Head, x: Tensor, w: Tensor, targets: Tensor, rows: int = 512) -> list[Tensor]:
    """The gradients in fp64 on these values, a few rows of logits at a time."""
    dx = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if x.requires_grad else None
    w64 = w.detach().double().requires_grad_(w.requires_grad)
    items = (targets != -100).sum()
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        x64 = x.detach()[part].double().requires_grad_(dx is not None)
        logits = bench.capped(F.linear(x64, w64), head.softcap)
        (F.cross_entropy(logits, targets[part], reduction="sum") / items).backward()
        if dx is not None:
            dx[part] = x64.grad
    return [g for g in (dx, w64.grad) if g is not None]


def error(grads: list[Tensor], exact: list[Tensor]) -> str:
    return " ".join(f"{float((g.double() - e).norm() / e.norm()):.1e}" for g, e in zip(grads, exact))


def line(name: str, found: Measured | str, ours: float | None, exact: list[Tensor] | None, least: float) -> str:
    if isinstance(found, str):
        return f"  {name:30s} {found}"
    median = statistics.median(found.times)
    peak = "" if found.peak is None else f"   peak {found.peak:8.0f} MiB"
    ratio = "" if ours is None else f"   isotype is {median / ours:5.2f}x as fast"
    errors = "" if exact is None else f"   gradient error {error(found.grads, exact)}"
    return f"  {name:30s} {median * 1e3:9.2f} ms   {least / median:5.0%} of the floor{peak}{errors}{ratio}"


# --- the head


def trained_like(head: Head, trainable: bool, o: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, targets: half of what a token says is its target's row of the head, so that its logit stands out."""
    torch.manual_seed(0)
    w = torch.randn(head.vocabulary, head.hidden, device=o.device).mul_(head.hidden**-0.5).bfloat16()
    targets = torch.randint(0, head.vocabulary, (head.tokens,), device=o.device)
    standing_out = 8 + 8 * torch.rand(head.tokens, 1, device=o.device)
    x = torch.randn(head.tokens, head.hidden, device=o.device) * 2 + w[targets].float() * standing_out
    targets[:: max(2, head.tokens // 512)] = -100
    return x.bfloat16().requires_grad_(), w.requires_grad_(trainable), targets


def compare_head(head: Head, trainable: bool, flops: float, o: argparse.Namespace) -> None:
    x, w, targets = trained_like(head, trainable, o)
    exact = exact_head_gradients(head, x, w, targets)
    products = 3 if trainable else 2
    least = products * 2 * head.tokens * head.hidden * head.vocabulary / flops
    kind = "trainable" if trainable else "frozen"
    print(f"\nlinear_cross_entropy {head} {kind} bf16   floor {least * 1e3:.2f} ms ({products} products)")
    itemsize = 4 if o.device != "cpu" else 2
    found: dict[str, Measured | str] = {}
    for budget in BUDGETS:
        chunk = max(1, (budget * MIB if not o.tiny else budget * 256) // (head.vocabulary * itemsize))

        def ours(x: Tensor, w: Tensor, chunk: int = chunk) -> Tensor:
            return ops.linear_cross_entropy(x, w, targets, softcap=head.softcap, chunk=chunk)

        found[f"isotype, {budget} MiB of logits"] = measure(ours, [x, w], o)
    best = min((statistics.median(m.times) for m in found.values() if isinstance(m, Measured)), default=None)
    for name, f in head_peers(head, targets, o.compiled and not o.tiny).items():
        found[name] = measure(f, [x, w], o)
    for name, m in found.items():
        print(line(name, m, None if name.startswith("isotype") else best, exact, least))
    print("  " + undominated(found, exact))


def undominated(found: dict[str, Measured | str], exact: list[Tensor]) -> str:
    """The claim under test: no peer of equal error is both faster and leaner than every point of our curve."""

    def size(m: Measured) -> float:
        return max(float((g.double() - e).norm() / e.norm()) for g, e in zip(m.grads, exact))

    ran = {n: m for n, m in found.items() if isinstance(m, Measured)}
    ours = [m for n, m in ran.items() if n.startswith("isotype")]
    if not ours or any(m.peak is None for m in ran.values()):
        return "peak memory is not measured on this device: no verdict"
    better = [
        n
        for n, m in ran.items()
        if not n.startswith("isotype")
        and all(statistics.median(m.times) < statistics.median(o.times) and m.peak < o.peak for o in ours)  # type: ignore[operator]
        and size(m) <= 1.1 * min(size(o) for o in ours)
    ]
    return (
        f"both faster and leaner at no larger error: {', '.join(better)}" if better else "no peer of equal error is both faster and leaner"
    )


# --- the ops that memory bounds


def elementwise_cases(o: argparse.Namespace) -> Iterator[tuple[str, list[Tensor], Peers, Callable, int]]:
    """Name, inputs, peers, the truth, and the bytes that forward and backward must move."""
    tokens = 64 if o.tiny else 512 * MIB // (2 * 4096)  # 512 MiB of bf16 at hidden 4096
    settings = SimpleNamespace(
        tokens=tokens, hidden=128 if o.tiny else 4096, vocabulary=512 if o.tiny else 128256, dtype="bf16", device=o.device, softcap=None
    )
    for name in ("rms_norm", "silu_mul", "gelu_mul_tanh", "rope", "cross_entropy"):
        if name == "cross_entropy" and not o.tiny:
            settings.tokens = 4096  # 1 GiB of logits
        if name in ("silu_mul", "gelu_mul_tanh") and not o.tiny:
            settings.tokens = tokens * 4 // 11 + 1  # the width is 11/4 of hidden
        leaves, peers, truth = bench.OPS[name](settings)
        if name == "cross_entropy":
            (x,) = leaves
            targets = torch.randint(0, settings.vocabulary, (settings.tokens,), device=o.device)
            peers = {"isotype": lambda x, t=targets: ops.cross_entropy(x, t), "plain": lambda x, t=targets: bench.plain_loss(x, t)}
            peers |= loss_peers(targets)
            moved = 3 * x.numel() * x.element_size()  # read, read again, gradient written
            truth = lambda x, t=targets: F.cross_entropy(x, t)  # noqa: E731
        else:
            peers |= elementwise_peers(name)
            large = [x for x in leaves if x.dim() > 1]
            out = large[0] if name != "rope" else None
            inputs = sum(x.numel() * x.element_size() for x in large)
            output = inputs if out is None else out.numel() * out.element_size()
            # forward reads and writes; backward reads the inputs (a rotation needs none) and the output's gradient, and writes theirs
            moved = inputs + output + output + inputs + (0 if name == "rope" else inputs)
        if o.compiled and not o.tiny:
            peers["plain, compiled"] = torch.compile(peers["plain"])
        yield name, leaves, peers, truth, moved
        settings.tokens = tokens


def compare_elementwise(o: argparse.Namespace) -> None:
    copied = bench.bandwidth(o.device)
    print(f"\ncopy bandwidth {copied / 1e9:.0f} GB/s; the target is 85% of the floor")
    for name, leaves, peers, truth, moved in elementwise_cases(o):
        sizes = " ".join(str(list(x.shape)) for x in leaves)
        print(f"\n{name} {sizes} bf16   floor {moved / copied * 1e3:.2f} ms ({moved / MIB:.0f} MiB moved)")
        found = {peer_name: measure(f, leaves, o) for peer_name, f in peers.items()}
        ours = found["isotype"]
        mine = statistics.median(ours.times) if isinstance(ours, Measured) else None
        exact = bench.step(truth, [x.detach().double().requires_grad_(x.requires_grad) for x in leaves])()
        for peer_name, m in found.items():
            print(line(peer_name, m, None if peer_name == "isotype" else mine, exact, moved / copied))
        del found, exact


def main() -> None:
    o = arguments()
    if o.device != "cpu" and not torch.cuda.is_available():
        sys.exit("no CUDA device: --device cpu --tiny runs the same code")
    if o.device == "cpu" and not o.tiny:
        sys.exit("these sizes are a GPU's: on a CPU use --tiny, or benchmarks/ops.py")
    name = torch.cuda.get_device_name() if o.device != "cpu" else "CPU"
    print(f"{name}, torch {torch.__version__}, bf16, medians of {1 if o.tiny else o.rounds}")
    if o.part in ("all", "head"):
        flops = bench.peak_flops(o.device, torch.bfloat16)
        print(f"matrix products {flops / 1e12:.1f} TFLOP/s")
        for head in TINY_HEADS if o.tiny else HEADS:
            for trainable in (False, True):
                compare_head(head, trainable, flops, o)
    if o.part in ("all", "elementwise"):
        compare_elementwise(o)


if __name__ == "__main__":
    main()
