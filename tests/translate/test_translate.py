"""`isotype import`: what comes of each configuration, what is refused, and that every key is
accounted for.
"""

from __future__ import annotations

import json

import pytest
from benchmarks.import_outcomes import contradictions

from isotype.config.load import load
from isotype.errors import UsageError
from isotype.finding import Severity
from isotype.translate import Fate, translate
from tests.api import read_source
from tests.commands import ask, invoke

from .configurations import AXOLOTL, AXOLOTL_LORA, CASES, FACTORY, UNSLOTH

TAKEN = {name: case for name, case in CASES.items() if not case.refused}
REFUSED = {name: case for name, case in CASES.items() if case.refused}


def written(folder, case):
    file = folder / case.file
    file.write_text(case.text, encoding="utf-8")
    return file


def settings(text, folder):
    """`section.key` -> value of a configuration, as `isotype train` reads it."""
    file = folder / "result.yaml"
    file.write_text(text, encoding="utf-8")
    config = load(file).config
    return {
        f"{section}.{key}": value
        for section, values in config.model_dump().items()
        for key, value in values.items()
    }


@pytest.mark.parametrize("name", TAKEN)
def test_result_has_the_source_settings_no_contradiction_and_every_key_is_accounted_for(
    name, tmp_path
):
    case = TAKEN[name]
    file = written(tmp_path, case)
    result = translate(file)
    assert result.tool == case.tool
    got = settings(result.text, tmp_path)
    assert {key: got[key] for key in case.expected} == case.expected
    keys = [(given.name, given.line) for given in read_source(file).keys]
    assert sorted(keys) == sorted(
        (outcome.source_key.name, outcome.source_key.line) for outcome in result.outcomes
    )
    assert not [outcome for outcome in result.outcomes if "does not know" in outcome.note]
    assert all(outcome.source_key.line for outcome in result.outcomes)
    assert all(
        outcome.note
        for outcome in result.outcomes
        if outcome.fate in (Fate.NO_EFFECT, Fate.NOT_OFFERED)
    )
    assert contradictions(tmp_path / "result.yaml") == []


# each tool's file, with WORD where it says an optimizer
_PLACES = {
    "axolotl": ("a.yml", (AXOLOTL + AXOLOTL_LORA).replace("adamw_8bit", "WORD")),
    "llamafactory": ("a.yaml", FACTORY + "optim: WORD\n"),
    "unsloth": ("a.py", UNSLOTH.replace("LOAD", "False").replace("adamw_8bit", "WORD")),
    "simpletuner": (
        "config.json",
        '{"--model_type": "lora", "--model_family": "flux", "--optimizer": "WORD", "--mixed_precision": "bf16"}',
    ),
}
_OPTIMIZERS = {
    "adamw8bit-paged": ("paged_adamw_8bit", "bnb-adamw8bit-paged"),
    "lion": ("lion_32bit", "bnb-lion"),
    "lion8bit": ("lion_8bit", "bnb-lion8bit"),
    "muon": ("muon", "muon"),
    "adafactor": ("adafactor", "adafactor"),
    "schedule-free": ("schedule_free_adamw", "adamw_schedulefree"),
    "prodigy": ("prodigy", "prodigy"),
}


@pytest.mark.parametrize("ours", _OPTIMIZERS)
def test_optimizers_are_carried_with_what_they_refuse_left_out(ours, tmp_path):
    for tool, (file, text) in _PLACES.items():
        (tmp_path / file).write_text(text.replace("WORD", _OPTIMIZERS[ours][tool == "simpletuner"]))
        got = settings(translate(tmp_path / file).text, tmp_path)
        assert got["train.optimizer"] == ours, tool
        assert got["train.schedule"] == "constant" or ours != "schedule-free"
        assert got["train.learning_rate"] == {"prodigy": 1.0, "adafactor": 0.01}.get(
            ours, got["train.learning_rate"]
        )


def test_adapter_settings_are_carried(tmp_path):
    files = {
        "a.yml": AXOLOTL
        + AXOLOTL_LORA
        + "peft_use_dora: true\nloraplus_lr_ratio: 16\npeft_init_lora_weights: pissa\nneftune_noise_alpha: 5\n"
        + "rope_scaling: {type: yarn, factor: 4.0}\nchat_template_kwargs: {enable_thinking: false}\n",
        "b.yaml": FACTORY
        + "use_dora: true\nloraplus_lr_ratio: 16\npissa_init: true\nneftune_noise_alpha: 5\nenable_thinking: false\n",
        "c.py": UNSLOTH.replace("LOAD", "False").replace(
            'bias="none",', 'bias="none", use_dora=True, init_lora_weights="pissa_niter_4",'
        ),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        got = settings(translate(tmp_path / name).text, tmp_path)
        assert (got["adapter.dora"], got["adapter.start"]) == (True, "pissa"), name
        assert (got["adapter.plus"], got["train.embedding_noise"]) == (
            (None, None) if name == "c.py" else (16.0, 5.0)
        )
        assert got["data.template_kwargs"] == ({} if name == "c.py" else {"enable_thinking": False})
        assert got["model.rope_parameters"] == (
            {"rope_type": "yarn", "factor": 4.0} if name == "a.yml" else None
        )


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_are_not_offered_are_refused(name, tmp_path):
    case = REFUSED[name]
    done = invoke("import", written(tmp_path, case))
    assert isinstance(done.exception, UsageError)
    assert done.exception.exit_status == 2
    assert case.refused in str(done.exception)


def test_unknown_key_is_reported_with_a_suggestion(tmp_path):
    (tmp_path / "a.yml").write_text(AXOLOTL + "leaning_rate: 1\nno_such_thing: 3\n")
    told = {outcome.source_key.name: outcome for outcome in translate(tmp_path / "a.yml").outcomes}
    assert told["leaning_rate"].fate is Fate.NOT_OFFERED
    assert "did you mean learning_rate?" in told["leaning_rate"].note
    assert "does not know this key" in told["no_such_thing"].note


def test_contradiction_in_the_source_is_reported(tmp_path):
    file = tmp_path / "both.yml"
    file.write_text((AXOLOTL + AXOLOTL_LORA).replace("bf16: auto", "bf16: true") + "fp16: true\n")
    assert [
        finding.code for finding in translate(file).findings if finding.severity is Severity.ERROR
    ]


def test_dataset_info_names_the_file(tmp_path):
    (tmp_path / "data").mkdir()
    info = {
        "identity": {"file_name": "identity.json"},
        "chat": {"hf_hub_url": "org/chat", "formatting": "sharegpt"},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "a.yaml").write_text(FACTORY.replace("dataset: identity", "dataset: identity,chat"))
    got = settings(translate(tmp_path / "a.yaml").text, tmp_path)
    assert got["data.train"] == [
        {"name": "data/identity.json", "format": "alpaca"},
        {"name": "hf:org/chat", "format": "sharegpt"},
    ]


@pytest.mark.parametrize(
    ("name", "text", "tool", "told"),
    [
        (
            "a.yaml",
            "model:\n  name: a\ntrain:\n  steps: 1\n",
            None,
            "is a configuration of Isotype",
        ),
        ("a.yaml", "cooking: true\n", None, "no key of a tool"),
        ("a.yaml", "a: [\n", None, "a.yaml:"),
        ("a.py", "print(1)\n", None, "no key of a tool"),
        ("a.py", "def (\n", None, "a.py:1"),
        ("a.txt", "x", None, "reads YAML, JSON, TOML, Python"),
        ("a.yml", AXOLOTL + "hub_model_id: false\n", None, "run.push_to_hub: expected text"),
        ("a.yml", AXOLOTL, "axolot", "did you mean axolotl?"),
        ("a.yml", AXOLOTL, "llamafactory", "the keys are those of axolotl"),
    ],
)
def test_files_that_cannot_be_translated_are_one_line(tmp_path, name, text, tool, told):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=r".") as raised:
        translate(tmp_path / name, tool)
    assert told in str(raised.value)


def test_out_is_written_once_and_force_replaces_it(tmp_path):
    (tmp_path / "a.yml").write_text(AXOLOTL)
    command = ("import", tmp_path / "a.yml", "--out", tmp_path / "run.yaml")
    assert f"wrote {tmp_path / 'run.yaml'}" in ask(*command)
    assert load(tmp_path / "run.yaml").config.model.name == "NousResearch/Llama-3.2-1B"
    assert "exists already" in str(invoke(*command).exception)
    ask(*command, "--force")


def test_json_accounts_for_every_key(tmp_path):
    (tmp_path / "a.yml").write_text(AXOLOTL)
    answer = json.loads(ask("import", tmp_path / "a.yml", "--json"))
    assert answer["tool"] == "axolotl"
    assert sum(answer["counts"].values()) == len(answer["keys"])
    rate = {
        "key": "learning_rate",
        "line": 14,
        "value": "2e-4",
        "fate": "taken",
        "became": "train.learning_rate: 0.0002",
        "note": None,
    }
    assert rate in answer["keys"]
    assert answer["config"].startswith("# From ")


def test_configuration_is_on_standard_output_and_the_account_beside_it(tmp_path):
    (tmp_path / "a.yml").write_text(AXOLOTL)
    done = invoke("import", tmp_path / "a.yml")
    assert settings(done.stdout, tmp_path)["train.batch_size"] == 4
    assert "micro_batch_size" in done.stderr
