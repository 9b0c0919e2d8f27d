"""Lists the required and the optional keys of each row format, and the names of roles. It also has
the functions that compare the spellings of keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

FormatName = Literal[
    "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "labelled", "text"
]
# the setting `data.columns`: Isotype's key -> the data's key. A value of None means that the data's
# key with the name of Isotype's key is ignored
Columns = Mapping[str, str | None] | None
# the setting `data.roles`: the data's name of a role -> Isotype's
Roles = Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Format:
    """The required and the optional keys of a row format."""

    keys: tuple[str, ...]
    optional_keys: tuple[str, ...] = ()


# keys of several answers to one prompt, and of their scores, in the data of RRHF, UltraFeedback and
# distilabel
ANSWER_KEYS = ("completions", "responses", "generations")
SCORE_KEYS = ("scores", "rewards", "ratings")
PREFERENCE_KEYS = ("chosen", "rejected")  # keys of the two answers of a preference pair
# keys of the pictures that a conversation is about
PICTURE_KEYS = ("images", "image")
# optional keys of every format with a conversation, which is every format except `text`
CONVERSATION_KEYS = ("system", "tools", "functions", *PICTURE_KEYS)
# the optional keys of Alpaca's format, which are parts of the prompt like `instruction`
ALPACA_OPTIONAL_KEYS = ("input", "history")
# a list of objects with one of these keys is a list of turns
TURN_KEYS = {"role", "author", "from", "parts"}
# keys inside a turn that `data.columns` can rename
TURN_COLUMNS = ("role", "content", "tool_calls", "reasoning_content", "weight", "train")
ROLES = ("system", "developer", "user", "assistant", "tool")  # the roles of a chat template
# values of ShareGPT's `from` in data sets -> roles. `function_call` is no role of a chat template:
# such a turn becomes a message of the assistant with `tool_calls`
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
    "alpaca": Format(("instruction", "output"), (*ALPACA_OPTIONAL_KEYS, *CONVERSATION_KEYS)),
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
# keys that can contain the prompt of a preference pair; the first one that the row has is used
PAIR_PROMPT_KEYS = ("prompt", "instruction", "messages", "conversations")
# all keys that some format reads
KNOWN_KEYS = frozenset(
    key for row_format in FORMATS.values() for key in row_format.keys + row_format.optional_keys
)


def normalise_word(word: str) -> str:
    """Returns a word in lower case, in which each sequence of spaces, hyphens and underscores is
    replaced by one underscore. The minus sign of a number is not replaced.
    """
    return re.sub(r"(?!^-\d)[\s_-]+", "_", word.strip().casefold())


# Does the same for names of keys. The results are cached, because all rows have the same few keys
normalise_name = lru_cache(maxsize=4096)(normalise_word)


def labelled_format(row: Mapping[str, Any]) -> FormatName | None:
    """Returns the format of the conversation or completion in a row with a label. Returns None if
    the row has no conversation and no completion.
    """
    return next(
        (name for name in LABELLED_FORMATS if all(key in row for key in FORMATS[name].keys)), None
    )
