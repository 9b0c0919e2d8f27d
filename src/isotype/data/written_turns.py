"""What of a conversation a chat template leaves out of its text: turns, reasoning, tool calls, tools.

A template that writes `messages[0]` as the system turn and then users and assistants alone drops a later system turn without an error; one
that writes `tools` may know no `tool_calls`; one of a reasoning model leaves out the thoughts of earlier answers. The conversation is
rendered once more with a mark as the content of each turn, as its reasoning, and as the name of each call and tool; what misses its mark
is not written. The words themselves do not show it: a call has its tool's name, and another turn may hold them too.

Templates find a thought in the content by its tags (`</think>`, `[THINK]`). The tags of a content that the template's own text has stay
where they are, each with marks around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .chat import ChatTemplate
from .formats import Message

_MOST = 1024  # forms of conversations that are remembered
_TAG = re.compile(r"([<\[][^\s<>\[\]]{1,40}[>\]])")
_BESIDE = ("reasoning_content", "thinking")  # keys of a turn in which data write reasoning


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Roles of the turns that are nowhere in the text, empty ones aside, and whether a call, a tool, or reasoning is nowhere in it."""

    roles: frozenset[str] = frozenset()
    calls: bool = False
    tools: bool = False
    reasoning: bool = False


class WrittenTurns:
    """What one template writes, remembered by the form of a conversation: roles and keys of its turns, in their order, calls and tools."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._left_out: dict[Any, LeftOut | None] = {}

    def left_out(self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str, place: str) -> LeftOut:
        """What is not in the text. Where the template refuses the marks: calls, tools and reasoning whose names or words are not."""
        form = (
            len(tools or ()),
            *((m["role"], *self._shape(m), *_beside(m), len(_calls(m)), *sorted(k for k, v in m.items() if v)) for m in messages),
        )
        if form not in self._left_out:
            if len(self._left_out) == _MOST:
                self._left_out.clear()
            self._left_out[form] = self._found(messages, tools, place)
        return self._left_out[form] or LeftOut(
            calls=_unnamed((c for m in messages for c in _calls(m)), text),
            tools=_unnamed(tools or (), text),
            reasoning=any(m[key].strip() not in text for m in messages for key in _beside(m)),
        )

    def _found(self, messages: Sequence[Message], tools: Sequence[Any] | None, place: str) -> LeftOut | None:
        """What misses its mark; None where the template refuses the marks."""
        turns: dict[int, list[str]] = {}  # the marks of each content
        reasoning: list[str] = []
        marked = [dict(m) for m in messages]
        for i, m in enumerate(marked):
            for key in _beside(m):
                m[key] = f"{key}{i}mark"
                reasoning.append(m[key])
            if _has_words(m):
                m["content"], turns[i] = self._marked(m["content"], f"turn{i}")
            if calls := _calls(m):
                m["tool_calls"] = [_named(call, f"call{i}x{j}mark") for j, call in enumerate(calls)]
        marked_tools = [_named(tool, f"tool{i}mark") for i, tool in enumerate(tools)] if tools else tools
        calls = [call for m in marked for call in _calls(m)]
        try:
            seen = self._template.render(marked, tools=marked_tools, place=place).casefold()
        except UsageError:
            return None
        unseen = {i: [mark for mark in marks if mark not in seen] for i, marks in turns.items()}
        roles = frozenset(messages[i]["role"] for i in turns if unseen[i] == turns[i])
        parts = any(unseen[i] and unseen[i] != turns[i] for i in turns if messages[i]["role"] == "assistant")
        return LeftOut(roles, _unnamed(calls, seen), _unnamed(marked_tools or (), seen), parts or any(r not in seen for r in reasoning))

    def _parts(self, content: str) -> list[str]:
        """A content, cut before and behind each tag that the template's own text has."""
        cut = [""]
        for i, part in enumerate(_TAG.split(content)):
            if i % 2 and part in self._template.text:
                cut += [part, ""]
            else:
                cut[-1] += part
        return cut

    def _shape(self, message: Message) -> tuple[Any, ...]:
        """Of a turn's content: its tags, and where there are words."""
        if not _has_words(message):
            return (False,)
        return tuple(part if i % 2 else bool(part.strip()) for i, part in enumerate(self._parts(message["content"])))

    def _marked(self, content: str, name: str) -> tuple[str, list[str]]:
        """A content with a mark in place of the words between its tags, and the marks."""
        parts = self._parts(content)
        marks = {i: f"{name}p{i}mark" for i in range(0, len(parts), 2) if parts[i].strip()}
        if not marks:  # tags alone
            return f"{name}mark", [f"{name}mark"]
        return "".join(marks.get(i, part) for i, part in enumerate(parts)), list(marks.values())


def _calls(message: Message) -> Sequence[Any]:
    return message.get("tool_calls") or ()


def _named(tool: Any, name: str) -> Any:
    """A tool, or a call of one, under another name; what has no name stays as it is."""
    if _name(tool) is None:
        return tool
    return {**tool, "function": {**tool["function"], "name": name}} if "function" in tool else {**tool, "name": name}


def _name(tool: Any) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _unnamed(tools: Iterable[Any], text: str) -> bool:
    """Whether the name of a tool, or of a call of one, is nowhere in the text."""
    return any(name is not None and name not in text for name in map(_name, tools))


def _beside(message: Message) -> list[str]:
    """The keys of a turn with reasoning that its content does not hold as well."""
    content = message.get("content")
    return [k for k in _BESIDE if _has_words(message, k) and not (isinstance(content, str) and message[k].strip() in content)]


def _has_words(message: Message, key: str = "content") -> bool:
    words = message.get(key)
    return isinstance(words, str) and bool(words.strip())
