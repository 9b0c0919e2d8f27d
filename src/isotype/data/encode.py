"""Turns checked examples into rows of tokens with labels.

A chat is rendered by its template, which writes every special token itself. The encoder adds none,
so that no beginning-of-text token is doubled. Plain text, and prompt/completion with a tokenizer
without a template, get the tokenizer's own beginning and the end-of-text token. The tokens of a
prompt are those that generation will see: if the following answer would change them, prompt and
answer are tokenised separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .bad_rows import EMPTY, BadRow, BadRows, RowError
from .chat import ChatTemplate, Span
from .conversations import DOUBLED_THOUGHTS, IN_TEXT, learns_empty
from .formats import Example, Message
from .pictures import BadPicture, Pictures
from .rows import IGNORED, Row

BATCH = 256  # texts handed to the tokenizer at once
Offsets = Sequence[tuple[int, int]]  # of each token, in characters


@dataclass
class Tally:
    """Counts of the examples of one side (training or evaluation) that were cut, dropped or changed
    while they were encoded.
    """

    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)
    end_of_turn: Counter[str] = field(default_factory=Counter)
    borders: int = 0
    """Answers that had to be tokenised apart from their prompts."""
    special_in_content: int = 0
    calls_unseen: int = 0
    tools_unseen: int = 0
    """Rows with tool calls, or with tools, whose names are nowhere in the text that the template
    made.
    """
    reasoning_unseen: int = 0
    """Rows with reasoning that the template left out, of the content or beside it."""
    empty_thoughts: int = 0
    """Rows that learn `<think>` and `</think>` with nothing between them."""
    turns_unseen: Counter[str] = field(default_factory=Counter)
    """Rows by the role of a turn that the template left out."""
    bad: BadRows = field(default_factory=BadRows)

    def drop(self, reason: str, place: str) -> None:
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, place)

    def note_bad(self, row: BadRow) -> None:
        """Counts a row that cannot be used; one with an empty answer also as dropped."""
        self.bad.add(row)
        if row.empty:
            self.drop(EMPTY, row.place)

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"bad": self.bad.to_dict()}

    @classmethod
    def sum(cls, counted: Iterable[dict[str, Any]]) -> Tally:
        """Several sides, as `to_dict` gave them, as one."""
        total = cls()
        for one in counted:
            total.first_dropped = one["first_dropped"] | total.first_dropped
            total.bad.update(one["bad"])
            for name, value in vars(total).items():
                if isinstance(value, Counter):
                    value.update(one[name])
                elif isinstance(value, int):
                    setattr(total, name, value + one[name])
        return total


def _asks_to_look(message: Message) -> bool:
    """Whether a question has LLaVA's mark of a picture; where it is closed it is markup."""
    said = message["content"] if message["role"] == "user" else ""
    return isinstance(said, str) and IN_TEXT in said and "</image>" not in said


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as text, with the spans to learn."""

    place: str
    text: str
    spans: Sequence[Span]
    literal: bool
    """Not from a template: gets the tokenizer's own beginning, and the end-of-text token."""
    pictures: tuple[str, ...] = ()
    """References of its pictures."""
    shown: int = 0
    """Where the text of its last picture ends."""
    places: int = 0
    """Tokens of the model that stand for its pictures."""


class Encoder:
    """Turns examples into rows with one tokenizer, one template and one length."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int,
        loss_on: str,
        template: ChatTemplate | None,
        pictures: Pictures | None = None,
    ) -> None:
        self.pictures = pictures
        self.no_pictures = "the model has no vision tower"
        place = None if pictures is None else pictures.token_id
        self.place = (place, tokenizer.convert_ids_to_tokens(place)) if place is not None else None
        self.has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.loss_on = loss_on
        self.template = template
        bare = tokenizer("a", add_special_tokens=False).input_ids
        whole = tokenizer("a").input_ids
        self.before: list[int] = next(
            (whole[:i] for i in range(len(whole)) if whole[i : i + len(bare)] == bare), []
        )
        if tokenizer.eos_token_id is None:
            self.after: list[int] = []
        else:
            self.after = [tokenizer.eos_token_id]
        self.special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items()}
        self._marks = {
            i
            for i, t in tokenizer.added_tokens_decoder.items()
            if t.special and i != tokenizer.unk_token_id
        }
        if max_length < len(self.before) + 2:
            raise UsageError(
                f"data.max_length is {max_length}: a row needs at least {len(self.before) + 2}"
                " tokens to teach anything"
            )

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, nothing added."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return tokens

    def rows(
        self, examples: Iterable[Example], tally: Tally
    ) -> Iterator[tuple[Example, Row, bool]]:
        """Examples with their rows, in order, and whether they were cut; those that teach nothing
        are dropped and counted.

        Those that the chat template refuses are counted in `tally.bad`. Raises UsageError for a
        template that no row is at fault for.
        """
        examples = iter(examples)
        while taken := list(islice(examples, BATCH)):
            batch = []
            rendered = []
            for example in taken:
                try:
                    whole = self.render(example, tally)
                except UsageError as error:
                    tally.note_bad(BadRow.of(error, example.place))
                    continue
                if not whole.spans:
                    tally.drop("all of its answers are marked as not learnt", whole.place)
                    continue
                rendered.append(whole)
                batch.append(example)
            if not batch:
                continue
            encoded = self._encoded([r.text for r in rendered], [self._edges(r) for r in rendered])
            before = [r.text[: span.start] for r in rendered for span in r.spans]
            prompts = iter(
                self.tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"]
            )
            for source, r, (ids, offsets) in zip(batch, rendered, encoded):
                row = self._row(r, ids, offsets, list(islice(prompts, len(r.spans))), tally)
                if row is not None:
                    yield source, *row

    def render(self, example: Example, tally: Tally) -> Rendered:
        """The text of an example and what is learnt of it."""
        template = self.template
        place = example.place
        messages = as_messages(example)
        if template is None or messages is None:
            if example.messages is not None:
                raise UsageError(
                    f"{place}: messages need a chat template, and the tokenizer has none",
                    fix="data.chat_template: chatml",
                )
            if example.text is not None:
                text = example.text
            else:
                text = example.prompt + (example.completion or "")
            start = 0 if self.loss_on == "all" else len(example.prompt)
            return Rendered(place, text, [Span(start, len(text), closed=True)], literal=True)
        messages = tuple(template.thoughtful(messages, place))
        if example.pictures and self.pictures is None:
            raise RowError(
                f"{place}: the row has pictures, and {self.no_pictures}",
                fix="data.columns: {images: null, image: null} does not read them",
            )
        if (
            self.pictures is not None
            and not example.pictures
            and any(_asks_to_look(m) for m in messages)
        ):
            raise RowError(f"{place}: a mark {IN_TEXT} in the text, and the row has no picture")
        text = template.render(messages, tools=example.tools, place=place)
        tally.special_in_content += any(
            s in str(m.get("content"))
            for m in messages
            for s in self.special.values()
            if len(s) > 2
        )
        roles, calls, tools, reasoning = template.left_out(messages, example.tools, text, place)
        if template.thoughts in ("last", "all") and (reasoning or DOUBLED_THOUGHTS.search(text)):
            raise RowError(
                f"{place}: the chat template does not write thoughts as data.thoughts:"
                f" {template.thoughts} keeps them"
            )
        tally.turns_unseen.update(roles)
        tally.calls_unseen += calls
        tally.tools_unseen += tools
        tally.reasoning_unseen += reasoning
        whole = [Span(0, len(text), closed=True)]
        if self.loss_on == "all":
            spans = whole
        else:
            spans = template.spans(replace(example, messages=messages), text)
        tally.empty_thoughts += learns_empty(text, [(span.start, span.end) for span in spans])
        found = Rendered(place, text, spans, literal=False)
        if not example.pictures:
            return found
        return self.with_pictures(found, example.pictures, example.folder)

    def with_pictures(self, r: Rendered, given: Sequence[Any], folder: str) -> Rendered:
        """The text as the processor writes it, each mark as the tokens of its picture, which are
        not learnt.

        Raises  RowError for a picture that cannot be used, and where marks and pictures differ in
                number
        """
        pictures = self.pictures
        assert pictures is not None
        pieces = r.text.split(pictures.mark)
        if len(pieces) - 1 != len(given):
            raise RowError(
                f"{r.place}: the text has {len(pieces) - 1} times {pictures.mark}, and the row"
                f" {len(given)} pictures"
            )
        if not given:
            return r
        references: list[str] = []
        for i, one in enumerate(given):
            try:
                references.append(pictures.reference(one, Path(folder)))
            except (BadPicture, OSError) as error:
                raise RowError(f"{r.place}: picture {i + 1}: {error}") from None
        try:
            written = pictures.written(references)
        except BadPicture as error:
            raise RowError(f"{r.place}: {error}") from None
        # of each piece: where it begins and ends, and how far it moves
        text = ""
        at = 0
        moved = []
        for piece, tokens in zip_longest(pieces, written, fillvalue=""):
            moved.append((at, at + len(piece), len(text) - at))
            text += piece + tokens
            at += len(piece) + len(pictures.mark)
        cut = [
            (max(span.start, a), min(span.end, b), by, span.closed)
            for span in r.spans
            for a, b, by in moved
        ]
        spans = [
            Span(start + by, end + by, closed) for start, end, by, closed in cut if start < end
        ]
        shown = len(text) - len(pieces[-1])
        if self.place is not None and self.place[1]:
            placeholders = sum(one.count(self.place[1]) for one in written)
        else:
            placeholders = 0
        return Rendered(
            r.place,
            text,
            spans,
            literal=False,
            pictures=tuple(references),
            shown=shown,
            places=placeholders,
        )

    def windows(self, tokens: Iterable[list[int]], place: str, tally: Tally) -> Iterator[Row]:
        """A plain text cut into rows of `max_length`, each with the tokenizer's beginning; the
        end-of-text token closes the last.

        tokens  those of the text's pieces, one after another; no more than one piece and a row of
                them are held
        """
        for window in _cut(chain(tokens, [self.after]), self.max_length - len(self.before)):
            tally.special_in_content += self._read_as_special(window)
            ids = tuple(self.before + window)
            row = Row(ids, ids, 0)
            if row.supervised:
                yield row
            else:
                tally.drop("one token alone at the end of a text teaches nothing", place)

    def _read_as_special(self, ids: list[int]) -> bool:
        """Whether a plain text's tokens have a special one that its text gave, other than a
        beginning and an end that it has itself.
        """
        if self.before and ids[: len(self.before)] == self.before:
            begin = len(self.before)
        else:
            begin = 0
        if self.after and ids[-1:] == self.after:
            end = len(ids) - len(self.after)
        else:
            end = len(ids)
        return not self._marks.isdisjoint(ids[begin:end])

    def _edges(self, r: Rendered) -> list[int]:
        """Where a row's parts begin and end, in characters: all that a tokenizer without offsets
        has to find.
        """
        return sorted({at for span in r.spans for at in (span.start, span.end)} - {0, len(r.text)})

    def _encoded(self, texts: list[str], edges: list[list[int]]) -> list[tuple[list[int], Offsets]]:
        """Tokens and their places. Without offsets, every token of a part between two edges gets
        the part's place.
        """
        if not self.has_offsets:
            return [self._in_parts(text, at) for text, at in zip(texts, edges)]
        found = self.tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return list(zip(found["input_ids"], found["offset_mapping"]))

    def _in_parts(self, text: str, edges: list[int]) -> tuple[list[int], Offsets]:
        """A part's tokens are those by which the text up to its end is longer; where that changes
        earlier ones, it is tokenised alone.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        begin = start = settled = 0  # characters and tokens up to which earlier parts are settled
        for edge in [*edges, len(text)]:
            grown = self.ids(text[begin:edge])
            if ids[settled:] != grown[: len(ids) - settled]:
                begin = start
                settled = len(ids)
                grown = self.ids(text[begin:edge])
            new = grown[len(ids) - settled :]
            ids += new
            offsets += [(start, edge)] * len(new)
            start = edge
        return ids, offsets

    def _row(
        self,
        r: Rendered,
        ids: list[int],
        offsets: Offsets,
        prompts: Iterable[list[int]],
        tally: Tally,
    ) -> tuple[Row, bool] | None:
        ids, offsets = self._apart(r, ids, offsets, prompts, tally)
        learnt = [False] * len(ids)
        whole = len(r.spans) == 1 and r.spans[0].start == 0 and r.spans[0].end == len(r.text)
        for span in r.spans:
            first, last = self._tokens(r, ids, offsets, span, tally, whole=whole)
            learnt[first:last] = [True] * (last - first)
        if r.literal:
            tally.special_in_content += self._read_as_special(ids)
            if self.before and ids[: len(self.before)] == self.before:
                before = []
            else:
                before = self.before
            after = [] if self.after and ids[-1:] == self.after else self.after
            learnt = [whole] * len(before) + learnt + [True] * len(after)
            ids = before + ids + after
        if self.place is not None and (there := ids.count(self.place[0])) != r.places:
            token = self.place[1]
            reason = (
                f"{there} times {token}, which stands for a picture, and the row's pictures have"
                f" {r.places}"
            )
            tally.bad.add(BadRow(r.place, reason, f"take {token} out of the text"))
            return None
        cut = len(ids) > self.max_length
        if cut and r.pictures and offsets[self.max_length - 1][1] < r.shown:
            seen = sum(start < r.shown for start, _ in offsets)
            reason = (
                f"{len(ids)} tokens, its last picture ends at {seen}, and data.max_length is"
                f" {self.max_length}"
            )
            tally.bad.add(
                BadRow(
                    r.place,
                    f"{reason}: a row is not cut inside a picture",
                    "data.max_pixels makes pictures smaller",
                )
            )
            return None
        ids = ids[: self.max_length]
        learnt = learnt[: self.max_length]
        if not any(learnt[1:]):
            tally.drop(
                (
                    f"no answer left within data.max_length {self.max_length}"
                    if cut
                    else "no token to learn"
                ),
                r.place,
            )
            return None
        labels = tuple(i if on else IGNORED for i, on in zip(ids, learnt))
        return Row(tuple(ids), labels, learnt.index(True), pictures=r.pictures), cut

    def _tokens(
        self,
        r: Rendered,
        ids: list[int],
        offsets: Offsets,
        span: Span,
        tally: Tally,
        *,
        whole: bool,
    ) -> tuple[int, int]:
        """The tokens of a span, from the first to its end-of-turn token; white space the template
        writes after that is not learnt.
        """
        first = next((k for k, (a, _) in enumerate(offsets) if a >= span.start), len(ids))
        last = next((k for k in range(first, len(ids)) if offsets[k][0] >= span.end), len(ids))
        if r.literal or whole:
            return first, last
        closing = last - 1 if span.closed else last
        step = -1 if span.closed else 1
        while (
            first <= closing < len(ids)
            and ids[closing] not in self.special
            and not self._text(r, ids[closing], offsets[closing]).strip()
        ):
            closing += step
        if first <= closing < len(ids) and ids[closing] in self.special:
            tally.end_of_turn[self.special[ids[closing]]] += 1
            return first, closing + 1
        tally.end_of_turn["none"] += 1
        return first, last

    def _text(self, r: Rendered, token: int, place: tuple[int, int]) -> str:
        return r.text[slice(*place)] if self.has_offsets else self.tokenizer.decode([token])

    def _apart(
        self,
        r: Rendered,
        ids: list[int],
        offsets: Offsets,
        prompts: Iterable[list[int]],
        tally: Tally,
    ) -> tuple[list[int], Offsets]:
        """Tokenises the text from an answer on by itself, where the prompt alone has other tokens
        than the prompt with its answer.

        A tokenizer may merge the last character of one with the first of the other, or cut white
        space differently at the end of a text.
        """
        # characters and tokens up to the last cut
        cut_at = 0
        settled = 0
        for span, prompt in zip(r.spans, prompts):
            if span.start == 0:
                continue
            if cut_at:
                prompt = self.ids(r.text[cut_at : span.start])
            if ids[settled : settled + len(prompt)] == prompt:
                continue
            tally.borders += 1
            sides = [r.text[cut_at : span.start], r.text[span.start :]]
            parts = ((cut_at, span.start), (span.start, len(r.text)))
            edges = [
                [at - begin for at in self._edges(r) if begin < at < end] for begin, end in parts
            ]
            ids = ids[:settled]
            offsets = list(offsets[:settled])
            for (begin, _), (tokens, places) in zip(parts, self._encoded(sides, edges)):
                settled = len(ids)
                ids += tokens
                offsets += [(a + begin, b + begin) for a, b in places]
            cut_at = span.start
        return ids, offsets


def _cut(pieces: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """The tokens of all pieces, `size` at a time; the last may be fewer."""
    held: list[int] = []
    for piece in pieces:
        held += piece
        start = 0
        while len(held) - start > size:
            yield held[start : start + size]
            start += size
        del held[:start]
    if held:
        yield held


def as_messages(example: Example) -> tuple[Message, ...] | None:
    """An example as a conversation: messages as they are, prompt and completion as a question and
    its answer; None for text.
    """
    if example.messages is not None:
        return example.messages
    if example.completion is None:
        return None
    return (
        {"role": "user", "content": example.prompt},
        {"role": "assistant", "content": example.completion},
    )
