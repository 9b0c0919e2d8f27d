"""From a run's settings to its record: which tool's reading of them holds, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable

from .casts import casts
from .devices import Device, find
from .diffusion_record import kohya, script, simpletuner
from .model_settings import BNB
from .record import Record
from .settings import Facts
from .trainers_record import axolotl, lightning, llamafactory, torchtitan, torchtune
from .transformers_record import hf


def effective_precision(facts: Facts) -> Record:
    tool = next((d.tool for d in facts.documents if d.tool in _TOOLS), "hf")
    record = Record(tool, facts)
    record.device = _device(facts)
    _TOOLS[tool](record)
    _shared(record)
    return record


def _device(facts: Facts) -> Device | None:
    if facts.device:
        return find(facts.device)
    for setting in (facts.on("hf.use_cpu", "hf.no_cuda", "accelerate.use_cpu", "accelerate.cpu"),):
        if setting:
            return find("cpu")
    if facts.word("lightning.accelerator", "lightning.trainer.accelerator") == "cpu" or facts.word("torchtune.device") == "cpu":
        return find("cpu")
    named = facts.get("hardware.gpu", "hardware.gpu_name", "hardware.hardware", "hardware.device", "env.GPU_NAME", "env.GPU")
    return find(str(named.value)) if named else None


def _shared(record: Record) -> None:
    """Roles that follow from others."""
    trained = record.value("trained")
    if trained:
        record.set(
            "gradients",
            record.value("gradients") or trained,
            "a gradient has its weight's dtype",
            record.by("gradients") or record.by("trained"),
        )
        if "optimizer" not in record.roles:
            record.set("optimizer", trained, "torch optimizers keep their states in the weight's dtype", record.by("trained"))
    if "accumulation" not in record.roles and record.accumulates is not None and record.value("gradients"):
        record.set("accumulation", record.value("gradients"), "accumulates into .grad", record.accumulates)
    if record.quantised and "storage" not in record.roles:
        kind = record.facts.word(f"model.{BNB}.bnb_4bit_quant_type", f"checkpoint.{BNB}.bnb_4bit_quant_type") or (
            "fp4 or nf4" if record.quantised == 4 else "int8"
        )
        record.set("storage", kind, f"{record.quantised}-bit base", record.quantised_by)
    if record.value("compute") in ("bf16", "fp16") and "norms" not in record.roles and record.value("trained") == "fp32" and record.full:
        record.set("norms", "fp32", "autocast runs norms in fp32")
    casts(record)


_TOOLS: dict[str, Callable[[Record], None]] = {
    "simpletuner": simpletuner,
    "axolotl": axolotl,
    "llamafactory": llamafactory,
    "torchtune": torchtune,
    "torchtitan": torchtitan,
    "lightning": lightning,
    "kohya": kohya,
    "hf": hf,
    "script": script,
}
