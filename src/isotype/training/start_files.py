"""Writes the files that describe a run before its first step."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config.load import LoadedConfig, config_of
from ..config.write import resolved_yaml
from ..distributed.world import World
from ..environment.versions import environment
from ..model.adapter import trainable_share
from ..model.architecture import AUTO, attention_line, attention_of, has_attention
from ..runs.folder import RESOLVED, RunFolder
from .milestones import Milestones
from .own_code import OBJECTIVE, Own
from .resume_record import CHANGES, OTHER_ROWS, had_other_rows, to_come
from .same_data import DATA
from .same_settings import GIVEN, SETTINGS, given_files, recorded
from .setup import Prepared
from .task import Task


def write_start(
    loaded: LoadedConfig, task: Task, prepared: Prepared, plan: Milestones, folder: RunFolder, world: World, own: Own, *, resuming: bool
) -> None:
    """Writes a new run's `resolved.yaml` last, since it marks the folder as a run."""
    (folder.path / "result.json").unlink(missing_ok=True)  # of the part that a resumed run goes on from
    if not resuming:
        folder.metrics.unlink(missing_ok=True)
        folder.write_text("config.yaml", loaded.text)  # as given at first; a resumed run reads resolved.yaml
    folder.write_json("env.json", environment())
    folder.write_json("manifest.json", prepared.manifest.to_dict())
    task.begin(folder.path, resuming=resuming)
    for name, content in task.records().items():
        if name == "data.json" and resuming and had_other_rows(folder):
            content = content | {"notes": [*content.get("notes", []), OTHER_ROWS]}
        folder.write_json(name, content)
    trainable, total = trainable_share(prepared.model)
    shared: dict[str, Any] = {"processes": world.size, "machines": world.nodes}
    own_parts = {OBJECTIVE: own.objective_name, DATA: task.fingerprints()}
    reasons = {f"precision.{role}": reason for role, reason in prepared.resolved.reasons.items()}
    reasons["precision.preset"] = prepared.resolved.why_preset
    values = {f"precision.{role}": value for role, value in prepared.resolved.precision.items()}
    values["precision.preset"] = prepared.resolved.preset
    if loaded.config.model.attention == AUTO and has_attention(prepared.model):
        values["model.attention"] = attention_of(prepared.model)
        reasons["model.attention"] = attention_line(prepared.model, AUTO)
    if loaded.config.train.gradient_checkpointing == "auto":
        settings = prepared.checkpointing.as_settings()
        values |= settings
        reasons |= dict.fromkeys(settings, prepared.checkpointing.reason)
    resolved = resolved_yaml(in_its_folder(loaded, folder) if resuming else loaded, reasons, values)
    given = recorded(folder).get(GIVEN, {}) if resuming else given_files(loaded)
    settings = {GIVEN: given, SETTINGS: config_of(resolved, RESOLVED).model_dump(mode="json")}
    counts = {"task": task.kind, "parameters": total, "trained": trainable}
    if resuming:  # settings that a kill keeps out of plan.json are found in resolved.yaml, and compared with plan.json's again
        folder.write_text(RESOLVED, resolved)
    folder.write_json("plan.json", {**asdict(plan), **counts, **own_parts, **shared, **settings, CHANGES: to_come(folder)})
    if not resuming:
        folder.write_text(RESOLVED, resolved)


def in_its_folder(loaded: LoadedConfig, folder: RunFolder) -> LoadedConfig:
    """The settings of a resumed run, with the folder that it is in: it may have been copied or renamed."""
    given = loaded.config.run.folder
    if "{name}" in given or Path(given).resolve() == folder.path.resolve():
        return loaded
    run = loaded.config.run.model_copy(update={"folder": str(folder.path)})
    config = loaded.config.model_copy(update={"run": run})
    return replace(loaded, config=config, sources={**loaded.sources, "run.folder": "where the run was resumed"})
