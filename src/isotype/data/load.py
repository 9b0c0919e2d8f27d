"""Loads the data of a run. This module reads the sources that the section `data` of the
configuration names, and returns rows of tokens, prompts for samples, and a description of the data
for data.json.

Sources are read row by row and tokenised into flat arrays (`tokens`), which are cached on disk if
they are large (`cache`). Evaluation rows come from separate sources, or some training rows are held
out for evaluation. A hash of a row's content decides whether it is held out, so that copies of a
row are never in both sets.
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
from ..wording import pluralise
from .bad_rows import BadRow
from .cache import (
    MIN_CACHED_BYTES,
    cache_folder,
    entry_key,
    load_or_create_entry,
    max_cache_bytes,
    tokenizer_fingerprint,
)
from .chat import chat_template
from .encode import Encoder, Tally
from .facts import MIN_ROWS_TO_HOLD_OUT, collect_tallies, data_facts, data_notes, eval_set_sizes
from .formats import Example
from .pairs import EncodedExample, complete_pairs, label_note, pair_digests, pair_facts, pair_notes
from .pictures import Pictures
from .progress import track_progress
from .prompts import SAMPLES, example_prompts, text_prompt
from .row_keys import FormatName
from .rows import LoadedData, Row, SamplePrompt, Share
from .sources import Source, open_source, refuse_duplicate_files
from .tokens import TokenRows, TokenWriter, choose_held_out, pack_rows

_SAMPLED_ROWS = 256  # number of first rows among which different prompts are searched
_SOURCE_LIMITS_FIX = "a limit for each is data.train: [{name: ..., limit: N}, ...]"


def load_data(
    data: DataSection,
    tokenizer: Any,
    *,
    seed: int,
    objective_format: FormatName | None = None,
    pictures: Pictures | None = None,
    prompt_count: int = SAMPLES,
) -> LoadedData:
    """Reads, checks, tokenises and splits the data of a run.

    data              the section `data` of the configuration
    tokenizer         the model's tokenizer
    seed              chooses the held-out rows
    objective_format  the row format that the objective requires; None if it accepts every format. A
                      preference pair becomes two rows, which stay together. If the number of rows
                      is limited, a pair counts as one row
    pictures          reads the rows' pictures with the processor of a vision-language model
    prompt_count      the largest number of prompts that are taken from the rows
    ->                rows, prompts, facts
    Raises            UsageError with file, line and key
    """
    if data.train is None:
        raise UsageError(
            "data.train is not set: give a file (.jsonl, .csv, .parquet, .txt, ...), a folder,"
            " hf:NAME or stdlib"
        )
    sources = _open_sources(data, "train", objective_format)
    eval_sources = _open_sources(data, "eval", objective_format)
    encoder = build_encoder(data, tokenizer, sources + eval_sources, pictures)
    if data.stream:
        from .stream import load_stream

        if pictures is not None:
            encoder.pictures = None
            encoder.no_pictures_reason = "data.stream reads none: leave it out"

        evaluation = _tokenize_sources(eval_sources, encoder, data)
        return load_stream(data, sources, eval_sources, evaluation, encoder, seed=seed)

    rows_per_example = 2 if objective_format == "preference" else 1
    train, evaluation = (
        _limit_rows(
            _tokenize_sources(side_sources, encoder, data),
            data.limit,
            side_sources,
            rows_per_example,
        )
        for side_sources in (sources, eval_sources)
    )
    tallies, total_tally = collect_tallies([train, evaluation], refuse=data.on_bad_row == "error")
    if not eval_sources:
        train, evaluation = _hold_out(train, data.eval_split, seed, rows_per_example)
    if not len(train):
        dropped = [
            f"{reason} ({pluralise(count, 'row')}, the first is {tallies[0].first_dropped[reason]})"
            for reason, count in tallies[0].dropped.items()
        ]
        reason = "; ".join([*dropped, *total_tally.bad.kinds]) or "no rows"
        raise UsageError(
            f"{', '.join(source.name for source in sources)}: no training row is left: {reason}"
        )

    shares = _source_shares(sources, train, data.limit)
    packed = pack_rows(train, data.max_length) if data.packing else None
    files = _file_facts(sources, train), _file_facts(eval_sources, evaluation)
    facts = data_facts(
        data, encoder, [train, evaluation], tallies, total_tally, files, held_out=not eval_sources
    )
    facts["packing"] = packed.facts() if packed else None
    facts["mix"] = _mix_facts(sources, train, shares)
    has_pictures = bool(train.has_pictures.any() or evaluation.has_pictures.any())
    if has_pictures and pictures is not None:
        facts["pictures"] = pictures.settings() | {
            "rows": int(train.has_pictures.sum()),
            "eval_rows": int(evaluation.has_pictures.sum()),
        }
    facts["notes"] = [note for source in sources + eval_sources for note in source.notes]
    facts["notes"] += _add_objective_facts(facts, train, evaluation, objective_format)
    facts["notes"] += data_notes(facts, encoder, total_tally)
    if len(evaluation):
        prompt_rows = evaluation
        prompt_sources = eval_sources or sources
    else:
        prompt_rows = train
        prompt_sources = sources
    first_of_each_example = prompt_rows.select(slice(None, None, rows_per_example))
    rows: Sequence[Row] = train
    if packed:
        rows = packed
        shares = packed.shares(shares)
    return LoadedData(
        rows,
        evaluation,
        _sample_prompts(first_of_each_example, prompt_sources, encoder, prompt_count),
        encoder.template.text if encoder.template else None,
        facts,
        shares,
        bad_rows=total_tally.bad.listed,
        eval_sets=eval_set_sizes(eval_sources, evaluation),
        pictures=pictures if has_pictures else None,
    )


def _open_sources(
    data: DataSection, side: str, objective_format: FormatName | None
) -> list[Source]:
    """Opens the sources of `data.train` or `data.eval`. Raises UsageError for a file that belongs
    to two sources.
    """
    sources = [
        open_source(
            spec,
            needs_answer=data.loss_on == "assistant",
            objective_format=objective_format,
            streaming=data.stream and side == "train",
        )
        for spec in source_specs(data, side)
    ]
    refuse_duplicate_files(sources)
    return sources


def _add_objective_facts(
    facts: dict[str, Any],
    train: TokenRows,
    evaluation: TokenRows,
    objective_format: FormatName | None,
) -> list[str]:
    """For preference pairs, adds what data.json says about the pairs to `facts`. Returns messages
    about the pairs or the labels.
    """
    if objective_format == "preference":
        facts["train"] |= pair_facts(train)
        facts["eval"] |= pair_facts(evaluation)
        return pair_notes(facts["train"])
    if objective_format == "labelled":
        return [label_note(train)]
    return []


def build_encoder(
    data: DataSection, tokenizer: Any, sources: Sequence[Source], pictures: Pictures | None = None
) -> Encoder:
    """Returns the encoder for these sources. If there is a chat template, rows with a prompt and a
    completion are also converted to chats. The reason is that programs apply the template to the
    prompts when they use the model.
    """
    template_formats = {"messages", "sharegpt", "alpaca"}
    if data.chat_template is not None or tokenizer.chat_template:
        template_formats |= {"prompt_completion", "preference", "labelled"}
    needs_template = any(template_formats & source.formats for source in sources)
    for key in () if needs_template else ("chat_template", "template_kwargs", "thoughts"):
        if getattr(data, key) != DataSection.model_fields[key].default:
            raise UsageError(
                f"data.{key} has no effect: no row is rendered by a chat template",
                fix="leave it out",
            )
    if needs_template:
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


def _tokenize_sources(sources: Sequence[Source], encoder: Encoder, data: DataSection) -> TokenRows:
    """Returns the tokenised rows of the sources. Rows that the cache already contains are read from
    the cache.
    """
    folder = cache_folder(data.cache)
    max_cache_bytes()  # an invalid ISOTYPE_CACHE_GB is reported before hours of tokenising
    fingerprint = ""
    blocks = []
    for source in sources:
        block = None
        if folder is not None and (data.cache != "auto" or source.bytes >= MIN_CACHED_BYTES):
            fingerprint = fingerprint or tokenizer_fingerprint(encoder.tokenizer)
            try:
                block, notes = load_or_create_entry(
                    folder,
                    _cache_key(source, encoder, fingerprint),
                    partial(encode_source, source, encoder),
                )
                source.notes += notes
            except OSError as error:
                source.notes.append(
                    f"the cache {folder} cannot be written ({error.strerror or error}): rows are"
                    " held in memory"
                )
        if block is None:
            writer = TokenWriter()
            block = writer.block(encode_source(source, encoder, writer))
        blocks.append(block)
    return TokenRows(blocks)


def _cache_key(source: Source, encoder: Encoder, fingerprint: str) -> str:
    """Returns the name of a source's cache entry, which is a hash of everything that determines its
    rows. Held-out rows and packing are chosen later, so the hash does not depend on them.
    """
    template = encoder.template
    spec = source.spec
    return entry_key(
        {
            "content": source.identity(),
            "formats": source.detected_formats
            and [row_format for row_format, _ in source.detected_formats],
            "columns": dict(spec.columns or {}),
            "roles": dict(spec.roles or {}),
            "limit": spec.limit,
            "name": source.name,
            "tokenizer": fingerprint,
            "template": template and (template.text, template.thoughts),
            "max_length": encoder.max_length,
            "loss_on": encoder.loss_on,
            "needs_answer": source.needs_answer,
            "pictures": encoder.pictures and encoder.pictures.settings(),
        }
    )


def encode_source(source: Source, encoder: Encoder, writer: TokenWriter) -> dict[str, Any]:
    """Reads a whole source, tokenises its examples and passes the rows to `writer`. Returns the
    counts.
    """
    tally = Tally()
    # items that were read and not yet encoded; the encoder drops some and keeps the order
    pending: deque[Example | BadRow] = deque()
    source.ignored.clear()

    def track_examples() -> Iterator[Example]:
        for item in source.examples():
            pending.append(item)
            if isinstance(item, BadRow):
                tally.add_bad_row(item)
            else:
                yield from (item,) if item.rejected is None else (item, item.rejected)

    examples_read = 0
    encoded = encoder.encode_rows(track_examples(), tally)
    if source.objective_format == "preference":
        groups: Iterator[tuple[EncodedExample, ...]] = complete_pairs(encoded, tally)
    else:
        groups = ((row,) for row in encoded)
    for group in track_progress(groups, f"tokenising {source.name}", source.estimated_rows):
        while pending.popleft() is not group[0][0]:
            examples_read += 1
        for example, row, cut in group:
            writer.add(row, example=examples_read, cut=cut, is_wanted=example.is_wanted)
        examples_read += 1
    examples_read += len(pending)
    windows = (
        window
        for name, pieces in source.texts()
        for window in track_progress(
            encoder.cut_windows(map(encoder.ids, pieces), name, tally), f"tokenising {name}"
        )
    )
    for window in islice(
        windows, None if source.spec.limit is None else max(0, source.spec.limit - examples_read)
    ):
        writer.add(window, example=-1, cut=False)
    return {"tally": tally.to_dict(), "read": examples_read, "ignored_keys": dict(source.ignored)}


def _limit_rows(
    rows: TokenRows, limit: int | None, sources: Sequence[Source], rows_per_example: int
) -> TokenRows:
    """Returns the rows of the first `limit` examples of all sources together. Also adds a message
    that tells how many examples come from each source. `rows_per_example` is 2 for preference
    pairs, otherwise 1.
    """
    if limit is None or len(rows) <= limit * rows_per_example:
        return rows
    limited = rows.select(slice(limit * rows_per_example))
    counts = ", ".join(
        f"{len(limited.block_row_numbers(i)) // rows_per_example:,} of {source.name}"
        for i, source in enumerate(sources)
    )
    sources[0].notes.append(
        f"data.limit takes the first rows of all sources together: {counts}; {_SOURCE_LIMITS_FIX}"
    )
    return limited


def _hold_out(
    rows: TokenRows, share: float, seed: int, rows_per_example: int
) -> tuple[TokenRows, TokenRows]:
    if share == 0.0 or len(rows) // rows_per_example < MIN_ROWS_TO_HOLD_OUT:
        return rows, rows.select(np.zeros(len(rows), bool))
    digests = rows.column("digest") if rows_per_example == 1 else pair_digests(rows)
    is_held_out = choose_held_out(digests, share, seed)
    held_out_mask = np.repeat(is_held_out, rows_per_example)
    return rows.select(~held_out_mask), rows.select(held_out_mask)


def _source_shares(sources: Sequence[Source], train: TokenRows, limit: int | None) -> list[Share]:
    if not any(source.spec.weight for source in sources):
        return []
    shares = [
        Share(len(train.block_row_numbers(i)), source.spec.weight or 1.0)
        for i, source in enumerate(sources)
    ]
    empty = [source.name for source, share in zip(sources, shares) if not share.rows]
    if empty:
        fix = None if limit is None else _SOURCE_LIMITS_FIX
        raise UsageError(
            f"{empty[0]}: no training row is left of it, so that its weight cannot be kept", fix=fix
        )
    return shares


def _file_facts(sources: Sequence[Source], rows: TokenRows) -> list[dict[str, Any]]:
    """Returns the entries in data.json that describe the sources. An entry contains the name, the
    format, counts of rows, and whether the cache was used.
    """
    entries = []
    for i, (source, block) in enumerate(zip(sources, rows.blocks)):
        facts = {key: block.facts[key] for key in ("ignored_keys", "cache") if key in block.facts}
        windows = int((block.example < 0).sum())
        row_count = {"rows": block.facts["read"] + windows}
        entries.append(
            source.facts() | row_count | facts | {"kept": len(rows.block_row_numbers(i))}
        )
    return entries


def _mix_facts(
    sources: Sequence[Source], train: TokenRows, shares: Sequence[Share]
) -> list[dict[str, Any]] | None:
    """For each source with a weight, returns its share of the rows, and how often each of its rows
    is used in an epoch. Returns None if no source has a weight.
    """
    total = sum(share.weight for share in shares)
    return [
        {
            "path": source.name,
            "weight": share.weight,
            "share": share.weight / total,
            "passes": share.weight / total * len(train) / share.rows,
        }
        for source, share in zip(sources, shares)
    ] or None


def _sample_prompts(
    rows: TokenRows, sources: Sequence[Source], encoder: Encoder, count: int
) -> list[SamplePrompt]:
    """Returns prompts from the first rows, without duplicates. The prompt of a chat is read again
    from its source. The prompt of a plain text is the beginning of its tokens.
    """
    prompts: list[SamplePrompt] = []
    _, first_indices = np.unique(rows.column("digest")[:_SAMPLED_ROWS], return_index=True)
    for i in sorted(int(i) for i in first_indices)[:count]:
        block_index, row_index = rows.locate(i)
        number = int(rows.blocks[block_index].example[row_index])
        if number < 0:
            prompts.append(text_prompt(rows[i].input_ids, encoder))
        else:
            read_again = islice(sources[block_index].examples(skip=number), 1)
            prompts += example_prompts(
                [example for example in read_again if not isinstance(example, BadRow)], encoder
            )
    return prompts
