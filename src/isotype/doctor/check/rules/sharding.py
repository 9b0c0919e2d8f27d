"""Rules about DeepSpeed and FSDP: their files against themselves, the trainer and the launcher. A table of rules, and so long."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ....dtypes import torch_word
from ....finding import Finding
from ..model_settings import BNB, deepspeed_half, deepspeed_setting, fsdp_version, launcher_mode, mixed_flag, uses_fsdp, zero_stage
from ..settings import Record, dtype_of, truth
from .base import ERROR, WARNING, error, found, rule, warning


@rule("CF050")
def deepspeed_and_trainer(r: Record) -> Iterator[Finding]:
    """DeepSpeed's file and the trainer's arguments disagree

    **Why it matters.** transformers compares DeepSpeed's literal values with its own arguments and stops: "Please correct the
    following DeepSpeed config values that
    mismatch TrainingArguments values".

    **Example.** `"fp16": {"enabled": true}` with `bf16: true`.

    **What to do.** `"enabled": "auto"` in both sections, and the decision in the arguments.
    """
    f = r.facts
    tool = r.tool if r.tool in ("hf", "llamafactory", "axolotl") else None
    if tool is None or not f.has(tool):
        return
    for half, other in (("fp16", "bf16"), ("bf16", "fp16")):
        section = deepspeed_setting(f, f"{half}.enabled")
        value = truth(section.value) if section is not None and str(section.value) != "auto" else None
        if section is None or value is None:
            continue
        flag = f.on(f"{tool}.{half}", f"{tool}.{half}_full_eval", *(["llamafactory.pure_bf16"] if half == "bf16" else []))
        if flag is None and tool == "axolotl" and r.value("compute") == half:
            continue  # bf16: auto, or left out, becomes true where the GPU has it
        if value and flag is None:
            against = f.on(f"{tool}.{other}") or f.given(f"{tool}.{half}") or f.given(f"{tool}.{other}")
            yield error(
                (f"DeepSpeed has {half}.enabled true, the trainer {f'{other} true' if against and other in against.key else f'no {half}'}"),
                section,
                against,
                f.get(f"{tool}.deepspeed"),
                cause=(
                    f"deepspeed's {half}.enabled is true and the training arguments "
                    f"{'say ' + other if against and other in against.key else 'do not set ' + half}: a mismatch (ds "
                    f"{half}.enabled=True vs hf {half}=False)"
                ),
                fix=f'{half}.enabled: "auto" (and {other}.enabled: "auto"), decide in the training arguments',
                wins="the trainer refuses to start",
            )
        elif not value and flag is not None and "pure_bf16" not in flag.key:
            yield error(
                f"DeepSpeed has {half}.enabled false, the trainer {flag.key} true",
                section,
                flag,
                cause=f"deepspeed's {half}.enabled is false and {flag.key} is true: a mismatch between two owners",
                fix=f'{half}.enabled: "auto"',
                wins="the trainer refuses to start",
            )


@rule("CF051")
def deepspeed_switches_off(r: Record) -> Iterator[Finding]:
    """The launcher says bf16 and DeepSpeed's file does not

    **Why it matters.** Under DeepSpeed accelerate sets its own mixed precision to "no": an explicit `bf16.enabled: false` makes
    the run fp32 in silence. Without the
    sections, transformers believes in fp32 while accelerate adds bf16, and casts float inputs to fp32.

    **Example.** `mixed_precision: bf16` and `"bf16": {"enabled": false}`.

    **What to do.** `"bf16": {"enabled": "auto"}`.
    """
    f = r.facts
    if not f.has("deepspeed") and not f.under("hf.deepspeed.zero_optimization"):
        return
    launcher = launcher_mode(f)
    flag = mixed_flag(f)
    for half in ("bf16", "fp16"):
        section = deepspeed_setting(f, f"{half}.enabled")
        other = deepspeed_setting(f, f"{'fp16' if half == 'bf16' else 'bf16'}.enabled")
        asked = launcher if launcher is not None and str(launcher.value).lower() == half else None
        if asked is not None and flag is None and other is not None and truth(other.value) is True:
            yield error(
                f"the launcher says {half}, DeepSpeed's file {'fp16' if half == 'bf16' else 'bf16'}",
                other,
                asked,
                section,
                cause=f"`--mixed_precision` cannot be {half} when the DeepSpeed config enables the other half",
                fix='"enabled": "auto" in both sections, or no mixed_precision in the launcher\'s file',
                wins="accelerate refuses to start",
            )
        elif asked is not None and section is not None and truth(section.value) is False and flag is None:
            yield warning(
                f"the launcher says {half}, DeepSpeed's {half}.enabled is false",
                section,
                asked,
                cause=(f"under DeepSpeed accelerate leaves precision to DeepSpeed's file, where {half} is off: the run is fp32"),
                fix=f'"{half}": {{"enabled": "auto"}} or true',
                wins="DeepSpeed's file: fp32",
            )
    if (
        flag is not None
        and r.tool == "hf"
        and deepspeed_setting(f, "bf16.enabled") is None
        and deepspeed_setting(f, "fp16.enabled") is None
    ):
        deepspeed = (
            next((s for d in f.documents if d.tool == "deepspeed" for s in d.settings.values()), None)
            or f.under("hf.deepspeed.zero_optimization")[0]
        )
        yield warning(
            f"DeepSpeed's file has neither a bf16 nor an fp16 section, the trainer {flag.key}",
            flag,
            deepspeed,
            cause=(
                "transformers takes the DeepSpeed dtype as fp32 while accelerate switches the half precision on: "
                "float inputs are cast to fp32"
            ),
            fix='add "bf16": {"enabled": "auto"} and "fp16": {"enabled": "auto"}',
            wins="half precision weights, fp32 inputs",
        )


@rule("CF052")
def deepspeed_accumulation_dtype(r: Record) -> Iterator[Finding]:
    """grad_accum_dtype that DeepSpeed cannot have

    **Why it matters.** Without ZeRO the accumulation dtype must be the model's: "unsupported mix of model_dtype and grad_accum_dtype".
    With ZeRO any word is taken and every micro-batch's gradient is cast to it before it is added: bf16 gradients in fp16 overflow at
    65504 and flush below 6e-8 without a loss scale, fp16 or fp32 ones in bf16 keep 8 bits.

    **Example.** `bf16` enabled, `zero_optimization.stage: 0`, `data_types: {grad_accum_dtype: fp32}` and no bf16 optimizer for it;
    `bf16` enabled with `grad_accum_dtype: fp16` under ZeRO.

    **What to do.** `grad_accum_dtype: fp32` under ZeRO; without ZeRO leave it out.
    """
    f = r.facts
    accumulated = deepspeed_setting(f, "data_types.grad_accum_dtype")
    if accumulated is None:
        return
    stage, stage_by = zero_stage(f)
    model = deepspeed_half(r) or "fp32"
    asked = dtype_of(accumulated.value)
    if (
        asked
        and not stage
        and asked != model
        and not (model == "bf16" and asked == "fp32" and deepspeed_setting(f, "bf16.immediate_grad_update"))
    ):
        yield error(
            f"grad_accum_dtype {asked} for a {model} model without ZeRO",
            accumulated,
            stage_by,
            deepspeed_setting(f, f"{model}.enabled"),
            cause=("without ZeRO DeepSpeed accumulates in the model's dtype only: an unsupported mix of model dtype and grad_accum_dtype"),
            fix='"zero_optimization": {"stage": 1} or higher, or remove grad_accum_dtype',
            wins="DeepSpeed stops with NotImplementedError",
        )
    elif asked not in ("bf16", "fp16", "fp32"):
        yield error(
            f"grad_accum_dtype: {accumulated.value} is no dtype that DeepSpeed accumulates in",
            accumulated,
            cause="DeepSpeed looks the word up among fp32, fp16 and bf16 (float32, half, torch.bfloat16, ...) and stops at any other",
            fix='"grad_accum_dtype": "fp32"',
            wins="DeepSpeed stops with ValueError",
        )
    elif stage and asked in ("bf16", "fp16") and asked != model:
        yield found(
            ERROR if (model, asked) == ("bf16", "fp16") else WARNING,
            f"{model} gradients are accumulated in {asked} (grad_accum_dtype)",
            accumulated,
            deepspeed_setting(f, f"{model}.enabled"),
            stage_by,
            cause=(
                f"ZeRO casts each micro-batch's {model} gradient to {asked} before it adds it: "
                + (
                    "beyond 65504 it is inf, below 6e-8 zero, and bf16 runs have no loss scale that would show it"
                    if asked == "fp16"
                    else "8 bits of mantissa are left, fewer than the gradients had"
                )
            ),
            fix='"data_types": {"grad_accum_dtype": "fp32"}, or remove it',
            wins=f"sums in {asked}, in silence",
        )


_FP16_ONLY = {
    "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "consecutive_hysteresis", "auto_cast",
    "fp16_master_weights_and_grads",
}  # fmt: skip


@rule("CF055")
def deepspeed_foreign_keys(r: Record) -> Iterator[Finding]:
    """fp16's keys in DeepSpeed's bf16 section

    **Why it matters.** bf16 has no loss scaling, and unknown keys are forbidden.

    **Example.** `"bf16": {"enabled": true, "loss_scale_window": 1000}`.

    **What to do.** Remove them.
    """
    for document in r.facts.documents:
        for key, setting in document.settings.items():
            section, _, last = key.rpartition(".")
            if last in _FP16_ONLY and section.rpartition(".")[2] == "bf16" and (document.tool == "deepspeed" or "deepspeed" in key):
                yield error(
                    f"{last} does not belong in DeepSpeed's bf16 section",
                    setting,
                    cause=f"{last} is an fp16 loss scaling key; bf16 has none, and extra keys are refused",
                    fix=f"remove {last} from the bf16 section",
                    wins="DeepSpeed stops",
                )


_POLICY = re.compile(r"^(?:fsdp_config\.)?(?:fsdp_)?mixed_precision_policy(?:\.|$)")


@rule("CF015")
def one_dtype_in_a_unit(r: Record) -> Iterator[Finding]:
    """FSDP units, and weights of two dtypes in them

    **Why it matters.** FSDP1 flattens a unit's weights into one tensor and needs one dtype, frozen weights included; FSDP2 needs
    one among the
    trained weights. 4-bit weights stored as uint8 (the default) cannot be flattened, and under FSDP2 stay whole on every rank.

    **Example.** QLoRA with FSDP and no `bnb_4bit_quant_storage`; LLaMA-Factory's `upcast_layernorm` with FSDP; LoRA with
    `modules_to_save` on a bf16
    base under FSDP2.

    **What to do.** `bnb_4bit_quant_storage: bfloat16`, equal to the model's dtype; no upcast norms; `bf16: true`.
    """
    f = r.facts
    fsdp = uses_fsdp(f)
    if fsdp is None:
        return
    version, version_by = fsdp_version(f)
    storage = f.get(
        f"model.{BNB}.bnb_4bit_quant_storage",
        f"hf.{BNB}.bnb_4bit_quant_storage",
        "axolotl.bnb_config_kwargs.bnb_4bit_quant_storage",
        "axolotl.bnb_4bit_quant_storage",
        f"hf.model_init_kwargs.{BNB}.bnb_4bit_quant_storage",
    )
    stored = dtype_of(storage.value) if storage else "uint8"
    held = r.value("parameters") if r.value("parameters") in ("bf16", "fp16", "fp32") else None
    if (
        r.tool == "hf"
        and r.quantised == 4
        and f.on(f"model.{BNB}.load_in_4bit", "hf.load_in_4bit", f"hf.{BNB}.load_in_4bit", "model.load_in_4bit")
    ):
        if stored in ("uint8", "int8", None) or (held and stored != held):
            yield found(
                WARNING if version == 2 else ERROR,
                f"FSDP with 4-bit weights stored as {stored or 'uint8'}",
                storage or r.quantised_by,
                fsdp,
                r.by("parameters"),
                version_by,
                cause="FSDP2 leaves uint8 4-bit weights out of sharding: every rank keeps the whole model"
                if version == 2
                else (
                    f"FSDP needs a uniform dtype in a unit: {stored or 'uint8'} storage beside {held or 'float'} weights "
                    "cannot be flattened"
                ),
                fix=f"bnb_4bit_quant_storage: {torch_word(held or 'bf16')}, equal to the model's dtype",
            )
    elif storage is not None and r.quantised == 4 and held and stored != held:
        yield error(
            f"FSDP with 4-bit weights stored as {stored}",
            storage,
            r.quantised_by,
            fsdp,
            r.by("parameters"),
            cause=f"FSDP needs a uniform dtype in a unit: {stored} storage beside {held} weights cannot be flattened",
            fix=f"bnb_4bit_quant_storage: {torch_word(held)}, equal to the model's dtype",
        )
    norms = f.on("llamafactory.upcast_layernorm")
    if norms is not None:
        yield error(
            "upcast_layernorm with FSDP",
            norms,
            fsdp,
            cause="fp32 norms in a half-precision FSDP unit: the dtype of a unit must be uniform",
            fix="upcast_layernorm: false",
        )
    bits = f.get("llamafactory.quantization_bit")
    if bits is not None and r.adapter and f.on("llamafactory.bf16", "llamafactory.fp16", "llamafactory.pure_bf16") is None:
        yield error(
            "QLoRA with FSDP, and neither bf16 nor fp16",
            bits,
            fsdp,
            cause="the quantised storage follows a compute dtype of fp16 while the model is bf16: FSDP finds two dtypes in a unit",
            fix="bf16: true",
            wins='"Must flatten tensors with uniform dtype"',
        )
    saved = f.get("peft.modules_to_save")
    if (
        saved is not None
        and saved.value
        and version == 2
        and r.adapter
        and r.value("parameters") in ("bf16", "fp16")
        and not f.off("peft.autocast_adapter_dtype")
    ):
        yield error(
            "fp32 adapters and half-precision modules_to_save in one FSDP2 group",
            saved,
            fsdp,
            r.by("parameters"),
            cause=(
                f"PEFT makes adapters fp32 and leaves modules_to_save {r.value('parameters')}: FSDP2 expects one "
                "dtype among a group's trained weights"
            ),
            fix="autocast_adapter_dtype=False, or fully_shard the saved modules on their own",
        )


@rule("CF060")
def policy_keys(r: Record) -> Iterator[Finding]:
    """A mixed precision policy with a key of the other FSDP version, or in a file that nobody reads it from

    **Why it matters.** FSDP1's policy has `buffer_dtype`, FSDP2's has `output_dtype`; accelerate refuses the wrong one. A policy is
    handed over in Python: neither `accelerate launch` nor the trainers' `fsdp_config` read one from a file, so that the dtypes
    written there have no effect, and everything follows mixed precision.

    **Example.** `FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy={"buffer_dtype": "bf16"})`;
    `fsdp_config: {mixed_precision_policy: {reduce_dtype: fp32}}` in accelerate's YAML.

    **What to do.** The keys of the version that is used; the policy in Python.
    """
    f = r.facts
    version, by = fsdp_version(f)
    for document in f.documents:
        if document.tool != "fsdp" or document.attributes.get("reader") != "python":
            policy = next((s for k, s in document.settings.items() if _POLICY.search(k)), None)
            if policy is not None:
                yield warning(
                    "mixed_precision_policy in a file has no effect",
                    policy,
                    by or uses_fsdp(f),
                    cause="neither accelerate's launcher nor the trainers read a policy from a file: every dtype follows mixed_precision",
                    fix="FullyShardedDataParallelPlugin(mixed_precision_policy=...) in the program, or remove it",
                    wins="FSDP casts, reduces and keeps buffers in the mixed precision",
                    holds="accelerate 1.15, transformers 5.23, axolotl 0.18",
                )
            continue
        for key, setting in document.settings.items():
            section, _, last = key.rpartition(".")
            if section.rpartition(".")[2].removeprefix("fsdp_") != "mixed_precision_policy":
                continue
            if (version == 2 and last == "buffer_dtype") or (version in (1, None) and last == "output_dtype"):
                other = "output_dtype" if version == 2 else "buffer_dtype"
                yield error(
                    f"{last} in the policy of FSDP{version or 1}",
                    setting,
                    by or uses_fsdp(f),
                    cause=f"the mixed precision policy of FSDP{version or 1} has param_dtype, reduce_dtype and {other}, and no {last}",
                    fix=f"{other} instead of {last}",
                    wins="accelerate stops: Invalid mixed precision policy",
                )
