"""Detects updates that rounding makes ineffective. For an in-place op on a low-precision tensor,
the module repeats the op in fp32 on a sample of the elements, and compares the two changes. The
module also compares low-precision sums over many steps with the same sums in fp32. Many small
errors of additions can become a large error of the sum.

The module checks everything that is updated in place. These are the updates by optimizers (single,
foreach and fused) and by weight decay, and the updates of optimizer states, averaged weights and
accumulators. Stochastic rounding is not reported. The values that it writes are exact in the low
precision, so they change the tensor by the same amount as in fp32. The module treats a tensor as a
sum if only `add_` or `sub_` writes to it. Examples of sums are `.grad` over several micro-batches,
a buffer, and the total of a metric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...dtypes import eps, format_dtype, significant_bits
from ...finding import Finding, join_names
from ...observe.operators import NARROW_FLOATS, Operator
from ...observe.origin import Site, innermost_site, site_place
from .context import AfterHook, BeforeHook, Context, Watcher, is_due, make_finding, site_detail

SAMPLE = 16_384  # the number of elements of a tensor that are compared
MIN_MOVEMENT = 0.5  # below this share of the fp32 change the update counts as rounded away
# arithmetic that changes a tensor in place
_ARITHMETIC = ("add_", "sub_", "mul_", "div_", "lerp_", "addcdiv_", "addcmul_")
# operators that change a tensor in place
UPDATE_OPS = frozenset(
    {*_ARITHMETIC, "copy_", *(f"_foreach_{name}" for name in _ARITHMETIC), "_foreach_copy_"}
) | frozenset(f"_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
_MAX_REMAINDERS = 64  # the number of additions per step whose rounding errors are searched
_MIN_STORED_SHARE = 0.9  # the share of elements whose rounding error an operand must contain
_MAX_LIST_ITEMS = 2  # the number of tensors of a list that are compared


@dataclass(slots=True)
class UpdatedTensor:
    """One tensor that one op updates. For some of the updates, the real change is measured. Each
    measurement adds the dot product of the real change and the expected change to `agreement`, and
    the squared norm of the expected change to `expected_norm`.
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
    is_from_master: bool = False
    # the number of samples whose rounding error was found in the operand afterwards, as in
    # compensated (Kahan) summation
    compensated_samples: int = 0

    @property
    def movement_share(self) -> float:
        return self.agreement / self.expected_norm if self.expected_norm > 0 else 1.0


@dataclass(slots=True)
class _Sample:
    updated_tensor: UpdatedTensor
    tensor: torch.Tensor
    old_values: torch.Tensor
    expected: torch.Tensor
    operand: torch.Tensor | None  # the added tensor, which may store the rounding error


class Updates(Watcher):
    """Watches in-place ops and optimizer steps."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._updated_tensors: dict[tuple[int, str], UpdatedTensor] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._remainders: list[tuple[UpdatedTensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._lost_updates: dict[tuple[str, str, str], list[UpdatedTensor]] = defaultdict(list)

    def on_step_start(self, optimizer: torch.optim.Optimizer) -> None:
        self._context.sums.measure_gradients(optimizer)
        self._optimizer = optimizer

    def on_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = None
        self._find_compensation()

    def op_hooks(self) -> dict[str, tuple[BeforeHook, AfterHook | None]]:
        return dict.fromkeys(UPDATE_OPS, (self.before_update, self.after_update))

    def before_update(self, op: Operator, args: tuple, kwargs: dict) -> list[_Sample] | None:
        """Computes in fp32 how the op should change the tensors that it writes to. Tensors that are
        not checked in this step are skipped.
        """
        is_list = not isinstance(args[0], torch.Tensor)
        targets = args[0] if is_list else args[:1]
        if self._context.is_caller_autocast_on:
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
            for i, target in enumerate(targets)
            if target.dtype in NARROW_FLOATS and (target.numel() > 1 or not is_list)
        ][:_MAX_LIST_ITEMS]:
            item_args = tuple(_list_item(a, index) for a in args) if is_list else args
            updated_tensor = self._watch_if_due(op, targets[index], item_args)
            if updated_tensor is not None:
                samples.append(
                    self._repeat(op, updated_tensor, args, kwargs, index if is_list else None)
                )
        return samples or None

    def after_update(self, samples: Sequence[_Sample]) -> None:
        """Compares the real change with the expected change."""
        for sample in samples:
            real = _sampled_part(sample.tensor, sample.tensor).float() - sample.old_values
            expected = sample.expected - sample.old_values
            size = float(expected.double().square().sum())
            if size == 0 or not torch.isfinite(expected).all():
                continue
            updated_tensor = sample.updated_tensor
            updated_tensor.samples += 1
            updated_tensor.agreement += float((real.double() * expected.double()).sum())
            updated_tensor.expected_norm += size
            updated_tensor.unchanged += float((real == 0).float().mean())
            if sample.operand is not None and len(self._remainders) < _MAX_REMAINDERS:
                self._remainders.append(
                    (updated_tensor, sample.tensor, sample.operand, expected - real)
                )

    def _find_compensation(self) -> None:
        """Detects compensated sums. In a compensated sum, the rounding errors of a step's additions
        are stored in the operands, and the next step adds these errors again.
        """
        for updated_tensor, tensor, operand, remainder in self._remainders:
            stored = _sampled_part(operand, tensor).float()
            if (
                float(
                    torch.isclose(
                        stored,
                        remainder,
                        rtol=2 * eps(format_dtype(updated_tensor.dtype)),
                        atol=1e-30,
                    )
                    .float()
                    .mean()
                )
                > _MIN_STORED_SHARE
            ):
                updated_tensor.compensated_samples += 1
                self._context.sums.mark_compensation(operand)
        self._remainders.clear()

    def _watch_if_due(
        self, op: Operator, target: torch.Tensor, args: tuple
    ) -> UpdatedTensor | None:
        is_copy = op.name.endswith("copy_")
        source = args[1]
        if is_copy and not (
            isinstance(source, torch.Tensor)
            and source.dtype == torch.float32
            and source.numel() == target.numel()
        ):
            return None
        storage = target.untyped_storage()
        key = (storage._cdata, op.name)
        updated_tensor = self._updated_tensors.get(key)
        if updated_tensor is None or updated_tensor.storage.expired():
            self._archive(key)
            updated_tensor = self._updated_tensors[key] = self._start_watching(op, target, storage)
        updated_tensor.calls += 1
        if is_copy:
            # a copy from a tensor that still exists is a copy from master weights, where rounding
            # loses nothing
            updated_tensor.is_from_master = updated_tensor.is_from_master or (
                updated_tensor.source is not None and not updated_tensor.source.expired()
            )
            updated_tensor.source = StorageWeakRef(source.untyped_storage())
        if updated_tensor.role == "tensor" and updated_tensor.calls == 1:
            return None  # it may not live longer than one step
        should_compare = is_due(updated_tensor.calls, 4) or (
            self._context.stack and self._context.schedule.is_sampled
        )
        return updated_tensor if should_compare else None

    def _start_watching(self, op: Operator, target: torch.Tensor, storage: Any) -> UpdatedTensor:
        context = self._context
        origin = context.provenance.get(target)
        role = "tensor"
        name = f"of shape {tuple(target.shape)}"
        if isinstance(target, torch.nn.Parameter) and target.requires_grad:
            is_average = (
                self._optimizer is None
                and target.grad is None
                and ("lerp_" in op.name or "mul_" in op.name)
            )
            # a tensor that mul_ decays before this add_ is an average too
            if not is_average and self._optimizer is None and target.grad is None:
                decay = self._updated_tensors.get((storage._cdata, op.name.replace("add_", "mul_")))
                is_average = decay is not None and decay.role == "tensor"
            role = "tensor" if is_average else "parameter"
            if origin.kind == "parameter":
                name = origin.creator
            else:
                name = context.names.parameter_name(target) or name
        elif (
            origin.kind in ("parameter", "buffer")
            and self._optimizer is None
            and torch._C._current_autograd_node() is None
        ):
            role = "tensor"
            name = origin.creator
        elif self._optimizer is not None:
            role = "state"
            name = f"of shape {tuple(target.shape)}"
        return UpdatedTensor(
            StorageWeakRef(storage), name, target.dtype, role, op.name, innermost_site()
        )

    def _repeat(
        self,
        op: Operator,
        updated_tensor: UpdatedTensor,
        args: tuple,
        kwargs: dict,
        index: int | None,
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
        is_addition = (
            op.name.endswith("add_")
            and isinstance(operand, torch.Tensor)
            and operand.dtype == target.dtype
            and operand.shape == target.shape
        )
        return _Sample(
            updated_tensor, target, old_values, expected, operand if is_addition else None
        )

    def _archive(self, key: tuple[int, str]) -> None:
        """Stops watching a tensor. If rounding has made updates of the tensor ineffective, they are
        still reported.
        """
        updated_tensor = self._updated_tensors.pop(key, None)
        if updated_tensor is not None and self._is_lost(updated_tensor):
            archived = self._lost_updates[
                (updated_tensor.role, updated_tensor.op, str(updated_tensor.site))
            ]
            if len(archived) < 64:
                archived.append(updated_tensor)

    @staticmethod
    def _is_lost(updated_tensor: UpdatedTensor) -> bool:
        if (
            updated_tensor.compensated_samples
            and 2 * updated_tensor.compensated_samples >= updated_tensor.samples
        ):
            return False
        if updated_tensor.role == "parameter" and not updated_tensor.op.endswith("copy_"):
            min_samples = 1
        else:
            min_samples = 3
        return (
            updated_tensor.samples >= min_samples
            and updated_tensor.movement_share < MIN_MOVEMENT
            and not updated_tensor.is_from_master
        )

    def on_forward_start(self) -> None:
        self._find_compensation()
        for key in [
            key
            for key, updated_tensor in self._updated_tensors.items()
            if updated_tensor.storage.expired()
        ]:
            self._archive(key)

    def findings(self) -> list[Finding]:
        """Returns at most two findings. One is about parameters, and the other is about other
        tensors that are updated in place.
        """
        for key in list(self._updated_tensors):
            self._archive(key)
        groups: dict[str, list[UpdatedTensor]] = defaultdict(list)
        for (role, _, _), archived in self._lost_updates.items():
            groups[role] += archived
        if groups["parameter"]:
            findings = [_lost_updates_finding(groups["parameter"], groups["state"])]
        else:
            findings = []
        if lost_updates := groups["tensor"]:
            first = lost_updates[0]
            facts = {
                "ops": ", ".join(dict.fromkeys(update.op for update in lost_updates)),
                "shown": ", ".join(list(dict.fromkeys(update.name for update in lost_updates))[:4]),
            }
            findings.append(
                make_finding(
                    "TR018",
                    site_place(first.site),
                    site_detail("updated at", first.site),
                    **facts,
                    **_loss_facts(lost_updates),
                )
            )
        return findings


def _lost_updates_finding(
    lost_updates: list[UpdatedTensor], states: list[UpdatedTensor]
) -> Finding:
    decays = [
        update for update in lost_updates if "mul_" in update.op and "addcmul" not in update.op
    ]
    updates = [update for update in lost_updates if update not in decays] or decays
    first = updates[0]
    low_name = format_dtype(updates[0].dtype)
    names = list(dict.fromkeys(update.name for update in updates))
    details = site_detail("updated at", first.site)
    if decays and updates is not decays:
        rounds = (
            f"its factor (1 - learning rate * decay) rounds away too, for {len(decays)} parameters"
            " seen"
        )
        details += (("weight decay", rounds),)
    if states:
        ops = ", ".join(dict.fromkeys(update.op for update in states))
        details += (
            (
                "states",
                f"{len(states)} optimizer states in {low_name} lose their decay as well ({ops})",
            ),
        )
    facts = {
        "only_decay": updates is decays,
        "shown": join_names(names, 4),
        "bits": significant_bits(low_name),
    }
    return make_finding(
        "TR012",
        site_place(first.site, names[0]),
        details,
        **facts,
        samples=sum(update.samples for update in updates),
        **_loss_facts(updates),
    )


def _loss_facts(lost_updates: list[UpdatedTensor]) -> dict[str, Any]:
    """Returns the values that the text of a finding contains: the dtype, its rounding unit, how
    much of the fp32 change really happened (in percent), and how many of the elements did not
    change (in percent).
    """
    low_name = format_dtype(lost_updates[0].dtype)
    share = (
        100
        * sum(update.agreement for update in lost_updates)
        / sum(update.expected_norm for update in lost_updates)
    )
    return {
        "word": low_name,
        "unit": eps(low_name) / 2,
        "share": share,
        "still": 100
        * sum(update.unchanged for update in lost_updates)
        / sum(update.samples for update in lost_updates),
    }


def _list_item(value: Any, index: int | None) -> Any:
    """Returns the value of an argument for one tensor of a foreach op. If the argument is not a
    list, it applies to all tensors, so the argument itself is returned.
    """
    if index is not None and isinstance(value, (list, tuple)) and len(value) > index:
        return value[index]
    return value


def _sampled_part(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the elements of an operand that correspond to the sampled elements of the target."""
    if target.numel() <= SAMPLE or value.numel() == 1:
        return value.detach()
    return value.detach().expand_as(target).reshape(-1)[:SAMPLE]


SUM_SAMPLE = 4_096  # the number of elements of a sum that are also summed in fp32
# The minimum number of forwards that a sum spans. Within one forward it may be a residual stream,
# which is bf16 by design.
_MIN_FORWARDS = 8
_MAX_SUM_ERROR = (
    5e-3  # sums with a larger relative error are reported; one rounding to bf16 is 2e-3
)


@dataclass(slots=True)
class _RunningSum:
    storage: StorageWeakRef
    dtype: torch.dtype
    name: str
    site: Site | None
    is_gradient: bool
    fp32: torch.Tensor
    version: int
    is_in_model: bool  # whether a forward or a backward adds to it
    additions: int = 0
    forwards: set[int] = field(default_factory=set)
    last_forward: int = 0
    error: float = 0.0
    measured_at: int = 0  # the number of additions when `error` was measured
    is_compensation: bool = (
        False  # stores the rounding errors of additions to another tensor (Kahan)
    )


class Sums(Watcher):
    """Compares sums in low precision with the same sums in fp32."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._sums: dict[tuple[int, int], _RunningSum] = {}
        self._reported: dict[tuple[bool, Any], list[_RunningSum]] = {}

    def record_addition(self, op: Operator, args: tuple, kwargs: dict) -> None:
        """Called before an in-place addition to a low-precision tensor, if no optimizer step is
        running. Additions to parameters are ignored.
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
        running_sum.last_forward = self._context.forward_count
        running_sum.forwards.add(running_sum.last_forward)

    def mark_compensation(self, tensor: torch.Tensor) -> None:
        """Marks a tensor that stores the rounding errors of additions to a weight. Rounding errors
        in such a tensor are harmless.
        """
        if (running_sum := self._sums.get(_storage_key(tensor))) is not None:
            running_sum.is_compensation = True

    def is_growing(self) -> bool:
        """True if the last forward or its backward added to a sum over several forwards."""
        previous_forward = self._context.forward_count - 1
        return any(
            running_sum.is_in_model
            and running_sum.last_forward == previous_forward
            and len(running_sum.forwards) > 1
            for running_sum in self._sums.values()
        )

    def _start_watching(self, target: torch.Tensor) -> _RunningSum:
        node = torch._C._current_autograd_node()
        variable = getattr(node, "variable", None) if node is not None else None
        if variable is not None:
            name = self._context.names.parameter_name(variable)
        else:
            name = None
        name = name or f"of shape {tuple(target.shape)}"
        is_in_model = bool(self._context.stack) or node is not None
        storage = StorageWeakRef(target.untyped_storage())
        fp32 = _sum_sample(target).float()
        return _RunningSum(
            storage,
            target.dtype,
            name,
            innermost_site(),
            variable is not None,
            fp32,
            target._version,
            is_in_model,
        )

    @staticmethod
    def _measure(running_sum: _RunningSum, target: torch.Tensor) -> None:
        size = float(running_sum.fp32.norm())
        if size > 0 and torch.isfinite(running_sum.fp32).all():
            running_sum.error = (
                float((_sum_sample(target).float() - running_sum.fp32).norm()) / size
            )
            running_sum.measured_at = running_sum.additions

    def measure_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Measures the error of the gradients before an optimizer step uses them."""
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

    def _archive(self, running_sum: _RunningSum) -> None:
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


def _sums_finding(sums: list[_RunningSum]) -> Finding:
    worst = max(sums, key=lambda running_sum: running_sum.error)
    low_name = format_dtype(worst.dtype)
    names = list(dict.fromkeys(running_sum.name for running_sum in sums))
    return make_finding(
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
