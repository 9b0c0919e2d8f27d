"""Rules about torchtune, torchtitan, Lightning and kohya's scripts."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..model_settings import lightning_precision
from ..record import Record
from ..settings import dtype_of
from .base import ERROR, NOTE, WARNING, found, rule


@rule("CF090")
def torchtune_fp16(r: Record) -> Iterator[Finding]:
    """torchtune does not train in fp16

    **Why it matters.** Its recipes stop: "fp16 precision is not supported in this recipe".

    **Example.** `dtype: fp16`.

    **What to do.** `dtype: bf16`, or `fp32`.
    """
    dtype = r.facts.get("torchtune.dtype")
    if dtype and dtype_of(dtype.value) == "fp16":
        yield found(
            "CF090",
            ERROR,
            "torchtune does not train in fp16",
            dtype,
            cause="full fp16 training is not supported by its recipes: there is no loss scaling",
            fix="dtype: bf16 (or fp32)",
            wins="the recipe stops",
        )


@rule("CF091")
def torchtitan_reduce(r: Record) -> Iterator[Finding]:
    """mixed_precision_reduce other than float32

    **Why it matters.** Older torchtitan takes `float32` only; newer takes bfloat16, which rounds gradients before the sum. A note.

    **Example.** `mixed_precision_reduce = "bfloat16"`.

    **What to do.** `"float32"`.
    """
    reduce = r.facts.get("torchtitan.training.mixed_precision_reduce")
    if reduce and dtype_of(reduce.value) != "fp32":
        yield found(
            "CF091",
            WARNING,
            f"mixed_precision_reduce is {reduce.value}",
            reduce,
            cause="releases before 2026 refuse it, and gradients are rounded before they are summed across ranks",
            fix='mixed_precision_reduce = "float32"',
        )


@rule("CF097")
def torchtitan_words(r: Record) -> Iterator[Finding]:
    """A dtype that torchtitan does not take

    **Why it matters.** Its mixed precision and its training dtype are bfloat16 or float32: there is no loss scaling for float16.

    **Example.** `mixed_precision_param = "float16"`.

    **What to do.** `"bfloat16"`.
    """
    for key in ("mixed_precision_param", "dtype"):
        setting = r.facts.get(f"torchtitan.training.{key}")
        if setting and dtype_of(setting.value) == "fp16":
            yield found(
                "CF097",
                ERROR,
                f"{key} is {setting.value}: torchtitan takes bfloat16 and float32",
                setting,
                cause="float16 needs a loss scale, and torchtitan has none",
                fix=f'{key} = "{"bfloat16" if key == "mixed_precision_param" else "float32"}"',
                wins="torchtitan refuses to start",
            )


@rule("CF092")
def lightning_alias(r: Record) -> Iterator[Finding]:
    """precision: 16 and bf16 are aliases

    **Why it matters.** They mean 16-mixed and bf16-mixed, not the -true modes. A note.

    **Example.** `precision: bf16`.

    **What to do.** Write `bf16-mixed`.
    """
    precision = lightning_precision(r.facts)
    if precision and str(precision.value) in ("16", "bf16"):
        yield found(
            "CF092",
            NOTE,
            f"precision: {precision.value} means {precision.value}-mixed",
            precision,
            cause="the short form is an alias of the mixed mode",
            fix=f"precision: {precision.value}-mixed",
            wins=f"{precision.value}-mixed",
        )


@rule("CF093")
def lightning_two_precisions(r: Record) -> Iterator[Finding]:
    """precision and a precision plugin

    **Why it matters.** Lightning stops: "Received both `precision=...` and `plugins=...`". litgpt's `quantize: bnb...` is such a plugin: it
    takes its dtype from a -true precision and refuses a mixed one ("Quantization and mixed precision is not supported").

    **Example.** `Trainer(precision="bf16-mixed", plugins=[MixedPrecision(...)])`; `quantize: bnb.nf4` with `precision: bf16-mixed`.

    **What to do.** Keep one; with `quantize`, `bf16-true`.
    """
    precision = lightning_precision(r.facts)
    plugins = next(
        (
            s
            for name, s in r.facts.all("lightning")
            if "plugins" in name.split(".") and "precision" in f"{s.value}{name}".lower().replace("trainer.precision", "")
        ),
        None,
    )
    if precision and plugins:
        yield found(
            "CF093",
            ERROR,
            "precision and a precision plugin are both given",
            precision,
            plugins,
            cause="both decide the precision",
            fix="keep one: precision, or the plugin",
            wins="Lightning stops",
        )
    quantize = r.facts.get("lightning.quantize")
    if precision and quantize and str(quantize.value).startswith("bnb.") and "mixed" in str(precision.value):
        yield found(
            "CF093",
            ERROR,
            f"quantize: {quantize.value} with precision: {precision.value}",
            precision,
            quantize,
            cause=f"{quantize.value} computes in the one dtype of a -true precision; a mixed one is refused",
            fix=f"precision: {str(precision.value).replace('mixed', 'true')}, or no quantisation",
            wins="litgpt stops with a ValueError",
        )


@rule("CF094")
def kohya_full_precision(r: Record) -> Iterator[Finding]:
    """full_bf16, full_fp16 or fp8_base without its mixed_precision

    **Why it matters.** kohya-style scripts assert: "full_bf16 requires mixed precision='bf16'".

    **Example.** `full_bf16 = true`, `mixed_precision = "fp16"`.

    **What to do.** The same half for both.
    """
    f = r.facts
    if not f.has("kohya"):
        return
    mixed = f.get("kohya.mixed_precision")
    mode = str(mixed.value).lower() if mixed else "no"
    for half in ("bf16", "fp16"):
        full = f.on(f"kohya.full_{half}")
        if full and mode != half:
            yield found(
                "CF094",
                ERROR,
                f"{full.key} with mixed_precision {mode}",
                full,
                mixed,
                cause=f"full_{half} casts what is trained to {half} and requires mixed_precision='{half}'; it is {mode}",
                fix=f"mixed_precision={half}, or remove {full.key}",
                wins="the script stops at an assertion",
            )
    fp8 = f.on("kohya.fp8_base", "kohya.fp8_base_unet")
    if fp8 and mode == "no":
        yield found(
            "CF094",
            ERROR,
            f"{fp8.key} without mixed precision",
            fp8,
            mixed,
            cause="fp8 weights need mixed_precision fp16 or bf16 to compute in",
            fix="mixed_precision=bf16",
            wins="the script stops at an assertion",
        )


@rule("CF095")
def versions(r: Record) -> Iterator[Finding]:
    """Installed versions with known dtype faults

    **Why it matters.** Some faults belong to a version, not to a setting: DeepSpeed 0.7.6 to 0.8.0 has two checks of the
    accumulation dtype that contradict each
    other; torch 2.1 assigns gradients of the wrong dtype under FSDP; bitsandbytes on a CPU with AVX512-BF16 repacks 4-bit weights
    in place in an
    evaluation, and later LoRA gradients are wrong; Triton 3.9's CPU interpreter computes bf16 on raw bits.

    **Example.** `deepspeed==0.8.0` in requirements.txt with a bf16 ZeRO configuration.

    **What to do.** The command in the finding.
    """
    from ..sharded import deepspeed_setting, uses_deepspeed, uses_fsdp
    from ..versions import release

    f = r.facts

    def pinned(name: str) -> tuple[int, ...]:
        return release(str(f.value(f"versions.{name}", default="")))

    deepspeed = f.get("versions.deepspeed")
    if deepspeed and (0, 7, 6) <= pinned("deepspeed") <= (0, 8, 0) and (uses_deepspeed(f) or r.value("compute") == "bf16"):
        yield found(
            "CF095",
            ERROR,
            f"{deepspeed.key} contradicts itself about bf16 accumulation",
            deepspeed,
            deepspeed_setting(f, "bf16.enabled") or r.by("compute"),
            cause="its ZeRO check and its bf16 optimizer ask for different gradient accumulation data types",
            fix='pip install "deepspeed>=0.8.1"',
        )
    torch = f.get("versions.torch")
    if torch and pinned("torch")[:2] == (2, 1) and uses_fsdp(f):
        yield found(
            "CF095",
            WARNING,
            f"{torch.key} assigns gradients of the wrong dtype under FSDP",
            torch,
            uses_fsdp(f),
            cause='torch 2.1: "attempting to assign a gradient with dtype" under FSDP with compile',
            fix='pip install "torch>=2.2"',
        )
    bnb = f.get("versions.bitsandbytes")
    if bnb and r.quantised == 4 and r.device is not None and r.device.kind == "cpu" and pinned("bitsandbytes") <= (0, 50, 2):
        yield found(
            "CF095",
            WARNING,
            f"{bnb.key} trains 4-bit weights wrongly on a CPU after an evaluation",
            bnb,
            r.quantised_by,
            cause="an evaluation repacks Linear4bit in place on CPUs with AVX512-BF16, and later LoRA gradients are wrong (cosine 0.24)",
            fix="for each Linear4bit: module.support_avx512bf16_for_cpu = False",
        )
    triton = f.get("versions.triton")
    if triton and pinned("triton")[:2] == (3, 9) and f.on("env.TRITON_INTERPRET"):
        yield found(
            "CF095",
            WARNING,
            f"{triton.key}: the CPU interpreter is wrong for bf16",
            triton,
            f.on("env.TRITON_INTERPRET"),
            cause="it truncates fp32 to bf16 and computes bf16 sums and products on raw bits",
            fix="test bf16 kernels on a GPU, or in fp32: unset TRITON_INTERPRET",
        )
