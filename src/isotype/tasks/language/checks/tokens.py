"""PF008, PF009, PF010: tokens without an embedding, with one that was never trained, and chats without a template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....counted import counted
from ....data.rows import tokens_used
from ....finding import Finding, Place, Severity
from ....precision.apply import inner_model
from ....precision.parts import gathered
from .subject import LanguageSubject

NEAR_MEAN = 0.05  # of the median distance from the mean row: transformers draws new rows around the mean with 1e-9 of the covariance
NEAR_ZERO = 1e-3  # of the median norm


def beyond_the_embeddings(subject: LanguageSubject) -> Iterator[Finding]:
    """Ids in rows and prompts. A tokenizer's size is checked when the model is loaded; ids may lie beyond it."""
    rows = _table(subject, output=False).weight.shape[0]
    prompts = [i for prompt in subject.task.prompts for i in prompt.input_ids]
    used = tokens_used(subject.task.data.documents) | tokens_used(subject.task.data.eval)
    largest = max([subject.task.tokenizer.pad_token_id, *prompts, *used])
    if largest < rows:
        return
    yield Finding(
        code="PF008", severity=Severity.ERROR, place=Place(symbol="model.tokenizer"),
        message=f"the data has token {largest} ({subject.task.tokenizer.convert_ids_to_tokens(largest)!r}), and the model embeds {rows}",
        cause="the tokenizer gives ids that the model's embeddings do not have",
        fix="take the model's own tokenizer, or call model.resize_token_embeddings and save the model first",
    )  # fmt: skip


def untrained_new_tokens(subject: LanguageSubject) -> Iterator[Finding]:
    """Added tokens that occur in the training rows, and whose frozen row is zero or the mean of all, as resizing leaves it."""
    added = set(subject.task.tokenizer.added_tokens_decoder) - {subject.task.tokenizer.pad_token_id}
    read = added & tokens_used(subject.task.data.documents)
    learnt = added & tokens_used(subject.task.data.documents, learnt=True)
    for name, used in (("embed_tokens", read), ("lm_head", learnt)):
        table = _table(subject, output=name == "lm_head")
        if table is None or _is_trained(table):
            continue
        weight = gathered(table.weight)
        fresh = untouched_rows(weight, sorted(i for i in used if i < weight.shape[0]))
        if fresh:
            words = ", ".join(repr(subject.task.tokenizer.convert_ids_to_tokens(i)) for i in fresh[:5])
            yield Finding(
                code="PF009", severity=Severity.WARNING, place=Place(symbol=name),
                message=f"{counted(len(fresh), 'token of the data was', 'tokens of the data were')} never trained and will not be: {words}",
                cause=f"their rows in {name} are zero or the mean of all rows, as resizing leaves them, and {name} is frozen",
                fix="adapter.modules_to_save: [embed_tokens, lm_head], or a template without them",
            )  # fmt: skip
            return  # a tied head has the same rows


def untouched_rows(weight: Tensor, rows: list[int]) -> list[int]:
    """Those of `rows` that are nearly zero or nearly the mean row.

    weight  F[V H]
    inside  fp32, over at most 4096 rows
    """
    if not rows or not weight.is_floating_point():
        return []
    sample_SH = weight.detach()[:: max(1, weight.shape[0] // 4096)].float()
    mean_H = sample_SH.mean(0)
    usual_norm, usual_distance = sample_SH.norm(dim=1).median(), (sample_SH - mean_H).norm(dim=1).median()
    if usual_distance == 0:  # the same row for every token: a test model, or one that is broken in another way
        return []
    rows_RH = weight.detach()[torch.tensor(rows, device=weight.device)].float()
    fresh_R = (rows_RH.norm(dim=1) < NEAR_ZERO * usual_norm) | ((rows_RH - mean_H).norm(dim=1) < NEAR_MEAN * usual_distance)
    return [row for row, fresh in zip(rows, fresh_R.tolist()) if fresh]


def missing_template(subject: LanguageSubject) -> Iterator[Finding]:
    template = subject.task.data.facts["template"]
    if not template or template["source"] != "default":
        return
    yield Finding(
        code="PF010", severity=Severity.WARNING, place=Place(symbol="data.chat_template"),
        message="the rows are chats and the tokenizer has no chat template: a plain one is used",
        observed="User: ... / Assistant: ..., saved with the result",
        cause="a base model; or a tokenizer that is not the chat model's",
        fix="right for a base model; else data.chat_template: chatml (llama3, gemma, FILE.jinja), or the chat model's tokenizer",
    )  # fmt: skip


def _table(subject: LanguageSubject, *, output: bool) -> Any:
    inner: Any = inner_model(subject.prepared.model)
    return inner.get_output_embeddings() if output else inner.get_input_embeddings()


def _is_trained(module: torch.nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
