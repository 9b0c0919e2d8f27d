"""Values that leave fp16's range: the first module that turns finite inputs into inf or NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...finding import Finding, Place, Severity
from .source import Site

if TYPE_CHECKING:
    from .tracer import Tracer

_LOOKS = 4  # forwards that are looked at; then those whose number is a power of two


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

    def left(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """A module's forward has ended."""
        count = self._tracer.forwards
        if self._first is not None or (count > _LOOKS and count & (count - 1)):
            return
        out = output[0] if isinstance(output, (tuple, list)) and output else output
        if type(out) is not torch.Tensor or out.dtype != torch.float16 or not out.numel() or bool(torch.isfinite(out).all()):
            return
        inputs = [t for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
        inside = all(bool(torch.isfinite(t).all()) for t in inputs)
        largest = max((float(t.detach().abs().max()) for t in inputs if inside and t.numel()), default=0.0)
        word = "NaN" if bool(torch.isnan(out).any()) else "inf"
        self._first = Overflow(self._tracer.names.of(module), inside, largest, word, self._tracer.locator.here())

    def findings(self) -> list[Finding]:
        if self._first is None:
            return []
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
