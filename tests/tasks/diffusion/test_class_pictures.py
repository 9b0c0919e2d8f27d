"""Class pictures, which the base model draws before training."""

import json

import pytest
import torch
from safetensors.torch import load_file

from isotype.errors import UsageError
from isotype.tasks.choose import plan, task_of, train
from isotype.training.setup import settle

from .models import refused

CLASS = "a circle on white"


def prior(folder, **settings):
    return {"regularisation": [{"name": str(folder), "caption": CLASS, "draw": 25, "weight": 0.5, **settings}], "flip": True}


def test_class_pictures_are_drawn_once_by_the_base_and_mixed_one_to_one(drawn, studio, tmp_path):
    folder, images = tmp_path / "class", prior(tmp_path / "class")
    assert "25 class pictures are drawn by the base model" in plan(drawn(images=images)).as_text()
    assert not folder.exists(), "a plan draws nothing"
    settings = {"run": {"samples": [{"prompt": CLASS, "seed": 1}], "sample_every": 4}}
    assert train(drawn("first", images=images, **settings)) == 0
    files = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert len(files) == len(set(files.values())) == 25
    assert json.loads((folder / "drawn.json").read_text())["caption"] == CLASS
    before_step_1 = (tmp_path / "first/samples/step_0_0.png").read_bytes()
    assert before_step_1 == files["drawn_0001.png"], "an adapter that has learnt nothing yet is the base"

    (folder / "drawn_0003.png").unlink()
    loaded = drawn("second", images=images, **settings)
    task = task_of(loaded.config)
    settle(task, loaded.sources)
    assert len(task.gathered.to_draw) == 1
    task.encode(torch.device("cpu"))
    assert {path.name: path.read_bytes() for path in folder.glob("*.png")} == files, "the missing one, as it was"
    weights = [row.weight for row in task.train_rows]
    assert (weights.count(1.0), weights.count(0.5)) == (25, 25)
    own = {row.latents: task.train_rows.count(row) for row in task.train_rows if row.weight == 1.0}
    assert len(own) == 10
    assert set(own.values()) == {2, 3}

    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    task.encode(torch.device("cpu"))  # as a second process does, which missed a picture before the first one drew it
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.png")} == stamps
    message = "drawn with caption 'a circle on white', not 'a square'"
    assert message in refused(drawn(images=prior(folder, caption="a square"))), "also where no picture is missing"
    other_steps = drawn(images=images, run={"sample_steps": 3})
    settle(task_of(other_steps.config), other_steps.sources)


def test_a_run_with_class_pictures_resumes_bit_for_bit(drawn, tmp_path):
    from isotype.config.load import load
    from isotype.training.callbacks import Callback

    class Stops(Callback):
        def on_step(self, moment):
            if moment.step == 3:
                raise RuntimeError("stopped here")

    images = prior(tmp_path / "class", draw=4)
    (tmp_path / "class").mkdir()
    assert train(drawn("whole", images=images)) == 0
    for drawn_one in sorted((tmp_path / "class").glob("*.png"))[2:]:
        drawn_one.unlink()
    with pytest.raises(RuntimeError, match="stopped here"):
        train(drawn("stopped", images=images, run={"save_every": 2}), callbacks=[Stops()])
    again = load(tmp_path / "stopped/resolved.yaml", [], {}, resolved=True)
    assert train(again, resume=tmp_path / "stopped") == 0
    whole, resumed = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"caption": None}, r"images.regularisation\[0\].draw: needs caption"),
        ({"draw": 0}, r"images.regularisation\[0\].draw: expected a whole number of at least 1, got 0"),
        ({"repeats": 2}, r"repeats: has no effect with draw"),
        ({"caption": "a square"}, r"drawn with caption 'a circle on white', not 'a square'"),
    ],
)
def test_what_cannot_be_drawn_is_said(drawn, tmp_path, settings, said):
    folder = tmp_path / "class"
    folder.mkdir()
    (folder / "drawn.json").write_text(json.dumps({"caption": CLASS}))
    loaded = drawn(images=prior(folder, **settings))
    task = task_of(loaded.config)
    with pytest.raises(UsageError, match=said):
        task.encode(settle(task, loaded.sources).device)
