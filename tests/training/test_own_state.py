"""The preflight of an attached trainer leaves what a program keeps in its own dataset, collator, loss and modules as it was."""

from __future__ import annotations

import random
from collections import defaultdict
from enum import IntEnum

import numpy as np
import pytest
import torch
from tests.integrations.trainers import Encoded
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from isotype.integrations import attach
from isotype.training.own_state import OwnState

CALLS = 0


class Mode(IntEnum):
    """Refuses to have a member set, even to itself."""

    TRAIN = 1


def test_every_kind_of_own_state_is_put_back():
    drawn, steps, kept = torch.Generator().manual_seed(1), 0, torch.zeros(3)

    class Holder:
        seen = defaultdict(list)
        count = 0
        modes = Mode

        def __init__(self):
            self.numpy, self.python, self.rows, self.array = np.random.default_rng(2), random.Random(3), [[1]], np.zeros(2)

        def __call__(self, *_):
            global CALLS
            nonlocal steps
            CALLS, steps = CALLS + 1, steps + 1
            type(self).count += 1
            self.new = self.count
            self.seen["a"].append(1)
            self.rows[0].append(2)
            self.array += 1
            kept.add_(1)
            drawn_now = (torch.rand(2, generator=drawn).tolist(), self.numpy.random(), self.python.random())
            values = (len(self.seen["a"]), list(self.rows[0]), self.array.sum(), kept.sum().item())
            return steps, CALLS, self.count, *values, *drawn_now

    holder = Holder()
    state = OwnState([holder])
    first = holder()
    state.put_back()
    assert not hasattr(holder, "new")
    assert holder() == first
    assert not state.iterators
    holder.rows.append(iter([1]))
    assert OwnState([holder]).iterators == ["list_iterator"]


class Marked(Encoded):
    """Masks tokens by the generators of the process and by one of its own."""

    def __init__(self, count):
        super().__init__(count)
        self.drawn = torch.Generator().manual_seed(0)

    def __getitem__(self, i):
        row = {name: value.clone() for name, value in super().__getitem__(i).items()}
        at = [int(torch.randint(8, (), generator=self.drawn)), np.random.randint(4), random.randrange(4), int(torch.randint(4, ()))]
        row["labels"][at] = -100
        return row


def test_a_run_is_the_same_with_and_without_the_preflight(tmp_path):
    class Own(Trainer):
        calls = 0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.calls += 1
            self.log({"calls": self.calls})
            loss, outputs = super().compute_loss(model, inputs, True)
            return (loss * self.calls, outputs) if return_outputs else loss * self.calls

    class Heard(TrainerCallback):
        def __init__(self):
            self.logs = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            timed = ("runtime", "per_second", "share_changed", "promotions")
            self.logs.append({key: value for key, value in logs.items() if not any(word in key for word in timed)})

    runs = []
    for how in ({}, {"preflight": False}, None):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, eval_strategy="steps", eval_steps=1, logging_steps=1,
            report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        heard = Heard()
        trainer = Own(LlamaForCausalLM(config), arguments, train_dataset=Marked(6), eval_dataset=Marked(3), callbacks=[heard])
        if how is not None:
            attach(trainer, "fp32", quiet=True, **how)
        trainer.train()
        runs.append(heard.logs)
    assert runs[0] == runs[1]
    for ours, plain in zip(runs[1], runs[2], strict=True):
        assert ours == pytest.approx(plain, rel=1e-4)
