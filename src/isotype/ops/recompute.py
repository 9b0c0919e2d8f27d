"""What a recomputed layer leaves out: results that backward does not need, or that were kept.

A layer under checkpointing, or a half of one, runs twice: for its output, and again inside backward for what its gradients need. Ops ask
here which run it is. Nothing is left out where a hook reads what a layer gives: it would read values that were never computed. Nor in a
compiled graph, which is the same for both runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .backend import saves

# the layer that runs now, innermost last
_running: list[RecomputedLayer] = []


def _as_is(x: Any) -> Any:
    return x


class Projections:
    """What is known of one layer from the first time that it ran: whether rotation and attention alone read its query, key and value.

    `read_by_attention_alone` is None until then. A norm of queries, for example, saves them for its own backward, which needs their values.
    """

    def __init__(self) -> None:
        self.read_by_attention_alone: bool | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Projections:
        return Projections()


class RecomputedLayer:
    """One call of one layer, or of a half of one. `run` it first for the forward, then for every recompute.

    results      of the attentions in the forward, in order, where they are kept: output and logsumexp, 8 KiB and 128 bytes a token with
                 32 heads of 128 in bf16; `put` takes each away and `get` brings it back
    projections  given where attention's query, key and value are kept too, so that a recompute makes neither their products nor their
                 rotation: 12 KiB a token with 32 heads and 8 key heads of 128
    """

    def __init__(
        self,
        *,
        keep_attention: bool,
        projections: Projections | None = None,
        put: Callable[[Tensor], Any] = _as_is,
        get: Callable[[Any], Tensor] = _as_is,
    ) -> None:
        self.keep_attention, self.projections = keep_attention, projections
        self.put, self.get = put, get
        self.results, self.inputs = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        self.again = self.skips_projections = self.hooked = False
        # products whose output can be left out, by the autograd node that each made; the position of the one that is not needed again
        self.nodes, self.unused = list[int](), -1
        self.groups = 0
        self.readers: _Readers | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.recomputing, self.again, self.next, self.products = self.again, True, 0, 0
        unknown = self.projections is not None and self.projections.read_by_attention_alone is None
        self.readers = _Readers() if unknown and not self.recomputing else None
        _running.append(self)
        try:
            with self.readers or nullcontext():
                output = function(*args)
        finally:
            _running.pop()
        if not self.recomputing:
            self._decide(output)
        return output

    def _decide(self, output: Any) -> None:
        """At the end of the forward: what the recompute leaves out."""
        known, one = self.projections, self.groups == len(self.inputs) == 1
        if known is not None and self.readers is not None and self.inputs:
            known.read_by_attention_alone = one and not self.readers.others
        self.readers = None
        self.skips_projections = one and known is not None and bool(known.read_by_attention_alone) and not self.hooked
        if not self.skips_projections:
            self.inputs = []
        node = None if self.hooked else _last_term(output)
        self.unused = max((i for i, made in enumerate(self.nodes) if node is not None and made == id(node)), default=-1)
        self.nodes = []


class _Readers(TorchDispatchMode):
    """While active, `others` becomes true when anything but a rotation or an attention reads the tensors that `follow` was given."""

    def __init__(self) -> None:
        super().__init__()
        self.storages, self.followed = set[int](), list[Tensor]()
        self.others, self.inside = False, ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else PyTorch wraps this mode and imports its compiler: a second and 148 MiB in a run that compiles nothing
        return False

    def follow(self, *tensors: Tensor) -> None:
        # held: a freed storage's address may come again
        self.followed += tensors
        self.storages |= {t.untyped_storage()._cdata for t in tensors}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if self.inside != "attention" and any(t.untyped_storage()._cdata in self.storages for t in given):
            if self.inside == "rotation":
                self.follow(*(t for t in tree_leaves(result) if isinstance(t, Tensor)))
            elif not any(a.alias_info is not None and not a.alias_info.is_write for a in function._schema.returns):
                self.others = True
        return result


def _now() -> RecomputedLayer | None:
    """The layer that runs now; None outside recomputed layers and in a compiled graph."""
    return None if torch.compiler.is_compiling() or not _running else _running[-1]


def is_recomputed() -> bool:
    """Whether what runs now is a layer's forward that will be run again: what it saves for backward is dropped."""
    layer = _now()
    return layer is not None and not layer.recomputing


def is_recomputing() -> bool:
    """Whether what runs now is a layer's forward inside backward."""
    layer = _now()
    return layer is not None and layer.recomputing


def output_is_unused(node: Any) -> bool:
    """Asked once by each product whose output can be left out: whether this is a recompute in which nobody will look at it.

    node  the autograd function's own context, which becomes the output's `grad_fn`
    """
    layer = _now()
    if layer is None:
        return False
    position, layer.products = layer.products, layer.products + 1
    if layer.recomputing:
        return position == layer.unused and saves("outputs that nobody reads")
    layer.nodes.append(id(node))
    return False


def hooks_read_here() -> None:
    """Tells the layer that runs now that a hook reads a result inside it."""
    layer = _now()
    if layer is not None:
        layer.hooked = True


def projected(*outputs: Tensor) -> None:
    """Tells the layer that runs now that these are made by products whose outputs a recompute can leave out, if attention's inputs are
    kept."""
    layer = _now()
    if layer is not None and not layer.recomputing:
        layer.groups += 1
        if layer.readers is not None:
            layer.readers.follow(*outputs)


def projections_are_kept() -> bool:
    """Whether this is a recompute in which attention reads its kept query, key and value, and nobody what makes them."""
    layer = _now()
    return layer is not None and layer.recomputing and layer.skips_projections


def reading(reader: str) -> AbstractContextManager[None]:
    """Around what may read query, key and value: a `rotation`, whose results are followed in their place, or an `attention`."""
    layer = _now()
    readers = None if layer is None else layer.readers
    return nullcontext() if readers is None else _inside(readers, reader)


@contextmanager
def _inside(readers: _Readers, reader: str) -> Any:
    readers.inside = reader
    try:
        yield
    finally:
        readers.inside = ""


def attention_inputs(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value as given, or those of the forward that is recomputed now."""
    layer = _now()
    if layer is None or layer.projections is None:
        return inputs
    if layer.recomputing:
        return tuple(layer.get(t).detach() for t in layer.inputs[0]) if layer.skips_projections else inputs
    if layer.projections.read_by_attention_alone is not False:
        layer.inputs.append(tuple(layer.put(t.detach()) for t in inputs))
    return inputs


def attention_results(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`compute()`, or what it gave in the forward that is recomputed now."""
    layer = _now()
    if layer is None or not layer.keep_attention:
        return compute()
    if not layer.recomputing:
        made = compute()
        # aliases: autograd writes the graph onto the very tensors that a function returns
        layer.results.append(tuple(layer.put(t.detach()) for t in made))
        return made
    # a recompute calls what the forward called, in its order
    kept, layer.next = layer.results[layer.next], layer.next + 1
    return tuple(layer.get(t).detach() for t in kept)


def _last_term(output: Any) -> Any:
    """The node of the product that the layer's output, a sum, has as one of its terms, as it came: a sum saves nothing for backward.

    Gemma's form, a norm of the MLP's output, is none: the norm saves its input.
    """
    first, *others = output if isinstance(output, tuple) else (output,)
    if any(isinstance(t, Tensor) and t.requires_grad for t in others):
        # something else is made of what the layer computes
        return None
    node = first.grad_fn if isinstance(first, Tensor) else None
    if node is None or type(node).__name__ != "AddBackward0":
        return None
    found = [term for term, _ in node.next_functions if type(term).__name__ in ("LoraMlpBackward", "LoraLinearBackward")]
    return found[0] if len(found) == 1 else None


def unwritten(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape whose values nobody reads, in the memory of one element: its metadata is what checkpointing compares."""
    return like.new_zeros((), dtype=dtype).expand(shape)
