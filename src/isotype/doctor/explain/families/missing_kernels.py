"""Errors of operators that have no kernel for a dtype, on this device or at all."""

from __future__ import annotations

import re

from ..family import Cause, Explained, Seen, family


@family("EX026", "missing kernel", "numpy", "fp8 arithmetic")
def missing_kernel(s: Seen) -> Explained:
    """An operator has no kernel for this dtype on this device

    **Why it matters.** Linear algebra (qr, svd, solve, cholesky), FFT, and some CPU kernels exist for fp32 and fp64 only; numpy
    has no bf16.

    **Example.** `torch.linalg.qr` of a bf16 matrix in an initialisation; `.numpy()` on a bf16 tensor in a metric.

    **What to do.** Do that one operation in fp32: `op(x.float()).to(x.dtype)`, under `torch.autocast(enabled=False)`;
    `.float().cpu().numpy()`.
    """
    dtype, op = s.dtype("missing"), s.words.get("op", "this operator").strip()
    if s.operator == "fp8 arithmetic":
        fp8, other = sorted(s.dtypes.values(), key=lambda word: not word.startswith("fp8"))[:2]
        return Explained(
            message=f"{fp8} and {other} in one operation: fp8 is not promoted",
            causes=[
                Cause(
                    name="fp8 weights used as they are",
                    score=3,
                    why=(
                        f"fp8 is a storage format: torch promotes it with nothing, and a {fp8} weight (an fp8 checkpoint, "
                        f"--fp8_e4m3fn-unet and the like) met {other} in plain arithmetic without a cast"
                    ),
                    fix=f"cast the weight before the operation: weight.to(x.dtype); or load that part in {s.half}",
                    because="the text names both",
                )
            ],
        )
    if s.operator == "numpy":
        return Explained(
            message=f"numpy has no {dtype}",
            causes=[
                Cause(
                    name="numpy() of a half-precision tensor",
                    score=3,
                    why=f".numpy() was called on a {dtype} tensor, and numpy has no such dtype: logging or metrics code",
                    fix="x.float().cpu().numpy()",
                    because=f"the text names {dtype}",
                )
            ],
        )
    linear_algebra = bool(re.search(r"linalg|svd|eig|qr|cholesky|lu_|inverse|lstsq|fft|solve", op.lower()))
    why = (
        "linear algebra and FFT (spectral adapters, orthogonal initialisation, second-order optimizers) have no half-precision kernels"
        if linear_algebra
        else "fp8 is a storage format: it is cast, and multiplied in scaled products, nothing else"
        if dtype.startswith("fp8")
        else "this device's kernel was not written for it"
    )
    cpu = "cpu" in op.lower() or "mkldnn" in op.lower() or (dtype == "fp16" and not op.endswith("cuda"))
    causes = [
        Cause(
            name=f"{op} has no {dtype} kernel",
            score=3,
            why=f"{op} exists in fp32 (and fp64){'' if dtype.startswith('fp8') else ' only'} on this device; it got {dtype}: {why}",
            fix=(
                "do this operation in fp32:\n    with torch.autocast(x.device.type, enabled=False):\n        y = op(x.float()).to(x.dtype)"
            ),
            because=f"the text names {op} and {dtype}",
        )
    ]
    if cpu and dtype == "fp16" and not linear_algebra:
        causes.append(
            Cause(
                name="fp16 model on a CPU",
                score=4,
                why="older torch has few fp16 kernels on a CPU; the model was loaded in fp16 without a GPU",
                fix="load with dtype=torch.float32 (or bfloat16) on a CPU",
                because="a CPU kernel without fp16" if "cpu" in op.lower() else "",
            )
        )
    return Explained(message=f"{op} is not implemented for {dtype}", causes=causes)
