"""Checkpoints in one file, in the names of the program that made them, as pipelines."""

import json
import re
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from isotype.config.load import load
from isotype.errors import UsageError
from isotype.tasks.choose import choose_task, plan_run, train
from tests.api import (
    PipelineFolder,
    draw_pictures,
    load_frozen_denoiser,
    merge_denoiser,
    pipeline,
    prepare_data,
    widest_dtype,
)
from tests.published import FORMATS, element, packed
from tests.training.interrupted import cut_back

from .models import refused

_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}  # fmt: skip
_OUTER = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2", "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2", "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1", "mid_block.resnets.1": "middle_block.2",
}  # fmt: skip
_BLOCK = re.compile(
    r"^(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)(\.conv(?=\.(?:weight|bias)$))?"
)


def original_name(name, config):
    """The name of a U-Net's tensor in the code of Stable Diffusion."""
    each = int(config["layers_per_block"]) + 1

    def place(found):
        side, i, kind, j = found[1], int(found[2]), found[3], int(found[4])
        of_resnet = found[5] or "" if kind in ("resnets", "attentions") else ""
        if side == "down":
            at = each * (i + 1) if kind == "downsamplers" else each * i + j + 1
            return (
                f"input_blocks.{at}."
                + {"resnets": "0", "attentions": "1", "downsamplers": "0.op"}[kind]
                + of_resnet
            )
        after = 2 if "CrossAttn" in config["up_block_types"][i] else 1
        at = each * i + (each - 1 if kind == "upsamplers" else j)
        return (
            f"output_blocks.{at}."
            + {"resnets": "0", "attentions": "1", "upsamplers": f"{after}.conv"}[kind]
            + of_resnet
        )

    name = _BLOCK.sub(place, name)
    for ours, theirs in _OUTER.items():
        if name.startswith(f"{ours}."):
            name = theirs + name.removeprefix(ours)
    layer, _, last = name.rpartition(".")
    block, _, part = layer.rpartition(".")
    inside = re.fullmatch(r"(input_blocks|output_blocks)\.\d+\.0|middle_block\.[02]", block)
    return f"{block}.{_RESNET[part]}.{last}" if inside and part in _RESNET else name


ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def vae_name(name):
    name = re.sub(r"encoder\.down_blocks\.(\d)\.resnets\.(\d)", r"encoder.down.\1.block.\2", name)
    name = re.sub(
        r"decoder\.up_blocks\.(\d)\.resnets\.(\d)",
        lambda m: f"decoder.up.{2 - int(m[1])}.block.{m[2]}",
        name,
    )
    name = re.sub(
        r"encoder\.down_blocks\.(\d)\.downsamplers\.0", r"encoder.down.\1.downsample", name
    )
    name = re.sub(
        r"decoder\.up_blocks\.(\d)\.upsamplers\.0",
        lambda m: f"decoder.up.{2 - int(m[1])}.upsample",
        name,
    )
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    for ours, theirs in ATTENTION.items():
        name = name.replace(f"mid_block.attentions.0.{ours}.", f"mid.attn_1.{theirs}.")
    return name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")


def as_one_file(pipeline, file):
    """A Stable Diffusion 1.5 pipeline in the names of its own code."""
    pipe = DiffusionPipeline.from_pretrained(pipeline)
    tensors = {
        f"model.diffusion_model.{original_name(n, pipe.unet.config)}": t
        for n, t in pipe.unet.state_dict().items()
    }
    for name, tensor in pipe.vae.state_dict().items():
        tensors[f"first_stage_model.{vae_name(name)}"] = (
            tensor[..., None, None] if re.search(r"attentions.*\.to_.*weight", name) else tensor
        )
    for name, tensor in pipe.text_encoder.state_dict().items():
        tensors[
            f"cond_stage_model.transformer.{name if name.startswith('text_model') else f'text_model.{name}'}"
        ] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return pipe


def settings_of(pipeline, folder):
    shutil.copytree(pipeline, folder, ignore=shutil.ignore_patterns("*.safetensors"))


def test_a_checkpoint_in_one_file_is_the_pipeline_that_it_was(drawn, studio, tmp_path):
    pipe = as_one_file(studio.sd1, tmp_path / "pony.safetensors")
    settings_of(studio.sd1, tmp_path / "pony")
    found = PipelineFolder.open(str(tmp_path / "pony.safetensors"))
    again = found.pipeline(
        torch.float32, unet=found.denoiser(torch.float32), vae=found.vae(torch.float32)
    )
    for part in ("unet", "vae", "text_encoder"):
        ours, theirs = (getattr(one, part).state_dict() for one in (again, pipe))
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items()), part
    loaded = drawn(model=tmp_path / "pony.safetensors", diffusion={"max_text_length": None})
    assert train(loaded) == 0
    card = (tmp_path / "run/adapter/README.md").read_text()
    assert "StableDiffusionPipeline.from_single_file(base, " in card
    merge_denoiser(tmp_path / "run", tmp_path / "merged")
    settings_of(studio.sd1, tmp_path / "merged/pony")
    opened = PipelineFolder.open(str(tmp_path / "merged/pony.safetensors"))
    whole = opened.pipeline(
        torch.float32, unet=opened.denoiser(torch.float32), vae=opened.vae(torch.float32)
    )
    merged = load_file(tmp_path / "merged/unet/diffusion_pytorch_model.safetensors")
    read = whole.unet.state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in merged.items())
    assert any(
        not torch.equal(read[name], tensor) for name, tensor in pipe.unet.state_dict().items()
    )
    apart = DiffusionPipeline.from_pretrained(tmp_path / "merged")
    for one in (whole, apart):
        for part in ("vae", "text_encoder"):
            ours, theirs = (getattr(has, part).state_dict() for has in (one, pipe))
            assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def marked(studio, folder, *, tensors=(), **metadata):
    """A Stable Diffusion 1.5 in one file with these markers, and its settings beside it."""
    file = folder / "noob.safetensors"
    if not file.exists():
        as_one_file(studio.sd1, file)
        settings_of(studio.sd1, folder / "noob")
    weights = {
        name: tensor.half() for name, tensor in load_file(file).items() if tensor.numel() > 1
    }
    said = {key.replace("__", "."): text for key, text in metadata.items()}
    save_file({**weights, **dict.fromkeys(tensors, torch.tensor([]))}, file, metadata=said)
    return file


V_MARKERS = {
    "tensor of ComfyUI and A1111": {"tensors": ["v_pred"]},
    "ModelSpec": {"modelspec__prediction_type": "v"},
    "ComfyUI's metadata": {"modelspec__predict_key": "v"},
    "kohya's": {"ss_v_parameterization": "True"},
}


@pytest.mark.parametrize("marker", V_MARKERS)
def test_a_v_prediction_file_is_trained_as_v(drawn, studio, tmp_path, marker):
    """Its settings are those of its family, which learns epsilon."""
    file = marked(studio, tmp_path, **V_MARKERS[marker])
    task = choose_task(drawn(model=file).config)
    prepare_data(task, {})
    assert task.run.objective.kind == "v"
    (line,) = [line for line in task.plan_lines() if line.startswith("noob.safetensors is ")]
    assert "v_prediction" in line
    with safe_open(file, framework="pt") as opened:
        names = [*V_MARKERS[marker].get("tensors", []), *(opened.metadata() or {})]
    assert names[0] in line


@pytest.mark.full
def test_a_file_with_zero_terminal_snr_trains_and_draws_and_is_merged_so(
    drawn, studio, tmp_path, capsys
):
    file = marked(studio, tmp_path, tensors=["v_pred", "ztsnr"])
    assert widest_dtype(file) is torch.float16, "an empty tensor in fp32 is no weight"
    loaded = drawn(model=file, run={"samples": ["a red circle"]})
    assert train(loaded) == 0
    assert "v_prediction with zero terminal SNR: tensor v_pred, tensor ztsnr" in (
        capsys.readouterr().out
    )
    task = choose_task(loaded.config)
    prepare_data(task, {})
    assert float(task.run.objective.signal[-1]) == 0.0, "the last step is noise alone"
    pipe = task.run.folder.pipeline(torch.float32, unet=None, vae=None, text_encoder=None)
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    assert pipe.scheduler.config.rescale_betas_zero_snr
    merge_denoiser(tmp_path / "run", tmp_path / "merged")
    merged = DiffusionPipeline.from_pretrained(tmp_path / "merged")
    assert merged.scheduler.config.prediction_type == "v_prediction"
    assert merged.scheduler.config.rescale_betas_zero_snr
    assert {"v_pred", "ztsnr"} <= set(load_file(tmp_path / "merged/noob.safetensors"))


def test_markers_that_leave_a_doubt_are_refused_and_a_setting_decides(
    drawn, studio, tmp_path, subtests
):
    for markers, said in (
        ({"tensors": ["v_pred"], "modelspec__predict_key": "epsilon"}, "do not agree"),
        ({"tensors": ["ztsnr"]}, "from which epsilon cannot be learnt"),
        ({"tensors": ["edm_vpred.sigma_max"]}, "EDM's preconditioning"),
        ({"modelspec__prediction_type": "sample"}, "prediction_type: sample, which is not offered"),
        ({"modelspec__prediction_type": "flow"}, "what its family is not trained with"),
    ):
        file = marked(studio, tmp_path, **markers)
        with subtests.test(said):
            assert said in refused(drawn(model=file))
    for markers, objective in (
        ({"tensors": ["v_pred"], "modelspec__predict_key": "epsilon"}, "epsilon"),
        ({"tensors": ["ztsnr"]}, "v"),
        ({}, "v"),
    ):
        file = marked(studio, tmp_path, **markers)
        with subtests.test(objective, markers=markers):
            task = choose_task(drawn(model=file, diffusion={"objective": objective}).config)
            prepare_data(task, {})
            assert task.run.objective.kind == objective


def test_a_shift_in_a_file_of_flow_matching_is_not_passed_over(drawn, studio, tmp_path):
    shutil.copytree(studio.sd3, tmp_path / "mine")
    weights = load_file(studio.sd3 / "transformer/diffusion_pytorch_model.safetensors")
    file = tmp_path / "mine.safetensors"
    metadata = {"flow_shift": "5.0", "modelspec.prediction_type": "epsilon"}
    save_file(weights, file, metadata=metadata)
    assert "flow_shift says shift 5, and its scheduler has 3" in refused(drawn(model=file))
    task = choose_task(drawn(model=file, diffusion={"shift": 5.0}).config)
    prepare_data(task, {})
    assert any("belongs to a model that learns noise" in line for line in task.plan_lines())


def test_a_file_of_stable_diffusion_2_without_a_marker_asks_for_the_objective(
    drawn, studio, tmp_path, monkeypatch
):
    """The hub has the settings of one of its two kinds."""
    file = marked(studio, tmp_path)
    monkeypatch.setattr(pipeline, "PIPELINE_FILE", "absent.json")
    monkeypatch.setattr(
        pipeline, "find_settings_repository", lambda file: "someone/stable-diffusion-2-1"
    )

    def settings(name, revision):
        monkeypatch.setattr(pipeline, "PIPELINE_FILE", "model_index.json")
        return tmp_path / "noob"

    monkeypatch.setattr(pipeline, "fetch_settings", settings)
    assert "whether it learns epsilon (512 pixels) or v (768)" in refused(drawn(model=file))


def test_a_denoiser_in_one_file_takes_the_other_parts_from_the_folder(studio, tmp_path):
    tensors = {
        name: tensor + 1
        for name, tensor in load_file(
            studio.flux / "transformer/diffusion_pytorch_model.safetensors"
        ).items()
    }
    save_file(tensors, tmp_path / "mine.safetensors")
    shutil.copytree(studio.flux, tmp_path / "mine")
    config = tmp_path / "mine/transformer/config.json"
    config.write_text(
        json.dumps(
            json.loads(config.read_text())
            | {"quantization_config": {"quant_method": "bitsandbytes"}}
        )
    )
    found = PipelineFolder.open(str(tmp_path / "mine.safetensors"))
    kept = found.denoiser(torch.float32)
    assert all(torch.equal(kept.state_dict()[name], tensor) for name, tensor in tensors.items())
    assert "quantization_config" not in kept.config
    assert found.pipeline(torch.float32, transformer=kept, vae=None).text_encoder_2 is not None
    assert found.published_quantisation is None, "the file is not packed, whatever lies beside it"


@pytest.mark.parametrize("prefix", ["diffusion_model.", "model.diffusion_model."])
def test_a_denoiser_alone_may_have_either_prefix(studio, tmp_path, prefix):
    file = tmp_path / "mine.safetensors"
    unet = as_one_file(studio.sd1, file).unet.state_dict()
    long_prefix = "model.diffusion_model."
    tensors = {
        prefix + name.removeprefix(long_prefix): tensor
        for name, tensor in load_file(file).items()
        if name.startswith(long_prefix)
    }
    save_file(tensors, file)
    shutil.copytree(studio.sd1, tmp_path / "mine")
    read = PipelineFolder.open(str(file)).denoiser(torch.float32).state_dict()
    assert set(read) == set(unet)
    assert all(torch.equal(read[name], tensor) for name, tensor in unet.items())


def test_a_prefix_before_diffusers_own_names_is_removed(studio, tmp_path):
    for model, part, prefix in (
        (studio.flux, "transformer", "diffusion_model."),
        (studio.sd1, "unet", "model.diffusion_model."),
    ):
        tensors = load_file(model / part / "diffusion_pytorch_model.safetensors")
        file = tmp_path / f"{part}.safetensors"
        save_file({prefix + name: tensor for name, tensor in tensors.items()}, file)
        shutil.copytree(model, tmp_path / part)
        read = PipelineFolder.open(str(file)).denoiser(torch.float32).state_dict()
        assert set(read) == set(tensors)
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def merged_without_vae(studio, folder):
    """A Stable Diffusion 1.5 in one file that has no VAE, its settings next to it, and the VAE."""
    file = folder / "merge.safetensors"
    vae = as_one_file(studio.sd1, file).vae
    settings_of(studio.sd1, folder / "merge")
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if not n.startswith("first_stage_model.")}, file)
    original = {
        name.removeprefix("first_stage_model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("first_stage_model.")
    }
    return file, vae, original


def test_a_merge_without_its_vae_takes_another_one(drawn, studio, tmp_path, subtests):
    """From a file in either program's names, from a folder, or from the checkpoint's neighbours."""
    file, vae, original = merged_without_vae(studio, tmp_path)
    assert "missing in the checkpoint" in refused(drawn(model=file))
    with pytest.raises(UsageError, match=r"model\.vae: the file or the folder of its VAE"):
        PipelineFolder.open(str(file))
    save_file(original, tmp_path / "original.safetensors")
    save_file(vae.state_dict(), tmp_path / "diffusers.safetensors")
    vae.save_pretrained(tmp_path / "alone")

    def read(**settings):
        opened = PipelineFolder.open(str(file), **settings)
        assert opened.has_encoders, "the merge has its text encoder"
        return opened, opened.vae(torch.float32).state_dict()

    for name in ("original.safetensors", "diffusers.safetensors", "alone", studio.sd1):
        with subtests.test(str(name)):
            opened, weights = read(vae=str(tmp_path / name))
            assert all(torch.equal(weights[n], tensor) for n, tensor in vae.state_dict().items())
            assert any(path.is_relative_to(tmp_path / name) for path in opened.files("vae"))
    shutil.copy(tmp_path / "original.safetensors", tmp_path / "merge.vae.safetensors")
    assert read()[0].vae_path == tmp_path / "merge.vae.safetensors"
    (tmp_path / "merge.vae.safetensors").unlink()
    vae.save_pretrained(tmp_path / "merge/vae")
    assert read()[0].files("vae") == [
        path for path in (tmp_path / "merge/vae").rglob("*") if path.is_file()
    ]
    with pytest.raises(UsageError, match=r"model\.vae: .*nowhere: no \.safetensors file"):
        PipelineFolder.open(str(file), vae=str(tmp_path / "nowhere"))
    save_file({"decoder.conv_in.bias": torch.zeros(3)}, tmp_path / "damaged.safetensors")
    with pytest.raises(UsageError, match=r"model\.vae: .*damaged\.safetensors: vae: "):
        read(vae=str(tmp_path / "damaged.safetensors"))
    (tmp_path / "alone/config.json").write_text("{")
    with pytest.raises(UsageError, match=r"model\.vae: .*alone/config\.json: "):
        PipelineFolder.open(str(file), vae=str(tmp_path / "alone")).config("vae")


@pytest.mark.full
def test_a_merge_without_its_vae_is_trained_and_merged(drawn, studio, tmp_path):
    file, vae, original = merged_without_vae(studio, tmp_path)
    save_file(original, tmp_path / "vae.safetensors")
    loaded = drawn(
        model={"name": str(file), "vae": str(tmp_path / "vae.safetensors")},
        diffusion={"max_text_length": None},
        run={"samples": ["a red circle"]},
    )
    assert train(loaded) == 0
    merge_denoiser(tmp_path / "run", tmp_path / "merged")
    merged = DiffusionPipeline.from_pretrained(tmp_path / "merged").vae.state_dict()
    assert all(torch.equal(merged[n], tensor) for n, tensor in vae.state_dict().items())


def test_another_vae_replaces_the_one_of_a_pipeline(drawn, studio, tmp_path):
    vae = DiffusionPipeline.from_pretrained(studio.sd3).vae
    with torch.no_grad():
        vae.decoder.conv_in.bias.add_(1)
    vae.save_pretrained(tmp_path / "vae")
    task = choose_task(drawn(model={"name": str(studio.sd3), "vae": str(tmp_path / "vae")}).config)
    prepare_data(task, {})
    read = task.run.folder.vae(torch.float32).state_dict()
    assert all(torch.equal(read[n], tensor) for n, tensor in vae.state_dict().items())


def test_a_file_without_some_of_its_weights_is_named(studio, tmp_path):
    file = tmp_path / "pony.safetensors"
    as_one_file(studio.sd1, file)
    settings_of(studio.sd1, tmp_path / "pony")
    tensors, of_encoder = load_file(file), "encoder.layers.0.mlp.fc1.weight"
    save_file(
        {name: t for name, t in tensors.items() if name != "model.diffusion_model.out.2.weight"},
        file,
    )
    with pytest.raises(
        UsageError, match=r"pony\.safetensors does not have all weights of the unet"
    ):
        PipelineFolder.open(str(file)).denoiser(torch.float32)
    save_file({name: t for name, t in tensors.items() if not name.endswith(of_encoder)}, file)
    with pytest.raises(
        UsageError, match=rf"model.name: {file}: it does not have {of_encoder} of the text_encoder"
    ):
        PipelineFolder.open(str(file)).pipeline(torch.float32, unet=None, vae=None)


def test_other_models_are_refused_as_what_they_are(drawn, studio, tmp_path):
    """Also beside the settings of a family."""
    settings_of(studio.sd3, tmp_path / "a")
    unet = "model.diffusion_model.input_blocks.0.0.weight"
    for name, shape, kind in (
        (unet, (8, 9, 3, 3), "an inpainting model (9 input channels"),
        (unet, (8, 8, 3, 3), "an InstructPix2Pix model"),
        ("img_in.weight", (8, 384), "a Flux Fill model"),
        ("control_model.zero_convs.0.0.weight", (8, 8), "a ControlNet"),
        ("controlnet_cond_embedding.conv_in.weight", (8, 8), "a ControlNet"),
        ("lora_unet_mid_block.lora_down.weight", (4, 8), "a LoRA"),
    ):
        for file in (tmp_path / "a.safetensors", tmp_path / "alone.safetensors"):
            save_file({name: torch.zeros(shape)}, file)
            message = refused(drawn(model=file))
            assert f"{file} is {kind}" in message
            assert name in message


def test_a_file_that_is_none_is_refused(drawn, studio, tmp_path, subtests):
    settings_of(studio.sd3, tmp_path / "a")
    for name, tensors, said in (
        ("a.ckpt", None, "not a .safetensors file: a pickle can run code"),
        ("a.png", None, "not a .safetensors file: expected one, or a pipeline's folder"),
        ("a.gguf", None, "a denoiser packed as GGUF is for inference, and is not read"),
        ("a.safetensors", {}, "HeaderTooSmall|header too small"),
        (
            "b.safetensors",
            {"blocks.0.weight": torch.zeros(2)},
            "diffusers does not know this file's family by its tensors",
        ),
        (
            "a.safetensors",
            {"w": torch.zeros(2, dtype=torch.float8_e4m3fn)},
            "F8_E4M3 weights in a single file are not read",
        ),
        (
            "a.safetensors",
            {"w": torch.zeros(2, dtype=torch.uint8)},
            "U8 weights in a single file are not read",
        ),
        (
            "a.safetensors",
            {"double_blocks.0.weight": torch.zeros(2)},
            "does not read it as the transformer of a StableDiffusion3",
        ),
    ):
        file = tmp_path / name
        save_file(tensors, file) if tensors else file.write_bytes(b"")
        with subtests.test(said):
            assert re.search(said, refused(drawn(model=file)))


def test_a_folder_without_weights_that_are_read_is_refused_before_pictures_are_encoded(
    drawn, studio, tmp_path, subtests
):
    for part, name, said in (
        ("transformer", "q8.gguf", "packed as GGUF is for inference"),
        ("text_encoder", "x.bin", "x.bin can run code"),
    ):
        folder = shutil.copytree(studio.sd3, tmp_path / part)
        (weights,) = (folder / part).glob("*.safetensors")
        weights.rename(weights.with_name(name))
        with subtests.test(part):
            assert said in refused(drawn(model=folder))


# --- Denoisers that were published quantised: trained from their own files, resumed, drawn with and
# merged.


NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
}
WEIGHTS = "diffusion_pytorch_model.safetensors"
MEANT = "transformer_blocks.0.ff.net.2"  # packed, without an adapter


def publish(pipeline, folder, form):
    """A copy of a Flux pipeline whose blocks' linear layers are packed; gives some elements of
    `MEANT` as its file means them.
    """
    shutil.copytree(pipeline, folder)
    part, meant = folder / "transformer", {}
    tensors = load_file(part / WEIGHTS)
    torch.manual_seed(0)
    for name in [
        n
        for n in tensors
        if "transformer_blocks" in n and n.endswith(".weight") and tensors[n].ndim == 2
    ]:
        weight, owner = tensors.pop(name), name.removesuffix(".weight")
        if form == "nf4":
            import bitsandbytes.functional as bnb

            own, state = bnb.quantize_4bit(
                weight.float(), quant_type="nf4", compress_statistics=True
            )
            wide = bnb.dequantize_4bit(own, state).float()
            beside = {"weight": own} | {
                f"weight.{key}": value for key, value in state.as_dict(packed=True).items()
            }
        else:
            beside = packed(form, *weight.shape)
        tensors |= {f"{owner}.{key}": value.contiguous() for key, value in beside.items()}
        if owner == MEANT:
            places = [(i % weight.shape[0], 7 * i % weight.shape[1]) for i in range(40)]
            meant = {
                at: float(wide[at]) if form == "nf4" else element(form, beside, *at)
                for at in places
            }
    save_file({name: t.contiguous() for name, t in tensors.items()}, part / WEIGHTS)
    config = json.loads((part / "config.json").read_text())
    (part / "config.json").write_text(
        json.dumps(config | {"quantization_config": NF4 if form == "nf4" else FORMATS[form][1]})
    )
    return meant


@pytest.mark.parametrize(
    "form",
    [
        "int8-bnb",
        *(
            pytest.param(form, marks=pytest.mark.full)
            for form in ("nf4", "nvfp4-modelopt", "int8-torchao")
        ),
    ],
)
@pytest.mark.full
def test_a_published_denoiser_trains_draws_resumes_bit_for_bit_and_merges(
    drawn, studio, tmp_path, capsys, form
):
    meant = publish(studio.flux, tmp_path / "flux", form)
    word = form.partition("-")[0]
    run = {"samples": ["a red circle on white"], "sample_every": 4, "save_every": 2}
    adapter = {"kind": "lora", "r": 4, "targets": ["to_q", "to_v"]}
    assert (
        train(
            drawn(model=tmp_path / "flux", precision={"preset": "auto"}, run=run, adapter=adapter)
        )
        == 0
    )
    assert f"the base came quantised: {word} by" in capsys.readouterr().out
    said = json.loads((tmp_path / "run/precision.json").read_text())
    assert said["violations"] == []
    assert word in said["observed"]["base"]
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert abs(result["check"]["trained_loss"] - result["check"]["reloaded_loss"]) < 1e-6
    assert draw_pictures(tmp_path / "run", [])[0] == "adapter"
    trained = load_file(tmp_path / "run/adapter/pytorch_lora_weights.safetensors")
    cut_back(tmp_path / "run", 4)
    assert (
        train(load(tmp_path / "run/resolved.yaml", [], {}, resolved=True), resume=tmp_path / "run")
        == 0
    )
    resumed = load_file(tmp_path / "run/adapter/pytorch_lora_weights.safetensors")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in trained.items())
    merged = merge_denoiser(tmp_path / "run", tmp_path / "merged", dtype="fp32")
    assert merged.merged_loss == pytest.approx(merged.adapter_loss, rel=0.01)
    weight = load_file(tmp_path / "merged/transformer" / WEIGHTS)[f"{MEANT}.weight"]
    assert weight.dtype == torch.float32
    assert all(
        float(weight[at]) == pytest.approx(value, rel=1e-6, abs=1e-9) for at, value in meant.items()
    )
    assert "quantization_config" not in json.loads(
        (tmp_path / "merged/transformer/config.json").read_text()
    )


def test_tables_of_positions_stay_in_fp32(drawn, studio, tmp_path):
    publish(studio.sd3, tmp_path / "sd3", "int8-bnb")
    file = tmp_path / "sd3/transformer" / WEIGHTS
    tensors = load_file(file)
    kept = tensors["pos_embed.pos_embed"].bfloat16()
    save_file(tensors | {"pos_embed.pos_embed": kept}, file)
    loaded = drawn(model=tmp_path / "sd3", precision={"preset": "auto"})
    task = choose_task(loaded.config)
    basis = prepare_data(task, loaded.sources)
    table = load_frozen_denoiser(
        task.run.folder, basis.resolved.precision, basis.device
    ).pos_embed.pos_embed
    assert table.dtype == torch.float32
    assert torch.equal(table, kept.float())


def test_what_is_not_read_is_refused_by_name(drawn, studio, tmp_path):
    publish(studio.flux, tmp_path / "flux", "int8-bnb")
    precision = {"preset": "auto"}
    with pytest.raises(UsageError, match="its weights are int8 already, declared base fp8"):
        plan_run(drawn(model=tmp_path / "flux", precision=precision | {"base": "fp8"}))
    file = tmp_path / "flux/transformer/config.json"
    tensors = load_file(file.with_name(WEIGHTS))
    del tensors[f"{MEANT}.SCB"]
    save_file(tensors, file.with_name(WEIGHTS))
    with pytest.raises(UsageError, match=rf"{MEANT}.weight is int8 and has no scale beside it"):
        plan_run(drawn(model=tmp_path / "flux", precision=precision))
