"""What a run on text refuses before it loads its model: one line that names the key."""

import re

import pytest
from tests.api import refuse_incomplete

from isotype.errors import UsageError
from isotype.tasks.choose import train

LAYERS, FULL, RANDOM = (
    {"gradient_checkpointing": "layers"},
    {"kind": "none"},
    {"name": None, "init": "random", "tokenizer": "{base}"},
)
FP32_BRANCH = {"lora_branch": "fp32"}


def filled(value, workshop):
    """With the workshop's paths in the place of {base} and {chats}."""
    if isinstance(value, dict):
        return {key: filled(inner, workshop) for key, inner in value.items()}
    return (
        value.format(base=workshop.base, chats=workshop.chats) if isinstance(value, str) else value
    )


ROWS = [
    ({"train": {"gradient_checkpointing": "layers+offload"}}, "on a CPU they are there already"),
    ({"train": {"gradient_checkpointing": "none", "checkpointed_layers": 2}}, "has no effect"),
    (
        {"train": {"checkpointed_layers": "every 2"}},
        "has no effect with train.gradient_checkpointing: auto",
    ),
    ({"train": LAYERS | {"checkpointed_layers": 6}}, "has 2 layers"),
    ({"train": LAYERS | {"checkpointed_layers": [5]}}, "0 to 1"),
    (
        {"train": LAYERS | {"checkpointed_layers": "every 0"}},
        "train.checkpointed_layers: expected all or a whole number",
    ),
    (
        {"train": {"gradient_checkpointing": "none", "memory": "1GiB"}},
        "train.memory has no effect with train.gradient_checkpointing",
    ),
    ({"train": {"memory": "soon"}}, "train.memory: expected"),
    (
        {"train": {"keep_attention": True}},
        "train.keep_attention has no effect with train.gradient_checkpointing: auto",
    ),
    ({"train": {"aux_loss": 0.3}}, "train.aux_loss: 0.3 has no effect"),
    ({"train": {"objective": "ppo"}}, "train.objective: expected one of sft dpo"),
    (
        {"train": {"objective": "dpo"}, "preference": {"simpo_gamma": 1.0}},
        "preference.simpo_gamma: does not apply to train.objective: dpo",
    ),
    ({"preference": {"beta": 0}}, "preference.beta: expected"),
    ({"distil": {"beta": 0.5}}, "distil.beta: does not apply to train.objective: sft"),
    ({"train": {"objective": "distil"}}, "distil needs a teacher"),
    (
        {"data": {"stream": True, "eval_split": 0}, "train": {"steps": None}},
        "data.stream needs train.steps",
    ),
    ({"data": {"shuffle_buffer": 9}}, "data.shuffle_buffer: has no effect without data.stream"),
    (
        {"data": {"eval_split": 0, "eval": {"a b": "x.jsonl"}}},
        "data.eval: 'a b': a set's name has letters",
    ),
    (
        {"data": {"eval_split": 0, "eval": {"name": "x.jsonl", "limit": 3}}},
        "data.eval: expected text or a list of text or mappings",
    ),
    (
        {"data": {"eval_split": 0, "eval": {"a": "{chats}"}}, "train": {"stop_on": "b"}},
        "train.stop_on: b: data.eval names a",
    ),
    (
        {"data": {"eval_split": 0, "eval": "{chats}"}, "train": {"stop_on": "b"}},
        "train.stop_on: b: data.eval names no sets",
    ),
    ({"model": {"attention": "flash"}}, "on a GPU only"),
    (
        {"model": FP32_BRANCH, "adapter": FULL, "precision": {"preset": "bf16-mixed"}},
        "no effect with adapter.kind: none",
    ),
    (
        {"model": FP32_BRANCH | {"optimize": False}, "precision": {"preset": "bf16-lora"}},
        "no effect with model.optimize: false",
    ),
    ({"model": FP32_BRANCH}, "no effect with precision.compute: fp32"),
    ({"model": {"add_tokens": ["<|im_end|>"]}}, "in the vocabulary already"),
    ({"model": {"add_tokens": [" a"]}}, "white space"),
    ({"model": {"name": None}}, "model.name: missing"),
    ({"model": RANDOM | {"config": {"hidden_size": 8}}}, "model_type is missing"),
    ({"model": RANDOM | {"config": {"model_type": "lama"}}}, "lama"),
    ({"model": RANDOM | {"config": "nowhere.json"}}, "nowhere.json"),
    ({"adapter": {"targets": ["q_prj"]}}, "adapter.targets"),
    ({"adapter": {"start_from": "nowhere"}}, "adapter.start_from: nowhere: no such folder"),
    ({"adapter": {"vision": "lora"}}, "has no vision tower"),
]


def begin(loaded):
    refuse_incomplete(loaded)
    train(loaded)


def test_a_setting_that_cannot_be_kept_is_refused_with_its_key(configured, workshop, subtests):
    for sections, said in ROWS:
        with subtests.test(said), pytest.raises(UsageError, match=re.escape(said)):
            begin(configured(**filled(sections, workshop)))
