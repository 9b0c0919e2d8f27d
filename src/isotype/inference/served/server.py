"""Defines the methods that the comparison with a server needs. There is one implementation for each
kind of server interface.

A method returns None if the interface does not have this function. All methods raise RefusedError
for a request that the server refuses, and UsageError for a server that does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import UsageError

Scores = list[float | None]  # log-probabilities; None for a token that the server does not score


class RefusedError(UsageError):
    """Raised if the server refuses a request with the status 400, 422 or 500."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of the run.

    text, ids  the rendered prompt and its tokens, as in training
    messages   the conversation before the answer; empty for a plain text
    tools      the tools of the conversation
    switches   variables of the chat template, such as `enable_thinking`
    """

    text: str
    ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...] = ()
    tools: Any = None
    switches: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    text       the text that the server returns
    ids        the tokens; None if the interface does not return ids
    texts      the text of each token; empty if the interface does not return these texts
    logprobs   the log-probability of each token; None if the interface does not return
               log-probabilities
    alternatives  for each token: the most probable tokens with their log-probabilities; empty if
                  the interface does not return ids
    has_ended  whether the answer ended before the limit on its length
    prompt_tokens  the number of tokens of the prompt; None if the interface does not count them
    """

    text: str
    ids: tuple[int, ...] | None = None
    texts: tuple[str, ...] = ()
    logprobs: tuple[float, ...] | None = None
    alternatives: tuple[Mapping[int, float], ...] = ()
    has_ended: bool = False
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class ServerFacts:
    """Information that a server gives about itself.

    engine     the program
    model      the name of the model that is used
    context    the number of tokens in the context window; None if unknown
    weights    the type of the weights: `Q4_0`; "" if unknown
    model_file the path of the model's file on the server; "" if unknown
    adapter_scales  for each adapter the factor with which it is applied; None if unknown
    """

    engine: str
    model: str
    context: int | None = None
    weights: str = ""
    model_file: str = ""
    adapter_scales: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Remedies:
    """Contains for each check the setting of the server that removes the difference which the check
    found. RUN is a placeholder for the run's folder.
    """

    template: str
    first_token: str
    stop: str
    thinking: str
    adapter: str
    context: str
    rounding: str


class Server(Protocol):
    """A server with one model."""

    facts: ServerFacts
    remedies: Remedies

    def render(self, prompt: Prompt) -> str | None:
        """Returns the text into which the server converts a conversation."""

    def tokenize(self, prompt: Prompt) -> tuple[int, ...] | None:
        """Returns the tokens that the model gets for a prompt."""

    def tokenize_text(self, text: str) -> tuple[int, ...] | None:
        """Returns the tokens of a text, without a token that is added at its beginning."""

    def chat(self, prompt: Prompt, max_tokens: int) -> Answer:
        """Returns the greedy answer to a prompt, which is sent in the same way as a user sends it."""

    def complete(self, ids: Sequence[int], max_tokens: int) -> Answer | None:
        """Returns the greedy continuation of these tokens."""

    def score(self, ids: Sequence[int], positions: Sequence[int]) -> Scores | None:
        """Returns the log-probabilities of the tokens at these positions; None for a token whose
        log-probability the server cannot return.
        """
