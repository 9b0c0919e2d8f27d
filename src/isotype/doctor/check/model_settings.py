"""Settings of the model, half precision, quantisation, adapters, DeepSpeed and FSDP, wherever a tool keeps them."""

from __future__ import annotations

from .settings import Facts, Record, Setting, dtype_of, truth

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


def deepspeed_setting(facts: Facts, key: str) -> Setting | None:
    return facts.get(
        f"deepspeed.{key}",
        f"accelerate.deepspeed_config.{key}",
        f"hf.deepspeed.{key}",
        f"axolotl.deepspeed.{key}",
        f"llamafactory.deepspeed.{key}",
    )


def uses_deepspeed(facts: Facts) -> Setting | None:
    if facts.has("deepspeed"):
        document = facts.tool("deepspeed")
        assert document is not None
        return next(iter(document.settings.values()), None)
    if "deepspeed" in facts.word("accelerate.distributed_type"):
        return facts.get("accelerate.distributed_type")
    return next((s for t in ("hf", "axolotl", "llamafactory") if (s := facts.get(f"{t}.deepspeed")) and s.value), None) or next(
        iter(facts.under("hf.deepspeed")), None
    )


def deepspeed_half(record: Record) -> str | None:
    """The half precision that DeepSpeed's file switches on, itself or by "auto"."""
    for half in ("bf16", "fp16"):
        section = deepspeed_setting(record.facts, f"{half}.enabled")
        if section is not None and (truth(section.value) or (str(section.value) == "auto" and record.value("compute") == half)):
            return half
    return None


def zero_stage(facts: Facts) -> tuple[int | None, Setting | None]:
    found = facts.get(
        "deepspeed.zero_optimization.stage",
        "accelerate.deepspeed_config.zero_stage",
        "hf.deepspeed.zero_optimization.stage",
        "axolotl.deepspeed.zero_optimization.stage",
    )
    if found is not None:
        try:
            return int(found.value), found
        except (TypeError, ValueError):
            return None, found
    for tool in ("hf", "axolotl", "llamafactory"):
        named = facts.get(f"{tool}.deepspeed")
        if (
            named
            and isinstance(named.value, str)
            and (digits := [c for c in named.value.rpartition("/")[2] if c in "0123"])
            and "z" in named.value.lower()
        ):
            return int(digits[0]), named
    return None, None


def uses_fsdp(facts: Facts) -> Setting | None:
    if "fsdp" in facts.word("accelerate.distributed_type"):
        return facts.get("accelerate.distributed_type")
    for name in (
        "hf.fsdp",
        "axolotl.fsdp",
        "llamafactory.fsdp",
        "simpletuner.fsdp_enable",
        "axolotl.fsdp_version",
        "fsdp.strategy",
        "accelerate.use_fsdp",
        "lightning.strategy",
        "lightning.trainer.strategy",
    ):
        found = facts.get(name)
        if found and found.value not in ("", [], False) and ("strategy" not in name or "fsdp" in str(found.value).lower()):
            return found
    inner = [
        s for t in ("hf", "axolotl", "llamafactory", "accelerate") for s in facts.under(f"{t}.fsdp_config") if s.value not in (None, {}, [])
    ]
    if (inner and "fsdp" in facts.word("accelerate.distributed_type", "accelerate.use_fsdp")) or (inner and not facts.has("accelerate")):
        return inner[0]
    return next((s for _, s in facts.all("fsdp")), None)


def fsdp_version(facts: Facts) -> tuple[int | None, Setting | None]:
    found = facts.get(
        "accelerate.fsdp_config.fsdp_version",
        "hf.fsdp_config.version",
        "hf.fsdp_config.fsdp_version",
        "fsdp.fsdp_version",
        "fsdp.version",
        "axolotl.fsdp_version",
        "axolotl.fsdp_config.fsdp_version",
        "simpletuner.fsdp_version",
        "accelerate.fsdp_version",
        "env.FSDP_VERSION",
    )
    if found is None:
        return _trainers_default(facts)
    try:
        return int(found.value), found
    except (TypeError, ValueError):
        return None, found


def _trainers_default(facts: Facts) -> tuple[int | None, Setting | None]:
    """transformers' arguments without a version are FSDP2 since 5.10; accelerate's own file without one stays FSDP1."""
    asked = next((s for tool in ("hf", "llamafactory") if (s := facts.get(f"{tool}.fsdp")) and s.value not in ("", [], False)), None)
    if asked is None or "fsdp" in facts.word("accelerate.distributed_type"):
        return None, None
    return 2, asked
