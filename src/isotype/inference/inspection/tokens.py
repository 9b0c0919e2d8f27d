"""Reads which token ends an answer and which token is used for padding, and whether there is a chat
template. Each file of a folder may contain these settings, or the header of a GGUF file. Imports no
torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .checkpoint import CONFIG_FILE, GGUF, Checkpoint, read_settings

GENERATION_FILE = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER = "tokenizer"
_TEMPLATE_FILE = "chat_template.jinja"
_MAX_TOKENIZER_BYTES = 256 << 20  # largest size of tokenizer.json


@dataclass
class TokenSettings:
    """The special tokens that programs use when they generate text.

    end_ids     for each file, or `tokenizer`, the ids that end an answer
    pad_ids     for each file, or `tokenizer`, the id that is used for padding
    names       the text of each of these ids
    template    the file that has the chat template; "" without a template
    token_count the largest id of the tokenizer plus 1; 0 without a tokenizer
    """

    end_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pad_ids: dict[str, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    template: str = ""
    token_count: int = 0

    def describe(self, token_id: int) -> str:
        name = self.names.get(token_id)
        return f"{token_id} {name}" if name else str(token_id)


def read_tokens(checkpoint: Checkpoint) -> TokenSettings | None:
    """Returns the token settings; None if the path has neither a tokenizer nor settings of
    generation. Raises UsageError for a damaged file.
    """
    if checkpoint.kind == GGUF:
        return _read_gguf_tokens(checkpoint)
    if not checkpoint.path.is_dir():
        return None
    tokens = TokenSettings()
    for name in (CONFIG_FILE, GENERATION_FILE):
        settings = checkpoint.settings.get(name, {})
        text_settings = settings.get("text_config")
        sections = [settings, text_settings if isinstance(text_settings, dict) else {}]
        for section in sections:
            ids = _id_tuple(section.get("eos_token_id"))
            if ids:
                tokens.end_ids.setdefault(name, ids)
            pad = section.get("pad_token_id")
            if type(pad) is int and pad >= 0:
                tokens.pad_ids.setdefault(name, pad)
    has_tokenizer = _read_tokenizer(checkpoint.path, tokens)
    if not has_tokenizer and not tokens.end_ids:
        return None
    return tokens


def _id_tuple(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if type(item) is int)


def _read_tokenizer(folder: Path, tokens: TokenSettings) -> bool:
    """Reads the tokenizer's files. Returns False if there are none."""
    settings: dict[str, Any] = {}
    if (folder / TOKENIZER_CONFIG).is_file():
        settings = read_settings(folder / TOKENIZER_CONFIG)
    if (folder / _TEMPLATE_FILE).is_file():
        tokens.template = _TEMPLATE_FILE
    elif settings.get("chat_template"):
        tokens.template = TOKENIZER_CONFIG
    ids = _read_vocabulary(folder / TOKENIZER_FILE)
    if ids:
        tokens.token_count = max(ids.values()) + 1
    added = settings.get("added_tokens_decoder")
    for key, entry in (added if isinstance(added, dict) else {}).items():
        if key.isdecimal() and isinstance(entry, dict):
            ids.setdefault(str(entry.get("content")), int(key))
    end_id = ids.get(_token_text(settings.get("eos_token")))
    pad_id = ids.get(_token_text(settings.get("pad_token")))
    if end_id is not None:
        tokens.end_ids[TOKENIZER] = (end_id,)
    if pad_id is not None:
        tokens.pad_ids[TOKENIZER] = pad_id
    shown_ids = {token for group in tokens.end_ids.values() for token in group}
    shown_ids |= set(tokens.pad_ids.values())
    tokens.names = {number: text for text, number in ids.items() if number in shown_ids}
    return bool(settings or ids)


def _token_text(value: Any) -> str:
    """Returns the text of a special token. In the file, the token is this text or a mapping that
    contains it.
    """
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_vocabulary(file: Path) -> dict[str, int]:
    """Returns the id of each token of tokenizer.json. Raises UsageError for a damaged file."""
    if not file.is_file():
        return {}
    try:
        if file.stat().st_size > _MAX_TOKENIZER_BYTES:
            raise ValueError(f"it has more than {_MAX_TOKENIZER_BYTES:,} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        added = content.get("added_tokens") or []
        if isinstance(vocabulary, list):  # a unigram model lists [token, score]
            ids = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
        else:
            ids = {str(text): int(number) for text, number in vocabulary.items()}
        return ids | {str(entry["content"]): int(entry["id"]) for entry in added}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{file}: no whole tokenizer: {type(error).__name__}: {error}",
            fix="get the file again from where it came",
        ) from None


def _read_gguf_tokens(checkpoint: Checkpoint) -> TokenSettings | None:
    fields = checkpoint.fields
    names = fields.get("tokenizer.ggml.tokens")
    if names is None:
        return None
    tokens = TokenSettings(token_count=len(names))
    end_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ends = [fields[key] for key in end_keys if type(fields.get(key)) is int]
    if ends:
        tokens.end_ids[TOKENIZER] = tuple(dict.fromkeys(ends))
    pad = fields.get("tokenizer.ggml.padding_token_id")
    if type(pad) is int:
        tokens.pad_ids[TOKENIZER] = pad
    if fields.get("tokenizer.chat_template"):
        tokens.template = "the header"
    for number in [*ends, *tokens.pad_ids.values()]:
        if 0 <= number < len(names):
            tokens.names[number] = str(names[number])
    return tokens
