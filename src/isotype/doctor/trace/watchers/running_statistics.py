"""Running statistics of batch norms in low precision, which their kernel updates inside: against what the batches show.

A statistic that moves by a hundredth of its distance at a time stops where that is below half a step of bf16: at momentum 0.01 up to
39% away. It counts when its last updates were lost and the batches agree on where it should be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ....dtypes import eps
from ....dtypes import name as dtype_name
from ....finding import Finding, Severity, listed
from ..context import Context
from ..ops import LOW, Op
from ..pace import now_and_then
from ..source import Site, place_of
from ..watcher import After, Before, Watcher

NORMS = frozenset({"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS = ((3, "running mean"), (4, "running variance"))  # their places among the arguments
_LAST = 3  # updates that are judged together
_LOST = 0.5  # below this share of the fp32 movement they count as rounded away
_OFF = 0.05  # relative distance from the statistics of the batches above which it is reported


@dataclass(slots=True)
class _Running:
    storage: StorageWeakRef
    name: str
    what: str
    dtype: torch.dtype
    momentum: float
    site: Site | None
    calls: int = 0
    last: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=lambda: deque(maxlen=_LAST))  # moved, gap, batch

    def off(self) -> tuple[float, float]:
        """Share of the movement that happened, and the distance that is left."""
        moved, gap, batch = (torch.stack(values) for values in zip(*self.last))
        meant = self.momentum * gap
        share = float((moved * meant).sum()) / max(float(meant.square().sum()), 1e-38)
        return share, float(gap.mean(0).norm()) / max(float(batch.mean(0).norm()), 1e-38)


class RunningStatistics(Watcher):
    order = 35

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._running: dict[int, _Running] = {}

    def before_ops(self) -> dict[str, Before | tuple[Before, After]]:
        return dict.fromkeys(NORMS, (self.before, self.after))

    def before(self, op: Op, args: tuple, kwargs: dict | None) -> list[tuple[_Running, torch.Tensor, torch.Tensor, torch.Tensor]] | None:
        """The statistics that are due: as they are, and as this batch has them."""
        x, training, momentum = args[0], args[5], args[6]
        due = []
        for place, what in _STATISTICS:
            target = args[place]
            if not training or not isinstance(target, torch.Tensor) or target.dtype not in LOW:
                continue
            running = self._of(target, what, float(momentum))
            running.calls += 1
            if now_and_then(running.calls, _LAST) or self._context.pace.sampled:
                wide = x.detach().float().transpose(0, 1).flatten(1)
                batch = wide.mean(1) if place == 3 else wide.var(1)
                due.append((running, target, target.detach().float(), batch))
        return due or None

    def after(self, due: list[tuple[_Running, torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        for running, target, before, batch in due:
            if torch.isfinite(batch).all():
                running.last.append((target.detach().float() - before, batch - before, batch))

    def _of(self, target: torch.Tensor, what: str, momentum: float) -> _Running:
        storage = target.untyped_storage()
        known = self._running.get(storage._cdata)
        if known is None or known.storage.expired():
            origin = self._context.provenance.get(target)
            name = origin.what if origin.kind == "buffer" else f"of shape {tuple(target.shape)}"
            known = _Running(StorageWeakRef(storage), name, what, target.dtype, momentum, self._context.locator.here(4))
            self._running[storage._cdata] = known
        return known

    def findings(self) -> list[Finding]:
        stuck = []
        for running in self._running.values():
            if len(running.last) == _LAST:
                share, off = running.off()
                if share < _LOST and off >= _OFF:
                    stuck.append((off, running))
        if not stuck:
            return []
        off, worst = max(stuck, key=lambda pair: pair[0])
        word, names = dtype_name(worst.dtype), [running.name for _, running in stuck]
        return [
            Finding(
                code="TR018",
                severity=Severity.WARNING,
                message=f"running statistics of batch norms kept in {word} lose their updates: {listed(names, 4)}",
                place=place_of(worst.site, worst.name),
                cause=f"a {worst.what} moves by {worst.momentum:g} (momentum) of its distance to a batch's; where that is below half a "
                f"step of {word} ({eps(word) / 2:.1e} of the value) it does not change, and evaluation normalizes with the old value",
                observed=f"{worst.name} differs by {100 * off:.0f}% from the statistics of its last batches, whose updates were lost",
                fix="keep the batch norms in fp32 in a low-precision model (`norm.float()` after the cast), or keep the model in fp32 "
                "and let autocast lower the compute",
            )
        ]
