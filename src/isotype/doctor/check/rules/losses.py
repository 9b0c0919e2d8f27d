"""Rules about what is lost in silence: updates, sums, ranges, quantised weights."""

from __future__ import annotations

from collections.abc import Iterator

from ....dtypes import torch_word
from ....finding import Finding
from ..model_settings import BNB, deepspeed_setting, mixed_flag, uses_deepspeed
from ..python_calls import Name
from ..settings import Record, dtype_of, truth
from .base import ERROR, NOTE, WARNING, error, found, rule, warning

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
        yield warning(
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
        yield warning(
            f"{full.key} makes DeepSpeed train in {half}",
            full,
            section,
            f.given(f"hf.{half}"),
            cause=(f'"auto" joins {half} and {full.key}: the evaluation flag alone enables the {half} section for training'),
            fix=f"set {half}: true if {half} training is meant, else remove {full.key}",
            wins=f"{half} training",
        )


@rule("CF019")
def start_changes_the_reference(r: Record) -> Iterator[Finding]:
    """An adapter start that changes the base moves the reference

    **Why it matters.** Without a model for it, TRL's DPO and KTO take the base with the adapter switched off for the reference. `pissa` and
    `olora` put a part of the base's weights into the adapter: switched off, the rest is another model. The loss of DPO's first step was
    0.658 and 0.676 in fp32 where it is ln 2 = 0.693, so that margins are there before any update.

    **Example.** `LoraConfig(init_lora_weights="pissa")` beside `DPOConfig`.

    **What to do.** PEFT's default start, or a reference of its own (`ref_model`). In Isotype the reference is the model as the run starts,
    with its adapter.
    """
    start = r.facts.get("peft.init_lora_weights")
    trainer = next((d for d in r.facts.documents if d.attributes.get("made_by") in ("DPOConfig", "KTOConfig")), None)
    if start is None or trainer is None or not str(start.value).lower().startswith(("pissa", "olora")):
        return
    yield found(
        WARNING,
        f"init_lora_weights={start.value!r} beside {trainer.attributes['made_by']}: another reference than the model as it starts",
        start,
        cause="the reference is the base with the adapter switched off, and this start has moved a part of the base into the adapter",
        fix="init_lora_weights=True, or a ref_model of its own",
        holds="no ref_model is given to the trainer",
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
        f"checkpoint.{BNB}.bnb_4bit_compute_dtype",
    )
    if r.quantised is None:
        return
    if setting is None:
        yield from _compute_dtype_left_open(r)
        return
    own, run = dtype_of(setting.value), r.value("compute")
    weights = r.value("parameters")
    if own is None or str(setting.value).startswith("torch."):
        own = dtype_of(str(setting.value))
    other = next((d for d in (run, weights) if d in ("bf16", "fp16") and d != own), None)
    if own and other:
        against = r.by("compute") if other == run else r.by("parameters")
        yield found(
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
            fix=(f"bnb_4bit_compute_dtype: {torch_word(other)}, to match dtype and mixed precision"),
            wins="each layer its own: operands of two dtypes meet",
        )


def _compute_dtype_left_open(r: Record) -> Iterator[Finding]:
    """A 4-bit configuration written out (and not one that a tool completes) that names no compute dtype: the library's is fp32."""
    f, run = r.facts, r.value("compute")
    written = f.on(f"model.{BNB}.load_in_4bit", f"hf.{BNB}.load_in_4bit", f"hf.model_init_kwargs.{BNB}.load_in_4bit")
    document = f.tool("model")
    unknown = document.attributes.get("unknown", set()) if document else set()
    made_by_unsloth = bool(document and document.attributes.get("unsloth"))
    if (
        written is None
        or not written.key.startswith((f"{BNB}.", "model_init_kwargs."))
        or r.quantised != 4
        or r.tool not in ("hf", "script", "lightning")
        or run not in ("bf16", "fp16")
        or made_by_unsloth
        or f"{BNB}.bnb_4bit_compute_dtype" in unknown
        or f.get(f"checkpoint.{BNB}.bnb_4bit_compute_dtype")
    ):
        return
    word = torch_word(run)
    yield warning(
        f"bnb_4bit_compute_dtype is left at its default, fp32, in a {run} run",
        written,
        r.by("compute"),
        cause=(
            f"BitsAndBytesConfig computes in fp32 unless told otherwise (and its 4-bit type is fp4): every 4-bit layer widens "
            f"its {run} input and multiplies in fp32, slower and with more memory, and its dtype is not the run's"
        ),
        fix=f"bnb_4bit_compute_dtype={word!r} (and bnb_4bit_quant_type='nf4')",
        wins="fp32 products in the quantised layers",
        holds="transformers 5.23",
    )


_NOT_TORCHS = ("bf16", "fp16", "fp32")
_NOT_FOR_STORAGE = ("half", "float", "double")  # attributes of torch, and yet not among the words that a storage dtype may be


@rule("CF043")
def word_not_looked_up(r: Record) -> Iterator[Finding]:
    """A dtype of weights in a word that is not found: `torch.bfloat16`, `bf16`

    **Why it matters.** `bnb_4bit_compute_dtype`, and a text given as `dtype` to `from_pretrained`, are handed to `getattr(torch, ...)`:
    "module torch has no attribute torch.bfloat16". `bnb_4bit_quant_storage` takes six words, and not `half`, `float` and `double`.

    **Example.** `"bnb_4bit_compute_dtype": "torch.bfloat16"`; `from_pretrained(..., dtype="bf16")`.

    **What to do.** `"bfloat16"`.
    """
    for document in r.facts.documents:
        if document.tool not in ("model", "hf", "peft", "axolotl"):
            continue
        done = set()
        for key, setting in document.settings.items():
            last, word = key.rpartition(".")[2], setting.value
            loaded = key in ("dtype", "torch_dtype") and document.attributes.get("reader") == "python" and document.tool == "model"
            looked_up = last in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage") or (loaded and not document.attributes.get("unsloth"))
            if not looked_up or (last, setting.line) in done:
                continue
            if not isinstance(word, str) or isinstance(word, Name):
                continue
            stored = last == "bnb_4bit_quant_storage"
            if word.startswith("torch.") or word in _NOT_TORCHS or (stored and word in _NOT_FOR_STORAGE):
                done.add((last, setting.line))
                yield error(
                    f"{last} does not take {word!r}" if stored else f"{last}: {word!r} is not a name in torch",
                    setting,
                    cause="the string must be one of float16, bfloat16, float32, float64, int8 and uint8"
                    if stored
                    else "the string is looked up as an attribute of torch, and must be torch's own word without prefix",
                    fix=f'{last}: "{torch_word(dtype_of(word) or word.removeprefix("torch."))}"',
                    wins=f"loading stops with {'a ValueError' if stored else 'an AttributeError'}",
                )
