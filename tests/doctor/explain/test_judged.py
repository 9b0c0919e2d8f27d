"""Verdicts on reports whose threads settle the cause."""

from __future__ import annotations

from collections import Counter

import pytest

from .judge import CASES, WRONG, count_verdicts, judge_case


def test_no_case_is_wrong_and_confident():
    verdicts = count_verdicts()
    assert verdicts[WRONG] == 0
    assert verdicts["right cause and fix"] >= 63
    assert verdicts["open, true cause not listed"] <= 5
    assert verdicts["silent"] == 0


def test_the_first_look_is_the_published_figure():
    first_look: dict[int, Counter[str]] = {number: Counter() for number in range(1, 7)}
    for case in CASES:
        if "first_look" in case:
            first_look[case.get("round", 1)][case["first_look"]] += 1
    assert first_look[1] == {
        "right cause and fix": 12,
        "right cause": 2,
        "open, right cause first": 12,
        "open, another cause first": 3,
        "silent": 1,
        WRONG: 3,
    }
    assert first_look[2] == {
        "right cause and fix": 2,
        "right cause": 1,
        "open, right cause first": 4,
        WRONG: 1,
    }
    assert first_look[3] == {
        "right cause and fix": 16,
        "right cause": 2,
        "open, right cause first": 11,
        "open, another cause first": 2,
        "open, true cause not listed": 7,
        "silent": 7,
        WRONG: 3,
    }
    assert first_look[4] == {
        "right cause and fix": 6,
        "right cause": 1,
        "open, right cause first": 11,
        "open, another cause first": 3,
        "open, true cause not listed": 2,
        "silent": 2,
        WRONG: 2,
    }
    assert first_look[5] == {
        "right cause and fix": 5,
        "open, right cause first": 6,
        "open, true cause not listed": 1,
    }
    assert first_look[6] == {
        "right cause and fix": 23,
        "right cause": 1,
        "open, right cause first": 13,
        "open, another cause first": 4,
        "open, true cause not listed": 3,
        "silent": 2,
        WRONG: 3,
    }


@pytest.mark.parametrize("name", ["float64 coordinates on MPS", "bf16 losses to numpy"])
def test_a_decided_cause_that_is_not_the_true_one_is_wrong(name):
    case = next(case for case in CASES if case["name"] == name)
    assert judge_case({**case, "cause_words": "another cause"}) == WRONG
    assert judge_case({**case, "never": case["cause_words"]}) == WRONG
