"""Inspects a checkpoint: reads its tensors and settings, finds out how other programs would load
it, and looks for faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...errors import UsageError
from ...finding import Finding
from .checkpoint import GGUF, MODEL, Checkpoint, StoredTensor, open_checkpoint
from .findings import Facts, find_faults
from .tokens import read_tokens
from .values import ValueRange, measure_values

_COMPARED_BYTES = 4 << 20  # bytes of two tensors that are compared at once


@dataclass
class Inspection:
    """Contains what `isotype inspect` found out about a checkpoint.

    unread    tensors whose values were not measured: integers, and kinds of blocks that are not
              decoded
    readers   for each program, how it loads the checkpoint or why it refuses the checkpoint
    """

    facts: Facts
    findings: list[Finding]
    unread: list[str] = field(default_factory=list)
    readers: dict[str, str] = field(default_factory=dict)


def inspect_checkpoint(path: Path) -> Inspection:
    """Inspects a folder or file. Raises UsageError for a path that is no checkpoint, and for a
    damaged file.
    """
    checkpoint = open_checkpoint(path)
    ranges: dict[str, ValueRange] = {}
    unread = []
    for tensor in checkpoint.tensors.values():
        try:
            values = measure_values(tensor)
        except OSError as error:
            raise UsageError(f"{tensor.file}: {tensor.name}: {error}") from None
        if values is None:
            unread.append(tensor.name)
        else:
            ranges[tensor.name] = values
    facts = Facts(checkpoint, ranges, tokens=read_tokens(checkpoint))
    inspection = Inspection(facts, [], unread)
    try:
        _ask_readers(inspection)
    except ModuleNotFoundError as error:
        inspection.readers["transformers"] = f"not asked: {error.name} is not installed"
    inspection.findings = find_faults(facts)
    return inspection


def _ask_readers(inspection: Inspection) -> None:
    """Finds out how other programs would load the checkpoint. Raises UsageError for settings
    outside their ranges.
    """
    facts = inspection.facts
    checkpoint = facts.checkpoint
    from .adapter import read_adapter

    facts.adapter = read_adapter(checkpoint, facts.ranges)
    if facts.adapter is not None:
        inspection.readers |= facts.adapter.servers
    elif checkpoint.kind == GGUF:
        inspection.readers["Isotype"] = _describe_gguf_base(checkpoint)
    elif checkpoint.kind == MODEL:
        _ask_transformers(inspection)


def _describe_gguf_base(checkpoint: Checkpoint) -> str:
    """Returns whether Isotype trains on this file."""
    from ...model.gguf import read_architecture

    if checkpoint.fields.get("general.type") == "adapter":
        return "an adapter, for llama-server --lora"
    try:
        config = read_architecture(str(checkpoint.path))
    except UsageError as error:
        return f"does not train on it: {error.message.removeprefix(f'model {checkpoint.path}: ')}"
    family = config.model_type
    return f"trains adapters on it as {family}, with its blocks unchanged"


def _ask_transformers(inspection: Inspection) -> None:
    from ..gguf_file import refuse_model
    from .loading import ask_transformers

    facts = inspection.facts
    checkpoint = facts.checkpoint
    loading = ask_transformers(checkpoint)
    facts.loading = loading
    readers = inspection.readers
    if loading.diffusers_class:
        readers["diffusers"] = f"{loading.diffusers_class}; its weights were not compared"
    elif loading.problem:
        readers["transformers"] = f"does not load it: {loading.problem}"
    else:
        readers["transformers"] = f"{loading.class_name} in {loading.dtype}"
    facts.equal_ties = {
        name: have_same_bytes(checkpoint.tensors[name], checkpoint.tensors[source])
        for name, source in loading.ties.items()
        if name in checkpoint.tensors and source in checkpoint.tensors
    }
    if loading.quantisation is not None and loading.quantisation.unread_reason:
        readers["Isotype"] = f"does not train on it: {loading.quantisation.unread_reason}"
    if loading.config is not None and loading.quantisation is None:
        try:
            refuse_model(loading.config, "")
            readers["llama.cpp"] = "isotype export --to gguf writes this family"
        except UsageError as error:
            family, _, _ = error.message.partition(":")
            readers["llama.cpp"] = (
                f"its convert_hf_to_gguf.py; isotype export does not write {family}"
            )


def have_same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Returns True if two tensors have the same dtype, shape and content."""
    if (first.dtype, first.shape, first.size_bytes) != (
        second.dtype,
        second.shape,
        second.size_bytes,
    ):
        return False
    with first.file.open("rb") as first_file, second.file.open("rb") as second_file:
        first_file.seek(first.offset)
        second_file.seek(second.offset)
        for start in range(0, first.size_bytes, _COMPARED_BYTES):
            count = min(_COMPARED_BYTES, first.size_bytes - start)
            if first_file.read(count) != second_file.read(count):
                return False
    return True
