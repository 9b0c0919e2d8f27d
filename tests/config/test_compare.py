"""Which differences a resumed run may have."""

from __future__ import annotations

from isotype.config.load import load
from tests.api import ALLOWED_CHANGES, PATH_KEYS, compare, key_schemas

BASE = load(None, ["model.name=m", "data.train=d"]).config


def test_each_key_may_or_may_not_change_on_resume():
    allowed = {
        "train.steps=9": True,
        "data.on_bad_row=skip": True,
        "train.seed=1": False,
        "model.name=n": False,
        "adapter.r=8": False,
    }
    for override, may in allowed.items():
        changes = compare(BASE, load(None, ["model.name=m", "data.train=d", override]).config)
        assert [(c.key, c.allowed) for c in changes] == [(override.partition("=")[0], may)]


def test_a_renamed_folder_is_not_said_to_be_another_model():
    model, seed = compare(
        BASE, load(None, ["model.name=moved/m", "data.train=d", "train.seed=1"]).config
    )
    assert (
        str(model)
        == "model.name: m -> moved/m (it names other data or another model, unless the same was moved or renamed)"
    )
    assert str(seed).endswith("(the steps so far were trained with the old value)")


def test_auto_is_compared_as_what_it_is_here():
    resolved = load(None, ["model.name=m", "data.train=d", "precision.preset=bf16-lora"]).config
    assert compare(resolved, BASE, auto_preset="bf16-lora") == []
    (change,) = compare(resolved, BASE, auto_preset="fp32")
    assert (change.key, change.new, change.allowed) == ("precision.preset", "fp32", False)


def test_what_auto_chose_to_recompute_is_no_change():
    resolved = load(
        None,
        [
            "model.name=m",
            "data.train=d",
            "train.gradient_checkpointing=layers",
            "train.keep_attention=true",
        ],
    ).config
    assert compare(resolved, BASE) == []
    (change, kept) = compare(BASE, resolved)
    assert (change.key, kept.key) == ("train.gradient_checkpointing", "train.keep_attention")


def test_every_key_that_may_change_exists():
    assert set(ALLOWED_CHANGES) | set(PATH_KEYS) <= set(key_schemas())
