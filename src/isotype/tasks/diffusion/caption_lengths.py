"""Captions that are longer than the text encoders read: what lies beyond is not learnt.

Each tokenizer of the pipeline is asked; a caption counts where even the one that reads furthest
does not reach its end. A family's own template, which some put around a caption, is not counted in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .pipeline import PipelineFolder

SHOWN_CHARACTERS = 60  # characters of a caption
UNBOUNDED = 10**6  # tokenizers without a limit have a far larger one


@dataclass(frozen=True)
class CutCaptions:
    """number  of captions that are cut, of `total` different ones
    limit   tokens that are read
    first, longest  the first of them, and the tokens of the longest
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
    captions: Iterable[str], folder: PipelineFolder, text_length: int
) -> CutCaptions:
    """text_length  of a family that has a longest caption; 0: the CLIP tokenizer's own"""
    if folder.family.encodes_control:
        return CutCaptions()  # its instructions are never cut
    tokenizer, limit = _longest_tokenizer(folder, text_length)
    different = list(dict.fromkeys(captions))
    if tokenizer is None or not different:
        return CutCaptions()
    lengths = [len(tokens) for tokens in tokenizer(different, verbose=False)["input_ids"]]
    cut = [(caption, n) for caption, n in zip(different, lengths) if n > limit]
    if not cut:
        return CutCaptions(total=len(different), limit=limit)
    longest = max(n for _, n in cut)
    return CutCaptions(len(cut), len(different), limit, cut[0][0], longest)


def _longest_tokenizer(folder: PipelineFolder, text_length: int) -> tuple[Any, int]:
    """The tokenizer that reads most tokens of a caption, and how many."""
    furthest: tuple[Any, int] = (None, 0)
    for part in folder.family.encoder_parts:
        path = folder.path / part
        if not part.startswith("tokenizer") or not path.is_dir():
            continue
        tokenizer = _load_tokenizer(path)
        if tokenizer is None:
            continue
        tokenizer_limit = int(getattr(tokenizer, "model_max_length", UNBOUNDED))
        is_clip = "CLIP" in type(tokenizer).__name__ or not text_length
        limit = tokenizer_limit if is_clip else text_length
        if limit > furthest[1]:
            furthest = (tokenizer, limit)
    return furthest if furthest[1] < UNBOUNDED else (None, 0)


def _load_tokenizer(path: Path) -> Any:
    """None where transformers cannot read it alone: loading the pipeline says why."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception:  # whatever a tokenizer's file leads to
        return None
