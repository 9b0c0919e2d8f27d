"""Casts to a dtype that no role has: a violation where an operator reads their result, and a line where it is only kept.

A program may keep a copy of its values in half for a log. The finding of such a cast waits, by the storage of its result: operators that
only move values, as views, copies to another device and writes into a list's tensor, pass it on, and any other reports it, in a later
observed step too. What is still kept at the end of a step, or became a number of Python, is said to be unobserved. What was freed
unread changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import operators as ops
from .lineage import address, plain_tensors, stored
from .observation import Observation

# operators that give a value, or whether two are the same, to Python
_TO_PYTHON = frozenset(("_local_scalar_dense", "item", "equal"))


@dataclass(eq=False)
class Finding:
    """What `Observation.report` is given once the result is read.

    where, place  the module or the part of the step, and the line
    graded        whether a gradient may pass through the cast
    left          whether its values became a number of Python, or left PyTorch
    """

    role: str
    message: str
    why: dict[str, Any]
    word: str
    where: str
    place: str
    graded: bool
    left: bool = False
    told: bool = False


class KeptCasts:
    """Storage -> the findings of casts whose results are in it. One for all observed steps of a run."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[StorageWeakRef, set[Finding]]] = {}
        self._left: set[Finding] = set()

    def add(self, result: Tensor, finding: Finding) -> bool:
        """Whether the finding waits; it cannot where the result has no storage of its own."""
        return self._put(result, {finding})

    def holds(self, tensor: Tensor) -> bool:
        return bool(self._of(tensor))

    def see(self, op: ops.Operator, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor], seen: Observation) -> None:
        """Looks at one operator, after it ran."""
        if not self._waiting or op.kind == ops.CREATE:
            return
        read = [(tensor, findings) for tensor in inputs if (findings := self._of(tensor))]
        if not read:
            return
        written = [value for writes, value in zip(op.writes, args) if writes]
        receivers = [*outputs, *plain_tensors([*written, kwargs.get("out")], [])]
        for tensor, findings in read:
            if op.kind in (ops.EXACT, ops.CAST) and all(receiver.dtype == tensor.dtype for receiver in receivers):
                for receiver in receivers:
                    self._put(receiver, findings)
                if op.name in _TO_PYTHON:
                    self._leave(findings)
            else:
                _tell(findings, seen)

    def leaves(self, tensor: Tensor) -> None:
        """A tensor's values leave PyTorch."""
        self._leave(self._of(tensor))

    def gradient_passes(self, word: str, seen: Observation) -> None:
        """Autograd casts a gradient back from this dtype: what no operator read in the forward may still round gradients."""
        for _, findings in self._waiting.values():
            _tell({finding for finding in findings if finding.graded and finding.word == word}, seen)

    def finish(self, seen: Observation) -> None:
        """Says what is kept at the end of a step, and forgets what was freed."""
        self._waiting = {key: entry for key, entry in self._waiting.items() if not entry[0].expired()}
        for finding in self._remaining():
            if not finding.told:
                how = "became Python's numbers or left PyTorch" if finding.left else "are kept and were not read in this step"
                seen.unobserved.setdefault(
                    f"values in {finding.word} in {finding.where}",
                    f"{finding.place} casts values to {finding.word}, which {how}: what is done with them elsewhere is not seen",
                )
        self._left.clear()

    def _remaining(self) -> Iterator[Finding]:
        yield from self._left
        for _, findings in self._waiting.values():
            yield from findings

    def _of(self, tensor: Tensor) -> set[Finding]:
        found = self._waiting.get(address(tensor))
        return found[1] if found else set()

    def _put(self, tensor: Tensor, findings: set[Finding]) -> bool:
        key, values = address(tensor), stored(tensor)
        if not key or values is None:
            return False
        if key not in self._waiting:
            # it keeps the address from being reused, and not the memory from being freed
            self._waiting[key] = StorageWeakRef(values.untyped_storage()), set()
        self._waiting[key][1].update(findings)
        return True

    def _leave(self, findings: set[Finding]) -> None:
        for finding in findings:
            finding.left = True
        self._left |= findings


def _tell(findings: set[Finding], seen: Observation) -> None:
    for finding in sorted(findings, key=lambda each: each.message):
        finding.told = True
        seen.report(finding.role, finding.message, **finding.why)
