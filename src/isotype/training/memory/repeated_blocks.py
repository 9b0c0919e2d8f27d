"""A denoiser's plan from fewer blocks: of a run of equal blocks each adds the same bytes, so that a step with two of them and one with
three tell what any number takes.

The blocks of diffusers' transformers are members of lists that their forward walks through. Of each run of equal ones in such a list two
stay (the first is given what needs no gradient, and so it is not like the others); a further count with one more of a run gives what each
of it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, TypeVar

from torch import nn

from ...precision.apply import inner_model
from ...precision.denoiser_blocks import denoiser_blocks
from .quantised_outline import scales_of

_KEPT = 2
T = TypeVar("T")


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
