"""What one does with a diffusion run, through the command line, in this process."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.errors import UsageError
from isotype.tasks.choose import train


def ask(*arguments) -> str:
    done = CliRunner().invoke(build_app(), [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def run(studio, tmp_path_factory):
    from isotype.config.load import load

    folder = tmp_path_factory.mktemp("commands")
    (folder / "run.yaml").write_text(json.dumps({
        "model": {"name": str(studio.sd3)},
        "images": {"train": str(studio.pictures), "eval_split": 0.2, "resolution": 32, "cache": "none"},
        "diffusion": {"max_text_length": 8, "eval_draws": 2},
        "adapter": {"r": 4},
        "precision": {"preset": "fp32"},
        "train": {"steps": 2, "batch_size": 2, "eval_every": 2},
        "run": {"folder": str(folder / "run"), "sample_steps": 2, "samples": ["a red circle"], "sample_every": 1},
    }))  # fmt: skip
    assert train(load(folder / "run.yaml", [], {})) == 0
    return folder / "run"


def test_sample_draws_into_the_run(run):
    said = json.loads(ask("sample", run, "a red circle", "a green square", "--json").splitlines()[-1])
    assert [s["prompt"] for s in said["samples"]] == ["a red circle", "a green square"]
    first = (run / "drawn/1.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    ask("sample", run)
    assert (run / "drawn/3.png").read_bytes() == first, "the run's own prompt, the same seed"
    with pytest.raises(UsageError, match="--temperature has no effect"):
        ask("sample", run, "a red circle", "--temperature", 0.5)


def test_eval_takes_other_pictures_and_does_not_depend_on_the_batch(run, studio):
    said = json.loads(ask("eval", run, studio.pictures, "--json").splitlines()[-1])
    other = json.loads(ask("eval", run, "--data", studio.pictures, "--batch-size", 5, "--json").splitlines()[-1])
    assert (said["rows"], said["taken"], set(said["parts"])) == (12, "adapter", {"t0_500", "t500_1000"})
    assert said["loss"] == pytest.approx(other["loss"], rel=1e-5)
    with pytest.raises(UsageError, match="nowhere: no such file or folder"):
        ask("eval", run, "nowhere")


def test_ls_diff_and_report_know_pictures_and_chat_refuses(run, studio):
    assert "pictures" in ask("ls", run.parent)
    assert "loss" in ask("ls", "--diff", run, run)
    ask("report", run)
    page = (run / "report.html").read_text()
    assert page.count('<figure><a href="samples/') == 3, "steps 0, 1 and 2"
    assert (run / "report.png").is_file()
    with pytest.raises(UsageError, match="draws pictures, and answers nothing"):
        ask("chat", run)


def test_a_run_on_pictures_is_pushed_with_a_card(run, studio, standing, tmp_path):
    from isotype.config.load import load
    from isotype.inference.push import check_push, push

    config = load(run.parent / "run.yaml", ["run.push_to_hub=circles"], {}).config
    assert push(run, config, str(check_push(config, None))) == f"pushed    adapter to {standing.url}/me/circles, private"
    card = (tmp_path / "hub/models/me/circles/README.md").read_text()
    assert f"* base: `{studio.sd3}`" in card
    assert "* data: 10 train pictures, 2 eval pictures, " in card
    assert "| compute | fp32 | fp32 |" in card
    assert list((tmp_path / "hub").rglob("*.safetensors"))
    (run / "hub.json").unlink()
