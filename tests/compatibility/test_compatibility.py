"""What an earlier version wrote is resumed, reported, merged, evaluated and trained again, with the
numbers it had.
"""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from isotype.config.load import load
from isotype.inference.loaded import load_run
from isotype.inference.merge import merge
from isotype.report import write_report
from isotype.tasks.choose import train
from tests.results import metrics

HERE = Path(__file__).parent
VERSIONS = sorted(p.name for p in HERE.iterdir() if p.name.startswith("written_"))
RUNS = ["lora", "full"]


@pytest.fixture(params=VERSIONS)
def written(request, tmp_path, monkeypatch) -> Path:
    """A copy of what one version wrote, as the current folder: its paths are relative."""
    shutil.copytree(HERE / request.param, tmp_path / "written")
    monkeypatch.chdir(tmp_path / "written")
    return tmp_path / "written"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_resumed_where_it_was(written, name):
    before = metrics(written / name)
    checkpoints = written / name / "checkpoints"
    tensors, state = (
        load_file(checkpoints / "step_4/tensors.safetensors"),
        json.loads((checkpoints / "step_4/state.json").read_text()),
    )
    loaded = load(Path(name, "resolved.yaml"), ["train.steps=5"], {}, resolved=True)
    assert train(loaded, resume=Path(name)) == 0
    after = metrics(written / name)
    assert after[: len(before)] == before
    (fifth,) = (row for row in after[len(before) :] if "loss" in row)
    assert fifth["step"] == 5
    assert fifth["loss"] == pytest.approx(before[-2]["loss"], abs=0.1)
    gone_on = json.loads((checkpoints / "step_5/state.json").read_text())
    rows = loaded.config.train.batch_size * loaded.config.train.accumulate
    assert gone_on["progress"]["position"] == state["progress"]["position"] + rows
    later = load_file(checkpoints / "step_5/tensors.safetensors")
    moments = {key for key in tensors if key.endswith("exp_avg_sq")}
    assert moments == {key for key in later if key.endswith("exp_avg_sq")} != set()
    # v = 0.999 v + 0.001 g^2: a state that began again at zero would lose nearly all of it
    assert all((later[key].float() >= 0.98 * tensors[key].float()).all() for key in moments)


@pytest.mark.parametrize("name", RUNS)
def test_its_report_can_be_made(written, name):
    page = write_report(Path(name)).read_text()
    assert f"{metrics(written / name)[-1]['eval_loss']:.2f}" in page


@pytest.mark.parametrize("name", RUNS)
def test_its_configurations_mean_what_they_meant(written, name):
    given = load(Path(f"{name}.yaml"), [], {}).config.model_dump()
    resolved = load(Path(name, "resolved.yaml"), [], {}, resolved=True).config.model_dump()
    assert {
        key: value for key, value in resolved["train"].items() if key != "gradient_checkpointing"
    } == {key: value for key, value in given["train"].items() if key != "gradient_checkpointing"}
    assert resolved["data"] == given["data"]
    assert resolved["adapter"] == given["adapter"]


def test_its_configuration_trains_a_new_run(written):
    assert train(load(Path("lora.yaml"), [], {"run.folder": "again"})) == 0
    assert metrics(written / "again", "loss") == pytest.approx(
        metrics(written / "lora", "loss"), rel=0.01
    )


@pytest.mark.parametrize("folder", ["lora", "lora/adapter"])
def test_its_adapter_is_merged(written, folder):
    expected = json.loads((written / "lora/result.json").read_text())["check"]["trained_loss"]
    merged = merge(load_run(Path(folder)), written / "merged")
    assert merged.merged_loss == pytest.approx(merged.adapter_loss, rel=0.01)
    if folder == "lora":
        assert merged.adapter_loss == pytest.approx(expected, rel=0.01)


def test_its_model_is_loaded(written):
    assert load_run(Path("full")).weights_name == "model"
    assert load_run(Path("full/model")).weights_name == "model"


def test_its_adapter_is_gone_on_with(written):
    loaded = load(
        Path("lora.yaml"),
        ["adapter.start_from=lora/adapter", "train.steps=1"],
        {"run.folder": "more"},
    )
    assert train(loaded) == 0
    first = next(row for row in metrics(written / "more") if "eval_loss" in row)
    assert first["eval_loss"] == pytest.approx(metrics(written / "lora")[-1]["eval_loss"], rel=0.01)
