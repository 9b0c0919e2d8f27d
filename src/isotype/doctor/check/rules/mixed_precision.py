"""Rules about the mode of mixed precision: two owners that disagree, and words that a tool does not know."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..model_settings import launcher_mode, lightning_precision, mixed_flag
from ..record import Record
from ..settings import dtype_of
from .base import error, rule, warning


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
