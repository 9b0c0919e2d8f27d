"""A run with compiled layers: what runs compiled, what it says of that, and a resumed run that equals an undisturbed one."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from isotype.config.load import load
from isotype.errors import PreflightError, UsageError
from isotype.observe import is_observed
from isotype.optimize import forwards as regions
from isotype.tasks.choose import train

COMPILED = {"model": {"compile": "layers"}, "precision": {"preset": "bf16-lora"}, "run": {"observe_every": 100}}


@pytest.fixture
def calls(monkeypatch):
    """Regions are traced and run without Inductor. The lengths of the inputs of each, in order."""
    real, seen = torch.compile, []

    def without_inductor(function, *, options, **given):
        made = real(function, backend="aot_eager", options={"guard_filter_fn": options["guard_filter_fn"]}, **given)

        def run(*args):
            seen.append(next(a for a in args if isinstance(a, torch.Tensor)).shape[1])
            return made(*args)

        return run

    torch._dynamo.reset()
    regions.compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", without_inductor)
    yield seen
    regions.compiled.cache_clear()


@pytest.mark.full
def test_a_resumed_run_with_compiled_layers_equals_an_uninterrupted_one(configured, tmp_path, calls, capsys):
    steps = {"steps": 8, "eval_every": 4}
    unobserved = [step for step in range(1, 9) if not is_observed(step, every=100, seed=0, total=8)]
    assert max(unobserved) > 4
    assert train(configured("whole", **COMPILED, train=steps)) == 0
    # two layers: once before the preflight, once in its rehearsed step, and in every step that is not observed
    assert "2 layers of LlamaDecoderLayer run as compiled graphs in training steps" in capsys.readouterr().out
    assert len(calls) == 2 * (2 + len(unobserved))
    assert train(configured("halved", **COMPILED, train=steps)) == 0
    shutil.rmtree(tmp_path / "halved/checkpoints/step_8")
    shutil.rmtree(tmp_path / "halved/adapter")
    (tmp_path / "halved/result.json").unlink()
    calls.clear()
    # as in a process of its own
    torch._dynamo.reset()
    assert train(load(tmp_path / "halved/resolved.yaml", resolved=True), resume=tmp_path / "halved") == 0
    assert len(calls) == 2 * (1 + len([step for step in unobserved if step > 4]))
    ours, theirs = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("whole", "halved"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not [name for name in ours if "_orig_mod" in name]


def test_a_layer_that_is_not_one_graph_ends_the_run_before_its_first_step(configured, tmp_path, monkeypatch):
    def refuse(function):
        def run(*args, **kwargs):
            raise UsageError("model.compile: layers: LlamaDecoderLayer is not one graph: a wait", fix="model.compile: none")

        return run

    monkeypatch.setattr(regions, "compiled", refuse)
    with pytest.raises((UsageError, PreflightError), match="is not one graph: a wait"):
        train(configured(**COMPILED))
    assert not (tmp_path / "run/checkpoints").exists()
