"""Checkpoints in one file, in the names of the program that made them, as pipelines."""

import json
import re
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from isotype.tasks.choose import train
from isotype.tasks.diffusion.pipeline import PipelineFolder

from .models import refused

RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}  # fmt: skip
OUTER = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2", "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0", "conv_out": "out.2", "mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}  # fmt: skip
ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def unet_name(name, layers):
    """The name in Stable Diffusion's own code."""

    def place(found):
        side, i, kind, j = found[1], int(found[2]), found[3], int(found[4])
        if side == "down":
            at = (layers + 1) * (i + 1) if kind == "downsamplers" else (layers + 1) * i + j + 1
            return f"input_blocks.{at}." + {"resnets": "0", "attentions": "1", "downsamplers": "0.op"}[kind]
        attends = i == 1  # of the tiny model
        at = (layers + 1) * i + (layers if kind == "upsamplers" else j)
        return f"output_blocks.{at}." + {"resnets": "0", "attentions": "1", "upsamplers": "2.conv" if attends else "1.conv"}[kind]

    name = re.sub(
        r"^(down|up)_blocks\.(\d)\.(\w+)\.(\d)(\.conv(?=\.))?" if "samplers" in name else r"^(down|up)_blocks\.(\d)\.(\w+)\.(\d)",
        place,
        name,
    )
    for ours, theirs in OUTER.items():
        name = re.sub(rf"^{re.escape(ours)}\.", f"{theirs}.", name)
    return (
        re.sub(r"\.(norm1|conv1|norm2|conv2|time_emb_proj|conv_shortcut)\.(weight|bias)$", lambda m: f".{RESNET[m[1]]}.{m[2]}", name)
        if "transformer_blocks" not in name
        else name
    )


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
    tensors = {f"model.diffusion_model.{unet_name(n, 1)}": t for n, t in pipe.unet.state_dict().items()}
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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))


def test_a_checkpoint_in_one_file_is_the_pipeline_that_it_was(drawn, studio, tmp_path, cache):
    pipe = as_one_file(studio.sd1, tmp_path / "pony.safetensors")
    settings_of(studio.sd1, tmp_path / "pony")
    found = PipelineFolder.open(str(tmp_path / "pony.safetensors"))
    again = DiffusionPipeline.from_pretrained(found.path)
    for part in ("unet", "vae", "text_encoder"):
        ours, theirs = (getattr(one, part).state_dict() for one in (again, pipe))
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items()), part
    assert PipelineFolder.open(str(tmp_path / "pony.safetensors")).path == found.path
    loaded = drawn(model=tmp_path / "pony.safetensors", diffusion={"max_text_length": None})
    assert train(loaded) == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "done"


def test_a_denoiser_in_one_file_takes_the_other_parts_from_the_folder(studio, tmp_path, cache):
    tensors = {name: tensor + 1 for name, tensor in load_file(studio.flux / "transformer/diffusion_pytorch_model.safetensors").items()}
    save_file(tensors, tmp_path / "mine.safetensors")
    shutil.copytree(studio.flux, tmp_path / "mine")
    found = PipelineFolder.open(str(tmp_path / "mine.safetensors"))
    kept = load_file(found.path / "transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors.items())
    assert (found.path / "text_encoder_2/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "tensors", "said"),
    [
        ("a.ckpt", None, "not a .safetensors file: a pickle can run code"),
        ("a.safetensors", {}, "HeaderTooSmall|header too small"),
        ("a.safetensors", {"blocks.0.weight": torch.zeros(2)}, "diffusers does not know this file's family by its tensors"),
        ("a.safetensors", {"w": torch.zeros(2, dtype=torch.float8_e4m3fn)}, "F8_E4M3 weights in a single file are not read"),
        ("a.safetensors", {"double_blocks.0.weight": torch.zeros(2)}, "diffusers does not read it as a StableDiffusion3Pipeline"),
    ],
)
def test_a_file_that_is_none_is_refused(drawn, studio, tmp_path, cache, name, tensors, said):
    file = tmp_path / name
    save_file(tensors, file) if tensors else file.write_bytes(b"")
    if tensors and "blocks.0.weight" not in tensors:
        settings_of(studio.sd3, tmp_path / "a")
    assert re.search(said, refused(drawn(model=file)))
