"""What the data side hands to training: rows of tokens, prompts to sample from, and the facts that become data.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

IGNORED = -100  # the label of a token that is not learnt, as in torch's and transformers' cross-entropy


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence. `labels[i]` is `input_ids[i]` where the token is learnt and -100 where not: not shifted, the model shifts."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    prompt_length: int
    """Tokens before the first learnt one."""

    @property
    def supervised(self) -> int:
        """Tokens that give a loss: the first token of a row is predicted by nothing, so its label never counts."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt answered during training."""

    text: str
    """What a person is shown."""
    input_ids: tuple[int, ...]
    """What the model is given: with the template's generation prompt."""
    reference: str | None = None
    """The answer in the data, if there is one."""


@dataclass(frozen=True, slots=True)
class LoadedData:
    """Everything a run needs from its data."""

    train: Sequence[Row]
    eval: Sequence[Row]
    prompts: Sequence[SamplePrompt]
    chat_template: str | None
    """The template the rows were rendered with: what a run saves in its tokenizer. None when no row is a chat."""
    facts: dict[str, Any] = field(repr=False)
