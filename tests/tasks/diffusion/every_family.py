"""A tiny pipeline of every family through `isotype train`: preflight, two steps, a LoRA that is
saved and read by diffusers, a resumed run. `docs/pipelines.py` makes its table of this.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file

from isotype.config.load import load
from isotype.errors import UsageError
from isotype.tasks.choose import train
from isotype.tasks.diffusion.families import EDIT_FAMILIES, FAMILIES
from tests.api import PipelineFolder, write_comfyui
from tests.tasks.diffusion.conftest import Studio, draw_in
from tests.training.interrupted import cut_back

# `_class_name` -> the tiny pipeline of `models.py` or `tiny.py`
PIPELINES = {
    "FluxPipeline": "flux",
    "FluxKontextPipeline": "kontext",
    "Flux2Pipeline": "flux2",
    "Flux2KleinPipeline": "klein",
    "QwenImagePipeline": "qwen",
    "QwenImageEditPipeline": "qwen_edit",
    "QwenImageEditPlusPipeline": "qwen_edit_plus",
    "ZImagePipeline": "z_image",
    "ChromaPipeline": "chroma",
    "StableDiffusion3Pipeline": "sd3",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusionPipeline": "sd1",
    "SanaPipeline": "sana",
    "AuraFlowPipeline": "auraflow",
    "Lumina2Pipeline": "lumina2",
    "HiDreamImagePipeline": "hidream",
    "PixArtAlphaPipeline": "pixart",
    "PixArtSigmaPipeline": "pixart_sigma",
    "Krea2Pipeline": "krea2",
    "ErnieImagePipeline": "ernie_image",
    "Ideogram4Pipeline": "ideogram4",
    "LongCatImagePipeline": "longcat",
    "Kandinsky5T2IPipeline": "kandinsky5",
    "WanPipeline": "wan",
    "LTXPipeline": "ltx",
    "LTX2Pipeline": "ltx2",
}


PAIRS = ", from pairs"
SEVERAL = ", from several pictures"
# the pipelines that are trained on captions are also trained on pairs where they can be
CASES = [
    *FAMILIES,
    *(name + PAIRS for name in EDIT_FAMILIES),
    *(
        name + SEVERAL
        for name, family in (FAMILIES | EDIT_FAMILIES).items()
        if family.takes_several_controls
    ),
]


@dataclass(frozen=True)
class Outcome:
    """What a run of one pipeline showed.

    objective  what it learnt
    source     `, from pairs` of pictures before and after an edit, `, from several pictures` before
               it, or empty
    loader     what of diffusers or PEFT read every tensor of the saved LoRA
    comfyui    `yes` where every adapted module is in ComfyUI's file; else why there is none
    drawn      the side of the picture that was drawn, in pixels
    resumed    whether a run that was killed after its first step ended in the same bytes
    """

    objective: str
    source: str
    loader: str
    comfyui: str
    drawn: int
    resumed: bool


def train_pipeline(case: str, studio: Studio, place: Path) -> Outcome:
    """Trains, reads and resumes in `place`. An AssertionError says what failed."""
    name = case.partition(",")[0]
    model = getattr(studio, PIPELINES[name])
    folder = PipelineFolder.open(str(model))
    assert folder.family.pipeline == name
    if name != case:
        folder = folder.for_pairs()
    is_pairs = folder.family.edits_pictures
    draw = draw_in(studio, place)
    images: dict[str, Any] = {"limit": 2, "eval_split": 0.0, "cache": str(place / "cache")}
    prompt: Any = "a red circle on white"
    if is_pairs:
        folders = ("before", "style") if case.endswith(SEVERAL) else ("before",)
        data = studio.references
        images |= {
            "train": str(data / "after"),
            "controls": [str(data / folder) for folder in folders],
        }
        files = [str(data / folder / "circle_0.png") for folder in folders]
        prompt = {"prompt": "green", "control": files}
    loaded = draw(
        model=model,
        images=images,
        precision={"preset": "bf16-lora"},
        train={"steps": 2, "batch_size": 1, "eval_every": 2},
        run={"save_every": 1, "samples": [prompt], "sample_every": 2},
    )
    run = place / "run"
    assert train(loaded) == 0
    assert json.loads((run / "result.json").read_text())["status"] == "done"
    assert json.loads((run / "precision.json").read_text())["violations"] == []
    (sample,) = json.loads((run / "samples/step_2.json").read_text())["samples"]
    with Image.open(run / sample["file"]) as picture:
        side = max(picture.size)

    trained = load_file(run / "adapter/adapter_model.safetensors")
    assert any(bool(t.any()) for n, t in trained.items() if "lora_B" in n), "nothing was learnt"
    loader = read_back(run / "adapter", folder, trained)
    comfyui = write_for_comfyui(run / "adapter", place / "comfyui.safetensors", folder, trained)

    cut_back(run, 2)
    again = load(run / "resolved.yaml", [], {}, resolved=True)
    assert train(again, resume=run) == 0
    resumed = load_file(run / "adapter/adapter_model.safetensors")
    is_same = all(torch.equal(resumed[name], tensor) for name, tensor in trained.items())
    objective = json.loads((run / "data.json").read_text())["objective"]
    source = SEVERAL if case.endswith(SEVERAL) else PAIRS if is_pairs else ""
    return Outcome(objective, source, loader, comfyui, side, is_same)


def read_back(adapter: Path, folder: PipelineFolder, trained: dict[str, torch.Tensor]) -> str:
    """Reads the LoRA into diffusers' own denoiser, and compares every tensor."""
    denoiser = folder.denoiser(torch.float32)
    if folder.family.loads_lora:
        pipe = folder.pipeline_for_sampling(denoiser, None)
        pipe.load_lora_weights(adapter, adapter_name="default")
        loader = "load_lora_weights"
    else:
        PeftModel.from_pretrained(denoiser, adapter)
        loader = "PeftModel.from_pretrained"
    tensors = {n: t for n, t in denoiser.state_dict().items() if ".lora_" in n}
    names = {n.removeprefix("base_model.model."): t for n, t in trained.items()}
    names = {n.replace(".weight", ".default.weight"): t for n, t in names.items()}
    assert set(tensors) == set(names)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in names.items())
    return loader


def write_for_comfyui(
    adapter: Path, out: Path, folder: PipelineFolder, trained: dict[str, torch.Tensor]
) -> str:
    modules = {name.partition(".lora_")[0] for name in trained}
    try:
        assert write_comfyui(adapter, out, folder.family) == len(modules)
    except UsageError:
        assert folder.family.comfyui_blocker
        return f"no: {folder.family.comfyui_blocker}"
    return "yes"
