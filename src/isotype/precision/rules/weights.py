"""Rules about frozen and trained weights, their gradients and updates: the dtypes in which they are stored, summed and rounded."""

from __future__ import annotations

from collections.abc import Iterator

from ...dtypes import itemsize
from ...finding import Finding, Severity
from ..packing import WORDS as PACKED
from ..precision import EIGHT_BIT
from .rule import Facts, finding, rule


@rule("PR003")
def quantised_base_without_adapter(f: Facts) -> Iterator[Finding]:
    """A packed base without an adapter has nothing to train

    **Why it matters.** Weights of 4 or 8 bits with scales (nf4, fp8, int8, int4, nvfp4, mxfp4) take no gradient.

    **Example.** `preset: nf4-lora` with `adapter: {kind: none}`.

    **What to do.** `adapter.kind: lora`, or of nf4 a preset with weights that can be trained (`bf16-mixed`, `bf16-pure`).
    """
    if f.value("base") in ("nf4", *PACKED) and f.value("adapter") == "none":
        yield finding(
            f, ("base", "adapter"), "a packed base is frozen, and there is no adapter to train",
            cause=f"{f.value('base')} weights are a few bits with scales; they take no gradient",
            fix="adapter.kind: lora" + ", or precision.preset: bf16-mixed" * (f.value("base") == "nf4"),
        )  # fmt: skip


@rule("PR012")
def lora_preset_without_adapter(f: Facts) -> Iterator[Finding]:
    """A LoRA preset without an adapter

    **Why it matters.** `bf16-lora` declares a frozen bf16 base. Without an adapter every weight is trained, and nothing is frozen.

    **Example.** `preset: bf16-lora` with `adapter: {kind: none}`.

    **What to do.** `preset: bf16-mixed` (fp32 weights) or `bf16-pure` (bf16 weights), or `adapter.kind: lora`.
    """
    if f["preset"].value == "bf16-lora" and f["preset"].given and f.value("adapter") == "none":
        yield finding(
            f, ("preset", "adapter"), "a LoRA preset, and no adapter",
            cause="without an adapter every weight is trained, and the preset declares a frozen base",
            fix="precision.preset: bf16-mixed, or precision.preset: bf16-pure, or adapter.kind: lora",
        )  # fmt: skip


@rule("PR013")
def generate_wider_than_weights(f: Facts) -> Iterator[Finding]:
    """Sampling in a wider dtype than the weights have

    **Why it matters.** It would need a second, wider copy of every weight, and its samples would not be the trained model's.

    **Example.** `base: bf16` with `generate: fp32`.

    **What to do.** `generate` as `compute`.
    """
    held = f.value("trainable") if f.value("adapter") == "none" else f.value("base")
    held = f.value("compute") if held in ("nf4", *PACKED) else held
    generate = f.value("generate")
    if generate != held and generate != f.value("compute") and itemsize(generate) >= itemsize(held):
        yield finding(
            f, ("generate", "base", "compute"), f"sampling in {generate} from {held} weights",
            cause="it would need a second copy of every weight",
            fix=f"precision.generate: {f.value('compute')}",
        )  # fmt: skip


@rule("PR016")
def fp32_weights_frozen_under_low_compute(f: Facts) -> Iterator[Finding]:
    """fp32 frozen weights under half-precision products

    **Why it matters.** Every product casts the weight down first: the memory of fp32 and the accuracy of bf16.

    **Example.** `base: fp32` with `compute: bf16` and a LoRA adapter.

    **What to do.** `base: bf16`, or `compute: fp32`.
    """
    if f.value("adapter") == "lora" and f.value("base") == "fp32" and f.value("compute") != "fp32":
        yield finding(
            f, ("base", "compute"), f"fp32 frozen weights are cast to {f.value('compute')} in every product",
            cause="the memory of fp32 with the accuracy of half precision",
            fix=f"precision.base: {f.value('compute')}, or precision.compute: fp32", severity=Severity.WARNING,
        )  # fmt: skip


@rule("PR017")
def compute_wider_than_base(f: Facts) -> Iterator[Finding]:
    """Products wider than the frozen weights

    **Why it matters.** An fp32 product needs an fp32 copy of each half-precision weight in every pass. torch refuses the mixture
    ("mat1 and mat2 must have the same dtype"), and its autocast cannot widen.

    **Example.** `base: bf16` with `compute: fp32`.

    **What to do.** `base: fp32`, or `compute` as `base`.
    """
    keys = ("compute", "base") if f.value("adapter") == "lora" else ("compute", "trainable")
    held = f.value(keys[1])
    if held in ("bf16", "fp16") and f.value("compute") == "fp32":
        yield finding(
            f, keys, f"fp32 products of {held} weights",
            cause="autocast does not widen: torch would refuse the product of two dtypes",
            fix=f"precision.{keys[1]}: fp32, or precision.compute: {held}",
        )  # fmt: skip


@rule("PR029")
def base_without_frozen_weights(f: Facts) -> Iterator[Finding]:
    """A dtype for frozen weights, and every weight is trained

    **Why it matters.** `base` is the dtype of weights that are not trained. In full fine-tuning there are none: the setting would have no
    effect, and the memory that it seems to save is not saved.

    **Example.** `adapter.kind: none` with `base: fp32`.

    **What to do.** Leave `base` out. `trainable` is the dtype of weights that are trained, `compute` that of their products.
    """
    if f["base"].given and f.value("base") not in ("nf4", *PACKED) and f.value("frozen") == "no":
        yield finding(
            f, ("base", "adapter"), f"every weight is trained: precision.base: {f.value('base')} has no effect",
            cause="base is the dtype of frozen weights, and there are none",
            fix="remove precision.base (precision.trainable and precision.compute are the roles of trained weights), or adapter.kind: lora",
        )  # fmt: skip


@rule("PR002")
def gradients_narrower_than_weights(f: Facts) -> Iterator[Finding]:
    """Gradients narrower than the weights they belong to

    **Why it matters.** autograd gives every gradient its parameter's dtype. A narrower `grads` would round what is already there, and
    save nothing; accumulating 256 micro-batches in bf16 is 1.5% off, in fp32 0.02%.

    **Example.** `trainable: fp32` with `grads: bf16`.

    **What to do.** Leave `grads` at fp32, or make `trainable` bf16 too (preset `bf16-pure`).
    """
    if itemsize(f.value("grads")) < itemsize(f.value("trainable")):
        yield finding(
            f, ("grads", "trainable"), f"{f.value('grads')} gradients of {f.value('trainable')} weights",
            cause="autograd makes each gradient in its parameter's dtype; storing it narrower loses accuracy and saves nothing",
            fix=f"precision.grads: {f.value('trainable')}, or precision.preset: bf16-pure",
        )  # fmt: skip


@rule("PR015")
def reduce_narrower_than_gradients(f: Facts) -> Iterator[Finding]:
    """Gradients are narrowed before they are summed across ranks

    **Why it matters.** fp32 gradients rounded to bf16 for the all-reduce lose what accumulating in fp32 gained.

    **Example.** `grads: fp32` with `reduce: bf16`.

    **What to do.** `reduce: fp32`, unless the network is what limits the run.
    """
    if itemsize(f.value("reduce")) < itemsize(f.value("grads")):
        yield finding(
            f, ("reduce", "grads"), f"{f.value('grads')} gradients are summed across ranks in {f.value('reduce')}",
            cause="each rank's gradient is rounded before the sum",
            fix=f"precision.reduce: {f.value('grads')}", severity=Severity.WARNING,
        )  # fmt: skip


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

    **Why it matters.** One of the two settings would have no effect: `adamw8bit`, `adamw8bit-paged` and `lion8bit` keep their states in 8
    bits (`int8`, with a scale for each block, and fp32 below 4,096 elements), `adamw` keeps them in a floating dtype, and the others in
    that of their weights, which is fp32.

    **Example.** `train.optimizer: adamw8bit` with `precision.optimizer: bf16`; `train.optimizer: adamw` with `precision.optimizer: int8`;
    `train.optimizer: lion` with `precision.optimizer: bf16`.

    **What to do.** Leave `precision.optimizer` out: it is resolved from the optimizer. Or name the other optimizer.
    """
    optimizer, states = f.value("optimizer_name"), f.value("optimizer")
    if optimizer in EIGHT_BIT and f["optimizer"].given and states != "int8":
        yield finding(
            f, ("optimizer", "optimizer_name"), f"{optimizer} keeps its states in int8: precision.optimizer: {states} has no effect",
            cause="bitsandbytes quantises the states block by block",
            fix="remove precision.optimizer (it becomes int8), or train.optimizer: adamw",
        )  # fmt: skip
    elif optimizer not in EIGHT_BIT and states == "int8":
        yield finding(
            f, ("optimizer", "optimizer_name"), f"{optimizer} keeps no states in int8",
            cause="its states are floating numbers; 8-bit states need a scale for each block",
            fix="train.optimizer: adamw8bit, or precision.optimizer: fp32",
        )  # fmt: skip
    elif optimizer not in ("adamw", *EIGHT_BIT) and states != "fp32":
        yield finding(
            f, ("optimizer", "optimizer_name"), f"{optimizer} keeps its states in fp32: precision.optimizer: {states} has no effect",
            cause="its states have the dtype of its weights",
            fix="remove precision.optimizer, or train.optimizer: adamw",
        )  # fmt: skip


@rule("PR018")
def another_optimizer_on_bf16_weights(f: Facts) -> Iterator[Finding]:
    """An optimizer other than `adamw` on bf16 weights has neither fp32 gradients nor stochastic rounding

    **Why it matters.** Other libraries' optimizers read each gradient in its weight's dtype and round the update to nearest: `grads: fp32`
    and `rounding: stochastic` would have no effect, and most updates of bf16 weights would vanish. Of those, only the 8-bit ones keep their
    states in a dtype of their own; the others would have bf16 states too.

    **Example.** `preset: bf16-pure` with `train.optimizer: adamw8bit` or `muon`.

    **What to do.** `train.optimizer: adamw`, or fp32 weights (`bf16-mixed`).
    """
    optimizer = f.value("optimizer_name")
    if optimizer in EIGHT_BIT and f.value("trainable") == "bf16":
        lost = [role for role, plain in (("grads", "bf16"), ("rounding", "nearest")) if f.value(role) != plain]
        if lost:
            yield finding(
                f, ("optimizer_name", "trainable", *lost),
                f"{optimizer} on bf16 weights ignores {' and '.join('precision.' + role for role in lost)}",
                cause="bitsandbytes takes gradients in the weight's dtype and rounds updates to nearest",
                fix="train.optimizer: adamw, or precision.preset: bf16-mixed",
            )  # fmt: skip
    elif optimizer not in ("adamw", *EIGHT_BIT):
        narrow = [role for role in ("trainable", "grads") if f.value(role) != "fp32"]
        if narrow:
            yield finding(
                f, ("optimizer_name", *narrow), f"{optimizer} needs fp32 weights and gradients",
                cause="it takes gradients in the weight's dtype, keeps its states there and rounds updates to nearest",
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
