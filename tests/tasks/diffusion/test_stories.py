"""Stories of users, told by the commands of docs/diffusion.md alone, on tiny pipelines of the names that the page has."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.commands import ask
from tests.training.interrupted import cut_back

PAGE = Path(__file__).parents[3] / "docs/diffusion.md"
# what makes a run of the page one of seconds
TINY = (
    "images.resolution=32",
    "images.cache=none",
    "train.steps=4",
    "train.batch_size=2",
    "run.save_every=2",
    "run.sample_steps=2",
    "precision.preset=fp32",
)


def commands(*beginnings: str) -> list[list[str]]:
    """The arguments of the page's commands that begin so, in the order asked for; each is there once."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)).replace("\\\n", " ")
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
    }.items():  # fmt: skip
        (tmp_path / name).symlink_to(there)
    (tmp_path / "other").mkdir()
    for name in ("cat", "horse"):
        Image.new("RGB", (48, 32), "grey").save(tmp_path / f"other/{name}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def adapter(place, run):
    return load_file(place / run / "adapter/adapter_model.safetensors")


def test_an_edit_lora_from_pairs(place):
    for command in commands("train model.name=kontext", "sample runs/red", "export runs/red"):
        told(command)
    assert Image.open(place / "runs/red/drawn/1.png").size == (32, 32)
    assert any(name.endswith(".alpha") for name in load_file(place / "ComfyUI/models/loras/red.safetensors"))
    assert json.loads((place / "runs/red/result.json").read_text())["status"] == "done"


def test_a_qwen_image_lora(place):
    (train,) = commands("train model.name=qwen-image")
    told(train)
    assert (place / "runs/style/adapter/pytorch_lora_weights.safetensors").is_file()
    assert any(name.endswith(".alpha") for name in load_file(place / "runs/style/adapter/comfyui.safetensors"))
    assert list((place / "runs/style/samples").glob("*.png"))


def test_a_killed_run_goes_on_and_another_begins_with_its_adapter(place):
    same = "train model.name=flux images.train=pictures images.resolution=1024"
    first, resume, second = commands(f"{same} run.folder=runs/dog ", "train --resume runs/dog", f"{same} run.folder=runs/dog2")
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
