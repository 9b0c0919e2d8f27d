"""What goes wrong around the data and the folders is one line, and nothing that was made is lost."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from isotype.errors import UsageError
from isotype.tasks.choose import task_of, train
from isotype.tasks.diffusion.encode import Store
from isotype.tasks.diffusion.pipeline import PipelineFolder
from isotype.training.setup import settle
from tests.tasks.diffusion.models import draw


def copied(folder: Path, to: Path, without: str) -> Path:
    return shutil.copytree(folder, to, ignore=shutil.ignore_patterns(without))


@pytest.mark.parametrize("part", ["vae", "scheduler", "text_encoder_2"])
def test_a_pipeline_without_a_part_is_named(studio, tmp_path, part):
    folder = copied(studio.flux, tmp_path / "flux", part)
    with pytest.raises(UsageError, match=f"model.name: .*flux: the pipeline has no {part}\n"):
        PipelineFolder.open(str(folder))


def test_ctrl_c_while_caching_keeps_what_was_made(drawn, tmp_path, monkeypatch, capsys):
    images = {"cache": str(tmp_path / "cache")}
    put, count = Store.put, [0]

    def stops(self, key, tensors):
        count[0] += 1
        if count[0] > 6:
            raise KeyboardInterrupt
        put(self, key, tensors)

    monkeypatch.setattr(Store, "put", stops)
    assert train(drawn(images=images)) == 130
    assert "nothing was begun, and the same command starts again" in capsys.readouterr().out
    monkeypatch.undo()
    assert found_again(drawn(images=images)) == 6


def found_again(loaded) -> int:
    task = task_of(loaded.config)
    settle(task, loaded.sources)
    task.encode(torch.device("cpu"))
    return task.encoder.found


def test_cut_pictures_may_be_left_out_and_are_listed(drawn, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(20):
        draw("square", "green", i % 3).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a green square")
    (folder / "7.png").write_bytes((folder / "7.png").read_bytes()[:60])
    images = {"train": str(folder), "eval_split": 0.0, "on_bad_row": "skip"}
    assert train(drawn(images=images, train={"steps": 1, "eval_every": 1})) == 0
    (row,) = (json.loads(line) for line in (tmp_path / "run/bad_rows.jsonl").read_text().splitlines())
    assert row["place"].endswith("7.png")
    assert json.loads((tmp_path / "run/data.json").read_text())["train_pictures"] == 19
    (folder / "8.png").write_bytes(b"GIF?")
    with pytest.raises(UsageError, match="at most 5% of the pictures"):
        train(drawn("again", images=images))
