"""Causes that several families of errors share."""

from __future__ import annotations

from collections.abc import Iterator

from ...dtypes import is_float, itemsize
from .family import Cause, Seen


def wider(left: str, right: str) -> bool:
    try:
        return itemsize(left) > itemsize(right)
    except ValueError:
        return False


def is_floating(word: str) -> bool:
    try:
        return is_float(word)
    except ValueError:
        return False


def outside_autocast(s: Seen, base: float = 0.0) -> Iterator[Cause]:
    """Generation, evaluation and validation run outside the autocast that a trainer puts around the training forward only."""
    if "autocast" in s.situation:
        return
    if "generate" in s.situation:
        seen = f"generate is called in {s.situation.where('generate')}"
        if "callback" in s.situation:
            seen += f", from the callback {s.situation.where('callback')}"
        yield Cause(
            name="generate outside autocast",
            score=base + 6 + ("callback" in s.situation) + ("trainer" in s.situation),
            why=(
                "the trainer wraps only the training forward in autocast; generate() is outside autocast, so an fp32 "
                f"activation (from fp32 norms, adapters or embeddings) meets {s.half} weights uncast"
            ),
            fix=(
                f"with torch.no_grad(), {s.autocast}:\n    out = model.generate(**inputs)\nor cast what is fp32 once: "
                f"the norms and the head, model.to({s.torch_half})"
            ),
            because=seen,
        )
    elif "evaluation" in s.situation and "backward" not in s.situation:
        yield Cause(
            name="evaluation outside autocast",
            score=base + 4,
            why=f"training runs under autocast and this evaluation does not: fp32 activations meet {s.half} weights uncast",
            fix=f"with torch.no_grad(), {s.autocast}:\n    ...  # the evaluation forward",
            because=f"evaluation in {s.situation.where('evaluation')}",
        )


def custom_backward(s: Seen) -> Iterator[Cause]:
    if "backward" not in s.situation:
        return
    if "custom backward" in s.situation:
        yield Cause(
            name="custom backward mixes dtypes",
            score=8,
            why=(
                "a hand-written autograd backward multiplies the incoming gradient (in the dtype autocast gave the "
                "output) with saved tensors of another dtype; backward runs outside autocast"
            ),
            fix=(
                "decorate forward with torch.amp.custom_fwd(device_type='cuda') and backward with "
                "torch.amp.custom_bwd(device_type='cuda'), and cast next to the product:\n"
                "    saved = saved.to(grad_output.dtype)\nreturn each gradient in its tensor's dtype"
            ),
            because=f"custom backward in {s.situation.where('custom backward')}",
        )
    elif "recompute" not in s.situation:
        yield Cause(
            name="dtypes differ in backward",
            score=5,
            why=(
                "backward runs outside autocast: the gradient has the dtype of the forward's output and meets a "
                "tensor saved in another dtype"
            ),
            fix=(
                "make the forward produce one dtype: cast the odd operand before the product, or use "
                "torch.amp.custom_fwd / custom_bwd in a custom function"
            ),
            because=f"backward in {s.situation.where('backward')}",
        )
