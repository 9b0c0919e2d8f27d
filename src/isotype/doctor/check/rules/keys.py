"""Rules that look at every key of a file. They find fp16 and bf16 enabled together, and values and
keys that a tool refuses or ignores.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....dtypes import torch_dtype_name
from ....finding import Finding
from ..python_calls import Name
from ..settings import (
    Record,
    Setting,
    deepspeed_setting,
    find_fsdp,
    fsdp_version,
    parse_boolean,
    parse_dtype,
)
from .base import error, rule

_EXCLUSIVE_PAIRS = (
    ("hf.bf16_full_eval", "hf.fp16_full_eval"),
    ("llamafactory.pure_bf16", "llamafactory.fp16"),
    ("kohya.full_bf16", "kohya.full_fp16"),
)


def _enabled_siblings(r: Record) -> Iterator[tuple[Setting, Setting]]:
    """The pairs of `bf16` and `fp16` settings that are both on in the same section of any tool."""
    for document in r.facts.documents:
        if document.tool in ("env", "checkpoint", "code"):
            continue
        for key, fp16 in document.settings.items():
            prefix, _, last = key.rpartition(".")
            bf16 = document.settings.get(f"{prefix}.bf16" if prefix else "bf16")
            if (
                last == "fp16"
                and bf16 is not None
                and parse_boolean(fp16.value) is parse_boolean(bf16.value) is True
            ):
                yield bf16, fp16


@rule("CF001")
def both_halves(r: Record) -> Iterator[Finding]:
    """fp16 and bf16 are both on

    **Why it matters.** The two exclude each other: fp16 needs loss scaling, bf16 has the range of
    fp32 and uses none. Most trainers stop with "At most one of fp16 and bf16 can be True". Some
    continue with the setting that they check first.

    **Example.** `{"fp16": true, "bf16": true}`; a DeepSpeed file with both sections enabled; `bf16`
    for training and `fp16_full_eval` for evaluation under DeepSpeed's "auto".

    **What to do.** Keep one of them: bf16 on Ampere and newer GPUs, else fp16.
    """
    f = r.facts
    for bf16, fp16 in [
        *_enabled_siblings(r),
        *(
            (f.first_enabled(bf16_key), f.first_enabled(fp16_key))
            for bf16_key, fp16_key in _EXCLUSIVE_PAIRS
        ),
    ]:
        if bf16 and fp16:
            effect = "the trainer refuses to start, or takes whichever it looks at first"
            if "pure" in bf16.key:
                effect = "there is no error: bf16 weights run under fp16 autocast with a GradScaler"
            yield error(
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
    bf16 = deepspeed_setting(f, "bf16.enabled")
    fp16 = deepspeed_setting(f, "fp16.enabled")
    if bf16 and fp16 and parse_boolean(bf16.value) and parse_boolean(fp16.value):
        yield error(
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
        for train, evaluate in (("hf.bf16", "hf.fp16_full_eval"), ("hf.fp16", "hf.bf16_full_eval")):
            flag = f.first_enabled(train)
            full = f.first_enabled(evaluate)
            if flag and full:
                yield error(
                    f"{flag.key} with {full.key} enables both of DeepSpeed's sections",
                    full,
                    flag,
                    fp16,
                    bf16,
                    cause=(
                        '"auto" takes a section on when either the training or the full_eval flag'
                        " of that half is set: both fp16 and bf16 are on"
                    ),
                    fix=f"evaluate in the same half as training: remove {full.key}",
                    current_effect="DeepSpeed refuses to start",
                )


_NOT_TORCH_NAMES = ("bf16", "fp16", "fp32")
# attributes of torch that are not allowed as a storage dtype
_NOT_FOR_STORAGE = ("half", "float", "double")


@rule("CF043")
def unresolvable_dtype_name(r: Record) -> Iterator[Finding]:
    """A dtype of weights has a name that is not found: `torch.bfloat16`, `bf16`

    **Why it matters.** `bnb_4bit_compute_dtype`, and a string that is passed as `dtype` to
    `from_pretrained`, are looked up with `getattr(torch, ...)`, which fails: "module torch has no
    attribute torch.bfloat16". `bnb_4bit_quant_storage` accepts six names, which do not include
    `half`, `float` and `double`.

    **Example.** `"bnb_4bit_compute_dtype": "torch.bfloat16"`; `from_pretrained(..., dtype="bf16")`.

    **What to do.** Write `"bfloat16"`.
    """
    for document in r.facts.documents:
        if document.tool not in ("model", "hf", "peft", "axolotl"):
            continue
        reported = set()
        for key, setting in document.settings.items():
            last = key.rpartition(".")[2]
            dtype_name = setting.value
            is_load_dtype = (
                key in ("dtype", "torch_dtype")
                and document.attributes.get("reader") == "python"
                and document.tool == "model"
            )
            is_torch_attribute = last in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage") or (
                is_load_dtype and not document.attributes.get("unsloth")
            )
            if not is_torch_attribute or (last, setting.line) in reported:
                continue
            if not isinstance(dtype_name, str) or isinstance(dtype_name, Name):
                continue
            is_storage_dtype = last == "bnb_4bit_quant_storage"
            if (
                dtype_name.startswith("torch.")
                or dtype_name in _NOT_TORCH_NAMES
                or (is_storage_dtype and dtype_name in _NOT_FOR_STORAGE)
            ):
                reported.add((last, setting.line))
                dtype = parse_dtype(dtype_name) or dtype_name.removeprefix("torch.")
                fix = f'{last}: "{torch_dtype_name(dtype)}"'
                if is_storage_dtype:
                    yield error(
                        f"{last} does not take {dtype_name!r}",
                        setting,
                        cause=(
                            "the string must be one of float16, bfloat16, float32, float64, int8"
                            " and uint8"
                        ),
                        fix=fix,
                        current_effect="loading stops with a ValueError",
                    )
                else:
                    yield error(
                        f"{last}: {dtype_name!r} is not a name in torch",
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
def deepspeed_foreign_keys(r: Record) -> Iterator[Finding]:
    """A key of fp16 is in DeepSpeed's bf16 section

    **Why it matters.** bf16 has no loss scaling, and DeepSpeed refuses unknown keys.

    **Example.** `"bf16": {"enabled": true, "loss_scale_window": 1000}`.

    **What to do.** Remove them.
    """
    for document in r.facts.documents:
        for key, setting in document.settings.items():
            section, _, last = key.rpartition(".")
            if (
                last in _FP16_ONLY
                and section.rpartition(".")[2] == "bf16"
                and (document.tool == "deepspeed" or "deepspeed" in key)
            ):
                yield error(
                    f"{last} does not belong in DeepSpeed's bf16 section",
                    setting,
                    cause=(
                        f"{last} is an fp16 loss scaling key; bf16 has none, and extra keys are"
                        " refused"
                    ),
                    fix=f"remove {last} from the bf16 section",
                    current_effect="DeepSpeed stops",
                )


@rule("CF060")
def wrong_policy_keys(r: Record) -> Iterator[Finding]:
    """A mixed precision policy with a key of the other FSDP version

    **Why it matters.** The policy of FSDP1 has `buffer_dtype`, the policy of FSDP2 has
    `output_dtype`. accelerate refuses the key of the other version.

    **Example.** `FullyShardedDataParallelPlugin(fsdp_version=2,
    mixed_precision_policy={"buffer_dtype": "bf16"})`.

    **What to do.** Use the keys of the FSDP version that is set.
    """
    f = r.facts
    version, version_setting = fsdp_version(f)
    for document in f.documents:
        if document.tool != "fsdp" or document.attributes.get("reader") != "python":
            continue
        for key, setting in document.settings.items():
            section, _, last = key.rpartition(".")
            if section.rpartition(".")[2].removeprefix("fsdp_") != "mixed_precision_policy":
                continue
            if (version == 2 and last == "buffer_dtype") or (
                version in (1, None) and last == "output_dtype"
            ):
                valid_key = "output_dtype" if version == 2 else "buffer_dtype"
                yield error(
                    f"{last} in the policy of FSDP{version or 1}",
                    setting,
                    version_setting or find_fsdp(f),
                    cause=(
                        f"the mixed precision policy of FSDP{version or 1} has param_dtype,"
                        f" reduce_dtype and {valid_key}, and no {last}"
                    ),
                    fix=f"{valid_key} instead of {last}",
                    current_effect="accelerate stops: Invalid mixed precision policy",
                )
