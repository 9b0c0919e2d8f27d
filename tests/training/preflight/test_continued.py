"""PF019: an adapter of a sister model, and one of the run's own base."""

import json
import shutil

import pytest

from isotype.tasks.choose import train
from isotype.training.preflight.static import adapter_of_another_base, same_model


@pytest.fixture
def trained(configured, tmp_path):
    assert train(configured("first", train={"steps": 1})) == 0
    return tmp_path / "first/adapter"


def test_an_adapter_is_reported_on_a_related_base_and_not_on_its_own(subject, trained, workshop, tmp_path):
    own = subject("own", adapter={"start_from": str(trained)})
    assert list(adapter_of_another_base(own)) == []
    sister = tmp_path / "sister"
    shutil.copytree(workshop.base, sister)
    (finding,) = adapter_of_another_base(subject("other", adapter={"start_from": str(trained)}, model={"name": str(sister)}))
    assert finding.code == "PF019"
    assert finding.declared == str(workshop.base)
    config = trained / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    assert list(adapter_of_another_base(subject("unnamed", adapter={"start_from": str(trained)}, model={"name": str(sister)}))) == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", True),
        ("Qwen/Qwen2.5-0.5B", "/models/Qwen2.5-0.5B", True),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct", False),
    ],
)
def test_names_of_one_model_in_two_places_are_the_same_model(one, other, same):
    assert same_model(one, other) is same
