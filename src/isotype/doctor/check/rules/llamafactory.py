"""Rules about LLaMA-Factory, known for its main branch of 2026-08."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..model_settings import CHECKPOINT_DTYPE
from ..record import Record
from ..settings import dtype_of
from ..sharded import uses_fsdp, zero_stage
from .base import error, note, rule, warning


@rule("CF080")
def pure_bf16_under_zero3(r: Record) -> Iterator[Finding]:
    """pure_bf16 under ZeRO-3

    **Why it matters.** LLaMA-Factory refuses: "`pure_bf16` is incompatible with DeepSpeed ZeRO-3".

    **Example.** `pure_bf16: true`, `deepspeed: ds_z3_config.json`.

    **What to do.** `bf16: true`.
    """
    pure = r.facts.on("llamafactory.pure_bf16")
    stage, by = zero_stage(r.facts)
    if pure and stage == 3:
        yield error(
            "pure_bf16 with DeepSpeed ZeRO-3",
            pure,
            by,
            cause="pure_bf16 is incompatible with ZeRO-3",
            fix="bf16: true in place of pure_bf16",
            wins="LLaMA-Factory stops",
        )


@rule("CF081")
def pure_bf16_adapters(r: Record) -> Iterator[Finding]:
    """pure_bf16 with LoRA is not pure

    **Why it matters.** PEFT makes the adapters fp32 whatever `pure_bf16` says.

    **Example.** `pure_bf16: true`, `finetuning_type: lora`.

    **What to do.** `bf16: true` says what happens; nothing in the configuration makes the adapters bf16.
    """
    pure = r.facts.on("llamafactory.pure_bf16")
    if pure and r.adapter:
        yield warning(
            "pure_bf16 with LoRA still trains fp32 adapters",
            pure,
            r.adapter_by,
            cause="get_peft_model casts adapters to fp32 (autocast_adapter_dtype), which LLaMA-Factory does not switch off",
            fix="bf16: true",
            wins="fp32 adapters on a bf16 base",
        )


@rule("CF082")
def no_half_for_an_fp32_checkpoint(r: Record) -> Iterator[Finding]:
    """Neither fp16 nor bf16, and an fp32 checkpoint

    **Why it matters.** LLaMA-Factory then takes float16 as compute dtype for quantisation and attention.

    **Example.** No `bf16`, a checkpoint whose config.json says float32.

    **What to do.** `bf16: true`, or `fp16: true` if it is meant.
    """
    f = r.facts
    stored = f.get(*CHECKPOINT_DTYPE)
    if (
        r.tool == "llamafactory"
        and stored
        and dtype_of(stored.value) == "fp32"
        and not f.on("llamafactory.bf16", "llamafactory.fp16", "llamafactory.pure_bf16")
        and f.off("llamafactory.do_train") is None
    ):
        yield warning(
            "no half precision is set and the checkpoint is fp32: the compute dtype becomes fp16",
            f.given("llamafactory.bf16") or stored,
            stored,
            cause="LLaMA-Factory infers float16 as the compute dtype of an fp32 checkpoint",
            fix="bf16: true",
            wins="fp16 for quantisation and attention",
        )


@rule("CF083")
def norms_in_quantised_training(r: Record) -> Iterator[Finding]:
    """Quantised training without upcast_layernorm

    **Why it matters.** LLaMA-Factory itself recommends it: norms of a quantised model stay in half precision otherwise. A note.

    **Example.** `quantization_bit: 4`.

    **What to do.** `upcast_layernorm: true`, unless FSDP is used.
    """
    f = r.facts
    bits = f.get("llamafactory.quantization_bit")
    if bits and not f.on("llamafactory.upcast_layernorm") and not uses_fsdp(f):
        yield note(
            "upcast_layernorm is recommended with quantisation",
            bits,
            f.given("llamafactory.upcast_layernorm"),
            cause="the norms stay in half precision",
            fix="upcast_layernorm: true",
        )


@rule("CF084")
def quantisation_under_sharding(r: Record) -> Iterator[Finding]:
    """A quantisation that cannot be sharded

    **Why it matters.** Only 4-bit bitsandbytes works with FSDP and ZeRO-3; 8-bit and HQQ do not.

    **Example.** `quantization_bit: 8`, `deepspeed: ds_z3_config.json`.

    **What to do.** `quantization_bit: 4` with `quantization_method: bnb`.
    """
    f = r.facts
    bits, method = f.get("llamafactory.quantization_bit"), f.get("llamafactory.quantization_method")
    stage, by = zero_stage(f)
    sharding = by if stage == 3 else uses_fsdp(f)
    if bits and sharding is not None and (str(bits.value) == "8" or (method is not None and str(method.value).lower() == "hqq")):
        yield error(
            f"{'HQQ' if method and str(method.value).lower() == 'hqq' else '8-bit'} quantisation with {'ZeRO-3' if stage == 3 else 'FSDP'}",
            method or bits,
            bits,
            sharding,
            cause="only 4-bit bitsandbytes weights can be sharded by FSDP or ZeRO-3",
            fix="quantization_bit: 4, quantization_method: bnb",
            wins="LLaMA-Factory stops",
        )


@rule("CF085")
def fp8_settings(r: Record) -> Iterator[Finding]:
    """fp8 settings that exclude each other or have no effect

    **Why it matters.** fp8 training refuses quantisation. `fp8_enable_fsdp_float8_all_gather` without `fp8` prints that it
    enables fp8 and does not: the value is written to another object.

    **Example.** `fp8_enable_fsdp_float8_all_gather: true` alone.

    **What to do.** `fp8: true`, without `quantization_bit`.
    """
    f = r.facts
    fp8, gather, bits = (
        f.on("llamafactory.fp8"),
        f.on("llamafactory.fp8_enable_fsdp_float8_all_gather"),
        f.get("llamafactory.quantization_bit"),
    )
    if fp8 and bits:
        yield error(
            "fp8 training with quantisation",
            fp8,
            bits,
            cause="FP8 training is not compatible with quantised weights",
            fix="remove quantization_bit, or fp8: false with bf16: true",
            wins="LLaMA-Factory stops",
        )
    if gather and not fp8:
        yield warning(
            "fp8_enable_fsdp_float8_all_gather without fp8 has no effect",
            gather,
            f.given("llamafactory.fp8"),
            cause="the option sets fp8 on an object that training does not read: FP8 stays off",
            fix="fp8: true",
            wins="no fp8",
        )
