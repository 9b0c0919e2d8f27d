"""Each configuration of examples/configs is planned and trained for two steps as it stands: only
the models' names lead to tiny stand-ins of the same families, and pictures are small.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from isotype.cli.app import main
from isotype.config.load import load
from isotype.tasks.choose import train
from tests.models import save_with_tokenizer
from tests.tasks.diffusion import models as pipelines
from tests.vlms import saved_with_processor

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "examples/configs"
# file -> the family whose tiny model stands in for the published one
FAMILIES = {
    "lora": "qwen2",
    "qlora": "llama",
    "full": "llama",
    "dpo": "qwen2",
    "experts": "olmoe",
    "vision": "qwen2_5_vl",
    "flux": "flux",
    "sdxl": "sdxl",
}
QUESTION = [{"type": "image"}, {"type": "text", "text": "what colour is the square?"}]


@pytest.fixture(scope="module")
def place(tmp_path_factory, workshop) -> Path:
    """A folder with the data that the configurations name."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "chats.jsonl").write_bytes(workshop.chats.read_bytes())
    pairs = (
        {"prompt": f"How much is {n} plus 1?", "chosen": f"It is {n + 1}.", "rejected": "No."}
        for n in range(24)
    )
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    Image.new("RGB", (56, 56), "red").save(folder / "square.png")
    question = {"role": "user", "content": QUESTION}
    answer = {"role": "assistant", "content": "it is red."}
    row = {"messages": [question, answer], "images": ["square.png"]}
    (folder / "questions.jsonl").write_text((json.dumps(row) + "\n") * 24)
    pipelines.pictures(folder / "pictures")
    return folder


@pytest.fixture(scope="module")
def stand_in(place, workshop):
    """`stand_in(name)`: makes the tiny model of examples/configs/NAME.yaml in the folder that its
    name says.
    """

    @cache
    def make(name: str) -> None:
        family = FAMILIES[name]
        folder = place / load(CONFIGS / f"{name}.yaml", [], {}).config.model.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        if name in ("flux", "sdxl"):
            getattr(pipelines, family)(folder)
        elif name == "vision":
            saved_with_processor(family, folder)
        else:
            sizes = {"hidden_size": 64, "intermediate_size": 128} if name == "qlora" else {}
            save_with_tokenizer(family, workshop.base, folder, **sizes)

    return make


def settings(name: str) -> list[str]:
    """Two steps of small rows or pictures."""
    short = ["train.steps=2", "train.accumulate=1", "run.report=false"]
    if name not in ("flux", "sdxl"):
        return [*short, "data.max_length=96", "data.cache=none", "run.sample_tokens=4"]
    pictures = ["images.resolution=32", "images.cache=none", "run.sample_steps=2"]
    text = ["diffusion.max_text_length=8"] if name == "flux" else []
    return [*short, *pictures, *text]


def test_there_are_eight_and_each_is_in_the_table():
    names = {path.stem for path in CONFIGS.glob("*.yaml")}
    page = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    assert names == set(FAMILIES)
    assert set(re.findall(r"^\| \[(\w+)\.yaml\]\(configs/\1\.yaml\) \|", page, re.M)) == names


@pytest.mark.parametrize("name", FAMILIES)
def test_two_comment_lines_and_a_model_that_people_use(name):
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert lines[1].startswith(f"# isotype train examples/configs/{name}.yaml ")
    assert not lines[2].startswith("#")
    config = load(CONFIGS / f"{name}.yaml", [], {}).config
    assert re.fullmatch(r"[\w-]+/[\w.-]+", config.model.name)
    assert config.run.folder == f"runs/{name}"


# the others are trained by `make test-full`
EVERY_DAY = ("lora",)


@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.full)
        for name in FAMILIES
    ],
)
def test_it_is_planned_and_trained(name, place, stand_in, monkeypatch, capsys):
    stand_in(name)
    monkeypatch.chdir(place)
    file = str(CONFIGS / f"{name}.yaml")
    monkeypatch.setattr("sys.argv", ["isotype", "plan", file, *settings(name), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plan["memory"]["peak"] > 0
    assert train(load(Path(file), settings(name), {})) == 0
    run = place / f"runs/{name}"
    assert json.loads((run / "result.json").read_text())["status"] == "done"
    assert json.loads((run / "precision.json").read_text())["violations"] == []
    result = "model" if name == "full" else "adapter"
    assert list((run / result).glob("*.safetensors"))
