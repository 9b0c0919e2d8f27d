"""PF019: the adapter of `adapter.start_from` was trained on another base than this run's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...finding import Finding, Place, Severity
from .subject import Subject


def adapter_of_another_base(subject: Subject[Any]) -> Iterator[Finding]:
    """Compares the names of the bases. Tensors of another shape were refused when the adapter was loaded, but a related model's fit."""
    start, base = subject.config.adapter.start_from, subject.task.base_name
    if start is None or subject.resuming:
        return
    named = json.loads((Path(start) / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(named, str) or not named or same_model(named, base):
        return
    yield Finding(
        code="PF019", severity=Severity.WARNING, place=Place(symbol="adapter.start_from", file=str(start)),
        message="the adapter was trained on another base, as its own file says", declared=named, observed=base,
        cause="its tensors fit this model too, so that nothing else would show it",
        fix=f"model.name: {named}; nothing to do when both are the same weights in two places",
    )  # fmt: skip


def same_model(one: str, other: str) -> bool:
    """The same place, or the same last name: `Qwen/Qwen2.5-0.5B` and a folder `models/Qwen2.5-0.5B`."""
    if Path(one).exists() and Path(other).exists():
        return Path(one).resolve() == Path(other).resolve() or Path(one).resolve().name == Path(other).resolve().name
    return Path(one).name == Path(other).name
