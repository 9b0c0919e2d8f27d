"""Several resolutions in one run."""

import json

import pytest
import torch

from isotype.tasks.choose import plan, task_of, train
from isotype.tasks.diffusion.loss import shift_of
from isotype.training.setup import settle

from .models import refused


def several(studio, **images):
    return {"train": [{"name": str(studio.pictures), "resolution": [32, 64]}], "eval_split": 0.25, "max_aspect": 2.0, **images}


def test_a_picture_comes_in_each_resolution_with_its_own_shift_and_cost(drawn, studio, tmp_path):
    loaded = drawn(model=studio.flux, images=several(studio))
    assert "32 x 32 and 64 x 64 pixels, 64 latent tokens" in plan(loaded).as_text()
    task = task_of(loaded.config)
    settle(task, loaded.sources)
    task.encode(torch.device("cpu"))
    sizes = [row.size for row in task.train_rows]
    assert [sizes.count(size) for size in dict.fromkeys(sizes)] == [9, 9]
    assert len(task.evaluated) == 6, "held out at both"
    model, _ = task.build_model(task.precision, torch.device("cpu"), studio.flux)
    batches = {batch.latents.shape[-1]: batch for rows in task.one_shape_each(task.feed().take(18)) for batch in [task.collate(rows)]}
    small, large = (task.flops(model)(batches[side]) for side in (8, 16))
    assert 3 < large / small < 5, "a picture of four times the tokens"
    section, scheduler = loaded.config.diffusion, task.folder.config("scheduler")
    by_size = {side: shift_of(section, scheduler, tokens=(side // 2) ** 2) for side in (8, 16)}
    assert by_size[8] < by_size[16]
    for tokens, side in ((16, 8), (64, 16)):
        drawn_levels = [task.objective.draw(torch.Generator().manual_seed(n), tokens) for n in range(50)]
        plain = [torch.sigmoid(torch.randn((), generator=torch.Generator().manual_seed(n), dtype=torch.float64)) for n in range(50)]
        expected = [float(by_size[side] * t / (1 + (by_size[side] - 1) * t)) for t in plain]
        assert drawn_levels == pytest.approx(expected, abs=1e-12)


def test_sources_of_several_resolutions_train_and_the_plan_is_of_the_largest(drawn, studio, tmp_path):
    images = several(studio) | {"regularisation": [{"name": str(tmp_path / "more"), "resolution": 48, "caption": "a circle", "draw": 4}]}
    assert train(drawn(model=studio.flux, images=images, run={"samples": ["a red circle on white"]})) == 0
    facts = json.loads((tmp_path / "run/data.json").read_text())
    assert (facts["resolutions"], facts["latent_tokens"], facts["train_pictures"]) == ([32, 48, 64], 64, 36)


@pytest.mark.parametrize(
    ("resolution", "said"),
    [(36, r"images.train\[0\].resolution: 36 is not a multiple of 8"), (128, "128 is more than this model has positions for"),
     ("big", r"images.train\[0\].resolution: expected a whole number of at least 1, got 'big'")],
)  # fmt: skip
def test_a_resolution_that_does_not_fit_is_refused(drawn, studio, resolution, said):
    import re

    assert re.search(said, refused(drawn(images={"train": [{"name": str(studio.pictures), "resolution": resolution}]})))
