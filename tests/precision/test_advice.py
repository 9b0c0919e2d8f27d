"""The advice of every rule about precision, under all settings of one or two roles where it fires:
following it helps.

Each way out names settings of the schema with values that they do not have yet, and with them the
rule is quiet.
"""

from __future__ import annotations

import itertools
import random
import re
from contextlib import suppress

import pytest

from isotype.config.load import load
from isotype.errors import UsageError
from isotype.finding import Severity
from isotype.precision import PRESETS, resolve
from tests.api import apply_change, keep_working_fixes, resolution
from tests.api import contradictions_RULES as RULES

HALVES = ("fp32", "bf16", "fp16")
VALUES = {
    **dict.fromkeys(
        (
            "trainable",
            "compute",
            "grads",
            "reduce",
            "loss",
            "norms",
            "generate",
            "vae",
            "timesteps",
            "latents",
            "ema",
        ),
        HALVES,
    ),
    "base": (*HALVES, "nf4"),
    "optimizer": ("fp32", "bf16", "int8"),
    "rounding": ("nearest", "stochastic"),
    "loss_scaling": ("none", "dynamic"),
}
TASK_ROLES = {
    "vae": "fp32",
    "text_encoder": "compute",
    "timesteps": "fp32",
    "latents": "fp32",
    "ema": "fp32",
}


def findings_of(settings, device):
    """What is said about these settings, with the advice as a user gets it."""
    precision = {
        key.removeprefix("precision."): value
        for key, value in settings.items()
        if key.startswith("precision.")
    }
    asked = {
        "adapter": settings["adapter.kind"],
        "optimizer": settings["train.optimizer"],
        "task_roles": TASK_ROLES,
        "family": settings.get("family", "llama"),
        "micro_batches": 16,
    }
    told = []

    def listening(finding, *others):
        told.append(keep_working_fixes(finding, *others))
        return told[-1]

    with pytest.MonkeyPatch.context() as patch, suppress(UsageError):
        patch.setattr(resolution, "keep_working_fixes", listening)
        resolve(precision, device=device, sources=dict.fromkeys(settings, "run.yaml:1"), **asked)
    return told


def situations(devices):
    """Every preset with one role set, and a draw of those with two."""
    draw = random.Random(0)
    singles = [(f"precision.{role}", value) for role, values in VALUES.items() for value in values]
    for preset, adapter, optimizer, device in itertools.product(
        PRESETS, ("lora", "none"), ("adamw", "adamw8bit", "lion"), devices
    ):
        fixed = {"precision.preset": preset, "adapter.kind": adapter, "train.optimizer": optimizer}
        yield fixed, device
        for key, value in singles:
            yield fixed | {key: value}, device
            if value == "fp16":
                yield fixed | {key: value, "family": "gemma3_text"}, device
        pairs = [(one, two) for one, two in itertools.combinations(singles, 2) if one[0] != two[0]]
        for one, two in draw.sample(pairs, 12):
            yield fixed | dict((one, two)), device


# one situation of 53 is enough for every rule to fire; `make test-full` takes all of them
@pytest.mark.parametrize("every", [53, pytest.param(1, marks=pytest.mark.full)])
def test_every_advice_of_the_rules_holds_where_it_is_given(h100, t4, every):
    fired = set()
    for settings, device in itertools.islice(situations((h100, t4)), 0, None, every):
        found = findings_of(settings, device)
        before = {f.code for f in found}
        for finding in found:
            fired.add(finding.code)
            for way in ways_of(finding.fix):
                after = apply_change(settings, way)
                assert after != settings, (finding.fix, settings)
                later = findings_of(after, device)
                begun = {f.code for f in later if f.severity == Severity.ERROR} - before
                assert finding.code not in {f.code for f in later}, (finding.code, way, settings)
                assert not begun, (finding.code, way, settings)
    assert fired == set(RULES)


def ways_of(fix):
    """As a reader takes it: settings that are joined by `and`, and ways that are joined by `, or`."""
    ways = []
    for way in fix.split(", or "):
        parts = [
            part.removeprefix("remove ") for part in re.sub(r" \([^)]*\)", "", way).split(" and ")
        ]
        ways.append(
            {key: value or None for key, _, value in (part.partition(": ") for part in parts)}
        )
    return ways


def test_every_setting_that_is_advised_is_one_of_the_schema(h100, t4):
    for settings, device in itertools.islice(situations((h100, t4)), 0, None, 40):
        for finding in findings_of(settings, device):
            for way in ways_of(finding.fix):
                load(None, [f"{key}={value}" for key, value in way.items() if value is not None])


def test_a_way_is_told_with_what_it_needs_besides(h100):
    settings = {"preset": "bf16-pure", "grads": "bf16", "rounding": "nearest"}
    (warning,) = (
        w for w in resolve(settings, device=h100, adapter="none").warnings if w.code == "PR008"
    )
    assert (
        warning.fix
        == "precision.rounding: stochastic, or precision.trainable: fp32 and precision.grads: fp32"
    )
