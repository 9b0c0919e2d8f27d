"""`load_data`: turns the data section of a run into rows of tokens, prompts and facts.

Sources are read row by row and tokenised into flat arrays (`tokens`), on disk if they are large
(`cache`). Evaluation rows come from their own sources, or are held out of the training rows by
content, so that a row and its copy are never on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from ..config.schema import DataSection
from ..config.sources import source_specs
from ..errors import UsageError
from .bad_rows import BadRow
from .cache import SMALLEST, bound, cache_folder, cached, entry_key, tokenizer_fingerprint
from .chat import chat_template
from .encode import Encoder, Tally
from .facts import FEW, data_facts, eval_sets, notes, tallied
from .formats import Example, FormatName
from .pairs import Encoded, label_note, pair_digests, pair_facts, pair_notes, whole_pairs
from .pictures import Pictures
from .progress import watched
from .prompts import SAMPLES, prompt_of_text, prompts_of
from .rows import LoadedData, Row, SamplePrompt, Share
from .sources import Source, refuse_read_twice, source
from .tokens import TokenRows, TokenWriter, held_out, pack

_LOOKED_AT = 256  # rows, for samples that differ
_OWN_LIMITS = "a limit for each is data.train: [{name: ..., limit: N}, ...]"


def load_data(
    data: DataSection,
    tokenizer: Any,
    *,
    seed: int,
    only: FormatName | None = None,
    pictures: Pictures | None = None,
) -> LoadedData:
    """Reads, checks, tokenises and splits the data of a run.

    data       the data section
    tokenizer  the model's
    seed       of the held-out share
    pictures   of a vision-language model: its processor reads those of the rows
    only       the one format of which the objective learns. A preference pair becomes two rows,
               which stay together; a limit counts pairs
    ->         rows, prompts, facts
    Raises     UsageError naming file, line and key
    """
    if data.train is None:
        raise UsageError(
            "data.train is not set: give a file (.jsonl, .csv, .parquet, .txt, ...), a folder,"
            " hf:NAME or stdlib"
        )
    answers = data.loss_on == "assistant"
    sources = [
        source(spec, needs_answer=answers, only=only, streaming=data.stream)
        for spec in source_specs(data, "train")
    ]
    eval_sources = [
        source(spec, needs_answer=answers, only=only) for spec in source_specs(data, "eval")
    ]
    refuse_read_twice(sources)
    refuse_read_twice(eval_sources)
    encoder = encoder_for(data, tokenizer, sources + eval_sources, pictures)
    if data.stream:
        from .stream import load_stream

        if pictures is not None:
            encoder.pictures = None
            encoder.no_pictures = "data.stream reads none: leave it out"

        evaluation = _tokenised(eval_sources, encoder, data)
        return load_stream(data, sources, eval_sources, evaluation, encoder, seed=seed)

    pairs = only == "preference"
    each = 2 if pairs else 1
    train, evaluation = (
        _limited(_tokenised(of, encoder, data), data.limit, of, each)
        for of in (sources, eval_sources)
    )
    tallies, total = tallied([train, evaluation], refuse=data.on_bad_row == "error")
    was_held_out = not eval_sources
    if was_held_out:
        train, evaluation = _hold_out(train, data.eval_split, seed, each)
    if not len(train):
        why = "; ".join([*tallies[0].dropped, *total.bad.kinds]) or "no rows"
        raise UsageError(f"{', '.join(s.name for s in sources)}: no training row is left: {why}")

    shares = _shares(sources, train, data.limit)
    packed = pack(train, data.max_length) if data.packing else None
    files = _files(sources, train), _files(eval_sources, evaluation)
    facts = data_facts(
        data, encoder, [train, evaluation], tallies, total, files, held_out=was_held_out
    )
    facts |= {
        "packing": packed.facts() if packed else None,
        "mix": _mix_facts(sources, train, shares),
    }
    shows = bool(train.has_pictures.any() or evaluation.has_pictures.any())
    if shows and pictures is not None:
        facts["pictures"] = pictures.settings() | {
            "rows": int(train.has_pictures.sum()),
            "eval_rows": int(evaluation.has_pictures.sum()),
        }
    for side, rows_of_side in (("train", train), ("eval", evaluation)) if pairs else ():
        facts[side] |= pair_facts(rows_of_side)
    said = [note for s in sources + eval_sources for note in s.notes] + (
        pair_notes(facts["train"]) if pairs else []
    )
    if only == "labelled":
        said.append(label_note(train))
    facts["notes"] = said + notes(facts, encoder, total)
    if len(evaluation):
        shown = evaluation
        of = eval_sources or sources
    else:
        shown = train
        of = sources
    rows: Sequence[Row] = train
    if packed:
        rows = packed
        shares = packed.shares(shares)
    template = encoder.template.text if encoder.template else None
    prompts = _prompts(shown.select(slice(None, None, each)), of, encoder)
    return LoadedData(
        rows,
        evaluation,
        prompts,
        template,
        facts,
        shares,
        bad_rows=total.bad.listed,
        eval_sets=eval_sets(eval_sources, evaluation),
        pictures=pictures if shows else None,
    )


def encoder_for(
    data: DataSection, tokenizer: Any, sources: Sequence[Source], pictures: Pictures | None = None
) -> Encoder:
    """The encoder that these sources need. If there is a template, prompt/completion rows become
    chats too, since prompts will be rendered with this template when the model is used.
    """
    rendered = {"messages", "sharegpt", "alpaca"}
    if data.chat_template is not None or tokenizer.chat_template:
        rendered |= {"prompt_completion", "preference", "labelled"}
    wanted = any(rendered & one.formats for one in sources)
    for key in () if wanted else ("chat_template", "template_kwargs", "thoughts"):
        if getattr(data, key) != DataSection.model_fields[key].default:
            raise UsageError(
                f"data.{key} has no effect: no row is rendered by a chat template",
                fix="leave it out",
            )
    if wanted:
        template = chat_template(
            tokenizer, data.chat_template, data.template_kwargs, thoughts=data.thoughts
        )
    else:
        template = None
    return Encoder(
        tokenizer,
        max_length=data.max_length,
        loss_on=data.loss_on,
        template=template,
        pictures=pictures,
    )


def _tokenised(sources: Sequence[Source], encoder: Encoder, data: DataSection) -> TokenRows:
    """The rows of sources, from the cache where it has them."""
    folder = cache_folder(data.cache)
    bound()  # a mistyped name is reported before hours of tokenising
    fingerprint = ""
    blocks = []
    for one in sources:
        block = None
        if folder is not None and (data.cache != "auto" or one.bytes >= SMALLEST):
            fingerprint = fingerprint or tokenizer_fingerprint(encoder.tokenizer)
            try:
                block, notes = cached(
                    folder, _key(one, encoder, fingerprint), partial(encode_source, one, encoder)
                )
                one.notes += notes
            except OSError as error:
                one.notes.append(
                    f"the cache {folder} cannot be written ({error.strerror or error}): rows are"
                    " held in memory"
                )
        if block is None:
            writer = TokenWriter()
            block = writer.block(encode_source(one, encoder, writer))
        blocks.append(block)
    return TokenRows(blocks)


def _key(one: Source, encoder: Encoder, fingerprint: str) -> str:
    """Everything that shapes the rows of a source. Split and packing come after, and are not part
    of it.
    """
    template = encoder.template
    spec = one.spec
    return entry_key(
        {
            "content": one.identity(),
            "formats": one.forms and [form for form, _ in one.forms],
            "columns": dict(spec.columns or {}),
            "limit": spec.limit,
            "name": one.name,
            "tokenizer": fingerprint,
            "template": template and (template.text, template.thoughts),
            "max_length": encoder.max_length,
            "loss_on": encoder.loss_on,
            "needs_answer": one.needs_answer,
            "pictures": encoder.pictures and encoder.pictures.settings(),
        }
    )


def encode_source(one: Source, encoder: Encoder, writer: TokenWriter) -> dict[str, Any]:
    """Reads a source to its end and writes its rows; returns the counts."""
    tally = Tally()
    # what was read; the encoder drops some and keeps the order
    waiting: deque[Example | BadRow] = deque()
    one.ignored.clear()

    def handed() -> Iterator[Example]:
        for found in one.examples():
            waiting.append(found)
            if isinstance(found, BadRow):
                tally.note_bad(found)
            else:
                yield from (found,) if found.rejected is None else (found, found.rejected)

    read = 0
    encoded = encoder.rows(handed(), tally)
    if one.only == "preference":
        groups: Iterator[tuple[Encoded, ...]] = whole_pairs(encoded, tally)
    else:
        groups = ((row,) for row in encoded)
    for group in watched(groups, f"tokenising {one.name}", one.about_rows):
        while waiting.popleft() is not group[0][0]:
            read += 1
        for example, row, cut in group:
            writer.add(row, example=read, cut=cut, wanted=example.wanted)
        read += 1
    read += len(waiting)
    windows = (
        window
        for name, pieces in one.texts()
        for window in watched(
            encoder.windows(map(encoder.ids, pieces), name, tally), f"tokenising {name}"
        )
    )
    for window in islice(
        windows, None if one.spec.limit is None else max(0, one.spec.limit - read)
    ):
        writer.add(window, example=-1, cut=False)
    return {"tally": tally.to_dict(), "read": read, "ignored_keys": dict(one.ignored)}


def _limited(rows: TokenRows, limit: int | None, sources: Sequence[Source], each: int) -> TokenRows:
    """The first rows of all sources, in their order. Notes which sources that leaves out. `each`:
    rows that are one of the data's.
    """
    if limit is None or len(rows) <= limit * each:
        return rows
    kept = rows.select(slice(limit * each))
    counts = ", ".join(
        f"{len(kept.of_block(i)) // each:,} of {one.name}" for i, one in enumerate(sources)
    )
    sources[0].notes.append(
        f"data.limit takes the first rows of all sources together: {counts}; {_OWN_LIMITS}"
    )
    return kept


def _hold_out(rows: TokenRows, share: float, seed: int, each: int) -> tuple[TokenRows, TokenRows]:
    if share == 0.0 or len(rows) // each < FEW:
        return rows, rows.select(np.zeros(len(rows), bool))
    held = np.repeat(
        held_out(rows.column("digest") if each == 1 else pair_digests(rows), share, seed), each
    )
    return rows.select(~held), rows.select(held)


def _shares(sources: Sequence[Source], train: TokenRows, limit: int | None) -> list[Share]:
    if not any(s.spec.weight for s in sources):
        return []
    shares = [Share(len(train.of_block(i)), s.spec.weight or 1.0) for i, s in enumerate(sources)]
    empty = [s.name for s, share in zip(sources, shares) if not share.rows]
    if empty:
        fix = None if limit is None else _OWN_LIMITS
        raise UsageError(
            f"{empty[0]}: no training row is left of it, so that its weight cannot be kept", fix=fix
        )
    return shares


def _files(sources: Sequence[Source], rows: TokenRows) -> list[dict[str, Any]]:
    """Sources as data.json has them: what was found, what it held, and whether it was tokenised
    now.
    """
    found = []
    for i, (one, block) in enumerate(zip(sources, rows.blocks)):
        facts = {key: block.facts[key] for key in ("ignored_keys", "cache") if key in block.facts}
        windows = int((block.example < 0).sum())
        read = {"rows": block.facts["read"] + windows}
        found.append(one.facts() | read | facts | {"kept": len(rows.of_block(i))})
    return found


def _mix_facts(
    sources: Sequence[Source], train: TokenRows, shares: Sequence[Share]
) -> list[dict[str, Any]] | None:
    """Of weighted sources: the share of the rows, and how often a row of theirs comes in an epoch."""
    total = sum(share.weight for share in shares)
    return [
        {
            "path": one.name,
            "weight": share.weight,
            "share": share.weight / total,
            "passes": share.weight / total * len(train) / share.rows,
        }
        for one, share in zip(sources, shares)
    ] or None


def _prompts(rows: TokenRows, sources: Sequence[Source], encoder: Encoder) -> list[SamplePrompt]:
    """Prompts of the first rows, copies left out; a chat's is read again from its source, a text's
    is the beginning of its tokens.
    """
    found: list[SamplePrompt] = []
    _, first = np.unique(rows.column("digest")[:_LOOKED_AT], return_index=True)
    for i in sorted(int(i) for i in first)[:SAMPLES]:
        block, row = rows.place(i)
        number = int(rows.blocks[block].example[row])
        if number < 0:
            found.append(prompt_of_text(rows[i].input_ids, encoder))
        else:
            read_again = islice(sources[block].examples(skip=number), 1)
            found += prompts_of(
                [example for example in read_again if not isinstance(example, BadRow)], encoder
            )
    return found
