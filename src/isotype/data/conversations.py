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
from .records import RepeatedKey, parse_json

Message = dict[str, Any]
# keys of a turn that say whether it is learnt: OpenAI's, and two that axolotl's data have
LEARN_KEYS = ("weight", "train", "training")
ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_ALIASES = {
    "human": "user",
    **dict.fromkeys(("gpt", "model", "bot", "ai", "chatbot"), "assistant"),
}
# ShareGPT's `from`, as its data sets write it
_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "function_call": "function_call", "tool_call": "function_call",
    "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip

THOUGHT_KEYS = ("reasoning_content", "thinking")  # keys of a turn in which data write thoughts
BEGIN_THOUGHTS = "<think>"
END_THOUGHTS = "</think>"
CONTENT_KEY = "content"
_EMPTY_THOUGHTS = re.compile(rf"{BEGIN_THOUGHTS}\s*{END_THOUGHTS}")
DOUBLED_THOUGHTS = re.compile(rf"{_EMPTY_THOUGHTS.pattern}\s*{BEGIN_THOUGHTS}")
# the key that holds thoughts, and whether a question comes after them
ThoughtPositions = AbstractSet[tuple[str, bool]]
_THOUGHTS_BLOCK = re.compile(rf"{BEGIN_THOUGHTS}(.*?){END_THOUGHTS}\s*", re.DOTALL)
# private-use characters: in no template, in no text
_HIDDEN_TAGS = {BEGIN_THOUGHTS: "\U000f0f10", END_THOUGHTS: "\U000f0f11"}


def chat_messages(
    value: Any, key: str, location: str, *, may_be_empty: bool = False
) -> tuple[Message, ...]:
    """A list of messages, checked: text parts joined, arguments of tool calls as objects.

    key  what the row calls the list, for errors
    """
    messages = parse_json_cell(value, f"{location}: {key}")
    if not isinstance(messages, list) or not (messages or may_be_empty):
        raise RowError(
            f"{location}: {key} must be a list of {{role, content}}, got {json_kind(messages)}"
        )
    return tuple(_check_message(m, f"{key}[{i}]", location) for i, m in enumerate(messages))


def sharegpt_messages(value: Any, key: str, location: str) -> tuple[Message, ...]:
    """ShareGPT's `conversations`: turns of `from` and `value`. `function_call` holds the call as
    JSON, `observation` its result.
    """
    turns = parse_json_cell(value, f"{location}: {key}")
    if not isinstance(turns, list) or not turns:
        raise RowError(
            f"{location}: {key} must be a list of {{from, value}}, got {json_kind(turns)}"
        )
    if all(isinstance(turn, dict) and "role" in turn and "from" not in turn for turn in turns):
        return chat_messages(turns, key, location)
    return tuple(
        _convert_sharegpt_turn(turn, f"{key}[{i}]", location) for i, turn in enumerate(turns)
    )


def add_system_prompt(
    messages: tuple[Message, ...], system: Any, location: str
) -> tuple[Message, ...]:
    """The turns after a system prompt that the row has beside them; one that is the first turn
    already is not added again.
    """
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise RowError(f"{location}: system must be text, got {json_kind(system)}")
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer") and first["content"] == system:
        return messages
    return ({"role": "system", "content": system}, *messages)


def read_tools(row: Mapping[str, Any], location: str) -> list[Any] | None:
    """The row's tools as the template takes them: a list of descriptions; None for none.
    `functions` is OpenAI's older name.
    """
    value = row.get("tools")
    if value is None and isinstance(row.get("functions"), list):
        value = [{"type": "function", "function": function} for function in row["functions"]]
    tools = parse_json_cell(value, f"{location}: tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise RowError(f"{location}: tools must be a list of objects, got {json_kind(tools)}")
    descriptions = [
        parse_json_cell(tool, f"{location}: tools[{i}]") for i, tool in enumerate(tools)
    ]
    for i, tool in enumerate(descriptions):
        if not isinstance(tool, dict):
            raise RowError(f"{location}: tools[{i}] must be an object, got {json_kind(tool)}")
    return descriptions


def is_learnt(message: Message) -> bool:
    """Whether the row lets a run learn this turn: not where the turn says `weight: 0`, `train:
    false` or `training: false`.
    """
    return all(message.get(key) is None or bool(message[key]) for key in LEARN_KEYS)


def parse_json_cell(value: Any, path: str) -> Any:
    """Parses a table's cell that holds a list or object as JSON; returns anything else unchanged.
    Raises RowError for a key given twice.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            parsed = parse_json(value)
        except RepeatedKey as error:
            raise RowError(f"{path}: {error}") from None
        except (ValueError, RecursionError):
            return value
        return parsed if isinstance(parsed, list | dict) else value
    return value


def json_kind(value: Any) -> str:
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


def _check_message(raw_message: Any, key: str, location: str) -> Message:
    path = f"{location}: {key}"
    if not isinstance(raw_message, dict):
        raise RowError(
            f"{path} must be an object with role and content, got {json_kind(raw_message)}"
        )
    if "role" not in raw_message:
        if "from" in raw_message and "value" in raw_message:
            raise RowError(
                f"{path} has from and value: that is ShareGPT, whose key is conversations:"
                " data.columns: {conversations: messages}"
            )
        raise RowError(f"{path} has no role{_suggestion('role', raw_message)}")
    message = _modernise_message(raw_message)
    role = message["role"]
    if role not in ROLES:
        suggestion = _ROLE_ALIASES.get(str(role).lower()) or next(
            iter(difflib.get_close_matches(str(role).lower(), ROLES, n=1)), None
        )
        raise RowError(
            f"{path}.role: unknown role {role!r}"
            + (f", did you mean {suggestion}?" if suggestion else f": use {', '.join(ROLES)}")
        )
    _check_learn_keys(message, path)
    calls = parse_json_cell(message.pop("tool_calls", None), f"{path}.tool_calls")
    if calls:
        if role != "assistant":
            raise RowError(f"{path}: tool_calls belong to an assistant turn, not to {role}")
        calls = _check_calls(calls, path)
        content = message.get("content")
        return {
            **message,
            "content": "" if content is None else _check_content(content, path, may_be_empty=True),
            "tool_calls": calls,
        }
    if "content" not in message:
        raise RowError(f"{path} has no content{_suggestion('content', message)}")
    return message | {
        "content": _check_content(
            message["content"], path, may_be_empty=role != "assistant" or not is_learnt(message)
        )
    }


def _modernise_message(message: Message) -> Message:
    """A message with OpenAI's older names of a tool call (`function_call`) and of its result (role
    `function`) as it is written today.
    """
    message = message | {"role": "tool" if message["role"] == "function" else message["role"]}
    if isinstance(message.get("function_call"), dict) and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    return message


def _check_learn_keys(turn: Message, path: str) -> None:
    """Raises  RowError for a weight between 0 and 1: a turn is learnt, or it is not."""
    for key in LEARN_KEYS:
        value = turn.get(key)
        if not (
            value is None
            or isinstance(value, bool)
            or (isinstance(value, int | float) and value in (0, 1))
        ):
            raise RowError(
                f"{path}.{key} must be 0 or 1, true or false, got"
                f" {json.dumps(value, default=str)[:40]}: a turn is learnt, or it is not"
            )


def _check_content(content: Any, path: str, *, may_be_empty: bool) -> Any:
    """The text of a message: as it is, or its text parts joined; the parts themselves where there
    are pictures among them.
    """
    if isinstance(content, list):
        if any(isinstance(part, dict) and part.get("type") == "image" for part in content):
            return content
        content = "".join(
            _part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content)
        )
    if not may_be_empty and (content is None or (isinstance(content, str) and not content.strip())):
        raise EmptyAnswer(f"{path}.content is empty: the row has no target")
    if not isinstance(content, str):
        raise RowError(f"{path}.content must be text, got {json_kind(content)}")
    return content


PICTURE_MARK = "<image>"  # LLaVA's and ShareGPT's mark of a picture
_PICTURE_KEYS = ("image", "path", "url", "bytes")


def take_pictures(
    messages: tuple[Message, ...], row: Mapping[str, Any], location: str
) -> tuple[tuple[Message, ...], tuple[Any, ...]]:
    """(the turns, with parts where there are pictures; the pictures as the row gives them, in their
    order).

    A part `{type: image}` brings its picture, or takes the next of the row's `images` (or `image`).
    Text has its marks `<image>`, or else the pictures stand before the first question, as TRL puts
    them.
    """
    row_pictures = _row_pictures(row, location)
    remaining = list(row_pictures)
    pictures: list[Any] = []
    turns: list[Message] = []
    has_marks = any(PICTURE_MARK in m["content"] for m in messages if isinstance(m["content"], str))
    for i, message in enumerate(messages):
        parts = message["content"]
        if isinstance(parts, str) and row_pictures and message["role"] != "assistant":
            if has_marks:
                texts = parts.split(PICTURE_MARK)
                parts = [
                    part
                    for text in texts
                    for part in ({"type": "image"}, {"type": "text", "text": text})
                ][1:]
                if len(texts) > 1:
                    parts = [part for part in parts if part.get("text") != ""]
                else:
                    parts = message["content"]
            elif message["role"] == "user" and remaining and len(remaining) == len(row_pictures):
                parts = [{"type": "image"}] * len(remaining) + [{"type": "text", "text": parts}]
        if not isinstance(parts, str) or (
            row_pictures and message["role"] == "assistant" and PICTURE_MARK in parts
        ):
            if message["role"] == "assistant":
                raise RowError(
                    f"{location}: messages[{i}] (assistant) has a picture: answers are text"
                )
            parts = [
                _check_part(part, f"{location}: messages[{i}].content[{j}]", remaining, pictures)
                for j, part in enumerate(parts)
            ]
        turns.append({**message, "content": parts})
    if remaining:
        raise RowError(
            f"{location}: {len(row_pictures)} pictures and {len(pictures)} marks ({{type: image}}, or {PICTURE_MARK}"
            " in the text): one each"
        )
    return tuple(turns), tuple(pictures)


def _row_pictures(row: Mapping[str, Any], location: str) -> list[Any]:
    """The pictures that a row has beside its turns."""
    pictures = parse_json_cell(
        row.get("images") if row.get("images") is not None else row.get("image"),
        f"{location}: images",
    )
    if isinstance(pictures, list | tuple):
        return list(pictures)
    if pictures not in (None, ""):
        return [pictures]
    return []


def _check_part(part: Any, path: str, remaining: list[Any], pictures: list[Any]) -> Message:
    if not isinstance(part, dict) or part.get("type") != "image":
        return {"type": "text", "text": _part_text(part, path)}
    picture = next((part[key] for key in _PICTURE_KEYS if part.get(key) is not None), None)
    if picture is None and not remaining:
        raise RowError(
            f"{path} is a picture without one: give its image, path, url or bytes, or one more in the"
            " row's images"
        )
    pictures.append(remaining.pop(0) if picture is None else picture)
    return {"type": "image"}


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and part.get("type", "text") != "text":
        description = f"a part of type {part['type']!r}"
    else:
        description = json_kind(part)
    raise RowError(
        f"{path} must be {{type: text, text: ...}} or {{type: image, path: ...}}, got {description}"
    )


def _check_calls(calls: Any, path: str) -> list[Any]:
    """Tool calls whose arguments are objects: as text, a template would write them out as JSON in
    JSON.
    """
    if not isinstance(calls, list):
        raise RowError(f"{path}.tool_calls must be a list, got {json_kind(calls)}")
    checked = []
    for i, call in enumerate(calls):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise RowError(
                f"{path}.tool_calls[{i}] must be {{type: function, function: {{name, arguments}}}},"
                f" got {json_kind(call)}"
            )
        arguments = parse_json_cell(inner.get("arguments", {}), f"{path}.tool_calls[{i}].arguments")
        if isinstance(arguments, str) and arguments.strip():
            raise RowError(
                f"{path}.tool_calls[{i}].arguments must be an object, or one as JSON:"
                f" {arguments[:40]!r}"
            )
        function = {**inner, "arguments": arguments or {}}
        checked.append(
            {**call, "function": function}
            if "function" in call
            else {"type": "function", "function": function}
        )
    return checked


def _convert_sharegpt_turn(turn: Any, turn_key: str, location: str) -> Message:
    path = f"{location}: {turn_key}"
    if not isinstance(turn, dict):
        raise RowError(f"{path} must be an object with from and value, got {json_kind(turn)}")
    for key in ("from", "value"):
        if key not in turn:
            raise RowError(f"{path} has no {key}{_suggestion(key, turn)}")
    role = _SHAREGPT_ROLES.get(str(turn["from"]).lower())
    if role is None:
        raise RowError(
            f"{path}.from: unknown role {turn['from']!r}: use human, gpt, system, function_call or"
            " observation"
        )
    _check_learn_keys(turn, path)
    value = turn["value"]
    other_keys = {
        key: item
        for key, item in turn.items()
        if key not in ("from", "value", "role", "content", "tool_calls")
    }
    if role == "function_call":
        call = parse_json_cell(value, f"{path}.value")
        return {
            **other_keys,
            "role": "assistant",
            "content": "",
            "tool_calls": _check_calls(call if isinstance(call, list) else [call], path),
        }
    if (
        role == "assistant"
        and is_learnt(turn)
        and (value is None or (isinstance(value, str) and not value.strip()))
    ):
        raise EmptyAnswer(f"{path}.value is empty: the row has no target")
    if not isinstance(value, str):
        raise RowError(f"{path}.value must be text, got {json_kind(value)}")
    return {**other_keys, "role": role, "content": value}


def _suggestion(key: str, row: Message) -> str:
    close = difflib.get_close_matches(key, list(row), n=1, cutoff=0.75)
    return f", but {close[0]!r}: did you mean {key}?" if close else ""


# pairs of tags in which answers of reasoning models have their thoughts
_THOUGHT_TAGS = (
    (BEGIN_THOUGHTS, END_THOUGHTS),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
)


def refuse_cut_thoughts(answer: Any, path: str) -> None:
    """Raises RowError for an answer that begins with thoughts and ends inside them, as a limit on
    new tokens leaves it: learnt, it would teach to end there.
    """
    text = answer.lstrip() if isinstance(answer, str) else ""
    for begin, end in _THOUGHT_TAGS:
        if text.startswith(begin) and end not in text:
            raise RowError(f"{path} ends inside its thoughts: {begin} without {end}")


def select_thoughts(
    messages: Sequence[Message],
    selection: str,
    *,
    writes: ThoughtPositions,
    tags: bool,
    location: str,
) -> tuple[Message, ...]:
    """The turns with the thoughts that are kept, where the template finds them.

    selection  `last`: those behind the last question; `all`; `none`
    writes  what the template writes, as `thought_probes` found it
    tags    whether the template itself has the tags
    Raises  RowError for a tag without the other one, EmptyAnswer for a learnt turn that is nothing
            but thoughts
    """
    last = last_question(messages)
    turns = list(messages)
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and (
            selection == "none" or (selection == "last" and i < last)
        ):
            turns[i] = _remove_thoughts(message, f"{location}: messages[{i}]")
        elif message["role"] == "assistant":
            turns[i] = _move_thoughts(message, is_earlier=i < last, writes=writes, tags=tags)
    return tuple(turns)


def thought_probes(thought: str) -> Iterator[tuple[tuple[str, bool], list[Message]]]:
    """Conversations with a word as a thought, each place of it before the last question and behind
    it.
    """
    for key in (CONTENT_KEY, *THOUGHT_KEYS):
        if key == CONTENT_KEY:
            answer = {"content": _tag_thoughts(thought, "b")}
        else:
            answer = {"content": "b", key: thought}
        turns: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]
        yield (key, False), turns
        yield (
            (key, True),
            [
                *turns,
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
            ],
        )


def last_question(messages: Sequence[Message]) -> int:
    """The place of the last turn of the user; -1 for none."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def hide_thought_tags(messages: Sequence[Message]) -> list[Message]:
    """The turns, those before the last question with tags that no template knows. `restore_thought_tags` brings
    the tags back.
    """
    last = last_question(messages)
    return [
        (
            m | {"content": _replace_all(m["content"], _HIDDEN_TAGS)}
            if m["role"] == "assistant" and i < last
            else m
        )
        for i, m in enumerate(messages)
    ]


def restore_thought_tags(text: str) -> str:
    return _replace_all(text, {mark: tag for tag, mark in _HIDDEN_TAGS.items()})


def learns_empty_thoughts(text: str, learnt: Sequence[tuple[int, int]]) -> bool:
    """Whether learnt characters have the end of empty thoughts, whose beginning may be in the
    prompt.
    """
    ends = [match.end() for match in _EMPTY_THOUGHTS.finditer(text)]
    return any(
        start <= end - len(END_THOUGHTS) and end <= stop for start, stop in learnt for end in ends
    )


def _replace_all(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


def _remove_thoughts(message: Message, path: str) -> Message:
    content = message["content"]
    answer = _THOUGHTS_BLOCK.sub("", content)
    if BEGIN_THOUGHTS in answer or END_THOUGHTS in answer:
        raise RowError(
            f"{path}.content has {BEGIN_THOUGHTS} or {END_THOUGHTS} without the other one: its thoughts cannot be told"
            " from its answer"
        )
    if (
        content.strip()
        and not answer.strip()
        and is_learnt(message)
        and not message.get("tool_calls")
    ):
        raise EmptyAnswer(f"{path}.content is empty without its thoughts: the row has no target")
    return _drop_thought_keys(message) | {"content": answer}


def _move_thoughts(
    message: Message, *, is_earlier: bool, writes: ThoughtPositions, tags: bool
) -> Message:
    """A turn whose thoughts stand where the template writes them; else in its content, as Qwen3
    writes them.

    They stay where they are if the template has other marks for thoughts, as gpt-oss' has.
    """
    content = message["content"]
    block = _THOUGHTS_BLOCK.match(content)
    key = next(
        (key for key in THOUGHT_KEYS if isinstance(message.get(key), str) and message[key].strip()),
        None,
    )
    source_key = CONTENT_KEY if block is not None else key
    other_marks = not tags and any((key, False) in writes for key in THOUGHT_KEYS)
    if source_key is None or (source_key, is_earlier) in writes or other_marks:
        return message
    if block is not None:
        thought = block[1]
        answer = content[block.end() :]
    else:
        thought = message[source_key]
        answer = content
    return _drop_thought_keys(message) | {"content": _tag_thoughts(thought, answer)}


def _drop_thought_keys(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in THOUGHT_KEYS}


def _tag_thoughts(thought: str, answer: str) -> str:
    return f"{BEGIN_THOUGHTS}\n{thought.strip()}\n{END_THOUGHTS}\n\n{answer.lstrip()}"
