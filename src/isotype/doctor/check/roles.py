"""Determines the dtypes of a training run from the settings of the tools that the run uses. A role
is a part of training that has its own dtype, such as the loaded weights, the trained weights or the
computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .settings import (
    CHECKPOINT_DTYPE_KEYS,
    QUANTIZATION_SECTION,
    Device,
    Facts,
    Record,
    Setting,
    deepspeed_setting,
    detect_adapter,
    detect_quantisation,
    find_deepspeed,
    find_device,
    find_fsdp,
    fsdp_version,
    launcher_mode,
    lightning_precision,
    mixed_flag,
    model_dtype,
    parse_boolean,
    parse_dtype,
)

# the names of ms-swift's setting, old and new
_SWIFT_METHOD_KEYS = ("hf.train_type", "hf.tuner_type", "hf.sft_type", "hf.finetuning_type")


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Contains the half-precision dtype in which a Trainer computes, the setting that decides this
    dtype, and the reason.

    compute            the dtype; None if no setting switches half precision on
    deepspeed_section  the bf16 or fp16 setting that DeepSpeed's configuration enables by itself
    """

    compute: str | None
    reason: str = ""
    setting: Setting | None = None
    deepspeed_section: Setting | None = None

    @property
    def is_half(self) -> bool:
        return self.compute in ("bf16", "fp16")


def set_hf_roles(record: Record) -> None:
    facts = record.facts
    if facts.get(*_SWIFT_METHOD_KEYS) is not None:
        _set_swift_roles(record)
        return
    dtype, dtype_setting = model_dtype(facts)
    detect_adapter(
        record,
        "model.adapter",
        "hf.adapter",
        "model.use_peft",
        "hf.use_peft",
        "hf.use_lora",
        "model.peft",
        *_SWIFT_METHOD_KEYS,
    )
    detect_quantisation(
        record,
        f"model.{QUANTIZATION_SECTION}",
        "model",
        "hf",
        f"hf.model_init_kwargs.{QUANTIZATION_SECTION}",
        f"checkpoint.{QUANTIZATION_SECTION}",
        f"hf.{QUANTIZATION_SECTION}",
    )
    mixed = _resolve_hf_mixed_precision(facts)
    trained_dtype = facts.get("hf.trainable_dtype", "model.trainable_dtype", "peft.trainable_dtype")
    record.set("parameters", dtype, "as loaded", dtype_setting)
    _set_hf_compute(record, mixed, dtype, dtype_setting)
    _set_hf_loss_scaling(record, mixed)
    _set_hf_trained(record, trained_dtype, dtype, dtype_setting)
    _set_hf_evaluation(record, mixed)
    uses_deepspeed = find_deepspeed(facts) is not None and mixed.is_half
    if mixed.deepspeed_section is not None or uses_deepspeed:
        _set_hf_deepspeed_roles(record, mixed)
    elif mixed.is_half and (fsdp := find_fsdp(facts)) is not None:
        _set_hf_fsdp_roles(record, mixed, fsdp, is_trained_dtype_set=trained_dtype is not None)
    optimizer = facts.get("hf.optim")
    if optimizer is not None and "8bit" in str(optimizer.value):
        record.set("optimizer", "8 bit", "bitsandbytes", optimizer)


def _set_swift_roles(record: Record) -> None:
    """Sets the dtypes that a file of ms-swift gives. This function does not know the rules by which
    ms-swift decides mixed precision.
    """
    facts = record.facts
    record.tool = "ms-swift"
    dtype, dtype_setting = model_dtype(facts)
    detect_adapter(record, "hf.use_lora", *_SWIFT_METHOD_KEYS)
    record.set("parameters", dtype, "as loaded", dtype_setting)
    flag = mixed_flag(facts)
    if flag is not None:
        half = _half_of_key(flag)
        record.set("compute", half, "the trainer's flag: autocast", flag)
        if half == "fp16":
            record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", flag)


def _resolve_hf_mixed_precision(facts: Facts) -> MixedPrecision:
    """Finds the setting that decides the mixed precision. In order of priority, this is the
    trainer's flag, the launcher's mode, the default of TRL's configs, or DeepSpeed's section.
    """
    section = _enabled_deepspeed_section(facts)
    flag = mixed_flag(facts)
    if flag is not None:
        compute = "bf16"
        if flag.key.endswith(("bf16", "fp16")):
            compute = flag.key.lstrip("-").rpartition("_")[2]
        return MixedPrecision(compute, "the trainer's flag: autocast", flag, section)
    launcher = launcher_mode(facts)
    mode = str(launcher.value).lower() if launcher is not None else ""
    if mode in ("bf16", "fp16", "fp8"):
        return MixedPrecision(mode, "the launcher's mode: autocast", launcher, section)
    made_by = _hf_arguments_class(facts)
    is_off = facts.get_written("hf.bf16") is not None or facts.first_enabled("hf.fp16") is not None
    if made_by.endswith("Config") and not is_off and not _is_hf_precision_unknown(facts):
        return MixedPrecision("bf16", f"{made_by}'s default", None, section)
    if section is not None:
        return MixedPrecision(_half_of_key(section), "the DeepSpeed section", section, section)
    return MixedPrecision(None)


def _enabled_deepspeed_section(facts: Facts) -> Setting | None:
    for half in ("bf16", "fp16"):
        setting = deepspeed_setting(facts, f"{half}.enabled")
        if setting is not None and parse_boolean(setting.value) is True:
            return setting
    return None


def _hf_arguments_class(facts: Facts) -> str:
    """Returns the class of the trainer's arguments (`TrainingArguments`, `SFTConfig`, ...), or ""
    if the arguments come from a file.
    """
    document = facts.first_document("hf")
    if document is None:
        return ""
    return str(document.attributes.get("made_by", ""))


def _has_model_only(facts: Facts) -> bool:
    """True if no file gives settings of a trainer or a loop. Its mixed precision is then unknown."""
    tools = {document.tool for document in facts.documents}
    return tools <= {"model", "peft", "checkpoint", "env"}


def _is_hf_precision_unknown(facts: Facts) -> bool:
    """True if the program computes the values of its settings `bf16` or `fp16`. Their values are
    then unknown.
    """
    document = facts.first_document("hf")
    if document is None:
        return False
    return bool({"bf16", "fp16"} & document.attributes.get("unknown", set()))


def _half_of_key(setting: Setting) -> str:
    return "bf16" if "bf16" in setting.key else "fp16"


def _is_on_cpu(record: Record) -> bool:
    return record.device is not None and record.device.kind == "cpu"


def _set_hf_compute(
    record: Record, mixed: MixedPrecision, dtype: str | None, dtype_setting: Setting | None
) -> None:
    if mixed.compute == "fp16" and _is_on_cpu(record):
        record.set("compute", "fp32", "fp16 has no effect on a CPU", mixed.setting)
    elif mixed.compute:
        record.set("compute", mixed.compute, mixed.reason, mixed.setting)
    elif (region := _loop_autocast(record.facts)) is not None:
        record.set("compute", parse_dtype(region.value), "the loop's own autocast", region)
    elif dtype is None and _has_model_only(record.facts):
        return
    elif not _is_hf_precision_unknown(record.facts):
        record.set(
            "compute",
            dtype or "as weights",
            "no mixed precision: the weights' own dtype",
            dtype_setting,
        )


def _set_hf_loss_scaling(record: Record, mixed: MixedPrecision) -> None:
    facts = record.facts
    if mixed.compute == "fp16" and not _is_on_cpu(record):
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", mixed.setting)
        return
    scaler = facts.first_enabled("code.GradScaler")
    if scaler is not None and not facts.has("hf"):
        record.set("loss scaling", "dynamic", "the loop's own GradScaler", scaler)


def _set_hf_trained(
    record: Record,
    trained_dtype: Setting | None,
    dtype: str | None,
    dtype_setting: Setting | None,
) -> None:
    """Sets the dtype of the trained weights. These are the weights of the adapters, or all weights
    of the model.
    """
    if trained_dtype is not None and parse_dtype(trained_dtype.value):
        record.set("trained", parse_dtype(trained_dtype.value), "as set", trained_dtype)
        return
    trains_adapters = record.adapter or (record.quantised_bits and record.adapter is None)
    if not trains_adapters:
        record.set("trained", dtype, "every weight, as loaded", dtype_setting)
        return
    disabled_cast = record.facts.first_disabled(
        "peft.autocast_adapter_dtype", "hf.autocast_adapter_dtype"
    )
    if disabled_cast and dtype:
        record.set("trained", dtype, "adapters keep the base's dtype", disabled_cast)
    elif record.quantised_bits and _hf_arguments_class(record.facts) == "SFTConfig":
        record.set("trained", "bf16", "TRL casts adapters on a quantised base to bf16")
    else:
        record.set("trained", "fp32", "PEFT makes adapters fp32", record.adapter_setting)


def _set_hf_evaluation(record: Record, mixed: MixedPrecision) -> None:
    full_eval = record.facts.first_enabled("hf.bf16_full_eval", "hf.fp16_full_eval")
    if full_eval:
        record.set("evaluation", _half_of_key(full_eval), "the model itself is cast", full_eval)
    elif mixed.compute:
        record.set("evaluation", mixed.compute, "autocast", mixed.setting)


def _set_hf_deepspeed_roles(record: Record, mixed: MixedPrecision) -> None:
    section = mixed.deepspeed_section
    compute = mixed.compute
    record.set("parameters", compute, "DeepSpeed casts the module", mixed.setting or section)
    trained = record.value("trained") if record.adapter else compute
    record.set("trained", trained, "DeepSpeed casts the module", section or mixed.setting)
    record.set("optimizer", "fp32", "ZeRO keeps an fp32 master copy", mixed.setting or section)
    accumulated = deepspeed_setting(record.facts, "data_types.grad_accum_dtype")
    if accumulated is not None:
        record.set(
            "accumulation",
            parse_dtype(accumulated.value) or str(accumulated.value),
            "data_types.grad_accum_dtype",
            accumulated,
        )
    elif compute == "bf16" and record.accumulation_setting is not None:
        record.set(
            "accumulation",
            "bf16",
            "DeepSpeed accumulates in the model's dtype",
            record.accumulation_setting,
        )


def _set_hf_fsdp_roles(
    record: Record, mixed: MixedPrecision, fsdp: Setting, *, is_trained_dtype_set: bool
) -> None:
    record.set(
        "reduction",
        mixed.compute,
        "accelerate's FSDP policy reduces in the mixed precision dtype",
        fsdp,
    )
    version, _ = fsdp_version(record.facts)
    keeps_4bit_model = version == 2 and record.quantised_bits == 4
    is_half_trained = record.value("trained") in ("bf16", "fp16")
    if is_half_trained and not is_trained_dtype_set and not keeps_4bit_model:
        # accelerate does this in prepare_model (FSDP1) and in fsdp2_prepare_model, which skips
        # models with 4-bit weights. This was run with 1.15; for 1.10 to 1.14 only the source was
        # read.
        record.set(
            "trained",
            "fp32",
            "accelerate makes trained weights fp32 under FSDP and mixed precision",
            fsdp,
        )


def _loop_autocast(facts: Facts) -> Setting | None:
    """Returns the dtype argument of `torch.autocast(...)` in a training loop that uses no trainer."""
    dtype = facts.get("code.autocast.dtype")
    if dtype is not None and not facts.has("hf") and parse_dtype(dtype.value):
        return dtype
    return None


def _axolotl_bf16_mode(bf16: Setting | None) -> str:
    """Returns the mode of axolotl's bf16 setting, which is `unset`, `True`, `False`, or the value
    as text (`auto`, `full`).
    """
    if bf16 is None:
        return "unset"
    enabled = parse_boolean(bf16.value)
    return str(bf16.value if enabled is None else enabled)


def _autocast_reason(half: str) -> str:
    return "no mixed precision" if half == "fp32" else "autocast"


def set_axolotl_roles(record: Record) -> None:
    facts = record.facts
    bf16 = facts.get("axolotl.bf16")
    fp16 = facts.first_enabled("axolotl.fp16")
    mode = _axolotl_bf16_mode(bf16)
    has_bf16 = record.device is None or record.device.bf16
    is_bf16_on = {
        "unset": has_bf16 and not fp16,
        "True": True,
        "False": False,
        "auto": has_bf16,
    }.get(mode, False)
    if mode not in ("unset", "False") and facts.first_enabled("axolotl.bfloat16") is not None:
        is_bf16_on = True
    setting = facts.get("axolotl.fp16") or facts.first_enabled("axolotl.float16")
    if is_bf16_on:
        half = "bf16"
        setting = bf16
    elif fp16 or mode == "auto" or facts.first_enabled("axolotl.float16"):
        half = "fp16"
    else:
        half = "fp32"
    detect_adapter(record, "axolotl.adapter")
    record.adapter = bool(record.adapter)
    detect_quantisation(record, "axolotl")
    loaded = half
    if record.quantised_bits == 8 and not is_bf16_on:
        loaded = "fp16"
    record.set("parameters", loaded, "loaded in the half precision that is on", setting)
    if record.adapter:
        record.set("trained", "fp32", "adapters are fp32", record.adapter_setting or setting)
    else:
        record.set("trained", loaded, "every weight, as loaded", record.adapter_setting or setting)
    record.set("compute", half, _autocast_reason(half), setting)
    if half == "fp16" and fp16:
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", fp16)
    if find_deepspeed(facts) and record.accumulation_setting:
        record.set("optimizer", "fp32", "ZeRO keeps an fp32 master copy", find_deepspeed(facts))
    elif half != "fp32" and (fsdp := find_fsdp(facts)) is not None:
        mixed = MixedPrecision(half)
        _set_hf_fsdp_roles(record, mixed, fsdp, is_trained_dtype_set=False)


def set_llamafactory_roles(record: Record) -> None:
    facts = record.facts
    kind = facts.lower_text("llamafactory.finetuning_type") or "lora"
    record.adapter = kind in ("lora", "oft")
    record.adapter_setting = facts.get("llamafactory.finetuning_type")
    bits = facts.get("llamafactory.quantization_bit")
    if bits is not None:
        record.quantised_bits = 8 if str(bits.value) == "8" else 4
        record.quantisation_setting = bits
    pure = facts.first_enabled("llamafactory.pure_bf16")
    flag = mixed_flag(facts, "llamafactory")
    if pure:
        half = "bf16"
    elif flag:
        half = "bf16" if facts.first_enabled("llamafactory.bf16") else "fp16"
    else:
        half = None
    stored = facts.get(*CHECKPOINT_DTYPE_KEYS)
    setting = pure or flag
    loaded = half or _dtype_or(stored, None)
    record.set("parameters", loaded, "compute dtype", setting or stored)
    if record.adapter:
        record.set("trained", "fp32", "PEFT makes adapters fp32", record.adapter_setting)
    elif pure:
        record.set("trained", "bf16", "pure_bf16", pure)
    elif flag:
        record.set("trained", "fp32", "upcast to fp32 for training", flag)
    else:
        record.set("trained", loaded, "upcast to fp32 for training")
    reason = "autocast" if flag else "the weights' own dtype"
    record.set("compute", half or loaded, reason, setting or stored)
    if facts.first_enabled("llamafactory.fp16"):
        record.set(
            "loss scaling",
            "dynamic",
            "fp16 makes a GradScaler",
            facts.first_enabled("llamafactory.fp16"),
        )
    if find_deepspeed(facts) and half:
        record.set("optimizer", "fp32", "ZeRO keeps an fp32 master copy", find_deepspeed(facts))


def set_torchtune_roles(record: Record) -> None:
    facts = record.facts
    dtype = facts.get("torchtune.dtype")
    dtype_name = parse_dtype(dtype.value) if dtype else "fp32"
    component = facts.lower_text("torchtune.model._component_", "torchtune.recipe")
    record.adapter = "lora" in component or "dora" in component
    record.adapter_setting = facts.get("torchtune.model._component_", "torchtune.recipe")
    if "qlora" in component:
        record.quantised_bits = 4
        record.quantisation_setting = record.adapter_setting
    for role in ("parameters", "trained", "compute"):
        record.set(role, dtype_name, "torchtune has one dtype", dtype)
    record.set("reduction", dtype_name, "gradients are reduced in their dtype", dtype)


def set_torchtitan_roles(record: Record) -> None:
    facts = record.facts
    parameter = facts.get("torchtitan.training.mixed_precision_param")
    reduce = facts.get("torchtitan.training.mixed_precision_reduce")
    dtype = facts.get("torchtitan.training.dtype")
    record.adapter = False
    for role in ("parameters", "trained"):
        record.set(role, _dtype_or(dtype, None), "training.dtype", dtype)
    record.set("compute", _dtype_or(parameter, None), "mixed_precision_param", parameter)
    record.set("reduction", _dtype_or(reduce, None), "mixed_precision_reduce", reduce)


def set_aitoolkit_roles(record: Record) -> None:
    """Sets the dtypes from the first process of an ai-toolkit job."""
    facts = record.facts
    process = "aitoolkit.config.process.0"
    dtype = facts.get(f"{process}.train.dtype")
    detect_adapter(record, f"{process}.network.type")
    record.set("compute", _dtype_or(dtype, None), "train.dtype", dtype)
    if (quantised := facts.first_enabled(f"{process}.model.quantize")) is not None:
        record.set("storage", "quantised", "model.quantize", quantised)
    if (ema := facts.first_enabled(f"{process}.train.ema_config.use_ema")) is not None:
        record.set("ema", "on", "ema_config.use_ema", ema)


def _onetrainer_dtype(setting: Setting | None) -> str | None:
    """Returns the dtype that a word such as `BFLOAT_16`, `TFLOAT_32` or `NFLOAT_4` means, or None
    for `NONE`.
    """
    if setting is None:
        return None
    words = {"NFLOAT_4": "nf4", "INT_8": "int8", "TFLOAT_32": "fp32", "FLOAT_8": "fp8"}
    text = str(setting.value).upper()
    return words.get(text) or parse_dtype(text.replace("_", "").lower())


def set_onetrainer_roles(record: Record) -> None:
    """Sets the dtypes that are given in a configuration file of OneTrainer."""
    facts = record.facts
    train = facts.get("onetrainer.train_dtype")
    weights = facts.get("onetrainer.weight_dtype")
    method = facts.get("onetrainer.training_method")
    record.adapter = method is not None and str(method.value).upper() == "LORA"
    record.adapter_setting = method
    record.set("parameters", _onetrainer_dtype(weights), "weight_dtype", weights)
    record.set("compute", _onetrainer_dtype(train), "train_dtype", train)
    trained = facts.get("onetrainer.lora_weight_dtype") if record.adapter else None
    record.set("trained", _onetrainer_dtype(trained), "lora_weight_dtype", trained)


def _dtype_or(setting: Setting | None, default: str | None) -> str | None:
    """Returns the dtype that a setting names, or the default if the setting is missing."""
    if setting is None:
        return default
    return parse_dtype(setting.value)


def set_lightning_roles(record: Record) -> None:
    precision = lightning_precision(record.facts)
    precision_text = str(precision.value) if precision else "32-true"
    full = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}.get(
        precision_text, precision_text
    )
    half = {"16-mixed": "fp16", "bf16-mixed": "bf16", "16-true": "fp16", "bf16-true": "bf16"}.get(
        full, "fp32"
    )
    if full == "16-mixed" and record.device and record.device.kind == "cpu":
        half = "bf16"
    loaded, loaded_by = model_dtype(record.facts)
    record.adapter = True if record.facts.has("peft") else None
    # a mixed mode casts no weights: the module keeps the dtype in which it was loaded
    if full.endswith("mixed") and loaded:
        record.set("parameters", loaded, "as loaded", loaded_by)
        record.set("trained", loaded, "as loaded", loaded_by)
        if record.adapter:
            record.set("trained", "fp32", "PEFT makes adapters fp32", loaded_by)
    else:
        stored = half if full.endswith("true") else "fp32"
        record.set("parameters", stored, full, precision)
        record.set("trained", stored, full, precision)
    record.set("compute", half, full, precision)
    if full == "16-mixed" and half == "fp16":
        record.set("loss scaling", "dynamic", "16-mixed makes a GradScaler", precision)
    if find_fsdp(record.facts) and full.endswith("mixed"):
        record.set(
            "reduction",
            half,
            "FSDPStrategy reduces in the mixed precision dtype",
            find_fsdp(record.facts),
        )


def set_simpletuner_roles(record: Record) -> None:
    facts = record.facts
    keys = (
        "mixed_precision",
        "optimizer",
        "base_model_precision",
        "base_model_default_dtype",
        "model_type",
        "gradient_precision",
    )
    mixed, optimizer, base, default, kind, gradient = (
        facts.get(f"simpletuner.{key}") for key in keys
    )
    mode = str(mixed.value) if mixed else "bf16"
    if base is not None and str(base.value) in ("no_change", ""):
        base = None
    is_default_fp32 = default is not None and str(default.value) == "fp32"
    record.adapter = "lora" in str(kind.value).lower() if kind else None
    record.adapter_setting = kind
    weights = {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp8": "bf16"}.get(mode)
    setting = mixed
    reason = "mixed_precision decides the weight dtype"
    if base and mode in ("no", "fp16"):
        weights = "fp32" if is_default_fp32 else "bf16"
        setting = default or base
        reason = "base_model_default_dtype decides for a quantised base"
    record.set("parameters", weights, reason, setting)
    if (optimizer is None or str(optimizer.value).lower() == "adamw_bf16") and not (
        base and is_default_fp32
    ):
        record.set("trained", "bf16", "adamw_bf16 makes the trained weights bf16", optimizer)
        record.set("optimizer", "bf16", "adamw_bf16 with stochastic rounding", optimizer)
    else:
        record.set("trained", weights, "trained weights get the weight dtype", setting)
    trained = record.value("trained")
    if mode in ("bf16", "fp16", "fp8"):
        record.set("compute", mode, "mixed_precision: autocast", mixed)
    elif mode == "no":
        compute = "fp32" if trained == "fp32" else "bf16"
        record.set("compute", compute, "mixed_precision no: no autocast", mixed)
    if mode == "fp16":
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", mixed)
    if gradient is not None:
        record.set(
            "gradients",
            trained,
            f"gradient_precision={gradient.value} is not applied by current SimpleTuner",
            gradient,
        )
    if base:
        if any(w in str(base.value) for w in ("int4", "nf4", "fp4", "uint4", "int2")):
            record.quantised_bits = 4
        else:
            record.quantised_bits = 8
        record.quantisation_setting = base
        record.set("storage", str(base.value), "base_model_precision", base)
    if ema := facts.first_enabled("simpletuner.use_ema"):
        record.set("ema", trained or "bf16", "the shadow is a clone of the trained weights", ema)


def set_kohya_roles(record: Record) -> None:
    facts = record.facts
    mixed = facts.get("kohya.mixed_precision")
    mode = str(mixed.value).lower() if mixed else "no"
    network = facts.get("kohya.network_module")
    if network:
        record.adapter = True
        record.adapter_setting = network
    full = facts.first_enabled("kohya.full_bf16", "kohya.full_fp16")
    half = mode if mode in ("bf16", "fp16") else "fp32"
    record.set("parameters", half, "mixed_precision", mixed)
    if full:
        record.set("trained", _half_of_key(full), "full_* casts what is trained", full)
    else:
        record.set("trained", "fp32", "fp32 masters")
    record.set("compute", half, _autocast_reason(half), mixed)
    if mode == "fp16" and not full:
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", mixed)


def set_script_roles(record: Record) -> None:
    """Sets the dtypes of a run from the arguments of a training script. The script must use the
    same arguments as the example scripts of diffusers or accelerate.
    """
    mixed = record.facts.get("script.mixed_precision")
    record.set("compute", _dtype_or(mixed, None), "the script's argument", mixed)


# tools of which only the settings themselves are shown, since their code was not read
_TOOLS_AS_READ = ("aitoolkit", "onetrainer", "ms-swift")


def resolve_record(facts: Facts) -> Record:
    tool = next(
        (document.tool for document in facts.documents if document.tool in _ROLE_SETTERS), "hf"
    )
    record = Record(tool, facts)
    record.device = _find_target_device(facts)
    _ROLE_SETTERS[tool](record)
    if record.tool not in _TOOLS_AS_READ:
        _set_derived_roles(record)
    return record


def _find_target_device(facts: Facts) -> Device | None:
    if facts.device:
        return find_device(facts.device)
    cpu_flag = facts.first_enabled(
        "hf.use_cpu", "hf.no_cuda", "accelerate.use_cpu", "accelerate.cpu"
    )
    if cpu_flag or "cpu" in (
        facts.lower_text("lightning.accelerator", "lightning.trainer.accelerator"),
        facts.lower_text("torchtune.device"),
    ):
        return find_device("cpu")
    gpu_name = facts.get("env.GPU_NAME", "env.GPU")
    return find_device(str(gpu_name.value)) if gpu_name else None


def _set_derived_roles(record: Record) -> None:
    """Sets values that follow from other values. For example, the dtype of the gradients follows
    from the dtype of the trained weights. The same rules apply to all tools.
    """
    trained = record.value("trained")
    if trained:
        setting = record.deciding_setting("gradients") or record.deciding_setting("trained")
        record.set(
            "gradients",
            record.value("gradients") or trained,
            "a gradient has its weight's dtype",
            setting,
        )
        if "optimizer" not in record.roles:
            record.set(
                "optimizer",
                trained,
                "torch optimizers keep their states in the weight's dtype",
                record.deciding_setting("trained"),
            )
    if (
        "accumulation" not in record.roles
        and record.accumulation_setting is not None
        and record.value("gradients")
    ):
        record.set(
            "accumulation",
            record.value("gradients"),
            "accumulates into .grad",
            record.accumulation_setting,
        )
    if record.quantised_bits and "storage" not in record.roles:
        kind = record.facts.lower_text(
            f"model.{QUANTIZATION_SECTION}.bnb_4bit_quant_type",
            f"checkpoint.{QUANTIZATION_SECTION}.bnb_4bit_quant_type",
        )
        if not kind:
            kind = "fp4 or nf4" if record.quantised_bits == 4 else "int8"
        record.set(
            "storage", kind, f"{record.quantised_bits}-bit base", record.quantisation_setting
        )
    if (
        record.value("compute") in ("bf16", "fp16")
        and "norms" not in record.roles
        and record.value("trained") == "fp32"
        and record.trains_every_weight
    ):
        record.set("norms", "fp32", "autocast runs norms in fp32")


# tool -> the function that fills in the roles of its runs
_ROLE_SETTERS: dict[str, Callable[[Record], None]] = {
    "simpletuner": set_simpletuner_roles,
    "axolotl": set_axolotl_roles,
    "llamafactory": set_llamafactory_roles,
    "torchtune": set_torchtune_roles,
    "torchtitan": set_torchtitan_roles,
    "aitoolkit": set_aitoolkit_roles,
    "onetrainer": set_onetrainer_roles,
    "lightning": set_lightning_roles,
    "kohya": set_kohya_roles,
    "hf": set_hf_roles,
    "script": set_script_roles,
}
