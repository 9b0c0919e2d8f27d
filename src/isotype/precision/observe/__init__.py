"""Compares what a run really did with its declared precision: storage, arithmetic and files. A few steps are observed in full; in the
other steps a cheap check detects changes of the model.

observer      `Observer`: parameters, gradients, states, outputs, files, and the observed steps
arithmetic    the dispatch mode that judges every operator of forward, backward, recomputation and update by its role
made_narrow   numbers that were rounded when they were made
lineage       what each value was computed from, and which precision it lost
callers       the code that called an operator
escapes       values that leave PyTorch
kept_casts    casts whose results a program keeps, as a log in half
written_back  what code beside a step, as a callback's, writes into trained tensors
changes       the cheap check for changes of the model between observed steps
schedule      the choice of the observed steps
record        the content of `precision.json`, from all observations
"""

from .observation import UNSEEN, Observation
from .observer import Observer, floating_tensors, share_changed
from .schedule import is_observed
from .written_back import WrittenBack

__all__ = ["UNSEEN", "Observation", "Observer", "WrittenBack", "floating_tensors", "is_observed", "share_changed"]
