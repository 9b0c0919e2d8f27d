"""What one does with a diffusion run, through the command line, in this process."""

import json
from dataclasses import replace

import pytest
import torch

from isotype.environment import hardware
from isotype.errors import UsageError
from isotype.tasks.choose import choose_task, plan_run, train
from tests.api import PLAN_TOLERANCE, check_run, merge_denoiser
from tests.commands import ask
from tests.tasks.diffusion.conftest import draw_in


@pytest.fixture(scope="module")
def run(studio, tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    steps = {"steps": 2, "eval_every": 2}
    assert (
        train(
            draw_in(studio, folder)(
                train=steps, run={"samples": ["a red circle"], "sample_every": 1}
            )
        )
        == 0
    )
    return folder / "run"


def test_sample_draws_into_the_run(run):
    said = json.loads(
        ask("sample", run, "a red circle", "a green square", "--json").splitlines()[-1]
    )
    assert [s["prompt"] for s in said["samples"]] == ["a red circle", "a green square"]
    first = (run / "drawn/1.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    ask("sample", run)
    assert (run / "drawn/3.png").read_bytes() == first, "the run's own prompt, the same seed"
    with pytest.raises(UsageError, match="--temperature has no effect"):
        ask("sample", run, "a red circle", "--temperature", 0.5)


def test_eval_takes_other_pictures_and_does_not_depend_on_the_batch(run, studio):
    said = json.loads(ask("eval", run, studio.pictures, "--json").splitlines()[-1])
    other = json.loads(
        ask("eval", run, studio.pictures, "--batch-size", 5, "--json").splitlines()[-1]
    )
    assert (said["rows"], said["weights"], set(said["parts"])) == (
        12,
        "adapter",
        {"t0_500", "t500_1000"},
    )
    assert said["loss"] == pytest.approx(other["loss"], rel=1e-5)
    with pytest.raises(UsageError, match="nowhere: no such file or folder"):
        ask("eval", run, "nowhere")


def test_ls_and_report_know_pictures_and_chat_refuses(run, studio):
    assert "pictures" in ask("ls", run.parent)
    ask("report", run)
    page = (run / "report.html").read_text()
    assert page.count('<a class="enlarge" href="samples/') == 3, "steps 0, 1 and 2"
    with pytest.raises(UsageError, match="draws pictures, and answers nothing"):
        ask("chat", run)


def test_a_run_on_pictures_is_pushed_with_a_card(run, studio, standing, tmp_path):
    from isotype.config.load import load
    from tests.api import check_push
    from tests.api import push_push as push

    config = load(run.parent / "run.yaml", ["run.push_to_hub=circles"], {}).config
    assert (
        push(run, config, str(check_push(config, None)))
        == f"pushed    adapter to {standing.url}/me/circles, private"
    )
    card = (tmp_path / "hub/models/me/circles/README.md").read_text()
    assert f"* base: `{studio.sd3}`" in card
    assert "* data: 10 train pictures, 2 eval pictures, " in card
    assert "| compute | fp32 | fp32 |" in card
    assert list((tmp_path / "hub").rglob("*.safetensors"))
    (run / "hub.json").unlink()


def test_a_merged_pipeline_is_the_adapter_on_its_base(run, studio, tmp_path):
    from diffusers import DiffusionPipeline

    said = json.loads(ask("merge", run, "--out", tmp_path / "merged", "--json"))
    assert (said["dtype"], said["noise"] < 1e-3, said["rows"]) == ("fp32", True, 4)
    assert said["merged_loss"] == pytest.approx(said["adapter_loss"], rel=1e-5)
    merged, base = (
        DiffusionPipeline.from_pretrained(folder) for folder in (tmp_path / "merged", studio.sd3)
    )
    plain = {name: tensor.clone() for name, tensor in base.transformer.state_dict().items()}
    base.load_lora_weights(run / "adapter")
    base.fuse_lora()
    base.unload_lora_weights()
    fused, found = base.transformer.state_dict(), merged.transformer.state_dict()
    assert fused.keys() == found.keys()
    for name, tensor in fused.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in fused.items()), (
        "the adapter does something"
    )
    with pytest.raises(UsageError, match="not empty"):
        merge_denoiser(run, tmp_path / "merged")


@pytest.mark.full
def test_auto_takes_bf16_on_an_old_cpu_where_the_denoiser_fits_in_bf16_only(drawn, studio):
    loaded = drawn(model=studio.flux, precision={"preset": "auto"})
    task = choose_task(loaded.config)
    memory = int(3 * task.count_base_weights() / (1 - PLAN_TOLERANCE))
    old_cpu = replace(hardware.lookup_hardware("cpu"), memory=memory)
    resolved = check_run(task, loaded.sources, old_cpu).resolved
    assert (resolved.precision.base, resolved.preset) == ("bf16", "bf16-lora")
    assert "in fp32 the base takes" in resolved.preset_reason


def test_a_plan_that_does_not_fit_lists_the_settings_that_do(drawn, studio, monkeypatch):
    loaded = drawn(
        model=studio.flux,
        precision={"preset": "auto"},
        train={"batch_size": 2, "gradient_checkpointing": "none"},
    )
    card = replace(hardware.DEVICES["rtx3060"], memory=1000)
    monkeypatch.setitem(hardware.DEVICES, "rtx3060", card)
    plan = plan_run(loaded, device="rtx-3060")
    assert not plan.fits
    assert all("gradient_checkpointing=layers" in settings for settings in plan.alternatives)
    first, *_ = plan.alternatives
    assert first.endswith("train.batch_size=1 train.accumulate=2")
    least = min(plan.alternatives, key=plan.alternatives.__getitem__)
    assert "precision.base=nf4" in least
    last = list(plan.alternatives)[-1]
    assert "gradient_checkpointing=layers+offload" in last, "planned where nothing else fits"
    assert "precision.base=nf4 model.offload=blocks" in last
    assert f" with {least}: too much for this device" in plan.to_text()
    tight = replace(plan, hardware=replace(card, memory=plan.alternatives[least]))
    assert "too much for this device" in tight.to_text(), "a run cannot use all of a card"
    room = 1 + int(plan.alternatives[least] / (1 - PLAN_TOLERANCE))
    roomier = replace(plan, hardware=replace(card, memory=room))
    lines = roomier.to_text().splitlines()
    assert lines[lines.index("fits with") + 1].startswith(f"  {least}  ")
    assert roomier.to_dict()["alternatives"] == plan.alternatives
