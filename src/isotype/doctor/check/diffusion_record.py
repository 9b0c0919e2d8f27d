"""What runs of SimpleTuner, kohya's scripts and diffusers' examples really do."""

from __future__ import annotations

from .record import Record
from .settings import dtype_of


def simpletuner(record: Record) -> None:
    facts = record.facts
    mixed = facts.get("simpletuner.mixed_precision")
    mode = str(mixed.value) if mixed else "bf16"
    optimizer = facts.get("simpletuner.optimizer")
    name = str(optimizer.value).lower() if optimizer else "adamw_bf16"
    base = facts.get("simpletuner.base_model_precision")
    quantised = base is not None and str(base.value) not in ("no_change", "")
    default = facts.get("simpletuner.base_model_default_dtype")
    record.adapter = "lora" in facts.word("simpletuner.model_type") if facts.get("simpletuner.model_type") else None
    record.adapter_by = facts.get("simpletuner.model_type")
    weights, by, why = (
        {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp8": "bf16"}.get(mode),
        mixed,
        "mixed_precision decides the weight dtype",
    )
    if quantised and mode in ("no", "fp16"):
        weights, by, why = (
            ("fp32" if default and str(default.value) == "fp32" else "bf16"),
            default or base,
            "base_model_default_dtype decides for a quantised base",
        )
    record.set("parameters", weights, why, by)
    if name == "adamw_bf16" and not (quantised and default and str(default.value) == "fp32"):
        record.set("trained", "bf16", "adamw_bf16 makes the trained weights bf16", optimizer)
        record.set("optimizer", "bf16", "adamw_bf16 with stochastic rounding", optimizer)
    else:
        record.set("trained", weights, "trained weights get the weight dtype", by)
    if mode in ("bf16", "fp16", "fp8"):
        record.set("compute", mode, "mixed_precision: autocast", mixed)
    elif mode == "no":
        record.set("compute", "fp32" if record.value("trained") == "fp32" else "bf16", "mixed_precision no: no autocast", mixed)
    if mode == "fp16":
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", mixed)
    gradient = facts.get("simpletuner.gradient_precision")
    if gradient is not None:
        record.set(
            "gradients", record.value("trained"), f"gradient_precision={gradient.value} is not applied by current SimpleTuner", gradient
        )
    if quantised and base is not None:
        record.quantised, record.quantised_by = (
            (4 if any(w in str(base.value) for w in ("int4", "nf4", "fp4", "uint4", "int2")) else 8),
            base,
        )
        record.set("storage", str(base.value), "base_model_precision", base)
    if ema := facts.on("simpletuner.use_ema"):
        record.set("ema", record.value("trained") or "bf16", "the shadow is a clone of the trained weights", ema)


def kohya(record: Record) -> None:
    facts = record.facts
    mixed = facts.get("kohya.mixed_precision")
    mode = str(mixed.value).lower() if mixed else "no"
    network = facts.get("kohya.network_module")
    record.adapter, record.adapter_by = (True, network) if network else (None, None)
    full = facts.on("kohya.full_bf16", "kohya.full_fp16")
    half = mode if mode in ("bf16", "fp16") else "fp32"
    record.set("parameters", half, "mixed_precision", mixed)
    record.set(
        "trained",
        ("bf16" if "bf16" in full.key else "fp16") if full else "fp32",
        "full_* casts what is trained" if full else "fp32 masters",
        full,
    )
    record.set("compute", half, "autocast" if half != "fp32" else "no mixed precision", mixed)
    if mode == "fp16" and not full:
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", mixed)


def script(record: Record) -> None:
    """A training script with diffusers' or accelerate's arguments."""
    mixed = record.facts.get("script.mixed_precision")
    record.set("compute", dtype_of(mixed.value) if mixed else None, "the script's argument", mixed)
