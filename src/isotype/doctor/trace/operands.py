"""What an op was given: dtype, shape, name and origin chain of each operand; the odd one, its cause, and a fix that fits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...dtypes import name as dtype_name
from ...observe.origin import Site
from .context import UNWATCHED, Context
from .origin import Origin

# ops that write one operand into another: the first is the destination, and its dtype rules
WRITES = {"index_put", "_index_put_impl", "scatter", "scatter_add", "index_copy", "index_add", "masked_scatter", "copy", "index_fill"}
_WIDTH = {torch.float64: 3, torch.float32: 2, torch.float16: 1, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class Operand:
    label: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    origin: Origin
    writer: str = ""
    parameter: str = ""

    @classmethod
    def of(cls, context: Context, label: str, tensor: torch.Tensor) -> Operand:
        origin = context.provenance.get(tensor)
        named = origin.what if origin.kind in ("parameter", "buffer") and not origin.via else ""
        return cls(label, tensor.dtype, tuple(tensor.shape), origin, context.provenance.writer(tensor), named)

    @property
    def word(self) -> str:
        return dtype_name(self.dtype)

    def describe(self) -> str:
        written = f"   last written by {self.writer}" if self.writer else ""
        return f"{self.word}[{' '.join(map(str, self.shape))}]{written}"


def dtypes_of(operands: Sequence[Operand]) -> str:
    """`bf16 and fp32`, in the order met."""
    return " and ".join(dict.fromkeys(operand.word for operand in operands))


def odd_one(operands: Sequence[Operand], census: Counter[torch.dtype], op: str) -> Operand:
    """The operand whose dtype is not what the model is made of; for a write, the source; else the widest."""
    if op.strip("_") in WRITES or op in ("__setitem__", "copy_"):
        strays = [operand for operand in operands[1:] if operand.dtype != operands[0].dtype]
        if strays:
            return strays[0]
    dtypes = {operand.dtype for operand in operands}
    usual = next((dtype for dtype, _ in census.most_common() if dtype in dtypes), None)
    if usual is None:
        usual = min(dtypes, key=lambda d: _WIDTH.get(d, 0))
    strays = [operand for operand in operands if operand.dtype != usual] or list(operands)
    # something decided inside the program explains more than something that came in
    return min(strays, key=lambda operand: operand.origin.decider().kind == "input")


def share_of(census: Counter[torch.dtype]) -> str:
    """`99% of the parameters are bf16`."""
    if not census:
        return ""
    dtype, count = census.most_common(1)[0]
    return f"{100 * count / census.total():.0f}% of the parameters are {dtype_name(dtype)}"


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
