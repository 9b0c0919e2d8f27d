"""Lists the settings that decide the precision of a trainer. They are in its arguments, the
environment, accelerate, the checkpoint, PEFT and TRL.

`check_trainer` runs before anything is changed. If `attach` does not support the trainer, it raises
an error that says how to fix this. `resolve_trainer_precision` converts the caller's request to one
`Precision`, or raises an error for a contradiction. `collect_claims` lists the settings with their
values.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any

from packaging.version import Version
from torch import nn
from transformers import Trainer

from ..dtypes import format_dtype
from ..environment.hardware import detect
from ..errors import UsageError
from ..precision.apply import inner_model, is_quantised
from ..precision.precision import PRESETS, Precision
from ..precision.quantised_base import Quantisation, check_base, detect_quantisation
from ..precision.resolution import Resolved, resolve
from ..training.preflight.codes import check_skips
from ..training.preflight.static import TYPICAL_UPDATE, stuck_share
from .attachment import Claim, collect_models, is_running, trained_names
from .weights import check_low_precision_training

# accelerate's `mixed_precision` -> dtype
_ACCELERATE_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}


def is_adapter(parameter_name: str) -> bool:
    return ".lora_" in parameter_name


def count_dtypes(parameters: Iterable[nn.Parameter]) -> str:
    """Returns the dtypes of the floating parameters that are not quantised, and how many parameters
    have each dtype, for example `bf16 x 12, fp32 x 3`.
    """
    counts = Counter(
        format_dtype(p.dtype) for p in parameters if p.is_floating_point() and not is_quantised(p)
    )
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common()) or "none"


def requested_dtype(trainer: Any) -> str | None:
    """Returns the dtype that TrainingArguments request, or None."""
    if trainer.args.bf16:
        return "bf16"
    if trainer.args.fp16:
        return "fp16"
    return None


def _choose_precision(
    trainer: Any, adapter: str, *, quantised: Quantisation | None
) -> tuple[str, dict[str, str], str]:
    """Chooses the precision for `auto` from the arguments and the model. Returns the preset, the
    kinds of tensors (roles) whose dtype differs from the preset, and the reason for the choice. If
    neither the arguments nor the model decide, the preset is `auto`, and the device decides.
    """
    trainer_dtype = requested_dtype(trainer)
    # TRL's default of `bf16` is None, which means bf16, so that False was written by the user. In
    # the arguments of transformers itself, False may be the default
    is_fp32_requested = (
        trainer_dtype is None and type(trainer.args).__dataclass_fields__["bf16"].default is None
    )
    fp32_reason = "bf16=False in the trainer's arguments"
    if quantised is not None:
        if quantised.is_loaded or quantised.weight_format == "int8":
            preset = "bf16-lora"
            overrides = {"base": quantised.weight_format}
        else:
            preset = "nf4-lora"
            overrides = {}
        reason = "auto: the model's base is quantised"
        if is_fp32_requested:
            overrides["compute"] = "fp32"
            reason += f", and {fp32_reason}"
        return preset, overrides, reason
    if trainer_dtype is not None:
        if trainer_dtype == "fp16":
            preset = "fp16-mixed"
        elif adapter == "none":
            preset = "bf16-mixed"
        else:
            preset = "bf16-lora"
        return preset, {}, f"auto: {trainer_dtype}=True in the trainer's arguments"
    if is_fp32_requested:
        return ("fp32", {}, f"auto: {fp32_reason}")
    return ("auto", {}, "")


def resolve_trainer_precision(trainer: Any, precision: Any) -> Resolved:
    """Resolves the precision of this trainer.

    Raises  UsageError for settings that contradict each other; the message contains both values
    """
    model = trainer.model
    device = trainer.args.device.type
    hardware = detect("cpu" if device == "cpu" else "auto")
    if any(p.requires_grad and is_adapter(name) for name, p in model.named_parameters()):
        adapter = "lora"
    else:
        adapter = "none"
    quantised = detect_quantisation(inner_model(model))
    reason = ""
    if not isinstance(precision, str | Precision):
        raise UsageError(
            f"precision is a {type(precision).__name__}: expected a preset's name, a Precision, or"
            " auto"
        )
    if precision == "auto":
        preset, overrides, reason = _choose_precision(trainer, adapter, quantised=quantised)
    else:
        # the short text form: a preset and what differs from it
        parsed = Precision.parse(str(precision))
        preset = str(precision).split()[0]
        overrides = {
            role: value for role, value in parsed.items() if value != getattr(PRESETS[preset], role)
        }
    resolved = resolve(
        {"preset": preset, **overrides},
        device=hardware,
        adapter=adapter,
        optimizer=(
            "adamw8bit"
            if "8bit" in getattr(trainer.args.optim, "value", trainer.args.optim)
            else "adamw"
        ),
        frozen=any(not p.requires_grad for p in model.parameters()),
        sources={
            "precision.preset": f"attach(precision={str(precision)!r})",
            "adapter.kind": "the trainer's model",
        },
    )
    if reason:
        resolved = replace(
            resolved, preset_reason=resolved.preset_reason.replace(f"preset {preset}", reason, 1)
        )
    _check_precision_claims(trainer, resolved.precision, preset)
    if quantised is not None and quantised.packing is not None:
        raise UsageError(
            f"the trainer's model has {quantised.weight_format} layers of {quantised.library}'s own, whose"
            " products and gradients are not checked",
            fix=(
                "isotype.load_packed(FOLDER), which reads the same files into layers with a right"
                " gradient"
            ),
        )
    if resolved.precision.packed and quantised is None:
        raise UsageError(
            f"precision {preset}: base {resolved.precision.base}, but the trainer's model is not"
            f" quantised (its weights: {count_dtypes(model.parameters())})",
            fix=(
                "load it with BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'), or"
                " precision='bf16-lora'"
            ),
        )
    check_base(quantised, resolved.precision, "of the trainer")
    return resolved


def _check_precision_claims(trainer: Any, precision: Precision, preset: str) -> None:
    """Raises UsageError where the arguments or accelerate contradict the precision."""
    trainer_dtype = requested_dtype(trainer)
    accelerate_dtype = _ACCELERATE_DTYPES.get(
        trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision
    )
    if accelerate_dtype == "fp8":
        raise UsageError(
            "accelerate's mixed_precision is fp8, and no precision declares that",
            fix="mixed_precision: bf16",
        )
    if trainer_dtype is not None and trainer_dtype != precision.compute:
        if trainer_dtype == "bf16" and is_trl_trainer(trainer):
            default_note = " (TRL's configurations set it by default)"
        else:
            default_note = ""
        raise UsageError(
            f"{trainer_dtype}=True in the trainer's arguments{default_note}, and precision {preset} computes in"
            f" {precision.compute}",
            fix=(
                f"{trainer_dtype}=False, or precision='{'fp16-mixed' if trainer_dtype == 'fp16' else 'bf16-mixed'}'"
            ),
        )
    variable = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if (
        trainer_dtype is None
        and accelerate_dtype != "fp32"
        and accelerate_dtype != precision.compute
    ):
        if variable:
            source = f"ACCELERATE_MIXED_PRECISION={variable}"
        else:
            source = "accelerate's configuration"
        raise UsageError(
            f"{source} asks for {accelerate_dtype}, and precision {preset} computes in {precision.compute}",
            fix=(
                f"unset it, or {accelerate_dtype}=True in the arguments with a precision that computes in"
                f" {accelerate_dtype}"
            ),
        )
    if precision.loss_scaling == "dynamic" and getattr(trainer.accelerator, "scaler", None) is None:
        raise UsageError(
            f"precision {preset} scales the loss, and this trainer was built without a gradient"
            " scaler",
            fix="fp16=True in the arguments",
        )
    if precision.trainable != "fp32" or precision.grads != "fp32":
        check_low_precision_training(trainer, precision, preset)


def collect_claims(trainer: Any, precision: Precision) -> list[Claim]:
    """Lists every setting that decides the trainer's precision, with its value and its effect. Call
    it before anything is changed.
    """
    return [
        *_autocast_claims(trainer, precision),
        *_trained_model_claims(trainer, precision),
        *_optimizer_claims(trainer, precision),
        *_read_only_model_claims(trainer, precision),
        *_trl_claims(trainer, precision),
        *_evaluation_claims(trainer),
    ]


def _autocast_claims(trainer: Any, precision: Precision) -> Iterator[Claim]:
    trainer_dtype = requested_dtype(trainer)
    yield Claim(
        "training arguments",
        f"{trainer_dtype}=True" if trainer_dtype else "bf16=False, fp16=False",
        f"compute {precision.compute}, on the inner model",
    )
    variable = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if variable:
        yield Claim(
            "environment",
            f"ACCELERATE_MIXED_PRECISION={variable}",
            "agrees" if trainer_dtype else "overridden",
        )
    outcome = "had no autocast"
    if trainer.accelerator.native_amp:
        outcome = "wraps no forward"
        if precision.loss_scaling != "none":
            outcome = "keeps its wrapper: the gradient scaler needs it"
    yield Claim("accelerate", f"mixed_precision {trainer.accelerator.mixed_precision}", outcome)


def _trained_model_claims(trainer: Any, precision: Precision) -> Iterator[Claim]:
    """Yields the settings that decide the dtypes of the frozen weights, the trained weights and the
    adapters of the trained model.
    """
    model = trainer.model
    frozen = []
    adapters = []
    other_trained = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            frozen.append(parameter)
        elif is_adapter(name):
            adapters.append(parameter)
        else:
            other_trained.append(parameter)
    if frozen:
        yield Claim("checkpoint, frozen", count_dtypes(frozen), f"base {precision.unquantised}")
    if other_trained:
        rounding = " rounded stochastically" if precision.rounding == "stochastic" else ""
        yield Claim(
            "checkpoint, trained",
            count_dtypes(other_trained),
            f"trainable {precision.trainable}{rounding}"
            + _describe_vanishing_updates(trainer, other_trained),
        )
    if not adapters:
        return
    owner = "PEFT"
    # TRL casts the adapters of quantised models
    if is_trl_trainer(trainer) and any(format_dtype(p.dtype) == "bf16" for p in adapters):
        owner = "TRL's cast"
    yield Claim(
        f"{owner}, adapters",
        count_dtypes(adapters),
        f"{precision.trainable} masters" + _describe_vanishing_updates(trainer, adapters),
    )
    if any(getattr(m, "cast_input_dtype_enabled", False) for m in model.modules()):
        yield Claim(
            "PEFT's casts",
            "activations widened to the adapter's dtype",
            "off: A and B are cast down instead",
        )


def _optimizer_claims(trainer: Any, precision: Precision) -> Iterator[Claim]:
    if precision.trainable != "fp32":
        optim = getattr(trainer.args.optim, "value", trainer.args.optim)
        yield Claim(
            "training arguments", f"optim={optim}", "Isotype's AdamW, which rounds stochastically"
        )


def _read_only_model_claims(trainer: Any, precision: Precision) -> Iterator[Claim]:
    """Yields the settings of the reference model and the teacher."""
    for name, model in collect_models(trainer).items():
        if name == "model":
            continue
        outcome = f"base {precision.unquantised}"
        if precision.trainable != precision.unquantised and trained_names(trainer, name):
            outcome = (
                f"{precision.trainable} as trained, {precision.unquantised} where that is exact"
            )
        yield Claim(f"checkpoint, {name}", count_dtypes(model.parameters()), outcome)


def _trl_claims(trainer: Any, precision: Precision) -> Iterator[Claim]:
    if getattr(trainer.args, "cast_lm_head_to_fp32", False):
        yield Claim("TRL's cast", "cast_lm_head_to_fp32=True", "kept: the head's product is fp32")
    if getattr(trainer, "precompute_ref_logps", False) and precision.compute != "fp32":
        yield Claim(
            "TRL's reference",
            "precompute_ref_log_probs=True",
            "computed before attach(), in the trainer's own precision",
        )


def _evaluation_claims(trainer: Any) -> Iterator[Claim]:
    for flag in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(trainer.args, flag, False):
            yield Claim(
                "training arguments",
                f"{flag}=True",
                "evaluation computes in the precision, weights stay",
            )


def is_trl_trainer(trainer: Any) -> bool:
    return any(cls.__module__.startswith("trl.") for cls in type(trainer).__mro__)


def _describe_vanishing_updates(trainer: Any, parameters: list[nn.Parameter]) -> str:
    """Returns a text that says which share of the updates is lost if weights in a dtype below fp32
    are trained directly; "" if there are no such weights. No trainer reports this.
    """
    narrow = [p for p in parameters if format_dtype(p.dtype) in ("bf16", "fp16")]
    update = trainer.args.learning_rate * TYPICAL_UPDATE
    total = sum(p.numel() for p in narrow)
    if not total or not update:
        return ""
    share = sum(stuck_share(p, update) * p.numel() for p in narrow) / total
    return (
        f"; trained as they are, {share:.0%} of {format_dtype(narrow[0].dtype)} updates at"
        f" {trainer.args.learning_rate:g} would vanish"
    )


ATTACHED = "_isotype_attachment"  # attribute of a trainer to which Isotype is attached
# package -> (first tested version, first version that is not tested); the lowest are those that
# LLaMA-Factory 0.9.5 requires (benchmarks/attach_peers.py)
TESTED_VERSIONS = {
    "transformers": ("5.6", "6"),
    "accelerate": ("1.10", "2"),
    "peft": ("0.18", "1"),
    "trl": ("0.24", "1.17"),
}


def check_trainer(trainer: Any) -> None:
    """Raises UsageError for an object that is not a Trainer, and for a trainer that is already
    attached, that is training, whose model is already wrapped, or whose library has an untested
    version.
    """
    if not isinstance(trainer, Trainer):
        if isinstance(trainer, type):
            complaint = "is a class: give the trainer itself"
        else:
            complaint = "is no transformers.Trainer"
        if isinstance(trainer, nn.Module):
            fix = "isotype.optimize(model) for a loop of your own"
        else:
            fix = "attach(trainer) after Trainer(...)"
        raise UsageError(f"attach() takes a trainer: {type(trainer).__name__} {complaint}", fix=fix)
    if ATTACHED in trainer.__dict__:
        raise UsageError("this trainer is attached already", fix="detach(trainer) first")
    if is_running(trainer):
        raise UsageError(
            "this trainer is training: its optimizer and wrappers exist",
            fix="attach(trainer) before trainer.train()",
        )
    _check_versions(trainer)
    _check_model(trainer)


def check_preflight(skip: Mapping[str, str], *, preflight: bool, record: bool) -> dict[str, str]:
    """Raises UsageError for an unknown check, for a skipped check without a reason, and for
    settings that have no effect.
    """
    if preflight and not record:
        raise UsageError(
            "preflight=True has no effect with record=False: its record is preflight.json",
            fix="preflight=False too",
        )
    if skip and not preflight:
        raise UsageError(
            f"skip={dict(skip)} has no effect with preflight=False", fix="preflight=True"
        )
    return check_skips(skip)


def _check_versions(trainer: Any) -> None:
    packages = {cls.__module__.partition(".")[0] for cls in type(trainer).__mro__} | {
        "transformers",
        "accelerate",
    }
    packages |= {"peft"} if hasattr(trainer.model, "peft_config") else set()
    for package, (minimum, limit) in TESTED_VERSIONS.items():
        if package not in packages:
            continue
        version = metadata.version(package)
        if not Version(minimum) <= Version(version) < Version(limit):
            raise UsageError(
                f"{package} {version}: attach() was tested with {minimum} to below {limit}",
                fix=f"pip install '{package}>={minimum},<{limit}'",
            )


def _check_model(trainer: Any) -> None:
    model = trainer.model
    args = trainer.args
    reason = ""
    if not isinstance(model, nn.Module):
        reason = "this trainer has no model yet (model_init builds it in train())"
        fix = "Trainer(model=...)"
    elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        reason = f"the trainer's model is wrapped in {type(model).__name__} already"
        fix = "give the trainer the plain model: it wraps it"
    elif trainer.optimizer is not None and trainer.optimizer.state:
        reason = (
            "this trainer has trained already: its optimizer has states of the earlier precision"
        )
        fix = "attach(trainer) before train()"
    elif trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        engine = "DeepSpeed" if trainer.is_deepspeed_enabled else "accelerate's FSDP"
        reason = (
            f"attach() does not support {engine}, which owns the dtypes and the casts of the"
            " weights that the ops read"
        )
        fix = "DDP or a single process; or isotype train, which shards with FSDP2"
    elif args.use_liger_kernel and args.device.type in ("cpu", "mps"):
        reason = (
            "use_liger_kernel=True in the trainer's arguments: its kernels are Triton's, and do"
            f" not run on {args.device.type}"
        )
        fix = "use_liger_kernel=False: attach() brings kernels of its own"
    elif not any(p.requires_grad for p in model.parameters()):
        reason = "no parameter of this model is trained"
        fix = "give the trainer a peft_config, or requires_grad_(True)"
    if reason:
        raise UsageError(reason, fix=fix)
