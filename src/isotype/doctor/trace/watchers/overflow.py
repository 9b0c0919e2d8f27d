"""Values that leave fp16's range: the first module that turns finite inputs into inf or NaN, and gradients that become zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....finding import Finding, Place, Severity
from ..ops import Op
from ..source import Site, place_of

if TYPE_CHECKING:
    from ..tracer import Tracer

_GRADIENTS = 64  # gradients whose cast to fp16 is looked at
_SAMPLE = 4_096
_PRODUCTS = 256  # products of a backward that are looked at
_TIMES = 2  # that products, or most casts, must lose most of their values: once it may be a gradient that is nearly zero by right


@dataclass(frozen=True, slots=True)
class Overflow:
    module: str
    inside: bool  # made by the module; else by what its parent did before calling it
    largest: float
    word: str
    site: Site | None


class Overflows:
    """Looks at the fp16 outputs of modules, until one is not finite."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._first: Overflow | None = None
        self._gradients = 0  # gradients cast down to fp16 that were looked at, and those that mostly became zero
        self._flushed = 0
        self._site: Site | None = None
        self._products = 0
        self._lost: list[tuple[str, Site | None]] = []  # modules and lines of the forward whose gradients' products became zero

    def left(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """A module's forward has ended."""
        if self._first is not None or not self._tracer.pace.looking:
            return
        out = output[0] if isinstance(output, (tuple, list)) and output else output
        if type(out) is not torch.Tensor or out.dtype != torch.float16 or not out.numel() or bool(torch.isfinite(out).all()):
            return
        inputs = [t for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
        inside = all(bool(torch.isfinite(t).all()) for t in inputs)
        largest = max((float(t.detach().abs().max()) for t in inputs if inside and t.numel()), default=0.0)
        word = "NaN" if bool(torch.isnan(out).any()) else "inf"
        self._first = Overflow(self._tracer.names.of(module), inside, largest, word, self._tracer.locator.here())

    def flushed(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """A gradient was cast to fp16: how much of it is below fp16's smallest value."""
        if source.dtype not in (torch.float32, torch.float64) or self._gradients > _GRADIENTS:
            return
        self._gradients += 1
        wide, low = source.detach().reshape(-1)[:_SAMPLE], out.detach().reshape(-1)[:_SAMPLE]
        there = int((wide != 0).sum())
        if there and int(((low == 0) & (wide != 0)).sum()) > there / 2:
            self._flushed += 1
            self._site = self._site or self._tracer.here()[0]

    def made(self, op: Op, args: tuple, kwargs: dict | None, out: torch.Tensor) -> None:
        """A product of a backward without a loss scale came out in fp16: if it is mostly zero, whether it is so in fp32."""
        if self._products > _PRODUCTS or self._tracer.scaling.scaled or not out.numel():
            return
        self._products += 1
        if int((out == 0).sum()) * 2 < out.numel():
            return

        def widen(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float16 else value

        with torch.no_grad():
            wide = op.func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})
            wide = wide[0] if isinstance(wide, (tuple, list)) else wide
            there = int((wide != 0).sum())
            if there and int(((out == 0) & (wide != 0)).sum()) * 2 > there:
                site, module, _ = self._tracer.here()
                self._lost.append((module, site))

    def _underflow(self) -> list[Finding]:
        casts = self._flushed >= _TIMES and self._flushed * 2 >= self._gradients
        if not casts and len(self._lost) < _TIMES:
            return []
        modules = list(dict.fromkeys(module for module, _ in self._lost if module))
        site = self._site if casts else self._lost[0][1]
        return [
            Finding(
                code="TR025",
                severity=Severity.WARNING,
                message=f"gradients flush to zero in fp16: {self._flushed} of {self._gradients} lost more than half of their values"
                if casts
                else f"gradients flush to zero in fp16: {len(self._lost)} products lost more than half of their values, in "
                + ", ".join(modules[:4]),
                place=place_of(site),
                cause="fp16's smallest value is 6e-8: a gradient below half of it is zero, and everything before it in the network gets "
                "none; the loss was not scaled (or not enough)",
                fix="scale the loss: scaler = torch.amp.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer)\nor run in "
                "bf16, which has the range of fp32",
            )
        ]

    def findings(self) -> list[Finding]:
        if self._first is None:
            return self._underflow()
        first = self._first
        where = f"in {first.module}" if first.inside else f"before {first.module}, in the module that calls it"
        return [
            Finding(
                code="TR023",
                severity=Severity.WARNING,
                message=f"fp16 values become {first.word} {where}",
                place=Place(
                    file=first.site.file if first.site else None, line=first.site.line if first.site else None, symbol=first.module
                ),
                cause="fp16 ends at 65504: a product or a sum beyond it is inf, and inf - inf or inf / inf is NaN"
                + (f"; {first.module} was given values up to {first.largest:.0f}" if first.inside and first.largest else ""),
                fix="run in bf16, which has the range of fp32, or keep this part in fp32 (cast in, compute, cast back), "
                "or clamp to torch.finfo(x.dtype).max",
            )
        ]
