"""Implicit and repeated casts: of gradients by autograd, to the dtype of their tensor; of frozen parameters by autocast, at every call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ....dtypes import name as dtype_name
from ....finding import Finding, Place, Severity
from ..context import Context
from ..origin import Origin
from ..source import place_of
from ..watcher import Watcher
from .promotions import size


@dataclass(slots=True)
class EngineCast:
    origin: Origin
    before: torch.dtype
    after: torch.dtype
    count: int = 0


@dataclass(slots=True)
class FrozenCasts:
    names: dict[str, None] = field(default_factory=dict)
    count: int = 0
    written: int = 0
    before: str = ""
    after: str = ""


class Casts(Watcher):
    """Counts both kinds."""

    order = 45

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._engine: dict[tuple[str, torch.dtype, torch.dtype, Any], EngineCast] = {}
        self._frozen = FrozenCasts()

    def cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        if origin.kind == "engine":
            key = (origin.backward, source.dtype, out.dtype, origin.site)
            cast = self._engine.setdefault(key, EngineCast(origin, source.dtype, out.dtype))
            cast.count += 1
        elif origin.kind == "autocast" and isinstance(source, torch.nn.Parameter) and not source.requires_grad and origin.via is not None:
            frozen = self._frozen
            frozen.count += 1
            frozen.written += out.nbytes
            frozen.before, frozen.after = dtype_name(source.dtype), dtype_name(out.dtype)
            if len(frozen.names) < 256:
                frozen.names[origin.via.what] = None

    def findings(self) -> list[Finding]:
        found = [self._of_engine(cast) for cast in self._engine.values()]
        frozen = self._frozen
        forwards = max(1, self._context.forwards)
        if frozen.count > len(frozen.names):
            found.append(
                Finding(
                    code="TR016",
                    severity=Severity.NOTE,
                    message=f"{len(frozen.names)} frozen {frozen.before} parameters are cast to {frozen.after} again on every call",
                    place=Place(symbol=next(iter(frozen.names))),
                    cause="autocast keeps the low-precision copy of trainable parameters only, so a frozen one is cast again each time "
                    "it is used",
                    observed=f"{frozen.count} casts, {size(frozen.written)} written, {size(frozen.written / forwards)} each forward",
                    fix=f"load or cast the frozen weights in {frozen.after} once (dtype= of from_pretrained); trainable parameters "
                    f"stay {frozen.before}",
                )
            )
        return found

    def _of_engine(self, cast: EngineCast) -> Finding:
        origin, before, after = cast.origin, dtype_name(cast.before), dtype_name(cast.after)
        loses = cast.after.itemsize > cast.before.itemsize
        site = origin.site
        return Finding(
            code="TR013",
            severity=Severity.WARNING if loses else Severity.NOTE,
            message=f"{origin.backward} returns a {before} gradient for a {after} tensor",
            place=place_of(site, origin.module or origin.backward),
            cause=f"the backward of this custom function returned {before}; autograd casts it to {after} without a warning"
            + (f", so the gradient's dtype looks right though its values were rounded to {before}" if loses else ""),
            observed=f"{cast.count} times",
            fix=f"return each gradient in its tensor's dtype: compute it in {after} or cast it in backward, "
            "`.to(ctx.saved_tensors[i].dtype)`",
            details=(("forward at", f"{site}: {site.text}"),) if site is not None else (),
        )
