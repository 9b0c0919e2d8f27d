"""What a memory plan makes of a model without data: 4-bit layers of bitsandbytes, and a denoiser with fewer blocks.

The blocks of diffusers' transformers are members of lists that their forward walks through. Of a run of equal blocks each adds the same
bytes, so that a step with two of them (the first is given what needs no gradient, and so it is not like the others) and one with three tell
what any number takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...ops.packed import PackedState
from ...precision.apply import denoiser_blocks, inner_model

BLOCK, INNER_BLOCK = 64, 256  # elements a scale, scales a scale of scales
_KEPT = 2  # of each run of equal blocks
T = TypeVar("T")


def quantise_outline(model: Any, compute: torch.dtype, *, layers: Collection[nn.Module], double: bool = True) -> None:
    """Replaces `layers` of `model` by nf4 layers on the meta device; with `double` their scales are quantised too."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child in layers:
                setattr(parent, name, _layer(child, compute, double))
    model.is_loaded_in_4bit = True  # what PEFT asks


def _layer(linear: nn.Linear, compute: torch.dtype, double: bool) -> nn.Module:
    import bitsandbytes
    from bitsandbytes.functional import QuantState

    with torch.device("meta"):
        layer = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=compute, quant_type="nf4"
        )
        if linear.bias is not None:
            layer.bias.data = linear.bias.data
        elements = linear.in_features * linear.out_features
        scales = -(-elements // BLOCK)
        weight: Any = nn.Parameter(torch.empty(-(-elements // 2), 1, dtype=torch.uint8), requires_grad=False)
        weight.compress_statistics, weight.quant_type = double, "nf4"
        inner = QuantState(absmax=torch.empty(-(-scales // INNER_BLOCK)), code=torch.empty(256), blocksize=INNER_BLOCK, dtype=torch.float32)
        weight.quant_state = QuantState(
            absmax=torch.empty(scales, dtype=torch.uint8 if double else torch.float32),
            shape=torch.Size((linear.out_features, linear.in_features)), code=torch.empty(16), blocksize=BLOCK, quant_type="nf4",
            dtype=compute, offset=torch.empty(()) if double else None, state2=inner if double else None,
        )  # fmt: skip
    layer.weight = weight
    layer.support_avx512bf16_for_cpu = False
    return layer


def scales_of(parameter: Tensor) -> list[Tensor]:
    """The tensors that belong to a packed weight but are not parameters of the model: scales and code tables."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    if isinstance(state, PackedState):
        return list(state.tensors.values())
    inner = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return [t for t in (state.absmax, state.code, *inner) if isinstance(t, Tensor)]


def take_scales(made: Any, parameter: Tensor, make: Any) -> None:
    """Copies the quantisation state of `parameter` to its replacement `made`, with `make` applied to every tensor."""
    import copy

    state = getattr(parameter, "quant_state", None)
    if state is None:
        return
    if isinstance(state, PackedState):
        made.quant_state = state.mapped(make)
        return
    new = copy.copy(state)
    new.absmax, new.code = make(state.absmax), make(state.code)
    if state.nested:
        new.offset, new.state2 = make(state.offset), copy.copy(state.state2)
        new.state2.absmax, new.state2.code = make(state.state2.absmax), make(state.state2.code)
    made.quant_state = new


def scratch() -> dict[Any, Any]:
    """The memory that bitsandbytes' 4-bit product needs besides its result: the dequantised weight."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        return {}

    def widened(x: Tensor, packed: Tensor, shape: Any, *_: Any, **__: Any) -> int:
        elements = int(shape[0]) * int(shape[1])
        return elements * x.element_size() + 4 * elements // BLOCK

    return {torch.ops.bitsandbytes.gemm_4bit.default: widened}


@dataclass(frozen=True)
class Run:
    """`count` equal blocks of a list, from the position `first` on."""

    blocks: nn.ModuleList
    first: int
    count: int


def runs_of(model: nn.Module) -> list[Run]:
    """The runs of equal blocks in the lists of a denoiser, in their order; empty for models whose blocks are not all in such lists."""
    owner = inner_model(model)
    blocks = set(denoiser_blocks(owner))
    lists = [child for child in owner.children() if isinstance(child, nn.ModuleList) and blocks.issuperset(child)]
    if not blocks or sum(len(one) for one in lists) != len(blocks):
        return []
    runs = []
    for one in lists:
        first = 0
        for _, equal in groupby(one, key=_form):
            count = len(list(equal))
            runs.append(Run(one, first, count))
            first += count
    return runs


def _form(block: Any) -> tuple[Any, ...]:
    """What decides the bytes of a block: classes, weights, and whether it recomputes."""
    modules = tuple((name, type(module).__qualname__) for name, module in block.named_modules())
    weights = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad, tuple(tuple(t.shape) for t in scales_of(p)))
        for name, p in block.named_parameters()
    )
    return modules, weights, getattr(block, "gradient_checkpointing", False) is not False


@contextmanager
def shortened(runs: list[Run], counts: list[int]) -> Iterator[None]:
    """Within this block each run has the number of its blocks that `counts` gives."""
    lists = {id(run.blocks): run.blocks for run in runs}
    before = {key: dict(one._modules) for key, one in lists.items()}
    try:
        for key, one in lists.items():
            whole = list(before[key].values())
            left = [b for run, n in zip(runs, counts) if run.blocks is one for b in whole[run.first : run.first + n]]
            one._modules = {str(i): block for i, block in enumerate(left)}
        yield
    finally:
        for key, one in lists.items():
            one._modules = before[key]


def counted_by_runs(model: nn.Module, count: Callable[[], T]) -> T:
    """What `count()` gives for the model, whose fields are numbers that grow by the same amount with each further block of a run.

    It is called once for the whole model where that is no more work.
    """
    runs = runs_of(model)
    long = [i for i, run in enumerate(runs) if run.count > _KEPT + 1]
    fewest = [_KEPT if i in long else run.count for i, run in enumerate(runs)]
    if not long or (len(long) + 1) * (sum(fewest) + 1) >= sum(run.count for run in runs):
        return count()
    with shortened(runs, fewest):
        base = count()
    total = {f.name: getattr(base, f.name) for f in fields(base)}  # type: ignore[arg-type]  # a dataclass
    for i in long:
        with shortened(runs, [n + (k == i) for k, n in enumerate(fewest)]):
            more = count()
        for name in total:
            total[name] += (runs[i].count - _KEPT) * (getattr(more, name) - getattr(base, name))
    return type(base)(**total)
