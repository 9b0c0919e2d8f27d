"""Defines the rules that examine every key of a file. The rules find files that enable both fp16
and bf16. They also find values and keys that a tool refuses or ignores.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....dtypes import torch_dtype_name
from ....finding import Finding
from ..python_calls import DottedName
from ..settings import (
    Record,
    Setting,
    deepspeed_setting,
    find_fsdp,
    fsdp_version,
    parse_boolean,
    parse_dtype,
)
from .base import make_error, rule

# pairs of settings that must not both be on
_EXCLUSIVE_PAIRS = (
    ("hf.bf16_full_eval", "hf.fp16_full_eval"),
    ("llamafactory.pure_bf16", "llamafactory.fp16"),
    ("kohya.full_bf16", "kohya.full_fp16"),
)


def _enabled_siblings(record: Record) -> Iterator[tuple[Setting, Setting]]:
    """Finds sections of a file in which both `bf16` and `fp16` are on. Yields the two settings of
    each such section.
    """
    for document in record.facts.documents:
        if document.tool in ("env", "checkpoint", "code"):
            continue
        for key, fp16 in document.settings.items():
            prefix, _, key_name = key.rpartition(".")
            bf16 = document.settings.get(f"{prefix}.bf16" if prefix else "bf16")
            if (
                key_name == "fp16"
                and bf16 is not None
                and parse_boolean(fp16.value) is parse_boolean(bf16.value) is True
            ):
                yield bf16, fp16


@rule("CF001")
def both_half_formats_enabled(record: Record) -> Iterator[Finding]:
    """fp16 and bf16 are both on

    **Why it matters.** The two formats exclude each other: fp16 needs loss scaling; bf16 has the
    range of fp32 and uses no loss scaling. Most trainers stop with "At most one of fp16 and bf16
    can be True". Some trainers continue with the setting that they check first.

    **Example.** `{"fp16": true, "bf16": true}`; a DeepSpeed file with both sections enabled; `bf16`
    for training and `fp16_full_eval` for evaluation under DeepSpeed's "auto".

    **What to do.** Keep one of them: bf16 on Ampere and newer GPUs, else fp16.
    """
    facts = record.facts
    for bf16, fp16 in [
        *_enabled_siblings(record),
        *(
            (facts.first_enabled(bf16_key), facts.first_enabled(fp16_key))
            for bf16_key, fp16_key in _EXCLUSIVE_PAIRS
        ),
    ]:
        if bf16 and fp16:
            effect = "the trainer refuses to start, or takes whichever it looks at first"
            if "pure" in bf16.key:
                effect = "there is no error: bf16 weights run under fp16 autocast with a GradScaler"
            yield make_error(
                f"{fp16.key} and {bf16.key} are both on",
                fp16,
                bf16,
                cause="fp16 and bf16 exclude each other; both cannot be true at once",
                fix=(
                    f"keep only one: {bf16.key}: true with {fp16.key}: false where the GPU has"
                    " bf16, else the reverse"
                ),
                current_effect=effect,
            )
    bf16 = deepspeed_setting(facts, "bf16.enabled")
    fp16 = deepspeed_setting(facts, "fp16.enabled")
    if bf16 and fp16 and parse_boolean(bf16.value) and parse_boolean(fp16.value):
        yield make_error(
            "DeepSpeed's fp16 and bf16 sections are both enabled",
            fp16,
            bf16,
            cause=(
                "DeepSpeed: bfloat16 and fp16 modes cannot be enabled at once; both sections are"
                " true"
            ),
            current_effect="DeepSpeed refuses to start",
            fix='keep one section enabled, and "enabled": false or "auto" in the other',
        )
    if bf16 and fp16 and str(bf16.value) == str(fp16.value) == "auto":
        for train_key, evaluate_key in (
            ("hf.bf16", "hf.fp16_full_eval"),
            ("hf.fp16", "hf.bf16_full_eval"),
        ):
            training_flag = facts.first_enabled(train_key)
            full_eval_flag = facts.first_enabled(evaluate_key)
            if training_flag and full_eval_flag:
                yield make_error(
                    f"{training_flag.key} with {full_eval_flag.key} enables both of DeepSpeed's sections",
                    full_eval_flag,
                    training_flag,
                    fp16,
                    bf16,
                    cause=(
                        '"auto" takes a section on when either the training or the full_eval flag'
                        " of that half is set: both fp16 and bf16 are on"
                    ),
                    fix=f"evaluate in the same half as training: remove {full_eval_flag.key}",
                    current_effect="DeepSpeed refuses to start",
                )


_NOT_TORCH_NAMES = ("bf16", "fp16", "fp32")
# attributes of torch that are not allowed as a storage dtype
_NOT_FOR_STORAGE = ("half", "float", "double")


@rule("CF043")
def unresolvable_dtype_name(record: Record) -> Iterator[Finding]:
    """A dtype of weights has a name that is not found: `torch.bfloat16`, `bf16`

    **Why it matters.** `bnb_4bit_compute_dtype`, and a string that is passed as `dtype` to
    `from_pretrained`, are looked up with `getattr(torch, ...)`, which fails: "module torch has no
    attribute torch.bfloat16". `bnb_4bit_quant_storage` accepts six names, which do not include
    `half`, `float` and `double`.

    **Example.** `"bnb_4bit_compute_dtype": "torch.bfloat16"`; `from_pretrained(..., dtype="bf16")`.

    **What to do.** Write `"bfloat16"`.
    """
    for document in record.facts.documents:
        if document.tool not in ("model", "hf", "peft", "axolotl"):
            continue
        reported = set()
        for key, setting in document.settings.items():
            key_name = key.rpartition(".")[2]
            dtype_name = setting.value
            is_load_dtype = (
                key in ("dtype", "torch_dtype")
                and document.attributes.get("reader") == "python"
                and document.tool == "model"
            )
            is_torch_attribute = key_name in (
                "bnb_4bit_compute_dtype",
                "bnb_4bit_quant_storage",
            ) or (is_load_dtype and not document.attributes.get("unsloth"))
            if not is_torch_attribute or (key_name, setting.line) in reported:
                continue
            if not isinstance(dtype_name, str) or isinstance(dtype_name, DottedName):
                continue
            is_storage_dtype = key_name == "bnb_4bit_quant_storage"
            if (
                dtype_name.startswith("torch.")
                or dtype_name in _NOT_TORCH_NAMES
                or (is_storage_dtype and dtype_name in _NOT_FOR_STORAGE)
            ):
                reported.add((key_name, setting.line))
                dtype = parse_dtype(dtype_name) or dtype_name.removeprefix("torch.")
                fix = f'{key_name}: "{torch_dtype_name(dtype)}"'
                if is_storage_dtype:
                    yield make_error(
                        f"{key_name} does not take {dtype_name!r}",
                        setting,
                        cause=(
                            "the string must be one of float16, bfloat16, float32, float64, int8"
                            " and uint8"
                        ),
                        fix=fix,
                        current_effect="loading stops with a ValueError",
                    )
                else:
                    yield make_error(
                        f"{key_name}: {dtype_name!r} is not a name in torch",
                        setting,
                        cause=(
                            "the string is looked up as an attribute of torch, and must be torch's"
                            " own word without prefix"
                        ),
                        fix=fix,
                        current_effect="loading stops with an AttributeError",
                    )


_FP16_ONLY = {
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "min_loss_scale",
    "consecutive_hysteresis",
    "auto_cast",
    "fp16_master_weights_and_grads",
}


@rule("CF055")
def fp16_keys_in_bf16_section(record: Record) -> Iterator[Finding]:
    """A key of fp16 is in DeepSpeed's bf16 section

    **Why it matters.** bf16 has no loss scaling, and DeepSpeed refuses unknown keys.

    **Example.** `"bf16": {"enabled": true, "loss_scale_window": 1000}`.

    **What to do.** Remove them.
    """
    for document in record.facts.documents:
        for key, setting in document.settings.items():
            section, _, key_name = key.rpartition(".")
            if (
                key_name in _FP16_ONLY
                and section.rpartition(".")[2] == "bf16"
                and (document.tool == "deepspeed" or "deepspeed" in key)
            ):
                yield make_error(
                    f"{key_name} does not belong in DeepSpeed's bf16 section",
                    setting,
                    cause=(
                        f"{key_name} is an fp16 loss scaling key; bf16 has none, and extra keys are"
                        " refused"
                    ),
                    fix=f"remove {key_name} from the bf16 section",
                    current_effect="DeepSpeed stops",
                )


@rule("CF060")
def wrong_policy_keys(record: Record) -> Iterator[Finding]:
    """A mixed precision policy with a key of the other FSDP version

    **Why it matters.** The policy of FSDP1 has `buffer_dtype`, the policy of FSDP2 has
    `output_dtype`. accelerate refuses the key of the other version.

    **Example.** `FullyShardedDataParallelPlugin(fsdp_version=2,
    mixed_precision_policy={"buffer_dtype": "bf16"})`.

    **What to do.** Use the keys of the FSDP version that is set.
    """
    facts = record.facts
    version, version_setting = fsdp_version(facts)
    for document in facts.documents:
        if document.tool != "fsdp" or document.attributes.get("reader") != "python":
            continue
        for key, setting in document.settings.items():
            section, _, key_name = key.rpartition(".")
            if section.rpartition(".")[2].removeprefix("fsdp_") != "mixed_precision_policy":
                continue
            if (version == 2 and key_name == "buffer_dtype") or (
                version in (1, None) and key_name == "output_dtype"
            ):
                valid_key = "output_dtype" if version == 2 else "buffer_dtype"
                yield make_error(
                    f"{key_name} in the policy of FSDP{version or 1}",
                    setting,
                    version_setting or find_fsdp(facts),
                    cause=(
                        f"the mixed precision policy of FSDP{version or 1} has param_dtype,"
                        f" reduce_dtype and {valid_key}, and no {key_name}"
                    ),
                    fix=f"{valid_key} instead of {key_name}",
                    current_effect="accelerate stops: Invalid mixed precision policy",
                )
