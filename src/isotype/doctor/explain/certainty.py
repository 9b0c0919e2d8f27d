"""How sure an explanation is, and what would tell its first two causes apart."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .family import Cause

NEAR = 2.0  # a cause that scores less than this below the first is as good a guess
# what a cause speaks of, and the look at the running program that confirms or rules it out
_LOOKS: tuple[tuple[str, str], ...] = (
    (
        r"outside autocast|no autocast|without autocast",
        "print torch.is_autocast_enabled() before the failing line: True rules it out",
    ),
    (r"backward", "print the gradient's dtype and those of ctx.saved_tensors in that backward: alike rules it out"),
    (r"\bbias\b|in-place|buffer", "print the dtypes of the bias or buffer and of the product's operands: alike rules it out"),
    (r"norm", "print x.dtype before and after the norm in front of the failing layer: unchanged rules it out"),
    (
        r"weight|parameter|layer|module|loaded",
        "print {p.dtype for p in module.parameters()} of the failing module: one dtype rules it out",
    ),
    (r"input|batch|image|latent|pixel|mask", "print the dtypes of what is handed to the model: those of its weights rule it out"),
    (r"shard|flatten|FSDP|ZeRO", "print {p.dtype for p in model.parameters()} before it is sharded: one dtype rules it out"),
)


_SWITCHES_ON = re.compile(r"(?:, |; )?(?:or )?run[^,;\n(]*under torch\.autocast\([^)]*\)(?:, or |; or |; )?")


def without_autocast(fix: str) -> str:
    """The fix without the way that switches autocast on, where it is on already; as it is where that is the only way."""
    return _SWITCHES_ON.sub("", fix).strip() or fix


def sureness(ranked: Sequence[Cause]) -> str:
    """`likely`, `open` or `a guess`, with the reason."""
    top, near = ranked[0], [c for c in ranked[1:] if ranked[0].score - c.score < NEAR]
    if not top.because:
        return "a guess: nothing in the text decides, and this cause is the usual one"
    if near:
        return f"open between {1 + len(near)} causes: {', '.join(c.name for c in [top, *near])}"
    return f"likely: {top.because}" + ("" if len(ranked) == 1 else ", and nothing as telling speaks for another cause")


def would_tell(ranked: Sequence[Cause]) -> str:
    """What to look at in the running program to tell the first cause from the second; "" where there is one cause, well supported."""
    top, others = ranked[0], ranked[1:]
    if top.because and (not others or top.score - others[0].score >= NEAR):
        return ""
    other = f"{others[0].name} {others[0].why}" if others else ""
    own = f"{top.name} {top.why}"
    for pattern, look in _LOOKS:
        if re.search(pattern, top.name) and not (others and re.search(pattern, others[0].name)):
            return f"{top.name}: {look}"
    for pattern, look in _LOOKS:
        if others and re.search(pattern, others[0].name):
            return f"{others[0].name}: {look}"
    for pattern, look in _LOOKS:
        if bool(re.search(pattern, own)) != bool(re.search(pattern, other)):
            return f"{top.name if re.search(pattern, own) else others[0].name}: {look}"
    return "isotype doctor trace PROGRAM: it names the line that made the odd operand"
