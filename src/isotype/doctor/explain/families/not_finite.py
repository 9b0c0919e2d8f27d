"""Errors of values that a dtype cannot hold: constants that overflow, and results that are no longer finite."""

from __future__ import annotations

import re

from ....finding import Severity
from ..family import Cause, Explained, Seen, family
from ..recognise import dtype_word


@family("EX032", "non-finite values")
def non_finite(s: Seen) -> Explained:
    """Values became inf or nan

    **Why it matters.** fp16 ends at 65504: a model trained in bf16 or fp32 often leaves that range, and what overflows becomes inf, then
    nan. A diverging run, a mask that hides a whole row, or labels that are all ignored give nan in any dtype, so the text alone does not
    decide.

    **Example.** A VAE or a bf16 checkpoint run in fp16; `'loss': 0.0, 'grad_norm': nan` in a Trainer's log (its
    `logging_nan_inf_filter` shows nan losses as 0).

    **What to do.** Run the same step in bf16 or fp32: if the nan goes, it was the range. `isotype trace` names the first value beyond it.
    """
    what = s.words.get("what", "")
    where = s.words.get("where") or ("sampling" if "probability" in what else "")
    logged = what.startswith("'")
    vae = where.lower() == "vae"
    model = {"": "the model"}.get(where, f"the {where}" if vae else "the model")
    shown = "found invalid values" in s.text  # with the tensor: printed without dtype= where it is fp32
    dtype = next((dtype_word(word) for word in re.findall(r"dtype=(torch\.\w+)", s.text)), "fp32" if shown else "")
    beyond = 1 if shown and dtype != "fp16" else 4 if vae or "precision" in s.text or "fp16" in s.text.lower() or dtype == "fp16" else 3
    causes = [
        Cause(
            name=f"{model} overflows fp16" if not logged else "fp16 overflow",
            score=beyond,
            why=(
                f"in fp16 everything beyond 65504 is inf, and inf - inf is nan: {model} was trained in bf16 or fp32 and leaves that range"
                + (
                    "; a Trainer prints nan losses as 0.0 (logging_nan_inf_filter); one alone at "
                    "the start of an fp16 run is its scaler finding its scale"
                    if logged
                    else ""
                )
            ),
            fix=(
                "keep the VAE in fp32 (--no-half-vae, vae.to(torch.float32)) or bf16, or use a VAE mended for fp16"
                if vae
                else "bf16 in place of fp16 (bf16=True; dtype=torch.bfloat16 when loading), fp32 on a GPU without it; "
                + ("logging_nan_inf_filter=False to see it happen" if logged else "isotype trace names the first value beyond 65504")
            ),
            because="the text speaks of precision" if "precision" in s.text else "the values shown are fp16" if dtype == "fp16" else "",
        ),
        Cause(
            name="weights that are nan already, or a diverging run",
            score=2,
            why=(f"the values shown are {dtype}, which does not end at 65504: " if shown and dtype != "fp16" else "where it is not fp16: ")
            + "the learning rate diverges, a mask hides whole rows, every label is ignored, or weights hold nan",
            fix="look for nan in the weights first (torch.isnan), then at the learning rate, clipping, masks and labels",
        ),
    ]
    message = (
        f"nan in the log: {what.replace(chr(39), '')}"
        if logged
        else f"nan or inf in {where}"
        if where
        else "nan or inf where finite values are needed"
    )
    return Explained(message=message, causes=causes, severity=Severity.WARNING if logged else Severity.ERROR)
