"""The rows of a ledger: launches of one step with their bytes and FLOPs, and their times, computed
from stated efficiencies.

`Launches` records them from a step that runs on meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isotype.ops.cross_entropy.rule import LossRule
from isotype.ops.library import library_op
from isotype.ops.linear_cross_entropy import op as head
from isotype.ops.recomputed_layer import running_checkpointed_layers


def _kernel_losses(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    loss_T = torch.empty(logits_TV.shape[0], dtype=torch.float32, device=logits_TV.device)
    return loss_T, torch.empty_like(loss_T)


@library_op(
    "cross_entropy_kernel_forward(Tensor logits, Tensor targets) -> (Tensor, Tensor)",
    fake=_kernel_losses,
)
def _kernel_forward(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError(
        "this operator has no data: the kernel is triton.cross_entropy_forward"
    )


@library_op(
    "cross_entropy_kernel_backward(Tensor logits, Tensor targets, Tensor lse, Tensor(a!) out) -> ()",
    fake=lambda *_: None,
)
def _kernel_backward(logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor, out_TV: Tensor) -> None:
    raise NotImplementedError(
        "this operator has no data: the kernel is triton.cross_entropy_backward"
    )


class Planned:
    """The loss's two GPU kernels as operators on tensors without data, for plans: what they read
    and write.
    """

    @staticmethod
    def cross_entropy_forward(
        logits_TV: Tensor,
        targets_T: Tensor,
        rule: LossRule,
        out_TV: Tensor | None = None,
        dloss: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        loss_T, lse_T = _kernel_forward(logits_TV, targets_T)
        if out_TV is not None:
            _kernel_backward(logits_TV, targets_T, lse_T, out_TV)
        return loss_T, lse_T

    @staticmethod
    def cross_entropy_backward(
        logits_TV: Tensor,
        targets_T: Tensor,
        lse_T: Tensor,
        dloss_T: Tensor,
        rule: LossRule,
        out_TV: Tensor,
        classes: int,
        first: int = 0,
    ) -> Tensor:
        _kernel_backward(logits_TV, targets_T, lse_T, out_TV)
        return out_TV


Kind = Literal["product", "attention", "attention backward", "memory", "copy"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Launches of one kind.

    phase   forward, recompute, backward or update
    kind    "copy" is one between the host and the device, beside everything else
    name    the operator with its sizes, or what a published program calls it
    bytes   read and written by one launch, each tensor once
    flops   of one launch
    source  file and line where a published program does this; "" for what was recorded
    """

    phase: str
    name: str
    kind: Kind
    bytes: float
    flops: float = 0.0
    count: int = 1
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches.

    flops      FLOP/s of dense bf16 products as published
    bandwidth  bytes/s as published
    host       bytes/s one way between the host and the device: PCIe 5.0 x16 or 4.0 x16, as
               specified
    launch     seconds below which no launch takes less; assumed, as what a kernel with next to no
               work takes
    shares     of each that a kind of launch reaches

    A copy's 85% of PCIe is what pinned memory gives large blocks elsewhere; it was not measured
    either. Shares: products 0.80 and copies 0.90 were measured on an H200 (788 TFLOP/s at 8192 x
    8192 x 8192, 4.3 TB/s); elementwise kernels are assumed to reach 85% of a copy. Attention's are
    cuDNN's on an H100 as Shah et al. 2024 (FlashAttention-3, figures 5 and 6) plot them for causal
    heads of 128. No step of a model was measured: a ledger's times are for comparison, not
    predictions.
    """

    flops: float
    bandwidth: float
    host: float = 64e9
    launch: float = 5e-6
    copy: float = 0.85
    product: float = 0.80
    attention: float = 0.60
    attention_backward: float = 0.48
    memory: float = 0.765

    def seconds(self, row: Row) -> float:
        if row.kind == "copy":
            return row.count * row.bytes / (self.host * self.copy)
        share = {
            "product": self.product,
            "attention": self.attention,
            "attention backward": self.attention_backward,
        }.get(row.kind)
        compute = row.flops / (self.flops * share) if share else 0.0
        return row.count * max(compute, row.bytes / (self.bandwidth * self.memory), self.launch)


def without_recomputation(rows: Iterable[Row]) -> list[Row]:
    """Of a program that could keep all: no recomputes, and no copies between the host and the
    device.
    """
    return [row for row in rows if row.phase != "recompute" and row.kind != "copy"]


def step_seconds(rows: Iterable[Row], rates: Rates) -> float:
    """Of a step: its work, and how much longer than that the copies of forward or of backward take."""
    rows = list(rows)
    return sum(work(rows, rates).values()) + sum(waiting(rows, rates).values())


def work(rows: Iterable[Row], rates: Rates, *, kind: str | None = None) -> dict[str, float]:
    """Seconds of forward, backward with its recomputes, and update: of everything except copies, or
    of one kind of launch.
    """
    found = {"forward": 0.0, "backward": 0.0, "update": 0.0}
    for row in rows:
        if row.kind != "copy" if kind is None else row.kind == kind:
            found["backward" if row.phase == "recompute" else row.phase] += rates.seconds(row)
    return found


def waiting(rows: Iterable[Row], rates: Rates) -> dict[str, float]:
    rows = list(rows)
    copies = work(rows, rates, kind="copy")
    return {
        phase: max(0.0, copies[phase] - seconds) for phase, seconds in work(rows, rates).items()
    }


def product(
    phase: str,
    name: str,
    m: int,
    n: int,
    k: int,
    *,
    adds: bool = False,
    itemsize: int = 2,
    out: int | None = None,
    source: str = "",
) -> Row:
    """[m k] @ [k n]; `adds` onto a result that is read too; `out` is the result's item size."""
    out = itemsize if out is None else out
    moved = itemsize * (m * k + k * n) + out * m * n * (2 if adds else 1)
    return Row(
        phase=phase, name=name, kind="product", bytes=moved, flops=2.0 * m * n * k, source=source
    )


def attention(
    phase: str,
    name: str,
    batch: int,
    heads: int,
    key_heads: int,
    length: int,
    depth: int,
    source: str = "",
) -> Row:
    """Causal, in bf16: two products forward, five backward, of half the scores."""
    backward = phase == "backward"
    half = batch * heads * length * length * depth
    q, k = 2 * batch * heads * length * depth, 2 * batch * key_heads * length * depth
    moved = (4 * q + 4 * k) if backward else (2 * q + 2 * k)
    kind: Kind = "attention backward" if backward else "attention"
    return Row(
        phase=phase,
        name=name,
        kind=kind,
        bytes=moved,
        flops=half * (5.0 if backward else 2.0),
        source=source,
    )


def memory(phase: str, name: str, moved: float, source: str = "") -> Row:
    return Row(phase=phase, name=name, kind="memory", bytes=moved, source=source)


def grouped(rows: Iterable[Row]) -> list[Row]:
    """Equal rows as one with their count, in the order in which they first came."""
    counts: dict[Row, int] = {}
    for row in rows:
        key = replace(row, count=1)
        counts[key] = counts.get(key, 0) + row.count
    return [replace(row, count=count) for row, count in counts.items()]


# no launch: memory is handed out, or a tensor's description is asked for
_FREE = {
    "_unsafe_view",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "resize_",
}
# the first argument is written without being read
_WRITES = {"copy_", "zero_", "fill_"}
# only the first argument's description is read
_MAKES = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
_GATHERS = {"embedding", "index_select", "gather", "index"}


class Launches(TorchDispatchMode):
    """While active, `rows` gets a Row for each operator that a device would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.updating = False

    @property
    def phase(self) -> str:
        if self.updating:
            return "update"
        if running_checkpointed_layers and running_checkpointed_layers[-1].is_recomputing:
            return "recompute"
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.isotype.linear_cross_entropy_forward.default:
            return self._head(*args)
        result = function(*args, **kwargs)
        name = function._schema.name.split("::")[1]
        if name not in _FREE and not _is_view(function):
            self._note(function, name, args, kwargs, result)
        return result

    def _head(self, *args: Any) -> Any:
        """For PyTorch this is one operator. It launches one or two products and one loss per chunk,
        and each is recorded.
        """
        inside: Any = head._forward
        with self, patch.object(head, "choose_row_kernels", lambda x: Planned):
            return inside.__wrapped__(*args)

    def _note(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_meta]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_meta]
        if not inputs and not outputs:
            return
        read = (
            inputs[1:]
            if name in _WRITES
            else inputs[:-1]
            if name == "cross_entropy_kernel_backward"
            else inputs
        )
        if name in _MAKES:
            if not result.dim():
                # a zero that stands for a tensor nobody reads: made once, kept for the process
                # (isotype.ops.recomputed_layer)
                return
            read = []
        if kwargs.get("beta") == 0:
            # the addend is not read
            read = [t for t in read if t is not args[0]]
        # what an operator changes in place and does not return
        if not outputs:
            outputs = [
                t
                for t, a in zip(args, function._schema.arguments)
                if isinstance(t, Tensor) and a.alias_info is not None
            ]
        if kwargs.get("out") is not None and not _accumulates(name, args, kwargs):
            read = [t for t in read if t is not kwargs["out"]]
        if name in _GATHERS:
            # the rows that it gives, of however many
            read = [*outputs, *(t for t in read if not t.is_floating_point())]
        if name == "host_copy":
            shape = " x ".join(map(str, args[0].shape))
            phase = "forward" if self.phase == "forward" else "backward"
            self.rows.append(
                Row(phase=phase, name=f"{name} {shape}", kind="copy", bytes=_bytes(args[0]))
            )
            return
        kind, flops, sizes = _work(name, args, result)
        moved = sum(map(_bytes, read)) + sum(map(_bytes, outputs))
        if moved or flops:
            self.rows.append(
                Row(phase=self.phase, name=f"{name} {sizes}", kind=kind, bytes=moved, flops=flops)
            )


def _is_view(function: Any) -> bool:
    returns = function._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _accumulates(name: str, args: Any, kwargs: Any) -> bool:
    return name == "addmm" and args[0] is kwargs["out"]


def _bytes(t: Tensor) -> int:
    """Of the elements that lie in memory: an expanded one is read once."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def _work(name: str, args: Any, result: Any) -> tuple[Kind, float, str]:
    """(kind, FLOPs, sizes) of one launch."""
    if name in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
        left, right = (
            (args[1], args[2]) if name in ("addmm", "addmm_", "baddbmm") else (args[0], args[1])
        )
        batch = left.shape[0] if left.dim() == 3 else 1
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        return "product", 2.0 * batch * m * k * n, f"{m} x {k} x {n}"
    if "attention" in name:
        backward = "backward" in name
        q = args[1] if backward else args[0]
        # rows of documents, [T N D], are counted as one: an upper bound
        positions_first = name.startswith("_flash")
        shape = tuple(q.shape) if q.dim() == 4 else (1, *q.shape)
        batch, heads, length, depth = (
            (shape[0], shape[2], shape[1], shape[3]) if positions_first else shape
        )
        half = float(batch * heads * length * length * depth)
        return (
            ("attention backward", 5 * half, f"{length} x {depth}")
            if backward
            else ("attention", 2 * half, f"{length} x {depth}")
        )
    shapes = [t for t in tree_leaves(result) if isinstance(t, Tensor)] or [
        t for t in tree_leaves(args) if isinstance(t, Tensor)
    ]
    return "memory", 0.0, " x ".join(map(str, shapes[0].shape)) if shapes else ""
