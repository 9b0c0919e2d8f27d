"""Optimizers of a program's own that keep state outside `optimizer.state`: the preflight leaves it alone, and the observer looks at it."""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from transformers import Trainer, TrainingArguments

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


class NarrowErrorFeedback(ErrorFeedback):
    dtype = torch.bfloat16


class ListAndCounter(Own):
    """Momentum in a list that is made at once, and a warm-up by its own count."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.momentum = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for p, m in zip(self.param_groups[0]["params"], self.momentum):
            m.mul_(0.9).add_(p.grad)
            p.sub_(m * 1e-2 * min(1.0, self.calls / 3))


class QuasiNewton(Own):
    """L-BFGS: a closure where there is one, and pairs of differences in a queue."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=3)
        self.before: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        x, g = (torch.cat([t.flatten() for t in ts]) for ts in (self.given(), [p.grad for p in self.given()]))
        if self.before is not None:
            self.pairs.append((x - self.before[0], g - self.before[1]))
        self.before = x.clone(), g.clone()
        q = g.clone()
        for s, y in reversed(self.pairs):
            q -= (s @ q) / (s @ y).abs().clamp(min=1e-4) * y
        for p, part in zip(self.given(), q.split([p.numel() for p in self.given()])):
            p.sub_(part.view_as(p).clamp(-1, 1), alpha=self.param_groups[0]["lr"])
        return loss


class Lookahead(Optimizer):
    """Slow weights around PyTorch's AdamW, whose groups and states it shows."""

    def __init__(self, parameters: Any) -> None:
        inner = AdamW(parameters, lr=1e-2)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups, self.count = inner, inner.param_groups, 0
        self.slow = [p.detach().clone() for p in inner.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"]):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class LookaheadOfProperties(Lookahead):
    """The same, whose states are the inner optimizer's and cannot be set."""

    @property
    def state(self) -> Any:
        return self.inner.state if "inner" in vars(self) else {}

    @state.setter
    def state(self, value: Any) -> None:
        if "inner" in vars(self):
            raise AttributeError("the states are those of the inner optimizer")


class LookaheadOfItsOwn(Lookahead):
    """The same, as it is often written: PyTorch's constructor is not called."""

    def __init__(self, parameters: Any) -> None:
        self.inner = AdamW(parameters, lr=1e-2)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults
        self.count, self.slow = 0, [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        self.update()

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, states: Any) -> None:
        self.inner.load_state_dict(states)


class ScheduleFree(Own):
    """Trains an extrapolation and evaluates an average, which `train()` and `eval()` exchange; updates in training mode only."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.z = {p: p.detach().clone() for p in self.param_groups[0]["params"]}
        self.training, self.k = False, 0

    @torch.no_grad()
    def train(self) -> None:
        if not self.training:
            for p, z in self.z.items():
                p.lerp_(z, 0.1)
        self.training = True

    @torch.no_grad()
    def eval(self) -> None:
        if self.training:
            for p, z in self.z.items():
                p.lerp_(z, 1 - 1 / 0.9)
        self.training = False

    def step(self, closure: Any = None) -> None:
        if not self.training:
            raise RuntimeError("the optimizer is not in training mode")
        self.k += 1
        super().step()

    def direction(self, p: nn.Parameter) -> Tensor:
        self.z[p].sub_(p.grad, alpha=1e-2)
        return p.grad * 0.9 + (p - self.z[p]) / self.k


class DecayedAdamW(AdamW):
    """A subclass of PyTorch's with a count of its own."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        super().step()
        for p in self.param_groups[0]["params"]:
            p.mul_(1 - 1e-2 / self.calls)


def with_a_hook(parameters: Any) -> Optimizer:
    """PyTorch's AdamW, whose hook adds the residual of the update before to each gradient."""
    made, residual = AdamW(parameters, lr=1e-2), {}

    def added(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.add_(residual.get(p, torch.zeros(())))
            residual[p] = p.grad / 10

    made.register_step_pre_hook(added)
    return made


def with_another_step(parameters: Any) -> Optimizer:
    """PyTorch's SGD, whose step was replaced on the instance by one that counts in a closure."""
    made, calls = SGD(parameters, lr=1e-1), 0
    plain = type(made).step

    @functools.wraps(plain)
    def counted(self: Optimizer, closure: Any = None) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            plain(self, closure)

    made.step = MethodType(counted, made)
    return made


def with_hooks_of_gradients(parameters: Any) -> Optimizer:
    """PyTorch's AdamW, and a residual that hooks of the parameters keep."""
    made, residual = AdamW(parameters, lr=1e-2), {}

    def hook(p: nn.Parameter) -> Callable[[Tensor], Tensor]:
        def added(g: Tensor) -> Tensor:
            whole = g + residual.get(id(p), 0)
            residual[id(p)] = whole / 10
            return whole

        return added

    for p in made.param_groups[0]["params"]:
        p.register_hook(hook(p))
    return made


def in_backward(parameters: Any) -> Optimizer:
    """Updates the embedding in backward, where its gradient arrives, and the rest by PyTorch's AdamW."""
    every = list(parameters)
    first = SGD(every[:1], lr=1e-1)

    def updated(p: nn.Parameter) -> None:
        first.step()
        p.grad = None

    every[0].register_post_accumulate_grad_hook(updated)
    return AdamW(every, lr=1e-2)


FORMS = (
    ErrorFeedback, NarrowErrorFeedback, ListAndCounter, QuasiNewton, Lookahead, LookaheadOfProperties, LookaheadOfItsOwn, ScheduleFree,
    DecayedAdamW, with_a_hook, with_another_step, with_hooks_of_gradients, in_backward,
)  # fmt: skip


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
    if make is not with_hooks_of_gradients:  # what hooks of gradients keep is put back
        assert any({with_another_step: "SGD.step"}.get(make, make.__name__) in line for line in said)


@pytest.mark.filterwarnings("ignore:isotype")
def test_an_optimizer_of_ones_own_may_have_a_schedule_of_pytorchs(tmp_path):
    """The schedule puts a function on the optimizer, in the place of its `step`."""

    def scheduled(parameters: Any) -> Optimizer:
        made = ErrorFeedback(parameters)
        torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0)
        return made

    (losses, weights), (plain, untouched) = (run(tmp_path / str(how), scheduled, attached=how) for how in (True, False))
    assert losses == plain
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, untouched))


def test_pytorchs_own_update_is_rehearsed(tmp_path):
    run(tmp_path, lambda parameters: AdamW(parameters, lr=1e-2), attached=True)
    assert json.loads((tmp_path / "isotype" / "preflight.json").read_text())["findings"] == []
