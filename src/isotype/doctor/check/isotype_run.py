"""Isotype's own run files: the schema, and the same precision rules the engine applies (`isotype.precision.rules`)."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from ...config import RunConfig
from ...finding import Finding, Place, Severity
from ...precision.precision import PRESETS
from ...precision.resolve import resolve
from ...precision.rules import Facts as PrecisionFacts
from ...precision.rules import Setting as PrecisionSetting
from ...precision.rules import check as check_precision
from .settings import Device, Document, Facts, find_device
from .text_files import Tree


class _Named:
    """The device in the form that `resolve` takes; without `--device`, one that has bf16."""

    def __init__(self, device: Device | None) -> None:
        self.kind = device.kind if device else "cuda"
        self.name = device.name if device else "this device"
        self.bf16 = "native" if device is None or device.bf16 else "none"


def check_run(document: Document, tree: Tree, facts: Facts) -> Iterator[Finding]:
    """Unknown keys and bad values with their line, then contradictions between precision settings."""
    from pydantic import ValidationError

    try:
        config = RunConfig.model_validate({k: v or {} for k, v in tree.data.items()})
    except ValidationError as error:
        for problem in error.errors():
            yield _bad_value(document, tree, problem)
        return
    sources = {".".join(map(str, path)): f"{document.file}:{line}" for path, line in tree.lines.items() if len(path) == 2}
    given = {k: v for k, v in config.precision.model_dump().items() if v is not None}
    device = _Named(find_device(facts.device) if facts.device else None)
    yield from _contradictions(config, given, sources, device)


def _contradictions(config: RunConfig, given: dict[str, Any], sources: dict[str, str], device: _Named) -> list[Finding]:
    """The rules over preset and overrides; `resolve` would stop at the first error, so its table is built from the preset directly."""
    asked = given.pop("preset", "auto")
    preset = asked if asked in PRESETS else resolve(device=device, adapter=config.adapter.kind).preset
    values = PRESETS[preset].but(**given)
    where = sources.get("precision.preset", "default")
    by_preset = f"preset {preset}, {where}" if asked != "auto" else f"auto: {preset}"
    table = {
        role: PrecisionSetting(value, sources.get(f"precision.{role}", "given") if role in given else by_preset, role in given)
        for role, value in values.items()
    }
    table["preset"] = PrecisionSetting(preset, where, asked != "auto")
    table["adapter"] = PrecisionSetting(config.adapter.kind, sources.get("adapter.kind", "default"), "adapter.kind" in sources)
    table["frozen"] = PrecisionSetting("no" if config.adapter.kind == "none" else "yes")
    table["optimizer_name"] = PrecisionSetting(
        config.train.optimizer, sources.get("train.optimizer", "default"), "train.optimizer" in sources
    )
    return check_precision(PrecisionFacts(settings=table, device=device.name, device_kind=device.kind, bf16=device.bf16))


def _bad_value(document: Document, tree: Tree, problem: Any) -> Finding:
    path = tuple(problem["loc"])
    while path and path not in tree.lines:
        path = path[:-1]
    key = ".".join(map(str, problem["loc"]))
    fix = None
    if problem["type"] == "extra_forbidden":
        section = RunConfig.model_fields.get(str(problem["loc"][0]))
        known = (
            list(section.annotation.model_fields)
            if len(problem["loc"]) > 1 and section and section.annotation
            else list(RunConfig.model_fields)
        )
        near = get_close_matches(str(problem["loc"][-1]), known, n=1)
        fix = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return Finding(
        code="CF096",
        severity=Severity.ERROR,
        message=f"{key}: {problem['msg'][:1].lower()}{problem['msg'][1:]}",
        place=Place(file=document.file, line=tree.lines.get(path), symbol=key),
        cause="unknown keys are refused: a typo would have no effect" if problem["type"] == "extra_forbidden" else "the schema of a run",
        observed=str(problem.get("input"))[:80],
        fix=fix,
    )
