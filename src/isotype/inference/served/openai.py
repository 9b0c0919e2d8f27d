"""Implements the OpenAI interface, which every server has. It offers chat, and the completion of a
text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from .http import Connection
from .server import Answer, Prompt, RefusedError, Remedies, Scores, ServerFacts

Value = TypeVar("Value")
CHAT = "/v1/chat/completions"  # paths of the server's API
COMPLETION = "/v1/completions"
# values of `finish_reason` for an answer that the model ended itself
_ENDED = ("stop", "eos", "end_turn", "tool_calls")


class OpenAiServer:
    """A server for which only the OpenAI interface is supported, such as LM Studio."""

    remedies = Remedies(
        template="set the template of the run's chat_template.jinja in the server",
        first_token="the template or the tokenizer adds the first token, not both",
        stop="set the run's end token as stop token",
        thinking="set the template's switch as in data.template_kwargs",
        adapter="serve the merged model: isotype merge or export --type",
        context="load the model with a longer context",
        rounding="a wider type rounds less",
    )

    def __init__(self, connection: Connection, facts: ServerFacts) -> None:
        self.connection = connection
        self.facts = facts
        self.has_logprobs = True

    def request_field(
        self, path: str, body: Mapping[str, Any], name: str, convert: Callable[[Any], Value]
    ) -> Value | None:
        """Posts a request and returns one converted field of the answer. Returns None if the server
        does not offer this path. Raises UsageError for an answer of any other form.
        """
        answer = self.connection.try_post(path, body)
        if answer is None:
            return None
        with self.connection.reading(path):
            return convert(answer[name])

    def render(self, prompt: Prompt) -> str | None:
        return None

    def tokenize(self, prompt: Prompt) -> tuple[int, ...] | None:
        return None

    def tokenize_text(self, text: str) -> tuple[int, ...] | None:
        return None

    def complete(self, ids: Sequence[int], max_tokens: int) -> Answer | None:
        return None

    def score(self, ids: Sequence[int], positions: Sequence[int]) -> Scores | None:
        return None

    def chat(self, prompt: Prompt, max_tokens: int) -> Answer:
        body = {"model": self.facts.model, "max_tokens": max_tokens, "temperature": 0, "seed": 0}
        if prompt.messages:
            path = CHAT
            body |= conversation(prompt)
            logprobs: dict[str, Any] = {"logprobs": True}
        else:
            path = COMPLETION
            body |= {"prompt": prompt.text}
            logprobs = {"logprobs": 1}
        if self.has_logprobs:
            try:
                return self.read_answer(self.connection.post(path, body | logprobs))
            except RefusedError:
                self.has_logprobs = False
        return self.read_answer(self.connection.post(path, body))

    def read_answer(self, answer: Any) -> Answer:
        """Reads the answer to a chat or to a completion. Raises UsageError for an object of any
        other form.
        """
        with self.connection.reading("the OpenAI interface"):
            choice = answer["choices"][0]
            message = choice.get("message")
            text = choice["text"] if message is None else message.get("content")
            logprobs = choice.get("logprobs") or {}
            if "content" in logprobs:
                entries = logprobs["content"] or []
                texts = [entry_text(entry) for entry in entries]
                values = [entry["logprob"] for entry in entries]
                ids = [entry.get("id") for entry in entries]
                alternatives = []
            else:
                texts = logprobs.get("tokens") or []
                values = logprobs.get("token_logprobs") or []
                ids = [token_id(text) for text in texts]
                tables = logprobs.get("top_logprobs") or []
                alternatives = [_read_alternatives(table) for table in tables]
                if all(index is not None for index in ids):
                    texts = []  # the names of tokens are no texts
            usage = answer.get("usage") or {}
            has_ids = bool(ids) and all(isinstance(index, int) for index in ids)
            return Answer(
                text=text or "",
                ids=tuple(ids) if has_ids else None,
                texts=tuple(texts),
                logprobs=tuple(map(float, values)) if values else None,
                alternatives=tuple(alternatives) if has_ids else (),
                has_ended=choice.get("finish_reason") in _ENDED,
                prompt_tokens=usage.get("prompt_tokens"),
            )


def conversation(prompt: Prompt) -> dict[str, Any]:
    """Returns the fields of a request that contain the conversation."""
    fields: dict[str, Any] = {"messages": [_openai_message(message) for message in prompt.messages]}
    if prompt.tools:
        fields["tools"] = prompt.tools
    if prompt.switches:
        fields["chat_template_kwargs"] = dict(prompt.switches)
    return fields


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message in which the arguments of tool calls are JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = []
    for number, call in enumerate(calls):
        function = dict(call.get("function", call))
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
        identity = call.get("id", f"call_{number}")
        written.append({"id": identity, "type": "function", "function": function})
    return {**message, "tool_calls": written}


def entry_text(entry: Mapping[str, Any]) -> str:
    """Returns the text of a token; bytes that are only a part of a character become replacement
    characters.
    """
    raw = entry.get("bytes")
    if raw:
        return bytes(raw).decode("utf-8", errors="replace")
    return str(entry.get("token", ""))


def _read_alternatives(table: Mapping[str, float] | None) -> dict[int, float]:
    """Reads the log-probabilities of one position. The tokens have names such as `token_id:123`."""
    pairs = [(token_id(name), value) for name, value in (table or {}).items()]
    return {index: float(value) for index, value in pairs if index is not None}


def token_id(text: str) -> int | None:
    """Reads `token_id:123`, which vLLM writes in place of a token's text."""
    number = text.removeprefix("token_id:")
    return int(number) if number != text and number.isdigit() else None
