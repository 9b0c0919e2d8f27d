"""Which rows are held out: about as many as asked, copies together, for the same content always the same."""

from __future__ import annotations

import numpy as np
import pytest

from isotype.data.split import held_out, is_held_out


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_held_out_share_has_the_requested_size(share: float) -> None:
    digests = np.random.default_rng(0).integers(0, 2**63, 1000).astype(np.uint64)
    assert held_out(digests, share, 3).sum() == round(1000 * share)
    assert abs(np.mean([is_held_out(int(d), share, 3) for d in digests]) - share) < 0.05


def test_it_follows_the_content_and_the_seed_only() -> None:
    digests = np.arange(1, 301, dtype=np.uint64)
    order = np.random.default_rng(1).permutation(300)
    held = held_out(digests, 0.1, 5)
    assert (held_out(digests[order], 0.1, 5) == held[order]).all()
    assert (held_out(digests, 0.1, 6) != held).any()
    # what a stream holds out is what a file holds out first
    assert all(held[k] for k in range(300) if is_held_out(int(digests[k]), 0.05, 5)) or held.sum() < 20


def test_some_rows_are_always_left_for_training() -> None:
    assert held_out(np.array([7, 7, 9], np.uint64), 0.99, 0).tolist() in ([True, True, False], [False, False, True])
    assert held_out(np.array([7, 7, 7], np.uint64), 0.5, 0).tolist() == [False, False, False]
