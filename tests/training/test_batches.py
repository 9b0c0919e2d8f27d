from hypothesis import given
from hypothesis import strategies as st
from tests.models import rows

from isotype.data.rows import IGNORED, Row
from isotype.training.batches import RowStream, collate, epoch_order


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_is_a_permutation_of_seed_and_number(count, seed, epoch):
    order = epoch_order(count, seed=seed, epoch=epoch, shuffle=True)
    assert sorted(order) == list(range(count))
    assert order == epoch_order(count, seed=seed, epoch=epoch, shuffle=True)


@given(st.integers(1, 12), st.lists(st.integers(1, 7), max_size=12), st.integers(0, 30))
def test_a_stream_resumes_at_its_position(count, takes, start):
    every = rows(count)
    whole, resumed = RowStream(every, seed=3, shuffle=True), RowStream(every, seed=3, shuffle=True, position=start)
    whole.take(start)
    for n in takes:
        assert whole.take(n) == resumed.take(n)


def test_collate_pads_to_a_multiple_of_eight_and_supervises_no_padding():
    batch = collate([Row((5, 6, 7), (IGNORED, 6, 7), 1), Row((5,) * 9, (5,) * 9, 0)], pad_id=0)
    assert tuple(batch.input_ids.shape) == (2, 16)
    assert batch.tokens == 12
    assert batch.supervised == 2 + 8  # the first label of a row predicts nothing
    assert batch.labels[0, 3:].eq(IGNORED).all()
    assert batch.attention_mask.sum() == 12
