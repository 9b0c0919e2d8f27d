"""Verdicts on reports whose threads settle the cause."""

from __future__ import annotations

from collections import Counter

import pytest

from .judge import CASES, WRONG, count_verdicts, judge_case


def test_no_case_is_wrong_and_confident():
    verdicts = count_verdicts()
    assert verdicts[WRONG] == 0
    assert verdicts["right cause and fix"] >= 27


def test_the_first_look_is_the_published_figure():
    first_look = Counter(case["first_look"] for case in CASES if "first_look" in case)
    assert first_look == {
        "right cause and fix": 12,
        "right cause": 2,
        "open, right cause first": 12,
        "open, another cause first": 3,
        "silent": 1,
        WRONG: 3,
    }


@pytest.mark.parametrize("name", ["float64 coordinates on MPS", "fp16 overflows in backward"])
def test_a_decided_cause_that_is_not_the_true_one_is_wrong(name):
    case = next(case for case in CASES if case["name"] == name)
    assert judge_case({**case, "cause_words": "another cause"}) == WRONG
    assert judge_case({**case, "never": case["cause_words"]}) == WRONG
