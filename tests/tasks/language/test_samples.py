"""Samples during training: a short one is made whole and is watched, a round is not."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from isotype.data.rows import SamplePrompt
from isotype.errors import DtypeError
from isotype.tasks.choose import train
from isotype.tasks.language import task as task_module
from isotype.tasks.language.task import REHEARSED_TOKENS, LanguageTask
from tests.api import Loop

ROUNDS = {"samples": ["How much is 1 plus 1?", "How much is 2 plus 2?"], "sample_tokens": 12}


def test_only_a_short_sample_is_watched_before_step_1(configured, monkeypatch, tmp_path):
    calls = []
    sample = LanguageTask.sample

    def recorded(self, model, device, *, is_shortened=False, **options):
        calls.append((is_shortened, bool(_get_current_dispatch_mode_stack())))
        return sample(self, model, device, is_shortened=is_shortened, **options)

    monkeypatch.setattr(LanguageTask, "sample", recorded)
    loaded = configured(train={"steps": 1}, run=ROUNDS)
    assert train(loaded) == 0
    preflight = watched = (True, True)
    before_step_1 = after_step_1 = (False, False)
    assert calls == [preflight, before_step_1, after_step_1]
    record = json.loads((tmp_path / "run" / "precision.json").read_text())
    assert record["observed"]["generate"]
    calls.clear()
    skipped = configured("skipped", train={"steps": 1}, run=ROUNDS)
    assert train(skipped, skips={"PF017": "a test"}) == 0
    assert calls == [watched, before_step_1, after_step_1], "the preflight generated nothing"


def test_a_short_sample_is_made_whole_where_the_first_token_ends_an_answer(subject):
    one = subject(run=ROUNDS)
    model, device = one.prepared.model, one.prepared.device
    inner = model.get_base_model()
    model.generation_config.eos_token_id = list(range(inner.config.vocab_size - 1))
    lengths = []
    inner.register_forward_hook(
        lambda module, args, kwargs, output: lengths.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    one.task.sample(model, device, is_shortened=True)
    assert len(lengths) == REHEARSED_TOKENS
    assert lengths[0] > 1
    assert lengths[1:] == [1] * (REHEARSED_TOKENS - 1)
    lengths.clear()
    one.task.sample(model, device)
    assert len(lengths) == 1, "both prompts are in one batch"


def test_a_product_in_fp64_from_the_second_token_on_ends_a_run(configured, monkeypatch):
    calls = []
    sample, begin_round = LanguageTask.sample, Loop._sample

    def widen(module, args, output):
        if output.shape[1] > 1:
            return output
        identity = torch.eye(output.shape[-1], dtype=torch.float64)
        return (output.double() @ identity).to(output.dtype)

    def recorded(self, model, device, **options):
        calls.append(options)
        return sample(self, model, device, **options)

    def with_fault(self):  # after the preflight, which would refuse the run
        self.model.get_base_model().model.layers[-1].mlp.register_forward_hook(widen)
        begin_round(self)

    monkeypatch.setattr(LanguageTask, "sample", recorded)
    monkeypatch.setattr(Loop, "_sample", with_fault)
    with pytest.raises(DtypeError, match="fp64"):
        train(configured(run=ROUNDS))
    assert len(calls) == 2, "the preflight's, and one before the round"


def test_a_prompt_with_pictures_is_the_short_sample(monkeypatch):
    prompts = [SamplePrompt("words", (1,)), SamplePrompt("a picture", (1,), None, ("a.png",))]
    drawn = []
    monkeypatch.setattr(
        task_module, "sample", lambda model, tokenizer, prompts, **_: drawn.append(prompts)
    )
    task = SimpleNamespace(
        prompts=prompts,
        config=SimpleNamespace(run=SimpleNamespace(sample_tokens=8)),
        tokenizer=None,
        data=SimpleNamespace(pictures=None),
    )
    LanguageTask.sample(task, None, torch.device("cpu"), is_shortened=True)
    LanguageTask.sample(task, None, torch.device("cpu"))
    assert drawn == [[prompts[1]], prompts]
