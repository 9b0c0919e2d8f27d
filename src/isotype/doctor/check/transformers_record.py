"""What a run of the transformers Trainer, of TRL or of an own loop really does."""

from __future__ import annotations

from .model_settings import BNB, adapter_from, launcher_mode, mixed_flag, model_dtype, quantised
from .record import Record
from .settings import Facts, Setting, dtype_of, truth
from .sharded import deepspeed_setting, fsdp_version, uses_deepspeed, uses_fsdp

_KINDS = ("hf.train_type", "hf.tuner_type", "hf.sft_type", "hf.finetuning_type")  # ms-swift's words for it, old and new


def hf(record: Record) -> None:
    facts = record.facts
    dtype, dtype_by = model_dtype(facts)
    adapter_from(record, "model.adapter", "hf.adapter", "model.use_peft", "hf.use_peft", "hf.use_lora", "model.peft", *_KINDS)
    quantised(record, f"model.{BNB}", "model", "hf", f"hf.model_init_kwargs.{BNB}", f"checkpoint.{BNB}", f"hf.{BNB}")
    record.set("parameters", dtype, "as loaded", dtype_by)
    flag, launcher = mixed_flag(facts), launcher_mode(facts)
    attributes = document.attributes if (document := facts.tool("hf")) else {}
    made_by = attributes.get("made_by", "")
    undecided = {"bf16", "fp16"} & attributes.get("unknown", set())  # set by code that only runs on the machine
    compute, by, why = None, flag, "the trainer's flag: autocast"
    if flag is not None:
        compute = flag.key.lstrip("-").rpartition("_")[2] if flag.key.endswith(("bf16", "fp16")) else "bf16"
    elif launcher is not None and str(launcher.value).lower() in ("bf16", "fp16", "fp8"):
        compute, by, why = str(launcher.value).lower(), launcher, "the launcher's mode: autocast"
    elif made_by.endswith("Config") and not undecided and facts.given("hf.bf16") is None and not facts.on("hf.fp16"):
        compute, why = "bf16", f"{made_by}'s default"
    section = next((s for half in ("bf16", "fp16") if (s := deepspeed_setting(facts, f"{half}.enabled")) and truth(s.value) is True), None)
    if section is not None and compute is None:
        compute, by, why = ("bf16" if "bf16" in section.key else "fp16"), section, "the DeepSpeed section"
    if record.device is not None and record.device.kind == "cpu" and compute == "fp16":
        record.set("compute", "fp32", "fp16 has no effect on a CPU", by)
    elif compute:
        record.set("compute", compute, why, by)
    elif (region := _own_autocast(facts)) is not None:
        record.set("compute", dtype_of(region.value), "the loop's own autocast", region)
    elif not undecided:
        record.set("compute", dtype or "as weights", "no mixed precision: the weights' own dtype", dtype_by)
    if compute == "fp16" and not (record.device and record.device.kind == "cpu"):
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", by)
    elif not facts.has("hf") and (scaler := facts.on("code.GradScaler")) is not None:
        record.set("loss scaling", "dynamic", "the loop's own GradScaler", scaler)
    explicit = facts.get("hf.trainable_dtype", "model.trainable_dtype", "peft.trainable_dtype")
    if explicit is not None and dtype_of(explicit.value):
        record.set("trained", dtype_of(explicit.value), "as set", explicit)
    elif record.adapter or (record.quantised and record.adapter is None):
        kept = facts.off("peft.autocast_adapter_dtype", "hf.autocast_adapter_dtype")
        if kept and dtype:
            record.set("trained", dtype, "adapters keep the base's dtype", kept)
        elif record.quantised and made_by == "SFTConfig":
            record.set("trained", "bf16", "TRL casts adapters on a quantised base to bf16")
        else:
            record.set("trained", "fp32", "PEFT makes adapters fp32", record.adapter_by)
    else:
        record.set("trained", dtype, "every weight, as loaded", dtype_by)
    full_eval = facts.on("hf.bf16_full_eval", "hf.fp16_full_eval")
    if full_eval:
        record.set("evaluation", "bf16" if "bf16" in full_eval.key else "fp16", "the model itself is cast", full_eval)
    elif compute:
        record.set("evaluation", compute, "autocast", by)
    if section is not None or (uses_deepspeed(facts) and compute in ("bf16", "fp16")):
        record.set("parameters", compute, "DeepSpeed casts the module", by or section)
        record.set(
            "trained", compute if record.adapter is not True else record.value("trained"), "DeepSpeed casts the module", section or by
        )
        record.set("optimizer", "fp32", "ZeRO keeps an fp32 master copy", by or section)
        accumulated = deepspeed_setting(facts, "data_types.grad_accum_dtype")
        if accumulated is not None:
            record.set("accumulation", dtype_of(accumulated.value) or str(accumulated.value), "data_types.grad_accum_dtype", accumulated)
        elif compute == "bf16" and record.accumulates is not None:
            record.set("accumulation", "bf16", "DeepSpeed accumulates in the model's dtype", record.accumulates)
    elif uses_fsdp(facts) and compute in ("bf16", "fp16"):
        fsdp, (version, _) = uses_fsdp(facts), fsdp_version(facts)
        record.set("reduction", compute, "accelerate's FSDP policy reduces in the mixed precision dtype", fsdp)
        if explicit is None and record.value("trained") in ("bf16", "fp16") and not (version == 2 and record.quantised == 4):
            # accelerate 1.15 as installed (1.10 to 1.14 by its history, not run): prepare_model (FSDP1) and fsdp2_prepare_model, which
            # leaves models with 4-bit weights alone
            record.set("trained", "fp32", "accelerate makes trained weights fp32 under FSDP and mixed precision", fsdp)
    optimizer = facts.get("hf.optim")
    if optimizer is not None and "8bit" in str(optimizer.value):
        record.set("optimizer", "8 bit", "bitsandbytes", optimizer)


def _own_autocast(facts: Facts) -> Setting | None:
    """The dtype of `torch.autocast(...)` in a training loop without a trainer."""
    dtype = facts.get("code.autocast.dtype")
    return dtype if dtype is not None and not facts.has("hf") and dtype_of(dtype.value) else None
