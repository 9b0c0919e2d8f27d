"""Sources as a user names them."""

import pytest

from isotype.config.sources import short_names


@pytest.mark.parametrize(
    ("given", "said"),
    [(None, ""), ("a/chats.jsonl", "chats.jsonl"), ("hf:org/set", "set"), ("data/", "data"),
     (["a.csv", {"name": "b/c.csv", "weight": 2}], "a.csv, c.csv"), ([{"weight": 1}], "?")],
)  # fmt: skip
def test_sources_are_named_for_a_line(given, said):
    assert short_names(given) == said
