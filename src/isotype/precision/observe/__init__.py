"""What a run really did, against what was declared: storage, arithmetic and files, seen in a few steps and compared in the others.

observer      `Observer`: parameters, gradients, states, outputs, files, and the steps in which the rest is watched
arithmetic    the dispatch mode: every operator of forward, backward, recomputation and update, judged by its role
lineage       what a value was made of, and what was lost on the way
callers       whose code asked for an operator
escapes       values that leave PyTorch
changes       what changed in a model between two looks, at no cost that shows
schedule      which steps are looked at
record        what `precision.json` says of all looks
"""

from .observation import UNSEEN, Observation
from .observer import Observer, floating_tensors, share_changed
from .schedule import is_observed

__all__ = ["UNSEEN", "Observation", "Observer", "floating_tensors", "is_observed", "share_changed"]
