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
"""

from .observer import Observer, is_observed
from .record import UNSEEN_REASONS, Observation
from .tape import mark_observing
from .values import floating_tensors

__all__ = [
    "UNSEEN_REASONS",
    "Observation",
    "Observer",
    "floating_tensors",
    "is_observed",
    "mark_observing",
]
