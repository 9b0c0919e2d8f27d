"""The rows of a ledger: launches of one step with their bytes and FLOPs, and their times, computed from stated efficiencies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["product", "attention", "attention backward", "memory", "copy", "host read"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Launches of one kind.

    phase   forward, recompute, backward or update
    kind    "copy" is one between the host and the device, beside everything else; a "host read" is a kernel's own, which takes its time
    name    the operator with its sizes, or what a published program calls it
    bytes   read and written by one launch, each tensor once
    flops   of one launch
    source  file and line where a published program does this; "" for what was recorded
    """

    phase: str
    name: str
    kind: Kind
    bytes: float
    flops: float = 0.0
    count: int = 1
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches.

    flops      FLOP/s of dense bf16 products as published
    bandwidth  bytes/s as published
    host       bytes/s one way between the host and the device: PCIe 5.0 x16 or 4.0 x16, as specified
    shares     of each that a kind of launch reaches

    A copy's 85% of PCIe is what pinned memory gives large blocks elsewhere; it was not measured either.
    Shares: products 0.80 and copies 0.90 were measured on an H200 (788 TFLOP/s at 8192 x 8192 x 8192, 4.3 TB/s); elementwise kernels are
    assumed to reach 85% of a copy. Attention's are cuDNN's on an H100 as Shah et al. 2024 (FlashAttention-3, figures 5 and 6) plot them for
    causal heads of 128. No step of a model was measured: a ledger's times are for comparison, not predictions.
    """

    flops: float
    bandwidth: float
    host: float = 64e9
    copy: float = 0.85
    product: float = 0.80
    attention: float = 0.60
    attention_backward: float = 0.48
    memory: float = 0.765

    def seconds(self, row: Row) -> float:
        if row.kind in ("copy", "host read"):
            return row.count * row.bytes / (self.host * self.copy)
        share = {"product": self.product, "attention": self.attention, "attention backward": self.attention_backward}.get(row.kind)
        compute = row.flops / (self.flops * share) if share else 0.0
        return row.count * max(compute, row.bytes / (self.bandwidth * self.memory))


def step_seconds(rows: Iterable[Row], rates: Rates) -> float:
    """Of a step: its work, and how much longer than that the copies of forward or of backward take."""
    rows = list(rows)
    return sum(work(rows, rates).values()) + sum(waiting(rows, rates).values())


def work(rows: Iterable[Row], rates: Rates, *, kind: str | None = None) -> dict[str, float]:
    """Seconds of forward, backward with its recomputes, and update: of everything except copies, or of one kind of launch."""
    found = {"forward": 0.0, "backward": 0.0, "update": 0.0}
    for row in rows:
        if row.kind != "copy" if kind is None else row.kind == kind:
            found["backward" if row.phase == "recompute" else row.phase] += rates.seconds(row)
    return found


def copied_to_host(rows: Iterable[Row]) -> float:
    """Bytes that forward leaves in host memory for backward."""
    return sum(row.count * row.bytes for row in rows if row.kind == "copy" and row.phase == "forward")


def waiting(rows: Iterable[Row], rates: Rates) -> dict[str, float]:
    rows = list(rows)
    copies = work(rows, rates, kind="copy")
    return {phase: max(0.0, copies[phase] - seconds) for phase, seconds in work(rows, rates).items()}


def product(
    phase: str, name: str, m: int, n: int, k: int, *, adds: bool = False, itemsize: int = 2, out: int | None = None, source: str = ""
) -> Row:
    """[m k] @ [k n]; `adds` onto a result that is read too; `out` is the result's item size."""
    out = itemsize if out is None else out
    moved = itemsize * (m * k + k * n) + out * m * n * (2 if adds else 1)
    return Row(phase=phase, name=name, kind="product", bytes=moved, flops=2.0 * m * n * k, source=source)


def attention(phase: str, name: str, batch: int, heads: int, key_heads: int, length: int, depth: int, source: str = "") -> Row:
    """Causal, in bf16: two products forward, five backward, of half the scores."""
    backward = phase == "backward"
    half = batch * heads * length * length * depth
    q, k = 2 * batch * heads * length * depth, 2 * batch * key_heads * length * depth
    moved = (4 * q + 4 * k) if backward else (2 * q + 2 * k)
    kind: Kind = "attention backward" if backward else "attention"
    return Row(phase=phase, name=name, kind=kind, bytes=moved, flops=half * (5.0 if backward else 2.0), source=source)


def memory(phase: str, name: str, moved: float, source: str = "") -> Row:
    return Row(phase=phase, name=name, kind="memory", bytes=moved, source=source)


def grouped(rows: Iterable[Row]) -> list[Row]:
    """Equal rows as one with their count, in the order in which they first came."""
    counts: dict[Row, int] = {}
    for row in rows:
        key = replace(row, count=1)
        counts[key] = counts.get(key, 0) + row.count
    return [replace(row, count=count) for row, count in counts.items()]
