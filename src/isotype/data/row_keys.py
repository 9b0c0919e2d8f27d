"""Lists the required and the optional keys of each row format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

FormatName = Literal[
    "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "labelled", "text"
]
Columns = Mapping[str, str | None] | None  # Isotype's key -> the data's key
Roles = Mapping[str, str] | None  # the data's name of a role -> Isotype's


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
ALPACA_KEYS = ("instruction", "input", "history")
# a list of objects with one of these keys is a list of turns
TURN_KEYS = {"role", "author", "from", "parts"}
# keys inside a turn that `data.columns` can rename
TURN_COLUMNS = ("role", "content", "tool_calls", "reasoning_content", "weight", "train")
ROLES = ("system", "developer", "user", "assistant", "tool")
# values of ShareGPT's `from` in data sets -> roles
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "function_call": "function_call", "tool_call": "function_call",
    "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
# keys of a row that contain a list of turns, or one turn
TURN_LISTS = ("messages", "conversations", "prompt", "completion", *PREFERENCE_KEYS)
FORMATS: dict[FormatName, Format] = {
    "messages": Format(("messages",), CONVERSATION_KEYS),
    "sharegpt": Format(("conversations",), CONVERSATION_KEYS),
    "alpaca": Format(("instruction", "output"), (*ALPACA_KEYS[1:], *CONVERSATION_KEYS)),
    "prompt_completion": Format(("prompt", "completion"), CONVERSATION_KEYS),
    "preference": Format(
        PREFERENCE_KEYS, ("prompt", *ANSWER_KEYS, *SCORE_KEYS, *CONVERSATION_KEYS)
    ),
    "labelled": Format(("label",), CONVERSATION_KEYS),
    "text": Format(("text",)),
}
# formats that a labelled answer can have; the first one whose keys the row has is used
LABELLED_FORMATS: tuple[FormatName, ...] = (
    "prompt_completion",
    "messages",
    "sharegpt",
    "alpaca",
)
# keys that can contain the prompt of a pair; the first one that the row has is used
PAIR_PROMPT_KEYS = ("prompt", "instruction", "messages", "conversations")
KNOWN_KEYS = frozenset(
    key for row_format in FORMATS.values() for key in row_format.keys + row_format.optional_keys
)


def normalise_word(word: str) -> str:
    """Returns a word in lower case, in which each sequence of spaces, hyphens and underscores is
    replaced by one underscore. A plus or minus sign before a number is not replaced.
    """
    return re.sub(r"(?!^-\d)[\s_-]+", "_", word.strip().casefold())


# for names of keys, which are the same in every row
normalise_name = lru_cache(maxsize=4096)(normalise_word)


def labelled_format(row: Mapping[str, Any]) -> FormatName | None:
    """Returns the format of the conversation or completion in a row with a label. Returns None if
    the row has no conversation and no completion.
    """
    return next(
        (name for name in LABELLED_FORMATS if all(key in row for key in FORMATS[name].keys)), None
    )
