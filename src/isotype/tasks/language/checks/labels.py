"""PF005, PF006, PF007: rows that teach nothing, that teach their prompts, or that never teach where to stop."""

from __future__ import annotations

from collections.abc import Iterator

from ....counted import counted
from ....data.bad_rows import EMPTY
from ....data.rows import IGNORED, Row, row_supervised, tokens_used
from ....finding import Finding, Place, Severity
from .subject import LanguageSubject, formats

FEW = 0.05  # below this share, rows without a token to learn are only listed in data.json
ANSWERED = {"messages", "sharegpt", "alpaca", "prompt_completion"}


def nothing_to_learn(subject: LanguageSubject) -> Iterator[Finding]:
    """Rows that were dropped for it while the data was read, and rows that got through."""
    for name, rows in (("train", subject.task.data.documents), ("eval", subject.task.data.eval)):
        facts = subject.task.data.facts[name]
        masked = sum(n == 0 for n in row_supervised(rows))
        dropped = sum(d["rows"] for d in facts["dropped"])
        total = len(rows) + dropped
        if not total or (masked + dropped) / total < FEW:
            continue
        side = "training" if name == "train" else "evaluation"
        why = "; ".join(f"{d['rows']} dropped: {d['why']} (first: {d['first']})" for d in facts["dropped"])
        yield Finding(
            code="PF005", severity=Severity.ERROR if masked and masked == len(rows) else Severity.WARNING,
            place=Place(symbol=f"data.{name}"),
            message=f"{masked + dropped} of {counted(total, f'{side} row')} {'has' if masked + dropped == 1 else 'have'} no token to learn",
            cause=why or "every label of these rows is masked",
            fix=_fix({d["why"] for d in facts["dropped"]}, masked),
        )  # fmt: skip


def _fix(why_dropped: set[str], masked: int) -> str:
    """Advice that fits the reasons: a larger max_length does not help a row without an answer."""
    if why_dropped == {EMPTY} and not masked:
        return "write the missing answers, or take these rows out of the file; training goes on without them"
    return "a larger data.max_length when rows are cut, else look at their answers and at data.chat_template"


def prompts_learnt(subject: LanguageSubject) -> Iterator[Finding]:
    """Chats and prompt/completion pairs of which every token is learnt, although only answers are meant."""
    rows = subject.task.data.documents
    if subject.config.data.loss_on == "all" or not formats(subject) <= ANSWERED or not rows:
        return
    if any(IGNORED in row.labels for row in rows):
        return
    yield Finding(
        code="PF006", severity=Severity.ERROR, place=Place(symbol="data.loss_on"),
        message=f"every token of {'all ' * (len(rows) > 1)}{counted(len(rows), 'training row')} is learnt, prompts too",
        declared="data.loss_on: assistant", cause="no row has a prompt that its rendered text shows",
        fix="look at the prompts and at data.chat_template; data.loss_on: all if it is meant",
    )  # fmt: skip


def end_never_learnt(subject: LanguageSubject) -> Iterator[Finding]:
    """Generation stops at the tokenizer's end token and those of the model; a run that never learns one of them does not stop."""
    data, tokenizer = subject.task.data, subject.task.tokenizer
    if not formats(subject) & ANSWERED:
        return
    ends = end_tokens(subject)
    if not ends or ends & tokens_used(data.documents, learnt=True):
        return
    masked = [row for row in data.documents if _ends_masked(row, ends)]
    pad_is_end = tokenizer.pad_token_id in ends
    shown = " ".join(repr(tokenizer.decode([i])) for i in sorted(ends))
    turns = data.facts["tokens"]["end_of_turn"]
    others = [token for token in turns if token != "none" and tokenizer.convert_tokens_to_ids(token) not in ends]
    if masked:
        cause = f"it stands behind the answers of {counted(len(masked), 'row')} and is masked" + (
            ", as the padding token is the same" if pad_is_end else ""
        )
    elif data.facts["train"]["truncated"] == len(data.documents):
        cause = f"every row is cut at data.max_length {data.facts['max_length']}"
    elif others:
        cause = f"the template closes a turn with {others[0]!r}, at which generation does not stop"
    else:
        cause = "the template writes none behind an answer"
    yield Finding(
        code="PF007", severity=Severity.ERROR if masked else Severity.WARNING, place=Place(symbol="tokenizer, data.chat_template"),
        message=f"no training row teaches where to stop: {shown} is never learnt", cause=cause,
        fix="a chat template that ends an answer with the tokenizer's eos_token, a padding token of its own, or a larger data.max_length",
    )  # fmt: skip


def end_tokens(subject: LanguageSubject) -> set[int]:
    from ..sample import generation_config

    config = generation_config(subject.prepared.model, subject.task.tokenizer, max_new_tokens=1)
    return set(config.eos_token_id or [])


def _ends_masked(row: Row, ends: set[int]) -> bool:
    """Whether an end token that is not learnt directly follows a learnt one."""
    after_learnt = zip(row.labels, row.input_ids[1:], row.labels[1:])
    return any(before != IGNORED and token in ends and label == IGNORED for before, token, label in after_learnt)
