"""The hub: asked once, found away in seconds, and what was downloaded before goes on without it;
downloads are shown.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from isotype.config.schema import ModelSection
from isotype.config.sources import SourceSpec
from isotype.errors import UsageError
from isotype.model.load import load_architecture, load_tokenizer
from tests.api import hub as hub_of_isotype
from tests.api import quiet_libraries
from tests.hub import COMMIT, hub


@pytest.fixture
def endpoint(monkeypatch, tmp_path):
    """`endpoint(url)` makes it the hub, with an empty cache; returns the seconds that were waited
    between tries.
    """
    import datasets

    waited: list[float] = []

    def at(url: str) -> list[float]:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        return waited

    for name, value in (
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_CACHE", str(tmp_path / "cache")),
        ("HF_HUB_ETAG_TIMEOUT", 0.1),
    ):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_of_isotype, "FIRST_TRY", 0.1)
    monkeypatch.setattr(hub_of_isotype, "_unreachable_by_endpoint", {})
    monkeypatch.setattr("time.sleep", waited.append)
    return at


@pytest.fixture
def refusing(request):
    """An address at which nothing listens: bound, so that nobody else does. With the parameter
    "silent" it takes connections.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if getattr(request, "param", "") == "silent":
            held.listen(50)
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def load_data(name: str) -> object:
    from tests.api import open_source

    return open_source(SourceSpec(name=f"hf:{name}"), needs_answer=True)


LOADS = {
    "tokenizer": lambda name: load_tokenizer(ModelSection(name=name)),
    "model": lambda name: load_architecture(ModelSection(name=name), None),
    "data": load_data,
}


@pytest.mark.parametrize("what", LOADS)
@pytest.mark.parametrize("refusing", ["refusing", "silent"], indirect=True)
def test_a_hub_that_is_away_is_found_once_and_in_seconds(endpoint, refusing, capfd, what):
    waited = endpoint(refusing)
    quiet_libraries()
    for name in ("org/name", "org/other"):
        with pytest.raises(
            UsageError,
            match=f"{name}: not in the local cache, and the hub cannot be reached\n.*check the network, or give",
        ):
            LOADS[what](name)
    assert waited == [hub_of_isotype.PAUSE]
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"isotype: {refusing.removeprefix('http://')} does not answer (")


def cached(base: Path, *, without: str = "") -> None:
    """`org/tiny` as a download leaves it."""
    there = Path(constants.HF_HUB_CACHE) / "models--org--tiny"
    shutil.copytree(base, there / "snapshots" / COMMIT)
    (there / "refs").mkdir()
    (there / "refs/main").write_text(COMMIT)
    if without:
        (there / "snapshots" / COMMIT / without).unlink()


def test_what_was_downloaded_before_needs_no_hub(endpoint, refusing, workshop, capfd):
    waited = endpoint(refusing)
    cached(workshop.base)
    quiet_libraries()
    assert len(load_tokenizer(ModelSection(name="org/tiny"))) > 0
    assert load_architecture(ModelSection(name="org/tiny"), None).model_type == "llama"
    assert waited == [hub_of_isotype.PAUSE]
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_an_incomplete_download_is_distinguished_from_none(endpoint, refusing, workshop):
    endpoint(refusing)
    cached(workshop.base, without="tokenizer.json")
    with pytest.raises(
        UsageError,
        match="tokenizer org/tiny: only a part of it is in the local cache, and the hub cannot be reached",
    ):
        load_tokenizer(ModelSection(name="org/tiny"))


def test_a_user_who_is_offline_is_not_asked_to_check_the_network(endpoint, refusing, monkeypatch):
    endpoint(refusing)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UsageError,
        match=r"org/name: not in the local cache, and HF_HUB_OFFLINE is set\n.*unset HF_HUB_OFFLINE, or give",
    ):
        load_tokenizer(ModelSection(name="org/name"))


@pytest.fixture
def filled(workshop, tmp_path):
    """The folder of a hub that has the model org/tiny and the dataset org/chats, and an environment
    in which nothing is cached.
    """
    shutil.copytree(workshop.base, tmp_path / "hub/models/org/tiny")
    (tmp_path / "hub/datasets/org/chats").mkdir(parents=True)
    shutil.copy(workshop.chats, tmp_path / "hub/datasets/org/chats/train.jsonl")
    unset = (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "HF_HUB_DISABLE_PROGRESS_BARS",
    )
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    return tmp_path / "hub", environment | {"HF_HOME": str(tmp_path / "home")}


@pytest.mark.full
@pytest.mark.slow
def test_a_dataset_that_was_fetched_once_needs_no_hub(filled):
    folder, environment = filled
    command = [sys.executable, "-c", "from isotype.data.sources import *; print(len(list(source(SourceSpec(name='hf:org/chats'), "
               "needs_answer=True).examples())))"]  # fmt: skip
    with hub(folder) as served:
        environment |= {"HF_ENDPOINT": served.url}
        first = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=900
        )
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert first.stdout == again.stdout == "48\n", first.stderr + again.stderr
    assert "does not answer" in again.stderr
    assert "does not answer" not in first.stderr
