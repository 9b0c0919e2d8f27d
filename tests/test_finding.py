from isotype.finding import listed


def test_a_shortened_list_counts_the_rest():
    assert listed(["a", "b", "c"], 3) == "a, b, c"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
