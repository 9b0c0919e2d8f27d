"""Rules over the record: two settings that exclude each other, whatever tool they belong to."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..record import BNB, Record, deepspeed_setting, launcher_mode, lightning_precision, mixed_flag, uses_deepspeed
from ..settings import dtype_of, truth
from .base import ERROR, NOTE, WARNING, found, rule

_PAIRS = (
    ("hf.bf16", "hf.fp16"),
    ("hf.bf16_full_eval", "hf.fp16_full_eval"),
    ("axolotl.bf16", "axolotl.fp16"),
    ("llamafactory.bf16", "llamafactory.fp16"),
    ("llamafactory.pure_bf16", "llamafactory.fp16"),
    ("kohya.full_bf16", "kohya.full_fp16"),
)


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
            yield found(
                "CF001",
                ERROR,
                f"{fp16.key} and {bf16.key} are both on",
                fp16,
                bf16,
                cause="fp16 and bf16 exclude each other; both cannot be true at once",
                fix=f"keep only one: {bf16.key}: true with {fp16.key}: false where the GPU has bf16, else the reverse",
                wins="nobody notices: bf16 weights run under fp16 autocast with a GradScaler" if silent else "the trainer refuses to start",
            )
    bf16, fp16 = deepspeed_setting(f, "bf16.enabled"), deepspeed_setting(f, "fp16.enabled")
    if bf16 and fp16 and truth(bf16.value) and truth(fp16.value):
        yield found(
            "CF001",
            ERROR,
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
                yield found(
                    "CF001",
                    ERROR,
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


@rule("CF002")
def fp16_weights_trained(r: Record) -> Iterator[Finding]:
    """fp16 weights are trained under a GradScaler

    **Why it matters.** Loss scaling needs gradients that are wider than fp16 to unscale into. With fp16 weights the gradients are fp16, and
    torch stops at the first step: "Attempting to unscale FP16 gradients".

    **Example.** `fp16: true` with `dtype: float16` and no adapter; SimpleTuner with `mixed_precision=fp16`.

    **What to do.** Load in float32 (fp16 stays for the products), or train in bf16, or train an adapter.
    """
    if r.value("trained") == "fp16" and r.value("loss scaling") == "dynamic" and not uses_deepspeed(r.facts):
        by, scaler = r.by("trained"), r.by("loss scaling")
        yield found(
            "CF002",
            ERROR,
            "fp16 weights are trained with fp16 mixed precision: its GradScaler cannot unscale fp16 gradients",
            by,
            scaler,
            r.adapter_by,
            cause=(
                "fp16 makes a GradScaler; the weights that are trained are float16, so their gradients are too: "
                '"Attempting to unscale FP16 gradients"'
            ),
            fix=(
                "load the weights in float32 (dtype: float32), or use bf16 (bf16: true, fp16: false), or train a "
                "LoRA adapter, which is fp32"
            ),
            wins="torch stops at the first optimizer step",
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
    if {held, compute} != {"bf16", "fp16"}:
        return
    unsloth = any(d.attributes.get("unsloth") for d in r.facts.documents)
    if trained == "bf16" and r.value("loss scaling") == "dynamic":
        yield found(
            "CF003",
            ERROR,
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
            "CF003",
            ERROR if unsloth else WARNING,
            f"{held} weights under {compute} mixed precision",
            compute_by,
            by,
            cause=(f"the weights are {held} and every product casts them to {compute}: range or bits are lost at each cast")
            + (", and Unsloth refuses the pair" if unsloth else ""),
            fix=(
                f"match them: {held}: true in place of {compute}: true, or load with dtype {'bfloat16' if compute == 'bf16' else 'float16'}"
            ),
            wins="Unsloth stops with a TypeError" if unsloth else "autocast casts the weights in every forward",
        )


# An update of Adam is about the learning rate; a bf16 weight of 0.02 has steps of 2^-8 * 0.02, and less than half of one rounds away.
_LOST_BELOW = 2**-9 * 0.02


@rule("CF004")
def updates_round_away(r: Record) -> Iterator[Finding]:
    """Updates of bf16 weights round away

    **Why it matters.** A bf16 weight has 8 significant bits. AdamW moved bf16 weights 0.3% / 2.2% / 22.7% of what it should at learning
    rate 1e-5 / 1e-4 / 1e-3; norm weights (1.0) never moved. Nothing is printed. A typical weight is 0.02: below a learning rate of about
    4e-5 most updates are under half a bf16 step. It is a warning there, else a note.

    **Example.** `bf16: true` with a bf16 checkpoint and full fine-tuning at 1e-5: transformers 5 loads the checkpoint's own dtype,
    so there is no fp32 master copy.

    **What to do.** Load fp32 weights (`dtype: float32`; bf16 stays for the products), or use stochastic rounding or an optimizer with fp32
    masters, or train an adapter. In Isotype: `precision: {preset: bf16-mixed}`, or `bf16-pure`.
    """
    if r.value("trained") != "bf16" or r.value("optimizer") not in ("bf16", None) or not r.full or r.tool in ("simpletuner", "isotype"):
        return
    if r.value("loss scaling") == "dynamic" or uses_deepspeed(r.facts):
        return
    f = r.facts
    optimizer = f.word("hf.optim", "axolotl.optimizer", "torchtune.optimizer._component_", "kohya.optimizer_type", "llamafactory.optim")
    if any(w in optimizer for w in ("stochastic", "kahan", "adafactor", "lomo", "came", "anyprecision", "optimi", "ao_")) or f.on(
        "llamafactory.use_galore", "llamafactory.use_badam", "llamafactory.use_apollo"
    ):
        return
    by, rate = r.by("trained"), r.learning_rate
    definite = by is not None and (truth(by.value) is True or dtype_of(by.value) == "bf16")
    if by is None or rate is None or (r.adapter is None and r.tool not in ("hf", "torchtune")):
        return
    low = rate < _LOST_BELOW and definite
    yield found(
        "CF004",
        WARNING if low else NOTE,
        f"bf16 weights without an fp32 master: most updates at learning rate {rate:g} round away"
        if low
        else "bf16 weights without an fp32 master copy",
        by,
        f.get("hf.learning_rate", "axolotl.learning_rate", "llamafactory.learning_rate", "torchtune.optimizer.lr"),
        mixed_flag(f),
        cause=(
            "weights, gradients and Adam's states are all bfloat16; an update smaller than 1/512 of a weight "
            "rounds to nothing (AdamW moved 0.3% of the way at 1e-5)"
        ),
        fix=(
            "load fp32 weights (dtype: float32, with bf16: true for the products), or an optimizer with "
            "stochastic rounding or fp32 masters; Isotype: precision: {preset: bf16-mixed}"
        ),
        wins="the weights' own dtype: bf16 mixed precision does not make fp32 masters",
        holds="transformers >= 5 (dtype defaults to the checkpoint's)" if r.tool == "hf" else None,
    )


@rule("CF005")
def accumulation_in_bf16(r: Record) -> Iterator[Finding]:
    """Gradients are accumulated in bf16

    **Why it matters.** Each addition rounds to 8 bits: the sum is 0.3% off after 4 micro-batches, 0.8% after 64 and 1.5% after 256, where
    fp32 accumulation is 0.02% off. DeepSpeed accumulates in the model's dtype unless told otherwise. From 16 micro-batches on it
    is a warning, below a note.

    **Example.** A DeepSpeed bf16 run with `gradient_accumulation_steps: 64` and no `data_types`.

    **What to do.** `"data_types": {"grad_accum_dtype": "fp32"}` in DeepSpeed; fp32 weights elsewhere; in Isotype `precision:
    {preset: bf16-pure, grads: fp32}`.
    """
    steps = r.accumulates
    if steps is None or r.value("accumulation") not in ("bf16", "fp16"):
        return
    try:
        count = int(float(steps.value))
    except (TypeError, ValueError):
        return
    if count < 2:
        return
    deepspeed = uses_deepspeed(r.facts)
    if r.tool == "simpletuner" and count < 64:
        return
    half = r.value("accumulation")
    yield found(
        "CF005",
        WARNING if count >= 16 else NOTE,
        f"{count} micro-batches are accumulated in {half}",
        steps,
        r.by("trained"),
        cause=(
            f"every addition of a gradient rounds to {half}: about 0.3% off at 4, 0.8% at 64, 1.5% at 256 "
            "micro-batches, against 0.02% in fp32"
        )
        + ("; DeepSpeed's grad_accum_dtype defaults to the model's dtype" if deepspeed else ""),
        fix='"data_types": {"grad_accum_dtype": "fp32"} in the DeepSpeed config'
        if deepspeed
        else ("accumulate in fp32: fp32 trained weights, or fewer micro-batches; Isotype: precision: {preset: bf16-pure, grads: fp32}"),
    )


@rule("CF006")
def reduction_in_half(r: Record) -> Iterator[Finding]:
    """Gradients are reduced across ranks in half precision

    **Why it matters.** Through accelerate and Lightning, FSDP's reduce dtype follows mixed precision unless a policy says
    otherwise: gradients
    are rounded to bf16 before the sum. Divergence is known at 384 GPUs; on a few ranks it is small, so this is a note.

    **Example.** `distributed_type: FSDP` with `mixed_precision: bf16`.

    **What to do.** Pass a policy: `MixedPrecision(param_dtype=bf16, reduce_dtype=float32)`.
    """
    reduction = r.value("reduction")
    policy = (
        r.facts.under("fsdp.mixed_precision_policy")
        or r.facts.under("fsdp.mixed_precision")
        or r.facts.under("accelerate.fsdp_config.mixed_precision_policy")
    )
    if r.tool in ("torchtitan", "torchtune") or policy or reduction not in ("bf16", "fp16"):
        return
    yield found(
        "CF006",
        NOTE,
        f"gradients are reduced across ranks in {reduction}",
        r.by("reduction"),
        r.by("compute"),
        cause="FSDP's reduce dtype follows mixed precision when no policy is given",
        fix="a mixed precision policy with reduce_dtype=torch.float32",
    )


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
        yield found(
            "CF007",
            ERROR,
            f"bf16 was asked for, and {device.name} has none",
            asked or evaluated,
            cause=f"bf16 needs compute capability 8.0 (Ampere) or newer; {device.name} has fp16 only"
            + ("; this configuration class switches bf16 on by default" if default else ""),
            fix="fp16: true with fp32 weights, bf16: false",
            wins="most trainers stop; a few fall back to fp16 in silence",
        )
    tf32 = f.on("hf.tf32", "axolotl.tf32", "llamafactory.tf32")
    if tf32 is not None and not device.tf32:
        yield found(
            "CF007",
            ERROR,
            f"TF32 was asked for, and {device.name} has none",
            tf32,
            cause="TF32 needs an Ampere GPU (compute capability 8.0) or newer",
            fix="remove tf32",
            wins="transformers stops",
        )
    if compute == "fp8" and device.kind == "cuda" and not device.fp8:
        yield found(
            "CF007",
            WARNING,
            f"fp8 on {device.name} becomes fp16",
            by,
            cause="fp8 needs compute capability 8.9; accelerate warns once and takes fp16 with a loss scaler, not bf16",
            fix="mixed_precision: bf16",
            wins="fp16",
        )
    if compute == "fp8" and device.kind != "cuda" and r.tool == "simpletuner":
        yield found(
            "CF007",
            ERROR,
            "fp8 needs CUDA",
            by,
            cause="SimpleTuner refuses mixed_precision=fp8 without a CUDA device",
            fix="mixed_precision=bf16",
        )
    if device.kind == "cpu":
        fp16 = f.on("hf.fp16") or next((s for s in [launcher_mode(f)] if s and str(s.value).lower() == "fp16"), None)
        if fp16 is not None:
            yield found(
                "CF007",
                WARNING,
                "fp16 on a CPU has no effect: the run is fp32",
                fp16,
                cause="accelerate makes neither autocast nor a GradScaler for fp16 on a CPU, and still reports fp16",
                fix="bf16 on a CPU: bf16: true, fp16: false",
                wins="fp32",
            )
        precision = lightning_precision(f)
        if precision is not None and str(precision.value) in ("16", "16-mixed"):
            yield found(
                "CF007",
                WARNING,
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
        yield found(
            "CF007",
            NOTE,
            "on ROCm accelerate sets communication_data_type to fp32",
            by,
            cause="bf16 overflow in collectives can corrupt weights there",
            fix='"communication_data_type": "fp32", said by yourself',
        )


@rule("CF008")
def quantised_without_adapter(r: Record) -> Iterator[Finding]:
    """A quantised base and nothing to train

    **Why it matters.** Quantised weights take no gradient: "You cannot perform fine-tuning on purely quantized models".

    **Example.** `load_in_4bit: true` with `adapter: null`, or LLaMA-Factory's `quantization_bit: 4` with `finetuning_type: full`.

    **What to do.** Attach LoRA, or load without quantisation.
    """
    if r.quantised and r.adapter is False:
        yield found(
            "CF008",
            ERROR,
            "the base is quantised and there is no adapter to train",
            r.quantised_by,
            r.adapter_by,
            cause=f"{r.quantised}-bit weights take no gradient, and no adapter is attached",
            fix=("attach an adapter (adapter: lora or qlora, finetuning_type: lora, LoraConfig), or remove the quantisation"),
            wins="the trainer stops",
        )


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
                yield found(
                    "CF009",
                    WARNING,
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
            yield found(
                "CF009",
                WARNING,
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
            yield found(
                "CF009",
                WARNING,
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
        yield found(
            "CF009",
            WARNING,
            f"accelerate's file says {file_mode.value}, the environment {env_mode.value}",
            env_mode,
            file_mode,
            cause="both set mixed precision",
            fix="unset ACCELERATE_MIXED_PRECISION",
            wins="the launcher overwrites the variable with its file's value; a plain python run takes the variable",
        )


@rule("CF010")
def quantised_compute_dtype(r: Record) -> Iterator[Finding]:
    """The dtype that 4-bit weights compute in is not the run's

    **Why it matters.** Quantised layers return their compute dtype; the layers beside them and the kernels of several trainers
    expect the model's:
    "expected scalar type Half but found Float". With fp32 it is also slow. The library's default is fp32.

    **Example.** `bnb_4bit_compute_dtype: float32` with `dtype: float16` and `fp16: true`.

    **What to do.** The same dtype for `bnb_4bit_compute_dtype`, `dtype` and mixed precision.
    """
    f = r.facts
    setting = f.get(
        f"model.{BNB}.bnb_4bit_compute_dtype",
        "hf.bnb_4bit_compute_dtype",
        f"hf.model_init_kwargs.{BNB}.bnb_4bit_compute_dtype",
        f"hf.{BNB}.bnb_4bit_compute_dtype",
    )
    if setting is None or r.quantised is None:
        return
    own, run = dtype_of(setting.value), r.value("compute")
    weights = r.value("parameters")
    if own is None or str(setting.value).startswith("torch."):
        own = dtype_of(str(setting.value))
    other = next((d for d in (run, weights) if d in ("bf16", "fp16") and d != own), None)
    if own and other:
        against = r.by("compute") if other == run else r.by("parameters")
        yield found(
            "CF010",
            ERROR if {own, other} == {"fp16", "bf16"} or own == "fp32" else WARNING,
            f"bnb_4bit_compute_dtype is {own}, the run is {other}",
            setting,
            r.by("parameters"),
            against,
            cause=(
                f"4-bit layers compute and return {own} while the rest of the model is {other}: the dtype of "
                "bnb_4bit_compute_dtype and the model's dtype must match (\"expected scalar type Half but found "
                'Float")'
            ),
            fix=(f"bnb_4bit_compute_dtype: {'bfloat16' if other == 'bf16' else 'float16'}, to match dtype and mixed precision"),
            wins="each layer its own: operands of two dtypes meet",
        )


@rule("CF011")
def evaluation_changes_training(r: Record) -> Iterator[Finding]:
    """An evaluation setting changes the training

    **Why it matters.** `bf16_full_eval` casts the model itself. If an evaluation comes before training, training goes on with
    bf16 weights and bf16 Adam
    states. Under DeepSpeed's "auto" the evaluation flag alone switches bf16 training on.

    **Example.** `bf16_full_eval: true` with `eval_on_start: true`, or `trainer.evaluate()` above `trainer.train()`.

    **What to do.** Leave `*_full_eval` out; evaluation runs under autocast anyway.
    """
    f = r.facts
    full = f.on("hf.bf16_full_eval", "hf.fp16_full_eval")
    if full is None:
        return
    half = "bf16" if "bf16" in full.key else "fp16"
    first, train = None, None
    for name, setting in f.all("code"):
        kind = name.partition("@")[0]
        if kind in ("evaluate", "predict") and "@" in name:
            first = setting if first is None or (setting.line or 0) < (first.line or 0) else first
        if kind == "train" and "@" in name:
            train = setting
    on_start = f.on("hf.eval_on_start")
    before = first if first and train and (first.line or 0) < (train.line or 0) else on_start
    if before is not None:
        yield found(
            "CF011",
            WARNING,
            f"{full.key} casts the model before it is trained",
            full,
            before,
            cause=(
                f"{full.key} casts the model in place, and an evaluation runs before training: training then has "
                f"{half} weights and {half} Adam states"
            ),
            fix=f"remove {full.key} (evaluation uses autocast), or evaluate after training",
            wins="the cast: nothing casts the weights back",
        )
    section = deepspeed_setting(f, f"{half}.enabled")
    other_flag = f.on(f"hf.{half}")
    if section is not None and str(section.value) == "auto" and other_flag is None and f.on("hf.bf16", "hf.fp16") is None:
        yield found(
            "CF011",
            WARNING,
            f"{full.key} makes DeepSpeed train in {half}",
            full,
            section,
            f.given(f"hf.{half}"),
            cause=(f'"auto" joins {half} and {full.key}: the evaluation flag alone enables the {half} section for training'),
            fix=f"set {half}: true if {half} training is meant, else remove {full.key}",
            wins=f"{half} training",
        )


@rule("CF012")
def ema_in_half(r: Record) -> Iterator[Finding]:
    """An average of weights kept in half precision

    **Why it matters.** With decay 0.999 each step moves the average by a thousandth of the difference: in bf16 it moved 6% of the
    way (19% at 0.995).

    **Example.** SimpleTuner's `use_ema` with bf16 weights.

    **What to do.** Keep the shadow weights in fp32.
    """
    if r.value("ema") in ("bf16", "fp16"):
        yield found(
            "CF012",
            WARNING,
            f"the EMA is kept in {r.value('ema')}",
            r.by("ema"),
            r.by("trained"),
            cause=(
                f"the EMA shadow is a clone of the {r.value('ema')} weights and is updated in {r.value('ema')}: most "
                "updates round away (6% of the distance at decay 0.999)"
            ),
            fix="keep an fp32 shadow (fp32 weights: mixed_precision=no), or leave use_ema out",
            wins="the weights' dtype",
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
        yield found(
            "CF013",
            ERROR,
            "FlashAttention would get fp32",
            flash,
            r.by("compute"),
            r.by("parameters"),
            cause="the weights are fp32 and no mixed precision is on; FlashAttention takes fp16 and bf16 only",
            fix="bf16: true (mixed precision), or dtype: bfloat16, or attn_implementation: sdpa",
        )


_MODES = ("no", "fp16", "bf16", "fp8")


@rule("CF014")
def unknown_mode(r: Record) -> Iterator[Finding]:
    """mixed_precision is a word the tool does not know

    **Why it matters.** fp32 is spelt `no`, words are lower case, and an unquoted `no` in YAML is the boolean false: accelerate
    1.15 fails on it
    with "'bool' object has no attribute 'lower'".

    **Example.** `mixed_precision: no` in accelerate's YAML; `--mixed_precision=fp32` in SimpleTuner.

    **What to do.** `mixed_precision: 'no'` for fp32, quoted; else `bf16` or `fp16`.
    """
    f = r.facts
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
            yield found(
                "CF014",
                ERROR,
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
            yield found(
                "CF014",
                ERROR,
                f"{setting.key}: {word} is not a mode",
                setting,
                cause=f"the modes are no, fp16, bf16 and fp8, in lower case; {word} is refused",
                fix=f"{setting.key}: {fix}",
                wins="the tool refuses to start",
            )
