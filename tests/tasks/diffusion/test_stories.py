"""Stories of users, told by the commands of docs/diffusion.md alone, on tiny pipelines of the names
that the page has.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from PIL import Image
from safetensors.torch import load_file

from tests.commands import ask
from tests.training.interrupted import cut_back

PAGE = Path(__file__).parents[3] / "docs/diffusion.md"
# what makes a run of the page one of seconds
TINY = (
    "images.resolution=32",
    "images.cache=none",
    "images.eval_split=0.1",
    "train.steps=4",
    "train.batch_size=2",
    "run.save_every=2",
    "run.sample_steps=2",
    "precision.preset=fp32",
)


def commands(*beginnings: str) -> list[list[str]]:
    """The arguments of the page's commands that begin so, in the order asked for; each is there
    once.
    """
    blocks = "\n".join(
        re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ).replace("\\\n", " ")
    found = []
    for beginning in beginnings:
        (line,) = [line for line in blocks.splitlines() if line.startswith(f"isotype {beginning}")]
        found.append(shlex.split(line, comments=True)[1:])
    return found


def told(arguments: list[str]) -> str:
    tiny = TINY if arguments[0] == "train" and "--resume" not in arguments else ()
    return ask(*arguments, *tiny)


@pytest.fixture
def place(studio, tmp_path, monkeypatch):
    """A folder with the pipelines and pictures that the page names, in which the commands run."""
    (tmp_path / "ComfyUI/models/loras").mkdir(parents=True)
    for name, there in {
        "flux": studio.flux, "kontext": studio.kontext, "qwen-image": studio.qwen, "pictures": studio.pictures, "pairs": studio.pairs,
        "sdxl": studio.sdxl, "anna": studio.pictures,
    }.items():  # fmt: skip
        (tmp_path / name).symlink_to(there)
    (tmp_path / "other").mkdir()
    for name in ("cat", "horse"):
        Image.new("RGB", (48, 32), "grey").save(tmp_path / f"other/{name}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def adapter(place, run):
    return load_file(place / run / "adapter/adapter_model.safetensors")


@pytest.mark.full
def test_an_edit_lora_from_pairs(place):
    for command in commands("train model.name=kontext", "sample runs/red", "export runs/red"):
        told(command)
    assert Image.open(place / "runs/red/drawn/1.png").size == (32, 32)
    assert any(
        name.endswith(".alpha")
        for name in load_file(place / "ComfyUI/models/loras/red.safetensors")
    )
    assert json.loads((place / "runs/red/result.json").read_text())["status"] == "done"


@pytest.mark.full
def test_a_qwen_image_lora(place):
    (train,) = commands("train model.name=qwen-image")
    told(train)
    assert (place / "runs/style/adapter/pytorch_lora_weights.safetensors").is_file()
    assert any(
        name.endswith(".alpha")
        for name in load_file(place / "runs/style/adapter/comfyui.safetensors")
    )
    assert list((place / "runs/style/samples").glob("*.png"))


@pytest.mark.full
def test_a_killed_run_goes_on_and_another_begins_with_its_adapter(place):
    same = "train model.name=flux images.train=pictures images.resolution=1024"
    first, resume, second = commands(
        f"{same} run.folder=runs/dog ", "train --resume runs/dog", f"{same} run.folder=runs/dog2"
    )
    told(first)
    whole = adapter(place, "runs/dog")
    cut_back(place / "runs/dog", 4)
    told(resume)
    again = adapter(place, "runs/dog")
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    told(second)
    begun = json.loads((place / "runs/dog2/metrics.jsonl").read_text().splitlines()[0])
    ended = json.loads((place / "runs/dog/result.json").read_text())
    assert begun["eval_loss"] == pytest.approx(ended["check"]["trained_loss"], abs=1e-6)
    shutil.rmtree(place / "runs/dog")
    ask("merge", "runs/dog2", "--out", "merged")  # what it began with is not needed any more


@pytest.mark.full
def test_a_person_with_class_pictures(place):
    (train,) = commands("train model.name=flux 'images.train=[{name: anna")
    told([argument.replace("draw: 100", "draw: 20") for argument in train])
    assert len(list((place / "women").glob("*.png"))) == 20
    facts = json.loads((place / "runs/anna/data.json").read_text())
    assert (facts["regularisation_pictures"], facts["train_pictures"]) == (20, 40)


INK = "train model.name=sdxl images.train=pictures images.resolution=1024 run.folder=runs/ink"


@pytest.mark.full
def test_a_style_that_comfyui_loads_whole(place):
    plan, train, merge = commands("plan model.name=sdxl", INK, "merge runs/ink")
    assert "this process, without a model" in ask(*plan, *TINY)
    told(train)
    told(merge)
    merged = load_file(place / "ink/unet/diffusion_pytorch_model.safetensors")
    plain = UNet2DConditionModel.from_pretrained(place / "sdxl/unet").state_dict()
    assert {name: tensor.shape for name, tensor in merged.items()} == {
        name: tensor.shape for name, tensor in plain.items()
    }
    assert any(not torch.equal(merged[name], tensor) for name, tensor in plain.items())


KOHYA = """pretrained_model_name_or_path = "sdxl"
network_module = "networks.lora"
network_dim = 4
network_alpha = 2
unet_lr = 1e-3
max_train_steps = 4
noise_offset = 0.05
train_data_dir = "pictures"
save_model_as = "safetensors"
output_dir = "runs/kohya"
"""
AI_TOOLKIT = """job: extension
config:
  name: dog
  process:
    - type: sd_trainer
      training_folder: out
      trigger_word: sks
      network: {type: lokr, linear: 4, linear_alpha: 4, lokr_factor: 4}
      datasets:
        - {folder_path: pictures, caption_ext: txt, resolution: [32, 64]}
      train: {batch_size: 1, steps: 4, lr: 1e-3, dtype: bf16, timestep_type: sigmoid, gradient_checkpointing: true}
      model: {name_or_path: flux, is_flux: true}
      sample: {sample_every: 2, prompts: ["[trigger] on white"], sample_steps: 2, width: 32, height: 32}
"""
DIFFUSERS = """accelerate launch train_dreambooth_lora_flux.py --pretrained_model_name_or_path=flux --instance_data_dir=anna \\
  --instance_prompt="a photo of sks woman" --output_dir=runs/script --with_prior_preservation --class_data_dir=women \\
  --class_prompt="a photo of a woman" --num_class_images=6 --rank=4 --learning_rate=1e-3 --max_train_steps=4 --resolution=32
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.toml", KOHYA),
        pytest.param("dog.yaml", AI_TOOLKIT, marks=pytest.mark.full),
        pytest.param("train.sh", DIFFUSERS, marks=pytest.mark.full),
    ],
)
def test_another_trainers_file_is_imported_and_trained(place, name, text):
    (place / name).write_text(text)
    for command in commands(f"import {name}", "train run.yaml"):
        told([*command, *(["run.folder=runs/here"] if command[0] == "train" else [])])
    assert json.loads((place / "runs/here/result.json").read_text())["status"] == "done"
    if name == "train.sh":
        assert len(list((place / "women").glob("*.png"))) == 6


@pytest.mark.full
def test_a_checkpoint_in_one_file(place, studio):
    (place / "pony").symlink_to(studio.sdxl)
    (place / "pony.safetensors").write_bytes(
        (studio.sdxl / "unet/diffusion_pytorch_model.safetensors").read_bytes()
    )
    told(*commands("train model.name=pony.safetensors"))
    assert json.loads((place / "runs/pony/result.json").read_text())["status"] == "done"
