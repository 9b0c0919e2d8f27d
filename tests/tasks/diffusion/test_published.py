"""Denoisers that were published quantised: trained from their own files, resumed, drawn with and merged."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from isotype.errors import UsageError
from isotype.inference.diffusion import draw_with, merge_denoiser
from isotype.tasks.choose import plan, task_of, train
from isotype.tasks.diffusion.denoiser import frozen_denoiser
from isotype.tasks.diffusion.pipeline import PipelineFolder
from isotype.training.setup import settle
from tests.published import FORMATS, element, packed

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
WEIGHTS = "diffusion_pytorch_model.safetensors"
MEANT = "transformer_blocks.0.ff.net.2"  # packed, without an adapter


def publish(pipeline, folder, form):
    """A copy of a Flux pipeline whose blocks' linear layers are packed; gives some elements of `MEANT` as its file means them."""
    shutil.copytree(pipeline, folder)
    part, meant = folder / "transformer", {}
    tensors = load_file(part / WEIGHTS)
    torch.manual_seed(0)
    for name in [n for n in tensors if "transformer_blocks" in n and n.endswith(".weight") and tensors[n].ndim == 2]:
        weight, owner = tensors.pop(name), name.removesuffix(".weight")
        if form == "nf4":
            import bitsandbytes.functional as bnb

            own, state = bnb.quantize_4bit(weight.float(), quant_type="nf4", compress_statistics=True)
            wide = bnb.dequantize_4bit(own, state).float()
            beside = {"weight": own} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        else:
            beside = packed(form, *weight.shape)
        tensors |= {f"{owner}.{key}": value.contiguous() for key, value in beside.items()}
        if owner == MEANT:
            places = [(i % weight.shape[0], 7 * i % weight.shape[1]) for i in range(40)]
            meant = {at: float(wide[at]) if form == "nf4" else element(form, beside, *at) for at in places}
    save_file({name: t.contiguous() for name, t in tensors.items()}, part / WEIGHTS)
    config = json.loads((part / "config.json").read_text())
    (part / "config.json").write_text(json.dumps(config | {"quantization_config": NF4 if form == "nf4" else FORMATS[form][1]}))
    return meant


@pytest.mark.parametrize(
    "form", ["int8-bnb", *(pytest.param(form, marks=pytest.mark.full) for form in ("nf4", "nvfp4-modelopt", "int8-torchao"))]
)
def test_a_published_denoiser_trains_draws_and_merges(drawn, studio, tmp_path, capsys, form):
    meant = publish(studio.flux, tmp_path / "flux", form)
    word = form.partition("-")[0]
    run = {"samples": ["a red circle on white"], "sample_every": 4}
    adapter = {"kind": "lora", "r": 4, "targets": ["to_q", "to_v"]}
    assert train(drawn(model=tmp_path / "flux", precision={"preset": "auto"}, run=run, adapter=adapter)) == 0
    assert f"the base came quantised: {word} by" in capsys.readouterr().out
    said = json.loads((tmp_path / "run/precision.json").read_text())
    assert said["violations"] == []
    assert word in said["observed"]["base"]
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert abs(result["check"]["trained_loss"] - result["check"]["reloaded_loss"]) < 1e-6
    assert draw_with(tmp_path / "run", [])[0] == "adapter"
    merged = merge_denoiser(tmp_path / "run", tmp_path / "merged", dtype="fp32")
    assert merged.merged_loss == pytest.approx(merged.adapter_loss, rel=0.01)
    weight = load_file(tmp_path / "merged/transformer" / WEIGHTS)[f"{MEANT}.weight"]
    assert weight.dtype == torch.float32
    assert all(float(weight[at]) == pytest.approx(value, rel=1e-6, abs=1e-9) for at, value in meant.items())
    assert "quantization_config" not in json.loads((tmp_path / "merged/transformer/config.json").read_text())


def test_fresh_weights_in_the_place_of_packed_ones_are_plain(studio, tmp_path):
    publish(studio.flux, tmp_path / "flux", "int8-bnb")
    folder = PipelineFolder.open(str(tmp_path / "flux")).with_random_denoiser(None).draw_denoiser(tmp_path / "base", seed=0)
    assert {p.dtype for p in folder.denoiser(torch.float32).parameters()} == {torch.float32}


def test_tables_of_positions_stay_in_fp32(drawn, studio, tmp_path):
    publish(studio.sd3, tmp_path / "sd3", "int8-bnb")
    file = tmp_path / "sd3/transformer" / WEIGHTS
    tensors = load_file(file)
    kept = tensors["pos_embed.pos_embed"].bfloat16()
    save_file(tensors | {"pos_embed.pos_embed": kept}, file)
    loaded = drawn(model=tmp_path / "sd3", precision={"preset": "auto"})
    task = task_of(loaded.config)
    basis = settle(task, loaded.sources)
    table = frozen_denoiser(task.folder, basis.resolved.precision, basis.device).pos_embed.pos_embed
    assert table.dtype == torch.float32
    assert torch.equal(table, kept.float())


def test_what_is_not_read_is_refused_by_name(drawn, studio, tmp_path):
    publish(studio.flux, tmp_path / "flux", "int8-bnb")
    precision = {"preset": "auto"}
    with pytest.raises(UsageError, match="its weights are int8 already, declared base fp8"):
        plan(drawn(model=tmp_path / "flux", precision=precision | {"base": "fp8"}))
    file = tmp_path / "flux/transformer/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "quanto"}}))
    with pytest.raises(UsageError, match="quantised by quanto, which is not read"):
        plan(drawn(model=tmp_path / "flux", precision=precision))
    file.write_text(json.dumps(config | {"quantization_config": FORMATS["int8-bnb"][1]}))
    tensors = load_file(file.with_name(WEIGHTS))
    del tensors[f"{MEANT}.SCB"]
    save_file(tensors, file.with_name(WEIGHTS))
    with pytest.raises(UsageError, match=rf"{MEANT}.weight is int8 and has no scale beside it"):
        plan(drawn(model=tmp_path / "flux", precision=precision))
