"""A folder of tiny pipelines and pictures, made once, and a configuration of a run on them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("diffusers")


@pytest.fixture(scope="session")
def studio(tmp_path_factory) -> SimpleNamespace:
    """`sd3`, `flux`, `pixart`, `sdxl`, `sdxl_v`: pipelines' folders; `pictures`: 12 drawn ones with their captions."""
    from tests.tasks.diffusion.models import flux, pictures, pixart, sd3, sdxl

    folder = tmp_path_factory.mktemp("studio")
    return SimpleNamespace(
        sd3=sd3(folder / "sd3"), flux=flux(folder / "flux"), pixart=pixart(folder / "pixart"),
        sdxl=sdxl(folder / "sdxl"), sdxl_v=sdxl(folder / "sdxl_v", prediction="v_prediction"), pictures=pictures(folder / "pictures"),
    )  # fmt: skip


@pytest.fixture
def drawn(studio, tmp_path):
    """`drawn("run", model=studio.flux, precision={...})` writes tmp_path/run.yaml and loads it; the run goes to tmp_path/`folder`.

    model  a folder, a name on the hub, or the whole section
    """
    from isotype.config.load import load

    def make(folder: str = "run", *, model: Path | str | dict[str, Any] | None = None, **sections: Any) -> Any:
        config = {
            "model": model if isinstance(model, dict) else {"name": str(model or studio.sd3)},
            "images": {"train": str(studio.pictures), "eval_split": 0.2, "resolution": 32, "cache": "none"},
            "diffusion": {"max_text_length": 8, "eval_draws": 2},
            "adapter": {"kind": "lora", "r": 4},
            "precision": {"preset": "fp32"},
            "train": {"steps": 4, "batch_size": 2, "learning_rate": 1e-3, "eval_every": 4},
            "run": {"folder": str(tmp_path / folder), "report": False, "sample_steps": 2},
        }
        if str(model).rpartition("/")[2].startswith("sdxl"):
            del config["diffusion"]["max_text_length"]  # no T5 encoder
        for section, values in sections.items():
            config[section] = config.get(section, {}) | values
        file = Path(tmp_path / f"{folder}.yaml")
        file.write_text(json.dumps(config))  # JSON is YAML
        return load(file, [], {})

    return make
