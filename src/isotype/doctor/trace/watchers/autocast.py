"""Autocast: how each module ran, and recomputations that ran otherwise than their forward."""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ....dtypes import name as dtype_name
from ....finding import Finding, Severity
from ....observe.origin import Site, here, place_of, short
from ..context import Context, Recompute, Watcher
from ..origin import Origin
from ..refusals import recompute_finding


class Autocast(Watcher):
    """Remembers, per module, the last state in forward and whether it ever ran with autocast on."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._last: dict[int, torch.dtype | None] = {}  # id of a module -> autocast dtype in its last forward, None when off
        self._ever_on: set[int] = set()
        self._recomputed: dict[str, Recompute] = {}
        self._copies: dict[
            int, tuple[StorageWeakRef, weakref.ref[torch.Tensor], Origin]
        ] = {}  # by storage of a weight's low-precision copy
        self.stale: dict[int, tuple[StorageWeakRef, Origin, Site | None]] = {}  # copies whose weight was updated since
        self._used: dict[str, tuple[Origin, Site | None, Site | None]] = {}

    def now(self) -> torch.dtype | None:
        device = self._context.device
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def entered(self, module: torch.nn.Module, args: tuple) -> None:
        """Also called when a checkpoint runs the module again in backward."""
        now = self.now()
        key = id(module)
        if torch._C._current_autograd_node() is None:
            self._last[key] = now
            if now is not None:
                self._ever_on.add(key)
        elif self._last.get(key, now) != now:
            name = self._context.names.of(module)
            # the modules inside it differ for the same reason: the outermost one is enough
            if not any(name.startswith(f"{outer}.") for outer in self._recomputed):
                site = here()
                self._recomputed.setdefault(name, Recompute(name, _word(self._last[key]), _word(now), site))

    def cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        """Autocast keeps its copy of a trainable weight until the outermost autocast ends."""
        if origin.kind == "autocast" and isinstance(source, torch.nn.Parameter):
            storage = out.untyped_storage()
            self._copies[storage._cdata] = (StorageWeakRef(storage), weakref.ref(source), origin)

    def updated(self, parameter: torch.Tensor) -> None:
        """A tensor was updated in place while autocast is on: autocast's cached copy of it is stale from now on."""
        if not torch.is_autocast_cache_enabled():
            return
        for key, (storage, owner, origin) in self._copies.items():
            if owner() is parameter and not storage.expired():
                self.stale[key] = (storage, origin, here())

    def consumed(self, inputs: list[torch.Tensor]) -> None:
        """Whether an op in forward reads a stale copy."""
        for tensor in inputs:
            key = tensor.untyped_storage()._cdata
            entry = self.stale.get(key)
            if entry is not None:
                if entry[0].expired():
                    del self.stale[key]
                else:
                    _, origin, updated = entry
                    name = origin.via.what if origin.via is not None else origin.what
                    self._used.setdefault(name, (origin, updated, here()))

    def forward_begins(self) -> None:
        self._copies = {key: entry for key, entry in self._copies.items() if not entry[0].expired()}
        self.stale = {key: entry for key, entry in self.stale.items() if not entry[0].expired()}

    def state(self) -> tuple[str, bool]:
        """In words, and whether the running module ran with autocast on before."""
        device = self._context.device
        now = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) or self._context.autocast_around else None
        before = bool(self._context.stack) and id(self._context.stack[-1].module) in self._ever_on
        if now is not None:
            return f"on, {dtype_name(now)}", before
        return "off here" + (", on when this module ran before" if before else ""), before

    def recomputation(self) -> Recompute | None:
        return next(iter(self._recomputed.values()), None)

    def findings(self) -> list[Finding]:
        found = [recompute_finding(item, None) for item in list(self._recomputed.values())[:1]]
        return [*found, self._stale_finding()] if self._used else found

    def _stale_finding(self) -> Finding:
        names = list(self._used)
        _, updated, used = self._used[names[0]]
        update = f" at {short(updated.file)}:{updated.line} in {updated.function}" if updated is not None else ""
        return Finding(
            code="TR014",
            severity=Severity.ERROR,
            message=f"autocast served stale copies of {len(names)} updated weights: {', '.join(names[:4])}",
            place=place_of(updated, names[0]),
            cause=f"inside one autocast region the weights were updated{update}, and the next forward in the same region used the "
            "low-precision copies that autocast "
            "had cached before the update: the model computes with old weights, and the update has no effect until the region ends",
            observed=f"used again at {used}" if used is not None else None,
            fix="open autocast around each forward (and loss) only, and step the optimizer outside it\n"
            "or call torch.clear_autocast_cache() after each update, or torch.autocast(..., cache_enabled=False)",
            details=(("updated at", f"{updated}: {updated.text}"),) if updated is not None else (),
        )


def _word(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else f"on ({dtype_name(dtype)})"
