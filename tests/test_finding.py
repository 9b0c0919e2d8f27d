from isotype.finding import listed


def test_a_list_that_is_cut_says_how_many_more():
    assert listed(["a", "b", "c"], 3) == "a, b, c"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
