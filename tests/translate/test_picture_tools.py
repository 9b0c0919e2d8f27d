"""`isotype import` of kohya's, ai-toolkit's, OneTrainer's and diffusers' files: each key with its
line and what became of it.
"""

from __future__ import annotations

import json
import re

import pytest

from isotype.config.load import load
from isotype.errors import UsageError
from isotype.translate import translate
from tests.api import DIFFUSION, detect_run_kind

DIFFUSERS = """#!/bin/bash
accelerate launch train_dreambooth_lora_flux.py \\
  --pretrained_model_name_or_path="black-forest-labs/FLUX.1-dev" \\
  --instance_data_dir=dog --instance_prompt="a photo of sks dog" \\
  --output_dir=trained-flux --mixed_precision=bf16 --resolution=512 \\
  --train_batch_size=1 --gradient_accumulation_steps=4 \\
  --optimizer=prodigy --learning_rate=1. --rank=16 --lr_scheduler=constant \\
  --with_prior_preservation --class_data_dir=class --class_prompt="a photo of a dog" --prior_loss_weight=0.5 \\
  --max_train_steps=500 --validation_prompt="sks dog in a bucket" --seed=7 --push_to_hub
"""
KOHYA = """pretrained_model_name_or_path = "sdxl"
network_module = "networks.lora"
network_dim = 32
network_alpha = 16
optimizer_type = "AdamW8bit"
unet_lr = 1e-4
mixed_precision = "bf16"
max_train_steps = 2000
save_every_n_steps = 500
min_snr_gamma = 5
noise_offset = 0.05
min_timestep = 200
dataset_config = "data.toml"
sample_prompts = "prompts.txt"
cache_latents = true

[saving]
output_dir = "out"
save_model_as = "safetensors"
"""
DATA = """[general]
shuffle_caption = true
keep_tokens = 1
caption_tag_dropout_rate = 0.1

[[datasets]]
resolution = 1024
batch_size = 2

  [[datasets.subsets]]
  image_dir = "mine"
  num_repeats = 10
  class_tokens = "sks dog"

  [[datasets.subsets]]
  image_dir = "prior"
  is_reg = true
"""
AI_TOOLKIT = """job: extension
config:
  name: dog
  process:
    - type: sd_trainer
      trigger_word: sks
      network: {type: lora, linear: 16, linear_alpha: 16}
      save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}
      datasets:
        - folder_path: mine
          caption_ext: txt
          caption_dropout_rate: 0.05
          shuffle_tokens: false
          resolution: [512, 768, 1024]
      train:
        batch_size: 1
        steps: 2000
        gradient_checkpointing: true
        optimizer: prodigy
        lr: 1.0
        dtype: bf16
        timestep_type: sigmoid
        ema_config: {use_ema: true, ema_decay: 0.99}
      model: {name_or_path: FLUX.1-dev, is_flux: true, quantize: true}
      sample:
        sample_every: 250
        width: 1024
        height: 1024
        seed: 42
        walk_seed: true
        neg: blurry
        guidance_scale: 4
        sample_steps: 20
        prompts: ["[trigger] in a bucket", "a cat"]
"""
ONETRAINER = {
    "training_method": "LORA", "peft_type": "LORA", "base_model_name": "sdxl", "resolution": "1024", "train_dtype": "BFLOAT_16",
    "fallback_train_dtype": "BFLOAT_16", "weight_dtype": "FLOAT_32", "output_dtype": "FLOAT_32", "learning_rate": 3e-4,
    "learning_rate_scheduler": "COSINE", "learning_rate_warmup_steps": 100, "epochs": 20, "batch_size": 4, "lora_rank": 16,
    "lora_alpha": 1.0, "optimizer": {"optimizer": "ADAMW", "weight_decay": 0.02}, "timestep_distribution": "LOGIT_NORMAL",
    "noising_weight": 0.8, "noising_bias": 0.2, "save_every": 200, "save_every_unit": "STEP", "sample_after": 1,
    "sample_after_unit": "EPOCH",
    "concepts": [
        {"path": "mine", "enabled": True, "balancing": 3.0, "text": {"prompt_source": "sample", "enable_tag_shuffling": True}},
        {"path": "off", "enabled": False},
    ],
}  # fmt: skip


def made(tmp_path, name, text, **files):
    for other, content in files.items():
        (tmp_path / other).write_text(content)
    (tmp_path / name).write_text(text)
    result = translate(tmp_path / name)
    (tmp_path / "run.yaml").write_text(result.text)
    config = load(tmp_path / "run.yaml").config
    assert all(outcome.note or outcome.result for outcome in result.outcomes)
    return result, config


def test_a_script_of_diffusers_is_what_it_is(tmp_path):
    result, config = made(tmp_path, "train.sh", DIFFUSERS)
    assert (result.tool, config.adapter.kind, config.adapter.r, config.adapter.alpha) == (
        "diffusers",
        "lora",
        16,
        16.0,
    )
    assert (config.train.optimizer, config.train.learning_rate) == ("prodigy", 1.0)
    assert config.images.train == [{"name": "dog", "caption": "a photo of sks dog"}]
    assert config.images.regularisation == [
        {"name": "class", "caption": "a photo of a dog", "weight": 0.5, "draw": 100}
    ]
    assert (config.diffusion.timesteps, config.diffusion.shift, config.diffusion.guidance) == (
        "uniform",
        1.0,
        3.5,
    ), "the script's own"
    assert (config.precision.preset, config.train.accumulate, config.run.samples) == (
        "bf16-lora",
        4,
        ["sks dog in a bucket"],
    )
    lines = {outcome.source_key.name: outcome.source_key.line for outcome in result.outcomes}
    assert lines["learning_rate"] == 7


def test_kohyas_toml_with_its_datasets_and_prompts(tmp_path):
    prompts = "# mine\nsks dog --n blurry --w 768 --h 768 --d 7 --s 30 --l 5\na cat\n"
    result, config = made(
        tmp_path, "run.toml", KOHYA, **{"data.toml": DATA, "prompts.txt": prompts}
    )
    assert (result.tool, config.adapter.r, config.adapter.alpha, config.train.optimizer) == (
        "kohya",
        32,
        16.0,
        "adamw8bit",
    )
    assert config.images.train == [{"name": "mine", "caption": "sks dog", "repeats": 10}]
    assert config.images.regularisation == "prior"
    images = config.images
    assert (images.resolution, images.tag_orders, images.keep_tags, images.tag_dropout) == (
        1024,
        8,
        1,
        0.1,
    )
    diffusion = config.diffusion
    assert (
        diffusion.noise_offset,
        diffusion.least_noise,
        diffusion.weighting,
        diffusion.snr_gamma,
    ) == (0.05, 0.2, "min_snr", 5.0)
    own = {
        "prompt": "sks dog",
        "negative": "blurry",
        "size": 768,
        "steps": 30,
        "seed": 7,
        "guidance": 5.0,
    }
    assert config.run.samples == [own, "a cat"]
    assert (config.run.adapters_every, config.run.adapter_format, config.run.folder) == (
        500,
        "comfyui",
        "out",
    )


def test_kohyas_command_and_its_numbered_folders(tmp_path):
    (tmp_path / "img/10_sks dog").mkdir(parents=True)
    (tmp_path / "img/10_sks dog/1.png").write_bytes(b"")
    line = "accelerate launch sd-scripts/sdxl_train_network.py --pretrained_model_name_or_path sdxl --train_data_dir img"
    script = f"{line} --network_module networks.lora --network_dim 8 --optimizer_type Prodigy --learning_rate 1.0 --mixed_precision bf16\n"
    result, config = made(tmp_path, "go.sh", script)
    assert (result.tool, config.adapter.r, config.adapter.alpha) == ("kohya", 8, 1.0)
    assert config.images.train == [{"name": "img/10_sks dog", "repeats": 10, "caption": "sks dog"}]
    assert (config.train.optimizer, config.train.learning_rate) == ("prodigy", 1.0)
    assert (config.adapter.text_encoders, config.adapter.text_encoder_rate) == (True, None), (
        "as the script does"
    )


def text_encoders_of(tmp_path, name, text):
    adapter = made(tmp_path, name, text)[1].adapter
    return adapter.text_encoders, adapter.text_encoder_rate


def test_text_encoders_are_trained_as_they_were(tmp_path):
    assert text_encoders_of(tmp_path, "a.toml", KOHYA) == (False, None)
    for given, carried in (
        ("5e-5", 5e-5),
        ("[5e-5, 2e-5]", [5e-5, 2e-5]),
        ("[5e-5, 0]", [5e-5, 0.0]),
        ("1.0", None),
    ):
        assert text_encoders_of(tmp_path, "a.toml", f"text_encoder_lr = {given}\n{KOHYA}") == (
            True,
            carried,
        )
    for off in ("text_encoder_lr = 0", "text_encoder_lr = 5e-5\nnetwork_train_unet_only = true"):
        assert text_encoders_of(tmp_path, "a.toml", f"{off}\n{KOHYA}") == (False, None)
    assert text_encoders_of(
        tmp_path, "a.toml", f'clip_l = "c.safetensors"\ntext_encoder_lr = 5e-5\n{KOHYA}'
    ) == (False, None)
    script = "accelerate launch sd-scripts/sdxl_train_network.py --network_module networks.lora --pretrained_model_name_or_path sdxl"
    assert text_encoders_of(
        tmp_path, "a.sh", f"{script} --network_train_unet_only --train_data_dir img\n"
    ) == (False, None)

    sdxl = DIFFUSERS.replace("lora_flux", "lora_sdxl").replace(
        "--push_to_hub", "--train_text_encoder"
    )
    assert text_encoders_of(tmp_path, "b.sh", sdxl) == (True, None), "Prodigy has one rate"
    sdxl = sdxl.replace(
        "optimizer=prodigy --learning_rate=1.", "optimizer=adamw --learning_rate=1e-4"
    )
    assert text_encoders_of(tmp_path, "b.sh", sdxl) == (True, 5e-6), "the script's default"
    assert text_encoders_of(
        tmp_path, "b.sh", sdxl.replace("--seed=7", "--text_encoder_lr=1e-5")
    ) == (True, 1e-5)
    assert text_encoders_of(
        tmp_path, "b.sh", sdxl.replace("--train_text_encoder", "--text_encoder_lr=1e-5")
    ) == (False, None)

    adamw = AI_TOOLKIT.replace("optimizer: prodigy", "optimizer: adamw8bit")
    on = adamw.replace(
        "lr: 1.0", "lr: 1e-4\n        train_text_encoder: true\n        text_encoder_lr: 2e-5"
    )
    assert text_encoders_of(tmp_path, "c.yaml", on.replace("is_flux: true", "is_xl: true")) == (
        True,
        2e-5,
    )
    assert text_encoders_of(tmp_path, "c.yaml", on) == (False, None), "of Flux"

    first, second = {"train": True, "learning_rate": 5e-5}, {"train": True, "learning_rate": None}
    for kind, parts, carried in (
        ("STABLE_DIFFUSION_XL_10_BASE", (first, second), (True, [5e-5, 3e-4])),
        ("STABLE_DIFFUSION_XL_10_BASE", (first, {"train": False}), (False, None)),
        ("STABLE_DIFFUSION_15", (first,), (True, 5e-5)),
        ("FLUX_DEV_1", (first, second), (False, None)),
    ):
        # a model with one text encoder has no second part
        encoders = dict(zip(("text_encoder", "text_encoder_2"), parts, strict=False))
        settings = ONETRAINER | {"model_type": kind} | encoders
        assert text_encoders_of(tmp_path, "d.json", json.dumps(settings)) == carried


def test_kohyas_v_prediction_is_the_objective(tmp_path):
    text = KOHYA.replace('dataset_config = "data.toml"', "v_parameterization = true")
    prompts = {"prompts.txt": "a cat\n"}
    _, config = made(tmp_path, "run.toml", text, **prompts)
    assert config.diffusion.objective == "v"


def test_kohyas_caption_lengths_are_carried(tmp_path):
    def limit(setting):
        text = KOHYA.replace('dataset_config = "data.toml"', setting)
        return made(tmp_path, "run.toml", text, **{"prompts.txt": "a cat\n"})[1].diffusion

    assert limit("max_token_length = 225").max_text_length == 225
    with_t5 = limit('t5xxl = "t5.safetensors"\nmax_token_length = 225')
    assert with_t5.max_text_length is None, "CLIP's length does not bound T5"
    assert limit("t5xxl_max_token_length = 256").max_text_length == 256


def test_ai_toolkits_yaml(tmp_path):
    result, config = made(tmp_path, "dog.yaml", AI_TOOLKIT)
    assert (result.tool, detect_run_kind(config), config.adapter.r, config.train.ema) == (
        "ai-toolkit",
        DIFFUSION,
        16,
        0.99,
    )
    assert (config.images.trigger, config.images.resolution) == ("sks", 1024)
    assert config.images.train == [{"name": "mine", "resolution": [512, 768, 1024]}]
    assert (config.train.learning_rate, config.diffusion.timesteps) == (1.0, "logit_normal")
    assert (config.run.adapters_every, config.run.adapters_keep, config.run.sample_size) == (
        250,
        4,
        1024,
    )
    first, second = config.run.samples
    assert first == {"prompt": "sks in a bucket", "negative": "blurry", "seed": 42}
    assert second["seed"] == 43
    assert (config.precision.base, config.train.optimizer) == ("fp8", "prodigy")
    assert (
        next(
            outcome.source_key.line
            for outcome in result.outcomes
            if outcome.source_key.name == "train.lr"
        )
        == 20
    )


def test_ai_toolkits_pairs(tmp_path):
    text = AI_TOOLKIT.replace("caption_ext: txt", "control_path: before")
    _, config = made(tmp_path, "edit.yaml", text)
    assert config.images.train == [
        {"name": "mine", "resolution": [512, 768, 1024], "controls": "before"}
    ]


@pytest.mark.parametrize(
    "setting",
    [
        "control_path: [person, coat]",
        "control_path_1: person\n            control_path_2: coat\n            control_path_3: null",
        "control_path: person\n            control_path_2: coat",
    ],
)
def test_ai_toolkits_reference_pictures(tmp_path, setting):
    lines = AI_TOOLKIT.splitlines()
    (line,) = [line for line in lines if "caption_ext: txt" in line]
    indent = line[: len(line) - len(line.lstrip(" -"))].replace("-", " ")
    setting = setting.replace("\n            ", "\n" + indent)
    _, config = made(tmp_path, "edit.yaml", AI_TOOLKIT.replace("caption_ext: txt", setting))
    (source,) = config.images.train
    assert source["controls"] == ["person", "coat"]


def test_ai_toolkits_samples_have_several_reference_pictures(tmp_path):
    samples = [{"prompt": "wear it", "ctrl_img_1": "a.png", "ctrl_img_2": "b.png"}]
    text = re.sub(r"prompts:.*", f"samples: {json.dumps(samples)}", AI_TOOLKIT, count=1)
    _, config = made(tmp_path, "edit.yaml", text)
    assert config.run.samples[0]["control"] == ["a.png", "b.png"]


def test_onetrainers_json(tmp_path):
    result, config = made(tmp_path, "config.json", json.dumps(ONETRAINER))
    assert (result.tool, config.adapter.r, config.adapter.alpha, config.train.epochs) == (
        "onetrainer",
        16,
        1.0,
        20.0,
    )
    assert config.images.train == [{"name": "mine", "repeats": 3}]
    assert (config.diffusion.logit_std, config.diffusion.logit_mean, config.images.tag_orders) == (
        0.8,
        0.2,
        8,
    )
    assert (config.run.adapters_every, config.run.sample_every, config.train.weight_decay) == (
        200,
        None,
        0.02,
    )


def test_lokr_dora_class_pictures_and_resolutions_are_carried(tmp_path):
    lycoris = KOHYA.replace(
        '"networks.lora"', '"lycoris.kohya"\nnetwork_args = ["algo=lokr", "factor=8", "conv_dim=4"]'
    )
    more = (
        DATA
        + '\n[[datasets]]\nresolution = [768, 768]\n  [[datasets.subsets]]\n  image_dir = "small"\n'
    )
    result, config = made(
        tmp_path, "run.toml", lycoris, **{"data.toml": more, "prompts.txt": "a cat"}
    )
    assert (config.adapter.kind, config.adapter.factor, config.adapter.r) == ("lokr", 8, 32)
    assert config.images.train[1] == {"name": "small", "resolution": 768}
    assert next(o.source_key.line for o in result.outcomes if o.result == "adapter.factor: 8") == 3

    network = "{type: lokr, lokr_full_rank: true, lokr_factor: 4, linear: 16, linear_alpha: 16}"
    text = AI_TOOLKIT.replace("{type: lora, linear: 16, linear_alpha: 16}", network)
    _, config = made(tmp_path, "dog.yaml", text)
    assert (config.adapter.kind, config.adapter.factor) == ("lokr", 4)
    assert config.adapter.alpha == config.adapter.r >= 65536

    settings = {**ONETRAINER, "lora_decompose": True, "resolution": "512,768"}
    _, config = made(tmp_path, "config.json", json.dumps(settings))
    assert (config.adapter.dora, config.images.train) == (
        True,
        [{"name": "mine", "repeats": 3, "resolution": [512, 768]}],
    )

    script = DIFFUSERS.replace("--push_to_hub", "--num_class_images=200 --use_dora")
    result, config = made(tmp_path, "train.sh", script)
    assert (config.adapter.dora, config.images.regularisation[0]["draw"]) == (True, 200)
    assert (
        next(o.source_key.line for o in result.outcomes if o.source_key.name == "num_class_images")
        == 9
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.yaml",
            AI_TOOLKIT.replace("type: lora", "type: locon"),
            "network.type: locon is not offered",
        ),
        (
            "a.yaml",
            AI_TOOLKIT.replace("type: sd_trainer", "type: concept_slider"),
            "concept_slider is not offered",
        ),
        ("a.toml", KOHYA.replace("networks.lora", "lycoris.kohya"), "lycoris.kohya is not offered"),
        (
            "a.json",
            json.dumps({**ONETRAINER, "training_method": "EMBEDDING"}),
            "EMBEDDING is not offered",
        ),
        (
            "a.sh",
            DIFFUSERS.replace("--push_to_hub", "--train_text_encoder"),
            "SDXL and Stable Diffusion only",
        ),
    ],
)
def test_what_is_not_offered_stops_an_import(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=said):
        translate(tmp_path / name)


def test_prodigy_and_simpletuners_defaults_are_carried(tmp_path):
    settings = {
        "--model_type": "lora",
        "--model_family": "flux",
        "--optimizer": "prodigy",
        "--learning_rate": 1.0,
    }
    settings |= {
        "--pretrained_model_name_or_path": "FLUX.1-dev",
        "--max_train_steps": 10,
        "--mixed_precision": "bf16",
    }
    _, config = made(tmp_path, "config.json", json.dumps(settings))
    assert (config.train.optimizer, config.train.learning_rate) == ("prodigy", 1.0)
    assert (config.diffusion.shift, config.train.clip, config.adapter.dropout) == (3.0, 2.0, 0.1)
    assert "to_q" in config.adapter.targets


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "kohya.toml",
            KOHYA.replace("dataset_config", 'network_weights = "dog.safetensors"\ndataset_config'),
        ),
        (
            "ai_toolkit.yaml",
            AI_TOOLKIT.replace("linear: 16,", "linear: 16, pretrained_lora_path: dog.safetensors,"),
        ),
        ("onetrainer.json", json.dumps({**ONETRAINER, "lora_model_name": "dog.safetensors"})),
        (
            "config.json",
            json.dumps(
                {
                    "model_type": "lora", "model_family": "flux", "lora_rank": 8, "init_lora": "dog.safetensors",
                    "pretrained_model_name_or_path": "flux", "data_backend_config": "data.json",
                }
            ),
        ),
    ],
)  # fmt: skip
def test_a_run_that_starts_from_a_lora_keeps_the_ranks_of_its_file(tmp_path, name, text):
    result, config = made(tmp_path, name, text, **{"data.toml": DATA, "data.json": "[]"})
    assert config.adapter.start_from == "dog.safetensors"
    assert "  r:" not in result.text
    assert any("keeps its own ranks" in note for note in result.notes)


def test_another_vae_is_translated_unless_it_is_on_the_hub(tmp_path):
    for value, expected in (("vae.safetensors", "vae.safetensors"), ("someone/vae", None)):
        text = KOHYA.replace("dataset_config", f'vae = "{value}"\ndataset_config')
        result, config = made(tmp_path, "kohya.toml", text, **{"data.toml": DATA})
        assert config.model.vae == expected
        (outcome,) = [o for o in result.outcomes if o.source_key.name == "vae"]
        assert expected or "model.vae takes a file or a folder" in outcome.note
