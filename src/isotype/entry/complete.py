"""Checks that the required settings are given, before slow imports."""

from __future__ import annotations

from pathlib import Path

from ..config.load import LoadedConfig
from ..errors import UsageError


def refuse_incomplete(loaded: LoadedConfig) -> None:
    """Raises  UsageError with a line for each thing that is missing."""
    from ..config.kind import DIFFUSION, is_denoiser, kind_of, refuse_inapplicable
    from ..config.sources import check_data, is_folder_name, near_model, picture_sources, source_specs, where_looked
    from ..data.sources import refuse_absent
    from ..training.trackers.available import missing as missing_trackers

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
