"""What the checks of a language run look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ....data.rows import LoadedData, SamplePrompt
from ....training.preflight.subject import CheckedTask, Subject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenTask(CheckedTask, Protocol):
    """A task whose rows are tokens."""

    tokenizer: PreTrainedTokenizerBase
    data: LoadedData
    prompts: Sequence[SamplePrompt]


LanguageSubject: TypeAlias = Subject[TokenTask]


def formats(subject: LanguageSubject) -> set[str]:
    """The formats of the training files, as data.json has them."""
    return {form for file in subject.task.data.facts["train"]["files"] for form in str(file.get("format")).split(", ")}
