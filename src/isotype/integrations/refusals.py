"""Refuses trainers that `attach` cannot handle, before anything is changed; each message has a fix."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from packaging.version import Version
from torch import nn

from ..errors import UsageError
from ..training.preflight.codes import check_skips

ATTACHED = "_isotype_attachment"
# package -> (first version, first version that is not tested any more)
TESTED = {"transformers": ("5.17", "6"), "accelerate": ("1.10", "2"), "peft": ("0.21", "1"), "trl": ("1.16", "1.17")}


def check_trainer(trainer: Any) -> None:
    """Raises UsageError for an object that is not a Trainer, and for a trainer that is attached already, is training, is wrapped, or has a
    version that was never tested."""
    try:
        from transformers import Trainer
    except ImportError:
        raise UsageError("attach() needs transformers and accelerate", fix="pip install 'isotype[train]'") from None
    if not isinstance(trainer, Trainer):
        what = "is a class: give the trainer itself" if isinstance(trainer, type) else "is no transformers.Trainer"
        fix = "isotype.optimize(model) for a loop of your own" if isinstance(trainer, nn.Module) else "attach(trainer) after Trainer(...)"
        raise UsageError(f"attach() takes a trainer: {type(trainer).__name__} {what}", fix=fix)
    if ATTACHED in trainer.__dict__:
        raise UsageError("this trainer is attached already", fix="detach(trainer) first")
    if trainer.is_in_train:
        raise UsageError("this trainer is training: its optimizer and wrappers exist", fix="attach(trainer) before trainer.train()")
    _check_versions(trainer)
    _check_model(trainer)


def check_preflight(skip: Mapping[str, str], *, preflight: bool, record: bool) -> dict[str, str]:
    """Raises  UsageError for an unknown check, one without a reason, and settings without effect."""
    if preflight and not record:
        raise UsageError("preflight=True has no effect with record=False: its record is preflight.json", fix="preflight=False too")
    if skip and not preflight:
        raise UsageError(f"skip={dict(skip)} has no effect with preflight=False", fix="preflight=True")
    return check_skips(skip)


def _check_versions(trainer: Any) -> None:
    packages = {cls.__module__.partition(".")[0] for cls in type(trainer).__mro__} | {"transformers", "accelerate"}
    packages |= {"peft"} if hasattr(trainer.model, "peft_config") else set()
    for package, (first, last) in TESTED.items():
        if package not in packages:
            continue
        found = metadata.version(package)
        if not Version(first) <= Version(found) < Version(last):
            raise UsageError(
                f"{package} {found}: attach() was tested with {first} to below {last}", fix=f"pip install '{package}>={first},<{last}'"
            )


def _check_model(trainer: Any) -> None:
    model = trainer.model
    if not isinstance(model, nn.Module):
        raise UsageError("this trainer has no model yet (model_init builds it in train())", fix="Trainer(model=...)")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UsageError(
            f"the trainer's model is wrapped in {type(model).__name__} already", fix="give the trainer the plain model: it wraps it"
        )
    # accelerate wraps a model once, and its wrapper would stay around Isotype's precision
    if trainer.model_wrapped is not model or any(m is model for m in trainer.accelerator._models):
        raise UsageError(
            "accelerate has prepared this trainer's model already (evaluate() or train() ran)",
            fix="attach(trainer) right after Trainer(...)",
        )
    if trainer.is_deepspeed_enabled:
        raise UsageError(
            "attach() does not support DeepSpeed: its engine owns the weights' dtypes and the casts",
            fix="DDP or a single process; or isotype train, which shards with FSDP2",
        )
    if trainer.is_fsdp_enabled:
        raise UsageError(
            "attach() does not support accelerate's FSDP: its mixed-precision policy casts the weights that the ops read",
            fix="DDP or a single process; or isotype train, which shards with FSDP2",
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter of this model is trained", fix="give the trainer a peft_config, or requires_grad_(True)")
