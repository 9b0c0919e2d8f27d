"""Settings of the model and the trainer's half precision, wherever a tool keeps them."""

from __future__ import annotations

from .record import Record
from .settings import Facts, Setting, dtype_of

MODEL_DTYPE = (
    "model.dtype", "model.torch_dtype", "hf.dtype", "hf.torch_dtype", "hf.model_init_kwargs.dtype", "hf.model_init_kwargs.torch_dtype",
    "hf.model_dtype", "model.model_kwargs.torch_dtype",
)  # fmt: skip


CHECKPOINT_DTYPE = (
    "checkpoint.stored_dtype",
    "checkpoint.dtype",
    "checkpoint.torch_dtype",
    "checkpoint.text_config.dtype",
    "checkpoint.text_config.torch_dtype",
)


BNB = "quantization_config"


def model_dtype(facts: Facts) -> tuple[str | None, Setting | None]:
    """The dtype the weights are loaded in: as asked, or the checkpoint's own."""
    asked = facts.get(*MODEL_DTYPE)
    if asked is not None and dtype_of(asked.value):
        return dtype_of(asked.value), asked
    stored = facts.get(*CHECKPOINT_DTYPE)
    return (dtype_of(stored.value), stored) if stored else (None, None)


def mixed_flag(facts: Facts, tool: str = "hf") -> Setting | None:
    """The trainer's own flag for half precision that is on, bf16 first."""
    return facts.on(f"{tool}.bf16", f"{tool}.fp16")


def launcher_mode(facts: Facts) -> Setting | None:
    """What accelerate's configuration, launcher or environment says."""
    found = facts.get("env.ACCELERATE_MIXED_PRECISION", "accelerate.mixed_precision")
    return found


def quantised(record: Record, *prefixes: str) -> None:
    facts = record.facts
    for bits in (4, 8):
        found = facts.on(*(f"{p}.load_in_{bits}bit" for p in prefixes))
        if found:
            record.quantised, record.quantised_by = bits, found
            return
    stored = facts.get("checkpoint.quantization_config.quant_method", "model.quantization_config.quant_method")
    if stored:
        four = facts.on("checkpoint.quantization_config.load_in_4bit", "model.quantization_config._load_in_4bit") or str(stored.value) in (
            "awq",
            "gptq",
            "hqq",
        )
        record.quantised, record.quantised_by = (4 if four else 8), stored


def adapter_from(record: Record, *names: str) -> None:
    facts = record.facts
    for name in names:
        setting = facts.given(name)
        if setting is None:
            continue
        word = str(setting.value).lower()
        record.adapter = word not in ("none", "null", "false", "full", "", "freeze", "no")
        record.adapter_by = setting
        return
    if facts.has("peft"):
        record.adapter = True
        record.adapter_by = next((s for _, s in facts.all("peft")), None)


def lightning_precision(facts: Facts) -> Setting | None:
    return facts.get("lightning.precision", "lightning.trainer.precision")
