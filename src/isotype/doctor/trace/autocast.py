"""Autocast: how each module ran, and recomputations that ran otherwise than their forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...dtypes import name as dtype_name
from ...finding import Finding
from .refusals import recompute_finding
from .source import Site

if TYPE_CHECKING:
    from .tracer import Tracer


@dataclass(frozen=True, slots=True)
class Recompute:
    module: str
    before: str
    after: str
    site: Site | None


class Autocast:
    """Remembers, per module, the last state in forward and whether it ever ran with autocast on."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._last: dict[int, torch.dtype | None] = {}  # id of a module -> autocast dtype in its last forward, None when off
        self._ever_on: set[int] = set()
        self._recomputed: dict[str, Recompute] = {}

    def now(self) -> torch.dtype | None:
        device = self._tracer.device
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def entered(self, module: torch.nn.Module) -> None:
        """Called as a module's forward begins, also when a checkpoint runs it again in backward."""
        now = self.now()
        key = id(module)
        if torch._C._current_autograd_node() is None:
            self._last[key] = now
            if now is not None:
                self._ever_on.add(key)
        elif self._last.get(key, now) != now:
            name = self._tracer.names.of(module)
            # the modules inside it differ for the same reason: the outermost one is enough
            if not any(name.startswith(f"{outer}.") for outer in self._recomputed):
                site = self._tracer.locator.here()
                self._recomputed.setdefault(name, Recompute(name, _word(self._last[key]), _word(now), site))

    def state(self) -> tuple[str, bool]:
        """In words, and whether the running module ran with autocast on before."""
        now = self.now()
        before = bool(self._tracer.stack) and id(self._tracer.stack[-1]) in self._ever_on
        if now is not None:
            return f"on, {dtype_name(now)}", before
        return "off here" + (", on when this module ran before" if before else ""), before

    def recomputation(self) -> Recompute | None:
        return next(iter(self._recomputed.values()), None)

    def findings(self) -> list[Finding]:
        return [recompute_finding(item, None) for item in list(self._recomputed.values())[:1]]


def _word(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else f"on ({dtype_name(dtype)})"
