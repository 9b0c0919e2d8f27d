"""Chooses the held-out rows by a hash of their tokens and the run's seed only, so that all copies of a row are on the same side."""

from __future__ import annotations

import numpy as np


def held_out(digests: np.ndarray, share: float, seed: int) -> np.ndarray:
    """bool[R]: about `share` of the rows, at least one, and every copy of a row with it; never all of them.

    digests  uint64[R]  of the rows' tokens
    """
    distinct, which, copies = np.unique(digests, return_inverse=True, return_counts=True)
    order = np.argsort(places(distinct, seed), kind="stable")
    wanted = max(1, round(len(digests) * share))
    before = np.cumsum(copies[order]) - copies[order]  # rows already held when one's turn comes
    taken = order[before < wanted][: len(distinct) - 1]
    chosen = np.zeros(len(distinct), bool)
    chosen[taken] = True
    return chosen[which]


def places(digests: np.ndarray, seed: int) -> np.ndarray:
    """uint64[R]: digests mixed with a seed, evenly spread. Source: splitmix64, Steele et al. 2014."""
    with np.errstate(over="ignore"):
        x = digests.astype(np.uint64) ^ (np.uint64(seed % 2**64) * np.uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def is_held_out(digest: int, share: float, seed: int) -> bool:
    """The same choice for a stream: it decides about each row alone, since the other rows are unknown."""
    return bool(int(places(np.array([digest], np.uint64), seed)[0]) < share * 2**64)
