"""From the origin of the odd operand to a cause in one sentence and a fix that fits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ...dtypes import name as dtype_name
from .operands import WRITES, Operand, share_of
from .origin import Origin
from .pace import UNWATCHED
from .source import Site


def cause_of(odd: Operand, op: str, census: Counter[torch.dtype], autocast: str) -> str:
    """Who decided, and how it travelled to the op that failed."""
    origin = odd.origin
    decider = origin.decider()
    place = decider.place()
    parts = [_decision(decider) + (f" ({place})" if place else "")]
    for step in origin.chain():
        if step is decider:
            break
        if step.kind == "promotion":
            wrote = f"; the wider operand was last written by {step.writer}" if step.writer else ""
            parts.append(f"{step.what} promoted the other operand to {dtype_name(step.dtype)} ({step.place()}{wrote})")
        else:
            parts.append(f"{step.describe()} ({step.place()})")
    if odd.writer:
        parts.append(f"{odd.writer} wrote it last")
    parts.append(f"{op} then got it as {odd.label}")
    text = "; ".join(parts)
    share = share_of(census)
    return ". ".join(part for part in (text, share, autocast) if part)


def a_or_an(word: str) -> str:
    """The article of a dtype's word: an fp32 tensor, a bf16 tensor."""
    return "an" if word[0] in "aeiof" else "a"


def _decision(decider: Origin) -> str:
    word = dtype_name(decider.dtype)
    match decider.kind:
        case "parameter" | "buffer":
            return f"{decider.kind} {decider.what} is {word}"
        case "created":
            return f"{decider.what} made {a_or_an(word)} {word} tensor"
        case "cast":
            return f"an explicit cast, {decider.what}, made it {word}"
        case "input":
            return f"{a_or_an(word)} {word} tensor came from outside the trace"
        case _:
            return f"{decider.what} returned {word}"


def fix_of(
    odd: Operand, others: Sequence[Operand], op: str, *, autocast_on: bool, autocast_before: bool, device: str, generate: bool
) -> str:
    """The ways out, the likeliest first."""
    decider = odd.origin.decider()
    other = next((operand for operand in others if operand.dtype != odd.dtype), odd)
    wanted = f"torch.{str(other.dtype).removeprefix('torch.')}"
    # autocast to fp32 is switched off with a warning
    half = next((one.dtype for one in (other, odd) if one.dtype in (torch.bfloat16, torch.float16)), None)
    forced = next((step for step in odd.origin.chain() if step.kind == "promotion"), None)
    ways: list[str] = []
    if (generate or autocast_before) and half is not None:
        caller = "generate() (or the evaluation)" if generate else "this call"
        ways.append(f'run {caller} under torch.autocast("{device}", dtype={half}), as training does')
    if op.strip("_") in WRITES or op == "__setitem__":
        ways.append(f"cast the source to the destination's dtype where it is written: `.to(out.dtype)`, here {other.word}")
        ways.append(f"or allocate the destination (buffer, cache dtype) as {odd.word}")
    match decider.kind:
        case "created":
            if "without dtype=" in decider.what or "tensor" in decider.what:
                single = (
                    " (a Python float, e.g. from math.sqrt, never promotes)" if "tensor" in decider.what or "scalar" in decider.what else ""
                )
                ways.append(f"give it the dtype of what it meets, `dtype=x.dtype`, or cast it: `.to(x.dtype)`, here {wanted}{single}")
            else:
                ways.append(f"cast it to the dtype of what it meets, `.to(q.dtype)`, here {wanted}")
        case "parameter" | "buffer":
            owner, _, leaf = decider.what.rpartition(".")
            whole = f"`model.get_submodule({owner!r}).to({wanted})`" if owner else f"cast `{leaf}` with the rest of the model to {wanted}"
            ways.append(f"if {decider.what} was not meant to be {dtype_name(decider.dtype)}: {whole}")
            ways.append(
                "or keep it, and cast the results computed with it back: `.to(x.dtype)`" + (f" at {_line(forced.site)}" if forced else "")
            )
        case "cast":
            ways.append(
                f"cast back after the part that needs {dtype_name(decider.dtype)}: `.to(x.dtype)`, here {wanted}, or drop the cast at "
                f"{_line(decider.site)}"
            )
        case "input" if UNWATCHED in decider.what:
            ways.append(f"cast the operands to one dtype where they meet: `.to(x.dtype)`, here {wanted}")
        case "input":
            ways.append(f"cast the input to the model's dtype before the call: `x.to({wanted})`")
        case _:
            ways.append(f"cast its result back: `.to({wanted})` at {_line(decider.site)}")
    if half is not None and not (autocast_on or generate or autocast_before):
        ways.append(f'or run the forward under torch.autocast("{device}", dtype={half})')
    return "\n".join(ways)


def _line(site: Site | None) -> str:
    return str(site) if site is not None else "the place where it is made"
