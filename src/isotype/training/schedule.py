"""The course of the learning rate: warm-up, then cosine, linear, constant or warmup-stable-decay. A function of the step, without state."""

from __future__ import annotations

import math

from ..config.schema import TrainSection


def warmup_steps(train: TrainSection, total: int) -> int:
    """`warmup` below 1 is a share of the steps, from 1 on a number of steps."""
    return round(train.warmup * total) if train.warmup < 1 else int(train.warmup)


def learning_rate(train: TrainSection, step: int, total: int) -> float:
    """The learning rate of step `step`, counted from 1, of `total`."""
    warmup = warmup_steps(train, total)
    if step <= warmup:
        return train.learning_rate * step / (warmup + 1)
    done = (step - warmup - 1) / max(1, total - warmup)  # 0 at the first full step, just below 1 at the last
    floor = train.min_learning_rate
    if train.schedule == "cosine":
        factor = floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2
    elif train.schedule == "linear":
        factor = floor + (1 - floor) * (1 - done)
    elif train.schedule == "wsd":
        decaying = max(0.0, step - 1 - (1 - train.decay) * total) / max(1.0, train.decay * total)
        factor = 1 - (1 - floor) * min(1.0, decaying)
    else:
        factor = 1.0
    return train.learning_rate * factor


def repeats_in_a_step(rows_per_step: int, rows: int) -> str | None:
    """A warning about a step that takes more rows than the data has; None if each row comes at most once in a step."""
    if rows_per_step <= rows:
        return None
    there = "there is 1" if rows == 1 else f"there are {rows}"
    return f"a step takes {rows_per_step} rows and {there}: each comes {rows_per_step / rows:.3g} times in every step"
