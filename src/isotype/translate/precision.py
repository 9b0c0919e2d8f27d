"""The preset that does what another tool's precision flags do. `isotype doctor check`'s record says what those do."""

from __future__ import annotations

from ..doctor.check.settings import Record
from .account import DEFAULT_WORDS, Draft, Fate, Outcome


def decide(draft: Draft, record: Record | None) -> None:
    """Sets `precision.*` in the draft, and accounts for each key that had a part in it."""
    chosen, note = _chosen(draft, record)
    draft.settings.update(chosen)
    if chosen.get("precision.preset") == "bf16-pure" and draft.settings.get("train.optimizer") == "adamw8bit":
        draft.settings["train.optimizer"] = "adamw"  # PR018: the 8-bit optimizer rounds to the nearest and takes bf16 gradients
        asked = draft.sources["train.optimizer"]
        draft.outcomes = [
            Outcome(asked, Fate.CHANGED, "train.optimizer: adamw", "the 8-bit one cannot round bf16 weights stochastically")
            if outcome.given is asked
            else outcome
            for outcome in draft.outcomes
        ]
    shown = ", ".join(f"{key}: {value}" for key, value in chosen.items()) or "precision.preset: auto"
    for given in draft.about_precision:
        if given.value in DEFAULT_WORDS:
            draft.outcomes.append(Outcome(given, Fate.NO_EFFECT, note="switched off"))
        else:
            draft.outcomes.append(Outcome(given, Fate.CHANGED, shown, _of(given.name, note)))


def _of(name: str, note: str) -> str:
    own = {
        "tf32": "fp32 products use TF32 if PyTorch's setting allows it; Isotype does not change that setting",
        "load_in_8bit": "an 8-bit base is not offered: the base is bf16, or `precision.preset: nf4-lora`",
        "bnb_4bit_use_double_quant": "nf4 with double quantisation",
        "fp8": "fp8 is not offered: products are bf16",
        "load_in_fp8": "fp8 is not offered: products are bf16",
        "bnb_4bit_quant_type": "always nf4",
    }
    return own.get(name.rpartition(".")[2], note)


def _chosen(draft: Draft, record: Record | None) -> tuple[dict[str, str], str]:
    adapter = draft.settings.get("adapter.kind", "lora") == "lora"
    if record is None:
        return {}, "from the device"
    storage, compute = record.value("storage") or "", record.value("compute")
    trained, parameters = record.value("trained"), record.value("parameters")
    if "4" in storage and "int8" not in storage:
        if not adapter:
            return {"precision.preset": "bf16-mixed"}, "a 4-bit base is trained through an adapter only"
        if compute == "fp16":
            return {
                "precision.preset": "nf4-lora",
                "precision.compute": "fp16",
                "precision.loss_scaling": "dynamic",
                "precision.generate": "fp16",
            }, "4-bit base, fp16 products"
        return {"precision.preset": "nf4-lora"}, "nf4 base, fp32 adapters, bf16 products"
    if compute == "fp16":
        return {"precision.preset": "fp16-mixed"}, "fp32 trained weights, fp16 products, loss scaling"
    if adapter:
        if compute == "bf16" or parameters == "bf16" or trained == "bf16":
            return {"precision.preset": "bf16-lora"}, "bf16 base and products, fp32 adapters"
        return ({"precision.preset": "fp32"}, "everything fp32") if compute == "fp32" or parameters == "fp32" else ({}, "from the device")
    if trained == "bf16":
        return {"precision.preset": "bf16-pure"}, "weights in bf16; their updates are rounded stochastically, there to the nearest"
    if compute == "bf16":
        return {"precision.preset": "bf16-mixed"}, "fp32 weights, bf16 products"
    return ({"precision.preset": "fp32"}, "everything fp32") if "fp32" in (compute, trained, parameters) else ({}, "from the device")
