"""Rules about SimpleTuner, known for its main branch of 2026-08 unless a rule says otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..record import Record
from ..sharded import uses_deepspeed
from .base import ERROR, NOTE, WARNING, error, found, rule, warning


def _quantised(r: Record) -> bool:
    return r.facts.word("simpletuner.base_model_precision") not in ("", "no_change")


@rule("CF020")
def gradient_precision(r: Record) -> Iterator[Finding]:
    """gradient_precision=fp32 beside bf16 weights

    **Why it matters.** SimpleTuner once re-typed `param.grad` to fp32 after each backward. Beside bf16 weights the next
    accumulation fails ("Expected
    BFloat16, got Float" under DDP), or the optimizer does ("expected dtype c10::BFloat16 for `end`"). Since 2024-10 the option
    is accepted and ignored: no optimizer declares fp32 gradients, so it is reset to `unmodified` without a word.

    **Example.** `MIXED_PRECISION="bf16"` and `TRAINER_EXTRA_ARGS="--gradient_precision=fp32"`.

    **What to do.** Remove it, or `--gradient_precision=unmodified`. Meant seriously (bf16 weights, gradients accumulated in fp32)
    it is an Isotype
    setting: `precision: {preset: bf16-pure, grads: fp32}`.
    """
    f = r.facts
    setting = f.get("simpletuner.gradient_precision")
    if setting is not None and str(setting.value).lower() in ("fp32", "float32"):
        mixed, steps, optimizer = f.get("simpletuner.mixed_precision"), r.accumulates, f.get("simpletuner.optimizer")
        prodigy = optimizer is not None and "prodigy" in str(optimizer.value).lower()
        yield error(
            "gradient_precision=fp32 is not what this run will have",
            setting,
            mixed,
            optimizer,
            steps,
            cause=(
                ("Prodigy refuses fp32 gradients (older versions stop at the start). " if prodigy else "")
                + f"gradient_precision=fp32 asks for fp32 gradients of {r.value('trained') or 'bf16'} weights: older "
                'versions re-typed .grad and failed at the next accumulation ("Expected BFloat16, got Float"), '
                "newer ones ignore it, so gradients accumulate in bf16"
            ),
            fix=(
                "remove --gradient_precision=fp32, or set it to unmodified; if bf16 weights with fp32 gradients are "
                "meant, Isotype has it: precision: {preset: bf16-pure, grads: fp32}"
            ),
            wins="unmodified: gradients have the weights' dtype",
            holds="SimpleTuner; an error before 2024-10-05, silent since",
        )


@rule("CF021")
def bf16_optimizer_without_bf16(r: Record) -> Iterator[Finding]:
    """adamw_bf16 without mixed_precision=bf16

    **Why it matters.** `adamw_bf16` (the default optimizer) makes the trained weights bf16. With `mixed_precision=no` an fp32 run
    was asked for; with
    `fp16` bf16 weights run under fp16 autocast and a GradScaler. The check that refused this is dead code since 2025-09; older versions
    say "requesting an incompatible dtype and optimizer combination".

    **Example.** `OPTIMIZER="adamw_bf16"` and `MIXED_PRECISION="fp16"`.

    **What to do.** `MIXED_PRECISION="bf16"`, or an optimizer for fp32 weights (`optimi-adamw`).
    """
    f = r.facts
    if not f.has("simpletuner"):
        return
    optimizer, mixed = f.get("simpletuner.optimizer"), f.get("simpletuner.mixed_precision")
    name, mode = (str(optimizer.value).lower() if optimizer else "adamw_bf16"), (str(mixed.value) if mixed else "bf16")
    if name in ("adam_bfloat16", "adamw_bfloat16") or f.on("simpletuner.adam_bfloat16"):
        yield error(
            f"optimizer {name} is no longer known",
            optimizer or f.on("simpletuner.adam_bfloat16"),
            mixed,
            cause=f"{name} was renamed, and needs mixed_precision=bf16 (it is {mode})",
            fix="optimizer=adamw_bf16 with mixed_precision=bf16",
            wins="SimpleTuner refuses to start",
        )
    elif name == "adamw_bf16" and mode in ("no", "fp16") and not (_quantised(r) and mode == "no"):
        yield found(
            ERROR if mode == "fp16" else WARNING,
            f"{mixed.key if mixed else 'mixed_precision'}={mode} with the optimizer adamw_bf16",
            mixed,
            optimizer,
            cause="adamw_bf16 trains bf16 weights: "
            + (
                "they meet fp16 autocast and a GradScaler (an incompatible dtype and optimizer combination)"
                if mode == "fp16"
                else "the fp32 run that MIXED_PRECISION=no asks for is bf16"
            ),
            fix=(f"{mixed.key if mixed else 'mixed_precision'}=bf16, or an optimizer for fp32 weights: optimizer=optimi-adamw"),
            wins="the optimizer: the trained weights become bf16" + ("" if optimizer else " (adamw_bf16 is the default)"),
        )


@rule("CF022")
def quantised_base_decides(r: Record) -> Iterator[Finding]:
    """A quantised base makes the weights bf16, whatever mixed_precision says

    **Why it matters.** With `base_model_precision` set, `base_model_default_dtype` (bf16 unless given) decides the weight dtype:
    `mixed_precision=no`
    is not an fp32 run, and `fp16` is bf16 weights under fp16 autocast with a GradScaler.

    **Example.** `mixed_precision=fp16`, `base_model_precision=int8-quanto`, LoRA.

    **What to do.** `mixed_precision=bf16`, or `base_model_default_dtype=fp32`, said.
    """
    f = r.facts
    mixed, base = f.get("simpletuner.mixed_precision"), f.get("simpletuner.base_model_precision")
    default = f.get("simpletuner.base_model_default_dtype")
    if mixed is None or base is None or not _quantised(r) or str(mixed.value) not in ("no", "fp16"):
        return
    if default is not None and str(default.value) == "fp32":
        if f.word("simpletuner.optimizer") == "adamw_bf16":
            yield warning(
                "adamw_bf16 with base_model_default_dtype=fp32 is replaced",
                f.get("simpletuner.optimizer"),
                default,
                cause="fp32 trained weights do not go with adamw_bf16; SimpleTuner logs it and takes optimi-adamw",
                fix="optimizer=optimi-adamw, or base_model_default_dtype=bf16",
                wins="optimi-adamw",
            )
        return
    if r.adapter is not False:
        yield warning(
            f"mixed_precision={mixed.value} with a quantised base trains bf16 weights",
            mixed,
            base,
            default,
            cause="for a quantised base, base_model_default_dtype (bf16 unless given) decides the weight dtype"
            + ("; bf16 weights then run under fp16 autocast with a GradScaler" if str(mixed.value) == "fp16" else ""),
            fix="mixed_precision=bf16, or base_model_default_dtype=fp32",
            wins="bf16 weights",
        )


@rule("CF023")
def fp8_with_quantised_base(r: Record) -> Iterator[Finding]:
    """mixed_precision=fp8 with a base quantised otherwise

    **Why it matters.** SimpleTuner refuses fp8 mixed precision with a quantised base, unless it is `fp8-torchao`.

    **Example.** `mixed_precision=fp8`, `base_model_precision=int8-quanto`.

    **What to do.** `mixed_precision=bf16`, or `base_model_precision=fp8-torchao`.
    """
    f = r.facts
    mixed, base = f.get("simpletuner.mixed_precision"), f.get("simpletuner.base_model_precision")
    if mixed is not None and base is not None and str(mixed.value) == "fp8" and _quantised(r) and str(base.value) != "fp8-torchao":
        yield error(
            f"mixed_precision=fp8 with base_model_precision={base.value}",
            mixed,
            base,
            cause="fp8 training cannot use a quantized base model, except fp8-torchao",
            fix="mixed_precision=bf16, or base_model_precision=fp8-torchao",
            wins="SimpleTuner refuses to start",
        )


_NO_FP8_QUANTO = {
    "sdxl", "sd3", "wan", "hidream", "pixart", "pixart_sigma", "auraflow", "ltxvideo", "sd1x", "cosmos", "kolors", "deepfloyd", "sanavideo",
    "cosmos3", "sana", "wan_s2v",
}  # fmt: skip


@rule("CF024")
def quantisation_not_supported(r: Record) -> Iterator[Finding]:
    """A quantisation that this family, or this sharding, does not take

    **Why it matters.** Several model families refuse `fp8-quanto`; quanto kernels have no strategies for FSDP2's sharded parameters;
    SageAttention refuses nf4.

    **Example.** `model_family=sdxl`, `base_model_precision=fp8-quanto`.

    **What to do.** `fp8-torchao` or `int8-quanto`; torchao or bitsandbytes under FSDP2.
    """
    f = r.facts
    base, family = f.get("simpletuner.base_model_precision"), f.get("simpletuner.model_family")
    if base is not None and str(base.value) == "fp8-quanto" and family is not None and str(family.value).lower() in _NO_FP8_QUANTO:
        yield error(
            f"{family.value} does not support fp8-quanto",
            base,
            family,
            cause="this model family refuses fp8-quanto",
            fix="base_model_precision=fp8-torchao or int8-quanto",
            wins="SimpleTuner refuses to start",
        )
    quanto = next((s for name, s in f.all("simpletuner") if name.endswith("_precision") and "quanto" in str(s.value)), None)
    fsdp, version = f.on("simpletuner.fsdp_enable"), f.get("simpletuner.fsdp_version")
    if quanto is not None and fsdp is not None and version is not None and str(version.value) == "2":
        yield error(
            "quanto under FSDP2",
            quanto,
            version,
            fsdp,
            cause="FSDP2 shards parameters as DTensors, for which quanto's kernels have no sharding strategy",
            fix="int8-torchao or bitsandbytes, or no FSDP",
            wins="SimpleTuner refuses to start",
        )
    attention = f.get("simpletuner.attention_mechanism")
    if attention is not None and "sageattention" in str(attention.value).lower() and base is not None and "nf4" in str(base.value):
        yield error(
            "SageAttention with an nf4 base",
            attention,
            base,
            cause="SageAttention does not support nf4 bases",
            fix="int8 or fp8 for base_model_precision, or attention_mechanism=diffusers",
            wins="SimpleTuner exits",
        )


@rule("CF025")
def lora_with_deepspeed(r: Record) -> Iterator[Finding]:
    """SimpleTuner does not train LoRA under DeepSpeed

    **Why it matters.** It exits with "LoRA can not be trained with DeepSpeed", and takes gradient accumulation from DeepSpeed's
    file in silence.

    **Example.** `model_type=lora` with an accelerate configuration of `distributed_type: DEEPSPEED`.

    **What to do.** FSDP2, or plain DDP.
    """
    deepspeed = uses_deepspeed(r.facts)
    if r.tool == "simpletuner" and r.adapter and deepspeed is not None:
        yield error(
            "LoRA under DeepSpeed",
            r.adapter_by,
            deepspeed,
            cause="SimpleTuner refuses to train LoRA with DeepSpeed",
            fix="distributed_type: MULTI_GPU (DDP) or FSDP2",
            wins="SimpleTuner exits",
        )


@rule("CF026")
def vae_dtype(r: Record) -> Iterator[Finding]:
    """vae_dtype that is refused or overwritten

    **Why it matters.** `fp16` is offered and refused later, when the VAE is moved (the message names SDXL for every family).
    Sana's VAE is always fp32.

    **Example.** `vae_dtype=fp16`.

    **What to do.** `bf16`, or `fp32` (and `fp32` for Sana).
    """
    f = r.facts
    vae = f.get("simpletuner.vae_dtype")
    if vae is None:
        return
    if str(vae.value) == "fp16":
        yield error(
            "vae_dtype=fp16 is refused when the VAE is loaded",
            vae,
            cause="SimpleTuner accepts fp16 for vae_dtype and stops later: the VAE overflows in fp16",
            fix="vae_dtype=bf16 or fp32",
            wins="SimpleTuner stops at the VAE",
        )
    elif f.word("simpletuner.model_family") == "sana" and str(vae.value) not in ("fp32", "default"):
        yield warning(
            f"vae_dtype={vae.value} is overwritten for Sana",
            vae,
            f.get("simpletuner.model_family"),
            cause="Sana's VAE runs in fp32 whatever is set",
            fix="vae_dtype=fp32",
            wins="fp32",
        )


@rule("CF027")
def variable_without_effect(r: Record) -> Iterator[Finding]:
    """PURE_BF16 in config.env has no effect

    **Why it matters.** The bash launcher that read it is gone, and SimpleTuner's own reader does not map it.

    **Example.** `export PURE_BF16=true`.

    **What to do.** `OPTIMIZER="adamw_bf16"` with `MIXED_PRECISION="bf16"` is what it meant.
    """
    pure, mixed = r.facts.on("simpletuner.variable.PURE_BF16"), r.facts.get("simpletuner.mixed_precision")
    if pure is None:
        return
    trains_bf16 = r.value("trained") == "bf16" or (mixed is not None and str(mixed.value) in ("bf16", "fp16"))
    yield found(
        NOTE if trains_bf16 else WARNING,
        "PURE_BF16 has no effect",
        pure,
        mixed,
        cause="no current reader of config.env maps PURE_BF16 to an argument",
        fix="remove it; pure bf16 is OPTIMIZER=adamw_bf16 with MIXED_PRECISION=bf16",
        wins="mixed_precision and optimizer",
    )


@rule("CF028")
def stable_cascade(r: Record) -> Iterator[Finding]:
    """Stable Cascade's stage C needs fp32

    **Why it matters.** SimpleTuner requires `mixed_precision=no` for it, and ignores `base_model_precision`.

    **Example.** `model_family=stable_cascade`, `mixed_precision=bf16`.

    **What to do.** `mixed_precision=no`.
    """
    f = r.facts
    mixed = f.get("simpletuner.mixed_precision")
    if (
        f.word("simpletuner.model_family") == "stable_cascade"
        and (mixed is None or str(mixed.value) not in ("no", "fp32"))
        and not f.on("simpletuner.i_know_what_i_am_doing")
    ):
        yield error(
            "Stable Cascade stage C requires mixed_precision=no",
            mixed or f.get("simpletuner.model_family"),
            f.get("simpletuner.model_family"),
            cause="stage C is only trained in fp32",
            fix="mixed_precision=no",
            wins="SimpleTuner refuses to start",
        )


@rule("CF029")
def env_read_two_ways(r: Record) -> Iterator[Finding]:
    """config.env means one thing to the shell and another to SimpleTuner

    **Why it matters.** SimpleTuner reads the file itself, line by line: it does not expand `${NAME}`, keeps a trailing comment as
    part of the value, and joins no
    continued lines. What is valid shell can be refused, or silently differ.

    **Example.** `TRAINER_EXTRA_ARGS="${TRAINER_EXTRA_ARGS} --gradient_precision=unmodified"`.

    **What to do.** Write plain values, one a line, comments on their own lines; `TRAINER_EXTRA_ARGS+=" --flag"` to append.
    """
    for document in r.facts.documents:
        for name, (shell_value, own_value, _line) in document.attributes.get("own", {}).items():
            setting = document.settings.get(f"variable.{name}")
            yield warning(
                f"{name}: the shell reads {shell_value!r}, SimpleTuner {own_value!r}",
                setting,
                cause="SimpleTuner's own reader expands no variables, keeps trailing comments and joins no lines",
                fix=f'write the value out on one line: {name}="{shell_value}"',
                wins="SimpleTuner's reader, unless the file is sourced first",
            )
