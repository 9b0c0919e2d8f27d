"""Contains the checks of language data that run before the first step. They check the labels, the
tokenizer, positions and packing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...data.bad_rows import EMPTY_REASON
from ...data.rows import IGNORE_INDEX, Row, row_supervised, tokens_used
from ...data.tokens import join_rows
from ...finding import Finding, Place, Severity
from ...precision.apply import inner_model
from ...precision.parts import gather_tensor
from ...training.preflight.rehearsal import STEP_ERRORS, preserve_state
from ...training.setting_names import SettingNames
from ...training.setup import PreflightSubject
from ...training.task import Check
from ...wording import pluralise
from .batches import collate, model_inputs, needs_single_packed_row
from .sample import generation_config

# below this share, rows without a token to learn are only listed in data.json
MIN_UNLEARNT_SHARE = 0.05
# formats with answers
ANSWER_FORMATS = {"messages", "sharegpt", "alpaca", "prompt_completion", "preference", "labelled"}
# rows that are nearer to the mean row than this share of the median distance are untrained;
# transformers draws new rows around the mean with 1e-9 of the rows' covariance
NEAR_MEAN = 0.05
NEAR_ZERO = 1e-3  # rows with a smaller share of the median norm are untrained
# number of tokens of each document in the check of packing, which can be small because a leak
# already changes the prediction at the first token
TRIAL_TOKENS = 64
LEAK_TOLERANCE = 1e-3  # as a share of the largest logit; masked attention leaks 0


def training_formats(subject: PreflightSubject) -> set[str]:
    """Returns the formats of the training files, with the names that data.json uses."""
    return {
        form
        for file in subject.task.data.facts["train"]["files"]
        for form in str(file.get("format")).split(", ")
    }


def check_learnt_tokens(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF005, which counts the rows without a token to learn. It counts the rows that
    were dropped when the data was read, and the rows that remain.
    """
    for name, rows in (("train", subject.task.data.documents), ("eval", subject.task.data.eval)):
        facts = subject.task.data.facts[name]
        masked_count = sum(n == 0 for n in row_supervised(rows))
        dropped_count = sum(drop["rows"] for drop in facts["dropped"])
        total = len(rows) + dropped_count
        if not total or (masked_count + dropped_count) / total < MIN_UNLEARNT_SHARE:
            continue
        side = "training" if name == "train" else "evaluation"
        setting_name = subject.names.train_data if name == "train" else subject.names.eval_data
        reasons = "; ".join(
            f"{drop['rows']} dropped: {drop['why']} (first: {drop['first']})"
            for drop in facts["dropped"]
        )
        yield Finding(
            code="PF005",
            severity=Severity.ERROR
            if masked_count and masked_count == len(rows)
            else Severity.WARNING,
            place=Place(symbol=setting_name),
            message=(
                f"{masked_count + dropped_count} of {pluralise(total, f'{side} row')}"
                f" {'has' if masked_count + dropped_count == 1 else 'have'} no token to learn"
            ),
            cause=reasons or "every label of these rows is masked",
            fix=_unlearnt_rows_advice(
                {drop["why"] for drop in facts["dropped"]}, masked_count, subject.names
            ),
        )


def _unlearnt_rows_advice(drop_reasons: set[str], masked_count: int, names: SettingNames) -> str:
    """Returns advice that depends on why the rows have no token to learn. For example, a larger
    max_length does not help if a row has no answer.
    """
    if drop_reasons == {EMPTY_REASON} and not masked_count:
        return (
            "write the missing answers, or take these rows out of the file; training continues"
            " without them"
        )
    return (
        f"a larger {names.max_length} when rows are cut, else look at their answers and at"
        f" {names.chat_template}"
    )


def check_prompt_labels(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF006. In data with chats or prompt/completion pairs, the model should learn
    only the answers. The check finds data of this kind in which the model learns every token.
    """
    rows = subject.task.data.documents
    if (
        subject.config.data.loss_on == "all"
        or not training_formats(subject) <= ANSWER_FORMATS
        or not rows
    ):
        return
    if any(IGNORE_INDEX in row.labels for row in rows):
        return
    yield Finding(
        code="PF006",
        severity=Severity.ERROR,
        place=Place(symbol="data.loss_on"),
        message=(
            f"every token of {'all ' * (len(rows) > 1)}{pluralise(len(rows), 'training row')} is"
            " learnt, prompts too"
        ),
        declared="data.loss_on: assistant",
        cause="no row has a prompt that its rendered text shows",
        fix="look at the prompts and at data.chat_template; data.loss_on: all if it is meant",
    )


def check_end_token(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF007, which finds data in which the model learns no end token. Generation
    stops only at the end tokens of the tokenizer and the model. So a model that never learns an end
    token does not stop.
    """
    data = subject.task.data
    tokenizer = subject.task.tokenizer
    if not training_formats(subject) & ANSWER_FORMATS:
        return
    end_ids = set(
        generation_config(subject.prepared.model, tokenizer, max_new_tokens=1).eos_token_id or []
    )
    if not end_ids or end_ids & tokens_used(data.documents, learnt=True):
        return
    masked = [row for row in data.documents if _has_masked_end(row, end_ids)]
    fix = (
        "a chat template that ends an answer with the tokenizer's eos_token, a padding token of its"
        f" own, or a larger {subject.names.max_length}"
    )
    pad_is_end = tokenizer.pad_token_id in end_ids
    end_tokens = " ".join(repr(tokenizer.decode([i])) for i in sorted(end_ids))
    turn_tokens = data.facts["tokens"]["end_of_turn"]
    other_tokens = [
        token
        for token in turn_tokens
        if token != "none" and tokenizer.convert_tokens_to_ids(token) not in end_ids
    ]
    if masked:
        cause = f"it stands behind the answers of {pluralise(len(masked), 'row')} and is masked" + (
            ", as the padding token is the same" if pad_is_end else ""
        )
    elif data.facts["train"]["truncated"] == len(data.documents):
        cause = f"every row is cut at {subject.names.max_length} {data.facts['max_length']}"
    elif other_tokens:
        cause = (
            f"the template closes a turn with {other_tokens[0]!r}, at which generation does not"
            " stop"
        )
        fix = (
            'model.tokenizer: ended, a copy that ends there: python -c "from transformers import'
            " AutoTokenizer as A; "
            f"t = A.from_pretrained({tokenizer.name_or_path!r}); t.eos_token = {other_tokens[0]!r};"
            " t.save_pretrained('ended')\""
        )
    else:
        cause = "the template writes none behind an answer"
    yield Finding(
        code="PF007",
        severity=Severity.ERROR if masked else Severity.WARNING,
        place=Place(symbol=f"tokenizer, {subject.names.chat_template}"),
        message=f"no training row teaches where to stop: {end_tokens} is never learnt",
        cause=cause,
        fix=fix,
    )


def _has_masked_end(row: Row, end_ids: set[int]) -> bool:
    """Returns True if a token that the model learns is directly followed by an end token that it
    does not learn.
    """
    neighbours = zip(row.labels, row.input_ids[1:], row.labels[1:])
    return any(
        previous != IGNORE_INDEX and token in end_ids and label == IGNORE_INDEX
        for previous, token, label in neighbours
    )


def check_token_ids(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF008, which finds token ids in rows and prompts for which the model has no
    embedding. The size of the tokenizer is already checked when the model is loaded, but single ids
    may be larger than this size.
    """
    rows = _embedding_table(subject, output=False).weight.shape[0]
    prompts = [i for prompt in subject.task.prompts for i in prompt.input_ids]
    used_ids = tokens_used(subject.task.data.documents) | tokens_used(subject.task.data.eval)
    largest = max([subject.task.tokenizer.pad_token_id, *prompts, *used_ids])
    if largest < rows:
        return
    yield Finding(
        code="PF008",
        severity=Severity.ERROR,
        place=Place(symbol="model.tokenizer"),
        message=(
            f"the data has token {largest}"
            f" ({subject.task.tokenizer.convert_ids_to_tokens(largest)!r}), and the model embeds"
            f" {rows}"
        ),
        cause="the tokenizer gives ids that the model's embeddings do not have",
        fix=(
            "take the model's own tokenizer, or call model.resize_token_embeddings and save the"
            " model first"
        ),
    )


def check_new_tokens(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF009. It finds added tokens in the training rows whose embedding is frozen
    and was never trained. After the embeddings were resized, such an embedding is zero or the mean
    of all embeddings.
    """
    added_ids = set(subject.task.tokenizer.added_tokens_decoder) - {
        subject.task.tokenizer.pad_token_id
    }
    read_ids = added_ids & tokens_used(subject.task.data.documents)
    learnt_ids = added_ids & tokens_used(subject.task.data.documents, learnt=True)
    for name, used_ids in (("embed_tokens", read_ids), ("lm_head", learnt_ids)):
        table = _embedding_table(subject, output=name == "lm_head")
        if table is None or any(p.requires_grad for p in table.parameters()):
            continue
        weight = gather_tensor(table.weight)
        untrained_ids = untrained_rows(weight, sorted(i for i in used_ids if i < weight.shape[0]))
        if untrained_ids:
            token_names = ", ".join(
                repr(subject.task.tokenizer.convert_ids_to_tokens(i)) for i in untrained_ids[:5]
            )
            yield Finding(
                code="PF009",
                severity=Severity.WARNING,
                place=Place(symbol=name),
                message=(
                    f"{pluralise(len(untrained_ids), 'token of the data was', 'tokens of the data were')}"
                    f" never trained and will not be: {token_names}"
                ),
                cause=(
                    f"their rows in {name} are zero or the mean of all rows, as resizing leaves"
                    f" them, and {name} is frozen"
                ),
                fix="adapter.modules_to_save: [embed_tokens, lm_head], or a template without them",
            )
            return  # a tied head has the same rows


def untrained_rows(weight: Tensor, rows: list[int]) -> list[int]:
    """Looks at the rows of `weight` whose indices are in `rows`. Returns the indices of the rows
    that are nearly zero, or nearly equal to the mean of all rows of `weight`.

    weight  F[V H]
    inside  the mean is computed in fp32, over at most 4096 rows
    """
    if not rows or not weight.is_floating_point():
        return []
    sample_SH = weight.detach()[:: max(1, weight.shape[0] // 4096)].float()
    mean_H = sample_SH.mean(0)
    usual_norm = sample_SH.norm(dim=1).median()
    usual_distance = (sample_SH - mean_H).norm(dim=1).median()
    # every token has the same row: a test model, or a model with another defect
    if usual_distance == 0:
        return []
    rows_RH = weight.detach()[torch.tensor(rows, device=weight.device)].float()
    fresh_R = (rows_RH.norm(dim=1) < NEAR_ZERO * usual_norm) | (
        (rows_RH - mean_H).norm(dim=1) < NEAR_MEAN * usual_distance
    )
    return [row for row, is_fresh in zip(rows, fresh_R.tolist()) if is_fresh]


def check_chat_template(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF010, which reports an error if the data contain chats but the tokenizer has
    no chat template.
    """
    template = subject.task.data.facts["template"]
    if not template or template["source"] != "default":
        return
    yield Finding(
        code="PF010",
        severity=Severity.WARNING,
        place=Place(symbol="data.chat_template"),
        message="the rows are chats and the tokenizer has no chat template: a plain one is used",
        observed="User: ... / Assistant: ..., saved with the result",
        cause="a base model; or a tokenizer that is not the chat model's",
        fix=(
            "right for a base model; else data.chat_template: chatml (llama3, gemma, FILE.jinja),"
            " or the chat model's tokenizer"
        ),
    )


def _embedding_table(subject: PreflightSubject, *, output: bool) -> Any:
    inner: Any = inner_model(subject.prepared.model)
    if output:
        return inner.get_output_embeddings()
    return inner.get_input_embeddings()


def check_positions(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF020, which finds rows with more tokens than the model has positions. If the
    model has a table of positions, this is an error. A model with rotary positions accepts any
    position, but it was not trained on positions beyond its limit.
    """
    model: Any = inner_model(subject.prepared.model)
    position_count = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    facts = subject.task.data.facts
    # lengths of documents, since positions begin at 0 in each packed document
    longest = max(facts[side]["lengths"]["longest"] for side in ("train", "eval"))
    if not isinstance(position_count, int) or longest <= position_count:
        return
    tokens = model.get_input_embeddings()
    # some tables have two more rows than the model has positions (OPT)
    tables = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, nn.Embedding) and m is not tokens
    ]
    table = next(
        (name for name, module in tables if 0 <= module.num_embeddings - position_count <= 2), None
    )
    yield Finding(
        code="PF020",
        severity=Severity.ERROR if table else Severity.WARNING,
        place=Place(symbol=subject.names.max_length),
        message=(
            f"the longest row has {longest} tokens, and the model has {position_count} positions"
        ),
        cause=(
            f"{table} has no row for later positions"
            if table
            else "rotary positions continue, at angles that the model has never seen"
        ),
        declared=f"max_position_embeddings {position_count}",
        observed=f"{subject.names.max_length} {subject.config.data.max_length}",
        fix=f"{subject.names.max_length}: {position_count}"
        + ("" if table else "; or leave it, where the model is meant to learn longer texts"),
    )


def check_packing(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF018. It finds models in which one document of a packed row changes the
    predictions for another document.

    The positions separate the documents, because every attention back end of transformers converts
    them to a mask or to cumulative lengths. But some layers ignore the positions. Convolutions and
    recurrent layers pass information from one token to the next ones, whatever their positions are.
    Some models have their own implementation of attention, or an attention mask that does not
    depend on positions (GPT-OSS).
    """
    if not subject.config.data.packing:
        return
    prepared = subject.prepared
    with preserve_state(prepared):
        prepared.model.eval()
        try:
            leak = measure_leakage(
                prepared.model,
                subject.longest_rows,
                pad_id=subject.task.tokenizer.pad_token_id,
                device=prepared.device,
            )
        except STEP_ERRORS:  # the rehearsal of the step has reported this error
            return
    if leak <= LEAK_TOLERANCE:
        return
    yield Finding(
        code="PF018",
        severity=Severity.ERROR,
        place=Place(symbol="data.packing"),
        message=(
            "packed documents see each other: other words in the first change what the model says"
            " in the second"
        ),
        observed=f"logits of the second move by {leak:.2g} of the largest",
        cause=(
            "position ids do not keep them apart here: a convolution, a recurrence, an attention of"
            " its own, or a mask made without them"
        ),
        fix="data.packing: false",
    )


@torch.no_grad()
def measure_leakage(
    model: nn.Module, rows: Sequence[Row], *, pad_id: int, device: torch.device
) -> float:
    """Packs two documents into one row, changes the tokens of the first document, and returns the
    largest change in the logits of the second document. The change is divided by the largest of
    these logits.
    """
    lengths = (min([TRIAL_TOKENS, *row.documents[:1], len(row.input_ids)]) for row in rows)
    documents = [Row(row.input_ids[:n], row.labels[:n], 0) for row, n in zip(rows, lengths)]
    first = documents[0]
    second = documents[1 % len(documents)]
    n = len(first.input_ids)
    changed_first = Row(
        first.input_ids[::-1] if len(set(first.input_ids)) > 1 else (pad_id,) * n, first.labels, 0
    )

    def second_logits(document: Row) -> Tensor:
        batch = collate([join_rows([document, second])], pad_id=pad_id, device_type=device.type).to(
            device
        )
        batch = batch.join_packed_rows() if needs_single_packed_row(model) else batch
        logits: Tensor = model(**model_inputs(model, batch)).logits[0]
        return logits

    original_TV = second_logits(first)
    changed_TV = second_logits(changed_first)
    original, changed = (
        logits_TV[n : n + len(second.input_ids)].float() for logits_TV in (original_TV, changed_TV)
    )
    return float((original - changed).abs().max() / original.abs().max().clamp_min(1e-9))


# stage of the preflight -> the checks of a language run
CHECKS: dict[str, tuple[Check, ...]] = {
    "data": (
        Check(("PF005",), check_learnt_tokens),
        Check(("PF006",), check_prompt_labels),
        Check(("PF007",), check_end_token),
        Check(("PF008",), check_token_ids),
        Check(("PF009",), check_new_tokens),
        Check(("PF010",), check_chat_template),
        Check(("PF020",), check_positions),
    ),
    "real": (Check(("PF018",), check_packing),),
}
