"""The tools: which one a tree of settings belongs to, told by its keys, and from a run's settings
to its record: what a run of each tool really does, and what all tools share. A tool's distinctive
keys weigh three, its ordinary ones one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def _load_tool_keys() -> dict[str, tuple[str, str]]:
    """tool -> (distinctive keys, ordinary keys), from `tools.txt`."""
    table = {}
    for section in re.split(
        r"\n(?=\w)", Path(__file__).with_name("tools.txt").read_text(encoding="utf-8")
    )[1:]:
        tool, *tokens = section.split()
        ordinary = tokens.index("ordinary:") if "ordinary:" in tokens else len(tokens)
        table[tool] = (" ".join(tokens[1:ordinary]), " ".join(tokens[ordinary + 1 :]))
    return table


TOOL_KEYS = _load_tool_keys()
_ISOTYPE_SECTIONS = {"model", "data", "adapter", "precision", "train", "run"}
_TIE_ORDER = (
    "model",
    "checkpoint",
    "peft",
    "fsdp",
    "deepspeed",
    "accelerate",
    "kohya",
    "llamafactory",
    "axolotl",
    "hf",
    "simpletuner",
)


def identify_tool(data: Any, name: str = "") -> str | None:
    """The tool's namespace, or None when the keys say nothing of training. The file's name decides
    between tools that fit alike.
    """
    if not isinstance(data, dict) or not data:
        return None
    keys = {str(k).removeprefix("--") for k in data}
    if (
        keys <= _ISOTYPE_SECTIONS
        and all(isinstance(v, dict) or v is None for v in data.values())
        and not _is_torchtitan(data)
    ):
        return "isotype"
    if all(str(k).isupper() for k in data) and not any(isinstance(v, dict) for v in data.values()):
        return "env"
    keys |= {f"{k}.{inner}" for k, v in data.items() if isinstance(v, dict) for inner in v}
    if _mentions_component(data):
        return "torchtune"
    scores = {
        tool: 3 * len(keys & set(strong.split())) + len(keys & set(weak.split()))
        for tool, (strong, weak) in TOOL_KEYS.items()
    }
    if sum(str(k).startswith("--") for k in data) * 2 > len(data):
        scores["simpletuner"] += 6
    if "accelerate" in name.lower() or name.lower() == "default_config.yaml":
        scores["accelerate"] += 2
    if "deepspeed" in name.lower() or name.lower().startswith(("ds_", "zero")):
        scores["deepspeed"] += 2
    if keys & {"base_model"} == set() and scores["axolotl"] < 6:
        scores["axolotl"] = 0
    if not keys & {"checkpointer", "tokenizer.path"}:
        scores["torchtune"] = 0  # without a component of its own, words that everybody uses
    if not keys & {
        "finetuning_type",
        "pure_bf16",
        "quantization_bit",
        "upcast_layernorm",
        "template",
        "stage",
    }:
        scores["llamafactory"] = 0
    if keys & {"finetuning_type", "pure_bf16"}:
        scores["llamafactory"] += 10
    best = max(scores.values())
    if best == 0 or (best == 1 and keys & {"mixed_precision"} == set()):
        if keys & {"dtype", "torch_dtype", "model_name_or_path"}:
            return "model"
        return None
    if (
        best in (scores["model"], scores["peft"])
        and keys & {"bf16", "fp16"}
        and "output_dir" in keys
    ):
        # a trainer's arguments and its model's in one flat file, as TRL's scripts take them
        return "hf"
    tied = [tool for tool, score in scores.items() if score == best]
    if best > 1:
        return next((tool for tool in _TIE_ORDER if tool in tied), tied[0])
    return "accelerate"


def _is_torchtitan(data: dict[str, Any]) -> bool:
    training = data.get("training") or {}
    return "job" in data or any(str(k).startswith("mixed_precision") for k in training)


def _mentions_component(node: Any) -> bool:
    if isinstance(node, dict):
        return any(
            str(v).startswith("torchtune.") for k, v in node.items() if k == "_component_"
        ) or any(_mentions_component(v) for v in node.values())
    return False


# ms-swift's words for it, old and new
_SWIFT_METHOD_KEYS = ("hf.train_type", "hf.tuner_type", "hf.sft_type", "hf.finetuning_type")


def set_hf_roles(record: Record) -> None:
    facts = record.facts
    dtype, dtype_by = model_dtype(facts)
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
    record.set("parameters", dtype, "as loaded", dtype_by)
    flag = mixed_flag(facts)
    launcher = launcher_mode(facts)
    attributes = document.attributes if (document := facts.first_document("hf")) else {}
    made_by = attributes.get("made_by", "")
    # set by code that only runs on the machine
    undecided = {"bf16", "fp16"} & attributes.get("unknown", set())
    compute = None
    setting = flag
    reason = "the trainer's flag: autocast"
    if flag is not None:
        if flag.key.endswith(("bf16", "fp16")):
            compute = flag.key.lstrip("-").rpartition("_")[2]
        else:
            compute = "bf16"
    elif launcher is not None and str(launcher.value).lower() in ("bf16", "fp16", "fp8"):
        compute = str(launcher.value).lower()
        setting = launcher
        reason = "the launcher's mode: autocast"
    elif (
        made_by.endswith("Config")
        and not undecided
        and facts.get_written("hf.bf16") is None
        and not facts.first_enabled("hf.fp16")
    ):
        compute = "bf16"
        reason = f"{made_by}'s default"
    section = next(
        (
            s
            for half in ("bf16", "fp16")
            if (s := deepspeed_setting(facts, f"{half}.enabled")) and parse_boolean(s.value) is True
        ),
        None,
    )
    if section is not None and compute is None:
        compute = "bf16" if "bf16" in section.key else "fp16"
        setting = section
        reason = "the DeepSpeed section"
    if record.device is not None and record.device.kind == "cpu" and compute == "fp16":
        record.set("compute", "fp32", "fp16 has no effect on a CPU", setting)
    elif compute:
        record.set("compute", compute, reason, setting)
    elif (region := _loop_autocast(facts)) is not None:
        record.set("compute", parse_dtype(region.value), "the loop's own autocast", region)
    elif not undecided:
        record.set(
            "compute", dtype or "as weights", "no mixed precision: the weights' own dtype", dtype_by
        )
    if compute == "fp16" and not (record.device and record.device.kind == "cpu"):
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", setting)
    elif not facts.has("hf") and (scaler := facts.first_enabled("code.GradScaler")) is not None:
        record.set("loss scaling", "dynamic", "the loop's own GradScaler", scaler)
    explicit = facts.get("hf.trainable_dtype", "model.trainable_dtype", "peft.trainable_dtype")
    if explicit is not None and parse_dtype(explicit.value):
        record.set("trained", parse_dtype(explicit.value), "as set", explicit)
    elif record.adapter or (record.quantised_bits and record.adapter is None):
        disabled_cast = facts.first_disabled(
            "peft.autocast_adapter_dtype", "hf.autocast_adapter_dtype"
        )
        if disabled_cast and dtype:
            record.set("trained", dtype, "adapters keep the base's dtype", disabled_cast)
        elif record.quantised_bits and made_by == "SFTConfig":
            record.set("trained", "bf16", "TRL casts adapters on a quantised base to bf16")
        else:
            record.set("trained", "fp32", "PEFT makes adapters fp32", record.adapter_setting)
    else:
        record.set("trained", dtype, "every weight, as loaded", dtype_by)
    full_eval = facts.first_enabled("hf.bf16_full_eval", "hf.fp16_full_eval")
    if full_eval:
        record.set(
            "evaluation",
            "bf16" if "bf16" in full_eval.key else "fp16",
            "the model itself is cast",
            full_eval,
        )
    elif compute:
        record.set("evaluation", compute, "autocast", setting)
    if section is not None or (find_deepspeed(facts) and compute in ("bf16", "fp16")):
        record.set("parameters", compute, "DeepSpeed casts the module", setting or section)
        record.set(
            "trained",
            record.value("trained") if record.adapter else compute,
            "DeepSpeed casts the module",
            section or setting,
        )
        record.set("optimizer", "fp32", "ZeRO keeps an fp32 master copy", setting or section)
        accumulated = deepspeed_setting(facts, "data_types.grad_accum_dtype")
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
    elif find_fsdp(facts) and compute in ("bf16", "fp16"):
        fsdp, (version, _) = find_fsdp(facts), fsdp_version(facts)
        record.set(
            "reduction",
            compute,
            "accelerate's FSDP policy reduces in the mixed precision dtype",
            fsdp,
        )
        if (
            explicit is None
            and record.value("trained") in ("bf16", "fp16")
            and not (version == 2 and record.quantised_bits == 4)
        ):
            # accelerate 1.15 as installed (1.10 to 1.14 by its history, not run): prepare_model
            # (FSDP1) and fsdp2_prepare_model, which leaves models with 4-bit weights alone
            record.set(
                "trained",
                "fp32",
                "accelerate makes trained weights fp32 under FSDP and mixed precision",
                fsdp,
            )
    optimizer = facts.get("hf.optim")
    if optimizer is not None and "8bit" in str(optimizer.value):
        record.set("optimizer", "8 bit", "bitsandbytes", optimizer)


def _loop_autocast(facts: Facts) -> Setting | None:
    """The dtype of `torch.autocast(...)` in a training loop without a trainer."""
    dtype = facts.get("code.autocast.dtype")
    if dtype is not None and not facts.has("hf") and parse_dtype(dtype.value):
        return dtype
    return None


def set_axolotl_roles(record: Record) -> None:
    facts = record.facts
    bf16 = facts.get("axolotl.bf16")
    fp16 = facts.first_enabled("axolotl.fp16")
    if bf16 is None:
        bf16_text = "unset"
    else:
        bf16_text = str(
            parse_boolean(bf16.value) if parse_boolean(bf16.value) is not None else bf16.value
        )
    device_has = record.device.bf16 if record.device else True
    bf16_on = {
        "unset": device_has and not fp16,
        "True": True,
        "False": False,
        "auto": device_has,
    }.get(bf16_text, False)
    bf16_on = bf16_on or (
        bf16_text not in ("unset", "False") and facts.first_enabled("axolotl.bfloat16") is not None
    )
    if bf16_on:
        half = "bf16"
    elif fp16 or bf16_text == "auto" or facts.first_enabled("axolotl.float16"):
        half = "fp16"
    else:
        half = "fp32"
    setting = (
        bf16 if bf16_on else facts.get("axolotl.fp16") or facts.first_enabled("axolotl.float16")
    )
    detect_adapter(record, "axolotl.adapter")
    record.adapter = bool(record.adapter)
    detect_quantisation(record, "axolotl")
    loaded = "fp16" if record.quantised_bits == 8 and not bf16_on else half
    record.set("parameters", loaded, "loaded in the half precision that is on", setting)
    if record.adapter:
        record.set("trained", "fp32", "adapters are fp32", record.adapter_setting or setting)
    else:
        record.set("trained", loaded, "every weight, as loaded", record.adapter_setting or setting)
    record.set("compute", half, "autocast" if half != "fp32" else "no mixed precision", setting)
    if half == "fp16" and fp16:
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", fp16)
    if find_deepspeed(facts) and record.accumulation_setting:
        record.set("optimizer", "fp32", "ZeRO keeps an fp32 master copy", find_deepspeed(facts))


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
    loaded = half or (parse_dtype(stored.value) if stored else None)
    record.set("parameters", loaded, "compute dtype", setting or stored)
    if record.adapter:
        record.set("trained", "fp32", "PEFT makes adapters fp32", record.adapter_setting)
    elif pure:
        record.set("trained", "bf16", "pure_bf16", pure)
    else:
        record.set("trained", "fp32" if flag else loaded, "upcast to fp32 for training", flag)
    record.set(
        "compute",
        half or loaded,
        "autocast" if flag else "the weights' own dtype",
        setting or stored,
    )
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
        record.set(role, parse_dtype(dtype.value) if dtype else "fp32", "training.dtype", dtype)
    record.set(
        "compute",
        parse_dtype(parameter.value) if parameter else "bf16",
        "mixed_precision_param",
        parameter,
    )
    record.set(
        "reduction",
        parse_dtype(reduce.value) if reduce else "fp32",
        "mixed_precision_reduce",
        reduce,
    )


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
    # a mixed mode casts no weight: the module keeps what it was loaded in
    if full.endswith("mixed") and loaded:
        record.set("parameters", loaded, "as loaded", loaded_by)
        record.set("trained", loaded, "as loaded", loaded_by)
        if record.adapter:
            record.set("trained", "fp32", "PEFT makes adapters fp32", loaded_by)
    else:
        for role in ("parameters", "trained"):
            record.set(role, half if full.endswith("true") else "fp32", full, precision)
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
    wide = default is not None and str(default.value) == "fp32"
    record.adapter = "lora" in str(kind.value).lower() if kind else None
    record.adapter_setting = kind
    weights = {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp8": "bf16"}.get(mode)
    setting = mixed
    reason = "mixed_precision decides the weight dtype"
    if base and mode in ("no", "fp16"):
        weights = "fp32" if wide else "bf16"
        setting = default or base
        reason = "base_model_default_dtype decides for a quantised base"
    record.set("parameters", weights, reason, setting)
    if (optimizer is None or str(optimizer.value).lower() == "adamw_bf16") and not (base and wide):
        record.set("trained", "bf16", "adamw_bf16 makes the trained weights bf16", optimizer)
        record.set("optimizer", "bf16", "adamw_bf16 with stochastic rounding", optimizer)
    else:
        record.set("trained", weights, "trained weights get the weight dtype", setting)
    trained = record.value("trained")
    if mode in ("bf16", "fp16", "fp8"):
        record.set("compute", mode, "mixed_precision: autocast", mixed)
    elif mode == "no":
        record.set(
            "compute",
            "fp32" if trained == "fp32" else "bf16",
            "mixed_precision no: no autocast",
            mixed,
        )
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
    record.adapter, record.adapter_setting = (True, network) if network else (None, None)
    full = facts.first_enabled("kohya.full_bf16", "kohya.full_fp16")
    half = mode if mode in ("bf16", "fp16") else "fp32"
    record.set("parameters", half, "mixed_precision", mixed)
    if full:
        record.set(
            "trained",
            "bf16" if "bf16" in full.key else "fp16",
            "full_* casts what is trained",
            full,
        )
    else:
        record.set("trained", "fp32", "fp32 masters")
    record.set("compute", half, "autocast" if half != "fp32" else "no mixed precision", mixed)
    if mode == "fp16" and not full:
        record.set("loss scaling", "dynamic", "fp16 makes a GradScaler", mixed)


def set_script_roles(record: Record) -> None:
    """A training script with diffusers' or accelerate's arguments."""
    mixed = record.facts.get("script.mixed_precision")
    record.set(
        "compute", parse_dtype(mixed.value) if mixed else None, "the script's argument", mixed
    )


def resolve_record(facts: Facts) -> Record:
    tool = next((d.tool for d in facts.documents if d.tool in _ROLE_SETTERS), "hf")
    record = Record(tool, facts)
    record.device = _find_target_device(facts)
    _ROLE_SETTERS[tool](record)
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
    """Roles that follow from others."""
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
        kind = kind or ("fp4 or nf4" if record.quantised_bits == 4 else "int8")
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


_ROLE_SETTERS: dict[str, Callable[[Record], None]] = {
    "simpletuner": set_simpletuner_roles,
    "axolotl": set_axolotl_roles,
    "llamafactory": set_llamafactory_roles,
    "torchtune": set_torchtune_roles,
    "torchtitan": set_torchtitan_roles,
    "lightning": set_lightning_roles,
    "kohya": set_kohya_roles,
    "hf": set_hf_roles,
    "script": set_script_roles,
}
