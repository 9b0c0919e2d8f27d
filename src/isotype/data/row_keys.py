"""The required and the optional keys of each row format."""

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
    """The required and the optional keys of a row format."""

    keys: tuple[str, ...]
    optional_keys: tuple[str, ...] = ()


# keys of several answers to one prompt, and of their scores, in the data of RRHF, UltraFeedback and
# distilabel
ANSWER_KEYS = ("completions", "responses", "generations")
SCORE_KEYS = ("scores", "rewards", "ratings")
PREFERENCE_KEYS = ("chosen", "rejected")
# every format with a conversation also reads these keys, for every objective; plain text has none
# of them
PICTURE_KEYS = ("images", "image")
CONVERSATION_KEYS = ("system", "tools", "functions", *PICTURE_KEYS)
# a list of objects with one of these keys is a list of turns
TURN_KEYS = {"role", "author", "from", "parts"}
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
