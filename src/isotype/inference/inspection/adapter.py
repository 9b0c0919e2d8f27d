"""Finds out how PEFT, vLLM and llama.cpp load a saved adapter, and which of its matrices have no
partner or contain only zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import UsageError
from ...model.adapter_settings import read_adapter_config
from ...model.lora_names import ALPHA_SUFFIX, OTHER_KINDS, detect_lora_format, find_pairs
from ...wording import format_number, pluralise
from ..adapter_file import VLLM_RANKS, LoraPair, read_pairs
from .checkpoint import ADAPTER, Checkpoint
from .values import ValueRange


@dataclass
class AdapterFacts:
    """Describes an adapter, the modules that it changes, and its faults.

    description  its kind, format, rank and scale
    base         the name of the base model in its settings
    zero         modules that the adapter does not change, because one of their two matrices is zero
    single       matrices without a partner
    problem      why its settings and its matrices do not fit each other
    servers      for each program, how it loads the adapter or why it refuses the adapter
    """

    description: str
    base: str = ""
    modules: list[str] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    single: list[str] = field(default_factory=list)
    problem: str = ""
    servers: dict[str, str] = field(default_factory=dict)


def read_adapter(checkpoint: Checkpoint, ranges: Mapping[str, ValueRange]) -> AdapterFacts | None:
    """Returns the description of an adapter; None for a path that is no adapter. Raises UsageError
    for settings outside their ranges.
    """
    names = list(checkpoint.tensors)
    pairs, single = find_pairs(names)
    other_kind = next((kind for part, kind in OTHER_KINDS.items() if _has_part(names, part)), "")
    if checkpoint.kind != ADAPTER and not pairs and not other_kind:
        return None
    facts = AdapterFacts("", modules=sorted(pairs), single=single)
    for module, matrices in pairs.items():
        if any(name in ranges and ranges[name].is_all_zero for name in matrices):
            facts.zero.append(module)
    ranks = [min(checkpoint.tensors[a_tensor].shape) for a_tensor, _ in pairs.values()]
    if checkpoint.kind == ADAPTER:
        _read_folder(checkpoint, facts, ranks)
        return facts
    kind = other_kind or "LoRA"
    format_name = detect_lora_format(names, checkpoint.metadata)
    has_alphas = any(name.endswith(ALPHA_SUFFIX) for name in names)
    alpha = "alpha in the file" if has_alphas else "no alpha in the file: readers take the rank"
    facts.description = f"{kind}, as {format_name} writes it, {_describe_ranks(ranks)}, {alpha}"
    return facts


def _has_part(names: list[str], part: str) -> bool:
    return any(part in name for name in names)


def _describe_ranks(ranks: list[int]) -> str:
    if not ranks:
        return "no pairs of matrices"
    lowest, highest = min(ranks), max(ranks)
    return f"rank {lowest}" if lowest == highest else f"ranks {lowest} to {highest}"


def _read_folder(checkpoint: Checkpoint, facts: AdapterFacts, ranks: list[int]) -> None:
    """Reads the settings of a PEFT folder, and checks whether vLLM and llama.cpp can load the
    adapter.
    """
    settings: dict[str, Any] = read_adapter_config(checkpoint.path, "adapter")
    facts.base = str(settings.get("base_model_name_or_path") or "")
    kind = str(settings.get("peft_type") or "no peft_type")
    if settings.get("use_dora"):
        kind = "DoRA"
    facts.description = f"{kind}, {_describe_ranks(ranks)}"
    saved = settings.get("modules_to_save")
    if saved:
        facts.description += f", and {', '.join(map(str, saved))} trained in full"
    loaded: list[LoraPair] = []
    for program in ("vLLM", "llama.cpp"):
        try:
            # both programs load the same adapters, so the file is read once
            loaded = loaded or read_pairs(checkpoint.path, program)
        except UsageError as error:
            message = error.message.removeprefix(f"{checkpoint.path}: ")
            if "adapter_config.json says" in message:
                facts.problem = message
                return
            facts.servers[program] = f"does not load it: {message}"
            continue
        scales = sorted({pair.scale for pair in loaded})
        rank = max(pair.rank for pair in loaded)
        if program == "vLLM":
            facts.description += f", scale {', '.join(map(format_number, scales[:4]))}"
            limit = next((most for most in VLLM_RANKS if most >= rank), None)
            facts.servers[program] = _describe_vllm(rank, limit, len(scales))
        else:
            facts.servers[program] = (
                f"{pluralise(len(loaded), 'layer')}, after isotype export --to gguf"
            )


def _describe_vllm(rank: int, limit: int | None, scale_count: int) -> str:
    if limit is None:
        return f"does not load it: rank {rank}, and the largest is {VLLM_RANKS[-1]}"
    if scale_count > 1:
        return (
            "applies one scale to all layers, which is wrong here; isotype export --to vllm writes"
            " a folder with the right scales"
        )
    return f"loads it with --enable-lora --max-lora-rank {limit}"
