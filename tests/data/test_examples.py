"""Rows as a person reads them."""

from isotype.data.rows import IGNORED, MOST_TOKENS, Row, examples


class Letters:
    """Token n is the n-th letter."""

    @staticmethod
    def decode(ids, **_):
        return "".join(chr(97 + i % 26) for i in ids)


def row(length, prompt):
    ids = tuple(range(length))
    return Row(ids, (IGNORED,) * prompt + ids[prompt:], prompt)


def test_the_first_the_median_and_the_longest_with_what_is_learnt():
    found = examples([row(4, 2), row(9, 1), row(6, 3)], Letters())
    assert [(one["which"], one["row"], one["tokens"], one["learnt"]) for one in found] == [
        ("the first row", 0, 4, 2), ("of median length", 2, 6, 3), ("the longest", 1, 9, 8),
    ]  # fmt: skip
    assert found[0]["parts"] == [{"text": "ab", "learnt": False}, {"text": "cd", "learnt": True}]

    assert examples([], Letters()) == []
    (one,) = examples([row(MOST_TOKENS + 5, 1)], Letters())
    assert one["left_out"] == 5
    assert sum(len(part["text"]) for part in one["parts"]) == MOST_TOKENS
