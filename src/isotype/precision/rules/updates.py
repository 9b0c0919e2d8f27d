"""Rules about updates: rounding, the states of the optimizer, moving averages."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Finding, Severity
from .rule import Facts, finding, rule


@rule("PR007")
def stochastic_rounding_without_effect(f: Facts) -> Iterator[Finding]:
    """Stochastic rounding of fp32 weights does nothing

    **Why it matters.** Updates are computed in fp32; there is nothing to round into an fp32 weight.

    **Example.** `trainable: fp32` with `rounding: stochastic`.

    **What to do.** Leave `rounding` out, or train bf16 weights (preset `bf16-pure`).
    """
    if f.value("rounding") == "stochastic" and f.value("trainable") == "fp32":
        yield finding(
            f, ("rounding", "trainable"), "stochastic rounding has no effect on fp32 weights",
            cause="the update is computed in fp32 and stored in fp32: nothing is rounded",
            fix="precision.rounding: nearest, or precision.preset: bf16-pure",
        )  # fmt: skip


@rule("PR008")
def updates_vanish(f: Facts) -> Iterator[Finding]:
    """bf16 weights with rounding to nearest stop learning

    **Why it matters.** A bf16 weight has 8 significant bits. AdamW moves bf16 weights 0.3% / 2.2% / 22.7% of what it should at
    learning rate 1e-5 / 1e-4 / 1e-3; with stochastic rounding 93-107%.

    **Example.** `trainable: bf16` with `rounding: nearest`.

    **What to do.** `rounding: stochastic`, or `trainable: fp32`.
    """
    if f.value("trainable") == "bf16" and f.value("rounding") == "nearest":
        yield finding(
            f, ("trainable", "rounding"), "most updates of bf16 weights will round away",
            cause="an update below 1/256 of a bf16 weight rounds to nothing",
            fix="precision.rounding: stochastic, or precision.trainable: fp32",
            severity=Severity.WARNING,
        )  # fmt: skip


@rule("PR011")
def states_another_dtype_than_the_optimizers(f: Facts) -> Iterator[Finding]:
    """`precision.optimizer` names a dtype in which the optimizer does not keep its states

    **Why it matters.** One of the two settings would have no effect: `adamw8bit` keeps its states in 8 bits (`int8`, with a scale for each
    block, and fp32 below 4,096 elements), and `adamw` keeps them in a floating dtype.

    **Example.** `train.optimizer: adamw8bit` with `precision.optimizer: bf16`; `train.optimizer: adamw` with `precision.optimizer: int8`.

    **What to do.** Leave `precision.optimizer` out: it is resolved from the optimizer. Or name the other optimizer.
    """
    optimizer, states = f.value("optimizer_name"), f.value("optimizer")
    if optimizer == "adamw8bit" and f["optimizer"].given and states != "int8":
        yield finding(
            f, ("optimizer", "optimizer_name"), f"adamw8bit keeps its states in int8: precision.optimizer: {states} has no effect",
            cause="bitsandbytes quantises the states block by block",
            fix="remove precision.optimizer (it becomes int8), or train.optimizer: adamw",
        )  # fmt: skip
    elif optimizer == "adamw" and states == "int8":
        yield finding(
            f, ("optimizer", "optimizer_name"), "adamw keeps no states in int8",
            cause="its moments are floating numbers; 8-bit states need a scale for each block",
            fix="train.optimizer: adamw8bit, or precision.optimizer: fp32",
        )  # fmt: skip


@rule("PR018")
def eight_bit_optimizer_on_bf16_weights(f: Facts) -> Iterator[Finding]:
    """`adamw8bit` on bf16 weights has neither fp32 gradients nor stochastic rounding

    **Why it matters.** bitsandbytes reads each gradient in its weight's dtype and rounds the update to nearest: `grads: fp32` and
    `rounding: stochastic` would have no effect, and most updates of bf16 weights would vanish.

    **Example.** `preset: bf16-pure` with `train.optimizer: adamw8bit`.

    **What to do.** `train.optimizer: adamw`, or fp32 weights (`bf16-mixed`).
    """
    if f.value("optimizer_name") == "adamw8bit" and f.value("trainable") == "bf16":
        lost = [role for role, plain in (("grads", "bf16"), ("rounding", "nearest")) if f.value(role) != plain]
        if lost:
            yield finding(
                f, ("optimizer_name", "trainable", *lost),
                f"adamw8bit on bf16 weights ignores {' and '.join('precision.' + role for role in lost)}",
                cause="bitsandbytes takes gradients in the weight's dtype and rounds updates to nearest",
                fix="train.optimizer: adamw, or precision.preset: bf16-mixed",
            )  # fmt: skip


@rule("PR028")
def average_in_low_precision(f: Facts) -> Iterator[Finding]:
    """A moving average of the weights in half precision

    **Why it matters.** An average with decay 0.999 moves by a thousandth of the difference at each step, which bf16 (8 significant bits)
    rounds away: in bf16 such an average moved by 6% of what it should.

    **Example.** `train.ema: 0.999` with `precision.ema: bf16`.

    **What to do.** Leave `ema` at fp32.
    """
    if "ema" in f.settings and f.value("ema") != "fp32":
        yield finding(
            f, ("ema",), f"the moving average of the weights in {f.value('ema')}",
            cause="its small steps are rounded away: with decay 0.999 it moves by 6% of what it should in bf16",
            fix="precision.ema: fp32",
        )  # fmt: skip
