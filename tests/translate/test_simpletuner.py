"""`isotype import --from simpletuner`: config.env, JSON and TOML with their dataset file, each
setting with what became of it.
"""

from __future__ import annotations

import json

import pytest
from benchmarks.import_outcomes import contradictions
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.config.load import load
from isotype.errors import UsageError
from isotype.translate import Fate, translate
from tests.api import DIFFUSION, detect_run_kind, read_source

ENV = """# a comment
export MODEL_TYPE='lora'
export MODEL_FAMILY='flux'
export MODEL_NAME="black-forest-labs/FLUX.1-dev"
export MIXED_PRECISION="bf16"
export OPTIMIZER="adamw_bf16"
export LEARNING_RATE=1e-4
export LR_SCHEDULE="constant_with_warmup"
export LR_WARMUP_STEPS=100
export MAX_NUM_STEPS=3000
export NUM_EPOCHS=0
export TRAIN_BATCH_SIZE=2
export GRADIENT_ACCUMULATION_STEPS=4
export USE_GRADIENT_CHECKPOINTING=true
export CAPTION_DROPOUT_PROBABILITY=0.1
export DATALOADER_CONFIG="config/multidatabackend.json"
export VALIDATION_PROMPT="a photo of sks dog"
export VALIDATION_RESOLUTION=1024x1024
export USE_EMA=true
export HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrStUv
EXTRA="--lora_rank=8 --hub_token verysecret1"
export TRAINER_EXTRA_ARGS="${EXTRA} --flow_schedule_shift=3 --wandb_api_key=verysecret2"
"""
DATASETS = [
    {
        "id": "mine", "type": "local", "instance_data_dir": "mine", "crop": True, "crop_style": "random", "crop_aspect": "preserve",
        "resolution": 0.5, "resolution_type": "area", "caption_strategy": "instanceprompt", "instance_prompt": "a photo of sks dog",
        "cache_dir_vae": "cache/vae", "repeats": 9,
    },
    {"id": "prior", "type": "local", "instance_data_dir": "dogs", "is_regularisation_data": True, "caption_strategy": "textfile"},
    {"id": "held", "type": "local", "dataset_type": "eval", "instance_data_dir": "held"},
    {"id": "masks", "dataset_type": "conditioning", "conditioning_type": "mask", "type": "local", "instance_data_dir": "masks"},
    {"id": "text", "dataset_type": "text_embeds", "type": "aws", "aws_secret_access_key": "verysecret3", "cache_dir": "cache/text"},
]  # fmt: skip
JSON = {
    "--model_type": "full", "--model_family": "sd3", "--pretrained_model_name_or_path": "stabilityai/stable-diffusion-3.5-medium",
    "--mixed_precision": "bf16", "--optimizer": "adamw_bf16", "--gradient_precision": "fp32", "--learning_rate": 1e-5,
    "--data_backend_config": "multidatabackend.json", "--max_train_steps": 100, "--vae_dtype": "fp32", "--resolution": 512,
}  # fmt: skip


@pytest.fixture
def env(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.env").write_text(ENV)
    (tmp_path / "config/multidatabackend.json").write_text(json.dumps(DATASETS, indent=1))
    return tmp_path / "config/config.env"


def written(folder, **settings):
    file = folder / "config.json"
    file.write_text(
        json.dumps(JSON | {f"--{key}": value for key, value in settings.items()}, indent=1)
    )
    (folder / "multidatabackend.json").write_text(json.dumps(DATASETS[:1]))
    return file


def config(text, folder):
    file = folder / "result.yaml"
    file.write_text(text)
    return load(file, [], {}).config


def test_config_env_is_read_as_a_shell_reads_it_with_its_datasets(env, tmp_path):
    made = config(translate(env).text, tmp_path)
    assert detect_run_kind(made) == DIFFUSION
    assert made.images.train == [{"name": "mine", "caption": "a photo of sks dog", "repeats": 10}]
    assert (made.images.regularisation, made.images.eval, made.images.masks) == (
        "dogs",
        "held",
        "masks",
    )
    assert (made.images.resolution, made.images.max_aspect, made.images.crop) == (704, 2.0, 4)
    assert (made.adapter.r, made.adapter.alpha, made.diffusion.shift) == (8, 8.0, 3.0)
    assert (made.train.batch_size, made.train.accumulate, made.train.steps, made.train.warmup) == (
        2,
        4,
        3000,
        100,
    )
    assert (made.train.ema, made.train.weight_decay) == (0.995, 0.01)
    assert (made.run.samples, made.run.sample_size) == (["a photo of sks dog"], 1024)
    assert made.precision.preset == "bf16-lora"
    assert "eval_split" not in translate(env).text


def test_every_setting_has_its_line_and_what_became_of_it(env):
    result = translate(env, "simpletuner")
    keys = [(given.name, given.line) for given in read_source(env).keys]
    assert sorted(keys) == sorted(
        (outcome.source_key.name, outcome.source_key.line) for outcome in result.outcomes
    )
    assert all(outcome.source_key.line for outcome in result.outcomes)
    assert [o.source_key.name_in_file for o in result.outcomes if "does not know" in o.note] == [
        "EXTRA"
    ]
    assert all(o.note for o in result.outcomes if o.fate in (Fate.NO_EFFECT, Fate.NOT_OFFERED))
    assert (
        next(
            o.source_key.line
            for o in result.outcomes
            if o.source_key.name_in_file.endswith("mine.repeats")
        )
        == 14
    )


def test_secrets_are_neither_written_nor_shown(env, tmp_path):
    done = CliRunner().invoke(
        build_app(), ["import", str(env), "--out", str(tmp_path / "run.yaml")]
    )
    said = CliRunner().invoke(build_app(), ["import", str(env), "--json"])
    assert done.exit_code == said.exit_code == 0
    for text in (done.output, said.output, (tmp_path / "run.yaml").read_text()):
        assert "verysecret" not in text
        assert "hf_AbC" not in text


def test_secrets_of_other_tools_files_are_not_shown(tmp_path):
    names = ("hub_token", "wandb_api_key", "aws_secret_key", "mail-api-key", "comet_webhook_url")
    lines = "".join(f"{name}: verysecret{i}\n" for i, name in enumerate(names))
    inside = "datasets:\n  - path: a/b\n    auth: {hub_token: verysecret9}\n    url: --token=verysecret8\n"
    (tmp_path / "a.yaml").write_text(
        f"base_model: m\nmicro_batch_size: 1\npad_token: <pad>\n{lines}{inside}"
    )
    said = CliRunner().invoke(build_app(), ["import", str(tmp_path / "a.yaml"), "--json"])
    assert said.exit_code == 0
    assert "verysecret" not in said.output
    assert '"value": "<pad>"' in said.output


def test_fp32_gradients_become_what_they_meant(tmp_path):
    result = translate(written(tmp_path))
    made = config(result.text, tmp_path)
    assert (made.adapter.kind, made.precision.preset, made.precision.grads) == (
        "none",
        "bf16-pure",
        "fp32",
    )
    assert made.images.eval_split == 0, "it trains on every picture"
    assert "what it meant" in next(
        o.note for o in result.outcomes if o.source_key.name == "gradient_precision"
    )
    assert contradictions(tmp_path / "result.yaml") == []


def test_a_quantised_base_is_quantised_when_it_is_loaded(tmp_path):
    for said, word in (("int8-quanto", "int8"), ("fp8-torchao", "fp8")):
        file = written(
            tmp_path, base_model_precision=said, model_type="lora", mixed_precision="bf16"
        )
        precision = config(translate(file).text, tmp_path).precision
        assert (precision.preset, precision.base) == ("bf16-lora", word)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"controlnet": True}, "ControlNet is not offered"),
        ({"lora_type": "lycoris", "model_type": "lora"}, "LyCORIS is not offered"),
        (
            {"base_model_precision": "int2-quanto", "model_type": "lora"},
            "int2-quanto is not offered",
        ),
        ({"model_family": "hunyuanvideo"}, "hunyuanvideo is not offered"),
        ({"model_family": "kolors"}, "kolors is not offered"),
        ({"mixed_precision": "fp16"}, "CF021"),
        ({"vae_dtype": "fp16"}, "CF026"),
    ],
)
def test_what_is_not_offered_and_contradictions_stop_it(tmp_path, settings, said):
    file = written(tmp_path, **settings)
    done = CliRunner().invoke(
        build_app(),
        ["import", str(file), "--from", "simpletuner", "--out", str(tmp_path / "run.yaml")],
    )
    assert isinstance(done.exception, UsageError)
    assert done.exception.exit_status == 2
    assert said in str(done.exception)
    assert "config.json" in str(done.exception)
    assert not (tmp_path / "run.yaml").exists()


def test_a_missing_dataset_file_is_told(tmp_path):
    file = written(tmp_path, data_backend_config="gone.json")
    assert any("gone.json" in note for note in translate(file).notes)
