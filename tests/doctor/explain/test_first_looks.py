"""Reports of rounds 7 to 10: the verdicts of the first look, and what decides their messages today."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from isotype.doctor.explain import explain

_LINES = Path(__file__).with_name("first_looks.tsv").read_text(encoding="utf-8").splitlines()
ROWS = [tuple(line.split("\t")) for line in _LINES if not line.startswith("#")]


def test_the_first_looks_are_the_published_figures():
    verdicts: dict[str, Counter[str]] = {str(round_): Counter() for round_ in range(7, 11)}
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
    assert verdicts["10"] == {
        "decided, right": 12,
        "open, true cause listed": 8,
        "open, true cause not listed": 4,
        "silent": 16,
        "no dtype error, none reported": 8,
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
    ("sgl-project/sglang#28889", "two fp8 formats in one product"),
    ("intel/torch-xpu-ops#1742", "a GradScaler on a GPU without fp64"),
    ("alibaba/Pai-Megatron-Patch#680", "a faulty kernel of this version"),
    ("instantX-research/InstantStyle-Plus#2", "the latents are nan before the VAE"),
    ("m-bain/whisperX#1143", "the model runs on a CPU"),
    ("jax-ml/jax#27144", "a custom derivative in another dtype"),
    ("meta-pytorch/executorch-examples#115", "half precision in a Metal kernel of this macOS"),
    ("vllm-project/vllm#36854", "fp8 arithmetic on a GPU before Ada"),
]
# words of messages of other programs, which `isotype doctor run` cannot look into
OTHER_PROGRAMS = re.compile("Optype|compute type|operand type mismatch|failed assertion")


@pytest.mark.parametrize(("report", "cause"), LISTED_SINCE)
def test_a_cause_that_was_missing_is_listed(report: str, cause: str):
    (message,) = [row[5] for row in ROWS if row[3] == report]
    finding = explain([message + "\n"])[0]
    details = dict(finding.details)
    assert cause in details["sure"]
    assert ("isotype doctor run" in details["sure"]) == (OTHER_PROGRAMS.search(message) is None)


def test_nan_of_a_division_by_zero_has_a_fix():
    """pytorch/ao#3356: the fp8 scale of a row of zeros is 0."""
    (message,) = [row[5] for row in ROWS if row[3] == "pytorch/ao#3356"]
    (finding,) = explain([message + "\n"])
    assert "give scales and deviations a lower bound" in dict(finding.details)["or"]


def test_a_cast_that_a_conversion_to_fp16_left():
    """microsoft/onnxconverter-common#320: the converter changes a Cast's output, not the Cast."""
    (finding,) = explain(
        [
            "Load model failed:Type Error: Type (tensor(float16)) of output arg (_to_copy) of node"
            " (node__to_copy) does not match expected type (tensor(float)).\n"
        ]
    )
    assert finding.code == "EX034"
    assert "`to` of that Cast" in finding.fix
    assert "isotype doctor run" not in dict(finding.details)["sure"]


def test_a_refusal_of_both_half_dtypes_recommends_fp32():
    (finding,) = explain(["RuntimeError: this kernel does not support bf16/fp16 on this board\n"])
    assert (finding.code, finding.fix.partition(" there")[0]) == ("EX030", "use fp32")
    (finding,) = explain(["ValueError: FP8 is not supported on this board\n"])
    assert (finding.code, finding.fix.partition(" there")[0]) == ("EX030", "use bf16")


def test_an_indexed_write_into_a_cache_names_the_cache():
    """pytorch/torchchat#604: a quantised layer returns fp32 keys, and the cache is bf16."""
    (message,) = [row[5] for row in ROWS if row[3] == "pytorch/torchchat#604"]
    (finding,) = explain(["the first step fills the KV cache\n", message + "\n"])
    assert "quantised layers that compute in fp32" in finding.cause
