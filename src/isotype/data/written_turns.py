"""Which turns of a conversation a chat template leaves out of its text.

A template that writes `messages[0]` as the system turn and then users and assistants alone drops a later system turn without an error. The
conversation is rendered once more with a mark as the content of each turn; a turn whose mark is missing is not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from .chat import ChatTemplate
from .formats import Message

_MOST = 1024  # forms of conversations that are remembered


class WrittenTurns:
    """What one template writes, remembered by the form of a conversation: roles and keys of its turns, in their order."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._left_out: dict[Any, frozenset[str]] = {}

    def left_out(self, messages: Sequence[Message], tools: Any, place: str) -> frozenset[str]:
        """Roles of the turns that are nowhere in the text, empty ones aside; none where the template refuses the marks."""
        form = (bool(tools), *((m["role"], _has_words(m), *sorted(key for key, value in m.items() if value)) for m in messages))
        if form not in self._left_out:
            if len(self._left_out) == _MOST:
                self._left_out.clear()
            self._left_out[form] = self._found(messages, tools, place)
        return self._left_out[form]

    def _found(self, messages: Sequence[Message], tools: Any, place: str) -> frozenset[str]:
        marks = {i: f"turn{i}mark" for i, m in enumerate(messages) if _has_words(m)}
        marked = [m | {"content": marks[i]} if i in marks else m for i, m in enumerate(messages)]
        try:
            text = self._template.render(marked, tools=tools, place=place).casefold()
        except UsageError:
            return frozenset()
        return frozenset(messages[i]["role"] for i, mark in marks.items() if mark not in text)


def _has_words(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())
