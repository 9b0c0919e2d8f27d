"""Wan 2.2 has a denoiser for high and one for low noise levels. A run trains one of them."""

import io
import json

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from PIL import Image
from safetensors.torch import load_file

from isotype.config.load import load
from isotype.errors import UsageError
from isotype.tasks.choose import plan_run, train
from tests.api import PipelineFolder, load_for_samples, merge_denoiser, row_generator
from tests.tasks.diffusion.models import encoded
from tests.training.interrupted import cut_back

BOUNDARY = 0.75
PART = {"high_noise": "transformer", "low_noise": "transformer_2"}
NAMES = ("high_noise", "low_noise")


@pytest.mark.parametrize("expert", NAMES)
def test_levels_are_drawn_on_the_side_of_the_denoiser(studio, drawn, expert):
    settings = {"expert": expert, "max_text_length": 8, "timesteps": "uniform"}
    task = encoded(drawn(model=studio.wan_experts, diffusion=settings))
    levels = torch.cat([task.collate(task.feed().take(64)).sigma for _ in range(2)])
    if expert == "high_noise":
        assert BOUNDARY <= levels.min() < levels.max() <= 1
    else:
        assert 0 <= levels.min() < levels.max() <= BOUNDARY
    assert levels.max() - levels.min() > 0.15
    weights = task.run.folder.denoiser(torch.float32).state_dict()
    own, other = (
        load_file(studio.wan_experts / PART[name] / "diffusion_pytorch_model.safetensors")
        for name in (expert, next(name for name in NAMES if name != expert))
    )
    assert all(weights[name].equal(tensor) for name, tensor in own.items())
    assert not all(weights[name].equal(tensor) for name, tensor in other.items())


def test_the_setting_is_needed_where_there_are_two_denoisers_only(studio, drawn):
    with pytest.raises(UsageError, match="has two denoisers") as refused:
        plan_run(drawn(model=studio.wan_experts))
    assert refused.value.fix == "diffusion.expert: high_noise or low_noise"
    with pytest.raises(UsageError, match=r"has no effect: .* has one denoiser"):
        plan_run(drawn(model=studio.wan, diffusion={"expert": "low_noise"}))


@pytest.mark.full
def test_samples_use_both_denoisers_as_diffusers_does(studio, drawn, tmp_path):
    pictures = []
    for expert in NAMES:
        loaded = drawn(
            expert,
            model=studio.wan_experts,
            images={"limit": 1, "eval_split": 0.0},
            diffusion={"expert": expert, "max_text_length": 8},
            train={"steps": 1, "batch_size": 1},
            run={"samples": ["a red circle"], "sample_every": 1, "sample_steps": 4},
        )
        assert train(loaded) == 0
        pictures.append((tmp_path / expert / "samples/step_0_0.png").read_bytes())
    assert pictures[0] == pictures[1], "before step 1 the weights are the same"

    pipe = WanPipeline.from_pretrained(studio.wan_experts)
    settings = {"num_frames": 1, "height": 32, "width": 32, "num_inference_steps": 4}
    with torch.no_grad():
        (video,) = pipe(
            "a red circle", "", **settings, guidance_scale=3.5, max_sequence_length=8, output_type="pt",
            generator=row_generator("sample", 0, 0), return_dict=False,
        )  # fmt: skip
    assert {bool(t < 1000 * BOUNDARY) for t in pipe.scheduler.timesteps} == {True, False}
    ours = np.asarray(Image.open(io.BytesIO(pictures[0]))).astype(int)
    theirs = (255 * video[0, 0].permute(1, 2, 0).numpy()).round().astype(int)
    assert np.abs(ours - theirs).max() <= 1


def test_a_lora_of_the_second_denoiser_is_read_by_diffusers_resumes_and_merges(
    studio, drawn, tmp_path
):
    loaded = drawn(
        model=studio.wan_experts,
        images={"limit": 2, "eval_split": 0.5},
        diffusion={"expert": "low_noise", "max_text_length": 8},
        train={"steps": 2, "batch_size": 1, "eval_every": 2},
        run={"save_every": 1},
    )
    run = tmp_path / "run"
    assert train(loaded) == 0
    adapter = run / "adapter/adapter_model.safetensors"
    trained = load_file(adapter)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (names,) = {tuple(name for name in row if "_t" in name) for row in rows if "eval_loss" in row}
    assert [name.rpartition("_t")[2] for name in names] == ["0_375", "375_750"]
    assert "load_into_transformer_2=True" in (run / "adapter/README.md").read_text()

    pipe = WanPipeline.from_pretrained(studio.wan_experts)
    pipe.load_lora_weights(run / "adapter", adapter_name="default", load_into_transformer_2=True)
    tensors = {
        f"base_model.model.{name.replace('.default', '')}": tensor
        for name, tensor in pipe.transformer_2.state_dict().items()
        if ".lora_" in name
    }
    assert tensors.keys() == trained.keys()
    assert all(tensor.equal(trained[name]) for name, tensor in tensors.items())

    first = adapter.read_bytes()
    cut_back(run, 2)
    assert train(load(run / "resolved.yaml", [], {}, resolved=True), resume=run) == 0
    assert adapter.read_bytes() == first

    merge_denoiser(run, tmp_path / "merged")
    merged = WanPipeline.from_pretrained(tmp_path / "merged")
    assert PipelineFolder.open(str(tmp_path / "merged")).index["boundary_ratio"] == BOUNDARY
    before = WanPipeline.from_pretrained(studio.wan_experts)
    for part, is_same in (("transformer", True), ("transformer_2", False)):
        states = (getattr(pipe, part).state_dict() for pipe in (before, merged))
        assert all(map(torch.equal, *(state.values() for state in states))) is is_same


def expert_run(drawn, model, **sections):
    diffusion = {"expert": "low_noise", "max_text_length": 8}
    return drawn(model=model, diffusion=diffusion, **sections)


def test_a_plan_counts_the_second_denoiser_that_samples_load(studio, drawn):
    samples = {"samples": [{"prompt": "a red circle", "frames": 9}]}
    one_denoiser = plan_run(drawn(model=studio.wan, run=samples))
    assert one_denoiser.memory.sampling == 0
    plan = plan_run(expert_run(drawn, studio.wan_experts, run=samples))
    other = load_file(studio.wan_experts / "transformer/diffusion_pytorch_model.safetensors")
    weights = sum(tensor.numel() * 4 for tensor in other.values())
    assert weights < plan.memory.sampling < 3 * weights
    int8 = {"base": "int8"}
    packed = plan_run(expert_run(drawn, studio.wan_experts, run=samples, precision=int8))
    assert plan.memory.sampling - packed.memory.sampling > weights / 4


def test_the_second_denoiser_is_quantised_like_the_trained_one(studio, drawn):
    loaded = expert_run(
        drawn, studio.wan_experts, precision={"base": "int8"}, images={"limit": 1, "eval_split": 0}
    )
    run = encoded(loaded).run
    folder = run.folder.for_other_expert()
    assert folder.denoiser_part == "transformer"
    other = load_for_samples(folder, run.config, run.precision, torch.device("cpu"))
    dtypes = {tensor.dtype for tensor in other.state_dict().values()}
    assert torch.uint8 in dtypes, "packed layers"
    assert not any(parameter.requires_grad for parameter in other.parameters())
    assert encoded(drawn("b", model=studio.wan)).run.folder.for_other_expert() is None
