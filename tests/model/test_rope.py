"""`model.rope_parameters` and `train.embedding_noise`."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isotype.errors import UsageError
from isotype.inference.loaded import load_run
from isotype.model.build import add_embedding_noise
from isotype.tasks.choose import train
from tests.models import tiny
from tests.results import same_tensors
from tests.training.interrupted import cut_back

YARN = {"rope_type": "yarn", "factor": 4.0}


def test_noise_is_of_training_alone_and_within_its_bound():
    model = tiny()
    embedding, ids = model.get_input_embeddings(), torch.arange(3, 23).view(2, 10)
    plain = embedding(ids)
    add_embedding_noise(model, 5.0)
    assert torch.equal(model.eval().get_input_embeddings()(ids), plain)
    noise = (model.train().get_input_embeddings()(ids) - plain).detach()
    most = 5.0 / (10 * plain.shape[-1]) ** 0.5
    assert 0.9 * most < float(noise.abs().max()) <= most * (1 + 1e-6)
    assert abs(float(noise.std()) / most - 3**-0.5) < 0.05


def test_a_run_with_yarn_and_noise_resumes_and_is_loaded_with_the_same_rotary_embedding(
    configured, workshop, tmp_path
):
    settings = {
        "model": {"name": str(workshop.base), "rope_parameters": YARN},
        "train": {"embedding_noise": 5.0},
    }
    assert train(configured("run", **settings)) == 0
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    cut_back(again, 6)
    assert train(configured("again", **settings), resume=again) == 0
    same_tensors(tmp_path / "run", again)
    config = AutoConfig.from_pretrained(workshop.base)
    config.rope_parameters |= YARN | {
        "original_max_position_embeddings": config.max_position_embeddings
    }
    want = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    loaded = load_run(tmp_path / "run").model
    (got,) = (b for name, b in loaded.named_buffers() if name.endswith("rotary_emb.inv_freq"))
    assert torch.equal(got, want)
    assert not torch.equal(
        got, AutoModelForCausalLM.from_pretrained(workshop.base).model.rotary_emb.inv_freq
    )
    positions = loaded.get_base_model().config.max_position_embeddings
    assert positions == 4 * AutoConfig.from_pretrained(workshop.base).max_position_embeddings


def test_a_model_trained_in_full_has_them_in_its_config(configured, workshop, tmp_path):
    settings = {
        "model": {"name": str(workshop.base), "rope_parameters": {"rope_theta": 5e5}},
        "adapter": {"kind": "none"},
    }
    assert train(configured("run", **settings, train={"steps": 2})) == 0
    assert (
        json.loads((tmp_path / "run/model/config.json").read_text())["rope_parameters"][
            "rope_theta"
        ]
        == 5e5
    )


def test_wrong_rotary_parameters_are_one_line(configured, workshop, subtests):
    for given, says in (
        ({"rope_type": "yarm", "factor": 2.0}, "rope_type: yarm: unknown"),
        ({"facto": 2.0}, "facto: unknown"),
        ({"rope_type": "yarn"}, "model.rope_parameters: .*factor"),
        ({"rope_type": "default"}, "has no effect"),
    ):
        with subtests.test(says), pytest.raises(UsageError, match=says):
            train(configured(model={"name": str(workshop.base), "rope_parameters": given}))
