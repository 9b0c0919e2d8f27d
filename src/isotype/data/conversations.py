"""Conversations as chat templates take them: roles, text, tool calls, pictures, thoughts.
ShareGPT's turns are brought into the same form.

The thoughts of a reasoning model stand in the content of a turn between `<think>` and `</think>`,
or in a key beside it; `data.thoughts` says which are kept. Templates in the style of Qwen3 write
those behind the last question and leave earlier ones out; to keep all, the tags of earlier turns
are hidden from the template while it renders.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from .bad_rows import EmptyAnswer, RowError
from .records import RepeatedKey, loads

Message = dict[str, Any]
# keys of a turn that say whether it is learnt: OpenAI's, and two that axolotl's data have
LEARN_KEYS = ("weight", "train", "training")
ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES = {
    "human": "user",
    **dict.fromkeys(("gpt", "model", "bot", "ai", "chatbot"), "assistant"),
}
# ShareGPT's `from`, as its data sets write it
_SHAREGPT = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "function_call": "function_call", "tool_call": "function_call",
    "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip

THOUGHT_KEYS = ("reasoning_content", "thinking")  # keys of a turn in which data write thoughts
BEGIN = "<think>"
END = "</think>"
CONTENT = "content"
_EMPTY = re.compile(rf"{BEGIN}\s*{END}")
DOUBLED_THOUGHTS = re.compile(rf"{_EMPTY.pattern}\s*{BEGIN}")
# the key that holds thoughts, and whether a question comes after them
Writes = AbstractSet[tuple[str, bool]]
_BLOCK = re.compile(rf"{BEGIN}(.*?){END}\s*", re.DOTALL)
# private-use characters: in no template, in no text
_HIDDEN = {BEGIN: "\U000f0f10", END: "\U000f0f11"}


def chat_messages(
    value: Any, key: str, place: str, *, may_be_empty: bool = False
) -> tuple[Message, ...]:
    """A list of messages, checked: text parts joined, arguments of tool calls as objects.

    key  what the row calls the list, for errors
    """
    messages = parsed_json(value, f"{place}: {key}")
    if not isinstance(messages, list) or not (messages or may_be_empty):
        raise RowError(f"{place}: {key} must be a list of {{role, content}}, got {kind(messages)}")
    return tuple(_message(m, f"{key}[{i}]", place) for i, m in enumerate(messages))


def sharegpt_messages(value: Any, key: str, place: str) -> tuple[Message, ...]:
    """ShareGPT's `conversations`: turns of `from` and `value`. `function_call` holds the call as
    JSON, `observation` its result.
    """
    turns = parsed_json(value, f"{place}: {key}")
    if not isinstance(turns, list) or not turns:
        raise RowError(f"{place}: {key} must be a list of {{from, value}}, got {kind(turns)}")
    if all(isinstance(turn, dict) and "role" in turn and "from" not in turn for turn in turns):
        return chat_messages(turns, key, place)
    return tuple(_sharegpt_turn(turn, f"{key}[{i}]", place) for i, turn in enumerate(turns))


def with_system(messages: tuple[Message, ...], system: Any, place: str) -> tuple[Message, ...]:
    """The turns after a system prompt that the row has beside them; one that is the first turn
    already is not added again.
    """
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise RowError(f"{place}: system must be text, got {kind(system)}")
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer") and first["content"] == system:
        return messages
    return ({"role": "system", "content": system}, *messages)


def tool_list(row: Mapping[str, Any], place: str) -> list[Any] | None:
    """The row's tools as the template takes them: a list of descriptions; None for none.
    `functions` is OpenAI's older name.
    """
    value = row.get("tools")
    if value is None and isinstance(row.get("functions"), list):
        value = [{"type": "function", "function": function} for function in row["functions"]]
    tools = parsed_json(value, f"{place}: tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise RowError(f"{place}: tools must be a list of objects, got {kind(tools)}")
    found = [parsed_json(tool, f"{place}: tools[{i}]") for i, tool in enumerate(tools)]
    for i, tool in enumerate(found):
        if not isinstance(tool, dict):
            raise RowError(f"{place}: tools[{i}] must be an object, got {kind(tool)}")
    return found


def is_learnt(message: Message) -> bool:
    """Whether the row lets a run learn this turn: not where the turn says `weight: 0`, `train:
    false` or `training: false`.
    """
    return all(message.get(key) is None or bool(message[key]) for key in LEARN_KEYS)


def parsed_json(value: Any, at: str) -> Any:
    """Parses a table's cell that holds a list or object as JSON; returns anything else unchanged.
    Raises RowError for a key given twice.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            found = loads(value)
        except RepeatedKey as error:
            raise RowError(f"{at}: {error}") from None
        except (ValueError, RecursionError):
            return value
        return found if isinstance(found, list | dict) else value
    return value


def kind(value: Any) -> str:
    """The kind of a wrong value, in JSON's terms."""
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return ("an empty list" if value == [] else None) or names.get(
        type(value), type(value).__name__
    )


def _message(given: Any, where: str, place: str) -> Message:
    at = f"{place}: {where}"
    if not isinstance(given, dict):
        raise RowError(f"{at} must be an object with role and content, got {kind(given)}")
    if "role" not in given:
        if "from" in given and "value" in given:
            raise RowError(
                f"{at} has from and value: that is ShareGPT, whose key is conversations:"
                " data.columns: {conversations: messages}"
            )
        raise RowError(f"{at} has no role{_suggestion('role', given)}")
    message = _present_day(given)
    role = message["role"]
    if role not in ROLES:
        meant = _OTHER_NAMES.get(str(role).lower()) or next(
            iter(difflib.get_close_matches(str(role).lower(), ROLES, n=1)), None
        )
        raise RowError(
            f"{at}.role: unknown role {role!r}"
            + (f", did you mean {meant}?" if meant else f": use {', '.join(ROLES)}")
        )
    _check_learn_keys(message, at)
    calls = parsed_json(message.pop("tool_calls", None), f"{at}.tool_calls")
    if calls:
        if role != "assistant":
            raise RowError(f"{at}: tool_calls belong to an assistant turn, not to {role}")
        calls = _calls(calls, at)
        content = message.get("content")
        return {
            **message,
            "content": "" if content is None else _content(content, at, may_be_empty=True),
            "tool_calls": calls,
        }
    if "content" not in message:
        raise RowError(f"{at} has no content{_suggestion('content', message)}")
    return message | {
        "content": _content(
            message["content"], at, may_be_empty=role != "assistant" or not is_learnt(message)
        )
    }


def _present_day(message: Message) -> Message:
    """A message with OpenAI's older names of a tool call (`function_call`) and of its result (role
    `function`) as it is written today.
    """
    message = message | {"role": "tool" if message["role"] == "function" else message["role"]}
    if isinstance(message.get("function_call"), dict) and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    return message


def _check_learn_keys(turn: Message, at: str) -> None:
    """Raises  RowError for a weight between 0 and 1: a turn is learnt, or it is not."""
    for key in LEARN_KEYS:
        value = turn.get(key)
        if not (
            value is None
            or isinstance(value, bool)
            or (isinstance(value, int | float) and value in (0, 1))
        ):
            raise RowError(
                f"{at}.{key} must be 0 or 1, true or false, got"
                f" {json.dumps(value, default=str)[:40]}: a turn is learnt, or it is not"
            )


def _content(content: Any, at: str, *, may_be_empty: bool) -> Any:
    """The text of a message: as it is, or its text parts joined; the parts themselves where there
    are pictures among them.
    """
    if isinstance(content, list):
        if any(isinstance(part, dict) and part.get("type") == "image" for part in content):
            return content
        content = "".join(
            _text_of_part(part, f"{at}.content[{i}]") for i, part in enumerate(content)
        )
    if not may_be_empty and (content is None or (isinstance(content, str) and not content.strip())):
        raise EmptyAnswer(f"{at}.content is empty: the row has no target")
    if not isinstance(content, str):
        raise RowError(f"{at}.content must be text, got {kind(content)}")
    return content


IN_TEXT = "<image>"  # LLaVA's and ShareGPT's mark of a picture
_PICTURE = ("image", "path", "url", "bytes")


def take_pictures(
    messages: tuple[Message, ...], row: Mapping[str, Any], place: str
) -> tuple[tuple[Message, ...], tuple[Any, ...]]:
    """(the turns, with parts where there are pictures; the pictures as the row gives them, in their
    order).

    A part `{type: image}` brings its picture, or takes the next of the row's `images` (or `image`).
    Text has its marks `<image>`, or else the pictures stand before the first question, as TRL puts
    them.
    """
    beside = _beside(row, place)
    waiting = list(beside)
    found: list[Any] = []
    turns: list[Message] = []
    marked = any(IN_TEXT in m["content"] for m in messages if isinstance(m["content"], str))
    for i, message in enumerate(messages):
        parts = message["content"]
        if isinstance(parts, str) and beside and message["role"] != "assistant":
            if marked:
                texts = parts.split(IN_TEXT)
                parts = [
                    part
                    for text in texts
                    for part in ({"type": "image"}, {"type": "text", "text": text})
                ][1:]
                if len(texts) > 1:
                    parts = [part for part in parts if part.get("text") != ""]
                else:
                    parts = message["content"]
            elif message["role"] == "user" and waiting and len(waiting) == len(beside):
                parts = [{"type": "image"}] * len(waiting) + [{"type": "text", "text": parts}]
        if not isinstance(parts, str) or (
            beside and message["role"] == "assistant" and IN_TEXT in parts
        ):
            if message["role"] == "assistant":
                raise RowError(
                    f"{place}: messages[{i}] (assistant) has a picture: answers are text"
                )
            parts = [
                _part(part, f"{place}: messages[{i}].content[{j}]", waiting, found)
                for j, part in enumerate(parts)
            ]
        turns.append({**message, "content": parts})
    if waiting:
        raise RowError(
            f"{place}: {len(beside)} pictures and {len(found)} marks ({{type: image}}, or {IN_TEXT}"
            " in the text): one each"
        )
    return tuple(turns), tuple(found)


def _beside(row: Mapping[str, Any], place: str) -> list[Any]:
    """The pictures that a row has beside its turns."""
    given = parsed_json(
        row.get("images") if row.get("images") is not None else row.get("image"), f"{place}: images"
    )
    if isinstance(given, list | tuple):
        return list(given)
    if given not in (None, ""):
        return [given]
    return []


def _part(part: Any, at: str, waiting: list[Any], found: list[Any]) -> Message:
    if not isinstance(part, dict) or part.get("type") != "image":
        return {"type": "text", "text": _text_of_part(part, at)}
    own = next((part[key] for key in _PICTURE if part.get(key) is not None), None)
    if own is None and not waiting:
        raise RowError(
            f"{at} is a picture without one: give its image, path, url or bytes, or one more in the"
            " row's images"
        )
    found.append(waiting.pop(0) if own is None else own)
    return {"type": "image"}


def _text_of_part(part: Any, at: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and part.get("type", "text") != "text":
        what = f"a part of type {part['type']!r}"
    else:
        what = kind(part)
    raise RowError(
        f"{at} must be {{type: text, text: ...}} or {{type: image, path: ...}}, got {what}"
    )


def _calls(calls: Any, at: str) -> list[Any]:
    """Tool calls whose arguments are objects: as text, a template would write them out as JSON in
    JSON.
    """
    if not isinstance(calls, list):
        raise RowError(f"{at}.tool_calls must be a list, got {kind(calls)}")
    checked = []
    for i, call in enumerate(calls):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise RowError(
                f"{at}.tool_calls[{i}] must be {{type: function, function: {{name, arguments}}}},"
                f" got {kind(call)}"
            )
        arguments = parsed_json(inner.get("arguments", {}), f"{at}.tool_calls[{i}].arguments")
        if isinstance(arguments, str) and arguments.strip():
            raise RowError(
                f"{at}.tool_calls[{i}].arguments must be an object, or one as JSON:"
                f" {arguments[:40]!r}"
            )
        function = {**inner, "arguments": arguments or {}}
        checked.append(
            {**call, "function": function}
            if "function" in call
            else {"type": "function", "function": function}
        )
    return checked


def _sharegpt_turn(turn: Any, where: str, place: str) -> Message:
    at = f"{place}: {where}"
    if not isinstance(turn, dict):
        raise RowError(f"{at} must be an object with from and value, got {kind(turn)}")
    for key in ("from", "value"):
        if key not in turn:
            raise RowError(f"{at} has no {key}{_suggestion(key, turn)}")
    role = _SHAREGPT.get(str(turn["from"]).lower())
    if role is None:
        raise RowError(
            f"{at}.from: unknown role {turn['from']!r}: use human, gpt, system, function_call or"
            " observation"
        )
    _check_learn_keys(turn, at)
    value = turn["value"]
    beside = {
        key: said
        for key, said in turn.items()
        if key not in ("from", "value", "role", "content", "tool_calls")
    }
    if role == "function_call":
        call = parsed_json(value, f"{at}.value")
        return {
            **beside,
            "role": "assistant",
            "content": "",
            "tool_calls": _calls(call if isinstance(call, list) else [call], at),
        }
    if (
        role == "assistant"
        and is_learnt(turn)
        and (value is None or (isinstance(value, str) and not value.strip()))
    ):
        raise EmptyAnswer(f"{at}.value is empty: the row has no target")
    if not isinstance(value, str):
        raise RowError(f"{at}.value must be text, got {kind(value)}")
    return {**beside, "role": role, "content": value}


def _suggestion(key: str, row: Message) -> str:
    close = difflib.get_close_matches(key, list(row), n=1, cutoff=0.75)
    return f", but {close[0]!r}: did you mean {key}?" if close else ""


# pairs of tags in which answers of reasoning models have their thoughts
_THOUGHT_TAGS = (
    (BEGIN, END),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
)


def refuse_cut_thoughts(answer: Any, at: str) -> None:
    """Raises RowError for an answer that begins with thoughts and ends inside them, as a limit on
    new tokens leaves it: learnt, it would teach to end there.
    """
    text = answer.lstrip() if isinstance(answer, str) else ""
    for begin, end in _THOUGHT_TAGS:
        if text.startswith(begin) and end not in text:
            raise RowError(f"{at} ends inside its thoughts: {begin} without {end}")


def with_thoughts(
    messages: Sequence[Message], which: str, *, writes: Writes, tags: bool, place: str
) -> tuple[Message, ...]:
    """The turns with the thoughts that are kept, where the template finds them.

    which   `last`: those behind the last question; `all`; `none`
    writes  what the template writes, as `probes` found it
    tags    whether the template itself has the tags
    Raises  RowError for a tag without the other one, EmptyAnswer for a learnt turn that is nothing
            but thoughts
    """
    last = last_question(messages)
    found = list(messages)
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and (which == "none" or (which == "last" and i < last)):
            found[i] = _without(message, f"{place}: messages[{i}]")
        elif message["role"] == "assistant":
            found[i] = _placed(message, earlier=i < last, writes=writes, tags=tags)
    return tuple(found)


def probes(word: str) -> Iterator[tuple[tuple[str, bool], list[Message]]]:
    """Conversations with a word as a thought, each place of it before the last question and behind
    it.
    """
    for form in (CONTENT, *THOUGHT_KEYS):
        if form == CONTENT:
            answer = {"content": _tagged(word, "b")}
        else:
            answer = {"content": "b", form: word}
        turns: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]
        yield (form, False), turns
        yield (
            (form, True),
            [
                *turns,
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
            ],
        )


def last_question(messages: Sequence[Message]) -> int:
    """The place of the last turn of the user; -1 for none."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def hidden(messages: Sequence[Message]) -> list[Message]:
    """The turns, those before the last question with tags that no template knows. `shown` brings
    the tags back.
    """
    last = last_question(messages)
    return [
        (
            m | {"content": _swapped(m["content"], _HIDDEN)}
            if m["role"] == "assistant" and i < last
            else m
        )
        for i, m in enumerate(messages)
    ]


def shown(text: str) -> str:
    return _swapped(text, {mark: tag for tag, mark in _HIDDEN.items()})


def learns_empty(text: str, learnt: Sequence[tuple[int, int]]) -> bool:
    """Whether learnt characters have the end of empty thoughts, whose beginning may be in the
    prompt.
    """
    ends = [found.end() for found in _EMPTY.finditer(text)]
    return any(start <= end - len(END) and end <= stop for start, stop in learnt for end in ends)


def _swapped(text: str, words: dict[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text


def _without(message: Message, at: str) -> Message:
    content = message["content"]
    answer = _BLOCK.sub("", content)
    if BEGIN in answer or END in answer:
        raise RowError(
            f"{at}.content has {BEGIN} or {END} without the other one: its thoughts cannot be told"
            " from its answer"
        )
    if (
        content.strip()
        and not answer.strip()
        and is_learnt(message)
        and not message.get("tool_calls")
    ):
        raise EmptyAnswer(f"{at}.content is empty without its thoughts: the row has no target")
    return _bare(message) | {"content": answer}


def _placed(message: Message, *, earlier: bool, writes: Writes, tags: bool) -> Message:
    """A turn whose thoughts stand where the template writes them; else in its content, as Qwen3
    writes them.

    They stay where they are if the template has other marks for thoughts, as gpt-oss' has.
    """
    content = message["content"]
    block = _BLOCK.match(content)
    key = next(
        (key for key in THOUGHT_KEYS if isinstance(message.get(key), str) and message[key].strip()),
        None,
    )
    form = CONTENT if block is not None else key
    other_marks = not tags and any((key, False) in writes for key in THOUGHT_KEYS)
    if form is None or (form, earlier) in writes or other_marks:
        return message
    if block is not None:
        thought = block[1]
        answer = content[block.end() :]
    else:
        thought = message[form]
        answer = content
    return _bare(message) | {"content": _tagged(thought, answer)}


def _bare(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in THOUGHT_KEYS}


def _tagged(thought: str, answer: str) -> str:
    return f"{BEGIN}\n{thought.strip()}\n{END}\n\n{answer.lstrip()}"
