"""Which steps are looked at: the first, every `every`-th, and one more in each stretch of so many, drawn from the run's seed.

A module that does something else in other steps cannot know which. The number of a step decides, never the process, so that a resumed
run looks at the steps at which the undisturbed one did.
"""

from __future__ import annotations

import random


def is_observed(step: int, *, every: int, seed: int, total: int) -> bool:
    """Whether `step` (from 1) is looked at; a run shorter than three stretches is divided into three."""
    if step == 1 or step % every == 0:
        return True
    length = max(2, min(every, -(-total // 3)))
    stretch = (step - 1) // length
    drawn = random.Random(f"{seed} {stretch}").randrange(length)
    return step - 1 == stretch * length + drawn
