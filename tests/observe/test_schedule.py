"""What changes between two looks is noticed; what does not change is not."""

import torch

from isotype.observe.observer import Changes, is_observed


def test_a_large_model_is_compared_in_parts():
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(300))
    changes = Changes(model)
    model[-1].weight.data = model[-1].weight.data.half()
    assert sum(changes.found() for _ in range(3)) == 1


def test_observed_steps_depend_on_the_seed_only():
    def drawn(seed):
        return [s for s in range(1, 401) if is_observed(s, every=100, seed=seed, total=400)]

    assert {1, 100, 200, 300, 400} <= set(drawn(0))
    assert 6 <= len(drawn(0)) <= 9
    assert drawn(0) == drawn(0)
    assert len({tuple(drawn(seed)) for seed in range(8)}) > 4


def test_a_short_run_has_several_observed_steps():
    assert sum(is_observed(s, every=100, seed=0, total=6) for s in range(1, 7)) > 1
