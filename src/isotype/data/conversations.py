"""Checks conversations and converts them to the form that chat templates read. This module converts
the roles, the text, the tool calls, the pictures and the thoughts of the turns. It also converts
turns in ShareGPT's form.

Some data contain the thoughts of a reasoning model, either between `<think>` and `</think>` in the
content of a turn, or in a separate key of the turn. `data.thoughts` selects which thoughts are
kept. Some templates, such as that of Qwen3, write only the thoughts after the last question and
leave out all earlier thoughts. To keep all thoughts, the tags of earlier turns are replaced by
other characters before the template renders the conversation.
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
from .row_keys import ROLES, SHAREGPT_ROLES

Message = dict[str, Any]  # one message (turn) of a conversation, as in OpenAI's format
# keys of a turn that say whether it is learnt: `weight` is OpenAI's, the others are from axolotl's
# data
LEARN_KEYS = ("weight", "train", "training")
# other names of roles -> roles
_ROLE_ALIASES = {
    "human": "user",
    **dict.fromkeys(("gpt", "model", "bot", "ai", "chatbot"), "assistant"),
}

THOUGHT_KEYS = ("reasoning_content", "thinking")  # keys of a turn that contain its thoughts
BEGIN_THOUGHTS = "<think>"
END_THOUGHTS = "</think>"
CONTENT_KEY = "content"
_EMPTY_THOUGHTS = re.compile(rf"{BEGIN_THOUGHTS}\s*{END_THOUGHTS}")
# empty thoughts that are followed by other thoughts
EMPTY_BEFORE_FULL_THOUGHTS = re.compile(rf"{_EMPTY_THOUGHTS.pattern}\s*{BEGIN_THOUGHTS}")
# (the key that contains thoughts, whether a question follows them)
ThoughtPositions = AbstractSet[tuple[str, bool]]
_THOUGHTS_BLOCK = re.compile(rf"{BEGIN_THOUGHTS}(.*?){END_THOUGHTS}\s*", re.DOTALL)
# private-use characters, which templates and texts do not contain
_HIDDEN_TAGS = {BEGIN_THOUGHTS: "\U000f0f10", END_THOUGHTS: "\U000f0f11"}


def convert_chat_messages(
    value: Any, key: str, location: str, *, may_be_empty: bool = False
) -> tuple[Message, ...]:
    """Converts a list of messages to the form of chat templates. Text parts are joined, and the
    arguments of tool calls become objects.

    key  the row's key that contains the list, for error messages
    """
    messages = parse_json_cell(value, f"{location}: {key}")
    if not isinstance(messages, list) or not (messages or may_be_empty):
        raise RowError(
            f"{location}: {key} must be a list of {{role, content}}, got {describe_json_type(messages)}"
        )
    if is_sharegpt(messages):
        return convert_sharegpt_messages(messages, key, location)
    return tuple(
        _convert_message(message, f"{key}[{i}]", location) for i, message in enumerate(messages)
    )


def is_sharegpt(turns: Sequence[Any]) -> bool:
    """Returns True if all turns have ShareGPT's keys `from` and `value`."""
    return bool(turns) and all(
        isinstance(turn, dict) and "role" not in turn and {"from", "value"} <= turn.keys()
        for turn in turns
    )


def convert_sharegpt_messages(value: Any, key: str, location: str) -> tuple[Message, ...]:
    """Converts the list `conversations` of ShareGPT's format to messages. In this format, a turn
    has the keys `from` and `value`. If `from` is `function_call`, the turn contains a tool call as
    JSON. If it is `observation`, the turn contains the result of the tool call.
    """
    turns = parse_json_cell(value, f"{location}: {key}")
    if not isinstance(turns, list) or not turns:
        raise RowError(
            f"{location}: {key} must be a list of {{from, value}}, got {describe_json_type(turns)}"
        )
    if all(isinstance(turn, dict) and "role" in turn and "from" not in turn for turn in turns):
        return convert_chat_messages(turns, key, location)
    return tuple(
        _convert_sharegpt_turn(turn, f"{key}[{i}]", location) for i, turn in enumerate(turns)
    )


def add_system_prompt(
    messages: tuple[Message, ...], system: Any, location: str
) -> tuple[Message, ...]:
    """Returns the turns with the row's system prompt as the first turn. The prompt is not added if
    it is already the first turn.
    """
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise RowError(f"{location}: system must be text, got {describe_json_type(system)}")
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer") and first["content"] == system:
        return messages
    return ({"role": "system", "content": system}, *messages)


def read_tools(row: Mapping[str, Any], location: str) -> list[Any] | None:
    """Returns the row's tools as a list of descriptions, as chat templates expect them. Returns
    None if there are no tools. The row's key may also be `functions`, which is OpenAI's older key
    for tools.
    """
    value = row.get("tools")
    if value is None and isinstance(row.get("functions"), list):
        value = [{"type": "function", "function": function} for function in row["functions"]]
    tools = parse_json_cell(value, f"{location}: tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise RowError(
            f"{location}: tools must be a list of objects, got {describe_json_type(tools)}"
        )
    descriptions = [
        parse_json_cell(tool, f"{location}: tools[{i}]") for i, tool in enumerate(tools)
    ]
    for i, tool in enumerate(descriptions):
        if not isinstance(tool, dict):
            raise RowError(
                f"{location}: tools[{i}] must be an object, got {describe_json_type(tool)}"
            )
    return descriptions


def is_learnt(message: Message) -> bool:
    """Returns True if the model may learn this turn. The model does not learn a turn with `weight:
    0`, `train: false` or `training: false`.
    """
    return all(message.get(key) is None or bool(message[key]) for key in LEARN_KEYS)


def parse_json_cell(value: Any, path: str) -> Any:
    """Parses a table's cell that contains a list or object as JSON, and returns other values
    unchanged. Raises RowError for an object with a repeated key.
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


def describe_json_type(value: Any) -> str:
    """Returns the JSON type of a wrong value in words."""
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


def _convert_message(raw_message: Any, key: str, location: str) -> Message:
    """Converts one message to the form of chat templates. Raises RowError if the role is unknown,
    if the content is missing, or if a message of another role than the assistant contains tool
    calls.
    """
    path = f"{location}: {key}"
    if not isinstance(raw_message, dict):
        raise RowError(
            f"{path} must be an object with role and content, got {describe_json_type(raw_message)}"
        )
    if "role" not in raw_message:
        raise RowError(f"{path} has no role{_suggest_key('role', raw_message)}")
    if raw_message["role"] == "function_call":  # a role of ShareGPT with OpenAI's keys
        _check_learn_keys(raw_message, path)
        return _make_call_message(raw_message, raw_message.get("content"), f"{path}.content", path)
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
        calls = _convert_tool_calls(calls, path)
        content = message.get("content")
        return {
            **message,
            "content": ""
            if content is None
            else _convert_content(content, path, may_be_empty=True),
            "tool_calls": calls,
        }
    if "content" not in message:
        raise RowError(f"{path} has no content{_suggest_key('content', message)}")
    return message | {
        "content": _convert_content(
            message["content"], path, may_be_empty=role != "assistant" or not is_learnt(message)
        )
    }


def _modernise_message(message: Message) -> Message:
    """Replaces OpenAI's older names by the current names. The older names are `function_call` for a
    tool call, and the role `function` for its result.
    """
    message = message | {"role": "tool" if message["role"] == "function" else message["role"]}
    if isinstance(message.get("function_call"), dict) and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    return message


def _check_learn_keys(turn: Message, path: str) -> None:
    """Raises RowError for a weight other than 0 and 1, because the model learns a turn completely
    or not at all.
    """
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


def _convert_content(content: Any, path: str, *, may_be_empty: bool) -> Any:
    """Returns the content of a message as text. Several text parts are joined. If one of the parts
    is a picture, all parts are returned unchanged.
    """
    if isinstance(content, list):
        content = [_convert_picture_part(part) for part in content]
        if any(isinstance(part, dict) and part.get("type") == "image" for part in content):
            return content
        content = "".join(
            _part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content)
        )
    if not may_be_empty and (content is None or (isinstance(content, str) and not content.strip())):
        raise EmptyAnswer(f"{path}.content is empty: the row has no target")
    if not isinstance(content, str):
        raise RowError(f"{path}.content must be text, got {describe_json_type(content)}")
    return content


def _convert_picture_part(part: Any) -> Any:
    """Converts OpenAI's `{type: image_url, image_url: {url: ...}}` into a part of type `image`."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return part
    picture = part.get("image_url")
    url = picture.get("url") if isinstance(picture, dict) else picture
    return {"type": "image"} if url is None else {"type": "image", "url": url}


PICTURE_PLACEHOLDER = "<image>"  # the placeholder of a picture in texts of LLaVA and ShareGPT
_PICTURE_KEYS = ("image", "path", "url", "bytes")


def extract_pictures(
    messages: tuple[Message, ...], row: Mapping[str, Any], location: str
) -> tuple[tuple[Message, ...], tuple[Any, ...]]:
    """Returns the turns, and the pictures in the order in which the turns use them. The content of
    a turn with pictures is a list of parts. The pictures have the same form as in the row.

    A part `{type: image}` either contains its picture, or marks the place of the next picture in
    the row's key `images` (or `image`). In a text, `<image>` marks the place of a picture. If the
    turns mark no places, the pictures are put before the first question, as in TRL.
    """
    row_pictures = _row_pictures(row, location)
    remaining = list(row_pictures)
    pictures: list[Any] = []
    turns: list[Message] = []
    has_placeholders = any(
        PICTURE_PLACEHOLDER in message["content"]
        for message in messages
        if isinstance(message["content"], str)
    )
    for i, message in enumerate(messages):
        parts = message["content"]
        if isinstance(parts, str) and row_pictures and message["role"] != "assistant":
            if has_placeholders:
                texts = parts.split(PICTURE_PLACEHOLDER)
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
            row_pictures and message["role"] == "assistant" and PICTURE_PLACEHOLDER in parts
        ):
            if message["role"] == "assistant":
                raise RowError(
                    f"{location}: messages[{i}] (assistant) has a picture: answers are text"
                )
            parts = [
                _convert_part(part, f"{location}: messages[{i}].content[{j}]", remaining, pictures)
                for j, part in enumerate(parts)
            ]
        turns.append({**message, "content": parts})
    if remaining:
        raise RowError(
            f"{location}: {len(row_pictures)} pictures and {len(pictures)} places ({{type: image}}, or {PICTURE_PLACEHOLDER}"
            " in the text): one each"
        )
    return tuple(turns), tuple(pictures)


def _row_pictures(row: Mapping[str, Any], location: str) -> list[Any]:
    """Returns the pictures in the row's key `images` or `image`."""
    pictures = parse_json_cell(
        row.get("images") if row.get("images") is not None else row.get("image"),
        f"{location}: images",
    )
    if isinstance(pictures, list | tuple):
        return list(pictures)
    if pictures not in (None, ""):
        return [pictures]
    return []


def _convert_part(part: Any, path: str, remaining: list[Any], pictures: list[Any]) -> Message:
    """Converts one part of a message's content. If the part is a picture, the picture is added to
    `pictures`. The picture comes from the part itself or from `remaining`, the list of the row's
    pictures that are not used yet.
    """
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
        description = describe_json_type(part)
    raise RowError(
        f"{path} must be {{type: text, text: ...}} or {{type: image, path: ...}}, got {description}"
    )


def _convert_tool_calls(calls: Any, path: str) -> list[Any]:
    """Converts tool calls to OpenAI's form. If the arguments are given as text, the text is parsed
    into an object. Otherwise a template would write the arguments as a string within the JSON of
    the call.
    """
    if not isinstance(calls, list):
        raise RowError(f"{path}.tool_calls must be a list, got {describe_json_type(calls)}")
    converted = []
    for i, call in enumerate(calls):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise RowError(
                f"{path}.tool_calls[{i}] must be {{type: function, function: {{name, arguments}}}},"
                f" got {describe_json_type(call)}"
            )
        arguments = parse_json_cell(inner.get("arguments", {}), f"{path}.tool_calls[{i}].arguments")
        if isinstance(arguments, str) and arguments.strip():
            raise RowError(
                f"{path}.tool_calls[{i}].arguments must be an object, or one as JSON:"
                f" {arguments[:40]!r}"
            )
        function = {**inner, "arguments": arguments or {}}
        converted.append(
            {**call, "function": function}
            if "function" in call
            else {"type": "function", "function": function}
        )
    return converted


def _convert_sharegpt_turn(turn: Any, turn_key: str, location: str) -> Message:
    path = f"{location}: {turn_key}"
    if not isinstance(turn, dict):
        raise RowError(
            f"{path} must be an object with from and value, got {describe_json_type(turn)}"
        )
    for key in ("from", "value"):
        if key not in turn:
            raise RowError(f"{path} has no {key}{_suggest_key(key, turn)}")
    role = SHAREGPT_ROLES.get(str(turn["from"]).lower())
    if role is None:
        raise RowError(
            f"{path}.from: unknown role {turn['from']!r}: use human, gpt, system, function_call or"
            " observation"
        )
    _check_learn_keys(turn, path)
    value = turn["value"]
    if role == "function_call":
        return _make_call_message(turn, value, f"{path}.value", path)
    if (
        role == "assistant"
        and is_learnt(turn)
        and (value is None or (isinstance(value, str) and not value.strip()))
    ):
        raise EmptyAnswer(f"{path}.value is empty: the row has no target")
    if not isinstance(value, str):
        raise RowError(f"{path}.value must be text, got {describe_json_type(value)}")
    return {**_other_keys(turn), "role": role, "content": value}


def _other_keys(turn: Message) -> Message:
    """Returns the keys of a turn other than its role, content and tool calls."""
    return {
        key: item
        for key, item in turn.items()
        if key not in ("from", "value", "role", "content", "tool_calls")
    }


def _make_call_message(turn: Message, value: Any, value_path: str, path: str) -> Message:
    """Returns a turn of the assistant with a tool call. `value` contains the call as JSON."""
    call = parse_json_cell(value, value_path)
    calls = call if isinstance(call, list) else [call]
    return {
        **_other_keys(turn),
        "role": "assistant",
        "content": "",
        "tool_calls": _convert_tool_calls(calls, path),
    }


def _suggest_key(key: str, row: Message) -> str:
    close = difflib.get_close_matches(key, list(row), n=1, cutoff=0.75)
    return f", but {close[0]!r}: did you mean {key}?" if close else ""


# pairs of tags around the thoughts in answers of reasoning models
_THOUGHT_TAGS = (
    (BEGIN_THOUGHTS, END_THOUGHTS),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
)


def refuse_cut_thoughts(answer: Any, path: str) -> None:
    """Raises RowError for an answer that begins with thoughts and ends before the thoughts are
    complete. Such an answer was cut by a limit on new tokens. Training on this answer would teach
    the model to stop in the middle of its thoughts.
    """
    text = answer.lstrip() if isinstance(answer, str) else ""
    for begin, end in _THOUGHT_TAGS:
        if text.startswith(begin) and end not in text:
            raise RowError(f"{path} ends inside its thoughts: {begin} without {end}")


def select_thoughts(
    messages: Sequence[Message],
    selection: str,
    *,
    written_positions: ThoughtPositions,
    has_tags: bool,
    location: str,
) -> tuple[Message, ...]:
    """Returns the turns with only the selected thoughts. If the thoughts are stored in a key that
    the template does not read, this function moves them to a key that the template reads.

    selection  `last` (only the thoughts after the last question), `all` or `none`
    written_positions  the positions of thoughts that the template writes, as `make_thought_probes`
                       describes them
    has_tags  whether the template's text contains the tag `</think>`
    Raises  RowError if a turn has only one of the two tags, EmptyAnswer if a turn that the model
            learns contains only thoughts
    """
    last = last_question_index(messages)
    turns = list(messages)
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and (
            selection == "none" or (selection == "last" and i < last)
        ):
            turns[i] = _remove_thoughts(message, f"{location}: messages[{i}]")
        elif message["role"] == "assistant":
            turns[i] = _move_thoughts(
                message, is_earlier=i < last, written_positions=written_positions, has_tags=has_tags
            )
    return tuple(turns)


def make_thought_probes(thought: str) -> Iterator[tuple[tuple[str, bool], list[Message]]]:
    """Yields conversations that contain the text `thought` as the thoughts of a turn. These
    conversations are used to test which thoughts a template writes. For each key that can contain
    thoughts there are two conversations, with the thoughts before and after the last question. Each
    conversation is yielded together with the position of its thoughts. A position is a pair (key,
    whether a question follows).
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


def last_question_index(messages: Sequence[Message]) -> int:
    """Returns the index of the user's last turn; -1 if there is none."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def hide_thought_tags(messages: Sequence[Message]) -> list[Message]:
    """Replaces the `<think>` tags before the last question by characters that no template
    recognises. `restore_thought_tags` undoes this.
    """
    last = last_question_index(messages)
    return [
        (
            message | {"content": _replace_all(message["content"], _HIDDEN_TAGS)}
            if message["role"] == "assistant" and i < last
            else message
        )
        for i, message in enumerate(messages)
    ]


def restore_thought_tags(text: str) -> str:
    return _replace_all(text, {hidden_tag: tag for tag, hidden_tag in _HIDDEN_TAGS.items()})


def learns_empty_thoughts(text: str, learnt: Sequence[tuple[int, int]]) -> bool:
    """Returns True if the model learns to write the closing tag of thoughts without any text
    between the two tags. The opening tag may be in the prompt, which the model does not learn.
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
    message: Message, *, is_earlier: bool, written_positions: ThoughtPositions, has_tags: bool
) -> Message:
    """Moves the thoughts of a turn into its content, in the form of Qwen3. This is done only if the
    thoughts are stored in a key that the template does not read.

    The thoughts are not moved if the template has other tags for thoughts. An example is the
    template of gpt-oss.
    """
    content = message["content"]
    block = _THOUGHTS_BLOCK.match(content)
    key = next(
        (key for key in THOUGHT_KEYS if isinstance(message.get(key), str) and message[key].strip()),
        None,
    )
    source_key = CONTENT_KEY if block is not None else key
    has_other_tags = not has_tags and any((key, False) in written_positions for key in THOUGHT_KEYS)
    if source_key is None or (source_key, is_earlier) in written_positions or has_other_tags:
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
