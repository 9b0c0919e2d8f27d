"""Finds captions that are too long for the text encoders. The text encoders do not read the ends of
such captions, so the model does not learn them.

A caption counts as cut if it is longer than the limit of every tokenizer of the pipeline. Some
model families put a template around a caption; the tokens of the template are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .pipeline import PipelineFolder

SHOWN_CHARACTERS = 60  # number of characters of a caption that the message shows
UNBOUNDED = 10**6  # a larger `model_max_length` means that the tokenizer has no limit


@dataclass(frozen=True)
class CutCaptions:
    """The captions that are cut.

    number   how many captions are cut
    total    how many different captions there are
    limit    the number of tokens that are read
    first    the first caption that is cut
    longest  the number of tokens of the longest caption
    """

    number: int = 0
    total: int = 0
    limit: int = 0
    first: str = ""
    longest: int = 0

    def __str__(self) -> str:
        caption = (
            self.first
            if len(self.first) <= SHOWN_CHARACTERS
            else f"{self.first[:SHOWN_CHARACTERS]}..."
        )
        return (
            f"{self.number:,} of {self.total:,} captions are longer than the {self.limit} tokens"
            " that"
            f" are read (up to {self.longest}), and their ends are not learnt: {caption}"
        )


def count_cut_captions(
    captions: Iterable[str], folder: PipelineFolder, max_text_length: int
) -> CutCaptions:
    """Counts the captions that are longer than the limit of every tokenizer.

    max_text_length  the run's limit for tokenizers other than CLIP's; 0 means that each tokenizer
                 has its own limit
    """
    if folder.family.encodes_control:
        return CutCaptions()  # such a family never cuts its instructions
    tokenizer, limit = _longest_tokenizer(folder, max_text_length)
    unique_captions = list(dict.fromkeys(captions))
    if tokenizer is None or not unique_captions:
        return CutCaptions()
    lengths = [len(tokens) for tokens in tokenizer(unique_captions, verbose=False)["input_ids"]]
    cut_captions = [(caption, n) for caption, n in zip(unique_captions, lengths) if n > limit]
    if not cut_captions:
        return CutCaptions(total=len(unique_captions), limit=limit)
    longest = max(n for _, n in cut_captions)
    return CutCaptions(len(cut_captions), len(unique_captions), limit, cut_captions[0][0], longest)


def _longest_tokenizer(folder: PipelineFolder, max_text_length: int) -> tuple[Any, int]:
    """Returns the tokenizer that reads the most tokens of a caption, and the number of these
    tokens.
    """
    best: tuple[Any, int] = (None, 0)
    for part in folder.family.encoder_parts:
        path = folder.path / part
        if not part.startswith("tokenizer") or not path.is_dir():
            continue
        tokenizer = _load_tokenizer(path)
        if tokenizer is None:
            continue
        limit = int(getattr(tokenizer, "model_max_length", UNBOUNDED))
        windows = folder.family.clip_windows(limit, max_text_length)
        if windows > 1:
            limit = windows * (limit - 2) + 2  # begin and end tokens are counted too
        elif max_text_length and "CLIP" not in type(tokenizer).__name__:
            limit = max_text_length
        if limit > best[1]:
            best = (tokenizer, limit)
    return best if best[1] < UNBOUNDED else (None, 0)


def _load_tokenizer(path: Path) -> Any:
    """Loads a tokenizer. Returns None if transformers cannot load it. The reason is reported later,
    when the pipeline is loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception:  # a damaged tokenizer file can raise any exception
        return None
