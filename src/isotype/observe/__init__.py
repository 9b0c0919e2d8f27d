"""Records what a program computes, and compares the storage, arithmetic and files of a run with its
declared precision.

tape       the dispatch mode and the stack of running modules, which all readers of operators share
operators  the effect of each operator on dtypes
origin     the code that called an operator
values     tensors, their memory, the inputs that each was computed from, and one call of an
           operator
contract   the rules: which deviations from the declared precision are violations, and which are
           only counted
continuity compares the values after an update with those before the next step
observer   `Observer` checks parameters, gradients, states, buffers and files, and chooses the
           observed steps
record     the content of `precision.json`, from all observations
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
