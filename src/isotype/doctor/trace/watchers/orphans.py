"""Parameters that replaced others after the optimizer was created, often in another dtype: they get gradients and are never updated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....dtypes import name as dtype_name
from ....finding import Finding, Severity, listed
from ..context import Context
from ..source import Site, place_of
from ..watcher import Watcher


@dataclass(slots=True)
class Orphan:
    name: str
    held: torch.dtype
    live: torch.dtype
    site: Site | None


class Orphans(Watcher):
    """Looks at an optimizer's first step: does a module own each parameter that has no gradient, or another one in its stead?"""

    order = 75

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._looked: set[int] = set()
        self._found: dict[str, Orphan] = {}

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._looked:
            return
        self._looked.add(id(optimizer))
        held = [p for group in optimizer.param_groups for p in group["params"]]
        owned = {id(tensor) for kind, _, tensor in self._context.names.tensors() if kind == "parameter"}
        # master weights are in no module either, and have gradients
        gone = [p for p in held if p.grad is None and id(p) not in owned]
        if not gone:
            return
        ours = {id(p) for p in held}
        site = self._context.locator.here(3)
        for kind, name, tensor in self._context.names.tensors():
            if kind != "parameter" or id(tensor) in ours or tensor.grad is None:
                continue
            match = next((p for p in gone if p.shape == tensor.shape), None)
            if match is not None:
                gone = [p for p in gone if p is not match]
                self._found[name] = Orphan(name, match.dtype, tensor.dtype, site)

    def findings(self) -> list[Finding]:
        if not self._found:
            return []
        first = next(iter(self._found.values()))
        names, live, held = list(self._found), dtype_name(first.live), dtype_name(first.held)
        now = f"is {live} now" if live != held else "is another tensor now"
        return [
            Finding(
                code="TR026",
                severity=Severity.WARNING,
                message=f"{len(names)} parameters get gradients, and no optimizer updates them: {listed(names, 4)}",
                place=place_of(first.site, first.name),
                cause=f"the optimizer holds a {held} parameter of this shape that no module owns any more: {first.name} was replaced "
                f"after the optimizer was made, and {now}; it keeps its first values",
                fix="make the optimizer after the last cast or replacement of parameters, or change the dtype in place (module.to(dtype), "
                "parameter.data = ...), which keeps the parameter",
                details=(("stepped at", f"{first.site}: {first.site.text}"),) if first.site is not None else (),
            )
        ]
