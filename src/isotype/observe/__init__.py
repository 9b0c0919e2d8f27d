"""Records what a program computes, and compares the storage, arithmetic and files of a run with its
declared precision.

tape       the dispatch mode that sees each operator, and the stack of running modules
operators  the effect of each operator on dtypes
origin     the code that called an operator
values     tensors, their memory, the kinds of tensors from which each was computed, and one call of
           an operator
contract   the rules, which decide what deviations from the declared precision are violations and
           what deviations are only counted
continuity compares the values after an update with those before the next step
observer   `Observer` checks parameters, gradients, states, buffers and files, and chooses the steps
           that are checked
record     collects all observations for the file `precision.json`

Attributes are imported when first used, so that `origin` can be imported without the observer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lazy_attributes import load_attribute

if TYPE_CHECKING:
    from .observer import Observer as Observer
    from .observer import is_observed as is_observed
    from .record import UNSEEN_REASONS as UNSEEN_REASONS
    from .record import Observation as Observation
    from .tape import mark_observing as mark_observing
    from .values import floating_tensors as floating_tensors

# name -> the module that defines it, which is imported when the name is first used
_LAZY = {
    "UNSEEN_REASONS": "isotype.observe.record",
    "Observation": "isotype.observe.record",
    "Observer": "isotype.observe.observer",
    "floating_tensors": "isotype.observe.values",
    "is_observed": "isotype.observe.observer",
    "mark_observing": "isotype.observe.tape",
}
__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    globals()[name] = load_attribute(__name__, _LAZY, name)
    return globals()[name]
