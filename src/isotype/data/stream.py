"""Streams rows and tokenises them during training. A stream makes it possible to train on data that
are larger than the disk.

A stream is read in blocks of `data.shuffle_buffer` rows. The weights of the sources decide how many
rows of a block come from each source. The rows are tokenised and shuffled, and packed if the
configuration says so. Only one block is in memory at a time. The state of a stream is the position
of each source at the beginning of the block, and the number of rows of the block that were already
used. A resumed run reads this block again and continues with the next unused row. A hash of a row's
tokens decides whether the row is held out for evaluation. Evaluation uses the first rows that are
held out. Training uses none of the rows that are held out.

If there are several processes, each tokenises a part of every block. Then the processes exchange
the tokens, so that each process has the whole block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, Protocol

import numpy as np

from ..config.schema import DataSection
from ..errors import RunError, UsageError
from ..wording import pluralise
from .bad_rows import BadRow
from .encode import Encoder, Tally
from .facts import collect_tallies, data_facts, data_notes, eval_set_sizes
from .formats import Example
from .prompts import SAMPLES, example_prompts, text_prompt
from .rows import LoadedData, Row, SamplePrompt
from .sources import Source
from .tokens import TokenBlock, TokenRows, TokenWriter, is_held_out, pack_rows, row_digest

MAX_EVALUATED_ROWS = 256  # number of held-out rows that are evaluated
_MAX_SEARCHED_ROWS = 20_000  # number of first rows among which held-out rows are searched


class Processes(Protocol):
    """The processes of a run that read a stream together."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]: ...


class OneProcess:
    """A stream that is read by one process."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


class StreamedRows:
    """Yields training rows from sources that are read during training. Implements
    `training.task.Feed`.
    """

    def __init__(
        self,
        data: DataSection,
        sources: Sequence[Source],
        encoder: Encoder,
        *,
        seed: int,
        held_out: float,
    ) -> None:
        self.data = data
        self.sources = sources
        self.encoder = encoder
        self.seed = seed
        self.held_out = held_out
        self.processes: Processes = OneProcess()
        self.on_bad_rows: Callable[[Sequence[BadRow]], None] = lambda rows: None
        self._reset([[0, 0]] * len(sources), block=0)

    def _reset(self, read_counts: Sequence[Sequence[int]], *, block: int) -> None:
        """Sets the state to the beginning of a block.

        read_counts  [rows read in the current pass, number of completed passes] for each source
        """
        self.block_start_counts = [list(pair) for pair in read_counts]
        self.read_counts = [list(pair) for pair in read_counts]
        self.block = block
        self.position = 0
        self.rows: Sequence[Row] = ()
        self._order: list[int] = []
        self._iterators: list[Iterator[Example | BadRow] | None] = [None] * len(self.sources)

    def _examples(self, count: int) -> Iterator[Example | BadRow]:
        """Yields the next rows. Each row comes from the source that has had the fewest rows so far
        in proportion to its weight.
        """
        weights = [source.spec.weight or 1.0 for source in self.sources]
        counts = [0] * len(weights)
        for _ in range(count):
            source_index = min(
                range(len(weights)),
                key=lambda source_index: (
                    (counts[source_index] + 1) / weights[source_index],
                    source_index,
                ),
            )
            counts[source_index] += 1
            yield self._next_example(source_index)

    def _local_examples(self) -> Iterator[Example | BadRow]:
        """Yields the rows of a block that this process tokenises. The other rows of the block are
        read, but not tokenised.
        """
        count = self.data.shuffle_buffer
        rank = self.processes.rank
        size = self.processes.size
        local_rows = range(count * rank // size, count * (rank + 1) // size)
        for number, example in enumerate(self._examples(count)):
            if number in local_rows:
                yield example

    def _next_example(self, source_index: int) -> Example | BadRow:
        iterator = self._iterators[source_index]
        if iterator is None:
            iterator = self._iterators[source_index] = self.sources[source_index].examples(
                skip=self.read_counts[source_index][0]
            )
        example = next(iterator, None)
        if example is None:
            if self.read_counts[source_index][0] == 0:
                raise UsageError(f"{self.sources[source_index].name}: the stream holds no rows")
            self.read_counts[source_index] = [0, self.read_counts[source_index][1] + 1]
            self._iterators[source_index] = None
            return self._next_example(source_index)
        self.read_counts[source_index][0] += 1
        return example

    def take(self, count: int) -> list[Row]:
        """Returns the next rows. If a row cannot be read during training, raises a RunError that
        names the file and the row.
        """
        rows: list[Row] = []
        empty_blocks = 0
        while len(rows) < count:
            if self.position == len(self._order):
                self.block += 1
                self.block_start_counts = [list(pair) for pair in self.read_counts]
                self._read_block()
                empty_blocks = empty_blocks + 1 if not self._order else 0
                if empty_blocks == 3:
                    raise RunError(
                        f"three blocks of {pluralise(self.data.shuffle_buffer, 'row')} in a row had"
                        " none to train on",
                        fix="look at the data",
                    )
                continue
            rows.append(self.rows[self._order[self.position]])
            self.position += 1
        return rows

    def _read_block(self) -> None:
        """Reads, tokenises and shuffles the block that begins at the current position of the
        sources.
        """
        try:
            tokens, _, tally = tokenize_examples(self._local_examples(), self.encoder)
            if self.processes.size > 1:
                texts = self.processes.gather([block.to_json() for block in tokens.blocks])
                blocks = [TokenBlock.from_json(block) for blocks in texts for block in blocks]
                tally = Tally.sum(block.facts["tally"] for block in blocks)
                tokens = TokenRows([TokenBlock.join(blocks, {"tally": tally.to_dict()})])
            if self.data.on_bad_row == "error":
                tally.bad.refuse(usable_rows=len(tokens))
            self.on_bad_rows(tally.bad.listed)
        except UsageError as error:
            raise RunError(
                f"the stream cannot be read on: {error.message}",
                fix=(
                    "mend the row, or leave such rows out: isotype train --resume FOLDER"
                    " data.on_bad_row=skip"
                ),
            ) from error
        rows = tokens.select(~is_held_out(tokens.column("digest"), self.held_out, self.seed))
        self.rows = pack_rows(rows, self.data.max_length) if self.data.packing else rows
        self._order = list(range(len(self.rows)))
        if self.data.shuffle:
            random.Random(f"{self.seed} {self.block}").shuffle(self._order)
        self.position = 0

    @property
    def epochs(self) -> float:
        """The number of complete passes over the data. If the sources have made different numbers
        of passes, this is the smallest of these numbers.
        """
        return float(min(passes for _, passes in self.read_counts))

    def state(self) -> dict[str, Any]:
        return {"begin": self.block_start_counts, "block": self.block, "given": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._reset(state["begin"], block=int(state["block"]))
        if self.block:
            self._read_block()
            self.position = int(state["given"])


def load_stream(
    data: DataSection,
    sources: Sequence[Source],
    eval_sources: Sequence[Source],
    evaluation: TokenRows,
    encoder: Encoder,
    *,
    seed: int,
) -> LoadedData:
    """Loads data as `load_data` does, but for a stream. Returns the stream, its first rows for the
    checks before step 1, and its held-out rows.
    """
    _refuse_unstreamable(sources)
    holds_out = not eval_sources
    share = data.eval_split if holds_out else 0.0
    beginning, examples, _ = tokenize_examples(
        islice(_interleave_sources(sources), data.shuffle_buffer), encoder
    )
    # copied before rows are read again and counted twice
    ignored = [dict(source.ignored) for source in sources]
    train = beginning.select(~is_held_out(beginning.column("digest"), share, seed))
    tallies, total_tally = collect_tallies(
        [beginning, evaluation], refuse=data.on_bad_row == "error"
    )
    if not len(train):
        reason = "; ".join([*tallies[0].dropped, *tallies[0].bad.kinds]) or "all held out"
        raise UsageError(
            f"{sources[0].name}: no training row in the first {data.shuffle_buffer}: {reason}"
        )
    prompt_examples = (
        list(islice(usable_examples(eval_sources[0].examples()), SAMPLES)) if eval_sources else []
    )
    if holds_out:
        evaluation, prompt_examples = _held_out_rows(sources, encoder, share, seed)
    rows: Any = pack_rows(train, data.max_length) if data.packing else train
    files = (
        [source.facts() | {"ignored_keys": keys} for source, keys in zip(sources, ignored)],
        [source.facts() for source in eval_sources],
    )
    facts = data_facts(
        data, encoder, [train, evaluation], tallies, total_tally, files, held_out=holds_out
    )
    facts |= {"packing": rows.facts() if data.packing else None, "mix": None}
    facts["stream"] = {"shuffle_buffer": data.shuffle_buffer, "looked_at": len(examples)}
    shuffled = pluralise(data.shuffle_buffer, "row is", "rows are")
    stream_notes = [
        f"a stream: counts are of its first {pluralise(len(examples), 'row')}, and {shuffled}"
        " shuffled at a time"
    ]
    weights = sum(source.spec.weight or 1.0 for source in sources)
    stream_notes += [
        f"{source.name}: {(source.spec.weight or 1.0) / weights:.1%} of the training rows"
        for source in sources
        if source.spec.weight
    ]
    stream_notes += [note for source in [*sources, *eval_sources] for note in source.notes]
    facts["notes"] = stream_notes + data_notes(facts, encoder, total_tally)
    prompts = _sample_prompts(
        prompt_examples or examples[:SAMPLES], evaluation if len(evaluation) else train, encoder
    )
    stream = StreamedRows(data, sources, encoder, seed=seed, held_out=share)
    template = encoder.template.text if encoder.template else None
    return LoadedData(
        rows,
        evaluation,
        prompts,
        template,
        facts,
        bad_rows=total_tally.bad.listed,
        eval_sets=eval_set_sizes(eval_sources, evaluation),
        stream=stream,
    )


def _refuse_unstreamable(sources: Sequence[Source]) -> None:
    for source in sources:
        if next(source.texts(), None) is not None:
            raise UsageError(
                f"{source.name}: data.stream takes rows, and a plain text is cut into them after it is"
                " tokenised",
                fix="leave data.stream out: tokenised rows are kept on disk and cost no memory",
            )
    if len(sources) > 1 and not all(source.spec.weight for source in sources):
        raise UsageError(
            "data.train: a stream of several sources needs a weight for each: it never knows how"
            " many rows they have"
        )


def usable_examples(examples: Iterable[Example | BadRow]) -> Iterator[Example]:
    """Yields the examples. Rows that cannot be used are left out."""
    return (example for example in examples if not isinstance(example, BadRow))


def tokenize_examples(
    examples: Iterator[Example | BadRow], encoder: Encoder
) -> tuple[TokenRows, list[Example], Tally]:
    """Tokenises examples. Returns three values: the tokenised rows, the examples that can be used,
    and the counts of the tokenisation.
    """
    used_examples: list[Example] = []
    tally = Tally()
    writer = TokenWriter()

    def iterate_usable() -> Iterator[Example]:
        for example in examples:
            if isinstance(example, BadRow):
                tally.add_bad_row(example)
            else:
                used_examples.append(example)
                yield example

    for _, row, cut in encoder.encode_rows(iterate_usable(), tally):
        writer.add(row, example=-1, cut=cut)
    return TokenRows([writer.block({"tally": tally.to_dict()})]), used_examples, tally


def _held_out_rows(
    sources: Sequence[Source], encoder: Encoder, share: float, seed: int
) -> tuple[TokenRows, list[Example]]:
    """Returns the first held-out rows, at most `MAX_EVALUATED_ROWS`, and the examples of the first
    few of them.
    """
    writer = TokenWriter()
    tally = Tally()
    examples: list[Example] = []
    if share:
        for example, row, cut in encoder.encode_rows(
            islice(usable_examples(_interleave_sources(sources)), _MAX_SEARCHED_ROWS), Tally()
        ):
            digest = np.array([row_digest(row.input_ids, row.pictures)], np.uint64)
            if is_held_out(digest, share, seed).all():
                writer.add(row, example=-1, cut=cut)
                examples += [example] if len(examples) < SAMPLES else []
            if writer.rows == MAX_EVALUATED_ROWS:
                break
    return TokenRows([writer.block({"tally": tally.to_dict()})]), examples


def _interleave_sources(sources: Sequence[Source]) -> Iterator[Example | BadRow]:
    """Yields rows from all sources in turn, until each is exhausted."""
    iterators: Iterator[Iterator[Example | BadRow]] = (source.examples() for source in sources)
    for count in range(len(sources), 0, -1):
        iterators = cycle(islice(iterators, count))
        yield from map(next, iterators)


def _sample_prompts(
    examples: Sequence[Example], rows: TokenRows, encoder: Encoder
) -> list[SamplePrompt]:
    """Returns prompts for samples. The prompts come from the examples, or from the first rows if
    the data are plain texts.
    """
    if examples and examples[0].text is None:
        return example_prompts(examples, encoder)
    return [text_prompt(rows[i].input_ids, encoder) for i in range(min(SAMPLES, len(rows)))]
