"""`isotype import` of files of musubi-tuner, diffusion-pipe, ai-toolkit and SimpleTuner that train
on clips: lengths of clips, sources, sizes of samples, and what is refused.
"""

from __future__ import annotations

import json

import pytest

from isotype.errors import UsageError
from isotype.translate import Fate, translate
from tests.translate.test_picture_tools import made

MUSUBI = """accelerate launch --mixed_precision bf16 musubi-tuner/wan_train_network.py \\
  --task t2v-A14B --dit low.safetensors --dit_high_noise high.safetensors --t5 umt5.pth --vae vae.pth \\
  --dataset_config data.toml --sdpa --mixed_precision bf16 --fp8_base --fp8_scaled --blocks_to_swap 20 \\
  --optimizer_type adamw8bit --learning_rate 2e-4 --network_module networks.lora_wan --network_dim 16 \\
  --timestep_sampling shift --discrete_flow_shift 5.0 --max_timestep 875 --preserve_distribution_shape \\
  --max_train_epochs 8 --output_dir out --sample_prompts prompts.txt
"""
MUSUBI_DATA = """[general]
resolution = [640, 384]
batch_size = 2
caption_extension = ".txt"

[[datasets]]
video_directory = "dance"
cache_directory = "cache"
target_frames = [1, 26, 49]
frame_extraction = "head"
source_fps = 30.0
num_repeats = 2

[[datasets]]
image_directory = "photos"
resolution = [1024, 1024]

[[datasets]]
video_jsonl_file = "rows.jsonl"
target_frames = [17]
frame_extraction = "uniform"
frame_sample = 3
"""
DIFFUSION_PIPE = """output_dir = "runs"
dataset = "data.toml"
epochs = 50
micro_batch_size_per_gpu = 1
gradient_clipping = 1.0
warmup_steps = 20
blocks_to_swap = 30
save_every_n_steps = 200
video_clip_mode = "single_middle"
eval_every_n_epochs = 1

[model]
type = "wan"
ckpt_path = "/models/Wan2.2-T2V-A14B"
transformer_path = "/models/wan2.2_t2v_high_noise_14B.safetensors"
dtype = "bfloat16"
transformer_dtype = "float8"
timestep_sample_method = "logit_normal"
min_t = 0.875
max_t = 1

[adapter]
type = "lora"
rank = 24
dtype = "bfloat16"

[optimizer]
type = "AdamW8bitKahan"
lr = 5e-5
betas = [0.9, 0.99]
weight_decay = 0.02

[monitoring]
enable_wandb = true
wandb_api_key = "verysecret"
"""
DIFFUSION_PIPE_DATA = """resolutions = [512, [832, 480]]
enable_ar_bucket = true
min_ar = 0.5
max_ar = 1.9
num_ar_buckets = 7
frame_buckets = [1, 33, 65]

[[directory]]
path = "clips"
num_repeats = 4

[[directory]]
path = "photos"
resolutions = [1024]
"""
AI_TOOLKIT = """job: extension
config:
  name: dance
  process:
    - type: sd_trainer
      network: {type: lora, linear: 16, linear_alpha: 16}
      datasets:
        - {folder_path: clips, num_frames: 40, resolution: [632], shrink_video_to_frames: false, fps: 12}
        - {folder_path: photos, num_frames: 1, resolution: [632], num_repeats: 2}
      train: {batch_size: 1, steps: 100, lr: 1e-4, dtype: bf16, switch_boundary_every: 10}
      model:
        name_or_path: wan22
        arch: wan22_14b
        model_kwargs: {train_high_noise: true, train_low_noise: true}
      sample:
        width: 832
        height: 480
        num_frames: 81
        fps: 16
        seed: 7
        samples: [{prompt: a dance}, {prompt: a still, num_frames: 1}]
"""
SIMPLETUNER = {
    "model_type": "lora", "model_family": "ltxvideo", "model_flavour": "0.9.0", "mixed_precision": "bf16", "lora_rank": 8,
    "data_backend_config": "data.json", "max_train_steps": 10, "framerate": 24, "validation_prompt": "a dance",
    "validation_resolution": "768x512", "validation_num_video_frames": 50, "resolution": 480, "optimizer": "adamw_bf16",
}  # fmt: skip
SIMPLETUNER_DATA = [
    {
        "id": "clips", "type": "local", "dataset_type": "video", "instance_data_dir": "clips", "caption_strategy": "textfile",
        "resolution": 480, "resolution_type": "pixel", "video": {"num_frames": 50, "min_frames": 50}, "repeats": 1,
    },
    {"id": "short", "type": "local", "dataset_type": "video", "instance_data_dir": "short", "video": {"min_frames": 25}},
    {"id": "photos", "type": "local", "instance_data_dir": "photos", "caption_strategy": "textfile"},
]  # fmt: skip


def notes(result) -> dict[str, str]:
    return {
        outcome.source_key.name: f"{outcome.fate}: {outcome.result} {outcome.note}"
        for outcome in result.outcomes
    }


def unknown_keys(result) -> list[str]:
    return [
        outcome.source_key.name
        for outcome in result.outcomes
        if "does not know this key" in outcome.note
    ]


def test_a_command_of_musubi_tuner_with_its_datasets(tmp_path):
    prompts = "a dance --w 832 --h 480 --f 81 --s 20 --d 7\n"
    result, config = made(
        tmp_path, "go.sh", MUSUBI, **{"data.toml": MUSUBI_DATA, "prompts.txt": prompts}
    )
    assert result.tool == "musubi-tuner"
    assert unknown_keys(result) == []
    images = config.images
    assert (images.frames, images.resolution, images.max_aspect) == (49, 1024, 2.0)
    assert images.train == [
        {"name": "dance", "frames": 25, "repeats": 2, "resolution": 480},
        {"name": "dance", "repeats": 2, "resolution": 480},
        {"name": "photos", "frames": 1},
        {"name": "rows.jsonl", "frames": 17, "resolution": 480},
    ]
    assert config.model.name == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    assert (config.diffusion.expert, config.diffusion.shift) == ("low_noise", 5.0)
    assert config.diffusion.most_noise == 1.0, "the denoiser has its own limits"
    assert (config.model.offload, config.precision.base) == ("blocks", "fp8")
    sample = {"prompt": "a dance", "size": "832x480", "steps": 20, "frames": 81, "seed": 7}
    assert config.run.samples == [sample]
    said = notes(result)
    assert "diffusion.expert=high_noise" in said["dit_high_noise"]
    assert "1 is left out" in said["dataset.0.target_frames"]
    assert said["dataset.2.frame_extraction"].startswith("not offered: ")
    assert "no effect" in said["dataset.0.source_fps"]


def test_a_dataset_file_of_musubi_tuner_alone(tmp_path):
    full = (
        'video_directory = "long"\nframe_extraction = "full"\nmax_frames = 60\nresolution = 512\n'
    )
    result, config = made(tmp_path, "data.toml", f"[[datasets]]\n{full}")
    assert (config.images.train, config.images.frames) == ("long", 57)
    assert config.images.resolution == 512
    assert config.precision.preset == "auto", "the file says nothing about the training"
    assert "a dataset file" in result.notes[0]
    assert "shorter videos cannot be used" in notes(result)["dataset.0.frame_extraction"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("t2v-A14B", "i2v-14B", "task: i2v-14b is not offered"),
        ("wan_train_network", "hv_train_network", "hv_train_network.py: is not offered"),
        ("lora_wan", "loha", "network_module: networks.loha is not offered"),
    ],
)
def test_what_musubi_tuner_trains_and_isotype_does_not(tmp_path, old, new, reason):
    (tmp_path / "go.sh").write_text(MUSUBI.replace(old, new))
    with pytest.raises(UsageError, match=reason):
        translate(tmp_path / "go.sh")


def test_a_file_of_diffusion_pipe_with_its_directories(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").write_bytes(b"")
    result, config = made(
        tmp_path, "run.toml", DIFFUSION_PIPE, **{"data.toml": DIFFUSION_PIPE_DATA}
    )
    assert result.tool == "diffusion-pipe"
    assert unknown_keys(result) == []
    images = config.images
    assert (images.frames, images.resolution, images.max_aspect) == (33, 1024, 2.0)
    assert images.train == [
        {"name": "clips", "repeats": 4, "resolution": [512, 624]},
        {"name": "photos", "frames": 1},
    ]
    assert config.model.name == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    assert (config.diffusion.expert, config.diffusion.least_noise) == ("high_noise", 0.0)
    assert (config.adapter.r, config.adapter.alpha, config.run.adapter_format) == (
        24,
        24.0,
        "comfyui",
    )
    train = config.train
    assert (train.optimizer, train.learning_rate, train.beta2) == ("adamw8bit", 5e-5, 0.99)
    assert (train.warmup, train.epochs, config.model.offload) == (20, 50, "blocks")
    assert (config.precision.base, config.run.trackers) == ("fp8", ["wandb"])
    said = notes(result)
    assert said["video_clip_mode"].startswith("not offered: ")
    assert "the shortest of them" in said["dataset.0.frame_buckets"]
    masks = DIFFUSION_PIPE_DATA.replace('path = "clips"', 'path = "clips"\nmask_path = "masks"')
    (tmp_path / "data.toml").write_text(masks)
    masked = notes(translate(tmp_path / "run.toml"))["dataset.0.mask_path"]
    assert "not offered:  a mask for the loss of clips" in masked
    assert "verysecret" not in result.text + str(result.outcomes)


def test_files_of_diffusion_pipe_without_a_model_and_with_another_one(tmp_path):
    pictures = 'resolutions = [512]\nenable_ar_bucket = true\n[[directory]]\npath = "mine"\n'
    result, config = made(tmp_path, "data.toml", pictures)
    assert (config.images.train, config.images.frames) == ("mine", 1)
    assert "a dataset file" in result.notes[0]
    for old, new, reason in (
        ('"wan"', '"hunyuan-video"', "model.type: hunyuan-video is not offered"),
        ("Wan2.2-T2V-A14B", "Wan2.1-I2V-14B-480P", "only models that generate videos from text"),
    ):
        (tmp_path / "run.toml").write_text(DIFFUSION_PIPE.replace(old, new))
        with pytest.raises(UsageError, match=reason):
            translate(tmp_path / "run.toml")


def test_clips_and_both_denoisers_of_ai_toolkit(tmp_path):
    result, config = made(tmp_path, "dance.yaml", AI_TOOLKIT)
    assert unknown_keys(result) == []
    images = config.images
    assert (images.frames, images.frame_rate, images.resolution) == (37, 12.0, 624)
    assert images.train == ["clips", {"name": "photos", "frames": 1, "repeats": 2}]
    assert config.run.sample_frames == 81
    assert config.run.samples == [
        {"size": "832x480", "prompt": "a dance", "seed": 7},
        {"size": "832x480", "prompt": "a still", "frames": 1, "seed": 7},
    ]
    assert config.diffusion.expert == "low_noise"
    said = notes(result)
    assert "diffusion.expert=high_noise" in said["model.model_kwargs.train_high_noise"]
    only_high = AI_TOOLKIT.replace("train_low_noise: true", "train_low_noise: false")
    assert made(tmp_path, "high.yaml", only_high)[1].diffusion.expert == "high_noise"
    spread = AI_TOOLKIT.replace(", shrink_video_to_frames: false", "")
    result, config = made(tmp_path, "spread.yaml", spread)
    assert config.images.frame_rate is None
    assert "spreads them over the whole video" in notes(result)["dataset.0.num_frames"]
    ltx2 = AI_TOOLKIT.replace("wan22_14b", "ltx2").replace("81", "100")
    result, config = made(tmp_path, "ltx2.yaml", ltx2)
    assert (config.images.frames, config.images.resolution) == (33, 608)
    assert (config.run.sample_frames, config.diffusion.expert) == (97, None)
    for architecture in ("wan21_i2v", "wan22_14b_i2v"):
        (tmp_path / "other.yaml").write_text(AI_TOOLKIT.replace("wan22_14b", architecture))
        with pytest.raises(UsageError, match=f"model.arch: {architecture} is not offered"):
            translate(tmp_path / "other.yaml")


def test_a_job_of_ai_toolkit_on_pictures_has_no_frames(tmp_path):
    pictures = AI_TOOLKIT.replace("num_frames: 40", "num_frames: 1").replace("81", "1")
    result, config = made(tmp_path, "a.yaml", pictures)
    assert (config.images.frames, config.run.sample_frames) == (1, None)
    assert "no effect" in notes(result)["dataset.0.num_frames"]


def test_videos_of_simpletuner(tmp_path):
    files = {"data.json": json.dumps(SIMPLETUNER_DATA)}
    result, config = made(tmp_path, "config.json", json.dumps(SIMPLETUNER), **files)
    images = config.images
    assert (images.frames, images.frame_rate, images.resolution) == (49, 24.0, 480)
    assert images.train == [
        {"name": "clips", "repeats": 2},
        {"name": "short", "frames": 25},
        {"name": "photos", "frames": 1},
    ]
    assert (config.model.name, config.run.sample_frames) == ("Lightricks/LTX-Video", 49)
    assert config.run.samples == [{"size": "768x512", "prompt": "a dance"}]
    said = notes(result)
    assert "the first frames of each video" in said["dataset.0.video"]
    assert "the same number of frames" in said["dataset.1.video"]


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        ({"model_family": "wan", "model_flavour": "i2v-14b-2.1"}, "video", "i2v-14b-2.1 is not"),
        ({"model_family": "flux"}, "video", "video is not offered: flux"),
        ({}, "audio", "audio is not offered: ltxvideo"),
    ],
)
def test_what_simpletuner_trains_and_isotype_does_not(tmp_path, settings, kind, reason):
    datasets = [{**SIMPLETUNER_DATA[0], "dataset_type": kind}]
    (tmp_path / "data.json").write_text(json.dumps(datasets))
    (tmp_path / "config.json").write_text(json.dumps(SIMPLETUNER | settings))
    with pytest.raises(UsageError, match=reason):
        translate(tmp_path / "config.json")


def test_pictures_of_simpletuner_have_no_video_settings(tmp_path):
    datasets = [SIMPLETUNER_DATA[2] | {"video": {"num_frames": 9}}]
    files = {"data.json": json.dumps(datasets)}
    settings = {key: value for key, value in SIMPLETUNER.items() if "video" not in key}
    result, config = made(tmp_path, "config.json", json.dumps(settings), **files)
    assert config.images.frames == 1
    (video,) = (o for o in result.outcomes if o.source_key.name == "dataset.0.video")
    assert video.fate == Fate.NO_EFFECT
