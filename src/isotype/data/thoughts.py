"""Which thoughts of a reasoning model a conversation keeps: `data.thoughts`.

A turn's thoughts stand in its content between `<think>` and `</think>`, or in a key beside it. Templates in the style of Qwen3 write those
behind the last question and leave earlier ones out; to keep all, the tags of earlier turns are hidden from the template while it renders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from .bad_rows import EmptyAnswer, RowError
from .conversations import Message, is_learnt

KEYS = ("reasoning_content", "thinking")  # keys of a turn in which data write thoughts
BEGIN, END = "<think>", "</think>"
CONTENT = "content"
EMPTY = re.compile(rf"{BEGIN}\s*{END}")
DOUBLED = re.compile(rf"{EMPTY.pattern}\s*{BEGIN}")
Writes = AbstractSet[tuple[str, bool]]  # the key that holds thoughts, and whether a question comes after them
_BLOCK = re.compile(rf"{BEGIN}(.*?){END}\s*", re.DOTALL)
_HIDDEN = {BEGIN: "\U000f0f10", END: "\U000f0f11"}  # private-use characters: in no template, in no text


def with_thoughts(messages: Sequence[Message], which: str, *, writes: Writes, tags: bool, place: str) -> tuple[Message, ...]:
    """The turns with the thoughts that are kept, where the template finds them.

    which   `last`: those behind the last question; `all`; `none`
    writes  what the template writes, as `probes` found it
    tags    whether the template itself has the tags
    Raises  RowError for a tag without the other one, EmptyAnswer for a learnt turn that is nothing but thoughts
    """
    last = last_question(messages)
    found = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            if which == "none" or (which == "last" and i < last):
                message = _without(message, f"{place}: messages[{i}]")
            else:
                message = _placed(message, earlier=i < last, writes=writes, tags=tags)
        found.append(message)
    return tuple(found)


def probes(word: str) -> Iterator[tuple[tuple[str, bool], list[Message]]]:
    """Conversations with a word as a thought, each place of it before the last question and behind it."""
    for form in (CONTENT, *KEYS):
        answer = {"content": _tagged(word, "b")} if form == CONTENT else {"content": "b", form: word}
        turns: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]
        yield (form, False), turns
        yield (form, True), [*turns, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def last_question(messages: Sequence[Message]) -> int:
    """The place of the last turn of the user; -1 for none."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def hidden(messages: Sequence[Message]) -> list[Message]:
    """The turns, those before the last question with tags that no template knows. `shown` brings the tags back."""
    last = last_question(messages)
    return [
        m | {"content": _swapped(m["content"], _HIDDEN)} if m["role"] == "assistant" and i < last else m for i, m in enumerate(messages)
    ]


def shown(text: str) -> str:
    return _swapped(text, {mark: tag for tag, mark in _HIDDEN.items()})


def learns_empty(text: str, learnt: Sequence[tuple[int, int]]) -> bool:
    """Whether what is learnt, from one character to another, has the end of empty thoughts, whose beginning may be in the prompt."""
    ends = [found.end() for found in EMPTY.finditer(text)]
    return any(start <= end - len(END) and end <= stop for start, stop in learnt for end in ends)


def _swapped(text: str, words: dict[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text


def _without(message: Message, at: str) -> Message:
    content = message["content"]
    answer = _BLOCK.sub("", content)
    if BEGIN in answer or END in answer:
        raise RowError(f"{at}.content has {BEGIN} or {END} without the other one: its thoughts cannot be told from its answer")
    if content.strip() and not answer.strip() and is_learnt(message) and not message.get("tool_calls"):
        raise EmptyAnswer(f"{at}.content is empty without its thoughts: the row has no target")
    return _bare(message) | {"content": answer}


def _placed(message: Message, *, earlier: bool, writes: Writes, tags: bool) -> Message:
    """A turn whose thoughts stand where the template writes them; else in its content, as Qwen3 writes them.

    They stay where they are if the template has other marks for thoughts, as gpt-oss' has.
    """
    content = message["content"]
    block = _BLOCK.match(content)
    key = next((key for key in KEYS if isinstance(message.get(key), str) and message[key].strip()), None)
    form = CONTENT if block is not None else key
    other_marks = not tags and any((key, False) in writes for key in KEYS)
    if form is None or (form, earlier) in writes or other_marks:
        return message
    thought, answer = (block[1], content[block.end() :]) if block is not None else (message[form], content)
    return _bare(message) | {"content": _tagged(thought, answer)}


def _bare(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in KEYS}


def _tagged(thought: str, answer: str) -> str:
    return f"{BEGIN}\n{thought.strip()}\n{END}\n\n{answer.lstrip()}"
