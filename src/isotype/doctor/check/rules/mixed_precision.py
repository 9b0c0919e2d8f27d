"""Rules about the trainer's half precision and its launcher: which of them wins, and what accelerate and Lightning do with it."""

from __future__ import annotations

from collections.abc import Iterator

from ....dtypes import torch_word
from ....finding import Finding
from ..model_settings import deepspeed_setting, launcher_mode, lightning_precision, mixed_flag
from ..settings import Record, Setting, dtype_of, truth
from .base import ERROR, WARNING, error, found, rule, warning


@rule("CF009")
def two_owners(r: Record) -> Iterator[Finding]:
    """Two owners of mixed precision disagree

    **Why it matters.** The trainer's flag, accelerate's file, the launcher's option and `ACCELERATE_MIXED_PRECISION` all set one
    thing. With HF, a flag
    wins over the launcher (an fp8 launch becomes bf16); without a flag, the launcher decides and the arguments still print `bf16=False`.
    Scripts that ask for the precision themselves ignore the launcher's.

    **Example.** `bf16: false, fp16: false` and `ACCELERATE_MIXED_PRECISION=bf16`.

    **What to do.** Say it once, or the same in both places.
    """
    f = r.facts
    launcher = launcher_mode(f)
    file_mode, env_mode = f.get("accelerate.mixed_precision"), f.get("env.ACCELERATE_MIXED_PRECISION")
    if launcher is None:
        return
    mode = "no" if launcher.value is False else str(launcher.value).lower()
    if mode not in ("no", "fp16", "bf16", "fp8"):
        return
    if r.tool == "hf" and f.has("hf"):
        flag = mixed_flag(f)
        if flag is not None:
            half = "bf16" if "bf16" in flag.key else "fp16"
            if mode not in (half, "no"):
                yield warning(
                    f"the trainer says {half}, the launcher {mode}: mixed precision has two owners",
                    flag,
                    launcher,
                    cause=f"the trainer's flag and accelerate's mixed_precision ({mode}) disagree",
                    fix=f"one source: mixed_precision: {half} in the launcher, or remove {flag.key}",
                    wins=f"the trainer's flag: the run is {half}, not {mode}",
                )
            return
        off = f.off("hf.bf16") or f.off("hf.fp16")
        if mode != "no":
            yield warning(
                f"the arguments say no mixed precision, the launcher {mode}",
                off or launcher,
                launcher,
                cause=f"neither bf16 nor fp16 is set in the training arguments, and {launcher.key} is {mode}",
                fix=f"{mode}: true in the training arguments too"
                if mode != "fp8"
                else "mixed_precision: 'no' in the launcher, or say it in both",
                wins=f"the launcher: the run is {mode}, while the arguments print bf16=False",
            )
    elif r.tool in ("script", "kohya", "simpletuner"):
        own = f.get(f"{r.tool}.mixed_precision")
        said = str(own.value).lower() if own else None
        if (own is None and r.tool == "kohya" and mode != "no") or (said is not None and said != mode and r.tool != "simpletuner"):
            yield warning(
                f"the launcher says {mode}, the script {said or 'nothing'}",
                own or launcher,
                launcher,
                cause=(
                    "the script makes its own Accelerator with its own mixed_precision argument; the launcher's option "
                    "does not reach the weights it loads"
                ),
                fix=f"give both the same: accelerate launch --mixed_precision {mode} SCRIPT --mixed_precision {mode}",
                wins="the script's own argument",
            )
    if env_mode is not None and file_mode is not None and str(env_mode.value) != str(file_mode.value) and not f.has("hf"):
        yield warning(
            f"accelerate's file says {file_mode.value}, the environment {env_mode.value}",
            env_mode,
            file_mode,
            cause="both set mixed precision",
            fix="unset ACCELERATE_MIXED_PRECISION",
            wins="the launcher overwrites the variable with its file's value; a plain python run takes the variable",
        )


_MODES = ("no", "fp16", "bf16", "fp8")


_LIGHTNING_MODES = (
    *("16-mixed", "bf16-mixed", "32-true", "64-true", "16-true", "bf16-true", "transformer-engine", "transformer-engine-float16"),
    *("16", "bf16", "32", "64"),
)


@rule("CF014")
def unknown_mode(r: Record) -> Iterator[Finding]:
    """mixed_precision is a word the tool does not know

    **Why it matters.** fp32 is spelt `no`, words are lower case, and an unquoted `no` in YAML is the boolean false: accelerate
    1.15 fails on it
    with "'bool' object has no attribute 'lower'".

    **Example.** `mixed_precision: no` in accelerate's YAML; `--mixed_precision=fp32` in SimpleTuner; `precision="fp16-mixed"` in Lightning.

    **What to do.** `mixed_precision: 'no'` for fp32, quoted; else `bf16` or `fp16`. Lightning: `bf16-mixed`, `16-mixed`, `bf16-true`.
    """
    f = r.facts
    precision = lightning_precision(f)
    if precision is not None and str(precision.value) not in _LIGHTNING_MODES:
        given = str(precision.value).lower()
        mode = ("16" if "16" in given and "bf" not in given else "bf16") + ("-true" if "true" in given else "-mixed")
        yield error(
            f"{precision.key}: {precision.value} is not a precision of Lightning's",
            precision,
            cause=f"Lightning takes {', '.join(_LIGHTNING_MODES)}; {precision.value} is refused",
            fix=f"{precision.key}: {'32-true' if '32' in given else mode!r}",
            wins="Lightning refuses to start",
        )
    for name in (
        "accelerate.mixed_precision",
        "env.ACCELERATE_MIXED_PRECISION",
        "simpletuner.mixed_precision",
        "kohya.mixed_precision",
        "script.mixed_precision",
    ):
        setting = f.get(name)
        if setting is None:
            continue
        if isinstance(setting.value, bool):
            yield error(
                f"{setting.key} is the boolean {str(setting.value).lower()}",
                setting,
                cause="an unquoted no (or yes) in YAML is a boolean, and accelerate expects a word",
                fix=f"quote it: {setting.key}: 'no'",
                holds="accelerate 1.15",
            )
        elif str(setting.value) not in _MODES and (name.startswith("simpletuner") or str(setting.value).lower() not in _MODES):
            word = str(setting.value)
            meant = dtype_of(word)
            fix = {"fp32": "'no' (that is fp32)", "bf16": "bf16", "fp16": "fp16"}.get(meant or "", "one of 'no', fp16, bf16, fp8")
            yield error(
                f"{setting.key}: {word} is not a mode",
                setting,
                cause=f"the modes are no, fp16, bf16 and fp8, in lower case; {word} is refused",
                fix=f"{setting.key}: {fix}",
                wins="the tool refuses to start",
            )


_PAIRS = (
    ("hf.bf16", "hf.fp16"),
    ("hf.bf16_full_eval", "hf.fp16_full_eval"),
    ("axolotl.bf16", "axolotl.fp16"),
    ("llamafactory.bf16", "llamafactory.fp16"),
    ("llamafactory.pure_bf16", "llamafactory.fp16"),
    ("kohya.full_bf16", "kohya.full_fp16"),
)


def _siblings(r: Record) -> Iterator[tuple[str, Setting, Setting]]:
    """`fp16` and `bf16` both on in the same section, for any tool."""
    for document in r.facts.documents:
        if document.tool in ("env", "versions", "checkpoint", "hardware", "code"):
            continue
        for key, fp16 in document.settings.items():
            prefix, _, last = key.rpartition(".")
            bf16 = document.settings.get(f"{prefix}.bf16" if prefix else "bf16")
            if last == "fp16" and bf16 is not None and truth(fp16.value) is truth(bf16.value) is True:
                yield f"{document.tool}.{key}", fp16, bf16


@rule("CF001")
def both_halves(r: Record) -> Iterator[Finding]:
    """fp16 and bf16 are both on

    **Why it matters.** They exclude each other: bf16 has fp32's range and no loss scaling, fp16 needs it. Most trainers stop with "At most
    one of fp16 and bf16 can be True"; some go on with whichever they look at first.

    **Example.** `{"fp16": true, "bf16": true}`; a DeepSpeed file with both sections enabled; `bf16` for training and `fp16_full_eval`
    for evaluation under DeepSpeed's "auto".

    **What to do.** Keep one: bf16 on Ampere and newer, else fp16.
    """
    f = r.facts
    for one, other in _PAIRS:
        bf16, fp16 = f.on(one), f.on(other)
        if bf16 and fp16:
            silent = "pure_bf16" in one
            yield error(
                f"{fp16.key} and {bf16.key} are both on",
                fp16,
                bf16,
                cause="fp16 and bf16 exclude each other; both cannot be true at once",
                fix=f"keep only one: {bf16.key}: true with {fp16.key}: false where the GPU has bf16, else the reverse",
                wins="there is no error: bf16 weights run under fp16 autocast with a GradScaler"
                if silent
                else "the trainer refuses to start",
            )
    for name, fp16, bf16 in _siblings(r):
        if name not in {fp16_name for _, fp16_name in _PAIRS}:
            yield error(
                f"{fp16.key} and {bf16.key} are both on",
                fp16,
                bf16,
                cause="fp16 and bf16 exclude each other; both cannot be true at once",
                fix="keep only one: bf16 where the GPU has it, else fp16",
                wins="the trainer refuses to start, or takes whichever it looks at first",
            )
    bf16, fp16 = deepspeed_setting(f, "bf16.enabled"), deepspeed_setting(f, "fp16.enabled")
    if bf16 and fp16 and truth(bf16.value) and truth(fp16.value):
        yield error(
            "DeepSpeed's fp16 and bf16 sections are both enabled",
            fp16,
            bf16,
            cause="DeepSpeed: bfloat16 and fp16 modes cannot be enabled at once; both sections are true",
            wins="DeepSpeed refuses to start",
            fix='keep one section enabled, and "enabled": false or "auto" in the other',
        )
    if bf16 and fp16 and str(bf16.value) == str(fp16.value) == "auto":
        for train, evaluate in (("hf.bf16", "hf.fp16_full_eval"), ("hf.fp16", "hf.bf16_full_eval")):
            flag, full = f.on(train), f.on(evaluate)
            if flag and full:
                yield error(
                    f"{flag.key} with {full.key} enables both of DeepSpeed's sections",
                    full,
                    flag,
                    fp16,
                    bf16,
                    cause=(
                        '"auto" takes a section on when either the training or the full_eval flag of that half is set: both '
                        "fp16 and bf16 are on"
                    ),
                    fix=f"evaluate in the same half as training: remove {full.key}",
                    wins="DeepSpeed refuses to start",
                )


@rule("CF003")
def other_half_than_the_weights(r: Record) -> Iterator[Finding]:
    """The weights are one half format and mixed precision the other

    **Why it matters.** `fp16` makes a GradScaler, whose CUDA kernel refuses bf16 gradients; and each cast between the two formats loses
    range (bf16 to fp16) or bits. A checkpoint saved in bf16 is loaded in bf16 unless a dtype is given.

    **Example.** `fp16: true` with `dtype: bfloat16`; a bf16 checkpoint and `fp16: true`.

    **What to do.** `bf16: true, fp16: false`, or load fp32 weights.
    """
    held, compute = r.value("parameters"), r.value("compute")
    trained = r.value("trained")
    if r.tool == "simpletuner" and trained == "bf16" and compute == "fp16":
        return  # CF021 and CF022 say it with SimpleTuner's own reasons
    if held is None or compute is None or {held, compute} != {"bf16", "fp16"}:
        return
    unsloth = any(d.attributes.get("unsloth") for d in r.facts.documents)
    if trained == "bf16" and r.value("loss scaling") == "dynamic":
        yield error(
            "fp16 mixed precision with bf16 weights: its GradScaler cannot unscale bf16 gradients",
            r.by("compute"),
            r.by("trained"),
            cause=(
                "fp16: true makes a GradScaler, and the trained weights are bfloat16: "
                "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'; bf16 needs no "
                "loss scaling"
            ),
            fix="bf16: true, fp16: false; or fp32 weights (dtype: float32) where the GPU has no bf16",
            wins="torch stops at the first optimizer step on CUDA",
        )
    elif held in ("bf16", "fp16") and r.by("parameters") is not None:
        by, compute_by = r.by("parameters"), r.by("compute")
        yield found(
            ERROR if unsloth else WARNING,
            f"{held} weights under {compute} mixed precision",
            compute_by,
            by,
            cause=(f"the weights are {held} and every product casts them to {compute}: range or bits are lost at each cast")
            + (", and Unsloth refuses the pair" if unsloth else ""),
            fix=f"match them: {held}: true in place of {compute}: true, or load with dtype {torch_word(compute)}",
            wins="Unsloth stops with a TypeError" if unsloth else "autocast casts the weights in every forward",
        )


@rule("CF059")
def fp8_without_a_library(r: Record) -> Iterator[Finding]:
    """fp8 and no library for it

    **Why it matters.** accelerate needs TransformerEngine, torchao or MS-AMP: "Using `fp8` precision requires
    `transformer_engine` or `MS-AMP`".

    **Example.** `mixed_precision: fp8`, and none of them in requirements.txt.

    **What to do.** Install one, or bf16.
    """
    launcher = launcher_mode(r.facts)
    versions = r.facts.tool("versions")
    if launcher is None or str(launcher.value).lower() != "fp8" or versions is None:
        return
    if not {"transformer-engine", "transformer_engine", "torchao", "msamp", "ms-amp"} & set(versions.attributes.get("names", ())):
        yield error(
            "fp8 without TransformerEngine, torchao or MS-AMP",
            launcher,
            cause=f"{versions.file} lists none of the libraries that fp8 needs",
            fix="pip install transformer-engine[pytorch] (or torchao), or mixed_precision: bf16",
            wins="accelerate stops",
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
        yield error(
            "precision and a precision plugin are both given",
            precision,
            plugins,
            cause="both decide the precision",
            fix="keep one: precision, or the plugin",
            wins="Lightning stops",
        )
    quantize = r.facts.get("lightning.quantize")
    if precision and quantize and str(quantize.value).startswith("bnb.") and "mixed" in str(precision.value):
        yield error(
            f"quantize: {quantize.value} with precision: {precision.value}",
            precision,
            quantize,
            cause=f"{quantize.value} computes in the one dtype of a -true precision; a mixed one is refused",
            fix=f"precision: {str(precision.value).replace('mixed', 'true')}, or no quantisation",
            wins="litgpt stops with a ValueError",
        )
