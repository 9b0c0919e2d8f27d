"""The keys of each format of a row: those that a row must have, and those that it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FormatName = Literal[
    "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "labelled", "text"
]
Columns = Mapping[str, str | None] | None


@dataclass(frozen=True, slots=True)
class Format:
    """The keys that a row must have, and those that it may."""

    keys: tuple[str, ...]
    optional_keys: tuple[str, ...] = ()


# of several answers to one prompt, and of their scores: what they are called in RRHF's,
# UltraFeedback's and distilabel's data
ANSWER_KEYS = ("completions", "responses", "generations")
SCORE_KEYS = ("scores", "rewards", "ratings")
PREFERENCE_KEYS = ("chosen", "rejected")
# every format with a conversation reads these keys too, whatever the objective; a plain text has
# none
PICTURE_KEYS = ("images", "image")
CONVERSATION_KEYS = ("system", "tools", "functions", *PICTURE_KEYS)
TURN_KEYS = {"role", "author", "from", "parts"}  # a list of objects with one of these is turns
FORMATS: dict[FormatName, Format] = {
    "messages": Format(("messages",), CONVERSATION_KEYS),
    "sharegpt": Format(("conversations",), CONVERSATION_KEYS),
    "alpaca": Format(("instruction", "output"), ("input", "history", *CONVERSATION_KEYS)),
    "prompt_completion": Format(("prompt", "completion"), CONVERSATION_KEYS),
    "preference": Format(
        PREFERENCE_KEYS, ("prompt", *ANSWER_KEYS, *SCORE_KEYS, *CONVERSATION_KEYS)
    ),
    "labelled": Format(("prompt", "completion", "label"), CONVERSATION_KEYS),
    "text": Format(("text",)),
}
