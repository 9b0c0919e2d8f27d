"""PF020: rows with more tokens than the model has positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ....finding import Finding, Place, Severity
from ....precision.apply import inner_model
from .subject import LanguageSubject


def beyond_the_positions(subject: LanguageSubject) -> Iterator[Finding]:
    """A table of positions ends; rotary positions continue, with angles that the model was not trained on."""
    model: Any = inner_model(subject.prepared.model)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    facts = subject.task.data.facts
    longest = max(facts[side]["lengths"]["longest"] for side in ("train", "eval"))  # of documents: packed ones begin at 0 each
    if not isinstance(most, int) or longest <= most:
        return
    tokens = model.get_input_embeddings()
    # some tables have two more rows than the model has positions (OPT)
    tables = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding) and m is not tokens]
    table = next((n for n, m in tables if 0 <= m.num_embeddings - most <= 2), None)
    yield Finding(
        code="PF020", severity=Severity.ERROR if table else Severity.WARNING, place=Place(symbol="data.max_length"),
        message=f"the longest row has {longest} tokens, and the model has {most} positions",
        cause=f"{table} has no row for later positions" if table else "rotary positions continue, at angles that the model has never seen",
        declared=f"max_position_embeddings {most}", observed=f"data.max_length {subject.config.data.max_length}",
        fix=f"data.max_length: {most}" + ("" if table else "; or leave it, where the model is meant to learn longer texts"),
    )  # fmt: skip
