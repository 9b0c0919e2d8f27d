"""Errors of what is split over processes: FSDP, collectives, DeepSpeed."""

from __future__ import annotations

import re

from ..family import Cause, Explained, Seen, family
from ..recognise import dtype_word


@family("EX014", "flattened parameters", "sharded group", "sharded gradients", "collective", "weights sent elsewhere")
def sharding(s: Seen) -> Explained:
    """Sharding or a collective needs one dtype and met two

    **Why it matters.** FSDP1 flattens a unit's parameters into one tensor, frozen ones included; FSDP2 wants one dtype among a
    group's trainable ones; NCCL
    collectives and ZeRO-3's persistent parameters pack tensors together.

    **Example.** fp32 LoRA adapters (PEFT's default) on a bf16 base; 4-bit weights stored as uint8.

    **What to do.** One dtype a unit: `autocast_adapter_dtype=False`, `bnb_4bit_quant_storage=torch.bfloat16`, or norms and
    adapters in units of their own.
    """
    left, right = s.dtype("left", "one dtype"), s.dtype("right", "another")
    if "set" in s.words:
        left, right = ([dtype_word(word) for word in s.words["set"].split(",")] + ["another"])[:2]
    quant = {"uint8", "int8"} & {left, right}
    if "integer" in s.words:
        quant, left = {"integer"}, "quantised integer"
    causes = [
        Cause(
            name="fp32 adapters or norms in a half-precision unit",
            score=3,
            why=(
                f"{left} and {right} parameters share one FSDP unit or collective: fp32 LoRA adapters (PEFT's "
                "default), fp32 norms or modules_to_save beside a half-precision base, uniform dtype is needed"
            ),
            fix=(
                f"one dtype: get_peft_model(model, config, autocast_adapter_dtype=False), or model.to({s.torch_half}) "
                "before wrapping, or wrap the fp32 modules in their own unit (auto_wrap_policy / fully_shard)"
            ),
            because=f"the text names {left} and {right}" if right != "another" else "",
        )
    ]
    causes.append(
        Cause(
            name="4-bit weights stored in another dtype",
            score=5 if quant or s.situation.mentions("bitsandbytes|Params4bit") else 1.5,
            why=(
                "bitsandbytes stores 4-bit weights as uint8 unless told otherwise, 8-bit ones always as int8 (as w8a8 checkpoints "
                "do), and FSDP cannot flatten integers with floats"
            ),
            fix=(
                "4-bit: BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16), equal to dtype=; 8-bit weights do not shard: load the "
                "unquantised checkpoint"
            ),
            because=f"{min(quant)} is named" if quant else "",
        )
    )
    if s.operator == "sharded gradients":
        return Explained(
            message=f"FSDP2 would reduce gradients of {left} and {right} together",
            causes=[
                Cause(
                    name="accumulated gradients beside fresh ones",
                    score=4,
                    why=(
                        f"gradients accumulated over micro-batches without synchronisation are {right if left == s.half else left} "
                        f"(reduce_dtype), and a parameter that took part only in the last micro-batch, or in none, brings a {s.half} one"
                    ),
                    fix=(
                        "let every parameter take part in every micro-batch (add 0 * output.sum()), synchronise each one "
                        "(set_requires_gradient_sync(True)), or reduce_dtype equal to param_dtype"
                    ),
                    because="the text names the gradients of one reduce-scatter",
                ),
                Cause(
                    name="one group has parameters of several dtypes",
                    score=2,
                    why="norms or adapters in fp32 share a group with half-precision weights, so their gradients differ too",
                    fix="fully_shard the fp32 modules as a group of their own",
                ),
            ],
        )
    if s.operator == "collective" and (call := s.situation.users) and re.search(r"\b(?:dist|distributed|c10d)\.\w+\(", call.code):
        causes.append(
            Cause(
                name="a collective's buffers have two dtypes",
                score=6,
                why=f"this call hands over tensors of {left} and {right}: one was made without dtype=, or the value is half precision",
                fix="make the output with the input's dtype: torch.empty(..., dtype=x.dtype), or cast the value: x.float()",
                because=f"{call.code} at {call.file}:{call.line}",
            )
        )
    if s.operator == "collective":
        causes.append(
            Cause(
                name="mixed parameter dtypes in one collective",
                score=3.5,
                why=(
                    "a reduce_scatter or all_gather (DeepSpeed ZeRO, ZeRO++) packs tensors of mixed dtypes (fp32 LoRA on "
                    "a bf16 base, or a misspelt bf16 section "
                    "that left parameters in fp32) into one collective"
                ),
                fix=("one parameter dtype: autocast_adapter_dtype=False, and check that the DeepSpeed config has bf16: {enabled: auto}"),
                because="deepspeed is in the traceback" if "deepspeed" in s.situation.packages else "",
            )
        )
    if s.operator == "weights sent elsewhere":
        left, right = s.dtype("source"), s.dtype("destination")
        causes.append(
            Cause(
                name="weights sent to an engine of another dtype",
                score=6,
                why=(
                    f"the trainer sends {left} parameters (PEFT makes adapters fp32; ZeRO-3 gathers them as they are) to an "
                    f"inference engine that holds {right}"
                ),
                fix=f"cast once where it is sent: param.data.to({s.torch_half}), or make the engine with the trainer's dtype",
                because=f"source {left}, destination {right}",
            )
        )
    what = {
        "weights sent elsewhere": "weights were sent in another dtype",
        "flattened parameters": "FSDP1 needs one dtype in a unit",
        "sharded group": "FSDP2 needs one dtype among a group's trainable parameters",
        "collective": "a collective got tensors of two dtypes",
    }[s.operator]
    named = f": {left} and {right}" if right != "another" else ", and cannot flatten integers" if "integer" in s.words else ""
    return Explained(message=what + named, causes=causes)


@family("EX036", "collective without this dtype")
def collective_without(s: Seen) -> Explained:
    """A process group does not move this dtype

    **Why it matters.** NCCL and gloo sum fp32, fp16, bf16 and some integers; fp8, uint16 and complex values they refuse, gloo on a CPU
    without naming the dtype.

    **Example.** `dist.all_reduce` of fp8 scales' statistics; fp8 parameters gathered as they are.

    **What to do.** Reduce in fp32: `y = x.float(); dist.all_reduce(y)`. Bytes that are only moved can be viewed: `x.view(torch.uint8)`.
    """
    dtype = s.dtype("missing", "the tensor's dtype")
    user = s.situation.users
    return Explained(
        message=f"the process group does not take {dtype}",
        causes=[
            Cause(
                name="a dtype without a collective",
                score=3,
                why=f"{dtype} is none that this backend sums or gathers: fp8, 16-bit unsigned and complex values are not, and gloo (a CPU, "
                "Windows) has no bf16 in older torch",
                fix="reduce in fp32: y = x.float(); dist.all_reduce(y); a metric: keep its state in fp32; bytes that are only moved: "
                "x.view(torch.uint8)",
                because=f"{user.code} at {user.file}:{user.line}" if user and user.code else "",
            )
        ],
    )


@family("EX016", "DeepSpeed accumulation", "DeepSpeed mismatch", "DeepSpeed autocast", "DeepSpeed section off")
def deepspeed(s: Seen) -> Explained:
    """DeepSpeed's configuration disagrees with itself or with the trainer

    **Why it matters.** DeepSpeed has its own precision sections; transformers compares them with its arguments and stops,
    accelerate with `--mixed_precision`.

    **Example.** `"fp16": {"enabled": true}` in the JSON and `bf16=True` in TrainingArguments.

    **What to do.** `"auto"` in the DeepSpeed sections, and the decision in one place. `isotype check` reads both files.
    """
    if s.operator == "DeepSpeed accumulation":
        return Explained(
            message="DeepSpeed: model dtype and grad_accum_dtype conflict",
            causes=[
                Cause(
                    name="grad_accum_dtype conflicts with bf16 and ZeRO",
                    score=3,
                    why=(
                        "data_types.grad_accum_dtype differs from what this DeepSpeed allows for the model's dtype and ZeRO "
                        "stage (versions 0.7.6 to 0.8.0 have contradicting defaults)"
                    ),
                    fix=(
                        'upgrade DeepSpeed, and set "data_types": {"grad_accum_dtype": "fp32"} (bf16 with ZeRO stage 1-3), '
                        "or remove it without ZeRO"
                    ),
                )
            ],
        )
    if s.operator == "DeepSpeed autocast":
        return Explained(
            message="torch.autocast is on around a DeepSpeed engine that does not know of it",
            causes=[
                Cause(
                    name="autocast outside DeepSpeed",
                    score=4,
                    why=(
                        "since 0.17.2 DeepSpeed refuses an autocast that its own configuration does not name: the trainer (or "
                        "accelerate's mixed_precision) opens one around an engine that casts the weights itself (bf16.enabled)"
                    ),
                    fix=(
                        '"torch_autocast": {"enabled": true, "dtype": "bfloat16"} in the DeepSpeed config (with bf16.enabled false: '
                        "fp32 weights), or drop the autocast around the engine and let bf16.enabled cast"
                    ),
                    because="the text names it",
                )
            ],
        )
    if s.operator == "DeepSpeed section off":
        section = dtype_word(s.words["section"])
        return Explained(
            message=f"{section} parameters in a DeepSpeed engine whose {section} section is off",
            causes=[
                Cause(
                    name="weights in a dtype that the DeepSpeed config does not name",
                    score=4,
                    why=(
                        f"the model was loaded (or cast) in {section}, and the DeepSpeed config leaves {section} off, or 'auto' beside a "
                        f"trainer that does not say {section}=True: the engine then expects fp32 parameters"
                    ),
                    fix=f'"{section}": {{"enabled": true}} (or {section}=True with "auto"), or load with dtype=torch.float32',
                    because="the text names it",
                )
            ],
        )
    key = s.words.get("key") or f"{s.words.get('section', 'fp16')}.enabled"
    value = f"={s.words['ds']}" if "ds" in s.words else ""
    other = f"{s.words['hf']}={s.words.get('hfvalue')}" if "hf" in s.words else f"--mixed_precision {s.words.get('mp', '')}"
    return Explained(
        message=f"DeepSpeed {key}{value} disagrees with {other}",
        causes=[
            Cause(
                name=f"{key} in the DeepSpeed config",
                score=4,
                why=(
                    f"the DeepSpeed config sets {key}{value} and the trainer or launcher says {other}: a mismatch between "
                    "two owners of precision"
                ),
                fix=(
                    'set "enabled": "auto" in the fp16 and bf16 sections of the DeepSpeed config, and decide in '
                    "TrainingArguments (bf16=True or fp16=True)"
                ),
                because="the text names both settings",
            )
        ],
    )
