"""The advice of the preflight and of refused settings, where it is given: each way out is accepted, is new, and ends the finding."""

from __future__ import annotations

import re

import pytest

from isotype.training.finite import calmer_steps
from isotype.training.preflight.static import more_rows_in_a_step_than_there_are, never_leaves_warmup, vanishing_updates

FULL = {"kind": "none"}
NEAREST = {"preset": "bf16-pure", "rounding": "nearest"}
# check, settings where it speaks -> of each way out the words that tell it, and the settings of one who follows it
CASES = {
    "PF002, steps": (never_leaves_warmup, {"train": {"steps": 4, "warmup": 8}}, [
        (r"train\.warmup below 4", {"train": {"warmup": 3}}), (r"a share of the steps \(0\.03\)", {"train": {"warmup": 0.03}}),
    ]),
    "PF003, bf16 weights": (vanishing_updates, {"adapter": FULL, "precision": NEAREST, "train": {"learning_rate": 1e-5}}, [
        (r"precision\.rounding: stochastic", {"precision": {"rounding": "stochastic"}}),
        (r"precision\.trainable: fp32", {"precision": {"trainable": "fp32"}}),
        (r"a train\.learning_rate above 1e-05", {"train": {"learning_rate": 1e-2}}),
    ]),
    "PF003, fp32 weights": (vanishing_updates, {"adapter": FULL, "train": {"learning_rate": 1e-11}}, [
        (r"a train\.learning_rate above 1e-11", {"train": {"learning_rate": 1e-3}}),
    ]),
    "PF003, no updates": (vanishing_updates, {"train": {"learning_rate": 0.0}}, [
        (r"train\.learning_rate above 0", {"train": {"learning_rate": 1e-3}}),
    ]),
    "PF003, huge updates": (vanishing_updates, {"train": {"learning_rate": 10.0}}, [
        (r"train\.learning_rate: 2e-4 for an adapter", {"train": {"learning_rate": 2e-4}}),
    ]),
    "PF021": (more_rows_in_a_step_than_there_are, {"train": {"batch_size": 64, "accumulate": 4}}, [
        (r"train\.batch_size x train\.accumulate at most \d+", {"train": {"batch_size": 4, "accumulate": 1}}),
    ]),
}  # fmt: skip


def merged(settings, change):
    return {section: settings.get(section, {}) | change.get(section, {}) for section in settings.keys() | change.keys()}


@pytest.mark.parametrize("case", CASES)
def test_each_way_out_of_the_preflight_ends_its_finding(case, subject):
    check, settings, ways = CASES[case]
    (finding,) = check(subject("before", **settings))
    assert len(ways) == len(re.split(r", or |, (?=precision)", finding.fix)), finding.fix
    for number, (words, change) in enumerate(ways):
        assert re.search(words, finding.fix), finding.fix
        after = merged(settings, change)
        assert after != settings
        assert list(check(subject(f"after{number}", **after))) == []


REFUSED = [
    ["train.gradient_checkpointing=layers+offload"],
    ["train.gradient_checkpointing=none", "train.checkpointed_layers=2"],
    ["train.gradient_checkpointing=auto", "train.checkpointed_layers=every 2"],
    ["train.gradient_checkpointing=none", "train.keep_attention=true"],
    ["train.gradient_checkpointing=auto", "train.keep_attention=all"],
    ["train.gradient_checkpointing=layers", "train.memory=20GiB"],
    ["train.gradient_checkpointing=none", "train.memory=20GiB"],
]


@pytest.mark.parametrize("clip", [None, 0.0, 1.0])
def test_clipping_is_advised_where_nothing_clips(clip):
    said = calmer_steps(1e-3, clip)
    assert ("train.clip" in said) is not bool(clip)
    assert "0.001" in said
