"""`load_data`: the data section of a run, from names to rows of tokens, prompts and facts.

A source is a file or `stdlib`. JSON files give examples; plain text files give windows. Evaluation rows are the given files, or held out
of the training rows by content, so that a row and its copy are never on both sides.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.schema import DataSection
from ..errors import UsageError
from .chat import chat_template
from .encode import Encoder, Tally
from .facts import notes, side_facts, template_facts, token_facts
from .formats import Example, detect, example, ignored_keys
from .progress import watched
from .prompts import SAMPLES, prompt_of_text, prompts_of
from .read import JSON_ENDINGS, existing_file, read_records, read_text, sha256
from .rows import LoadedData, Row, SamplePrompt

STDLIB = "stdlib"
_FEW = 10  # rows below which nothing is held out


@dataclass
class Source:
    """One file, read: its examples (JSON) or its text, and what is known about it."""

    name: str
    examples: list[Example] = field(default_factory=list)
    text: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Side:
    """Rows of training or evaluation, where each came from (None for a window of plain text), and whether it was cut."""

    rows: list[Row] = field(default_factory=list)
    examples: list[Example | None] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def add(self, row: Row, kept: Example | None, cut: bool) -> None:
        self.rows.append(row)
        self.examples.append(kept)
        self.cut.append(cut)


def load_data(data: DataSection, tokenizer: Any, *, seed: int) -> LoadedData:
    """Reads, checks, tokenises and splits the data of a run.

    data       the data section
    tokenizer  the model's, with a fast version
    seed       of the held-out share
    ->         rows, prompts, facts
    Raises     UsageError naming file, line and key
    """
    if data.train is None:
        raise UsageError("data.train is not set: give a file (.jsonl, .json, .txt) or stdlib")
    sources = [read_source(name, data) for name in _names(data.train, "data.train")]
    eval_sources = [read_source(name, data) for name in _names(data.eval, "data.eval")] if data.eval is not None else []
    everything = sources + eval_sources
    chats = [e for s in everything for e in s.examples if e.messages is not None]
    pairs = any(e.completion is not None for s in everything for e in s.examples)
    # Prompt/completion rows are chats too where the tokenizer or the user brings a template: that is how such a model is asked later.
    wanted = bool(chats) or (pairs and (data.chat_template is not None or bool(tokenizer.chat_template)))
    if data.chat_template is not None and not wanted:
        raise UsageError("data.chat_template has no effect: no row is a chat")
    template = chat_template(tokenizer, data.chat_template) if wanted else None
    encoder = Encoder(tokenizer, max_length=data.max_length, loss_on=data.loss_on, template=template)

    train = _encode(sources, encoder, data.limit)
    held_out = not eval_sources
    evaluation = _hold_out(train, data.eval_split, seed) if held_out else _encode(eval_sources, encoder, data.limit)
    if not train.rows:
        why = "; ".join(train.tally.dropped) or "no rows"
        raise UsageError(f"{_shown(data.train)}: no training row is left: {why}")

    keys = {row.input_ids for row in train.rows}
    facts: dict[str, Any] = {
        "train": side_facts(train.rows, train.tally, [s.facts for s in sources], truncated=sum(train.cut)),
        "eval": side_facts(evaluation.rows, evaluation.tally, [s.facts for s in eval_sources], truncated=sum(evaluation.cut))
        | {"held_out": held_out},
        "duplicates_between": sum(row.input_ids in keys for row in evaluation.rows),
        "max_length": data.max_length,
        "loss_on": data.loss_on,
        "eval_split": data.eval_split if held_out else None,
        "template": template_facts(encoder, [e for s in sources for e in s.examples if e.completion is not None or e.messages is not None]),
        "tokens": token_facts(encoder, [*train.rows, *evaluation.rows], [train.tally, evaluation.tally]),
    }
    facts["notes"] = notes(facts, encoder, [train.tally, evaluation.tally])
    shown = evaluation if evaluation.rows else train
    return LoadedData(train.rows, evaluation.rows, _prompts(shown, encoder), template.text if template else None, facts)


def read_source(name: str, data: DataSection) -> Source:
    """One entry of data.train or data.eval, read and checked but not tokenised."""
    if name == STDLIB:
        return _stdlib(data)
    path = existing_file(name)
    known = {"path": name, "bytes": path.stat().st_size, "sha256": sha256(path)}
    if path.suffix.lower() not in JSON_ENDINGS:
        if data.format not in ("auto", "text"):
            raise UsageError(f"{name}: data.format is {data.format}, but a {path.suffix} file is plain text: use .jsonl")
        text = read_text(path, name)
        why = f"the ending {path.suffix}: plain text, cut into windows of data.max_length"
        return Source(name, text=text, facts=known | {"format": "text", "why": why, "characters": len(text)})
    return _json_source(path, name, data, known)


def _json_source(path: Path, name: str, data: DataSection, known: dict[str, Any]) -> Source:
    source = Source(name)
    ignored: Counter[str] = Counter()
    form = why = None
    for record in watched(read_records(path, name, data.limit), f"reading {name}"):
        if form is None:
            form, why = detect(record, data.format)
        source.examples.append(example(record, form, needs_answer=data.loss_on == "assistant"))
        ignored.update(ignored_keys(record.value, form))
    source.facts = known | {"format": form, "why": why, "rows": len(source.examples), "ignored_keys": dict(ignored)}
    return source


def _stdlib(data: DataSection) -> Source:
    from .stdlib import stdlib_pairs

    if data.format not in ("auto", "messages"):
        raise UsageError(f"data.format is {data.format}, but stdlib holds messages: leave it at auto")
    pairs = stdlib_pairs()[: data.limit]
    examples = [
        Example(f"stdlib:{pair.name}", messages=({"role": "user", "content": pair.question}, {"role": "assistant", "content": pair.answer}))
        for pair in pairs
    ]
    why = "question and answer pairs from the docstrings of the Python that runs this"
    return Source(STDLIB, examples, facts={"path": STDLIB, "format": "messages", "why": why, "rows": len(examples)})


def _encode(sources: list[Source], encoder: Encoder, limit: int | None) -> Side:
    side = Side()
    for source in sources:
        if source.text is not None:
            windows = list(encoder.windows(source.text, source.name, side.tally))[:limit]
            source.facts["rows"] = len(windows)
            for window in windows:
                side.add(window, None, False)
            continue
        for kept, row, cut in watched(encoder.rows(source.examples, side.tally), f"tokenising {source.name}"):
            side.add(row, kept, cut)
    if limit is not None:
        del side.rows[limit:], side.examples[limit:], side.cut[limit:]
    return side


def _hold_out(train: Side, share: float, seed: int) -> Side:
    """Moves about `share` of the rows out of `train`, every copy of a row with it."""
    evaluation = Side()
    if share == 0.0 or len(train.rows) < _FEW:
        return evaluation
    copies = Counter(row.input_ids for row in train.rows)
    distinct = list(copies)
    random.Random(seed).shuffle(distinct)
    wanted, count = max(1, round(len(train.rows) * share)), 0
    held: set[tuple[int, ...]] = set()
    for key in distinct:
        if count >= wanted or len(held) == len(distinct) - 1:
            break
        held.add(key)
        count += copies[key]
    everything = list(zip(train.rows, train.examples, train.cut))
    train.rows, train.examples, train.cut = [], [], []
    for row, kept, cut in everything:
        (evaluation if row.input_ids in held else train).add(row, kept, cut)
    return evaluation


def _prompts(side: Side, encoder: Encoder) -> list[SamplePrompt]:
    found: list[SamplePrompt] = []
    for row, kept in zip(side.rows[:SAMPLES], side.examples):
        found += [prompt_of_text(row.input_ids, encoder)] if kept is None else prompts_of([kept], encoder)
    return found


def _names(given: str | list[str], key: str) -> list[str]:
    names = [given] if isinstance(given, str) else list(given)
    if not names or not all(name.strip() for name in names):
        raise UsageError(f"{key}: give at least one file, or stdlib")
    if repeated := [name for name, n in Counter(names).items() if n > 1]:
        raise UsageError(f"{key}: {repeated[0]} is named twice")
    return names


def _shown(given: str | list[str]) -> str:
    return given if isinstance(given, str) else ", ".join(given)
