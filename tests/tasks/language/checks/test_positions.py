"""PF020: a row longer than the model's positions, which is fatal for a table and a warning for rotary ones."""

import json
import shutil

import pytest

from isotype.errors import PreflightError
from isotype.finding import Severity
from isotype.tasks.choose import train
from isotype.tasks.language.checks import beyond_the_positions


def test_rotary_positions_are_a_warning(subject, workshop, tmp_path):
    assert list(beyond_the_positions(subject("enough"))) == []
    short = tmp_path / "short"
    shutil.copytree(workshop.base, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    (finding,) = beyond_the_positions(subject("short", model={"name": str(short)}))
    assert (finding.code, finding.severity) == ("PF020", Severity.WARNING)
    assert finding.fix.startswith("data.max_length: 8;")


def test_a_table_that_ends_is_refused(configured, workshop):
    config = {"model_type": "gpt2", "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 512}
    model = {"name": None, "init": "random", "config": config, "tokenizer": str(workshop.base)}
    with pytest.raises(PreflightError, match=r"PF020.*and the model has 8 positions"):
        train(configured(model=model, adapter={"kind": "none"}))
