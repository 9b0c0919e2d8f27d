"""Settings of an adapter from elsewhere: refused in one line with the file and the key, before PEFT reads
them.
"""

import json
import time

import pytest
import torch

from isotype.errors import UsageError
from isotype.model.adapter import load_adapter
from tests.api import check_patterns, read_pairs
from tests.flipped_bytes import check_flipped_bytes
from tests.models import lora, tiny

HANGS = "([a-z0-9._]+)+!"


@pytest.fixture
def adapter(tmp_path):
    lora(tiny(), target_modules=["q_proj", "up_proj"]).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change(adapter, **changes):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


DAMAGES = [
    ("lora_alpha", float("nan"), "nan, expected a number"),
    ("lora_alpha", 1e308, r"1e\+308, expected a number"),
    ("lora_alpha", "16", "'16', expected a number"),
    ("r", 10**9, "1000000000, expected an integer from 1 to 65,536"),
    ("r", 60_000, "60000, expected at most 4, the largest rank in adapter_model.safetensors"),
    ("r", 0, "0, expected an integer"),
    ("base_model_name_or_path", ["a"], r"\['a'\], expected a text"),
    ("rank_pattern", {"q_proj": 60_000}, "'q_proj': 60000, expected at most 4"),
    ("alpha_pattern", {"q_proj": float("inf")}, "'q_proj': inf, expected a number"),
    ("rank_pattern", [1], r"\[1\], expected a mapping"),
    ("target_modules", {"q_proj": 1}, "a mapping of 1 keys, expected a text or a list of texts"),
    ("lora_dropout", 7, "7, expected a number from 0 to 1"),
    ("use_rslora", "yes", "'yes', expected true or false"),
]


@pytest.mark.parametrize(("key", "value", "message"), DAMAGES)
def test_a_setting_outside_its_range_is_named(adapter, key, value, message):
    change(adapter, **{key: value})
    for load in (lambda: load_adapter(tiny(), adapter), lambda: read_pairs(adapter, "vLLM")):
        with pytest.raises(UsageError, match=rf"adapter_config\.json: {key}: {message}") as refusal:
            load()
        assert "\n" not in refusal.value.message


def test_settings_that_are_nested_too_deep_are_refused(adapter):
    (adapter / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"adapter_config\.json cannot be read: nested more than"):
        load_adapter(tiny(), adapter)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", HANGS),
        ("exclude_modules", HANGS),
        ("layers_pattern", [HANGS]),
        ("modules_to_save", [HANGS]),
        ("rank_pattern", {HANGS: 4}),
        ("alpha_pattern", {HANGS: 4}),
    ],
)
def test_a_pattern_that_hangs_is_ended_and_named(adapter, monkeypatch, key, value):
    monkeypatch.setattr("isotype.model.adapter_settings.PATTERN_SECONDS", 0.5)
    change(adapter, **{key: value})
    start = time.monotonic()
    with pytest.raises(UsageError, match=f"{key}: a pattern takes more than 0.5 s") as refusal:
        load_adapter(tiny(), adapter)
    assert time.monotonic() - start < 8
    assert "\n" not in refusal.value.message


def test_what_is_no_expression_is_refused_and_an_ordinary_one_is_not(adapter):
    names = [name for name, _ in tiny().named_modules()]
    check_patterns({"target_modules": r"(?i).*\.(q_proj|up_proj)"}, names, "adapter")
    with pytest.raises(UsageError, match="no regular expression"):
        check_patterns({"target_modules": "(q_proj"}, names, "adapter")
    change(adapter, target_modules=r".*\.(q_proj|up_proj)", rank_pattern={r"q_(proj|x)": 4})
    assert torch.is_tensor(next(load_adapter(tiny(), adapter).parameters()))


def fuzz(adapter, count):
    file = adapter / "adapter_config.json"
    attempts = [lambda: load_adapter(tiny(), adapter), lambda: read_pairs(adapter, "vLLM")]
    check_flipped_bytes(file.read_bytes(), count, file.write_bytes, attempts)


def test_flipped_bytes_of_the_settings_are_refused_in_one_line(tmp_path, adapter):
    fuzz(adapter, 25)


@pytest.mark.full
def test_many_flipped_bytes_of_the_settings_are_refused_in_one_line(tmp_path, adapter):
    fuzz(adapter, 1000)
