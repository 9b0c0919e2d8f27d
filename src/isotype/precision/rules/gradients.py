"""Rules about gradients: the dtypes in which they are stored, and summed across ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ...dtypes import itemsize
from ...finding import Finding, Severity
from .rule import Facts, finding, rule


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
