"""A hub that does not answer: said at once and once, each host's half a minute waited for once, and one line at the end."""

from __future__ import annotations

import logging

import pytest

from isotype.config.schema import ModelSection
from isotype.errors import UsageError
from isotype.training.model import load_architecture, load_tokenizer
from isotype.training.quiet import _HUB, quiet_libraries


@pytest.fixture
def away(monkeypatch, tmp_path):
    """Seconds that the hub's library would have waited, where nothing listens at the hub's address."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    for name, value in (
        ("HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_CACHE", str(tmp_path)),
    ):
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    waited: list[float] = []
    monkeypatch.setattr(_http.time, "sleep", waited.append)
    monkeypatch.setattr(logging.getLogger(_HUB), "filters", [])
    return waited


@pytest.mark.parametrize("load", [load_tokenizer, lambda section: load_architecture(section, None)], ids=["tokenizer", "model"])
def test_it_is_said_at_once_and_asked_once(away, capfd, load):
    quiet_libraries()
    quiet_libraries()
    with pytest.raises(UsageError, match="org/name: not in the local cache, and the hub cannot be reached"):
        load(ModelSection(name="org/name"))
    assert 0 < sum(away) < 30
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("isotype: 127.0.0.1:9 does not answer (")


def test_what_is_fetched_is_said_before_the_minutes_it_takes(monkeypatch, capfd):
    from isotype.training import model

    fetched = []
    monkeypatch.setattr(model, "try_to_load_from_cache", lambda name, file, revision: "kept" if fetched else None)
    monkeypatch.setattr(model, "hf_hub_download", lambda *given, **rest: fetched.append(given))
    for _ in range(2):
        model._reach("org/name", None)
    assert fetched == [("org/name", "config.json")]
    assert capfd.readouterr().err.startswith("isotype: org/name is fetched from the hub, once")


def test_patience_asked_for_is_said_and_errors_are_left_alone(away, capfd, caplog):
    quiet_libraries()
    log = logging.getLogger(_HUB)
    log.warning("HTTP Error 429 thrown while requesting GET https://huggingface.co/x")
    log.warning("Rate limited. Waiting 61.0s before retry [Retry 1/5].")
    log.warning("Retrying in 1s [Retry 1/5].")
    log.error("another thing")
    first, second = capfd.readouterr().err.splitlines()[:2]
    assert "huggingface.co does not answer (HTTP Error 429)" in first
    assert "the next try is in 61 s" in second
    assert [record.message for record in caplog.records] == ["another thing"]
