"""Sums in low precision that grow over many steps, decay factors that round to one, and running statistics of batch norms: against the same
arithmetic in fp32.

A sum is whatever `add_` or `sub_` writes again and again with nothing else in between: `.grad` over micro-batches, gradient
buffers, totals of a metric; and what one line's `total = total + value` goes on with. Updates that a single comparison shows lost are
`updates`' business; here each addition loses little and the sum much. A statistic that moves by a hundredth of its distance at a time
stops where that is below half a step of bf16; it counts when its last updates were lost and the batches agree on where it should be."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ....dtypes import eps
from ....dtypes import name as dtype_name
from ....finding import Finding, Severity, listed
from ....observe.operators import LOW, Operator
from ....observe.origin import Site, here, place_of
from ..context import After, Before, Context, Watcher, now_and_then

SAMPLE = 4_096  # elements of a sum that are followed in fp32
_ENOUGH = 8  # forwards a sum must span: within one forward it may be a residual stream, which is bf16 by design
_OFF = 5e-3  # relative error of a sum above which it is reported; one rounding to bf16 is 2e-3
_TOTALS = 256  # totals written anew that are followed at once
_STANDS = 0.5  # share of elements that a decay factor leaves as they are


@dataclass(slots=True)
class _Sum:
    storage: StorageWeakRef
    dtype: torch.dtype
    name: str
    site: Site | None
    gradient: bool
    fp32: torch.Tensor
    version: int
    inside: bool  # added to by a forward or a backward
    additions: int = 0
    forwards: set[int] = field(default_factory=set)
    last: int = 0
    off: float = 0.0
    after: int = 0  # additions when `off` was measured
    remainders: bool = False  # stores the rounding errors of additions to another tensor (Kahan)


@dataclass(slots=True)
class _Total:
    """A sum that is written anew by every addition, and what the last one gave."""

    total: _Sum
    low: torch.Tensor


@dataclass(slots=True)
class _Decay:
    factor: float
    dtype: torch.dtype
    stands: float
    forwards: set[int] = field(default_factory=set)


class Sums(Watcher):
    order = 30

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._told: dict[tuple[bool, Any], list[_Sum]] = {}
        self._decays: dict[Site | None, _Decay] = {}
        self._totals: dict[tuple[Site | None, torch.Size], _Total] = {}

    def before_ops(self) -> dict[str, Before | tuple[Before, After]]:
        return {"add": self.summed, "mul": self.multiplied}

    def added(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
        """Before an in-place addition to a low-precision tensor that is no parameter, outside an optimizer's step."""
        target, other = args[0], args[1]
        if not isinstance(other, torch.Tensor) or isinstance(target, torch.nn.Parameter) or not target.numel():
            return
        storage = target.untyped_storage()
        key = (storage._cdata, target.storage_offset())
        known = self._sums.get(key)
        if known is None or known.storage.expired() or known.version != target._version or known.dtype != target.dtype:
            if known is not None:
                self._keep(known)
            known = self._sums[key] = self._begin(target, storage)
        elif known.additions >= _ENOUGH and known.additions & (known.additions - 1) == 0:
            self._measure(known, target)
        factor = (kwargs or {}).get("alpha", 1) * (-1 if op.name == "sub_" else 1)
        known.fp32.add_(_sample(other.detach().expand_as(target)).float(), alpha=factor)
        known.additions += 1
        known.version += 1
        known.last = self._context.forwards
        known.forwards.add(known.last)

    def summed(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
        """Before `total + value` between forwards: a total that is written anew each time, known by what the last addition gave."""
        one, other = args[0], args[1]
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or one.dtype not in LOW or other.dtype != one.dtype:
            return
        if self._context.stack or one.requires_grad or other.requires_grad or one.shape != other.shape or kwargs:
            return
        if torch._C._current_autograd_node() is not None:
            return
        key = (here(), one.shape)
        known = self._totals.get(key)
        low, step = _sample(one), _sample(other)
        if known is not None and torch.equal(step, known.low) and not torch.equal(low, known.low):
            low, step = step, low  # `value + total`
        if known is None or not torch.equal(low, known.low):
            if known is not None:
                self._keep(known.total)
            name = f"of shape {tuple(one.shape)}"
            total = _Sum(StorageWeakRef(one.untyped_storage()), one.dtype, name, key[0], False, low.float(), 0, False)
            known = self._totals[key] = _Total(total, low)
            while len(self._totals) > _TOTALS:
                self._keep(self._totals.pop(next(iter(self._totals))).total)
        elif known.total.additions >= _ENOUGH and known.total.additions & (known.total.additions - 1) == 0:
            self._compare(known.total, low)
        known.total.fp32.add_(step.float())
        known.total.additions += 1
        known.total.forwards.add(self._context.forwards)
        known.low = low + step

    def compensates(self, tensor: torch.Tensor) -> None:
        """Marks a tensor that stores the rounding errors of additions to a weight: its own rounding is harmless."""
        known = self._sums.get((tensor.untyped_storage()._cdata, int(tensor.storage_offset())))
        if known is not None:
            known.remainders = True

    def grows(self) -> bool:
        """Whether the last forward or its backward added to a sum that earlier ones began."""
        before = self._context.forwards - 1
        return any(known.inside and known.last == before and len(known.forwards) > 1 for known in self._sums.values())

    def multiplied(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
        """Before `tensor * 0.999`: in bf16 that is the tensor."""
        tensor, factor = args[0], args[1]
        if type(factor) is not float or not 0.9 < factor < 1 or not isinstance(tensor, torch.Tensor) or tensor.dtype not in LOW:
            return
        if self._context.stack or tensor.requires_grad or 1 - factor > eps(dtype_name(tensor.dtype)):
            return
        values = _sample(tensor)
        there = int((values != 0).sum())
        if not there:
            return  # an average starts at zero
        stands = int(((values * factor == values) & (values != 0)).sum()) / there
        known = self._decays.setdefault(here(), _Decay(factor, tensor.dtype, stands))
        known.stands = min(known.stands, stands)
        known.forwards.add(self._context.forwards)

    def _begin(self, target: torch.Tensor, storage: Any) -> _Sum:
        node = torch._C._current_autograd_node()
        variable = getattr(node, "variable", None) if node is not None else None
        name = self._context.names.parameter_name(variable) if variable is not None else None
        return _Sum(
            StorageWeakRef(storage),
            target.dtype,
            name or f"of shape {tuple(target.shape)}",
            here(),
            variable is not None,
            _sample(target).float(),
            target._version,
            bool(self._context.stack) or node is not None,
        )

    def _measure(self, known: _Sum, target: torch.Tensor) -> None:
        self._compare(known, _sample(target))

    @staticmethod
    def _compare(known: _Sum, low: torch.Tensor) -> None:
        size = float(known.fp32.norm())
        if size > 0 and torch.isfinite(known.fp32).all():
            known.off, known.after = float((low.float() - known.fp32).norm()) / size, known.additions

    def settled(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer's step: the gradients as they are used."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or gradient.dtype not in LOW:
                    continue
                known = self._sums.get((gradient.untyped_storage()._cdata, gradient.storage_offset()))
                if known is not None and known.version == gradient._version and known.additions >= _ENOUGH - 1:
                    self._measure(known, gradient)

    def _keep(self, known: _Sum) -> None:
        if known.off >= _OFF and not known.remainders and len(known.forwards) >= _ENOUGH - 1:
            kept = self._told.setdefault((known.gradient, None if known.gradient else known.site), [])
            if len(kept) < 64:
                kept.append(known)

    def forward_begins(self) -> None:
        for key in [key for key, known in self._sums.items() if known.storage.expired()]:
            self._keep(self._sums.pop(key))

    def findings(self) -> list[Finding]:
        for known in self._sums.values():
            self._keep(known)
        self._sums.clear()
        for total in self._totals.values():
            self._compare(total.total, total.low)
            self._keep(total.total)
        self._totals.clear()
        standing = {site: d for site, d in self._decays.items() if len(d.forwards) >= 3 and d.stands >= _STANDS}
        told = [_of_sums(kept) for kept in self._told.values() if kept[0].site not in standing]
        return told + [_of_decay(site, decay) for site, decay in standing.items()]


def _of_sums(kept: list[_Sum]) -> Finding:
    worst = max(kept, key=lambda known: known.off)
    word, names = dtype_name(worst.dtype), list(dict.fromkeys(known.name for known in kept))
    site = worst.site
    shown = listed(names, 4)
    what = f"gradients are accumulated in {word}" if worst.gradient else f"a sum is kept in {word}"
    return Finding(
        code="TR024",
        severity=Severity.WARNING,
        message=f"{what}: {100 * worst.off:.1f}% off after {worst.after} additions: {shown}",
        place=place_of(site, names[0] if worst.gradient else None),
        cause=f"every addition rounds the sum to {word}; what is below {eps(word) / 2:.1e} of it is lost, and the sum falls behind "
        f"({'micro-batches add into .grad, which has the weights' + chr(39) + ' dtype' if worst.gradient else 'the tensor is ' + word})",
        observed=f"against the same sum in fp32, on up to {SAMPLE} elements of each of {len(names)}",
        fix="accumulate in fp32: fp32 trained weights under autocast, or fp32 buffers beside bf16 weights that the step reads "
        "(Isotype: precision: {preset: bf16-pure, grads: fp32})"
        if worst.gradient
        else "make the accumulator with dtype=torch.float32 and add to it without casting down",
        details=(("added at", f"{site}: {site.text}"),) if site is not None else (),
    )


def _of_decay(site: Site | None, decay: _Decay) -> Finding:
    word = dtype_name(decay.dtype)
    return Finding(
        code="TR018",
        severity=Severity.WARNING,
        message=f"an average kept in {word} does not decay: multiplying by {decay.factor:g} leaves "
        f"{100 * decay.stands:.0f}% of its values as they are",
        place=place_of(site),
        cause=f"{decay.factor:g} lies {1 - decay.factor:.1e} below 1, less than a step of {word} ({eps(word):.1e}): the product rounds "
        "back to the value, so the average (an EMA) never forgets old values and drifts",
        fix="keep the average in fp32 (`ema = p.detach().float().clone()`), and cast it down only where it is used",
        details=(("updated at", f"{site}: {site.text}"),) if site is not None else (),
    )


def _sample(value: torch.Tensor) -> torch.Tensor:
    flat = value.detach().reshape(-1) if value.is_contiguous() else value.detach().flatten()
    return flat[:SAMPLE]


NORMS = frozenset({"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS = ((3, "running mean"), (4, "running variance"))  # their places among the arguments
_LAST = 3  # updates that are judged together
_LOST = 0.5  # below this share of the fp32 movement they count as rounded away
_FAR = 0.05  # relative distance from the statistics of the batches above which it is reported


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

    def before(
        self, op: Operator, args: tuple, kwargs: dict | None
    ) -> list[tuple[_Running, torch.Tensor, torch.Tensor, torch.Tensor]] | None:
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
            known = _Running(StorageWeakRef(storage), name, what, target.dtype, momentum, here())
            self._running[storage._cdata] = known
        return known

    def findings(self) -> list[Finding]:
        stuck = []
        for running in self._running.values():
            if len(running.last) == _LAST:
                share, off = running.off()
                if share < _LOST and off >= _FAR:
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
