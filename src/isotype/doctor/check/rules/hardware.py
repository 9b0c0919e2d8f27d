"""Rules over the record: what the device, or a kernel, does not have."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..model_settings import launcher_mode, lightning_precision
from ..record import Record
from ..sharded import deepspeed_setting, uses_deepspeed
from .base import error, note, rule, warning


@rule("CF007")
def device_without(r: Record) -> Iterator[Finding]:
    """The device does not have what is asked of it

    **Why it matters.** bf16 and TF32 need compute capability 8.0, fp8 needs 8.9. Trainers stop, or choose something else: fp8 becomes fp16
    with a loss scaler, fp16 on a CPU becomes fp32 in silence while the run still reports fp16.

    **Example.** `bf16: true` with `--device t4`; `mixed_precision: fp8` on an A100; `fp16: true` with `use_cpu: true`.

    **What to do.** fp16 with fp32 weights before Ampere; bf16 on a CPU.
    """
    device, f = r.device, r.facts
    if device is None:
        return
    compute, by = r.value("compute"), r.by("compute")
    evaluated = f.on("hf.bf16_full_eval")
    asked = by if compute == "bf16" else evaluated
    auto = asked is not None and str(asked.value) == "auto"
    default = compute == "bf16" and by is None and r.tool == "hf"
    if not device.bf16 and (asked is not None or default) and not auto:
        yield error(
            f"bf16 was asked for, and {device.name} has none",
            asked or evaluated,
            cause=f"bf16 needs compute capability 8.0 (Ampere) or newer; {device.name} has fp16 only"
            + ("; this configuration class switches bf16 on by default" if default else ""),
            fix="fp16: true with fp32 weights, bf16: false",
            wins="most trainers stop; a few fall back to fp16 in silence",
        )
    tf32 = f.on("hf.tf32", "axolotl.tf32", "llamafactory.tf32")
    if tf32 is not None and not device.tf32:
        yield error(
            f"TF32 was asked for, and {device.name} has none",
            tf32,
            cause="TF32 needs an Ampere GPU (compute capability 8.0) or newer",
            fix="remove tf32",
            wins="transformers stops",
        )
    if compute == "fp8" and device.kind == "cuda" and not device.fp8:
        yield warning(
            f"fp8 on {device.name} becomes fp16",
            by,
            cause="fp8 needs compute capability 8.9; accelerate warns once and takes fp16 with a loss scaler, not bf16",
            fix="mixed_precision: bf16",
            wins="fp16",
        )
    if compute == "fp8" and device.kind != "cuda" and r.tool == "simpletuner":
        yield error(
            "fp8 needs CUDA",
            by,
            cause="SimpleTuner refuses mixed_precision=fp8 without a CUDA device",
            fix="mixed_precision=bf16",
        )
    if device.kind == "cpu":
        fp16 = f.on("hf.fp16") or next((s for s in [launcher_mode(f)] if s and str(s.value).lower() == "fp16"), None)
        if fp16 is not None:
            yield warning(
                "fp16 on a CPU has no effect: the run is fp32",
                fp16,
                cause="accelerate makes neither autocast nor a GradScaler for fp16 on a CPU, and still reports fp16",
                fix="bf16 on a CPU: bf16: true, fp16: false",
                wins="fp32",
            )
        precision = lightning_precision(f)
        if precision is not None and str(precision.value) in ("16", "16-mixed"):
            yield warning(
                "16-mixed on a CPU becomes bf16-mixed",
                precision,
                cause="Lightning has no fp16 autocast on a CPU and takes bf16-mixed",
                fix="precision: bf16-mixed",
                wins="bf16-mixed",
            )
    if (
        device.kind.startswith("rocm")
        and compute == "bf16"
        and uses_deepspeed(f)
        and deepspeed_setting(f, "communication_data_type") is None
    ):
        yield note(
            "on ROCm accelerate sets communication_data_type to fp32",
            by,
            cause="bf16 overflow in collectives can corrupt weights there",
            fix='"communication_data_type": "fp32", said by yourself',
        )


@rule("CF013")
def flash_attention_in_fp32(r: Record) -> Iterator[Finding]:
    """FlashAttention with fp32 weights and no mixed precision

    **Why it matters.** FlashAttention has fp16 and bf16 kernels only: "FlashAttention only support fp16 and bf16 data type".

    **Example.** `attn_implementation: flash_attention_2` with `dtype: float32` and neither `bf16` nor `fp16`.

    **What to do.** `bf16: true`, or `dtype: bfloat16`, or `attn_implementation: sdpa`.
    """
    f = r.facts
    flash = f.get(
        "model.attn_implementation", "hf.attn_implementation", "hf.model_init_kwargs.attn_implementation", "checkpoint._attn_implementation"
    )
    if flash and "flash" in str(flash.value) and r.value("compute") == "fp32":
        yield error(
            "FlashAttention would get fp32",
            flash,
            r.by("compute"),
            r.by("parameters"),
            cause="the weights are fp32 and no mixed precision is on; FlashAttention takes fp16 and bf16 only",
            fix="bf16: true (mixed precision), or dtype: bfloat16, or attn_implementation: sdpa",
        )
