"""What a run does between steps, as far as memory goes: an evaluation of the longest rows, and a sample from the longest prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...config.schema import RunConfig
from ...data.rows import LoadedData, SamplePrompt, row_lengths


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """0 where a run does not evaluate or sample.

    eval_rows, eval_length  the largest batch of an evaluation
    sample_length           the longest prompt with its answer, in tokens
    """

    eval_rows: int = 0
    eval_length: int = 0
    sample_length: int = 0

    @classmethod
    def of(cls, config: RunConfig, data: LoadedData, prompts: Sequence[SamplePrompt]) -> Pauses:
        rows = min(config.train.eval_batch_size or config.train.batch_size, len(data.eval))
        longest = max((len(prompt.input_ids) for prompt in prompts), default=0)
        return cls(
            eval_rows=rows,
            eval_length=max(row_lengths(data.eval), default=0),
            sample_length=longest + config.run.sample_tokens if longest else 0,
        )
