"""`isotype try` compares precisions by short runs."""

import json
from types import SimpleNamespace

import pytest

from isotype.config.load import load
from isotype.environment.hardware import detect, lookup_hardware
from isotype.errors import RunError, UsageError
from isotype.tasks.choose import choose_task
from tests.api import check_run, presets, resolution
from tests.commands import isotype

T4 = lookup_hardware("t4")
H100 = lookup_hardware("h100")
# name, seed -> held-out loss, tokens/s
LOSSES = {
    ("fp32", 0): (2.000, 100),
    ("fp32", 1): (2.010, 100),
    ("bf16-lora", 0): (2.004, 300),
    ("nf4-lora", 0): (2.050, 200),
    ("fp8", 0): (1.950, 250),
}


@pytest.fixture
def file(configured, tmp_path):
    configured("run")
    return tmp_path / "run.yaml"


@pytest.fixture
def trained(monkeypatch):
    """The runs of LOSSES in the place of training, and no simulation of their memory; a list of
    their settings.
    """
    settings_of_runs = []

    def plan_that_fits(loaded):
        checked = check_run(choose_task(loaded.config), loaded.sources, detect("cpu"))
        return SimpleNamespace(fits=True, resolved=checked.resolved)

    def run_trial(name, file, settings, *, seed):
        settings_of_runs.append(settings)
        loss, speed = LOSSES[name, seed]
        return presets.Trial(
            name, seed, tokens_per_second=speed, peak_bytes=1 << 30, eval_loss=loss
        )

    monkeypatch.setattr(presets, "run_trial", run_trial)
    monkeypatch.setattr(presets, "plan_run", plan_that_fits)
    return settings_of_runs


def test_a_difference_below_the_noise_is_none(file, trained, tmp_path):
    names = ["bf16-lora", "nf4-lora", "fp8", "fp32"]
    comparison = presets.compare_presets(file, [], names=names, out=tmp_path / "out")
    assert comparison.reference == "fp32"
    assert comparison.noise == pytest.approx(0.01)
    verdicts = [comparison.verdict(trial) for trial in comparison.trials]
    assert verdicts == ["within noise", "0.0500 worse", "0.0500 better", "reference"]
    assert presets.result_lines(comparison)[-1].startswith(
        "write     precision: {preset: bf16-lora}"
    )
    assert len(trained) == 5, "the reference has a second seed"
    for settings in trained:
        # every run is evaluated on the same rows
        assert {"data.eval_seed=0", "train.steps=30", "train.eval_every=30"} <= set(settings)
        assert all("=" in setting for setting in settings)
    assert "train.seed=1" in trained[-1]
    content = json.loads((tmp_path / "out/try.json").read_text())
    assert content["write"] == "precision: {preset: bf16-lora}"
    table = (tmp_path / "out/try.md").read_text()
    assert "| bf16-lora | 300 | 1.00 GiB | 2.0040 | within noise | products keep 8 bits |" in table


def test_a_run_that_fails_is_a_row_and_the_reference_must_not(file, trained, tmp_path, monkeypatch):
    right = presets.run_trial

    def fail(failing):
        def run_trial(name, *arguments, seed):
            if name == failing:
                return presets.Trial(name, seed, error="out of memory")
            return right(name, *arguments, seed=seed)

        return run_trial

    names = ["bf16-lora", "fp32"]
    monkeypatch.setattr(presets, "run_trial", fail("bf16-lora"))
    comparison = presets.compare_presets(file, [], names=names, out=tmp_path)
    assert comparison.verdict(comparison.trials[0]) == "failed: out of memory"
    assert comparison.best().name == "fp32"
    chosen = comparison.candidates, comparison.left_out
    monkeypatch.setattr(presets, "choose_candidates", lambda *arguments: chosen)
    monkeypatch.setattr(presets, "run_trial", fail("fp32"))
    with pytest.raises(RunError, match="the reference, failed: out of memory"):
        presets.compare_presets(file, [], names=names, out=tmp_path)


def test_what_does_not_fit_or_contradicts_itself_is_left_out(file):
    loaded = load(file, [], {})
    names = ["fp32", "bf16-lora grads=bf16 trainable=fp16"]
    candidates, left_out = presets.choose_candidates(file, [], loaded, names)
    assert [candidate.name for candidate in candidates] == ["fp32"]
    assert "trained cannot be fp16" in left_out[names[1]]


def test_a_trial_publishes_nothing_and_measures_its_last_step(configured, trained, tmp_path):
    run = {"push_to_hub": "org/name", "push_private": False, "trackers": ["wandb"]}
    run |= {"save": "best", "log_every": 100}
    configured("run", run=run)
    names = ["fp32"]
    presets.compare_presets(tmp_path / "run.yaml", [], names=names, out=tmp_path / "out")
    for settings in trained:
        config = load(tmp_path / "run.yaml", settings, {}).config.run
        assert (config.push_to_hub, config.push_private, config.trackers) == (None, True, [])
        assert (config.save, config.log_every) == ("last", 1)


def test_roles_of_the_file_do_not_change_a_candidate(configured, trained, tmp_path):
    configured("run", precision={"compute": "fp32", "generate": "fp32"})
    file = tmp_path / "run.yaml"
    names = ["bf16-lora", "fp32"]
    comparison = presets.compare_presets(file, [], names=names, out=tmp_path / "out")
    assert comparison.candidates[0].loses == "products keep 8 bits"
    precision = load(file, trained[0], {}).config.precision
    assert (precision.preset, precision.compute) == ("bf16-lora", None)
    # keys of other kinds of runs would be refused, even if they are null
    assert not any("precision.vae" in setting for setting in trained[0])


def test_names_give_settings_for_the_card():
    assert presets.parse_name("fp8", H100) == ["precision.preset=bf16-lora", "precision.base=fp8"]
    assert presets.parse_name("fp8", T4) == ["precision.preset=fp16-mixed", "precision.base=fp8"]
    qlora = presets.default_names(T4, is_lora=True)[1]
    assert presets.parse_name(qlora, T4) == [
        "precision.preset=nf4-lora",
        "precision.compute=fp16",
        "precision.loss_scaling=dynamic",
    ]
    assert not any(
        "bf16" in name for lora in (True, False) for name in presets.default_names(T4, is_lora=lora)
    )
    with pytest.raises(UsageError, match="fp7: there is no such precision"):
        presets.parse_name("fp7", H100)


def test_every_default_is_a_precision_of_its_card(file, subtests):
    for card in (T4, H100):
        for is_lora in (True, False):
            for name in presets.default_names(card, is_lora=is_lora):
                with subtests.test(card=card.name, name=name):
                    pairs = (
                        s.removeprefix("precision.").split("=")
                        for s in presets.parse_name(name, card)
                    )
                    adapter = "lora" if is_lora else "none"
                    resolved = resolution.resolve(dict(pairs), device=card, adapter=adapter)
                    assert presets.describe_losses(resolved.precision)


def test_a_run_without_held_out_rows_is_refused(configured, tmp_path):
    configured("run", data={"eval_split": 0})
    with pytest.raises(UsageError, match="no held-out rows"):
        presets.compare_presets(tmp_path / "run.yaml", [], out=tmp_path)


@pytest.mark.full
def test_try_trains_and_compares_on_a_cpu(file, tmp_path):
    done = isotype(
        "try", file, "--presets", "fp32,bf16-lora", "--steps", 4, "--out", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "out/try.json").read_text())
    assert [trial["error"] for trial in content["trials"]] == ["", ""]
    assert content["noise"] > 0
    assert "write     precision: {preset: " in done.stdout
