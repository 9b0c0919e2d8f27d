"""Whole runs on a GPU: every preset, host memory, resuming, and that what a run says of memory is
so.
"""

import json

import pytest
import torch
from tests.gpu import DEVICE, on_a_gpu
from tests.results import losses, same_result
from tests.training.interrupted import interrupted_after
from tests.training.memory.test_offload import chain, made

from isotype.tasks.choose import train

PRESETS = {
    "fp32": {},
    "bf16-lora": {},
    "nf4-lora": {},
    "bf16-pure": {"adapter": {"kind": "none"}},
    "bf16-mixed": {"adapter": {"kind": "none"}},
    "fp16-mixed": {"adapter": {"kind": "none"}},
}


def settings(preset, **more):
    return {"precision": {"preset": preset}, "model": {"device": DEVICE}} | PRESETS[preset] | more


@on_a_gpu
@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_of_every_preset_keeps_its_contract(configured, tmp_path, preset):
    if preset == "nf4-lora":
        pytest.importorskip("bitsandbytes")
    assert train(configured("here", **settings(preset))) == 0
    precision = json.loads((tmp_path / "here/precision.json").read_text())
    assert precision["violations"] == []
    # the same run on the CPU: the same data, order and initial weights
    assert train(configured("cpu", **{**settings(preset), "model": {"device": "cpu"}})) == 0
    for (step, loss, _, evaluation), (_, want, _, evaluated) in zip(
        losses(tmp_path / "here"), losses(tmp_path / "cpu"), strict=True
    ):
        assert (loss or evaluation) == pytest.approx(want or evaluated, rel=2e-2), f"step {step}"


@on_a_gpu
@pytest.mark.parametrize("preset", ["bf16-lora", "bf16-pure"])
def test_an_interrupted_run_ends_bit_identical(configured, tmp_path, monkeypatch, preset):
    assert train(configured("whole", **settings(preset))) == 0
    loaded = configured("stopped", **settings(preset))
    assert interrupted_after(2, loaded, monkeypatch) == 130
    assert train(loaded, resume=tmp_path / "stopped") == 0
    same_result(tmp_path / "whole", tmp_path / "stopped")


@on_a_gpu
@pytest.mark.parametrize("checkpointing", ["layers", "layers+offload"])
def test_recomputing_changes_no_result(configured, tmp_path, checkpointing):
    if DEVICE == "cpu" and "offload" in checkpointing:
        pytest.skip("refused on a CPU, whose memory is host memory")
    for name, way in (("plain", "none"), ("other", checkpointing)):
        more = {"train": {"gradient_checkpointing": way, "steps": 4}}
        assert train(configured(name, **settings("bf16-lora", **more))) == 0
    for (step, loss, _, evaluation), (_, want, _, evaluated) in zip(
        losses(tmp_path / "other"), losses(tmp_path / "plain"), strict=True
    ):
        assert (loss or evaluation) == pytest.approx(want or evaluated, rel=1e-3), f"step {step}"


@on_a_gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="copies beside the device's work")
def test_inputs_return_unchanged_from_host_memory():
    from tests.api import HostMemory

    layers, x = made(12), torch.randn(4096, 128)
    layers = [layer.to(DEVICE) for layer in layers]
    results = []
    for way in (HostMemory(), lambda layer, value: layer(value)):
        for _ in range(5):  # memory is used again from step to step
            leaf = x.to(DEVICE).requires_grad_()
            chain(way, leaf, layers).square().sum().backward()
            results.append(leaf.grad)
    assert all(torch.equal(results[0], grad) for grad in results)
