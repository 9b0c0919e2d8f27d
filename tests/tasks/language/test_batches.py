import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isotype.data.rows import IGNORED, Row, Share
from isotype.tasks.language.batches import collate
from isotype.tasks.language.task import step_flops
from isotype.training.feed import mixed_order
from tests.models import tiny


def test_collate_pads_to_a_multiple_of_eight_and_supervises_no_padding():
    batch = collate([Row((5, 6, 7), (IGNORED, 6, 7), 1), Row((5,) * 9, (5,) * 9, 0)], pad_id=0)
    assert tuple(batch.input_ids.shape) == (2, 16)
    assert batch.tokens == 12
    assert batch.supervised == 2 + 8  # the first label of a row predicts nothing
    assert batch.labels[0, 3:].eq(IGNORED).all()
    assert batch.attention_mask.sum() == 12


shares = st.lists(st.tuples(st.integers(1, 30), st.floats(0.1, 10.0)), min_size=2, max_size=4).map(lambda pairs: [Share(*p) for p in pairs])


@pytest.mark.full
@given(shares, st.integers(0, 4), st.booleans())
def test_an_epoch_of_weighted_sources_has_their_shares(mix, epoch, shuffle):
    order = mixed_order(mix, seed=3, epoch=epoch, shuffle=shuffle)
    total, weight, begin = sum(s.rows for s in mix), sum(s.weight for s in mix), 0
    assert len(order) == total
    for share in mix:
        count = sum(begin <= i < begin + share.rows for i in order)
        assert abs(count - total * share.weight / weight) < 1
        begin += share.rows


def test_a_weighted_source_goes_on_where_the_last_epoch_left_it():
    mix = [Share(10, 3.0), Share(30, 1.0)]  # the small one comes three times an epoch, of the large one a third
    epochs = [mixed_order(mix, seed=0, epoch=e, shuffle=True) for e in range(3)]
    assert [sorted(i for i in epoch if i < 10) for epoch in epochs] == [sorted([*range(10)] * 3)] * 3
    large = [i for epoch in epochs for i in epoch if i >= 10]
    assert sorted(large) == list(range(10, 40)), "three epochs of a third are every row once"


# --- FLOPs of a step, by hand.


def test_attention_is_counted_by_the_layers_own_heads():
    plain = tiny("llama")  # 2 layers of 4 heads of 8
    assert step_flops(plain, plain.config).per_square == 6 * 2 * 4 * 8
    # two sliding layers of 4 heads of 8, a full one of 4 heads of 16: transformers refuses to name one size for all
    differing = tiny("gemma4_unified_text", num_hidden_layers=3, head_dim=8, global_head_dim=16)
    assert step_flops(differing, differing.config).per_square == 6 * 4 * (8 + 8 + 16)
    products = [m for m in differing.modules() if isinstance(m, torch.nn.Linear)]
    assert step_flops(differing, differing.config).per_token == 6 * sum(m.weight.numel() for m in products)


def test_of_stacked_experts_those_are_counted_that_a_token_is_sent_to():
    model = tiny("mixtral")  # two of four experts
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    stacked = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    assert step_flops(model, model.config).per_token == 6 * linear + 6 * stacked / 2
