"""A resumed run whose folder of pictures has changed."""

import shutil

from isotype.config.load import load
from isotype.tasks.choose import train
from tests.tasks.diffusion.models import draw
from tests.training.interrupted import cut_back


def test_a_resume_says_how_many_pictures_there_were_and_what_became_of_their_order(
    drawn, studio, tmp_path, capsys
):
    folder = shutil.copytree(studio.pictures, tmp_path / "pictures")
    images = {"train": str(folder), "eval_split": 0.0}
    steps = {"steps": 2, "eval_every": 2}
    assert train(drawn(model=studio.sd1, images=images, train=steps, run={"save_every": 1})) == 0
    draw("circle", "red", 4).save(folder / "more.png")
    (folder / "more.txt").write_text("a red circle on white\n")
    cut_back(tmp_path / "run", 2)
    capsys.readouterr()
    resumed = load(tmp_path / "run/resolved.yaml", [], {}, resolved=True)
    assert train(resumed, resume=tmp_path / "run") == 0
    printed = " ".join(capsys.readouterr().out.split())
    print(printed)
    assert "12 before, 13 now" in printed
    assert "some pictures may be used twice and others not at all" in printed
