"""The ops on a GPU beside every peer that is installed: the curve of the head over its logits' budget, and shares of bandwidth.

    python benchmarks/ops_gpu.py                           # every case, an H200's sizes
    python benchmarks/ops_gpu.py --case rope --case rms_norm --json rows.json
    python benchmarks/ops_gpu.py --case unsloth            # alone: importing Unsloth patches torch, transformers and TRL
    python benchmarks/ops_gpu.py --device cpu --tiny       # the same code at sizes of a test, to see that it runs

Heads: (8192 tokens, hidden 4096, V 128256) and Gemma's (8192, 2304, 256000, softcap 30), frozen and trainable, isotype's with 64, 256
and 1024 MiB of logits. Logits are trained-like: each token's target stands out, as a trained model's does. Elementwise ops run on tensors
of 512 MiB, cross-entropy on 1 GiB; their share is of the measured copy bandwidth.

A time is the median of rounds of several runs each between two events of the device, so that launches overlap as in training. The
gradient's error is against fp64 on the same values, for a random upstream gradient, taken from a first run on copies of the inputs: some
peers overwrite them. A peer that is missing, or fails, has its line with the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isotype import ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import ops as bench
from benchmarks import unsloth_row

MIB = 2**20
Peers = dict[str, Callable]


@dataclass(frozen=True)
class Head:
    tokens: int
    hidden: int
    vocabulary: int
    softcap: float | None = None


HEADS = {"llama": Head(8192, 4096, 128256), "gemma": Head(8192, 2304, 256000, 30.0)}
TINY_HEADS = {"llama": Head(64, 32, 500), "gemma": Head(64, 16, 700, 30.0)}
BUDGETS = [64, 256, 1024]
ELEMENTWISE = ("rms_norm", "rms_norm_heads", "silu_mul", "gelu_mul_tanh", "rope", "cross_entropy")
CASES = (
    *(f"head-{name}-{kind}" for name in HEADS for kind in ("frozen", "trainable")),
    *ELEMENTWISE,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes of a test: the figures then mean nothing"
    )
    parser.add_argument(
        "--case",
        action="append",
        choices=(*CASES, "unsloth"),
        help="may be given several times; default all but unsloth",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="torch.compile of plain among the peers",
    )
    parser.add_argument("--json", help="write every row here")
    return parser.parse_args()


# --- peers: each is imported when asked for, and may not be there


def peer(make: Callable[[], Callable]) -> Callable:
    """What `make` gives, or a function that raises why there is none."""
    try:
        return make()
    except BaseException as error:  # an import may also leave by SystemExit
        if isinstance(error, KeyboardInterrupt):
            raise
        reason = (
            f"not installed: {error}"
            if isinstance(error, ImportError)
            else f"{type(error).__name__}: {error}"
        )

        def missing(*_: Tensor) -> Tensor:
            raise RuntimeError(reason)

        return missing


def head_peers(head: Head, trainable: bool, targets: Tensor, compiled: bool) -> Peers:
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return bench.plain_loss(bench.capped(F.linear(x, w), head.softcap), targets)

    def torchs() -> Callable:
        if head.softcap or not hasattr(F, "linear_cross_entropy"):
            raise ImportError(
                "F.linear_cross_entropy has no softcap"
                if head.softcap
                else "this torch has no F.linear_cross_entropy"
            )
        return lambda x, w: F.linear_cross_entropy(x, w, targets)

    def liger(**options: Any) -> Callable:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(softcap=head.softcap, **options)
        return lambda x, w: loss(w, x, targets)

    def cut(**options: Any) -> Callable:
        from cut_cross_entropy import linear_cross_entropy

        return lambda x, w: linear_cross_entropy(x, w, targets, softcap=head.softcap, **options)

    def trl() -> Callable:
        from trl.kernels import ChunkedLogProbFunction

        keep = targets != -100
        # as trl.trainer.utils calls it: 32,768 classes at once, softcap, no scale, only
        # log-probabilities
        rest = (None, targets[keep], 1.0, 32768, head.softcap, 1.0, ("log_probs",))
        return lambda x, w: -ChunkedLogProbFunction.apply(x[keep], w, *rest)[0].sum() / keep.sum()

    peers: Peers = {"plain": plain}
    if compiled:
        peers["plain, compiled"] = torch.compile(plain)
    makers: dict[str, Callable[[], Callable]] = {
        "torch F.linear_cross_entropy": torchs,
        "Liger-Kernel": liger,
        "Cut Cross-Entropy": cut,
        "Cut Cross-Entropy, unfiltered": lambda: cut(filter_eps=None),
        "TRL's chunked loss": trl,
    }
    if trainable:
        makers["Liger-Kernel, fp32 sums"] = lambda: liger(accum_dtype=torch.float32)
    return peers | {name: peer(make) for name, make in makers.items()}


def unsloth_head(head: Head, targets: Tensor) -> Callable:
    """What its models' forwards call (its own chunked loss: Cut Cross-Entropy is off in its
    releases for torch 2.8 and newer).
    """
    import unsloth  # noqa: F401  # sets up what unsloth_zoo needs
    from unsloth_zoo.fused_losses.cross_entropy_loss import unsloth_fused_ce_loss

    items = (targets != -100).sum()
    options = {
        "trainer": None,
        "lm_head_bias": None,
        "n_items": items,
        "shift_labels": False,
        "logit_softcapping": head.softcap or 0.0,
    }
    return lambda x, w: unsloth_fused_ce_loss(
        hidden_states=x[None], lm_head_weight=w, labels=targets[None], **options
    )


def unsloth_loss(targets: Tensor) -> Callable:
    import unsloth  # noqa: F401
    from unsloth.kernels.cross_entropy_loss import Fast_CrossEntropyLoss

    return lambda x: Fast_CrossEntropyLoss.apply(x, targets, 0, 0).sum() / (targets != -100).sum()


def elementwise_peers(name: str, leaves: list[Tensor]) -> Peers:
    def norm() -> Callable:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)

    def silu() -> Callable:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply

    def gelu() -> Callable:
        from liger_kernel.ops.geglu import LigerGELUMulFunction

        return LigerGELUMulFunction.apply

    def rope() -> Callable:
        from liger_kernel.ops.rope import LigerRopeFunction

        cos, sin = (
            torch.cat((t, t), -1)
            for t in bench.tables(leaves[0].shape[2], leaves[0].shape[3], leaves[0].device)
        )
        return lambda q, k: LigerRopeFunction.apply(q, k, cos, sin)

    makers = {
        "rms_norm": norm,
        "rms_norm_heads": norm,
        "silu_mul": silu,
        "gelu_mul_tanh": gelu,
        "rope": rope,
    }
    return {"Liger-Kernel": peer(makers[name])} if name in makers else {}


def liger_loss(targets: Tensor) -> Callable:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    loss = LigerCrossEntropyLoss()
    return lambda x: loss(x, targets)


# --- measuring


@dataclass
class Row:
    """One peer of one case: seconds a run, the peak above the inputs in MiB (None on a CPU), the
    gradients' errors; or why not.
    """

    case: str
    peer: str
    times: list[float]
    peak: float | None
    errors: list[float]
    failed: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.times) if self.times else float("inf")


def synchronize(o: argparse.Namespace) -> None:
    if o.device != "cpu":
        torch.cuda.synchronize()


def seconds(o: argparse.Namespace, run: Callable[[], object], repeat: int) -> float:
    """Of one run, from `repeat` of them without a wait in between."""
    if o.device == "cpu":
        start = time.perf_counter()
        for _ in range(repeat):
            run()
        return (time.perf_counter() - start) / repeat
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / repeat


def upstream(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Fixed random gradients of the outputs: ones would hide errors, and made in every run they
    would be timed.
    """
    g = torch.Generator(outputs[0].device).manual_seed(1)
    return [
        torch.randn(y.shape, generator=g, device=y.device).to(y.dtype)
        if y.dim()
        else torch.ones_like(y)
        for y in outputs
    ]


def gradients(f: Callable, leaves: list[Tensor], dy: list[Tensor]) -> list[Tensor]:
    made = f(*leaves)
    outputs = made if isinstance(made, tuple) else (made,)
    return list(
        torch.autograd.grad(
            outputs,
            [x for x in leaves if x.requires_grad],
            [d.to(y.dtype) for d, y in zip(dy, outputs)],
        )
    )


def copies(leaves: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]


def measure(
    case: str,
    name: str,
    f: Callable,
    leaves: list[Tensor],
    dy: list[Tensor],
    exact: list[Tensor],
    o: argparse.Namespace,
) -> Row:
    """One peer on copies of the inputs, or why it cannot run."""
    cuda = o.device != "cpu"
    try:
        found = gradients(f, copies(leaves), dy)
        errors = [
            float((g.double() - e).norm() / e.norm()) for g, e in zip(found, exact, strict=True)
        ]
        del found
        own = copies(leaves)

        def run() -> None:
            gradients(f, own, dy)

        for _ in range(1 if o.tiny else 3):  # tunes and warms up
            run()
        synchronize(o)
        repeat = 1 if o.tiny else max(1, min(20, int(0.1 / seconds(o, run, 1))))
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        times = [seconds(o, run, repeat) for _ in range(1 if o.tiny else o.rounds)]
        peak = (torch.cuda.max_memory_allocated() - before) / MIB if cuda else None
        return Row(case, name, times, peak, errors)
    except Exception as error:  # a peer's failure is a line of the table
        text = str(error).strip() or type(error).__name__
        row = Row(case, name, [], None, [], text.splitlines()[0][:160])
    try:
        synchronize(o)
    except Exception as error:
        sys.exit(f"{case}: {name} left the device unusable ({row.failed}): {error}")
    if cuda:
        torch.cuda.empty_cache()
    return row


def line(row: Row, ours: float | None, least: float) -> str:
    if row.failed:
        return f"  {row.peer:30s} {row.failed}"
    peak = "" if row.peak is None else f"   peak {row.peak:8.0f} MiB"
    ratio = "" if ours is None else f"   isotype is {row.median / ours:5.2f}x as fast"
    errors = " ".join(f"{e:.1e}" for e in row.errors)
    return f"  {row.peer:30s} {row.median * 1e3:9.3f} ms   {least / row.median:5.0%} of the floor{peak}   gradient error {errors}{ratio}"


def bandwidth(o: argparse.Namespace) -> float:
    """Bytes a second of a copy of 1 GiB, read and written."""
    source = torch.randint(
        0, 255, (2**20 if o.tiny else 2**30,), dtype=torch.uint8, device=o.device
    )
    target = torch.empty_like(source)
    return (
        2
        * source.numel()
        / min(seconds(o, lambda: target.copy_(source), 1 if o.tiny else 10) for _ in range(3))
    )


def peak_flops(o: argparse.Namespace) -> float:
    """FLOPs a second of a large bf16 product of random values."""
    n = 256 if o.tiny else 8192
    a, b = (torch.randn(n, n, device=o.device).bfloat16() for _ in range(2))
    return 2 * n**3 / min(seconds(o, lambda: a @ b, 1 if o.tiny else 10) for _ in range(4))


# --- the head


def trained_like(
    head: Head, trainable: bool, o: argparse.Namespace
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, targets: half of what a token says is its target's row of the head, so that
    its logit stands out.
    """
    torch.manual_seed(0)
    w = (
        torch.randn(head.vocabulary, head.hidden, device=o.device)
        .mul_(head.hidden**-0.5)
        .bfloat16()
    )
    targets = torch.randint(0, head.vocabulary, (head.tokens,), device=o.device)
    standing_out = 8 + 8 * torch.rand(head.tokens, 1, device=o.device)
    x = (
        torch.randn(head.tokens, head.hidden, device=o.device) * 2
        + w[targets].float() * standing_out
    )
    targets[:: max(2, head.tokens // 512)] = -100
    return x.bfloat16().requires_grad_(), w.requires_grad_(trainable), targets


def exact_head_gradients(
    head: Head, x: Tensor, w: Tensor, targets: Tensor, rows: int = 512
) -> list[Tensor]:
    """The gradients in fp64 on these values, a few rows of logits at a time."""
    dx = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    w64 = w.detach().double().requires_grad_(w.requires_grad)
    items = (targets != -100).sum()
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        x64 = x.detach()[part].double().requires_grad_()
        logits = bench.capped(F.linear(x64, w64), head.softcap)
        (F.cross_entropy(logits, targets[part], reduction="sum") / items).backward()
        dx[part] = x64.grad
    return [g for g in (dx, w64.grad) if g is not None]


def compare_head(
    case: str, head: Head, trainable: bool, flops: float, o: argparse.Namespace
) -> list[Row]:
    x, w, targets = trained_like(head, trainable, o)
    exact = exact_head_gradients(head, x, w, targets)
    products = 3 if trainable else 2
    # ignored rows need no product
    least = products * 2 * int((targets != -100).sum()) * head.hidden * head.vocabulary / flops
    print(f"\n{case} {head} bf16   floor {least * 1e3:.2f} ms ({products} products)", flush=True)
    itemsize = 4 if o.device != "cpu" else 2
    peers: Peers = {}
    for budget in BUDGETS:
        chunk = max(
            1, (budget * MIB if not o.tiny else budget * 256) // (head.vocabulary * itemsize)
        )

        def ours(x: Tensor, w: Tensor, chunk: int = chunk) -> Tensor:
            return ops.linear_cross_entropy(x, w, targets, softcap=head.softcap, chunk=chunk)

        peers[f"isotype, {budget} MiB of logits"] = ours
    peers["isotype"] = lambda x, w: ops.linear_cross_entropy(x, w, targets, softcap=head.softcap)
    if case.startswith("unsloth"):
        peers["Unsloth"] = peer(lambda: unsloth_head(head, targets))
    else:
        peers |= head_peers(head, trainable, targets, o.compiled and not o.tiny)
    dy = [torch.ones((), device=o.device)]
    rows = [measure(case, name, f, [x, w], dy, exact, o) for name, f in peers.items()]
    best = min((row.median for row in rows if row.peer.startswith("isotype")), default=None)
    for row in rows:
        print(line(row, None if row.peer.startswith("isotype") else best, least))
    print("  " + undominated(rows), flush=True)
    return rows


def undominated(rows: list[Row]) -> str:
    """The claim under test: no peer of equal error is both faster and leaner than every point of
    our curve.
    """
    ran = [row for row in rows if not row.failed]
    ours = [row for row in ran if row.peer.startswith("isotype")]
    if not ours or any(row.peak is None for row in ran):
        return "peak memory is not measured on this device: no verdict"
    better = [
        row.peer
        for row in ran
        if row not in ours
        and all(row.median < mine.median and row.peak < mine.peak for mine in ours)
        and max(row.errors) <= 1.1 * min(max(mine.errors) for mine in ours)
    ]
    return (
        f"both faster and leaner at no larger error: {', '.join(better)}"
        if better
        else "no peer of equal error is both faster and leaner"
    )


# --- the ops that memory bounds


def elementwise_case(name: str, o: argparse.Namespace) -> tuple[list[Tensor], Peers, Callable, int]:
    """Inputs, peers, the truth, and the bytes that forward and backward must move."""
    tokens = 64 if o.tiny else 512 * MIB // (2 * 4096)  # 512 MiB of bf16 at hidden 4096
    hidden, op = 128 if o.tiny else 4096, name
    if name == "rms_norm_heads":  # of each head of 128, as Qwen 3 norms its queries
        tokens, hidden, op = tokens * hidden // 128, 128, "rms_norm"
    if name == "cross_entropy" and not o.tiny:
        tokens = 4096  # 1 GiB of logits
    if name in ("silu_mul", "gelu_mul_tanh") and not o.tiny:
        tokens = tokens * 4 // 11 + 1  # the width is 11/4 of hidden
    settings = SimpleNamespace(
        tokens=tokens,
        hidden=hidden,
        vocabulary=512 if o.tiny else 128256,
        dtype="bf16",
        device=o.device,
        softcap=None,
    )
    leaves, peers, truth = bench.OPS[op](settings)
    if name == "cross_entropy":
        (x,) = leaves
        targets = torch.randint(0, settings.vocabulary, (settings.tokens,), device=o.device)
        peers = {
            "isotype": lambda x: ops.cross_entropy(x, targets),
            "plain": lambda x: bench.plain_loss(x, targets),
        }
        peers["Liger-Kernel"] = peer(lambda: liger_loss(targets))
        peers["Unsloth"] = lambda x: unsloth_loss(targets)(x)
        # read, read again, gradient written
        return (
            leaves,
            peers,
            lambda x: F.cross_entropy(x, targets),
            3 * x.numel() * x.element_size(),
        )
    large = [x for x in leaves if x.dim() > 1]
    inputs = sum(x.numel() * x.element_size() for x in large)
    output = inputs if name == "rope" else large[0].numel() * large[0].element_size()
    # forward reads and writes; backward reads the inputs (a rotation needs none) and the output's
    # gradient, and writes theirs
    moved = inputs + output + output + inputs + (0 if name == "rope" else inputs)
    return leaves, peers | elementwise_peers(name, leaves), truth, moved


def compare_elementwise(
    case: str, name: str, copied: float, only: tuple[str, ...] | None, o: argparse.Namespace
) -> list[Row]:
    torch.manual_seed(0)
    leaves, peers, truth, moved = elementwise_case(name, o)
    if only is None:
        peers.pop("Unsloth", None)
        if o.compiled and not o.tiny:
            peers["plain, compiled"] = torch.compile(peers["plain"])
    else:
        peers = {name: peers[name] for name in only}
    sizes = " ".join(str(list(x.shape)) for x in leaves)
    print(
        f"\n{case} {sizes} bf16   floor {moved / copied * 1e3:.2f} ms ({moved / MIB:.0f} MiB moved)",
        flush=True,
    )
    with torch.no_grad():
        made = peers["isotype"](*leaves)
    dy = upstream(made if isinstance(made, tuple) else (made,))
    exact = gradients(
        truth, [x.detach().double().requires_grad_(x.requires_grad) for x in leaves], dy
    )
    rows = [measure(case, peer_name, f, leaves, dy, exact, o) for peer_name, f in peers.items()]
    mine = next((row.median for row in rows if row.peer == "isotype" and not row.failed), None)
    for row in rows:
        print(line(row, None if row.peer == "isotype" else mine, moved / copied), flush=True)
    return rows


def run_cases(o: argparse.Namespace) -> Iterator[list[Row]]:
    heads = TINY_HEADS if o.tiny else HEADS
    cases = o.case or list(CASES)
    flops = peak_flops(o) if any(case.startswith(("head", "unsloth")) for case in cases) else 0.0
    copied = bandwidth(o)
    print(
        f"copy bandwidth {copied / 1e9:.0f} GB/s (elementwise ops are asked for 85% of it), bf16 products {flops / 1e12:.1f} TFLOP/s"
    )
    for case in cases:
        if case == "unsloth":
            for name, head in heads.items():
                for trainable in (False, True):
                    kind = "trainable" if trainable else "frozen"
                    yield compare_head(f"unsloth-{name}-{kind}", head, trainable, flops, o)
            yield compare_elementwise(
                "unsloth-cross_entropy", "cross_entropy", copied, ("isotype", "Unsloth"), o
            )
        elif case.startswith("head"):
            _, name, kind = case.split("-")
            yield compare_head(case, heads[name], kind == "trainable", flops, o)
        else:
            yield compare_elementwise(case, case, copied, None, o)
        if o.device != "cpu":
            torch.cuda.empty_cache()


def main() -> None:
    o = arguments()
    if o.device != "cpu" and not torch.cuda.is_available():
        sys.exit("no CUDA device: --device cpu --tiny runs the same code")
    if o.device == "cpu" and not o.tiny:
        sys.exit("these sizes are a GPU's: on a CPU use --tiny, or benchmarks/ops.py")
    if o.case == [unsloth_row.NAME.lower()] and (
        reason := unsloth_row.why_not(o.device, importing=False)
    ):
        print(f"Unsloth left out: {reason}")
        sys.exit(unsloth_row.LEFT_OUT)
    name = torch.cuda.get_device_name() if o.device != "cpu" else "CPU"
    print(f"{name}, torch {torch.__version__}, bf16, medians of {1 if o.tiny else o.rounds}")
    rows: list[Row] = []
    try:
        for found in run_cases(o):
            rows += found
    finally:
        if o.json:
            with open(o.json, "w") as file:
                json.dump(
                    {
                        "device": name,
                        "torch": torch.__version__,
                        "rows": [asdict(row) for row in rows],
                    },
                    file,
                    indent=1,
                )


if __name__ == "__main__":
    main()
