"""Chooses the observed steps: the first, every `every`-th, and a random one between two of these, drawn from the run's seed.

The random steps make it likely that a module is found that computes differently in some steps only. The choice depends only on the
number of the step and the seed, so that a resumed run observes the same steps as an uninterrupted one.
"""

from __future__ import annotations

import random


def is_observed(step: int, *, every: int, seed: int, total: int) -> bool:
    """Whether `step` (counted from 1) is observed. A run shorter than 3 x `every` steps is divided into three stretches."""
    if step == 1 or step % every == 0:
        return True
    length = max(2, min(every, -(-total // 3)))
    stretch = (step - 1) // length
    drawn = random.Random(f"{seed} {stretch}").randrange(length)
    return step - 1 == stretch * length + drawn
