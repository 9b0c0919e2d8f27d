"""Optimizers of a program's own that keep state outside `optimizer.state`: the preflight leaves it alone, and the observer looks at it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import Trainer, TrainingArguments

from isotype.errors import RunError
from isotype.integrations import attach
from tests.integrations.trainers import WORDS, Encoded

STEPS = 4


class Plain(nn.Module):
    """A model that no op of Isotype's computes: attached and plain runs are equal bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(WORDS + 3, 16), nn.Linear(16, 16), nn.Linear(16, WORDS + 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.mix(self.embed(input_ids))))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class Own(Optimizer):
    """An update of a program's own, for each parameter that has a gradient."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    def given(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.given():
            p.add_(self.direction(p), alpha=-self.param_groups[0]["lr"])

    def direction(self, p: nn.Parameter) -> Tensor:
        raise NotImplementedError


class ErrorFeedback(Own):
    """Adds to each gradient what the update before lost of it."""

    dtype = torch.float32

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.residual: dict[nn.Parameter, Tensor] = {}

    def direction(self, p: nn.Parameter) -> Tensor:
        residual = self.residual.setdefault(p, torch.zeros_like(p, dtype=self.dtype))
        whole = p.grad + residual
        sent = whole.sign() * whole.abs().mean()
        residual.copy_(whole - sent)
        return sent


def with_a_hook(parameters: Any) -> Optimizer:
    """PyTorch's AdamW, whose hook adds the residual of the update before to each gradient."""
    made, residual = AdamW(parameters, lr=1e-2), {}

    def added(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.add_(residual.get(p, torch.zeros(())))
            residual[p] = p.grad / 10

    made.register_step_pre_hook(added)
    return made


FORMS = (ErrorFeedback, with_a_hook)


def run(folder: Any, make: Callable[[Any], Optimizer], *, attached: bool) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, eval_strategy="steps", eval_steps=2, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    model = Plain()
    trainer = Trainer(model, arguments, train_dataset=Encoded(), eval_dataset=Encoded(6), optimizers=(make(model.parameters()), None))
    if attached:
        attach(trainer, "fp32", quiet=True)
    trainer.train()
    losses = [row[key] for row in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in row]
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:isotype")
@pytest.mark.parametrize("make", FORMS, ids=lambda make: make.__name__)
def test_an_attached_run_is_the_plain_one(make, tmp_path):
    (losses, weights), (plain, untouched) = (run(tmp_path / str(how), make, attached=how) for how in (True, False))
    assert losses == plain
    assert len(losses) > STEPS
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, untouched))
    found = json.loads((tmp_path / "True" / "isotype" / "preflight.json").read_text())
    said = [finding["message"] for finding in found["findings"]] + [skipped["reason"] for skipped in found["skipped"]]
    assert any(make.__name__ in line for line in said)


def test_pytorchs_own_update_is_rehearsed(tmp_path):
    run(tmp_path, lambda parameters: AdamW(parameters, lr=1e-2), attached=True)
    assert json.loads((tmp_path / "isotype" / "preflight.json").read_text())["findings"] == []


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_an_update_that_moves_no_weight_is_refused_where_gradients_ask_for_one(share, tmp_path):
    class Copies(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = AdamW([nn.Parameter(p.detach().clone()) for p in self.model.parameters()], lr=1e-2)
            return self.optimizer

        def compute_loss(self, *args, **kwargs):
            return share * super().compute_loss(*args, **kwargs)

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=2, report_to=[], disable_tqdm=True)
    trainer = Copies(Plain(), arguments, train_dataset=Encoded())
    attach(trainer, "fp32", quiet=True, preflight=False)
    if share:
        with pytest.raises(RunError, match="step 1 changed no weight, and its gradients and learning rate are not zero: AdamW"):
            trainer.train()
    else:  # as in a policy's step whose rewards are equal
        trainer.train()
