"""What of a conversation a chat template leaves out of its text: turns, tool calls, tools.

A template that writes `messages[0]` as the system turn and then users and assistants alone drops a later system turn without an error; one
that writes `tools` may know no `tool_calls`. The conversation is rendered once more with a mark as the content of each turn, and as the
name of each call and tool; what misses its mark is not written. Names do not show it: a call has its tool's, and a question may hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .chat import ChatTemplate
from .formats import Message

_MOST = 1024  # forms of conversations that are remembered


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Roles of the turns that are nowhere in the text, empty ones aside, and whether a call, or a tool, is nowhere in it."""

    roles: frozenset[str] = frozenset()
    calls: bool = False
    tools: bool = False


class WrittenTurns:
    """What one template writes, remembered by the form of a conversation: roles and keys of its turns, in their order, calls and tools."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._left_out: dict[Any, LeftOut | None] = {}

    def left_out(self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str, place: str) -> LeftOut:
        """What is not in the text. Where the template refuses the marks: calls and tools whose names are not."""
        form = (len(tools or ()), *((m["role"], _has_words(m), len(_calls(m)), *sorted(k for k, v in m.items() if v)) for m in messages))
        if form not in self._left_out:
            if len(self._left_out) == _MOST:
                self._left_out.clear()
            self._left_out[form] = self._found(messages, tools, place)
        return self._left_out[form] or LeftOut(
            calls=_unnamed((c for m in messages for c in _calls(m)), text), tools=_unnamed(tools or (), text)
        )

    def _found(self, messages: Sequence[Message], tools: Sequence[Any] | None, place: str) -> LeftOut | None:
        """What misses its mark; None where the template refuses the marks."""
        turns = {i: f"turn{i}mark" for i, m in enumerate(messages) if _has_words(m)}
        marked = [m | {"content": turns[i]} if i in turns else dict(m) for i, m in enumerate(messages)]
        for i, m in enumerate(marked):
            if calls := _calls(m):
                m["tool_calls"] = [_named(call, f"call{i}x{j}mark") for j, call in enumerate(calls)]
        marked_tools = [_named(tool, f"tool{i}mark") for i, tool in enumerate(tools)] if tools else tools
        calls = [call for m in marked for call in _calls(m)]
        try:
            seen = self._template.render(marked, tools=marked_tools, place=place).casefold()
        except UsageError:
            return None
        roles = frozenset(messages[i]["role"] for i, mark in turns.items() if mark not in seen)
        return LeftOut(roles, _unnamed(calls, seen), _unnamed(marked_tools or (), seen))


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


def _has_words(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())
