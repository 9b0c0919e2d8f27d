"""A base model or cached rows that change: while a run trains, and before a resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.api import Callback, fingerprint_of_base, mapped_paths
from tests.models import lora, tiny
from tests.results import read, same_result
from tests.warm import interpreter
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.config.load import load
from isotype.config.schema import AdapterSection
from isotype.errors import RunError, UsageError
from isotype.precision.apply import apply_precision
from isotype.precision.precision import PRESETS
from isotype.tasks.choose import train

SAVING = {"save_every": 1, "keep": 10, "observe_every": 2}


@pytest.fixture
def base(workshop, tmp_path) -> Path:
    """A base model that a test may change."""
    return Path(shutil.copytree(workshop.base, tmp_path / "base"))


def at_step(step, action):
    """A callback that acts once, after this step."""

    class Acts(Callback):
        def on_step(self, moment):
            if moment.step == step:
                action(moment)

    return Acts()


def overwrite(file: Path, content: bytes) -> None:
    """As `cp` does: into the file that is there."""
    with file.open("r+b") as opened:
        opened.truncate(len(content))
        opened.write(content)


def scaled(file: Path, factor: float) -> bytes:
    """The same tensors times a factor, as the bytes of a file."""
    aside = file.with_name("scaled")
    save_file({name: t * factor for name, t in load_file(file).items()}, aside, {"format": "pt"})
    content = aside.read_bytes()
    aside.unlink()
    return content


@pytest.mark.parametrize("change", ["weights", pytest.param("longer", marks=pytest.mark.full)])
def test_a_base_that_is_written_while_the_run_trains_ends_it(
    change, base, configured, default_run, tmp_path
):
    file = base / "model.safetensors"
    good = file.read_bytes()
    bad = scaled(file, 1.05) if change == "weights" else good + b"more"
    config = configured(model={"name": str(base)}, run=SAVING)
    with pytest.raises(RunError, match=r"CK004 step \d: .*model\.safetensors") as error:
        train(config, callbacks=[at_step(3, lambda moment: overwrite(file, bad))])
    assert "checkpoints/step_3" in str(error.value) or "checkpoints/step_2" in str(error.value)
    run = tmp_path / "run"
    if change == "weights":
        with pytest.raises(UsageError, match="base model is not that of the run's last start"):
            train(config, resume=run)
    overwrite(file, good)
    assert train(config, resume=run) == 0
    same_result(default_run, run)


def test_a_base_that_is_touched_renamed_over_or_removed_stays_what_it_was(
    base, configured, default_run, tmp_path, capsys
):
    file = base / "model.safetensors"
    other = scaled(file, 1.05)

    def replace(moment) -> None:
        os.utime(file)
        file.with_name("new").write_bytes(other)
        file.rename(file.with_name("kept"))
        file.with_name("new").rename(file)

    def restore(moment) -> None:
        file.with_name("kept").rename(file)

    actions = [at_step(2, replace), at_step(6, restore)]
    assert train(configured(model={"name": str(base)}, run=SAVING), callbacks=actions) == 0
    assert "was touched; its sampled content is as it was" in capsys.readouterr().out
    same_result(default_run, tmp_path / "run")


def test_cached_rows_that_change_end_the_run(configured, tmp_path):
    cache = tmp_path / "cache"

    def damage(moment) -> None:
        (entry,) = cache.glob("*.safetensors")
        assert entry in [path for path, _ in mapped_paths()]
        content = bytearray(entry.read_bytes())
        content[-64:] = bytes(64)
        overwrite(entry, content)

    config = configured(data={"cache": str(cache)}, run=SAVING)
    with pytest.raises(RunError, match=r"CK004 step \d: .*cache/\w+\.safetensors was written"):
        train(config, callbacks=[at_step(3, damage)])
    # the next run notices by the checksum, and makes the entry again; so does the resume
    assert train(config, resume=tmp_path / "run") == 0


@pytest.mark.full
def test_a_second_run_with_the_same_cached_rows_disturbs_no_first_one(configured, tmp_path, capsys):
    data = {"cache": str(tmp_path / "cache")}
    second = configured("second", data=data)
    first = configured("first", data=data, run=SAVING)
    assert train(first, callbacks=[at_step(2, lambda moment: train(second))]) == 0
    assert "was touched" not in capsys.readouterr().out


def test_a_frozen_weight_that_changes_without_its_file_ends_the_run(configured):
    def change(moment) -> None:
        parameter = next(p for p in moment.model.parameters() if not p.requires_grad)
        parameter.detach().numpy()[:] *= 1.05  # of which PyTorch knows nothing

    with pytest.raises(RunError, match=r"CK004 step \d: .*weight changed"):
        train(configured(run=SAVING), callbacks=[at_step(3, change)])


def edit(base: Path, change: str) -> None:
    if change == "weights":
        file = base / "model.safetensors"
        file.write_bytes(scaled(file, 1.05))
        return
    settings = json.loads((base / "config.json").read_text())
    if change == "rms_norm_eps":
        settings["rms_norm_eps"] = 1e-3
    elif "rope_theta" in settings:
        settings["rope_theta"] = 12345.0
    else:
        settings["rope_parameters"]["rope_theta"] = 12345.0
    (base / "config.json").write_text(json.dumps(settings))


# a base at another path, whose weights or settings differ, is in the test of such paths below
@pytest.mark.full
@pytest.mark.parametrize("change", ["weights", "rms_norm_eps", "rope_theta"])
def test_a_resume_with_another_base_is_refused(change, base, configured, tmp_path):
    assert train(configured(model={"name": str(base)})) == 0
    run = tmp_path / "run"
    edit(base, change)
    named = "its weights are others" if change == "weights" else rf"{change}: \S+ -> \S+"
    longer = load(run / "resolved.yaml", ["train.steps=8"], resolved=True)
    with pytest.raises(UsageError, match=rf"resuming would be another run: .*{named}"):
        train(longer, resume=run)
    accepted = load(run / "resolved.yaml", ["train.steps=8"], resolved=True, consent=True)
    assert train(accepted, resume=run) == 0
    assert [entry["of"] for entry in read(run, "resumes")["changes"]] == ["settings", "base"]


def test_a_moved_run_is_recognised_by_its_content(base, workshop, run_copy, tmp_path, capsys):
    """Data and base lie elsewhere: a resume was refused for their paths."""
    rows = shutil.copy(workshop.chats, tmp_path / "rows.jsonl")
    run = run_copy
    keys = [f"model.name={base}", f"data.train={rows}"]
    longer = load(run / "resolved.yaml", ["train.steps=8", *keys], resolved=True)
    assert train(longer, resume=run) == 0
    assert "its content is compared with that of the last start" in capsys.readouterr().out
    assert [entry["of"] for entry in read(run, "resumes")["changes"]] == ["settings"] * 3


@pytest.mark.parametrize("key", ["model.name", pytest.param("data.train", marks=pytest.mark.full)])
def test_a_path_to_other_content_is_refused(key, base, workshop, run_copy, tmp_path):
    run = run_copy
    if key == "model.name":
        other = Path(shutil.copytree(base, tmp_path / "other"))
        edit(other, "weights")
    else:
        other = tmp_path / "other.jsonl"
        rows = workshop.chats.read_text().splitlines(keepends=True)
        other.write_text("".join(rows[1:]))
    overrides = ["train.steps=8", f"{key}={other}"]
    with pytest.raises(UsageError, match=r"resuming would be another run: .*last start"):
        train(load(run / "resolved.yaml", overrides, resolved=True), resume=run)
    accepted = load(run / "resolved.yaml", overrides, resolved=True, consent=True)
    assert train(accepted, resume=run) == 0
    if key == "model.name":
        changes = [entry["of"] for entry in read(run, "resumes")["changes"]]
        assert changes == ["settings", "settings", "base"]


@pytest.mark.full
def test_other_settings_of_a_moved_source_are_refused(workshop, configured, tmp_path):
    rows = [str(shutil.copy(workshop.chats, tmp_path / f"{name}.jsonl")) for name in "abc"]
    sources = [{"name": rows[0], "weight": 1}, {"name": rows[1], "weight": 1}]
    train(configured(data={"train": sources}))
    run = tmp_path / "run"
    for name, weight, is_refused in ((rows[2], 3, True), (rows[2], 1, False)):
        changed = json.dumps([{"name": name, "weight": weight}, sources[1]])
        longer = load(
            run / "resolved.yaml", ["train.steps=8", f"data.train={changed}"], resolved=True
        )
        if is_refused:
            with pytest.raises(UsageError, match=r"resuming would be another run:\n  data.train"):
                train(longer, resume=run)
        else:
            assert train(longer, resume=run) == 0


@pytest.mark.full
def test_a_resume_under_another_version_of_the_library_only_names_it(base, configured, tmp_path):
    assert train(configured(model={"name": str(base)})) == 0
    run = tmp_path / "run"
    plan = read(run, "plan")
    plan["base"]["libraries"] = ["transformers 1.0.0"]
    (run / "plan.json").write_text(json.dumps(plan))
    edit(base, "rms_norm_eps")
    longer = load(run / "resolved.yaml", ["train.steps=8"], resolved=True)
    assert train(longer, resume=run) == 0
    assert [entry["of"] for entry in read(run, "resumes")["changes"]] == ["settings", "base"]


@pytest.mark.parametrize("preset", ["bf16-lora", "fp16-mixed", "fp32"])
def test_the_fingerprint_of_a_base_is_the_same_before_and_after_it_is_cast(preset):
    """Processes that share a model look at it before it is cast."""
    model, precision = lora(tiny()), PRESETS[preset]
    before = fingerprint_of_base(model, precision, AdapterSection())
    apply_precision(model, precision, device_type="cpu")
    assert fingerprint_of_base(model, precision, AdapterSection()) == before
    frozen = next(p for p in model.parameters() if not p.requires_grad)
    with torch.no_grad():
        frozen *= 1.05
    assert fingerprint_of_base(model, precision, AdapterSection()) != before


@pytest.mark.skipif(sys.platform != "linux", reason="mapped files are listed on Linux only")
def test_a_file_that_was_truncated_is_named_by_ls_and_by_the_resume(
    base, configured, tmp_path, capsys
):
    """The system ended the run with SIGBUS, and nothing said why."""
    train_section = {"steps": 100_000, "eval_every": 50_000}
    # the checks between steps must not find the change first
    run_section = {"log_every": 1, "observe_every": 100_000, "save_every": 100_000}
    configured(model={"name": str(base)}, train=train_section, run=run_section)
    file = base / "model.safetensors"
    good = file.read_bytes()
    command = [interpreter(), "-m", "isotype", "train", str(tmp_path / "run.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while b"tok/s" not in process.stdout.readline():
            assert process.poll() is None
        os.truncate(file, 4096)
        process.stdout.read()
    assert process.returncode == -signal.SIGBUS
    change = f"{file} had {len(good):,} bytes, and has 4,096"
    listed = CliRunner().invoke(build_app(), ["ls", str(tmp_path)])
    assert f"stopped: {change}" in listed.stdout
    run = tmp_path / "run"
    with pytest.raises(UsageError, match="its weights are damaged"):
        train(load(run / "resolved.yaml", resolved=True), resume=run)
    assert f"resume    {change}" in capsys.readouterr().out
