"""What runs of axolotl, LLaMA-Factory, torchtune, torchtitan and Lightning really do."""

from __future__ import annotations

from .model_settings import CHECKPOINT_DTYPE, adapter_from, lightning_precision, mixed_flag, model_dtype, quantised
from .record import Record
from .settings import dtype_of, truth
from .sharded import uses_deepspeed, uses_fsdp


def axolotl(record: Record) -> None:
    facts = record.facts
    bf16, fp16 = facts.get("axolotl.bf16"), facts.get("axolotl.fp16")
    device_has = record.device.bf16 if record.device else True
    bf16_on = (
        bf16 is None or truth(bf16.value) is True or (str(bf16.value) == "auto" and device_has) or facts.on("axolotl.bfloat16") is not None
    )
    if bf16 is None and (facts.on("axolotl.fp16") or (record.device and not record.device.bf16)):
        bf16_on = False
    if bf16 is not None and truth(bf16.value) is False:
        bf16_on = False
    fp16_on = not bf16_on and bool(facts.on("axolotl.fp16") or (bf16 is not None and str(bf16.value) == "auto"))
    half = "bf16" if bf16_on else "fp16" if fp16_on or facts.on("axolotl.float16") else "fp32"
    by = bf16 if bf16_on else fp16 or facts.on("axolotl.float16")
    adapter_from(record, "axolotl.adapter")
    if record.adapter is None:
        record.adapter = False
    quantised(record, "axolotl")
    loaded = "fp16" if record.quantised == 8 and not bf16_on else half
    record.set("parameters", loaded, "loaded in the half precision that is on", by)
    record.set(
        "trained",
        "fp32" if record.adapter else loaded,
        "adapters are fp32" if record.adapter else "every weight, as loaded",
        record.adapter_by or by,
    )
    record.set("compute", half, "autocast" if half != "fp32" else "no mixed precision", by)
    if half == "fp16" and facts.on("axolotl.fp16"):
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", facts.on("axolotl.fp16"))
    if uses_deepspeed(facts) and record.accumulates:
        record.set("optimizer", "fp32", "ZeRO keeps an fp32 master copy", uses_deepspeed(facts))


def llamafactory(record: Record) -> None:
    facts = record.facts
    kind = facts.word("llamafactory.finetuning_type") or "lora"
    record.adapter, record.adapter_by = kind in ("lora", "oft"), facts.get("llamafactory.finetuning_type")
    bits = facts.get("llamafactory.quantization_bit")
    if bits is not None:
        record.quantised, record.quantised_by = (8 if str(bits.value) == "8" else 4), bits
    pure, flag = facts.on("llamafactory.pure_bf16"), mixed_flag(facts, "llamafactory")
    half = "bf16" if pure else ("bf16" if facts.on("llamafactory.bf16") else "fp16") if flag else None
    stored = facts.get(*CHECKPOINT_DTYPE)
    by = pure or flag
    loaded = half or (dtype_of(stored.value) if stored else None)
    record.set("parameters", loaded, "compute dtype", by or stored)
    if record.adapter:
        record.set("trained", "fp32", "PEFT makes adapters fp32", record.adapter_by)
    else:
        record.set(
            "trained", "bf16" if pure else "fp32" if flag else loaded, "pure_bf16" if pure else "upcast to fp32 for training", pure or flag
        )
    record.set("compute", half or loaded, "autocast" if flag else "the weights' own dtype", by or stored)
    if facts.on("llamafactory.fp16"):
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", facts.on("llamafactory.fp16"))
    if uses_deepspeed(facts) and half:
        record.set("optimizer", "fp32", "ZeRO keeps an fp32 master copy", uses_deepspeed(facts))


def torchtune(record: Record) -> None:
    facts = record.facts
    dtype = facts.get("torchtune.dtype")
    word = dtype_of(dtype.value) if dtype else "fp32"
    component = facts.word("torchtune.model._component_", "torchtune.recipe")
    record.adapter = "lora" in component or "dora" in component
    record.adapter_by = facts.get("torchtune.model._component_", "torchtune.recipe")
    if "qlora" in component:
        record.quantised, record.quantised_by = 4, record.adapter_by
    for role in ("parameters", "trained", "compute"):
        record.set(role, word, "torchtune has one dtype", dtype)
    if "reduction" not in record.roles:
        record.set("reduction", word, "gradients are reduced in their dtype", dtype)


def torchtitan(record: Record) -> None:
    facts = record.facts
    parameter = facts.get("torchtitan.training.mixed_precision_param")
    reduce = facts.get("torchtitan.training.mixed_precision_reduce")
    dtype = facts.get("torchtitan.training.dtype")
    held = dtype_of(dtype.value) if dtype else "fp32"
    record.adapter = False
    record.set("parameters", held, "training.dtype", dtype)
    record.set("trained", held, "training.dtype", dtype)
    record.set("compute", dtype_of(parameter.value) if parameter else "bf16", "mixed_precision_param", parameter)
    record.set("reduction", dtype_of(reduce.value) if reduce else "fp32", "mixed_precision_reduce", reduce)


def lightning(record: Record) -> None:
    precision = lightning_precision(record.facts)
    word = str(precision.value) if precision else "32-true"
    full = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}.get(word, word)
    half = {"16-mixed": "fp16", "bf16-mixed": "bf16", "16-true": "fp16", "bf16-true": "bf16"}.get(full, "fp32")
    if full == "16-mixed" and record.device and record.device.kind == "cpu":
        half = "bf16"
    loaded, loaded_by = model_dtype(record.facts)
    record.adapter = True if record.facts.has("peft") else None
    if full.endswith("mixed") and loaded:  # a mixed mode casts no weight: the module keeps what it was loaded in
        record.set("parameters", loaded, "as loaded", loaded_by)
        record.set(
            "trained", "fp32" if record.adapter else loaded, "PEFT makes adapters fp32" if record.adapter else "as loaded", loaded_by
        )
    else:
        record.set("parameters", half if full.endswith("true") else "fp32", full, precision)
        record.set("trained", half if full.endswith("true") else "fp32", full, precision)
    record.set("compute", half, full, precision)
    if full == "16-mixed" and half == "fp16":
        record.set("loss scaling", "dynamic", "16-mixed makes a GradScaler", precision)
    if uses_fsdp(record.facts) and full.endswith("mixed"):
        record.set("reduction", half, "FSDPStrategy reduces in the mixed precision dtype", uses_fsdp(record.facts))
