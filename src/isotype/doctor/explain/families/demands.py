"""Errors of operators that accept a single dtype, independent of the dtypes of their other operands."""

from __future__ import annotations

from ..family import Cause, Explained, Seen, family
from ..recognise import dtype_word
from ..shared_causes import outside_autocast


@family("EX029", "demanded dtype")
def demanded(s: Seen) -> Explained:
    """An operator takes one dtype, and got another

    **Why it matters.** Extension kernels (quantised products, fp8 scales, fused attention) are compiled for one or two dtypes and
    assert them; the text names what they want, seldom what they got.

    **Example.** `Expected A.dtype() == at::kBFloat16 to be true`: quanto's int4 product takes bf16 activations only, and a run in fp16
    or fp32 hands it others.

    **What to do.** Run in the dtype it takes (`mixed_precision`, `dtype=` when loading), or cast next to the call.
    """
    only = ", ".join(dtype_word(word) for word in s.words.get("only", "").split(",") if word.strip()) or "another dtype"
    if "scalar" in s.text and s.words.get("only") == "float":
        only = "fp32"
    name = s.words.get("name", "an operator").strip()
    met = dtype_word(s.words["met"]) if "met" in s.words else None
    half = "torch.float16" if only == "fp16" else "torch.float32" if only == "fp32" else "torch.bfloat16"
    cast = f"cast next to the call: {name}.to({half})" if f"{name}.dtype" in s.text or "scale_" in name else ""
    if "call" in s.words:
        cast = f"cast next to the call: torch.{name}(x.float()).to(x.dtype)"
    whole = f"load and train with dtype={half}" if only != "fp32" else ""
    int4 = name in ("A", "scales") and only == "bf16"
    return Explained(
        message=f"{name} takes {only}" + (f", not {met}" if met else ""),
        causes=[
            *outside_autocast(s),
            Cause(
                name=f"{name} exists for {only} only",
                score=3,
                why=(
                    f"{name} is checked against {only} and has another dtype"
                    + (f" ({met})" if met else "")
                    + (
                        ": it was computed in half precision (bf16 or fp16 weights, or autocast)"
                        if "call" in s.words
                        else ": the run's precision is another, an fp32 norm or adapter promoted it, or `model.to(dtype)` cast what has to "
                        "stay (scales)"
                    )
                    + ("; torch's int4 weight-only product (quanto, torchao) takes bf16 on CUDA" if int4 else "")
                ),
                fix=", or ".join(part for part in (cast, whole) if part) or f"cast next to the call: x.to({half})",
                because="the text names it",
            ),
        ],
    )
