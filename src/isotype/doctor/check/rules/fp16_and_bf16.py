"""Rules about the two half formats: both on, one for the weights and one for the products, and the loss scaling that only fp16 wants."""

from __future__ import annotations

from collections.abc import Iterator

from ....dtypes import torch_word
from ....finding import Finding
from ..record import Record
from ..settings import Setting, truth
from ..sharded import deepspeed_setting
from .base import ERROR, WARNING, error, found, rule

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
