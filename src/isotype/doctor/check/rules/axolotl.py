"""Rules about axolotl, known for its main branch of 2026-07."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..record import Record
from ..settings import truth
from ..sharded import fsdp_version, uses_deepspeed, uses_fsdp
from .base import error, note, rule, warning


@rule("CF070")
def bf16_word(r: Record) -> Iterator[Finding]:
    """bf16: full is refused

    **Why it matters.** The schema takes `auto`, true or false; `full` is documented, and refused.

    **Example.** `bf16: full`.

    **What to do.** `bf16: true`.
    """
    for key in ("bf16", "fp16"):
        setting = r.facts.get(f"axolotl.{key}")
        if setting is not None and not isinstance(setting.value, bool) and str(setting.value) not in ("auto", "true", "false"):
            yield error(
                f"{key}: {setting.value} is refused",
                setting,
                cause=f"axolotl's schema takes auto, true or false for {key}",
                fix=f"{key}: true",
                wins="axolotl stops at validation",
            )


@rule("CF071")
def ignored_dtype(r: Record) -> Iterator[Finding]:
    """float16, float32, or fp16 beside an "auto", are ignored

    **Why it matters.** `bf16` is "auto" by default and true on Ampere: it wins over `float16: true`, and switches `fp16: true` off.
    `float32: true` is read by no training code; the dtype follows bf16 and fp16.

    **Example.** `float16: true` without `bf16: false`; `bf16: auto` with `fp16: true`.

    **What to do.** `bf16: false` (and `fp16: false` for fp32).
    """
    f = r.facts
    bf16 = f.get("axolotl.bf16")
    bf16_may_be_on = bf16 is None or str(bf16.value) == "auto" or truth(bf16.value) is True
    float16, float32 = f.on("axolotl.float16"), f.on("axolotl.float32")
    if float16 is not None and bf16_may_be_on and (r.device is None or r.device.bf16):
        yield warning(
            "float16: true is ignored while bf16 is on",
            float16,
            bf16,
            cause="bf16 is auto unless given, and true on GPUs that have it: the dtype is bf16",
            fix="bf16: false, or remove float16",
            wins="bf16, on Ampere and newer",
        )
    fp16 = f.on("axolotl.fp16")
    if fp16 is not None and bf16 is not None and str(bf16.value) == "auto" and (r.device is None or r.device.bf16):
        yield warning(
            "fp16: true is ignored while bf16 is auto",
            fp16,
            bf16,
            cause="bf16: auto becomes true on GPUs that have it, and fp16 is switched off then: the run is bf16, not fp16",
            fix="bf16: auto alone (fp16 is taken where the GPU has no bf16), or bf16: false with fp16: true",
            wins="bf16, on Ampere and newer",
        )
    if float32 is not None and (bf16_may_be_on or f.on("axolotl.fp16")):
        yield warning(
            "float32: true is ignored",
            float32,
            bf16 or f.on("axolotl.fp16"),
            cause="no training code reads float32; the dtype follows bf16 and fp16",
            fix="bf16: false and fp16: false for an fp32 run",
            wins="bf16 or fp16",
        )


@rule("CF072")
def qlora_settings(r: Record) -> Iterator[Finding]:
    """adapter: qlora without load_in_4bit

    **Why it matters.** axolotl requires `load_in_4bit` for qlora, and refuses 8-bit and gptq with it.

    **Example.** `adapter: qlora` with `load_in_8bit: true`.

    **What to do.** `load_in_4bit: true, load_in_8bit: false`.
    """
    f = r.facts
    adapter = f.get("axolotl.adapter")
    if adapter is None or str(adapter.value) != "qlora":
        return
    eight, gptq, four = f.on("axolotl.load_in_8bit"), f.on("axolotl.gptq"), f.on("axolotl.load_in_4bit")
    if eight or gptq or not four:
        yield error(
            "adapter: qlora needs load_in_4bit: true, and nothing else",
            adapter,
            eight or gptq or f.given("axolotl.load_in_4bit"),
            cause="qlora is LoRA on 4-bit weights: load_in_4bit must be true, load_in_8bit and gptq not",
            fix="load_in_4bit: true, load_in_8bit: false (or adapter: lora)",
            wins="axolotl stops at validation",
        )


@rule("CF073")
def eight_bit_without_bf16(r: Record) -> Iterator[Finding]:
    """load_in_8bit without bf16 loads the rest in float16

    **Why it matters.** With `load_in_8bit` and no bf16 axolotl takes `torch_dtype=float16`, even if no half precision was asked for.

    **Example.** `load_in_8bit: true`, `bf16: false`.

    **What to do.** `bf16: true`.
    """
    f = r.facts
    eight, off = f.on("axolotl.load_in_8bit"), f.off("axolotl.bf16")
    if eight and off and not f.on("axolotl.fp16", "axolotl.float16"):
        yield warning(
            "load_in_8bit without bf16 loads the rest in float16",
            eight,
            off,
            cause="axolotl takes torch_dtype=float16 for an 8-bit base when bf16 is off",
            fix="bf16: true, or fp16: true if it is meant",
            wins="fp16",
        )


@rule("CF074")
def fp32_norms(r: Record) -> Iterator[Finding]:
    """fp32_norms without FSDP2

    **Why it matters.** axolotl implements it for FSDP2 only, and stops otherwise.

    **Example.** `fp32_norms: true` under DDP.

    **What to do.** `fsdp_version: 2`, or remove it.
    """
    norms = r.facts.on("axolotl.fp32_norms")
    if norms and (not uses_fsdp(r.facts) or fsdp_version(r.facts)[0] != 2):
        yield error(
            "fp32_norms needs FSDP2",
            norms,
            fsdp_version(r.facts)[1] or uses_fsdp(r.facts),
            cause="fp32_norms requires FSDP with fsdp_version: 2",
            fix="fsdp_version: 2 with an fsdp_config, or remove fp32_norms",
            wins="axolotl stops at validation",
        )


@rule("CF075")
def packing_with_sdpa(r: Record) -> Iterator[Finding]:
    """Sample packing with SDPA in bf16, other than on Hopper

    **Why it matters.** axolotl warns that it may give a loss of 0.0.

    **Example.** `sample_packing: true`, `sdp_attention: true`, `bf16: true` on an A100.

    **What to do.** `attn_implementation: flash_attention_2`; in older versions `flash_attention: true`.
    """
    f = r.facts
    packing = f.on("axolotl.sample_packing")
    sdpa = f.on("axolotl.sdp_attention") or next((s for s in [f.get("axolotl.attn_implementation")] if s and s.value == "sdpa"), None)
    if packing and sdpa and r.value("compute") == "bf16" and r.device is not None and r.device.kind == "cuda" and r.device.capability != 90:
        yield warning(
            f"packed samples with SDPA in bf16 on {r.device.name}",
            sdpa,
            packing,
            r.by("compute"),
            cause="this combination may give a loss of 0.0 except on sm_90",
            fix="attn_implementation: flash_attention_2 (flash_attention: true in older versions)",
        )


@rule("CF076")
def fp8_settings(r: Record) -> Iterator[Finding]:
    """axolotl's fp8 without what it needs

    **Why it matters.** fp8 is slow without `torch_compile`, does not go with FSDP's activation checkpointing, and its all-gather
    needs FSDP2.

    **Example.** `fp8: true` without `torch_compile: true`.

    **What to do.** `torch_compile: true`; `fsdp_version: 2`.
    """
    f = r.facts
    fp8, gather = f.on("axolotl.fp8"), f.on("axolotl.fp8_enable_fsdp_float8_all_gather")
    if fp8 and not f.on("axolotl.torch_compile") and f.word("axolotl.torch_compile") != "auto":
        yield warning(
            "fp8 without torch_compile",
            fp8,
            f.given("axolotl.torch_compile"),
            cause="fp8 products are only fast when compiled",
            fix="torch_compile: true",
        )
    checkpointing = f.on("axolotl.fsdp_config.activation_checkpointing", "axolotl.fsdp_config.fsdp_activation_checkpointing")
    if fp8 and checkpointing:
        yield warning(
            "fp8 with FSDP's activation checkpointing",
            fp8,
            checkpointing,
            cause="axolotl advises against fp8 with FSDP activation checkpointing: it may be slower, or fail",
            fix="gradient_checkpointing: true instead of FSDP's activation_checkpointing",
        )
    if gather and fsdp_version(f)[0] != 2:
        yield error(
            "fp8_enable_fsdp_float8_all_gather needs FSDP2",
            gather,
            fsdp_version(f)[1],
            cause="the float8 all-gather is FSDP2's",
            fix="fsdp_version: 2",
        )


@rule("CF077")
def quantised_preference_tuning(r: Record) -> Iterator[Finding]:
    """Preference tuning of a quantised model under FSDP2

    **Why it matters.** axolotl refuses dpo, kto, orpo and ipo with 4- or 8-bit weights under FSDP2.

    **Example.** `rl: dpo`, `load_in_4bit: true`, `fsdp_version: 2`.

    **What to do.** DeepSpeed, or FSDP1.
    """
    rl = r.facts.get("axolotl.rl")
    if rl and str(rl.value) in ("dpo", "kto", "orpo", "ipo") and r.quantised and fsdp_version(r.facts)[0] == 2:
        yield error(
            f"rl: {rl.value} with a quantised model under FSDP2",
            rl,
            r.quantised_by,
            fsdp_version(r.facts)[1],
            cause="axolotl does not support it",
            fix="DeepSpeed, or fsdp_version: 1",
            wins="axolotl stops at validation",
        )


@rule("CF078")
def quant_storage_replaced(r: Record) -> Iterator[Finding]:
    """Quant storage of some expert models is replaced

    **Why it matters.** For qwen2_moe, jamba and nemotron_h with qlora and no sharding axolotl forces float32 storage: with bf16
    "the loss is off by an order of magnitude".

    **Example.** `bnb_4bit_quant_storage: bfloat16` for Qwen2-MoE on one GPU.

    **What to do.** Leave it out.
    """
    f = r.facts
    storage, kind = (
        f.get("axolotl.bnb_config_kwargs.bnb_4bit_quant_storage"),
        f.word("checkpoint.model_type", "axolotl.model_config_type", "axolotl.base_model"),
    )
    moe = any(name in kind.replace("-", "_") for name in ("qwen2_moe", "jamba", "nemotron_h"))
    if storage and moe and not uses_fsdp(f) and not uses_deepspeed(f) and "float32" not in str(storage.value):
        yield note(
            f"bnb_4bit_quant_storage: {storage.value} is replaced with float32",
            storage,
            cause="axolotl forces float32 storage for this architecture without DeepSpeed or FSDP",
            fix="remove bnb_4bit_quant_storage",
            wins="float32",
        )
