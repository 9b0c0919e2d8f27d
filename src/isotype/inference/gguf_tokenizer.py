"""A fast tokenizer as the keys of a GGUF file.

llama.cpp splits text before it merges by code of its own, chosen by a name (`tokenizer.ggml.pre`): the name is taken where the tokenizer
splits by the very pattern that llama.cpp has under it. A tokenizer with another pattern would be read as another one, and is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..errors import UsageError
from .ollama import begins_text

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# the patterns of a tokenizer's Split steps -> llama.cpp's name; none is GPT-2's own, inside the step ByteLevel
_SPLITS = {(_WORDS % "{1,3}",): "llama-bpe", (_WORDS % "",): "qwen2", (_TEKKEN,): "tekken", (): "gpt-2"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def tokenizer_keys(folder: Path | str, vocabulary: int, command: str) -> list[tuple[str, Any]]:
    """Tokens, merges or scores, special tokens and chat template of a tokenizer: methods of gguf's writer, each with its argument.

    vocabulary  rows of the model's embedding; ids without a token get one that nothing is split into
    command     of llama.cpp, which knows more tokenizers
    Raises      UsageError for a tokenizer that llama.cpp would read as another one
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    content = json.loads(tokenizer.backend_tokenizer.to_str()) if getattr(tokenizer, "is_fast", False) else {}
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise UsageError(f"{folder}: a tokenizer of kind {model.get('type') or type(tokenizer).__name__}: not written here", fix=command)
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    tokens = {index: token for token, index in model["vocab"].items()} | {index: token["content"] for index, token in added.items()}
    if max(tokens) >= vocabulary:
        raise UsageError(f"{folder}: the tokenizer has {max(tokens) + 1} tokens, the model {vocabulary} rows")
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    pieces = bool(model.get("byte_fallback"))
    listed = [tokens.get(index, f"[PAD{index}]") for index in range(vocabulary)]
    keys: list[tuple[str, Any]] = [
        ("add_tokenizer_model", "llama" if pieces else "gpt2"),
        ("add_tokenizer_pre", "default" if pieces else _split_name(folder, content, command)),
        ("add_token_list", listed),
        ("add_token_types", [_type(i, tokens.get(i), added, pieces, model.get("unk_token")) for i in range(vocabulary)]),
        ("add_add_bos_token", begins_text(tokenizer)),
        ("add_add_eos_token", False),
    ]
    if pieces:
        # llama.cpp merges the pair whose product has the highest score: the products in the order in which the merges come
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(merges):
            ranks.setdefault(left + right, rank)
        keys.append(("add_token_scores", [-float(ranks.get(token, len(merges))) for token in listed]))
        keys.append(("add_add_space_prefix", _begins_with_space(content)))
    else:
        keys.append(("add_token_merges", [" ".join(merge) for merge in merges]))
    if isinstance(tokenizer.chat_template, str):
        keys.append(("add_chat_template", tokenizer.chat_template))
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    return [*keys, *((f"add_{name}_token_id", index) for name, index in special.items() if index is not None)]


def _type(index: int, token: str | None, added: dict[int, Any], pieces: bool, unknown: str | None) -> int:
    if token is None:
        return _UNUSED
    if pieces and len(token) == 6 and token.startswith("<0x"):
        return _BYTE
    if token == unknown:
        return _UNKNOWN
    if index in added:
        return _CONTROL if added[index]["special"] else _USER_DEFINED
    return _NORMAL


def _steps(part: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, of which a Sequence has several."""
    return [] if part is None else list(part[inside]) if part["type"] == "Sequence" else [part]


def _split_name(folder: Path | str, content: dict[str, Any], command: str) -> str:
    steps = _steps(content.get("pre_tokenizer"), "pretokenizers")
    patterns = tuple(step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split")
    last = steps[-1] if steps else {"type": None}
    plain = {step["type"] for step in steps} <= {"Split", "ByteLevel"} and last["type"] == "ByteLevel" and not last.get("add_prefix_space")
    name = _SPLITS.get(patterns) if plain and bool(last.get("use_regex", True)) == (not patterns) else None
    if name is None:
        raise UsageError(f"{folder}: llama.cpp splits no text as this tokenizer does ({patterns or last['type']})", fix=command)
    return name


def _begins_with_space(content: dict[str, Any]) -> bool:
    steps = [*_steps(content.get("normalizer"), "normalizers"), *_steps(content.get("pre_tokenizer"), "pretokenizers")]
    return any(step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never") for step in steps)
