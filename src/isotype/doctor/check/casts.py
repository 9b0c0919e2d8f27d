"""What a framework's casts do with buffers, and what they leave alone.

FSDP as torch 2.13 and accelerate 1.15 do it (run on one process of a CPU), DeepSpeed by its history (read, not run), transformers 5.23.
"""

from __future__ import annotations

from .record import Record
from .settings import Facts, Setting, dtype_of
from .sharded import deepspeed_setting, fsdp_version, uses_deepspeed, uses_fsdp
from .versions import release

_BY_ACCELERATE = ("hf", "axolotl", "llamafactory")
_BUFFERS_KEPT = (0, 19, 2)  # DeepSpeed casts parameters alone since
_IGNORED = ("accelerate.fsdp_config.fsdp_ignored_modules", "fsdp.ignored_modules", "env.FSDP_IGNORED_MODULES")


def casts(record: Record) -> None:
    """The roles `buffers` and `exempt`, where a framework is known to cast a model."""
    facts, compute = record.facts, record.value("compute")
    mixed = compute in ("bf16", "fp16")
    if mixed and record.tool in _BY_ACCELERATE and (engine := uses_deepspeed(facts)):
        _deepspeed(record, compute, engine)
    elif mixed and record.tool in _BY_ACCELERATE and (fsdp := uses_fsdp(facts)):
        _fsdp(record, compute, fsdp)
    elif record.tool == "hf" and record.value("parameters") in ("bf16", "fp16"):
        fp16 = record.value("parameters") == "fp16"
        lists = "_keep_in_fp32_modules, _keep_in_fp32_modules_strict" if fp16 else "_keep_in_fp32_modules_strict"
        record.set("exempt", lists, "from_pretrained leaves in fp32 what the model's class lists there", record.by("parameters"))


def _deepspeed(record: Record, compute: str | None, engine: Setting) -> None:
    asked, pinned = deepspeed_setting(record.facts, "data_types.buffer_dtype"), record.facts.get("versions.deepspeed")
    if pinned is not None and release(str(pinned.value)) < _BUFFERS_KEPT:
        record.set("buffers", compute, "DeepSpeed before 0.19.2 casts the whole module, tables of positions too", pinned)
    elif asked is not None:
        record.set("buffers", dtype_of(asked.value), "data_types.buffer_dtype", asked)
    else:
        record.set("buffers", "as loaded", "DeepSpeed casts parameters alone since 0.19.2", pinned or engine)


def _fsdp(record: Record, compute: str | None, fsdp: Setting) -> None:
    facts, (version, _) = record.facts, fsdp_version(record.facts)
    exempt = []
    if version == 2:
        record.set("buffers", "as loaded", "FSDP2 casts parameters and inputs, and no buffer", fsdp)
        if record.quantised == 4:
            exempt.append("4-bit weights stored as integers")
    else:
        own = _policy(facts)
        dtype = dtype_of(own.value) if own else compute
        record.set("buffers", dtype, "FSDP1's buffer_dtype, for tables of positions too", own or fsdp)
        exempt.append("batch norms")
    ignored = facts.get(*_IGNORED)
    if ignored is not None:
        exempt.append(f"ignored modules ({ignored.value})")
    if exempt:
        record.set("exempt", ", ".join(exempt), f"FSDP{version or 1} leaves them in the dtype they have", ignored or fsdp)


def _policy(facts: Facts) -> Setting | None:
    """buffer_dtype of a policy that a program hands over; one in a file is read by nobody (CF060)."""
    for document in facts.documents:
        if document.tool == "fsdp" and document.attributes.get("reader") == "python":
            return next((s for key, s in document.settings.items() if key.endswith("mixed_precision_policy.buffer_dtype")), None)
    return None
