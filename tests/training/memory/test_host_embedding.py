"""`model.embedding: host`: which models may, that the numbers are the same, and that a plan counts the device's bytes alone.

No CPU can show that a GPU reads pinned memory (`tests/training/test_on_a_gpu.py` does): here the weight goes to memory that is not
PyTorch's own, as there.
"""

import json

import pytest
import torch
from tests.results import same_result
from tests.training.interrupted import interrupted_after
from transformers import AutoConfig

from isotype.config.kind import check_embedding
from isotype.config.load import load
from isotype.errors import UsageError
from isotype.inference.loaded import load_run
from isotype.model.host_embedding import bytes_on_host
from isotype.precision import PRESETS
from isotype.precision.apply import inner_model
from isotype.tasks.choose import train
from isotype.tasks.language.outline import outline, step_outline
from isotype.training.memory.plan import plan_memory
from isotype.training.memory.recomputation import Checkpointing

FAMILY = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
EMBEDDING = 4096 * 64 * 2


def outlined(*settings, device_type="cuda", **family):
    config = load(None, ["precision.preset=bf16-lora", "train.batch_size=1", *settings]).config
    return config, outline(AutoConfig.for_model(**{**FAMILY, **family}), config, PRESETS["bf16-lora"], device_type=device_type)


def built_for_a_gpu(*settings, **family):
    check_embedding(load(None, list(settings)).config, device_type="cuda")
    outlined(*settings, **family)


def planned(*settings, device_type="cuda"):
    config, made = outlined(*settings, device_type=device_type)
    largest = step_outline(config, PRESETS["bf16-lora"], length=128, eval_rows=1, eval_length=64, sample_length=32, device_type=device_type)
    plan = plan_memory(made, config.train, PRESETS["bf16-lora"], largest, checkpointing=Checkpointing("none"), device_type=device_type)
    assert plan.not_simulated is None
    return made, plan


def test_a_plan_counts_the_bytes_of_the_device_alone():
    (_, before), (made, plan) = planned(), planned("model.embedding=host")
    assert before.frozen - plan.frozen == bytes_on_host(made.model) == EMBEDDING
    assert (before.peak - plan.peak) == pytest.approx(EMBEDDING, abs=64)
    assert (before.activations, before.working, before.sampling) == (plan.activations, plan.working, plan.sampling)
    # its elements are the model's all the same
    assert made.total == sum(p.numel() for p in made.model.parameters())
    # a run on a CPU has it in host memory anyway
    assert planned("model.embedding=host", device_type="cpu")[1] == planned(device_type="cpu")[1]


@pytest.mark.parametrize(
    ("settings", "family", "why"),
    [
        ([], {"tie_word_embeddings": True}, "the head has the same weight"),
        (["adapter.modules_to_save=[embed_tokens]"], {}, "the adapter trains the input embedding"),
        (["adapter.kind=none"], {}, "which trains the embedding"),
        (["model.add_tokens=[<x>]"], {}, "which trains the embedding"),
        (["parallel.kind=shard"], {}, "a part of every weight"),
    ],
)
def test_what_it_cannot_wait_there_with_is_refused_in_one_line(settings, family, why):
    with pytest.raises(UsageError, match=why) as refused:
        built_for_a_gpu("model.embedding=host", *settings, **family)
    assert "\n" not in refused.value.message
    assert refused.value.fix == "model.embedding: device"


@pytest.fixture
def pretended(monkeypatch):
    """A run on a CPU takes the CPU for a device. What was moved: the weights in memory that is not PyTorch's own."""
    moved = []

    def elsewhere(weight):
        moved.append(torch.from_numpy(weight.numpy().copy()))
        return moved[-1]

    monkeypatch.setattr("isotype.model.load.in_pinned_memory", elsewhere)
    monkeypatch.setattr("isotype.training.setup.check_embedding", lambda *_, **__: None)
    for place in ("load", "build"):
        monkeypatch.setattr(f"isotype.model.{place}.is_kept_on_host", lambda embedding, _: embedding == "host")
    return moved


@pytest.mark.full
def test_a_run_and_its_resumption_are_those_of_an_embedding_on_the_device(configured, pretended, tmp_path, monkeypatch):
    assert train(configured("device")) == 0
    assert not pretended
    host = configured("host", model={"embedding": "host"})
    assert interrupted_after(2, host, monkeypatch) == 130
    assert len(pretended) == 1
    assert train(host, resume=tmp_path / "host") == 0
    # once for the run, and once for the check of what it saved
    assert len(pretended) == 3
    same_result(tmp_path / "device", tmp_path / "host")
    (ours, theirs) = (json.loads((tmp_path / run / "precision.json").read_text()) for run in ("host", "device"))
    assert ours["observed"] == theirs["observed"]
    assert "pinned host memory" in (tmp_path / "host/manifest.json").read_text()
    # where there is no GPU it is loaded as any other
    monkeypatch.undo()
    weight = inner_model(load_run(tmp_path / "host").model).get_input_embeddings().weight
    assert torch.equal(weight, pretended[0])
