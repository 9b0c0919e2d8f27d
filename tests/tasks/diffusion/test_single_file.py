"""Checkpoints in one file, in the names of the program that made them, as pipelines."""

import json
import re
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from safetensors.torch import load_file, save_file

from isotype.inference.diffusion import merge_denoiser
from isotype.tasks.choose import plan, train
from isotype.tasks.diffusion.pipeline import PipelineFolder
from isotype.tasks.diffusion.single_file import original_name

from .models import refused

ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def vae_name(name):
    name = re.sub(r"encoder\.down_blocks\.(\d)\.resnets\.(\d)", r"encoder.down.\1.block.\2", name)
    name = re.sub(r"decoder\.up_blocks\.(\d)\.resnets\.(\d)", lambda m: f"decoder.up.{2 - int(m[1])}.block.{m[2]}", name)
    name = re.sub(r"encoder\.down_blocks\.(\d)\.downsamplers\.0", r"encoder.down.\1.downsample", name)
    name = re.sub(r"decoder\.up_blocks\.(\d)\.upsamplers\.0", lambda m: f"decoder.up.{2 - int(m[1])}.upsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    for ours, theirs in ATTENTION.items():
        name = name.replace(f"mid_block.attentions.0.{ours}.", f"mid.attn_1.{theirs}.")
    return name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")


def as_one_file(pipeline, file):
    """A Stable Diffusion 1.5 pipeline in the names of its own code."""
    pipe = DiffusionPipeline.from_pretrained(pipeline)
    tensors = {f"model.diffusion_model.{original_name(n, pipe.unet.config)}": t for n, t in pipe.unet.state_dict().items()}
    for name, tensor in pipe.vae.state_dict().items():
        tensors[f"first_stage_model.{vae_name(name)}"] = (
            tensor[..., None, None] if re.search(r"attentions.*\.to_.*weight", name) else tensor
        )
    for name, tensor in pipe.text_encoder.state_dict().items():
        tensors[f"cond_stage_model.transformer.{name if name.startswith('text_model') else f'text_model.{name}'}"] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return pipe


def settings_of(pipeline, folder):
    shutil.copytree(pipeline, folder, ignore=shutil.ignore_patterns("*.safetensors"))


def test_a_checkpoint_in_one_file_is_the_pipeline_that_it_was(drawn, studio, tmp_path):
    pipe = as_one_file(studio.sd1, tmp_path / "pony.safetensors")
    settings_of(studio.sd1, tmp_path / "pony")
    found = PipelineFolder.open(str(tmp_path / "pony.safetensors"))
    again = found.pipeline(torch.float32, unet=found.denoiser(torch.float32), vae=found.vae(torch.float32))
    for part in ("unet", "vae", "text_encoder"):
        ours, theirs = (getattr(one, part).state_dict() for one in (again, pipe))
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items()), part
    loaded = drawn(model=tmp_path / "pony.safetensors", diffusion={"max_text_length": None})
    assert train(loaded) == 0
    merge_denoiser(tmp_path / "run", tmp_path / "merged")
    settings_of(studio.sd1, tmp_path / "merged/pony")
    opened = PipelineFolder.open(str(tmp_path / "merged/pony.safetensors"))
    whole = opened.pipeline(torch.float32, unet=opened.denoiser(torch.float32), vae=opened.vae(torch.float32))
    merged = load_file(tmp_path / "merged/unet/diffusion_pytorch_model.safetensors")
    read = whole.unet.state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in merged.items())
    assert any(not torch.equal(read[name], tensor) for name, tensor in pipe.unet.state_dict().items())
    apart = DiffusionPipeline.from_pretrained(tmp_path / "merged")
    for one in (whole, apart):
        for part in ("vae", "text_encoder"):
            ours, theirs = (getattr(has, part).state_dict() for has in (one, pipe))
            assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_denoiser_in_one_file_takes_the_other_parts_from_the_folder(studio, tmp_path):
    tensors = {name: tensor + 1 for name, tensor in load_file(studio.flux / "transformer/diffusion_pytorch_model.safetensors").items()}
    save_file(tensors, tmp_path / "mine.safetensors")
    shutil.copytree(studio.flux, tmp_path / "mine")
    config = tmp_path / "mine/transformer/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    found = PipelineFolder.open(str(tmp_path / "mine.safetensors"))
    kept = found.denoiser(torch.float32)
    assert all(torch.equal(kept.state_dict()[name], tensor) for name, tensor in tensors.items())
    assert "quantization_config" not in kept.config
    assert found.pipeline(torch.float32, transformer=kept, vae=None).text_encoder_2 is not None
    assert found.published is None, "the file is not packed, whatever lies beside it"
    scheduler = tmp_path / "mine/scheduler/scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"shift": 7.0}))
    assert PipelineFolder.open(str(tmp_path / "mine.safetensors")).config("scheduler")["shift"] == 7.0


def test_a_file_is_not_looked_for_on_the_hub(drawn, studio, tmp_path, monkeypatch):
    as_one_file(studio.sd1, tmp_path / "pony.safetensors")
    settings_of(studio.sd1, tmp_path / "pony")
    asked = []
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", lambda *given, **_: asked.append(given))
    plan(drawn(model=tmp_path / "pony.safetensors", diffusion={"max_text_length": None}))
    assert asked == []


WIDTHS = {"in_channels": 4, "out_channels": 4, "layers_per_block": 2}
OF_SDXL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), "block_out_channels": (320, 640, 1280),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816, "cross_attention_dim": 2048,
}  # fmt: skip


@pytest.mark.parametrize(("settings", "count"), [(OF_SDXL, 1680), ({"cross_attention_dim": 768, "attention_head_dim": 8}, 686)])
def test_names_are_those_that_diffusers_reads(settings, count):
    with torch.device("meta"):
        unet = UNet2DConditionModel(**WIDTHS, **settings)
    tensors = unet.state_dict()
    original = {f"model.diffusion_model.{original_name(name, unet.config)}": tensor for name, tensor in tensors.items()}
    read = convert_ldm_unet_checkpoint(original, dict(unet.config))
    assert len(read) == count
    assert {name: tensor.shape for name, tensor in read.items()} == {name: tensor.shape for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "tensors", "said"),
    [
        ("a.ckpt", None, "not a .safetensors file: a pickle can run code"),
        ("a.png", None, "not a .safetensors file: expected one, or a pipeline's folder"),
        ("a.gguf", None, "a denoiser packed as GGUF is for inference, and is not read"),
        ("a.safetensors", {}, "HeaderTooSmall|header too small"),
        ("a.safetensors", {"blocks.0.weight": torch.zeros(2)}, "diffusers does not know this file's family by its tensors"),
        ("a.safetensors", {"w": torch.zeros(2, dtype=torch.float8_e4m3fn)}, "F8_E4M3 weights in a single file are not read"),
        ("a.safetensors", {"w": torch.zeros(2, dtype=torch.uint8)}, "U8 weights in a single file are not read"),
        (
            "a.safetensors",
            {"double_blocks.0.weight": torch.zeros(2)},
            "does not read it as the transformer of a StableDiffusion3Pipeline",
        ),
    ],
)
def test_a_file_that_is_none_is_refused(drawn, studio, tmp_path, name, tensors, said):
    file = tmp_path / name
    save_file(tensors, file) if tensors else file.write_bytes(b"")
    if tensors and "blocks.0.weight" not in tensors:
        settings_of(studio.sd3, tmp_path / "a")
    assert re.search(said, refused(drawn(model=file)))


@pytest.mark.parametrize(
    ("part", "name", "said"),
    [
        ("transformer", "q8.gguf", "packed as GGUF is for inference"),
        ("text_encoder", "pytorch_model.bin", "pytorch_model.bin can run code"),
    ],
)
def test_a_folder_without_weights_that_are_read_is_refused_before_pictures_are_encoded(drawn, studio, tmp_path, part, name, said):
    folder = shutil.copytree(studio.sd3, tmp_path / "sd3")
    (weights,) = (folder / part).glob("*.safetensors")
    weights.rename(weights.with_name(name))
    assert said in refused(drawn(model=folder))
