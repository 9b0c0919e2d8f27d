"""What code beside a step, such as a trainer's callback, writes into weights, gradients and optimizer states: a reader of the tape.

Such code may compute what it likes in any dtype, as statistics for a log. It breaks the declared precision only where values that passed
through a narrower dtype, or through fp64, arrive in a tensor of the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dtypes import FLOATS, itemsize, name
from ..precision.apply import declared_dtype, is_quantised
from ..precision.precision import Precision
from .observer import states_of
from .operators import CAST, CREATE, ROUND, Operator
from .origin import Caller, caller
from .record import Observation
from .tape import tape
from .values import BUFFER, NOTHING, WEIGHT, Lineage, Lineages, address, float_word, joined, plain_tensors

_KEPT = Lineage(WEIGHT | BUFFER)  # by the code since an earlier call, or made by another library
_GRID = "a grid"


class _Trained(NamedTuple):
    """A tensor that only training should write. Its dtype is the one that its role declares."""

    tensor: Tensor
    role: str
    what: str


class WrittenBack:
    """Follows values through the operators of this block, and adds to an observation what it finds.

    by  whose code runs: `MyDecay.on_step_end`
    """

    def __init__(self, seen: Observation, model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision, by: str) -> None:
        self.seen, self.model, self.optimizer, self.precision, self.by = seen, model, optimizer, precision, by
        self._tape = tape(self._ran)
        self._lineages = Lineages()
        self._callers: dict[str, Caller] = {}
        self._trained = {address(t.tensor): t for t in self._tensors()}
        for trained in self._trained.values():
            self._lineages.set(trained.tensor, Lineage(WEIGHT))

    def __enter__(self) -> WrittenBack:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)
        for trained in self._tensors():  # `p.data = ...` and `p.grad = ...` are no operators
            if address(trained.tensor) not in self._trained:
                self._judge(trained, self._lineages.of(trained.tensor) or _KEPT)

    def _ran(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        out = op(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._look(op, args, kwargs, out)
        return out

    def _tensors(self) -> Iterator[_Trained]:
        p = self.precision
        for full, parameter in self.model.named_parameters():
            if is_quantised(parameter) or not parameter.is_floating_point():
                continue
            declared = declared_dtype(self.model, full, parameter, p)
            if name(parameter.dtype) == declared:
                yield _Trained(parameter.data, "trainable" if parameter.requires_grad else "base", "weights")
            if parameter.grad is not None and name(parameter.grad.dtype) == p.grads:
                yield _Trained(parameter.grad, "grads", "gradients")
            states = self.optimizer.state.get(parameter, {})
            for key, word in states_of(parameter, states):
                if word == p.optimizer and states[key].is_floating_point():
                    yield _Trained(states[key], "optimizer", "states of the optimizer")

    def _look(self, op: Operator, args: Any, kwargs: Any, out: Any) -> None:
        inputs, outputs = plain_tensors([args, kwargs], []), plain_tensors(out, [])
        if op.kind == CREATE:
            for tensor in outputs:
                self._lineages.set(tensor, NOTHING)
            return
        lineages = [self._of(tensor) for tensor in inputs]
        made = joined(lineages)
        if lost := self._lost(op, inputs, lineages, outputs if made.from_ else []):
            by = caller()
            self._callers.setdefault(by.place, by)
            made = replace(made, lost=made.lost | {(word, by.place) for word in lost})
        written = [value for writes, value in zip(op.writes, args) if writes]
        for tensor in plain_tensors([*written, kwargs.get("out")], []):
            trained = self._trained.get(address(tensor))
            if trained is not None:
                self._judge(trained, made)
            self._lineages.set(tensor, made if trained is None else Lineage(WEIGHT))
        for tensor in outputs:
            if not any(self._lineages.same(tensor, given) for given in inputs):
                self._lineages.set(tensor, made)

    def _of(self, tensor: Tensor) -> Lineage:
        known = self._lineages.of(tensor)
        if known is None:
            known = _KEPT if tensor.numel() > 1 else NOTHING
            self._lineages.set(tensor, known)
        return known

    def _lost(self, op: Operator, inputs: list[Tensor], lineages: list[Lineage], outputs: list[Tensor]) -> set[str]:
        """The dtypes other than fp32 that values pass through here. What is made of nothing, as a mask or noise, loses nothing."""
        data = [tensor for tensor, lineage in zip(inputs, lineages) if lineage.from_]
        words = {word for t in [*data, *outputs] if t.numel() > 1 and (word := float_word(t.dtype)) is not None}
        if op.kind == ROUND and data:
            words.add(_GRID)
        if op.kind == CAST and any(tensor.is_floating_point() for tensor in data):
            words |= {name(t.dtype) for t in outputs if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool}
        return words - {"fp32"}

    def _judge(self, trained: _Trained, made: Lineage) -> None:
        declared = name(trained.tensor.dtype)
        lost = [(word, place) for word, place in sorted(made.lost) if _loses(word, declared)]
        for word, place in lost:
            by = self._callers[place]
            self.seen.report(
                trained.role, f"{self.by} writes {trained.what} that passed through {word} at {place}", symbol=self.by, observed=word,
                declared=declared, file=by.file, line=by.line, cause="its code computes them in that dtype",
                fix=f"compute them in {declared} there, or leave them to the optimizer",
            )  # fmt: skip
        if not lost and made.from_ & BUFFER:
            why = "it kept them since an earlier call, or another library made them: what they passed through is not seen"
            self.seen.unobserved.setdefault(f"{trained.what} that {self.by} writes", why)


def _loses(word: str, declared: str) -> bool:
    if word not in FLOATS:
        return True  # integers, a grid
    return word != declared and (word == "fp64" or itemsize(word) <= itemsize(declared))
