"""Records what a program computes, and compares what a run did with its declared precision:
storage, arithmetic and files.

tape       the dispatch mode and the stack of modules that every reader shares
operators  what each operator does to dtypes
origin     whose code asked for an operator
values     tensors, their memory, what each was computed from, and one call of an operator
contract   what is a violation of the declared precision, and what is only counted
continuity what an update left, compared before the next step
observer   `Observer`: parameters, gradients, states, buffers, files, and the choice of the observed
           steps
record     the content of `precision.json`, from all observations
"""

from .observer import Observer, is_observed
from .record import UNSEEN_REASONS, Observation
from .tape import observing
from .values import floating_tensors

__all__ = [
    "UNSEEN_REASONS",
    "Observation",
    "Observer",
    "floating_tensors",
    "is_observed",
    "observing",
]
