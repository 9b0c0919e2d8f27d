"""The ledger of one step: ours as it is recorded on meta tensors, beside Unsloth's published code at the same shapes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...config.schema import TrainSection
from ...environment.hardware import Hardware
from ...errors import UsageError
from ...model.host_embedding import bytes_on_host
from ...ops.backend import Saving, without
from ...precision.accumulate import GradientAccumulator
from ...precision.precision import Precision
from ..memory.device import shown
from ..memory.plan import MemoryPlan, make_fake, without_data
from ..memory.recomputation import Checkpointing, apply_checkpointing
from ..optimizer import build_optimizer
from ..quiet import without_warnings
from ..step import Stepper
from ..task import Outline, StepOutline
from . import unsloth
from .record import Launches
from .rows import Rates, Row, grouped, step_seconds, waiting, work

PARTS = {
    "4-bit weights": ("widen", "dequantise"),
    "norms": ("norm",),
    "rotary": ("rope",),
    "AdamW": ("adamw", "AdamW"),
    "activation": ("silu", "gelu", "swiglu", "gated"),
}
SAVINGS: dict[str, Saving] = {
    "adapters inside the product or before it": "adapters in the product",
    "products of a recompute whose output nobody reads": "outputs that nobody reads",
    "the residual's sum and gradient in the norm": "the residual in the norm",
}
SMALL = 256  # a product with a dimension below this is an adapter's


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """rows: ours; theirs: Unsloth's, None where its code is not counted for this model; peak and their_peak: bytes.

    on_host  bytes of the input embedding where ours is in host memory; Unsloth's peak is by its default, with the embedding on the device
    savings  what a recorded step without it takes longer, in seconds, by name
    """

    device: str
    rates: Rates
    rows: list[Row]
    theirs: list[Row] | None
    peak: int
    their_peak: int
    what: str
    on_host: int = 0
    savings: dict[str, float] = field(default_factory=dict)

    def seconds(self, rows: Iterable[Row]) -> float:
        return step_seconds(rows, self.rates)

    def as_json(self) -> dict[str, Any]:
        def each(rows: list[Row]) -> list[dict[str, Any]]:
            return [{**row.__dict__, "seconds": self.rates.seconds(row)} for row in grouped(rows)]

        return {
            "device": self.device,
            "rates": self.rates.__dict__,
            "recompute": self.what,
            "measured": False,
            "ours": {"rows": each(self.rows), "seconds": self.seconds(self.rows), "peak": self.peak},
            "savings": self.savings,
            "unsloth": None
            if self.theirs is None
            else {
                "rows": each(self.theirs),
                "seconds": self.seconds(self.theirs),
                "peak": self.their_peak,
                **({"peak_with_its_embedding_on_the_host": self.their_peak - self.on_host} if self.on_host else {}),
            },
        }

    def as_text(self) -> str:
        r = self.rates
        lines = [
            f"ledger      one step on {self.device}; times are unmeasured: bytes and FLOPs over {r.bandwidth / 1e9:.0f} GB/s and "
            f"{r.flops / 1e12:.0f} TFLOP/s, of which products reach {r.product:.0%}, attention {r.attention:.0%} and "
            f"{r.attention_backward:.0%}, the rest {r.memory:.1%} of the bandwidth",
            f"recompute   {self.what}",
            f"  {'phase':<11}{'launch':<58}{'count':>6}{'MB each':>10}{'GFLOP each':>12}{'ms in all':>11}",
        ]
        for title, rows in (("ours", self.rows), (f"Unsloth {unsloth.VERSION}", self.theirs or [])):
            if not rows:
                continue
            lines.append(f"{title}")
            for row in sorted(grouped(rows), key=self.rates.seconds, reverse=True):
                lines.append(
                    f"  {row.phase:<11}{row.name:<58.58}{row.count:>6}{row.bytes / 1e6:>10.1f}{row.flops / 1e9:>12.1f}"
                    f"{1e3 * self.rates.seconds(row):>11.2f}{'  ' + row.source if row.source else ''}"
                )
        lines += self._totals()
        return "\n".join(lines)

    def _totals(self) -> list[str]:
        """Time by part and phase for both programs, with one line for each difference."""
        ours, theirs = by_part(self.rows, self.rates), by_part(self.theirs or [], self.rates)
        lines = [f"{'in all':<35}{'ours ms':>10}{'Unsloth ms':>12}{'saved ms':>10}"]
        for key in sorted({*ours, *theirs}, key=lambda k: -max(ours.get(k, 0.0), theirs.get(k, 0.0))):
            a, b = 1e3 * ours.get(key, 0.0), 1e3 * theirs.get(key, 0.0)
            if max(a, b) >= 0.005:
                lines.append(f"  {key:<33}{a:>10.2f}{b:>12.2f}{b - a:>10.2f}" if self.theirs else f"  {key:<33}{a:>10.2f}")
        lines += self._copies()
        mine = self.seconds(self.rows)
        if self.theirs:
            other = self.seconds(self.theirs)
            saved = 1e3 * (other - mine)
            lines.append(f"  {'the step':<33}{1e3 * mine:>10.2f}{1e3 * other:>12.2f}{saved:>10.2f}   {other / mine:.2f}x")
            share = self.peak / self.their_peak
            lines.append(f"  {'memory at the peak':<33}{shown(self.peak):>10}{shown(self.their_peak):>12}{'':>10}   {share:.2f}x, counted")
            if self.on_host:
                less = self.their_peak - self.on_host
                lines.append(
                    f"  ours with model.embedding: host, which Unsloth has too, off by default (offload_embedding): with it {shown(less)} "
                    f"there, {self.peak / less:.2f}x"
                )
        else:
            lines.append(f"  {'the step':<33}{1e3 * mine:>10.2f}")
        if self.savings:
            lines.append("saved, each counted from a step recorded without it and with what stands below it")
            lines += [f"  {name:<55}{1e3 * seconds:>10.2f} ms" for name, seconds in self.savings.items()]
        return lines

    def _copies(self) -> list[str]:
        """Copies between the host and the device, and the work beside which they run."""
        lines = []
        for title, rows in (("ours", self.rows), ("Unsloth", self.theirs or [])):
            copies, beside = work(rows, self.rates, kind="copy"), work(rows, self.rates)
            if any(copies.values()):
                host = self.rates.host * self.rates.copy / 1e9
                each = ", ".join(
                    f"{phase} {1e3 * copies[phase]:.0f} ms beside {1e3 * beside[phase]:.0f}" for phase in ("forward", "backward")
                )
                lines.append(f"  copies to and from the host at {host:.0f} GB/s, {title}: {each}")
        return lines


def by_part(rows: Iterable[Row], rates: Rates) -> dict[str, float]:
    """Seconds of each part of a step: what it is and in which phase."""
    found: dict[str, float] = {}
    rows = list(rows)
    for row in rows:
        if row.kind != "copy":
            key = f"{row.phase}: {part_of(row)}"
            found[key] = found.get(key, 0.0) + rates.seconds(row)
    late = {f"{phase}: waiting for copies": seconds for phase, seconds in waiting(rows, rates).items() if seconds}
    return found | late


def part_of(row: Row) -> str:
    name = row.name
    if row.kind.startswith("attention"):
        return "attention"
    if name.startswith("head") or "cross_entropy" in name:
        return "head and loss"
    if row.kind == "product":
        if row.source:
            return "adapters" if name.startswith("adapter") else "base products"
        sizes = [int(n) for n in name.split(" ", 1)[1].split(" x ")]
        return "head and loss" if max(sizes) > 100_000 else "adapters" if min(sizes) < SMALL else "base products"
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), "everything else")


def rates_of(hardware: Hardware) -> Rates:
    """Raises  UsageError for a device without published figures."""
    flops = hardware.peak_tflops.get("bf16")
    if not flops or not hardware.bandwidth_gbs:
        raise UsageError(f"{hardware.name}: no published bf16 TFLOP/s and bandwidth", fix="isotype plan --ledger --device h200")
    # Hopper, Blackwell and MI300 have PCIe 5.0
    newer = hardware.architecture.startswith("gfx9") if hardware.kind == "rocm" else float(hardware.architecture or 0) >= 9
    return Rates(flops=flops * 1e12, bandwidth=hardware.bandwidth_gbs * 1e9, host=64e9 if newer else 32e9)


def recorded(
    made: Outline,
    train: TrainSection,
    precision: Precision,
    largest: StepOutline,
    *,
    checkpointing: Checkpointing,
    updates: bool = True,
) -> list[Row]:
    """The launches of one optimizer step on a GPU: `train.accumulate` micro-batches, and the update where it `updates`."""
    device = torch.device("meta")
    apply_checkpointing(made.model, checkpointing)
    with without_data("cuda"), without_warnings():
        make_fake(made.model, device)
        accumulator = GradientAccumulator(made.model.parameters(), dtype=precision.grads, reduce=precision.reduce)
        plain = train.model_copy(update={"optimizer": "adamw"})
        optimizer = build_optimizer(made.model, plain, precision, accumulator.gradient)
        stepper = Stepper(made.model, optimizer, accumulator, precision, train, largest.loss_sum)
        batch = largest.batch(device)
        if updates:
            # the first step makes the optimizer's states
            stepper.accumulate([batch])
            optimizer.step()
            accumulator.zero()
        with Launches() as launches:
            stepper.accumulate([batch] * train.accumulate)
            launches.updating = True
            if updates:
                optimizer.step()
        accumulator.zero()
        accumulator.close()
    rows: list[Row] = launches.rows
    return rows


def savings_of(
    made: Outline, train: TrainSection, precision: Precision, largest: StepOutline, rates: Rates, checkpointing: Checkpointing
) -> dict[str, float]:
    """Seconds of one micro-batch that each saving is worth, copies aside, in an order in which each is taken from what stands below it."""

    def seconds(what: Checkpointing, saving: Saving | None = None) -> float:
        with nullcontext() if saving is None else without(saving):
            one = train.model_copy(update={"accumulate": 1})
            return sum(work(recorded(made, one, precision, largest, checkpointing=what, updates=False), rates).values())

    found: dict[str, float] = {}
    now = seconds(checkpointing)
    for name, saving in SAVINGS.items():
        found[name] = seconds(checkpointing, saving) - now
    without_it: dict[str, dict[str, Any]] = {
        "query, key and value kept": {"keep_projections": False},
        "the residual between attention and MLP kept": {"halves": False},
        "attention's output kept": {"keep_attention": False},
    }
    for name, change in without_it.items():
        less = replace(checkpointing, **change)
        if less != checkpointing:
            after = seconds(less)
            found[name], now, checkpointing = after - now, after, less
    # a saving that a model or a choice does not have saves nothing
    return {name: saved for name, saved in found.items() if abs(saved) > 1e-9}


def shapes_of(config: Any, *, rows: int, length: int, rank: int, nf4: bool) -> unsloth.Shapes:
    """Of a transformers configuration in Llama's form."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = text.num_attention_heads
    return unsloth.Shapes(
        rows=rows, length=length, layers=text.num_hidden_layers, hidden=text.hidden_size,
        inner=text.intermediate_size, heads=heads, key_heads=text.num_key_value_heads,
        depth=getattr(text, "head_dim", None) or text.hidden_size // heads, vocabulary=text.vocab_size, rank=rank, nf4=nf4,
    )  # fmt: skip


def step_ledger(
    made: Outline,
    train: TrainSection,
    precision: Precision,
    hardware: Hardware,
    largest: StepOutline,
    *,
    rank: int,
    checkpointing: Checkpointing,
    memory: MemoryPlan,
    packing: bool = False,
) -> Ledger:
    """Ours recorded, and Unsloth's where its Llama code would run: every projection adapted, rows not packed.

    rank    of the adapters, 0 where there are none
    memory  the plan of the same step
    """
    rows, rates = recorded(made, train, precision, largest, checkpointing=checkpointing), rates_of(hardware)
    theirs, their_peak, on_host = None, 0, bytes_on_host(made.model)
    config: Any = getattr(made.model, "config", None)
    if rank and not packing and getattr(config, "model_type", "") in ("llama", "mistral", "qwen2"):
        s = shapes_of(config, rows=largest.rows, length=largest.length, rank=rank, nf4=precision.base == "nf4")
        one = unsloth.step(s)
        update = [row for row in one if row.phase == "update"]
        theirs = [row for row in one if row.phase != "update"] * train.accumulate + update
        their_peak = unsloth.peak_bytes(s, memory.held + on_host)
    return Ledger(
        device=hardware.name, rates=rates, rows=rows, theirs=theirs, peak=memory.peak, their_peak=their_peak,
        what=f"{checkpointing}; attention's results {'kept' if checkpointing.keep_attention else 'computed again'}"
        if checkpointing.layers
        else str(checkpointing),
        on_host=on_host,
        savings=savings_of(made, train, precision, largest, rates, checkpointing),
    )  # fmt: skip
