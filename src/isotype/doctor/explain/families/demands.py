"""Errors of operators that accept a single dtype, independent of the dtypes of their other operands."""

from __future__ import annotations

from ....dtypes import torch_word
from ..family import Cause, Explained, Seen, family
from ..recognise import dtype_word
from .causes import outside_autocast, wider


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


@family("EX037", "arguments of one dtype", "parametrization")
def one_dtype(s: Seen) -> Explained:
    """Two tensors that have to share a dtype do not

    **Why it matters.** Extension kernels assert that two of their arguments agree, and a parametrization has to leave its weight's dtype
    alone. The text names the tensors, seldom the dtypes.

    **Example.** A router's scores are bf16 and its correction bias is kept in fp32; a LoRA parametrization computes under autocast and
    returns bf16 for an fp32 weight.

    **What to do.** Cast the named tensor next to the call, or compute with autocast switched off where the dtype has to stay.
    """
    if s.operator == "parametrization":
        before, after = s.dtype("left"), s.dtype("right")
        return Explained(
            message=f"a parametrization makes a {before} weight {after}",
            causes=[
                Cause(
                    name="parametrization computed under autocast" if wider(before, after) else "parametrization in another dtype",
                    score=4,
                    why=f"the weight is {before}, and what the parametrization computes from it is {after}: "
                    + (
                        "a product in it (baddbmm, matmul) took part in autocast"
                        if wider(before, after)
                        else "it was promoted by a factor kept wider than the weight"
                    ),
                    fix="compute it with autocast switched off, with torch.autocast(device_type, enabled=False): ..., or cast its result: "
                    f".to(torch.{torch_word(before)})",
                    because="the text names both dtypes",
                )
            ],
        )
    left, right = s.words["left"], s.words["right"]
    return Explained(
        message=f"{left} and {right} have to share a dtype",
        causes=[
            Cause(
                name="one argument kept in another dtype",
                score=4,
                why=f"the kernel asserts that {left} and {right} have one dtype; a bias, scale or gate kept in fp32 beside {s.half} "
                "activations is the usual case",
                fix=f"cast next to the call: {right}.to({left}.dtype)",
                because="the text names both",
            )
        ],
    )
