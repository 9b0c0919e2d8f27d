"""Rules about frozen and trained weights, and the products and samples that use them."""

from __future__ import annotations

from collections.abc import Iterator

from ...dtypes import itemsize
from ...finding import Finding, Severity
from .rule import Facts, finding, rule


@rule("PR003")
def quantised_base_without_adapter(f: Facts) -> Iterator[Finding]:
    """A 4-bit base without an adapter has nothing to train

    **Why it matters.** 4-bit weights take no gradient.

    **Example.** `preset: nf4-lora` with `adapter: {kind: none}`.

    **What to do.** `adapter.kind: lora`, or a preset with weights that can be trained (`bf16-mixed`, `bf16-pure`).
    """
    if f.value("base") == "nf4" and f.value("adapter") == "none":
        yield finding(
            f, ("base", "adapter"), "a 4-bit base is frozen, and there is no adapter to train",
            cause="nf4 weights are integers with scales; they take no gradient",
            fix="adapter.kind: lora, or precision.preset: bf16-mixed",
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
    held = f.value("compute") if held == "nf4" else held
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
    if f["base"].given and f.value("base") != "nf4" and f.value("frozen") == "no":
        yield finding(
            f, ("base", "adapter"), f"every weight is trained: precision.base: {f.value('base')} has no effect",
            cause="base is the dtype of frozen weights, and there are none",
            fix="remove precision.base (precision.trainable and precision.compute are the roles of trained weights), or adapter.kind: lora",
        )  # fmt: skip
