"""Origin: what made a tensor its dtype. Ops that keep a dtype pass the origin on, so that a chain of origins leads back to the decision."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...dtypes import name as dtype_name
from ...observe.origin import Site

_FOLLOWS = re.compile(r"\.to\([^()]*(?:\w\.dtype|_dtype|\bdtype\s*=\s*\w+\.dtype)|\.type_as\(")
LONGEST_CHAIN = 8  # a state that is cast back and forth every step would otherwise grow its chain for ever

# Kinds. parameter, buffer: named in a module; input: from outside; created: a factory call; cast: explicit; autocast: a cast that autocast
# put in; promotion: mixed operands, the wider one won; op: an op whose rule gives another dtype; engine: autograd cast a gradient


@dataclass(slots=True, eq=False)
class Origin:
    """Why a tensor has its dtype.

    what      the parameter's name, or the op
    module    path of the module that was running
    backward  the autograd node, when it happened in backward
    via       what it was before: a cast's operand, or the operand that forced a promotion
    writer    the op and module that wrote the operand `via` last
    event     the promotion that made it, while its result may still spread
    """

    dtype: torch.dtype
    kind: str
    what: str
    module: str = ""
    site: Site | None = None
    backward: str = ""
    via: Origin | None = None
    writer: str = ""
    depth: int = 0
    event: Any = None

    def __post_init__(self) -> None:
        if self.via is not None:
            if self.via.depth >= LONGEST_CHAIN:
                *_, self.via = self.via.chain()
            self.depth = self.via.depth + 1

    def __deepcopy__(self, memo: Any) -> Origin:
        return self  # a copied tensor came to its dtype as the first did

    def chain(self) -> Iterator[Origin]:
        """This origin, then upstream."""
        origin: Origin | None = self
        while origin is not None:
            yield origin
            origin = origin.via

    def decider(self) -> Origin:
        """The origin that decided: upstream of promotions, of ops that only followed, and of casts that autocast put in.

        A cast to the dtype of another tensor only brings a value back to what something upstream had departed to: then the first
        departure of that round trip decided.
        """
        found = self._nearest_decision()
        while found.kind == "cast" and found.follows and found.via is not None:
            departures = [origin for origin in found.via.chain() if origin.dtype == found.dtype and origin.kind != "input"]
            if not departures:
                break
            found = departures[-1]._nearest_decision()
        return found

    def _nearest_decision(self) -> Origin:
        for origin in self.chain():
            if origin.kind not in ("promotion", "op", "autocast") or origin.via is None:
                return origin
        return self

    @property
    def follows(self) -> bool:
        """Whether a cast is written to follow another tensor: `.to(x.dtype)`, `.type_as(x)`."""
        return self.site is not None and bool(_FOLLOWS.search(self.site.text or ""))

    def describe(self) -> str:
        """One sentence without its place."""
        word = dtype_name(self.dtype)
        match self.kind:
            case "parameter" | "buffer":
                return f"{word}: {self.kind} {self.what}"
            case "input":
                return f"{word}: came from outside the trace{f' ({self.what})' if self.what else ''}"
            case "created":
                return f"{word}: created by {self.what}"
            case "cast":
                return f"{word}: cast by {self.what}"
            case "autocast":
                return f"{word}: cast by autocast for {self.what}"
            case "promotion":
                return f"{word}: {self.what} promoted mixed operands"
            case "engine":
                return f"{word}: cast by autograd: {self.what}"
            case _:
                return f"{word}: returned by {self.what}"

    def place(self) -> str:
        """Module path, file and line, as far as known."""
        parts = [self.module and f"in {self.module}", str(self.site) if self.site else "", self.backward and f"backward of {self.backward}"]
        return ", ".join(part for part in parts if part)

    def explain(self, limit: int = 5) -> list[str]:
        """The chain as lines: what, where, and the source text."""
        lines = []
        for number, origin in enumerate(self.chain()):
            if number == limit:
                break
            place = origin.place()
            lines.append(("" if number == 0 else "<- ") + origin.describe() + (f"   {place}" if place else ""))
            if origin.site is not None and origin.site.text:
                lines.append(f"     {origin.site.text}")
        return lines
