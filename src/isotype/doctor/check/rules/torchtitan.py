"""Rules about torchtitan."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..record import Record
from ..settings import dtype_of
from .base import error, rule, warning


@rule("CF091")
def torchtitan_reduce(r: Record) -> Iterator[Finding]:
    """mixed_precision_reduce other than float32

    **Why it matters.** Older torchtitan takes `float32` only; newer takes bfloat16, which rounds gradients before the sum. A note.

    **Example.** `mixed_precision_reduce = "bfloat16"`.

    **What to do.** `"float32"`.
    """
    reduce = r.facts.get("torchtitan.training.mixed_precision_reduce")
    if reduce and dtype_of(reduce.value) != "fp32":
        yield warning(
            f"mixed_precision_reduce is {reduce.value}",
            reduce,
            cause="releases before 2026 refuse it, and gradients are rounded before they are summed across ranks",
            fix='mixed_precision_reduce = "float32"',
        )


@rule("CF097")
def torchtitan_words(r: Record) -> Iterator[Finding]:
    """A dtype that torchtitan does not take

    **Why it matters.** Its mixed precision and its training dtype are bfloat16 or float32: there is no loss scaling for float16.

    **Example.** `mixed_precision_param = "float16"`.

    **What to do.** `"bfloat16"`.
    """
    for key in ("mixed_precision_param", "dtype"):
        setting = r.facts.get(f"torchtitan.training.{key}")
        if setting and dtype_of(setting.value) == "fp16":
            yield error(
                f"{key} is {setting.value}: torchtitan takes bfloat16 and float32",
                setting,
                cause="float16 needs a loss scale, and torchtitan has none",
                fix=f'{key} = "{"bfloat16" if key == "mixed_precision_param" else "float32"}"',
                wins="torchtitan refuses to start",
            )
