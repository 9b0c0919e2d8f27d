"""Rules about torchtune."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..record import Record
from ..settings import dtype_of
from .base import error, rule


@rule("CF090")
def torchtune_fp16(r: Record) -> Iterator[Finding]:
    """torchtune does not train in fp16

    **Why it matters.** Its recipes stop: "fp16 precision is not supported in this recipe".

    **Example.** `dtype: fp16`.

    **What to do.** `dtype: bf16`, or `fp32`.
    """
    dtype = r.facts.get("torchtune.dtype")
    if dtype and dtype_of(dtype.value) == "fp16":
        yield error(
            "torchtune does not train in fp16",
            dtype,
            cause="full fp16 training is not supported by its recipes: there is no loss scaling",
            fix="dtype: bf16 (or fp32)",
            wins="the recipe stops",
        )
