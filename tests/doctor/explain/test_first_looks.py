"""Reports of rounds 7 to 9: the verdicts of the first look, and what decides their messages today."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from isotype.doctor.explain import explain

_LINES = Path(__file__).with_name("first_looks.tsv").read_text(encoding="utf-8").splitlines()
ROWS = [tuple(line.split("\t")) for line in _LINES if not line.startswith("#")]


def test_the_first_looks_are_the_published_figures():
    verdicts: dict[str, Counter[str]] = {"7": Counter(), "8": Counter(), "9": Counter()}
    for round_, verdict, _, _, _, _ in ROWS:
        verdicts[round_][verdict] += 1
    assert verdicts["7"] == {
        "decided, right": 10,
        "decided, wrong": 3,
        "open, true cause listed": 22,
        "open, true cause not listed": 9,
        "silent": 5,
        "no dtype error, none reported": 1,
    }
    assert verdicts["8"] == {
        "decided, right": 15,
        "decided, wrong": 1,
        "open, true cause listed": 18,
        "open, true cause not listed": 10,
        "silent": 4,
        "no dtype error, none reported": 2,
    }
    assert verdicts["9"] == {
        "decided, right": 14,
        "open, true cause listed": 6,
        "open, true cause not listed": 1,
        "silent": 7,
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[3])
def test_only_the_recorded_cause_decides_a_message(row: tuple[str, ...]):
    """A message that two operands differ is open. A reader checked each cause that decides."""
    _, _, decided, _, _, message = row
    finding = explain([message + "\n"])[0]
    sure = dict(finding.details).get("sure", "")
    cause = (finding.cause or "").split(":")[0]
    assert (f"{finding.code} {cause}" if sure.startswith("decided") else "") == decided


# where it was reported, words of the list of causes: the true cause was missing at the first look
LISTED_SINCE = [
    ("microsoft/Olive#1287", "a constant or table of another dtype than the exported weights"),
    ("pytorch/pytorch#144040", "the backward of a sparse product outside autocast"),
    ("vllm-project/compressed-tensors#670", "the run's dtype is not the one that scale takes"),
]


@pytest.mark.parametrize(("report", "cause"), LISTED_SINCE)
def test_a_cause_that_was_missing_is_listed(report: str, cause: str):
    (message,) = [row[5] for row in ROWS if row[3] == report]
    finding = explain([message + "\n"])[0]
    details = dict(finding.details)
    assert cause in details["sure"]
    assert ("isotype doctor run" in details["sure"]) == ("Optype" not in message)


def test_an_indexed_write_into_a_cache_names_the_cache():
    """pytorch/torchchat#604: a quantised layer returns fp32 keys, and the cache is bf16."""
    (message,) = [row[5] for row in ROWS if row[3] == "pytorch/torchchat#604"]
    (finding,) = explain(["the first step fills the KV cache\n", message + "\n"])
    assert "quantised layers that compute in fp32" in finding.cause
