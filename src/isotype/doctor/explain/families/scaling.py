"""Errors in the use of a loss scaler."""

from __future__ import annotations

from ..family import Cause, Explained, Seen, family

_MISUSES: tuple[tuple[tuple[str, ...], str, str, str, str], ...] = (  # parts of the text; message, name, why, fix
    (
        ("does not use a scaler",),
        "a GradScaler was given to a bf16 run",
        "loss scaler under bf16",
        "bf16 has fp32's range and needs no loss scaling; a scaler belongs to fp16 alone",
        "leave the scaler out with bf16, or precision='16-mixed' if fp16 is meant",
    ),
    (
        ("_scale is None",),
        "GradScaler.step without a scaled loss",
        "loss never scaled",
        "scaler.step (or unscale_) was called and scaler.scale(loss) never was: backward ran on the plain loss, or through another path",
        "scaler.scale(loss).backward() (Fabric: fabric.backward(loss)), then scaler.step(optimizer); in bf16 leave the scaler out",
    ),
    (
        ("Gradient clipping",),
        "clipping is refused for a fused optimizer under loss scaling",
        "optimizer unscales by itself",
        "a fused optimizer (fused=True) unscales inside its step, so gradients cannot be clipped in true size before it",
        "fused=False (foreach is nearly as fast), or precision='bf16-mixed', which needs no scaler",
    ),
    (
        ("at minimum", "Minimum loss"),
        "the loss scale fell to its minimum: every step overflows",
        "fp16 overflow at every step",
        "gradients or activations are inf or nan in fp16 at every step, so the scaler halved its scale to the end: the model needs bf16's "
        "range (it was trained in bf16), the learning rate diverges, or a mask holds -inf in fp16",
        "bf16 (bf16.enabled) where the GPU has it; else fp32 for what overflows: isotype trace names the first value beyond 65504",
    ),
    (
        ("No inf checks",),
        "GradScaler.step on an optimizer without gradients",
        "no gradient reached this optimizer",
        "none of this optimizer's parameters has a gradient: frozen, unused in this step, or another optimizer's; a checkpointed model "
        "whose inputs need no gradient does the same",
        "step an optimizer only when its parameters took part; model.enable_input_require_grads() with gradient checkpointing",
    ),
)


@family("EX031", "loss scaler")
def scaling(s: Seen) -> Explained:
    """A loss scaler used where or how it does not belong

    **Why it matters.** fp16 gradients are scaled up before backward and down before the step. Each half without the other, or a
    scaler beside bf16, is an error; a scale at its minimum says that every step overflowed.

    **Example.** `scaler.step(optimizer)` after `loss.backward()` instead of `scaler.scale(loss).backward()`.

    **What to do.** `scale`, `backward`, `unscale_` once, clip, `step`, `update`, in this order; no scaler for bf16.
    """
    what = s.words.get("what", "")
    for parts, message, name, why, fix in _MISUSES:
        if any(part in what for part in parts):
            return Explained(message=message, causes=[Cause(name=name, score=3, why=why, fix=fix, because="the text names it")])
    return Explained(
        message="unscale_ was called twice, or after step, in one iteration",
        causes=[
            Cause(
                name="gradients unscaled twice",
                score=3,
                why="unscale_ may run once an optimizer between two updates: clipping by hand and the trainer's clipping both call it",
                fix="clip in one place (accelerator.clip_grad_norm_, max_grad_norm), and call scaler.update() after each step",
                because="the text names unscale_",
            )
        ],
    )
