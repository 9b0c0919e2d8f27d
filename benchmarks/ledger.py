"""The ledger of one step of Llama-3.1-8B QLoRA on an H200, counted without a GPU, beside Unsloth's published code at the same shapes.

    python benchmarks/ledger.py --tokens 4096 --host-ms 171 --out benchmarks/results/ledger_4096.md

Ours is recorded from a step on meta tensors, launch by launch; Unsloth's is `unsloth_step`. One row of so many tokens, every linear layer
adapted, and the kind of recomputation given. No weights are made; a minute or two on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from isotype.config.load import load
from isotype.config.schema import TrainSection
from isotype.environment.hardware import Hardware, lookup_hardware
from isotype.errors import UsageError
from isotype.precision.precision import Precision
from isotype.tasks.language.outline import outline_model, outline_step
from isotype.training.console import silence_library_warnings
from isotype.training.memory.plan import (
    MemoryPlan,
    plan_memory,
    replace_with_fakes,
    simulate_device,
)
from isotype.training.memory.recomputation import Checkpointing, apply_checkpointing
from isotype.training.step import assemble_stepper
from isotype.training.task import ModelOutline, StepOutline
from isotype.wording import format_binary_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import unsloth_step
from benchmarks.ledger_rows import (
    Launches,
    Rates,
    Row,
    grouped,
    step_seconds,
    waiting,
    without_recomputation,
    work,
)

LLAMA_31_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
KEPT = {
    "attention": {"keep_attention": True},
    "nothing": {},
}
PARTS = {
    "4-bit weights": ("widen", "dequantise"),
    "norms": ("norm",),
    "rotary": ("rope",),
    "AdamW": ("adamw", "AdamW"),
    "activation": ("silu", "gelu", "swiglu", "gated"),
}
SMALL = 256  # a product with a dimension below this is an adapter's


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """rows: ours; theirs: Unsloth's, None where its code is not counted for this model; peak and
    their_peak: bytes.
    """

    device: str
    rates: Rates
    rows: list[Row]
    theirs: list[Row] | None
    peak: int
    their_peak: int
    what: str

    def seconds(self, rows: Iterable[Row]) -> float:
        return step_seconds(rows, self.rates)

    def to_dict(self) -> dict[str, Any]:
        def each(rows: list[Row]) -> list[dict[str, Any]]:
            return [{**row.__dict__, "seconds": self.rates.seconds(row)} for row in grouped(rows)]

        return {
            "device": self.device,
            "rates": self.rates.__dict__,
            "recompute": self.what,
            "measured": False,
            "ours": {
                "rows": each(self.rows),
                "seconds": self.seconds(self.rows),
                "peak": self.peak,
            },
            "unsloth": None
            if self.theirs is None
            else {
                "rows": each(self.theirs),
                "seconds": self.seconds(self.theirs),
                "peak": self.their_peak,
            },
        }

    def as_text(self) -> str:
        r = self.rates
        lines = [
            f"ledger      one step on {self.device}; times are unmeasured: bytes and FLOPs over {r.bandwidth / 1e9:.0f} GB/s and "
            f"{r.flops / 1e12:.0f} TFLOP/s, of which products reach {r.product:.0%}, attention {r.attention:.0%} and "
            f"{r.attention_backward:.0%}, the rest {r.memory:.1%} of the bandwidth; no launch takes less than {1e6 * r.launch:.0f} us",
            f"recompute   {self.what}",
            f"  {'phase':<11}{'launch':<58}{'count':>6}{'MB each':>10}{'GFLOP each':>12}{'ms in all':>11}",
        ]
        for title, rows in (
            ("ours", self.rows),
            (f"Unsloth {unsloth_step.VERSION}", self.theirs or []),
        ):
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
        for key in sorted(
            {*ours, *theirs}, key=lambda k: -max(ours.get(k, 0.0), theirs.get(k, 0.0))
        ):
            a, b = 1e3 * ours.get(key, 0.0), 1e3 * theirs.get(key, 0.0)
            if max(a, b) >= 0.005:
                lines.append(
                    f"  {key:<33}{a:>10.2f}{b:>12.2f}{b - a:>10.2f}"
                    if self.theirs
                    else f"  {key:<33}{a:>10.2f}"
                )
        lines += self._copies()
        mine = self.seconds(self.rows)
        if self.theirs:
            other = self.seconds(self.theirs)
            saved = 1e3 * (other - mine)
            lines.append(
                f"  {'the step':<33}{1e3 * mine:>10.2f}{1e3 * other:>12.2f}{saved:>10.2f}   {other / mine:.2f}x"
            )
            share = self.peak / self.their_peak
            peak = format_binary_bytes(self.peak)
            their_peak = format_binary_bytes(self.their_peak)
            lines.append(
                f"  {'memory at the peak':<33}{peak:>10}{their_peak:>12}{'':>10}   {share:.2f}x, counted"
            )
        else:
            lines.append(f"  {'the step':<33}{1e3 * mine:>10.2f}")
        return lines

    def _copies(self) -> list[str]:
        """Copies between the host and the device, and the work beside which they run."""
        lines = []
        for title, rows in (("ours", self.rows), ("Unsloth", self.theirs or [])):
            copies, beside = work(rows, self.rates, kind="copy"), work(rows, self.rates)
            if any(copies.values()):
                host = self.rates.host * self.rates.copy / 1e9
                each = ", ".join(
                    f"{phase} {1e3 * copies[phase]:.0f} ms beside {1e3 * beside[phase]:.0f}"
                    for phase in ("forward", "backward")
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
    late = {
        f"{phase}: waiting for copies": seconds
        for phase, seconds in waiting(rows, rates).items()
        if seconds
    }
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
        return (
            "head and loss"
            if max(sizes) > 100_000
            else "adapters"
            if min(sizes) < SMALL
            else "base products"
        )
    return next(
        (part for part, words in PARTS.items() if any(word in name for word in words)),
        "everything else",
    )


def rates_of(hardware: Hardware) -> Rates:
    """Raises  UsageError for a device without published figures."""
    flops = hardware.peak_tflops.get("bf16")
    if not flops or not hardware.bandwidth_gbs:
        raise UsageError(
            f"{hardware.name}: no published bf16 TFLOP/s and bandwidth", fix="--device h200"
        )
    # Hopper, Blackwell and MI300 have PCIe 5.0
    newer = (
        hardware.architecture.startswith("gfx9")
        if hardware.kind == "rocm"
        else float(hardware.architecture or 0) >= 9
    )
    return Rates(
        flops=flops * 1e12, bandwidth=hardware.bandwidth_gbs * 1e9, host=64e9 if newer else 32e9
    )


def recorded(
    made: ModelOutline,
    train: TrainSection,
    precision: Precision,
    largest: StepOutline,
    *,
    checkpointing: Checkpointing,
) -> list[Row]:
    """The launches of one optimizer step on a GPU: `train.accumulate` micro-batches, and the
    update.
    """
    device = torch.device("meta")
    apply_checkpointing(made.model, checkpointing)
    with simulate_device("cuda"), silence_library_warnings():
        replace_with_fakes(made.model, device)
        plain = train.model_copy(update={"optimizer": "adamw"})
        stepper = assemble_stepper(made.model, plain, precision, largest.compute_loss_sum)
        optimizer, accumulator = stepper.optimizer, stepper.accumulator
        batch = largest.make_batch(device)
        # the first step makes the optimizer's states
        stepper.accumulate([batch])
        optimizer.step()
        accumulator.zero()
        with Launches() as launches:
            stepper.accumulate([batch] * train.accumulate)
            launches.updating = True
            optimizer.step()
        accumulator.zero()
        accumulator.close()
    if precision.trainable == precision.grads == precision.optimizer == "fp32":
        # a run takes PyTorch's fused AdamW, which refuses meta tensors: one launch for all of them
        update = [row for row in launches.rows if row.phase == "update"]
        one = Row(
            phase="update",
            name="AdamW, fused",
            kind="memory",
            bytes=sum(row.bytes for row in update),
        )
        return [row for row in launches.rows if row.phase != "update"] + [one]
    return list(launches.rows)


def shapes_of(config: Any, *, rows: int, length: int, rank: int, nf4: bool) -> unsloth_step.Shapes:
    """Of a transformers configuration in Llama's form."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = text.num_attention_heads
    return unsloth_step.Shapes(
        rows=rows, length=length, layers=text.num_hidden_layers, hidden=text.hidden_size,
        inner=text.intermediate_size, heads=heads, key_heads=text.num_key_value_heads,
        depth=getattr(text, "head_dim", None) or text.hidden_size // heads, vocabulary=text.vocab_size, rank=rank, nf4=nf4,
    )  # fmt: skip


def step_ledger(
    made: ModelOutline,
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
    """Ours recorded, and Unsloth's where its Llama code would run: every projection adapted, rows
    not packed.

    rank    of the adapters, 0 where there are none
    memory  the plan of the same step
    """
    rows, rates = (
        recorded(made, train, precision, largest, checkpointing=checkpointing),
        rates_of(hardware),
    )
    theirs, their_peak = None, 0
    config: Any = getattr(made.model, "config", None)
    if rank and not packing and getattr(config, "model_type", "") in ("llama", "mistral", "qwen2"):
        s = shapes_of(
            config, rows=largest.rows, length=largest.length, rank=rank, nf4=precision.base == "nf4"
        )
        one = unsloth_step.step(s)
        update = [row for row in one if row.phase == "update"]
        theirs = [row for row in one if row.phase != "update"] * train.accumulate + update
        their_peak = unsloth_step.peak_bytes(s, memory.persistent_bytes)
    return Ledger(
        device=hardware.name, rates=rates, rows=rows, theirs=theirs, peak=memory.peak, their_peak=their_peak,
        what=f"{checkpointing}; attention's results {'kept' if checkpointing.keep_attention else 'computed again'}"
        if checkpointing.layers
        else str(checkpointing),
    )  # fmt: skip


def ledger_of(
    tokens: int, *, kind: str, kept: str, rank: int, device: str, layers: int, base: str = "nf4"
) -> Ledger:
    given = [
        f"precision.preset={base}-lora",
        f"adapter.r={rank}",
        "train.batch_size=1",
        "train.accumulate=1",
    ]
    config = load(None, given).config
    precision = Precision.preset(f"{base}-lora")
    made = outline_model(
        AutoConfig.for_model(**{**LLAMA_31_8B, "num_hidden_layers": layers}), config, precision, device_type="cuda"
    )  # fmt: skip
    what = (
        Checkpointing(kind, tuple(range(layers)), layers, "asked", **KEPT[kept])
        if kind != "none"
        else Checkpointing(kind)
    )
    largest = outline_step(config, precision, length=tokens, device_type="cuda")
    memory = plan_memory(
        made, config.train, precision, largest, checkpointing=what, device_type="cuda"
    )
    if memory.not_simulated:
        sys.exit(f"the step could not be simulated: {memory.not_simulated}")
    return step_ledger(
        made,
        config.train,
        precision,
        lookup_hardware(device),
        largest,
        rank=rank,
        checkpointing=what,
        memory=memory,
    )


def beside(ledger: Ledger, kept: Ledger, host_ms: float | None) -> str:
    """Rows under a ledger's sum: the step where neither program recomputes (`kept` is ours), and
    the host's time.
    """
    ours, theirs = (
        1e3 * kept.seconds(kept.rows),
        1e3 * ledger.seconds(without_recomputation(ledger.theirs or [])),
    )
    lines = (
        [
            f"  {'neither recomputes':<33}{ours:>10.2f}{theirs:>12.2f}{theirs - ours:>10.2f}   {theirs / ours:.2f}x"
        ]
        if theirs
        else []
    )
    if host_ms:
        mine = 1e3 * ledger.seconds(ledger.rows)
        bound = "the host bounds this step" if host_ms > mine else "below the device's"
        lines.append(
            f"  {'host, measured on one CPU core':<33}{host_ms:>10.2f}   {bound}; Unsloth's was not measured"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument(
        "--kind", default="layers+offload", choices=["none", "layers", "layers+offload"]
    )
    parser.add_argument("--kept", default="attention", choices=list(KEPT))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="h200")
    parser.add_argument(
        "--host-ms",
        type=float,
        help="of our step, measured: `benchmarks/lora.py --part host`; a row beside the device's time",
    )
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    def counted(kind: str) -> Ledger:
        return ledger_of(
            asked.tokens,
            kind=kind,
            kept=asked.kept,
            rank=asked.rank,
            device=asked.device,
            layers=asked.layers,
        )

    ledger = counted(asked.kind)
    rest = beside(ledger, counted("none") if asked.kind != "none" else ledger, asked.host_ms)
    command = f"python benchmarks/ledger.py --tokens {asked.tokens}"
    command += f" --host-ms {asked.host_ms:g}" if asked.host_ms else ""
    text = (
        f"# Computed times of a Llama-3.1-8B QLoRA step with {asked.tokens:,} tokens\n\n`{command}` computes the time of "
        f"every kernel of a step from its bytes and its FLOPs, with the published bandwidth and FLOP/s of "
        f"{asked.device.upper()}. Nothing was measured. The adapters have rank {asked.rank}. A step has one row. "
        f"Recomputation is `{asked.kind}`; the results of {asked.kept} are kept.\n\n"
        f"```\n{ledger.as_text()}\n{rest}\n```\n"
    )
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    print(text[text.rindex("in all  ") :] if asked.out else text)


if __name__ == "__main__":
    main()
