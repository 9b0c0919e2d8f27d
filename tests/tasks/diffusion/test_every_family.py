"""Every pipeline of the table in docs/diffusion.md goes through `isotype train`, and its row says
what that run showed.
"""

from pathlib import Path

import pytest

from isotype.tasks.diffusion.families import FAMILIES
from tests.scripts import script
from tests.tasks.diffusion.every_family import CASES, PIPELINES, train_pipeline

# the others are trained by `make test-full`
EVERY_DAY = {"ZImagePipeline"}


@pytest.mark.parametrize(
    "name",
    [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.full) for name in CASES],
)
def test_a_pipeline_of_the_table_trains_is_read_and_resumes(studio, tmp_path, name):
    outcome = train_pipeline(name, studio, tmp_path)
    assert outcome.resumed
    assert outcome.drawn == 32
    pipelines = script(Path(__file__).parents[3] / "docs/pipelines.py")
    assert pipelines.row(name, outcome) in pipelines.rows_of_page(), (
        "python docs/pipelines.py --write"
    )


def test_the_table_has_a_row_for_every_family():
    pipelines = script(Path(__file__).parents[3] / "docs/pipelines.py")
    assert list(PIPELINES) == list(FAMILIES)
    names = [name.partition(",")[0] for name in CASES]
    assert [row.split("`")[1] for row in pipelines.rows_of_page()] == names
    page = pipelines.PAGE.read_text(encoding="utf-8")
    assert page == pipelines.page(pipelines.rows_of_page()), "python docs/pipelines.py --write"


def test_comfyui_loaded_the_file_of_every_family_that_has_one():
    """`python benchmarks/comfyui_loader.py FOLDER_OF_COMFYUI` makes the file of results."""
    pipelines = script(Path(__file__).parents[3] / "docs/pipelines.py")
    families = {name for name, family in FAMILIES.items() if not family.comfyui_blocker}
    assert set(pipelines.count_tensors_in_comfyui()) == families
