"""A folder of tiny pipelines and pictures, made once, and a configuration of a run on them."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import written

pytest.importorskip("diffusers")


class Studio:
    """`pictures`: 12 drawn ones with their captions; any other name: the folder of that tiny
    pipeline, made when it is first asked for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> Path:
        from tests.tasks.diffusion import models, tiny

        made = self._folder / name
        if not made.exists() and name in tiny.MAKES:
            tiny.make(name, made)
        elif not made.exists():
            getattr(models, name)(made)
        return made


@pytest.fixture(scope="session")
def studio(tmp_path_factory) -> Studio:
    return Studio(tmp_path_factory.mktemp("studio"))


def draw_in(studio: Studio, place: Path) -> Any:
    """`make("run", model=studio.flux, precision={...})` writes place/run.yaml and loads it; the run
    goes to place/`folder`.

    model  a folder, a name on the hub, or the whole section
    """

    def make(
        folder: str = "run", *, model: Path | str | dict[str, Any] | None = None, **sections: Any
    ) -> Any:
        config = {
            "model": model if isinstance(model, dict) else {"name": str(model or studio.sd3)},
            "images": {
                "train": str(studio.pictures),
                "eval_split": 0.2,
                "resolution": 32,
                "cache": "none",
            },
            "diffusion": {"max_text_length": 8, "eval_draws": 2},
            "adapter": {"kind": "lora", "r": 4},
            "precision": {"preset": "fp32"},
            "train": {"steps": 4, "batch_size": 2, "learning_rate": 1e-3, "eval_every": 4},
            "run": {"folder": str(place / folder), "report": False, "sample_steps": 2},
        }
        if str(model).rpartition("/")[2].startswith(("sdxl", "sd1", "sd2", "noob", "qwen_edit")):
            del config["diffusion"]["max_text_length"]  # CLIP only, or never cut
        if str(model).endswith(("lumina2", "krea2", "ideogram4", "kandinsky5")):
            config["diffusion"]["max_text_length"] = 48  # of Lumina's system prompt are 31
        return written(place, folder, config, sections)

    return make


@pytest.fixture
def drawn(studio, tmp_path):
    return draw_in(studio, tmp_path)
