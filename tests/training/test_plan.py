"""`isotype plan`: what it says is what a run would do."""

import json
from dataclasses import replace

from tests.api import check_run, duration
from tests.api import plan as module

from isotype.environment.hardware import detect, lookup_hardware
from isotype.tasks.choose import choose_task, plan_run


def test_a_plan_shows_what_a_run_would_do_and_leaves_nothing_behind(
    configured, tmp_path, monkeypatch
):
    loaded = configured(train={"warmup": 2, "steps": 5, "gradient_checkpointing": "none"})
    monkeypatch.chdir(tmp_path)
    made = plan_run(loaded)
    content = json.loads(json.dumps(made.to_dict()))
    assert content["precision"]["roles"]["base"]["reason"] == "preset fp32"
    assert (content["schedule"]["steps"], content["schedule"]["warmup"]) == (5, 2)
    assert content["data"]["train_rows"] > 0
    assert (
        content["memory"]["frozen"]
        == 4 * (content["parameters"]["total"] - content["parameters"]["trainable"])
        > 0
    )
    assert (
        content["memory"]["peak_with_process"]
        > content["memory"]["peak"]
        > content["memory"]["activations"]
        > 0
    )
    seconds = content["time"]["seconds"]
    assert min(seconds[part] for part in ("steps", "evaluation", "check at the end")) > 0
    text = made.to_text()
    for word in (
        "time        about",
        "precision   fp32",
        "5 steps of 4 rows",
        "activations of 4 x",
        "frozen weights",
    ):
        assert word in text
    assert text.count("preset fp32") == 1, "a reason that all roles share is said once"
    assert [file.name for file in tmp_path.iterdir()] == ["run.yaml"]
    monkeypatch.setattr(module, "detect", lambda device: replace(detect("cpu"), memory=64 << 20))
    small = plan_run(loaded)
    assert small.fits is False
    assert "will not fit into 64.0 MiB" in small.to_text()
    full = replace(detect("cpu"), memory=int(1.1 * small.peak))
    monkeypatch.setattr(module, "detect", lambda device: full)
    tight = plan_run(loaded)
    assert tight.fits is False, "`train` would not choose this peak either"
    assert "may not fit" in tight.to_text()


def test_the_estimated_time_follows_steps_rows_and_the_measured_speed(configured, monkeypatch):
    speeds = {"measure_flops_per_second": 1e9, "measure_bytes_per_second": 1e9}
    for name, speed in speeds.items():
        monkeypatch.setattr(duration, name, lambda dtype, speed=speed: speed)
    run = {"samples": ["How much is 1 plus 1?"], "sample_tokens": 8}

    def parts(steps, **train):
        loaded = configured(train={"steps": steps, "eval_every": steps, **train}, run=run)
        return plan_run(loaded).time.parts

    one, two = parts(10), parts(20)
    assert two["steps"] == 2 * one["steps"] > 0
    assert two["evaluation"] == one["evaluation"] > 0
    assert one["samples"] > 0
    recomputed = parts(10, gradient_checkpointing="layers")
    assert one["steps"] < recomputed["steps"] < 1.5 * one["steps"]
    monkeypatch.setattr(duration, "measure_flops_per_second", lambda dtype: 5e8)
    assert parts(10)["steps"] == 2 * one["steps"]


def test_the_time_of_another_device_is_not_estimated(configured):
    made = plan_run(configured(), device="h100")
    assert made.time is None
    assert "time        " not in made.to_text()


def test_auto_takes_bf16_on_an_old_cpu_where_only_bf16_fits(configured, monkeypatch):
    precision = {"preset": "auto"}
    loaded = configured(train={"steps": 2}, precision=precision, adapter={"kind": "lora"})
    task = choose_task(loaded.config)
    weights = task.count_base_weights()
    for bytes_per_weight, preset in ((5, "fp32"), (3, "bf16-lora"), (1, "fp32")):
        hardware = replace(lookup_hardware("cpu"), memory=int(bytes_per_weight * weights / 0.85))
        resolved = check_run(choose_task(loaded.config), loaded.sources, hardware).resolved
        assert resolved.preset == preset
        assert ("in fp32 the base takes" in resolved.preset_reason) == (preset == "bf16-lora")
    # a machine with bf16 instructions takes bf16 anyway, and a full fine-tuning keeps fp32
    loaded = configured(train={"steps": 2}, precision=precision, adapter={"kind": "none"})
    hardware = replace(hardware, memory=3 * weights)
    assert check_run(choose_task(loaded.config), loaded.sources, hardware).resolved.preset == "fp32"
