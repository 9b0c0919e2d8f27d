"""A diffusers pipeline on the hub: its settings and tokenizers at first, the weights of a part when it is loaded. A plan fetches none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...config.kind import PIPELINE_FILE
from ...environment.hub import is_away, say
from ...errors import UsageError
from ...model.load import loading_error

SETTINGS = ["*.json", "*/*.json", "*/*.txt", "*/*.model"]
VARIANTS = ["*.fp16*", "*.bf16*", "*.non_ema*", "*.ema*"]  # the same weights in another dtype or form, beside the main file


def settings_of(name: str, revision: str | None) -> Path:
    """The folder of the local cache that holds the pipeline's settings and tokenizers. Raises UsageError."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    is_away()
    try:
        hf_hub_download(name, PIPELINE_FILE, revision=revision)
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(SETTINGS)))
    except Exception as error:  # whatever the hub's library raises
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise UsageError(f"model.name: {name}: no {PIPELINE_FILE} on the hub: not a diffusers pipeline") from error
        raise loading_error(name, "model.name:", error) from error


def fetch_weights(name: str, folder: Path, parts: Sequence[str]) -> None:
    """Fetches the safetensors of some parts into `folder`, a snapshot in the cache, unless they are there. Raises UsageError."""
    from huggingface_hub import constants, snapshot_download

    if not parts or is_away():
        return  # where a file is missing the error of loading it says so
    if not all(any((folder / part).glob("*.safetensors")) for part in parts if (folder / part / "config.json").is_file()):
        say(f"{name}: {', '.join(parts)}: fetched from the hub, once; it is kept in {constants.HF_HUB_CACHE}")
    try:
        snapshot_download(
            name, revision=folder.name, allow_patterns=[f"{part}/*.safetensors" for part in parts], ignore_patterns=VARIANTS
        )  # fmt: skip
    except Exception as error:  # whatever the hub's library raises
        raise loading_error(name, "model.name:", error) from error
