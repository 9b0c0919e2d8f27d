"""A run with compiled layers: what runs compiled, what it says of that, and a resumed run that equals an undisturbed one."""

import pytest
import torch
from tests.results import same_tensors, trained_tensors
from tests.training.interrupted import cut_back

from isotype.config.load import load
from isotype.observe import is_observed
from isotype.optimize import regions
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
    cut_back(tmp_path / "halved", 8)
    calls.clear()
    # as in a process of its own
    torch._dynamo.reset()
    assert train(load(tmp_path / "halved/resolved.yaml", resolved=True), resume=tmp_path / "halved") == 0
    assert len(calls) == 2 * (1 + len([step for step in unobserved if step > 4]))
    same_tensors(tmp_path / "whole", tmp_path / "halved")
    assert not [name for name in trained_tensors(tmp_path / "whole") if "_orig_mod" in name]
