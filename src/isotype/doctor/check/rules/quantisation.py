"""Rules about 4-bit and 8-bit weights (bitsandbytes), for all tools that load them."""

from __future__ import annotations

from collections.abc import Iterator

from ....dtypes import torch_word
from ....finding import Finding
from ..model_settings import BNB
from ..readers.python_calls import Name
from ..record import Record
from ..settings import dtype_of
from .base import ERROR, WARNING, error, found, rule, warning


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


@rule("CF042")
def two_quantisations(r: Record) -> Iterator[Finding]:
    """load_in_4bit and load_in_8bit are both on

    **Why it matters.** transformers refuses: only one can be used at the same time.

    **Example.** `{"load_in_4bit": true, "load_in_8bit": true}`.

    **What to do.** Keep one.
    """
    f = r.facts
    for prefix in (f"model.{BNB}", "model", "hf", "axolotl", f"hf.{BNB}", f"hf.model_init_kwargs.{BNB}"):
        four, eight = f.on(f"{prefix}.load_in_4bit"), f.on(f"{prefix}.load_in_8bit")
        if four and eight:
            yield error(
                "load_in_4bit and load_in_8bit are both true",
                four,
                eight,
                cause="a weight is stored one way: only one of load_in_4bit and load_in_8bit can be used",
                fix="keep one of them, the other false",
                wins="loading stops",
            )
            return


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
