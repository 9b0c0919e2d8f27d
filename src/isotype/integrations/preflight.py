"""The preflight of an attached trainer: Isotype's own checks on the trainer's model, arguments and rows, before step 1.

Checks that need a run file are left out, and those that the trainer cannot be rehearsed for, each with its reason. It draws, updates and
logs nothing: a run with the preflight is bit-identical to one without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import PreflightError
from ..libraries import hook_of_gradients
from ..precision.apply import inner_model
from ..tasks.language.checks.labels import end_never_learnt, nothing_to_learn
from ..tasks.language.checks.positions import beyond_the_positions
from ..tasks.language.checks.tokens import beyond_the_embeddings, untrained_new_tokens
from ..training.own_state import own_state_restored
from ..training.preflight.check import Check, Outcome, preflight
from ..training.preflight.rehearsal import rehearsed_evaluation, rehearsed_samples, rehearsed_step
from ..training.preflight.updates import vanishing_updates
from ..training.undisturbed import random_state_restored
from .attachment import Attachment, models_of
from .methods import Methods
from .trainer_rows import TrainerRows
from .trainer_subject import subject_of, tokenizer_of
from .trainer_words import in_trainers_words

_ROWS = (Check(("PF005",), nothing_to_learn),)
_POSITIONS = (Check(("PF020",), beyond_the_positions),)
_TOKENS = (Check(("PF007",), end_never_learnt),)
_TABLES = (Check(("PF008",), beyond_the_embeddings), Check(("PF009",), untrained_new_tokens))
_STEP = (Check(("PF012", "PF013", "PF014", "PF015"), rehearsed_step), Check(("PF017",), rehearsed_samples))
_EVALUATION = (Check(("PF016",), rehearsed_evaluation),)


def run_preflight(attached: Attachment, folder: Path, skip: Mapping[str, str], *, resuming: bool) -> Outcome:
    """Raises  PreflightError with every error found; `attach(..., skip={"PF003": "why"})` leaves a check out."""
    trainer = attached.trainer
    with _undisturbed(trainer) as readable:
        return _run(attached, TrainerRows.of(trainer) if readable else TrainerRows.unread(), folder, skip, resuming=resuming)


def _run(attached: Attachment, rows: TrainerRows, folder: Path, skip: Mapping[str, str], *, resuming: bool) -> Outcome:
    trainer = attached.trainer
    checks: dict[str, tuple[Check, ...]] = {"static": (Check(("PF003",), vanishing_updates),)}
    why_not = _why_not_rehearsed(trainer, rows)
    unmeasured = f", which does not run: {why_not}" if why_not else ""
    skipped = {"PF011": f"a trainer's memory is not planned; the rehearsed step of its longest batch is the check{unmeasured}", **skip}
    without = rows.why_no_tokens if not rows.tokens else "" if tokenizer_of(trainer) else "the trainer has no processing_class"
    unknown = "" if hasattr(inner_model(trainer.model), "config") else "the model is none of transformers: its tables are not known"
    unplanned = "eval_strategy is no" if str(trainer.args.eval_strategy.value) == "no" else ""
    for phase, these, why in (
        ("data", _ROWS, "" if rows.tokens else rows.why_no_tokens),
        ("data", _POSITIONS, unknown or ("" if rows.tokens else rows.why_no_tokens)),
        ("data", _TOKENS, without),
        ("data", _TABLES, unknown or without),
        ("real", _STEP, why_not),
        ("real", _EVALUATION, why_not or unplanned),
    ):
        if why:
            skipped |= dict.fromkeys((code for check in these for code in check.codes), why)
        else:
            checks[phase] = (*checks.get(phase, ()), *these)
    try:
        return preflight(subject_of(attached, rows, folder, resuming=resuming), skipped, checks=checks)
    except PreflightError as error:
        first = error.message.partition(": ")[2].split("\n")[0].split(", ")[0]
        fix = f'mend it, or attach(..., skip={{"{first}": "why it does not matter here"}})'
        raise PreflightError(in_trainers_words(error.message), fix=fix) from None


def _why_not_rehearsed(trainer: Any, rows: TrainerRows) -> str:
    if trainer.args.world_size > 1:
        return "several processes: a rehearsed backward would meet DDP's hooks"
    if getattr(trainer.accelerator, "scaler", None) is not None:
        return "fp16: the gradient scaler would count the rehearsed step"
    if hasattr(trainer, "_generate_and_score_completions") or hasattr(trainer, "reward_funcs"):
        return "the trainer makes its rows by generation in its first step"
    if (hook := hook_of_gradients(trainer.model.parameters())) is not None:
        return f"{hook} runs in backward: what it does there, as an update of the weights, could not be put back"
    return "" if rows.largest else rows.why_no_tokens


@contextmanager
def _undisturbed(trainer: Any) -> Iterator[bool]:
    """Restores on exit what the program's own code changes when the preflight calls it: random generators, counters, caches, metrics.
    Nothing is logged.

    Gives whether the rows can be read: an iterator that their dataset, collator or loss holds would go on.
    """
    evaluated = trainer.eval_dataset
    evaluated = list(evaluated.values()) if isinstance(evaluated, dict) else [evaluated]
    called = [trainer.train_dataset, *evaluated, trainer.data_collator, getattr(trainer, "compute_loss_func", None)]
    modules = [module for model in models_of(trainer).values() for module in model.modules()]
    tensors = [tensor for module in modules for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))]
    hooks = [hook for tensor in tensors for hook in (tensor._backward_hooks or {}).values()]
    others = [trainer, trainer.state, trainer.control, *trainer.callback_handler.callbacks, *modules]
    methods = Methods(trainer)
    with random_state_restored(), own_state_restored(others, without=tensors), own_state_restored([*called, *hooks]) as state:
        methods.wrap("log", lambda *_, **__: None)
        try:
            yield not state.iterators
        finally:
            methods.restore()
