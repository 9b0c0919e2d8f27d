"""The processor of a vision-language model, which turns pictures into pixel tensors and writes their tokens: its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_TEMPLATE = "chat_template.json"  # where repositories had the template that the processor reads and the tokenizer does not


def _file(name: str, file: str, revision: str | None) -> str | None:
    """Its path, fetched from the hub where `name` is no folder; None where there is none."""
    from transformers.utils import cached_file

    found: str | None = cached_file(
        name, file, revision=revision, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return found


def copy_files(name: str, revision: str | None, folder: Path) -> None:
    """Puts the processor's files of the base beside a saved model or adapter, so that a server finds them there."""
    for file in FILES:
        found = _file(name, file, revision)
        if found is not None and not (folder / file).exists():
            shutil.copyfile(found, folder / file)


def template_beside(name: str, revision: str | None) -> str | None:
    """The chat template of an older repository's processor."""
    found = _file(name, _TEMPLATE, revision)
    content: Any = json.loads(Path(found).read_text(encoding="utf-8")) if found is not None else {}
    template = content.get("chat_template") if isinstance(content, dict) else None
    return template if isinstance(template, str) else None
