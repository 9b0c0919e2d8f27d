"""`attach(trainer, precision=...)` and `detach(trainer)`: `attach` lets Isotype alone decide the
precision of a trainer, and adds Isotype's ops and its checks in each step; `detach` undoes these
changes.

`attach` needs a complete trainer, because PEFT and TRL build the layers that it fuses when the
trainer is created. It changes instances only. If one of its parts fails, it undoes the changes of
the earlier parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import UsageError
from ..optimize import optimize, restore
from ..precision.apply import apply_precision, get_precision, remove_precision
from .attachment import (
    Attachment,
    collect_models,
    is_running,
    remove_accelerate_wrappers,
    trained_names,
    user_override,
)
from .claims import (
    ATTACHED,
    check_preflight,
    check_trainer,
    collect_claims,
    resolve_trainer_precision,
)
from .record import Record
from .recorder import StepRecorder
from .steps import Guards
from .weights import CastWeights, LowPrecisionWeights, disable_accelerate_autocast


def attach(
    trainer: Any,
    precision: Any = "auto",
    *,
    skip: Mapping[str, str] | None = None,
    preflight: bool = True,
    record: bool = True,
    reversible: bool = True,
    quiet: bool = False,
    recorder: bool = False,
) -> Attachment:
    """Attaches Isotype to a Hugging Face trainer. The trainer then uses Isotype's ops and fused
    LoRA, trains and generates in the declared dtypes, and checks each step. Call this function
    before `trainer.train()`.

    trainer     a complete transformers.Trainer or an instance of a subclass, such as TRL's
    precision   a preset's name, its short text form, a Precision, or auto: the dtype that the
                trainer's arguments request, else the best for the device
    skip        the preflight checks to skip, as a mapping of their codes to the reasons
    preflight   checks model, arguments and rows in `on_train_begin`, and makes a test run of a
                step, an evaluation and a generation
    record      writes to output_dir/isotype/: manifest, observed precision, preflight, environment,
                report.html
    reversible  stores the bits that frozen weights lose when they are cast to their declared dtype,
                in host memory; `detach` then restores the weights exactly
    quiet       prints nothing
    recorder    keeps the batches of the current step, and the trained weights of the last good step
                in host memory. If a loss, a gradient or an update is not finite, the error names the
                first operator whose result is not finite
    ->          the Attachment, which lists the settings that decide the precision and the replaced
                modules
    Raises      UsageError; the trainer is then unchanged
    """
    check_trainer(trainer)
    for name, model in collect_models(trainer).items():
        if get_precision(model) is not None:  # a failed attach() would remove it
            raise UsageError(
                f"{type(trainer).__name__}.{name} has a precision already, from another attached"
                " trainer or isotype.optimize()",
                fix=(
                    "detach(the other trainer) first, or isotype.restore(model); or give this"
                    " trainer a model of its own"
                ),
            )
    skips = check_preflight(skip or {}, preflight=preflight, record=record)
    resolved = resolve_trainer_precision(trainer, precision)
    claims = collect_claims(trainer, resolved.precision)
    attachment = Attachment(
        trainer, resolved, claims, optimizers=(trainer.optimizer, trainer.lr_scheduler)
    )
    try:
        guards = _install(attachment, reversible=reversible)
        if recorder:
            _install_recorder(attachment, guards)
        if record:
            attachment.install(Record(attachment, guards, preflight=preflight, skip=skips))
    except BaseException:
        _uninstall(attachment)
        raise
    trainer.__dict__[ATTACHED] = attachment
    if not quiet and trainer.is_world_process_zero():
        print(attachment)
    return attachment


def _install_recorder(attachment: Attachment, guards: Guards) -> None:
    step_recorder: StepRecorder = attachment.install(StepRecorder(attachment))
    guards.recorder = step_recorder
    attachment.notes.append(
        f"recorder: {step_recorder.kept_bytes / 2**20:.1f} MiB of host memory hold the trained"
        " weights of the last good step, which are copied once per step; the batches of a step are"
        " kept until the next step"
    )


def detach(trainer: Any) -> list[str]:
    """Undoes `attach`. The results of the next step are then bit-identical to those of a training
    without `attach`. Returns a line for each thing that could not be restored.

    Raises  UsageError for a trainer that is not attached, or is training
    """
    attachment = getattr(trainer, "__dict__", {}).get(ATTACHED)
    if attachment is None:
        raise UsageError("this trainer is not attached", fix="attach(trainer) before")
    if is_running(trainer):
        raise UsageError("this trainer is training", fix="detach(trainer) after trainer.train()")
    if trainer.is_in_train:  # its train() raised: the optimizer that it built goes too
        attachment.restore_optimizers()
    remove_accelerate_wrappers(trainer)
    del trainer.__dict__[ATTACHED]
    return _uninstall(attachment)


def _install(attachment: Attachment, *, reversible: bool) -> Guards:
    trainer = attachment.trainer
    precision = attachment.precision
    remove_accelerate_wrappers(trainer)
    models = collect_models(trainer)
    device = trainer.args.device.type
    disable_accelerate_autocast(
        trainer.accelerator, list(models.values()), precision, attachment.undo
    )
    weights = CastWeights()
    attachment.undo.append(weights.restore)
    for name, model in models.items():
        weights.cast(
            model,
            precision,
            trained=trained_names(trainer, name),
            read_only=name != "model",
            stores_lost_bits=reversible,
        )
        # the ops are inserted first, because they read the model's forward, which the precision
        # replaces by a wrapper
        attachment.undo += [partial(restore, model), partial(remove_precision, model)]
        attachment.manifests[name] = optimize(model, precision, device_type=device)
        apply_precision(model, precision, device_type=device, cast=False)
    if weights.stored_bytes:
        attachment.notes.append(
            f"{weights.stored_bytes / 2**20:.0f} MiB that rounding took from weights are kept for"
            " detach(); attach(..., reversible=False) keeps none"
        )
    if precision.trainable != "fp32":
        low_precision_weights = LowPrecisionWeights(trainer, precision)
        attachment.accumulator = low_precision_weights.accumulator
        attachment.install(low_precision_weights)
    guards: Guards = attachment.install(Guards(attachment))
    args = trainer.args
    if args.world_size > 1 and args.ddp_find_unused_parameters is None:
        # DDP's search for unused parameters, Trainer's default for PEFT models, walks the outputs
        # and makes deferred logits real
        args.ddp_find_unused_parameters = False
        attachment.undo.append(partial(setattr, args, "ddp_find_unused_parameters", None))
        attachment.notes.append(
            "ddp_find_unused_parameters=False: the search makes every rank's logits real"
        )
    if trainer.args.fsdp and not trainer.is_fsdp_enabled:
        attachment.notes.append(
            f"fsdp has no effect on a {device.upper()}: accelerate replicates the model there (DDP)"
            " and says nothing"
        )
    for method in ("training_step", "compute_loss"):
        if override := user_override(trainer, method):
            attachment.notes.append(
                f"{override} runs as it is; logits that it reads as a whole are computed, counted and"
                " named with their line"
            )
    return guards


def _uninstall(attachment: Attachment) -> list[str]:
    messages: list[str] = []
    while attachment.undo:
        result = attachment.undo.pop()()
        messages += result if isinstance(result, list) else []
    return messages
