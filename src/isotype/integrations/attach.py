"""`attach(trainer, precision=...)` and `detach(trainer)`: give a trainer one owner of precision,
Isotype's ops and guards, and undo all of it.

`attach` needs a complete trainer, because PEFT and TRL build the layers to be fused inside it. It
changes instances only, and if a part fails, it undoes the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import UsageError
from ..optimize import optimize, restore
from ..precision.apply import apply_precision, get_precision, remove_precision
from .attachment import Attachment, is_running, models_of, overridden, trained_in, unprepare
from .claims import ATTACHED, check_preflight, check_trainer, claims, resolve_for
from .record import Record
from .steps import Guards
from .weights import PureWeights, Weights, take_autocast


def attach(
    trainer: Any,
    precision: Any = "auto",
    *,
    skip: Mapping[str, str] | None = None,
    preflight: bool = True,
    record: bool = True,
    reversible: bool = True,
    quiet: bool = False,
) -> Attachment:
    """Gives a Hugging Face trainer Isotype's precision, ops, fused LoRA, safe generation and
    guards. Call it before `trainer.train()`.

    trainer     a transformers.Trainer or a subclass of it, complete: TRL's too
    precision   a preset's name, its short text form, a Precision, or auto: what the arguments ask
                for, else what the device does best
    skip        checks of the preflight to leave out: code -> why
    preflight   checks model, arguments and rows in `on_train_begin`, and rehearses a step, an
                evaluation and a generation
    record      writes output_dir/isotype/: manifest, observed precision, preflight, environment,
                report.html
    reversible  keeps, in host memory, what narrowing frozen weights to their declared dtype would
                lose, so that `detach` is exact
    quiet       does not print
    ->          the Attachment: who claimed the precision, and what was replaced where
    Raises      UsageError in one sentence, and the trainer is as it was
    """
    check_trainer(trainer)
    for name, model in models_of(trainer).items():
        if get_precision(model) is not None:  # a failed attach() would take it off
            raise UsageError(
                f"{type(trainer).__name__}.{name} has a precision already, from another attached"
                " trainer or isotype.optimize()",
                fix=(
                    "detach(the other trainer) first, or isotype.restore(model); or give this"
                    " trainer a model of its own"
                ),
            )
    skips = check_preflight(skip or {}, preflight=preflight, record=record)
    resolved = resolve_for(trainer, precision)
    claimed = list(claims(trainer, resolved.precision))
    attached = Attachment(
        trainer, resolved, claimed, optimizers=(trainer.optimizer, trainer.lr_scheduler)
    )
    try:
        guards = _put_on(attached, reversible=reversible)
        if record:
            attached.put(Record(attached, guards, preflight=preflight, skip=skips))
    except BaseException:
        _take_off(attached)
        raise
    trainer.__dict__[ATTACHED] = attached
    if not quiet and trainer.is_world_process_zero():
        print(attached)
    return attached


def detach(trainer: Any) -> list[str]:
    """Undoes `attach`: the next step is an untouched trainer's, bit for bit. Returns a line for
    each thing that could not be restored.

    Raises  UsageError for a trainer that is not attached, or is training
    """
    attached = getattr(trainer, "__dict__", {}).get(ATTACHED)
    if attached is None:
        raise UsageError("this trainer is not attached", fix="attach(trainer) before")
    if is_running(trainer):
        raise UsageError("this trainer is training", fix="detach(trainer) after trainer.train()")
    if trainer.is_in_train:  # its train() raised: what that made goes too
        attached.give_back_optimizers()
    unprepare(trainer)
    del trainer.__dict__[ATTACHED]
    return _take_off(attached)


def _put_on(attached: Attachment, *, reversible: bool) -> Guards:
    trainer = attached.trainer
    precision = attached.precision
    unprepare(trainer)
    models = models_of(trainer)
    device = trainer.args.device.type
    take_autocast(trainer.accelerator, list(models.values()), precision, attached.undo)
    weights = Weights()
    attached.undo.append(weights.restore)
    for name, model in models.items():
        weights.cast(
            model,
            precision,
            trained=trained_in(trainer, name),
            read_only=name != "model",
            keep=reversible,
        )
        # before the precision, which wraps the forward that the ops look at
        attached.undo += [partial(restore, model), partial(remove_precision, model)]
        attached.manifests[name] = optimize(model, precision, device_type=device)
        apply_precision(model, precision, device_type=device, cast=False)
    if weights.kept_bytes:
        attached.notes.append(
            f"{weights.kept_bytes / 2**20:.0f} MiB that rounding took from weights are kept for"
            " detach(); attach(..., reversible=False) keeps none"
        )
    if precision.trainable != "fp32":
        pure = PureWeights(trainer, precision)
        attached.accumulator = pure.accumulator
        attached.put(pure)
    guards: Guards = attached.put(Guards(attached))
    args = trainer.args
    if args.world_size > 1 and args.ddp_find_unused_parameters is None:
        # DDP's search for unused parameters, Trainer's default for PEFT models, walks the outputs
        # and makes deferred logits real
        args.ddp_find_unused_parameters = False
        attached.undo.append(partial(setattr, args, "ddp_find_unused_parameters", None))
        attached.notes.append(
            "ddp_find_unused_parameters=False: the search makes every rank's logits real"
        )
    if trainer.args.fsdp and not trainer.is_fsdp_enabled:
        attached.notes.append(
            f"fsdp has no effect on a {device.upper()}: accelerate replicates the model there (DDP)"
            " and says nothing"
        )
    for method in ("training_step", "compute_loss"):
        if own := overridden(trainer, method):
            attached.notes.append(
                f"{own} runs as it is; logits that it reads as a whole are computed, counted and"
                " named with their line"
            )
    return guards


def _take_off(attached: Attachment) -> list[str]:
    said: list[str] = []
    while attached.undo:
        made = attached.undo.pop()()
        said += made if isinstance(made, list) else []
    return said
