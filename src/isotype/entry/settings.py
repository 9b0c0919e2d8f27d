"""The configuration of a run as it was asked for, from the command line or from Python: loaded, and complete enough to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..config.load import LoadedConfig, load
from ..errors import UsageError


def load_settings(
    file: Path | None,
    arguments: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    preset: str | None,
    resume: Path | None,
    how_to_change: str,
    **options: Any,
) -> LoadedConfig:
    """A new run's settings, or with `resume` those of the run in that folder with changes.

    arguments      `section.key=value`, over the file's
    flags          section.key -> value, over both; None is left out
    how_to_change  the fix where a resumed run is given a file: how its settings are changed instead
    options        further ones of `config.load.load`
    Raises         UsageError for settings that are wrong or missing
    """
    if resume is not None:
        from ..runs.folder import require_run

        if file is not None:
            raise UsageError(f"{file}: a resumed run has its own configuration", fix=how_to_change)
        file = require_run(resume) / "resolved.yaml"
    loaded = load(file, arguments, flags or {}, preset=preset, resolved=resume is not None, **options)
    refuse_incomplete(loaded)
    return loaded


def of_this_start(loaded: LoadedConfig, resume: Path | None) -> tuple[LoadedConfig, Path | None]:
    """The settings, and the folder of the run to go on with: where torchrun repeats a command after a process died, its own run's.

    Raises  UsageError where the repeated command could not find its run
    """
    from ..distributed.rank import run_to_go_on_with

    if resume is not None or (begun := run_to_go_on_with(loaded.config.run.folder)) is None:
        return loaded, resume
    return load_settings(None, preset=None, resume=begun, how_to_change=""), begun


def refuse_incomplete(loaded: LoadedConfig) -> None:
    """Raises  UsageError with a line for each thing that is missing."""
    from ..config.kind import DIFFUSION, is_denoiser, kind_of, refuse_inapplicable
    from ..config.sources import check_data, is_folder_name, near_model, picture_sources, source_specs, where_looked
    from ..data.sources import refuse_absent

    config = loaded.config
    where = f"{loaded.path} " if loaded.path else ""
    missing = missing_trackers(config.run.trackers)
    if config.model.name is None and is_denoiser(config.model.config):
        missing.append(f"{where}model.name: missing: the pipeline whose VAE, text encoders and scheduler model.config is trained with")
    elif config.model.name is None and (config.model.init == "pretrained" or config.model.config is None):
        missing.append(f"{where}model.name: missing: --model FOLDER, or model.name in a file (isotype init writes one)")
    for key, name in (("model.name", config.model.name), ("model.tokenizer", config.model.tokenizer)):
        if name is not None and is_folder_name(name) and not Path(name).exists():
            missing.append(f"{loaded.sources[key]} {key}: {name}: no such folder{near_model(name) or where_looked(name, loaded.path)}")
    refuse_inapplicable(config, loaded.sources)
    diffusion = kind_of(config) == DIFFUSION
    if diffusion and config.images.train is None:
        missing.append(f"{where}images.train: missing: a folder of pictures with captions, or a JSONL file")
    if not diffusion and config.data.train is None:
        missing.append(f"{where}data.train: missing: --data FILE, or --data stdlib for the built-in questions and answers")
    if missing:
        raise UsageError("\n".join(missing))
    if diffusion:
        for side in ("train", "eval", "regularisation"):
            picture_sources(config.images, side)
        return
    check_data(config, loaded.sources)
    for side in ("train", "eval"):
        for spec in source_specs(config.data, side):
            refuse_absent(spec)


def missing_trackers(trackers: Sequence[str]) -> list[str]:
    """A line for each tracker whose package is not installed; the packages and the extras have the trackers' names."""
    gone = [name for name in dict.fromkeys(trackers) if find_spec(name) is None]
    return [f"run.trackers: {name} is not installed: pip install 'isotype[{name}]', or leave it out of run.trackers" for name in gone]
