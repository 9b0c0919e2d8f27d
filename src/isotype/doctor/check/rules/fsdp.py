"""Rules about FSDP, 1 and 2: what a unit may hold, its checkpointing, its mixed precision policy."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ....dtypes import torch_word
from ....finding import Finding
from ..model_settings import BNB
from ..record import Record
from ..settings import dtype_of
from ..sharded import fsdp_version, uses_fsdp
from .base import ERROR, WARNING, error, found, rule, warning

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
