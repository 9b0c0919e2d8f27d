"""Updates that are rounded away: an in-place op on a low-precision tensor is repeated in fp32 on a
sample, and the two movements are compared. Also sums in low precision over many steps, compared
with the same sums in fp32: each addition loses little, the sum loses much.

The same mechanism covers optimizers (single, foreach and fused), optimizer states, weight decay,
averaged weights and accumulators: everything that is updated in place. Stochastic rounding writes
values that are exact in the low precision, so its movement agrees with the fp32 one. A sum is a
tensor that only `add_` or `sub_` writes: `.grad` over micro-batches, buffers, totals of a metric.
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
from .context import AfterHook, BeforeHook, Context, Watcher, is_due, say, site_detail

SAMPLE = 16_384  # elements of a tensor that are compared
MIN_MOVEMENT = 0.5  # below this share of the fp32 movement the update counts as rounded away
_ARITHMETIC = ("add_", "sub_", "mul_", "div_", "lerp_", "addcdiv_", "addcmul_")
UPDATE_OPS = frozenset(
    {*_ARITHMETIC, "copy_", *(f"_foreach_{name}" for name in _ARITHMETIC), "_foreach_copy_"}
) | frozenset(f"_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
_MAX_REMAINDERS = 64  # additions of a step whose rounding errors are looked for
_MIN_STORED_SHARE = 0.9  # share of the elements whose rounding error an operand must hold
_MAX_LIST_ITEMS = 2  # tensors of a list that are compared


@dataclass(slots=True)
class UpdatedTensor:
    """One updated tensor under one op: the sums of <real, expected> and <expected, expected>
    over the sampled updates.
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
    expected_norm: float = 0.0
    unchanged: float = 0.0
    source: StorageWeakRef | None = None
    from_master: bool = False
    # samples whose rounding error was found in the operand afterwards: compensated (Kahan)
    # summation
    compensated: int = 0

    @property
    def movement_share(self) -> float:
        return self.agreement / self.expected_norm if self.expected_norm > 0 else 1.0


@dataclass(slots=True)
class _Sample:
    watched: UpdatedTensor
    tensor: torch.Tensor
    old_values: torch.Tensor
    expected: torch.Tensor
    operand: torch.Tensor | None  # what was added, where it may keep what the addition lost


class Updates(Watcher):
    """Watches in-place ops, and knows which optimizer is stepping."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._watched: dict[tuple[int, str], UpdatedTensor] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._remainders: list[tuple[UpdatedTensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._archived: dict[tuple[str, str, str], list[UpdatedTensor]] = defaultdict(list)

    def on_step_start(self, optimizer: torch.optim.Optimizer) -> None:
        self._context.sums.measure_gradients(optimizer)
        self._optimizer = optimizer

    def on_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = None
        self._look_for_remainders()

    def op_hooks(self) -> dict[str, tuple[BeforeHook, AfterHook | None]]:
        return dict.fromkeys(UPDATE_OPS, (self.before_update, self.after_update))

    def before_update(self, op: Operator, args: tuple, kwargs: dict) -> list[_Sample] | None:
        """Computes the fp32 movement of the op's destinations that are due for a comparison."""
        is_list = not isinstance(args[0], torch.Tensor)
        targets = args[0] if is_list else args[:1]
        if self._context.autocast_around:
            for tensor in targets:
                self._context.autocast.on_update(tensor)
        if (
            not is_list
            and targets[0].dtype in NARROW_FLOATS
            and op.name in ("add_", "sub_")
            and self._optimizer is None
        ):
            self._context.sums.record_addition(op, args, kwargs)
        samples = []
        for index in [
            i
            for i, t in enumerate(targets)
            if t.dtype in NARROW_FLOATS and (t.numel() > 1 or not is_list)
        ][:_MAX_LIST_ITEMS]:
            item_args = tuple(_list_item(a, index) for a in args) if is_list else args
            watched = self._watch_if_due(op, targets[index], item_args)
            if watched is not None:
                samples.append(self._repeat(op, watched, args, kwargs, index if is_list else None))
        return samples or None

    def after_update(self, samples: Sequence[_Sample]) -> None:
        """Compares the movement that happened with the expected one."""
        for sample in samples:
            real = _sampled_part(sample.tensor, sample.tensor).float() - sample.old_values
            expected = sample.expected - sample.old_values
            size = float(expected.double().square().sum())
            if size == 0 or not torch.isfinite(expected).all():
                continue
            watched = sample.watched
            watched.samples += 1
            watched.agreement += float((real.double() * expected.double()).sum())
            watched.expected_norm += size
            watched.unchanged += float((real == 0).float().mean())
            if sample.operand is not None and len(self._remainders) < _MAX_REMAINDERS:
                self._remainders.append((watched, sample.tensor, sample.operand, expected - real))

    def _look_for_remainders(self) -> None:
        """Detects compensated sums: what the additions of a step lost is in their operands now, and
        the next step adds it again.
        """
        for watched, tensor, operand, remainder in self._remainders:
            stored = _sampled_part(operand, tensor).float()
            if (
                float(
                    torch.isclose(
                        stored, remainder, rtol=2 * eps(dtype_name(watched.dtype)), atol=1e-30
                    )
                    .float()
                    .mean()
                )
                > _MIN_STORED_SHARE
            ):
                watched.compensated += 1
                self._context.sums.mark_compensation(operand)
        self._remainders.clear()

    def _watch_if_due(
        self, op: Operator, target: torch.Tensor, args: tuple
    ) -> UpdatedTensor | None:
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
            self._archive(key)
            watched = self._watched[key] = self._start_watching(op, target, storage)
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
        due = is_due(watched.calls, 4) or (self._context.stack and self._context.pace.is_sampled)
        return watched if due else None

    def _start_watching(self, op: Operator, target: torch.Tensor, storage: Any) -> UpdatedTensor:
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
                name = origin.maker
            else:
                name = context.names.parameter_name(target) or name
        elif (
            origin.kind in ("parameter", "buffer")
            and self._optimizer is None
            and torch._C._current_autograd_node() is None
        ):
            role = "tensor"
            name = origin.maker
        elif self._optimizer is not None:
            role = "state"
            name = f"of shape {tuple(target.shape)}"
        return UpdatedTensor(
            StorageWeakRef(storage), name, target.dtype, role, op.name, innermost_site()
        )

    def _repeat(
        self, op: Operator, watched: UpdatedTensor, args: tuple, kwargs: dict, index: int | None
    ) -> _Sample:
        target = _list_item(args[0], index)

        def widen(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                part = _sampled_part(value, target)
                if part.is_floating_point():
                    return part.to(torch.float32, copy=True)
                return part
            item = _list_item(value, index)
            return value if item is value else [widen(item)]

        widened = [widen(value) for value in args]
        expected = widened[0] if index is None else widened[0][0]
        old_values = expected.clone()
        with torch.no_grad():
            op.func(*widened, **{key: widen(value) for key, value in kwargs.items()})
        operand = _list_item(args[1], index) if len(args) > 1 else None
        adds = (
            op.name.endswith("add_")
            and isinstance(operand, torch.Tensor)
            and operand.dtype == target.dtype
            and operand.shape == target.shape
        )
        return _Sample(watched, target, old_values, expected, operand if adds else None)

    def _archive(self, key: tuple[int, str]) -> None:
        """Keeps what an entry showed before the entry is dropped."""
        old = self._watched.pop(key, None)
        if old is not None and self._is_lost(old):
            archived = self._archived[(old.role, old.op, str(old.site))]
            if len(archived) < 64:
                archived.append(old)

    @staticmethod
    def _is_lost(watched: UpdatedTensor) -> bool:
        if watched.compensated and 2 * watched.compensated >= watched.samples:
            return False
        if watched.role == "parameter" and not watched.op.endswith("copy_"):
            enough = 1
        else:
            enough = 3
        return (
            watched.samples >= enough
            and watched.movement_share < MIN_MOVEMENT
            and not watched.from_master
        )

    def on_forward_start(self) -> None:
        self._look_for_remainders()
        for key in [key for key, watched in self._watched.items() if watched.storage.expired()]:
            self._archive(key)

    def findings(self) -> list[Finding]:
        """One finding for the parameters, one for other tensors that are updated in place."""
        for key in list(self._watched):
            self._archive(key)
        groups: dict[str, list[UpdatedTensor]] = defaultdict(list)
        for (role, _, _), archived in self._archived.items():
            groups[role] += archived
        if groups["parameter"]:
            findings = [_parameters_finding(groups["parameter"], groups["state"])]
        else:
            findings = []
        if lost := groups["tensor"]:
            first = lost[0]
            facts = {
                "ops": ", ".join(dict.fromkeys(w.op for w in lost)),
                "shown": ", ".join(list(dict.fromkeys(w.name for w in lost))[:4]),
            }
            findings.append(
                say(
                    "TR018",
                    site_place(first.site),
                    site_detail("updated at", first.site),
                    **facts,
                    **_loss_facts(lost),
                )
            )
        return findings


def _parameters_finding(lost: list[UpdatedTensor], states: list[UpdatedTensor]) -> Finding:
    decay = [w for w in lost if "mul_" in w.op and "addcmul" not in w.op]
    moves = [w for w in lost if w not in decay] or decay
    first = moves[0]
    low_name = dtype_name(moves[0].dtype)
    names = list(dict.fromkeys(w.name for w in moves))
    details = site_detail("updated at", first.site)
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
                f"{len(states)} optimizer states in {low_name} lose their decay as well ({ops})",
            ),
        )
    facts = {
        "only_decay": moves is decay,
        "shown": join_names(names, 4),
        "bits": significant_bits(low_name),
    }
    return say(
        "TR012",
        site_place(first.site, names[0]),
        details,
        **facts,
        samples=sum(w.samples for w in moves),
        **_loss_facts(moves),
    )


def _loss_facts(lost: list[UpdatedTensor]) -> dict[str, Any]:
    """dtype, its rounding, the share of the fp32 movement, and the share of elements that did not
    change, both in percent.
    """
    low_name = dtype_name(lost[0].dtype)
    share = 100 * sum(w.agreement for w in lost) / sum(w.expected_norm for w in lost)
    return {
        "word": low_name,
        "unit": eps(low_name) / 2,
        "share": share,
        "still": 100 * sum(w.unchanged for w in lost) / sum(w.samples for w in lost),
    }


def _list_item(value: Any, index: int | None) -> Any:
    """The argument for one tensor of a foreach op; the value itself where it is the same for all."""
    if index is not None and isinstance(value, (list, tuple)) and len(value) > index:
        return value[index]
    return value


def _sampled_part(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The elements of an operand that belong to the sampled elements of the target."""
    if target.numel() <= SAMPLE or value.numel() == 1:
        return value.detach()
    return value.detach().expand_as(target).reshape(-1)[:SAMPLE]


SUM_SAMPLE = 4_096  # elements of a sum that are followed in fp32
# forwards a sum must span: within one forward it may be a residual stream, which is bf16 by design
_MIN_FORWARDS = 8
_MAX_SUM_ERROR = (
    5e-3  # relative error of a sum above which it is reported; one rounding to bf16 is 2e-3
)


@dataclass(slots=True)
class _Sum:
    storage: StorageWeakRef
    dtype: torch.dtype
    name: str
    site: Site | None
    is_gradient: bool
    fp32: torch.Tensor
    version: int
    in_model: bool  # added to by a forward or a backward
    additions: int = 0
    forwards: set[int] = field(default_factory=set)
    last_forward: int = 0
    error: float = 0.0
    measured_at: int = 0  # additions when `error` was measured
    is_compensation: bool = (
        False  # stores the rounding errors of additions to another tensor (Kahan)
    )


class Sums(Watcher):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._reported: dict[tuple[bool, Any], list[_Sum]] = {}

    def record_addition(self, op: Operator, args: tuple, kwargs: dict) -> None:
        """Called before an in-place addition to a low-precision tensor that is no parameter,
        outside an optimizer's step.
        """
        target = args[0]
        addend = args[1]
        if (
            not isinstance(addend, torch.Tensor)
            or isinstance(target, torch.nn.Parameter)
            or not target.numel()
        ):
            return
        key = _storage_key(target)
        running_sum = self._sums.get(key)
        if (
            running_sum is None
            or running_sum.storage.expired()
            or running_sum.version != target._version
            or running_sum.dtype != target.dtype
        ):
            if running_sum is not None:
                self._archive(running_sum)
            running_sum = self._sums[key] = self._start_watching(target)
        elif (
            running_sum.additions >= _MIN_FORWARDS
            and running_sum.additions & (running_sum.additions - 1) == 0
        ):
            self._measure(running_sum, target)
        factor = kwargs.get("alpha", 1)
        if op.name == "sub_":
            factor = -factor
        running_sum.fp32.add_(_sum_sample(addend.detach().expand_as(target)).float(), alpha=factor)
        running_sum.additions += 1
        running_sum.version += 1
        running_sum.last_forward = self._context.forwards
        running_sum.forwards.add(running_sum.last_forward)

    def mark_compensation(self, tensor: torch.Tensor) -> None:
        """Marks a tensor that stores the rounding errors of additions to a weight, so that its own
        rounding is harmless.
        """
        if (running_sum := self._sums.get(_storage_key(tensor))) is not None:
            running_sum.is_compensation = True

    def is_growing(self) -> bool:
        """Whether the last forward or its backward added to a sum that earlier ones began."""
        previous_forward = self._context.forwards - 1
        return any(
            running_sum.in_model
            and running_sum.last_forward == previous_forward
            and len(running_sum.forwards) > 1
            for running_sum in self._sums.values()
        )

    def _start_watching(self, target: torch.Tensor) -> _Sum:
        node = torch._C._current_autograd_node()
        variable = getattr(node, "variable", None) if node is not None else None
        if variable is not None:
            name = self._context.names.parameter_name(variable)
        else:
            name = None
        name = name or f"of shape {tuple(target.shape)}"
        inside = bool(self._context.stack) or node is not None
        storage = StorageWeakRef(target.untyped_storage())
        fp32 = _sum_sample(target).float()
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
    def _measure(running_sum: _Sum, target: torch.Tensor) -> None:
        size = float(running_sum.fp32.norm())
        if size > 0 and torch.isfinite(running_sum.fp32).all():
            running_sum.error = (
                float((_sum_sample(target).float() - running_sum.fp32).norm()) / size
            )
            running_sum.measured_at = running_sum.additions

    def measure_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer's step: measures the gradients as they are used."""
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p.grad.dtype in NARROW_FLOATS
        ]
        for gradient in gradients:
            running_sum = self._sums.get(_storage_key(gradient))
            if (
                running_sum is not None
                and running_sum.version == gradient._version
                and running_sum.additions >= _MIN_FORWARDS - 1
            ):
                self._measure(running_sum, gradient)

    def _archive(self, running_sum: _Sum) -> None:
        if (
            running_sum.error >= _MAX_SUM_ERROR
            and not running_sum.is_compensation
            and len(running_sum.forwards) >= _MIN_FORWARDS - 1
        ):
            site = None if running_sum.is_gradient else running_sum.site
            reported = self._reported.setdefault((running_sum.is_gradient, site), [])
            if len(reported) < 64:
                reported.append(running_sum)

    def on_forward_start(self) -> None:
        for key in [
            key for key, running_sum in self._sums.items() if running_sum.storage.expired()
        ]:
            self._archive(self._sums.pop(key))

    def findings(self) -> list[Finding]:
        for running_sum in self._sums.values():
            self._archive(running_sum)
        self._sums.clear()
        return [_sums_finding(sums) for sums in self._reported.values()]


def _sums_finding(sums: list[_Sum]) -> Finding:
    worst = max(sums, key=lambda running_sum: running_sum.error)
    low_name = dtype_name(worst.dtype)
    names = list(dict.fromkeys(running_sum.name for running_sum in sums))
    return say(
        "TR024",
        site_place(worst.site, names[0] if worst.is_gradient else None),
        site_detail("added at", worst.site),
        word=low_name,
        gradient=worst.is_gradient,
        off=100 * worst.error,
        after=worst.measured_at,
        shown=join_names(names, 4),
        unit=eps(low_name) / 2,
        sample=SUM_SAMPLE,
        tensors=len(names),
    )


def _sum_sample(value: torch.Tensor) -> torch.Tensor:
    return value.detach().flatten()[:SUM_SAMPLE]


def _storage_key(value: torch.Tensor) -> tuple[int, int]:
    return value.untyped_storage()._cdata, int(value.storage_offset())
