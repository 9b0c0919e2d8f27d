"""Programs at the borders of what is watched: some break the declared precision, some keep it.

The first are of three classes: time (a change between two watched steps), history (a file that held bf16) and rules (counts and norms).
The others are families of transformers, optimizers and callbacks that people use.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from isotype.errors import IsotypeError
from isotype.integrations import attach
from tests.integrations.trainers import WORDS, Encoded
from tests.models import lora, tiny

LIARS: dict[str, Callable[[Path], Seen]] = {}
HONEST: dict[str, Callable[[Path], Seen]] = {}


@dataclass
class Seen:
    """What a training said of its precision: violations, an error that ended it, and what it says was not watched."""

    violations: list[str] = field(default_factory=list)
    error: str = ""
    unwatched: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)


def case(into: dict[str, Any]) -> Callable[[Any], Any]:
    def added(f: Any) -> Any:
        into[f.__name__] = f
        return f

    return added


liar, honest = case(LIARS), case(HONEST)


class At(TrainerCallback):
    """Calls `act(trainer's model, optimizer, state)` at an event of the trainer."""

    def __init__(self, event: str, act: Callable[..., None]) -> None:
        def called(args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
            act(model, getattr(optimizer, "optimizer", optimizer), state)

        setattr(self, event, called)


def attached(
    folder: Path, family: str = "llama", *, precision: str = "bf16-mixed", adapter: bool = False, cls: Any = Trainer, change: Any = None,
    callbacks: Any = (), late: Any = (), resume: str | None = None, steps: int = 5, more: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None, model: Any = None, **given: Any,
) -> Seen:  # fmt: skip
    """Trains under `attach` and reads what it recorded. `change(model)` is called before, `late` are callbacks added after `attach`."""
    if model is None:
        model = tiny(family, vocab_size=WORDS + 3, **(config or {}))
    model = lora(model) if adapter else model
    if change is not None:
        change(model)
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, bf16=precision.startswith("bf16"), max_steps=steps, logging_steps=1, report_to=[],
        per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=2e-3, disable_tqdm=True, seed=42,
        **{"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2, **(more or {})},
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = cls(model, arguments, train_dataset=Encoded(), eval_dataset=Encoded(6), callbacks=list(callbacks), **given)
    seen = Seen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attach(trainer, precision, quiet=True)
        for callback in late:
            trainer.add_callback(callback)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except IsotypeError as error:
            seen.error = str(error)
    file = folder / "isotype" / "precision.json"
    if file.exists():
        seen.record = json.loads(file.read_text())
        seen.violations = [finding["message"] for finding in seen.record["violations"]]
        seen.unwatched = [*seen.record["unobserved"], *seen.record["not watched"]]
    return seen


def rounded(tensor: Tensor) -> Tensor:
    return tensor.detach().bfloat16().to(tensor.dtype)


# ---- time
@liar
def to_half_and_back_after_a_step(folder: Path) -> Seen:
    return attached(folder, precision="fp32", callbacks=[At("on_step_end", lambda model, *_: model.half().float())])


@liar
def weights_rounded_after_an_evaluation(folder: Path) -> Seen:
    def act(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            p.data.copy_(rounded(p))

    return attached(folder, callbacks=[At("on_evaluate", act)])


@liar
def a_table_rounded_at_the_beginning_of_a_step(folder: Path) -> Seen:
    def act(model: nn.Module, optimizer: Any, state: Any) -> None:
        if state.global_step == 3:
            table = model.model.rotary_emb.inv_freq
            table.copy_(rounded(table))

    return attached(folder, late=[At("on_step_begin", act)])


@liar
def products_of_evaluations_in_fp16(folder: Path) -> Seen:
    def change(model: Any) -> None:
        mlp = model.model.layers[1].mlp

        def forward(x: Tensor, inner: Any = mlp.forward) -> Tensor:
            if mlp.training:
                return inner(x)
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                return inner(x.half()).to(x.dtype)

        mlp.forward = forward

    return attached(folder, change=change)


class RoundingAdamW(torch.optim.AdamW):
    """Keeps weights that a bf16 checkpoint can hold."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(rounded(p))
        return result


@liar
def an_optimizer_that_rounds_its_weights(folder: Path) -> Seen:
    class Rounding(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = RoundingAdamW(self.model.parameters(), lr=1e-2)
            return self.optimizer

    return attached(folder, cls=Rounding, steps=8)


# ---- history
def _checkpoint(folder: Path) -> Path:
    attached(folder, steps=3, more={"save_strategy": "steps", "save_steps": 3})
    return folder / "checkpoint-3"


@liar
def states_that_a_file_held_in_bf16(folder: Path) -> Seen:
    file = _checkpoint(folder) / "optimizer.pt"
    saved = torch.load(file, weights_only=True)
    for state in saved["state"].values():
        state |= {key: state[key].bfloat16() for key in ("exp_avg", "exp_avg_sq")}
    torch.save(saved, file)
    return attached(folder, steps=6, resume=str(file.parent))


# ---- rules
def _loss(reduce: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
        # many rows: a batch of 606 learnt tokens
        return reduce(losses.repeat(20), (targets != -100).flatten().repeat(20))

    return compute


@liar
def tokens_counted_in_bf16(folder: Path) -> Seen:
    return attached(folder, compute_loss_func=_loss(lambda losses, learnt: losses.sum() / learnt.to(torch.bfloat16).sum()))


@liar
def gradients_clipped_by_a_norm_in_bf16(folder: Path) -> Seen:
    class Clipping(Trainer):
        def _clip_grad_norm(self, model: Any) -> Any:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.stack([g.norm() for g in gradients]).norm().bfloat16()
            for g in gradients:
                g.mul_((self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            return norm.float()

    return attached(folder, cls=Clipping)


# ---- honest
def _family(name: str, family: str, **settings: Any) -> None:
    def run(folder: Path) -> Seen:
        return attached(folder, family, more={"save_strategy": "steps", "save_steps": 2}, **settings)

    HONEST[name] = run


_family("norm_of_one_plus_the_weight_and_adapters", "gemma2", precision="bf16-lora", adapter=True)
_family("router_of_mixtral", "mixtral")


@honest
def momentum_from_a_bf16_checkpoint_with_warmup(folder: Path) -> Seen:
    model = tiny("llama", vocab_size=WORDS + 3)
    model.to(torch.bfloat16).float()
    return attached(folder, model=model, steps=8, more={"optim": "sgd", "optim_args": "momentum=0.9", "warmup_steps": 3})


@honest
def a_resumed_training(folder: Path) -> Seen:
    return attached(folder, steps=6, resume=str(_checkpoint(folder)))


@honest
def averages_in_place_for_an_evaluation(folder: Path) -> Seen:
    averages: dict[str, Tensor] = {}
    trained: dict[str, Tensor] = {}

    class Swapping(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    trained[name] = p.detach().clone()
                    p.copy_(averages.get(name, p))
                result = super().evaluate(*args, **kwargs)
                for name, p in self.model.named_parameters():
                    p.copy_(trained[name])
            return result

    def average(model: nn.Module, *_: Any) -> None:
        for name, p in model.named_parameters():
            averages[name] = averages.get(name, p.detach().clone()).lerp(p.detach(), 0.1)

    return attached(folder, cls=Swapping, callbacks=[At("on_step_end", average)])


@honest
def adafactor_with_accumulation_and_counts(folder: Path) -> Seen:
    count = _loss(lambda losses, learnt: losses.sum() / learnt.sum().clamp(min=1))
    return attached(folder, compute_loss_func=count, more={"optim": "adafactor", "gradient_accumulation_steps": 2})
