"""Defines the answers that a server of the trained model should give. They belong to prompts of the
run, and contain the answers and log-probabilities of the trained model and of the base model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...data.rows import IGNORE_INDEX, Row
from .server import Prompt

PROMPTS = 8  # prompts that are answered
ANSWER_TOKENS = 32  # the longest answer that is compared
SCORED_TOKENS = 512  # learnt tokens whose log-probability is asked, over all rows
ALTERNATIVES = 20  # most probable tokens that are kept for each position
STOP_PROBES = 4  # answers whose end is compared


@dataclass(frozen=True)
class ExpectedAnswer:
    """The trained model's greedy answer to a prompt, computed in fp32.

    ids            the tokens, with the end token
    text           the text without the end token
    texts          the text of each token
    logprobs       the log-probability of each token
    base_logprobs  the log-probability that the base model gives to each token
    alternatives   for each position the most probable tokens with their log-probabilities
    base_alternatives  the same tokens, with the log-probabilities that the base model gives to them
    has_ended      whether the answer ended before the limit on its length
    """

    prompt: Prompt
    ids: tuple[int, ...]
    text: str
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...]
    alternatives: tuple[Mapping[int, float], ...]
    base_alternatives: tuple[Mapping[int, float], ...]
    has_ended: bool


@dataclass(frozen=True)
class ScoredRow:
    """A row with the log-probabilities of its labelled tokens.

    positions      the positions of labelled tokens
    logprobs       their log-probabilities under the trained model
    base_logprobs  their log-probabilities under the base model
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class SingleToken:
    """A prompt of one token, on which rotary positions have no effect, and the log-probabilities
    of the most probable next tokens.
    """

    token: int
    logprobs: Mapping[int, float]


@dataclass(frozen=True)
class Expectations:
    """Contains all expected values with which a server is compared.

    answers      greedy answers
    rows         rows for whose labelled tokens log-probabilities are compared
    endings      rows at whose end the trained model predicts the end token: the tokens of each row
                 before this token
    single_tokens  prompts of one token
    system, tools, thinking  prompts that test how the template handles a system message, tools and
                 thinking; empty if the template does not use this
    first_id, first_text  the token that begins every text; None and "" without one
    end_ids      the tokens that end an answer
    longest      the number of tokens of the longest prompt with its answer
    max_length   data.max_length of the run
    row_source   held-out or training
    folder       the run's folder
    run_error    the root mean square of the differences between the log-probabilities of the
                 trained model in the run's own dtypes and in fp32; 0 if the run computes in fp32
    """

    answers: Sequence[ExpectedAnswer]
    rows: Sequence[ScoredRow]
    endings: Sequence[tuple[int, ...]] = ()
    single_tokens: Sequence[SingleToken] = ()
    system: Sequence[Prompt] = ()
    tools: Sequence[Prompt] = ()
    thinking: Sequence[Prompt] = ()
    first_id: int | None = None
    first_text: str = ""
    end_ids: frozenset[int] = frozenset()
    longest: int = 0
    max_length: int = 0
    row_source: str = "held-out"
    folder: str = "RUN"
    run_error: float = 0.0


def choose_scored_positions(rows: Sequence[Row]) -> list[tuple[Row, list[int]]]:
    """Returns rows with the positions of their first labelled tokens, SCORED_TOKENS positions in
    total. Each row gets the same number of positions, so that one long answer does not dominate the
    result.
    """
    share = max(1, SCORED_TOKENS // max(1, len(rows)))
    chosen = []
    for row in rows:
        learnt = [
            position
            for position, label in enumerate(row.labels)
            if position > 0 and label != IGNORE_INDEX
        ]
        if learnt:
            chosen.append((row, learnt[:share]))
    return chosen
