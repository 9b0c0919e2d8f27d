"""Rules about kohya's scripts."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..record import Record
from .base import error, rule


@rule("CF094")
def kohya_full_precision(r: Record) -> Iterator[Finding]:
    """full_bf16, full_fp16 or fp8_base without its mixed_precision

    **Why it matters.** kohya-style scripts assert: "full_bf16 requires mixed precision='bf16'".

    **Example.** `full_bf16 = true`, `mixed_precision = "fp16"`.

    **What to do.** The same half for both.
    """
    f = r.facts
    if not f.has("kohya"):
        return
    mixed = f.get("kohya.mixed_precision")
    mode = str(mixed.value).lower() if mixed else "no"
    for half in ("bf16", "fp16"):
        full = f.on(f"kohya.full_{half}")
        if full and mode != half:
            yield error(
                f"{full.key} with mixed_precision {mode}",
                full,
                mixed,
                cause=f"full_{half} casts what is trained to {half} and requires mixed_precision='{half}'; it is {mode}",
                fix=f"mixed_precision={half}, or remove {full.key}",
                wins="the script stops at an assertion",
            )
    fp8 = f.on("kohya.fp8_base", "kohya.fp8_base_unet")
    if fp8 and mode == "no":
        yield error(
            f"{fp8.key} without mixed precision",
            fp8,
            mixed,
            cause="fp8 weights need mixed_precision fp16 or bf16 to compute in",
            fix="mixed_precision=bf16",
            wins="the script stops at an assertion",
        )
