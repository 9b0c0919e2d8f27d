"""Updates that round away: an in-place op on a low-precision tensor is repeated in fp32 on a
sample, and the two movements are compared. And sums in low precision that grow over many steps,
against the same sums in fp32: there each addition loses little and the sum much.

One mechanism for optimizers (single, foreach and fused), optimizer states, weight decay, averaged
weights and accumulators: whatever is updated in place. Stochastic rounding writes values that are
exact in the low precision, so its movement agrees with the fp32 one. A sum is whatever `add_` or
`sub_` writes again and again with nothing else in between: `.grad` over micro-batches, buffers,
totals of a metric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...dtypes import eps, significant_bits
from ...dtypes import name as dtype_name
from ...finding import Finding, join_names
from ...observe.operators import NARROW_FLOATS, Operator
from ...observe.origin import Site, innermost_site, site_place
from .context import After, Before, Context, Watcher, at, now_and_then, say

SAMPLE = 16_384  # elements of a tensor that are compared
LOST = 0.5  # below this share of the fp32 movement the update counts as rounded away
_ARITHMETIC = ("add_", "sub_", "mul_", "div_", "lerp_", "addcdiv_", "addcmul_")
UPDATES = frozenset(
    {*_ARITHMETIC, "copy_", *(f"_foreach_{name}" for name in _ARITHMETIC), "_foreach_copy_"}
) | frozenset(f"_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
_MOST_REMAINDERS = 64  # additions of a step whose rounding errors are looked for
_STORED = 0.9  # share of the elements whose rounding error an operand must hold
_PAIR = 2  # tensors of a list that are compared


@dataclass(slots=True)
class Watched:
    """One updated tensor under one op: the sums of <real, meant> and <meant, meant> over the
    sampled updates.
    """

    storage: StorageWeakRef
    name: str
    dtype: torch.dtype
    role: str
    op: str
    site: Site | None
    calls: int = 0
    samples: int = 0
    agreement: float = 0.0
    meant: float = 0.0
    still: float = 0.0
    source: StorageWeakRef | None = None
    from_master: bool = False
    # samples whose rounding error was found in the operand afterwards: compensated (Kahan)
    # summation
    kept: int = 0

    @property
    def moved(self) -> float:
        return self.agreement / self.meant if self.meant > 0 else 1.0


@dataclass(slots=True)
class _Sample:
    watched: Watched
    tensor: torch.Tensor
    before: torch.Tensor
    meant: torch.Tensor
    operand: torch.Tensor | None  # what was added, where it may keep what the addition lost


class Updates(Watcher):
    """Watches the in-place ops, and knows which optimizer is stepping."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._watched: dict[tuple[int, str], Watched] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._remainders: list[tuple[Watched, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._lost: dict[tuple[str, str, str], list[Watched]] = defaultdict(list)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        self._context.sums.settled(optimizer)
        self._optimizer = optimizer

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = None
        self._look_for_remainders()

    def ops(self) -> dict[str, tuple[Before, After | None]]:
        return dict.fromkeys(UPDATES, (self.before, self.after))

    def before(self, op: Operator, args: tuple, kwargs: dict) -> list[_Sample] | None:
        """The fp32 movement of those of the op's destinations that are due for a comparison."""
        several = not isinstance(args[0], torch.Tensor)
        targets = args[0] if several else args[:1]
        if self._context.autocast_around:
            for tensor in targets:
                self._context.autocast.updated(tensor)
        if (
            not several
            and targets[0].dtype in NARROW_FLOATS
            and op.name in ("add_", "sub_")
            and self._optimizer is None
        ):
            self._context.sums.added(op, args, kwargs)
        samples = []
        for index in [
            i
            for i, t in enumerate(targets)
            if t.dtype in NARROW_FLOATS and (t.numel() > 1 or not several)
        ][:_PAIR]:
            given = tuple(_item(a, index) for a in args) if several else args
            due = self._due(op, targets[index], given)
            if due is not None:
                samples.append(self._repeat(op, due, args, kwargs, index if several else None))
        return samples or None

    def after(self, samples: Sequence[_Sample]) -> None:
        """Compares what happened with what was meant."""
        for sample in samples:
            real = _part(sample.tensor, sample.tensor).float() - sample.before
            meant = sample.meant - sample.before
            size = float(meant.double().square().sum())
            if size == 0 or not torch.isfinite(meant).all():
                continue
            watched = sample.watched
            watched.samples += 1
            watched.agreement += float((real.double() * meant.double()).sum())
            watched.meant += size
            watched.still += float((real == 0).float().mean())
            if sample.operand is not None and len(self._remainders) < _MOST_REMAINDERS:
                self._remainders.append((watched, sample.tensor, sample.operand, meant - real))

    def _look_for_remainders(self) -> None:
        """Whether what the additions of a step lost is in their operands now: the next step adds it
        again.
        """
        for watched, tensor, operand, remainder in self._remainders:
            now = _part(operand, tensor).float()
            if (
                float(
                    torch.isclose(
                        now, remainder, rtol=2 * eps(dtype_name(watched.dtype)), atol=1e-30
                    )
                    .float()
                    .mean()
                )
                > _STORED
            ):
                watched.kept += 1
                self._context.sums.compensates(operand)
        self._remainders.clear()

    def _due(self, op: Operator, target: torch.Tensor, args: tuple) -> Watched | None:
        copies = op.name.endswith("copy_")
        source = args[1]
        if copies and not (
            isinstance(source, torch.Tensor)
            and source.dtype == torch.float32
            and source.numel() == target.numel()
        ):
            return None
        storage = target.untyped_storage()
        key = (storage._cdata, op.name)
        watched = self._watched.get(key)
        if watched is None or watched.storage.expired():
            self._keep(key)
            watched = self._watched[key] = self._begin(op, target, storage)
        watched.calls += 1
        if copies:
            # a copy from a tensor that lives on is a copy from master weights: rounding there loses
            # nothing
            watched.from_master = watched.from_master or (
                watched.source is not None and not watched.source.expired()
            )
            watched.source = StorageWeakRef(source.untyped_storage())
        if watched.role == "tensor" and watched.calls == 1:
            return None  # not known yet to live longer than one step
        due = now_and_then(watched.calls, 4) or (self._context.stack and self._context.pace.sampled)
        return watched if due else None

    def _begin(self, op: Operator, target: torch.Tensor, storage: Any) -> Watched:
        context = self._context
        origin = context.provenance.get(target)
        role = "tensor"
        name = f"of shape {tuple(target.shape)}"
        if isinstance(target, torch.nn.Parameter) and target.requires_grad:
            average = (
                self._optimizer is None
                and target.grad is None
                and ("lerp_" in op.name or "mul_" in op.name)
            )
            # decayed by mul_ before this add_: an average too
            if not average and self._optimizer is None and target.grad is None:
                decay = self._watched.get((storage._cdata, op.name.replace("add_", "mul_")))
                average = decay is not None and decay.role == "tensor"
            role = "tensor" if average else "parameter"
            if origin.kind == "parameter":
                name = origin.what
            else:
                name = context.names.parameter_name(target) or name
        elif (
            origin.kind in ("parameter", "buffer")
            and self._optimizer is None
            and torch._C._current_autograd_node() is None
        ):
            role = "tensor"
            name = origin.what
        elif self._optimizer is not None:
            role = "state"
            name = f"of shape {tuple(target.shape)}"
        return Watched(StorageWeakRef(storage), name, target.dtype, role, op.name, innermost_site())

    def _repeat(
        self, op: Operator, watched: Watched, args: tuple, kwargs: dict, index: int | None
    ) -> _Sample:
        target = _item(args[0], index)

        def widen(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                part = _part(value, target)
                if part.is_floating_point():
                    return part.to(torch.float32, copy=True)
                return part
            one = _item(value, index)
            return value if one is value else [widen(one)]

        wide = [widen(value) for value in args]
        meant = wide[0] if index is None else wide[0][0]
        before = meant.clone()
        with torch.no_grad():
            op.func(*wide, **{key: widen(value) for key, value in kwargs.items()})
        other = _item(args[1], index) if len(args) > 1 else None
        adds = (
            op.name.endswith("add_")
            and isinstance(other, torch.Tensor)
            and other.dtype == target.dtype
            and other.shape == target.shape
        )
        return _Sample(watched, target, before, meant, other if adds else None)

    def _keep(self, key: tuple[int, str]) -> None:
        """Before an entry of a tensor that is gone is replaced: what it showed stays."""
        old = self._watched.pop(key, None)
        if old is not None and self._counts(old):
            kept = self._lost[(old.role, old.op, str(old.site))]
            if len(kept) < 64:
                kept.append(old)

    @staticmethod
    def _counts(watched: Watched) -> bool:
        if watched.kept and 2 * watched.kept >= watched.samples:
            return False
        if watched.role == "parameter" and not watched.op.endswith("copy_"):
            enough = 1
        else:
            enough = 3
        return watched.samples >= enough and watched.moved < LOST and not watched.from_master

    def forward_begins(self) -> None:
        self._look_for_remainders()
        for key in [key for key, watched in self._watched.items() if watched.storage.expired()]:
            self._keep(key)

    def findings(self) -> list[Finding]:
        """One finding for the parameters, one for other tensors that are updated in place."""
        for key in list(self._watched):
            self._keep(key)
        groups: dict[str, list[Watched]] = defaultdict(list)
        for (role, _, _), kept in self._lost.items():
            groups[role] += kept
        if groups["parameter"]:
            found = [_of_parameters(groups["parameter"], groups["state"])]
        else:
            found = []
        if lost := groups["tensor"]:
            first = lost[0]
            words = {
                "ops": ", ".join(dict.fromkeys(w.op for w in lost)),
                "shown": ", ".join(list(dict.fromkeys(w.name for w in lost))[:4]),
            }
            found.append(
                say(
                    "TR018",
                    site_place(first.site),
                    at("updated at", first.site),
                    **words,
                    **_shares(lost),
                )
            )
        return found


def _of_parameters(lost: list[Watched], states: list[Watched]) -> Finding:
    decay = [w for w in lost if "mul_" in w.op and "addcmul" not in w.op]
    moves = [w for w in lost if w not in decay] or decay
    first = moves[0]
    word = dtype_name(moves[0].dtype)
    names = list(dict.fromkeys(w.name for w in moves))
    details = at("updated at", first.site)
    if decay and moves is not decay:
        rounds = (
            f"its factor (1 - learning rate * decay) rounds away too, for {len(decay)} parameters"
            " seen"
        )
        details += (("weight decay", rounds),)
    if states:
        ops = ", ".join(dict.fromkeys(w.op for w in states))
        details += (
            (
                "states",
                f"{len(states)} optimizer states in {word} lose their decay as well ({ops})",
            ),
        )
    words = {
        "only_decay": moves is decay,
        "shown": join_names(names, 4),
        "bits": significant_bits(word),
    }
    return say(
        "TR012",
        site_place(first.site, names[0]),
        details,
        **words,
        samples=sum(w.samples for w in moves),
        **_shares(moves),
    )


def _shares(lost: list[Watched]) -> dict[str, Any]:
    """dtype, its rounding, the share of the fp32 movement, and the share of elements that did not
    change, both in percent.
    """
    word = dtype_name(lost[0].dtype)
    share = 100 * sum(w.agreement for w in lost) / sum(w.meant for w in lost)
    return {
        "word": word,
        "unit": eps(word) / 2,
        "share": share,
        "still": 100 * sum(w.still for w in lost) / sum(w.samples for w in lost),
    }


def _item(value: Any, index: int | None) -> Any:
    """What belongs to one of the tensors of a foreach op; the value itself, where it belongs to
    all.
    """
    if index is not None and isinstance(value, (list, tuple)) and len(value) > index:
        return value[index]
    return value


def _part(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The sampled elements of an operand: those that belong to the first elements of the target."""
    if target.numel() <= SAMPLE or value.numel() == 1:
        return value.detach()
    return value.detach().expand_as(target).reshape(-1)[:SAMPLE]


FOLLOWED = 4_096  # elements of a sum that are followed in fp32
# forwards a sum must span: within one forward it may be a residual stream, which is bf16 by design
_ENOUGH = 8
_OFF = 5e-3  # relative error of a sum above which it is reported; one rounding to bf16 is 2e-3


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


class Sums(Watcher):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._told: dict[tuple[bool, Any], list[_Sum]] = {}

    def added(self, op: Operator, args: tuple, kwargs: dict) -> None:
        """Before an in-place addition to a low-precision tensor that is no parameter, outside an
        optimizer's step.
        """
        target = args[0]
        other = args[1]
        if (
            not isinstance(other, torch.Tensor)
            or isinstance(target, torch.nn.Parameter)
            or not target.numel()
        ):
            return
        key = _place(target)
        known = self._sums.get(key)
        if (
            known is None
            or known.storage.expired()
            or known.version != target._version
            or known.dtype != target.dtype
        ):
            if known is not None:
                self._keep(known)
            known = self._sums[key] = self._begin(target)
        elif known.additions >= _ENOUGH and known.additions & (known.additions - 1) == 0:
            self._measure(known, target)
        factor = kwargs.get("alpha", 1) * (-1 if op.name == "sub_" else 1)
        known.fp32.add_(_sample(other.detach().expand_as(target)).float(), alpha=factor)
        known.additions += 1
        known.version += 1
        known.last = self._context.forwards
        known.forwards.add(known.last)

    def compensates(self, tensor: torch.Tensor) -> None:
        """Marks a tensor that stores the rounding errors of additions to a weight: its own rounding
        is harmless.
        """
        if (known := self._sums.get(_place(tensor))) is not None:
            known.remainders = True

    def grows(self) -> bool:
        """Whether the last forward or its backward added to a sum that earlier ones began."""
        before = self._context.forwards - 1
        return any(
            known.inside and known.last == before and len(known.forwards) > 1
            for known in self._sums.values()
        )

    def _begin(self, target: torch.Tensor) -> _Sum:
        node = torch._C._current_autograd_node()
        variable = getattr(node, "variable", None) if node is not None else None
        if variable is not None:
            name = self._context.names.parameter_name(variable)
        else:
            name = None
        name = name or f"of shape {tuple(target.shape)}"
        inside = bool(self._context.stack) or node is not None
        storage = StorageWeakRef(target.untyped_storage())
        fp32 = _sample(target).float()
        return _Sum(
            storage,
            target.dtype,
            name,
            innermost_site(),
            variable is not None,
            fp32,
            target._version,
            inside,
        )

    @staticmethod
    def _measure(known: _Sum, target: torch.Tensor) -> None:
        size = float(known.fp32.norm())
        if size > 0 and torch.isfinite(known.fp32).all():
            known.off = float((_sample(target).float() - known.fp32).norm()) / size
            known.after = known.additions

    def settled(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer's step: the gradients as they are used."""
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p.grad.dtype in NARROW_FLOATS
        ]
        for gradient in gradients:
            known = self._sums.get(_place(gradient))
            if (
                known is not None
                and known.version == gradient._version
                and known.additions >= _ENOUGH - 1
            ):
                self._measure(known, gradient)

    def _keep(self, known: _Sum) -> None:
        if known.off >= _OFF and not known.remainders and len(known.forwards) >= _ENOUGH - 1:
            kept = self._told.setdefault(
                (known.gradient, None if known.gradient else known.site), []
            )
            if len(kept) < 64:
                kept.append(known)

    def forward_begins(self) -> None:
        for key in [key for key, known in self._sums.items() if known.storage.expired()]:
            self._keep(self._sums.pop(key))

    def findings(self) -> list[Finding]:
        for known in self._sums.values():
            self._keep(known)
        self._sums.clear()
        return [_of_sums(kept) for kept in self._told.values()]


def _of_sums(kept: list[_Sum]) -> Finding:
    worst = max(kept, key=lambda known: known.off)
    word = dtype_name(worst.dtype)
    names = list(dict.fromkeys(known.name for known in kept))
    return say(
        "TR024",
        site_place(worst.site, names[0] if worst.gradient else None),
        at("added at", worst.site),
        word=word,
        gradient=worst.gradient,
        off=100 * worst.off,
        after=worst.after,
        shown=join_names(names, 4),
        unit=eps(word) / 2,
        sample=FOLLOWED,
        tensors=len(names),
    )


def _sample(value: torch.Tensor) -> torch.Tensor:
    return value.detach().flatten()[:FOLLOWED]


def _place(value: torch.Tensor) -> tuple[int, int]:
    return value.untyped_storage()._cdata, int(value.storage_offset())
