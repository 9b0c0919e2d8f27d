"""Turns checked examples into rows of tokens with labels.

A chat is rendered by its template, which writes all special tokens. The encoder adds no special
tokens to a chat, so that the beginning-of-text token does not occur twice. For plain text, the
encoder adds the tokens that the tokenizer puts before a text (usually BOS) and the end-of-text
token. If the tokenizer has no template, the encoder also adds these tokens to a row with a prompt
and a completion. A prompt has the same tokens in training as in generation. If the last tokens of a
prompt would depend on the answer, the prompt and the answer are tokenised separately.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .bad_rows import BadRow, BadRows, RowError
from .chat import ChatTemplate, Span
from .conversations import EMPTY_BEFORE_FULL_THOUGHTS, PICTURE_PLACEHOLDER, learns_empty_thoughts
from .formats import Example, Message
from .pictures import BadPicture, Pictures
from .rows import IGNORE_INDEX, Row

BATCH_TEXTS = 256  # number of examples that are read at once
RENDERED_TEXTS = 64  # number of texts that are rendered and tokenised at once
_MAX_ROLE_TOKENS = 16  # number of tokens between a special token and an answer
_MAX_ROLES = 1024  # number of texts after a special token whose tokens are kept
Offsets = Sequence[tuple[int, int]]  # (start, end) of each token, in characters


@dataclass
class Tally:
    """Counts how many examples were cut, dropped or changed while they were encoded. There is one
    object for the training data and one for the evaluation data.

    dropped        reason -> number of rows that were left out
    first_dropped  reason -> the location of the first such row
    bad            the rows that cannot be used
    """

    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)
    end_of_turn: Counter[str] = field(default_factory=Counter)
    borders: int = 0
    """The number of answers that were tokenised separately from their prompts."""
    special_in_content: int = 0
    """The number of examples whose content contains the text of a special token."""
    calls_unseen: int = 0
    tools_unseen: int = 0
    """The numbers of rows with tool calls, and with tools, that the template did not write."""
    reasoning_unseen: int = 0
    """Rows with reasoning, in the content or in a separate key, that the template did not write."""
    empty_thoughts: int = 0
    """Rows that learn `<think>` directly followed by `</think>`."""
    turns_unseen: Counter[str] = field(default_factory=Counter)
    """Role -> number of rows in which the template did not write a turn of this role."""
    bad: BadRows = field(default_factory=BadRows)

    def drop(self, reason: str, location: str) -> None:
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, location)

    def add_bad_row(self, row: BadRow) -> None:
        """Counts a row that cannot be used. A row with an empty answer, or without a label, is also
        counted as dropped.
        """
        self.bad.add(row)
        if row.is_empty:
            self.drop(row.reason, row.location)

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"bad": self.bad.to_dict()}

    @classmethod
    def sum(cls, tallies: Iterable[dict[str, Any]]) -> Tally:
        """Adds up the counts of several tallies and returns them as one `Tally`. The items of
        `tallies` are dictionaries, as the method `to_dict` returns them.
        """
        total = cls()
        for tally in tallies:
            total.first_dropped = tally["first_dropped"] | total.first_dropped
            total.bad.update(tally["bad"])
            for name, value in vars(total).items():
                if isinstance(value, Counter):
                    value.update(tally[name])
                elif isinstance(value, int):
                    setattr(total, name, value + tally[name])
        return total


def _has_picture_placeholder(message: Message) -> bool:
    """Returns True if a question contains LLaVA's placeholder of a picture. If a closing tag
    `</image>` follows, `<image>` is ordinary markup.
    """
    content = message["content"] if message["role"] == "user" else ""
    return isinstance(content, str) and PICTURE_PLACEHOLDER in content and "</image>" not in content


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """Contains the text of a row, and the positions of the parts that the model learns."""

    location: str
    text: str
    spans: Sequence[Span]
    is_literal: bool
    """The text was not rendered by a template, so it gets the tokenizer's first tokens and the
    end-of-text token.
    """
    pictures: tuple[str, ...] = ()
    """References of the row's pictures."""
    pictures_end: int = 0
    """The position after the text of the last picture."""
    picture_tokens: int = 0
    """The number of placeholder tokens of the pictures."""


class Encoder:
    """Turns examples into rows of tokens. All examples use the same tokenizer, template and maximum
    length.
    """

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
        self.no_pictures_reason = "the model has no vision tower"
        token_id = None if pictures is None else pictures.token_id
        self.picture_token = (
            (token_id, tokenizer.convert_ids_to_tokens(token_id)) if token_id is not None else None
        )
        self.has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.loss_on = loss_on
        self.template = template
        bare_ids = tokenizer("a", add_special_tokens=False).input_ids
        framed_ids = tokenizer("a").input_ids
        self.prefix_ids: list[int] = next(
            (
                framed_ids[:i]
                for i in range(len(framed_ids))
                if framed_ids[i : i + len(bare_ids)] == bare_ids
            ),
            [],
        )
        if tokenizer.eos_token_id is None:
            self.suffix_ids: list[int] = []
        else:
            self.suffix_ids = [tokenizer.eos_token_id]
        self.special_tokens = {
            i: token.content for i, token in tokenizer.added_tokens_decoder.items()
        }
        special_texts = [text for text in self.special_tokens.values() if len(text) > 2]
        self._special_pattern = (
            re.compile("|".join(map(re.escape, special_texts))) if special_texts else None
        )
        # tokens that separate the texts on both sides, whatever these texts are
        self._separator_ids = {
            i
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special
            and not (token.single_word or token.lstrip or token.rstrip or token.normalized)
        }
        self._role_ids: dict[str, list[int]] = {}
        self._special_ids = {
            i
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special and i != tokenizer.unk_token_id
        }
        if max_length < len(self.prefix_ids) + 2:
            raise UsageError(
                f"data.max_length is {max_length}: a row needs at least {len(self.prefix_ids) + 2}"
                " tokens to teach anything"
            )

    def ids(self, text: str) -> list[int]:
        """Returns the tokens of a text. Adds no special tokens."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return tokens

    def encode_rows(
        self, examples: Iterable[Example], tally: Tally
    ) -> Iterator[tuple[Example, Row, bool]]:
        """Yields the tuple (example, row, whether the row was cut) for each example, in order.
        Examples without a token to learn are dropped and counted.

        If the chat template raises an error for an example, the example is counted in `tally.bad`.
        Raises UsageError if the template fails for a reason that has nothing to do with the row.
        """
        examples = iter(examples)
        while batch_examples := list(islice(examples, BATCH_TEXTS)):
            # the template's process renders a part while this process tokenises the part before
            parts = [
                batch_examples[start : start + RENDERED_TEXTS]
                for start in range(0, len(batch_examples), RENDERED_TEXTS)
            ]
            self._prepare_texts(parts[0])
            for part, next_part in zip_longest(parts, parts[1:]):
                if next_part:
                    self._prepare_texts(next_part)
                yield from self._encode_part(part, tally)

    def _prepare_texts(self, examples: Sequence[Example]) -> None:
        """Begins to render the conversations of these examples."""
        template = self.template
        if template is None:
            return
        conversations = []
        # the errors of a template or of a row are raised or counted when the row is rendered
        with suppress(UsageError):
            for example in examples:
                messages = example_messages(example)
                if messages is not None:
                    messages = tuple(template.apply_thoughts(messages, example.location))
                    conversations.append(replace(example, messages=messages))
            template.prepare_rows(conversations, has_spans=self.loss_on != "all")

    def _encode_part(
        self, examples: Sequence[Example], tally: Tally
    ) -> Iterator[tuple[Example, Row, bool]]:
        batch = []
        rendered = []
        for example in examples:
            try:
                rendered_row = self.render(example, tally)
            except UsageError as error:
                tally.add_bad_row(BadRow.from_error(error, example.location))
                continue
            if not rendered_row.spans:
                tally.drop("all of its answers are marked as not learnt", rendered_row.location)
                continue
            rendered.append(rendered_row)
            batch.append(example)
        if not batch:
            return
        encoded = self._tokenize_texts(
            [row.text for row in rendered], [self._span_edges(row) for row in rendered]
        )
        prompts = iter(self._tokenize_prompts(rendered, encoded))
        for source, r, (ids, offsets) in zip(batch, rendered, encoded):
            row = self._build_row(r, ids, offsets, list(islice(prompts, len(r.spans))), tally)
            if row is not None:
                yield source, *row

    def _tokenize_prompts(
        self, rendered: Sequence[RenderedRow], encoded: Sequence[tuple[list[int], Offsets]]
    ) -> list[list[int]]:
        """Returns, for each span, the tokens of the text before the span. The text after this point
        has no influence on these tokens.

        A tokenizer never merges characters across a special token. So up to the last special token
        of a prompt, the tokens of the prompt are the same as the tokens of the whole text. The few
        characters after this special token (the name of a role) are the same in most rows. A prompt
        is tokenised again only if this shortcut is not possible.
        """
        prompts: list[list[int] | None] = []
        texts = []
        for row, (ids, offsets) in zip(rendered, encoded):
            for span in row.spans:
                prompt = self._prompt_from_row(row.text, ids, offsets, span.start)
                if prompt is None:
                    texts.append(row.text[: span.start])
                prompts.append(prompt)
        if not texts:
            return [prompt for prompt in prompts if prompt is not None]
        others = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
        return [next(others) if prompt is None else prompt for prompt in prompts]

    def _prompt_from_row(
        self, text: str, ids: list[int], offsets: Offsets, start: int
    ) -> list[int] | None:
        """Returns the tokens of `text[:start]` from the tokens of the whole text. Returns None if
        there is no special token shortly before `start`.
        """
        if start == 0:
            return []
        if not self.has_offsets:
            return None
        end = bisect_left(offsets, (start, 0))
        for k in range(end - 1, max(-1, end - 1 - _MAX_ROLE_TOKENS), -1):
            if ids[k] in self._separator_ids and offsets[k][1] <= start:
                role_text = text[offsets[k][0] : start]
                role_ids = self._role_ids.get(role_text)
                if role_ids is None:
                    role_ids = self.ids(role_text)
                    if len(self._role_ids) < _MAX_ROLES:
                        self._role_ids[role_text] = role_ids
                if role_ids[:1] != [ids[k]]:
                    return None
                return ids[:k] + role_ids
        return None

    def render(self, example: Example, tally: Tally) -> RenderedRow:
        """Returns the text of an example, and the positions of the parts of this text that the
        model learns.
        """
        template = self.template
        location = example.location
        messages = example_messages(example)
        if template is None or messages is None:
            if example.messages is not None:
                raise UsageError(
                    f"{location}: messages need a chat template, and the tokenizer has none",
                    fix="data.chat_template: chatml",
                )
            if example.text is not None:
                text = example.text
            else:
                text = example.prompt + (example.completion or "")
            start = 0 if self.loss_on == "all" else len(example.prompt)
            return RenderedRow(
                location, text, [Span(start, len(text), is_closed=True)], is_literal=True
            )
        messages = tuple(template.apply_thoughts(messages, location))
        if example.pictures and self.pictures is None:
            raise RowError(
                f"{location}: the row has pictures, and {self.no_pictures_reason}",
                fix="data.columns: {images: null, image: null} does not read them",
            )
        if (
            self.pictures is not None
            and not example.pictures
            and any(_has_picture_placeholder(message) for message in messages)
        ):
            raise RowError(
                f"{location}: a placeholder {PICTURE_PLACEHOLDER} in the text, and the row has no picture"
            )
        text = template.render(messages, tools=example.tools, location=location)
        pattern = self._special_pattern
        if pattern is not None:
            tally.special_in_content += any(
                pattern.search(str(message.get("content"))) is not None for message in messages
            )
        roles, calls, tools, reasoning = template.find_omissions(
            messages, example.tools, text, location
        )
        if template.thoughts in ("last", "all") and (
            reasoning or EMPTY_BEFORE_FULL_THOUGHTS.search(text)
        ):
            raise RowError(
                f"{location}: the chat template does not write thoughts as data.thoughts:"
                f" {template.thoughts} keeps them"
            )
        tally.turns_unseen.update(roles)
        tally.calls_unseen += calls
        tally.tools_unseen += tools
        tally.reasoning_unseen += reasoning
        whole_span = [Span(0, len(text), is_closed=True)]
        if self.loss_on == "all":
            spans = whole_span
        else:
            spans = template.answer_spans(replace(example, messages=messages), text)
        tally.empty_thoughts += learns_empty_thoughts(
            text, [(span.start, span.end) for span in spans]
        )
        rendered = RenderedRow(location, text, spans, is_literal=False)
        if not example.pictures:
            return rendered
        return self.insert_pictures(rendered, example.pictures, example.folder)

    def insert_pictures(
        self, rendered: RenderedRow, row_pictures: Sequence[Any], folder: str
    ) -> RenderedRow:
        """Replaces each picture's placeholder in the text by the tokens that the model's processor
        writes for this picture. The model does not learn these tokens.

        Raises  RowError if a picture cannot be used, or if the number of placeholders differs from
                the number of pictures
        """
        pictures = self.pictures
        assert pictures is not None
        pieces = rendered.text.split(pictures.placeholder)
        if len(pieces) - 1 != len(row_pictures):
            raise RowError(
                f"{rendered.location}: the text has {len(pieces) - 1} times {pictures.placeholder}, and the row"
                f" {len(row_pictures)} pictures"
            )
        if not row_pictures:
            return rendered
        references: list[str] = []
        for i, item in enumerate(row_pictures):
            try:
                references.append(pictures.reference(item, Path(folder)))
            except (BadPicture, OSError) as error:
                raise RowError(f"{rendered.location}: picture {i + 1}: {error}") from None
        try:
            picture_texts = pictures.picture_texts(references)
        except BadPicture as error:
            raise RowError(f"{rendered.location}: {error}") from None
        # for each piece: its start, its end, and the distance by which it moves
        text = ""
        offset = 0
        shifts = []
        for piece, tokens in zip_longest(pieces, picture_texts, fillvalue=""):
            shifts.append((offset, offset + len(piece), len(text) - offset))
            text += piece + tokens
            offset += len(piece) + len(pictures.placeholder)
        cut = [
            (max(span.start, piece_start), min(span.end, piece_end), shift, span.is_closed)
            for span in rendered.spans
            for piece_start, piece_end, shift in shifts
        ]
        spans = [
            Span(start + shift, end + shift, closed)
            for start, end, shift, closed in cut
            if start < end
        ]
        pictures_end = len(text) - len(pieces[-1])
        if self.picture_token is not None and self.picture_token[1]:
            picture_token_count = sum(item.count(self.picture_token[1]) for item in picture_texts)
        else:
            picture_token_count = 0
        return RenderedRow(
            rendered.location,
            text,
            spans,
            is_literal=False,
            pictures=tuple(references),
            pictures_end=pictures_end,
            picture_tokens=picture_token_count,
        )

    def cut_windows(
        self, tokens: Iterable[list[int]], location: str, tally: Tally
    ) -> Iterator[Row]:
        """Cuts a plain text into rows of `max_length` tokens and yields the rows. Each row begins
        with the tokens that the tokenizer puts before a text (usually BOS), and the last row ends
        with the end-of-text token.

        tokens  the tokens of the text's pieces, in order; only one piece and one row are in memory
                at a time
        """
        for window in _split_windows(
            chain(tokens, [self.suffix_ids]), self.max_length - len(self.prefix_ids)
        ):
            # in a text file the end-of-text token separates documents
            tally.special_in_content += self._has_special_token(
                [token for token in window if token not in self.suffix_ids]
            )
            ids = tuple(self.prefix_ids + window)
            row = Row(ids, ids, 0)
            if row.supervised:
                yield row
            else:
                tally.drop("one token alone at the end of a text teaches nothing", location)

    def _has_special_token(self, ids: list[int]) -> bool:
        """Returns True if a plain text itself contains the characters of a special token. The BOS
        and end-of-text tokens that the encoder adds do not count.
        """
        if self.prefix_ids and ids[: len(self.prefix_ids)] == self.prefix_ids:
            start = len(self.prefix_ids)
        else:
            start = 0
        if self.suffix_ids and ids[-1:] == self.suffix_ids:
            end = len(ids) - len(self.suffix_ids)
        else:
            end = len(ids)
        return not self._special_ids.isdisjoint(ids[start:end])

    def _span_edges(self, rendered: RenderedRow) -> list[int]:
        """Returns the positions, counted in characters, at which the learnt parts of the text begin
        and end.
        """
        return sorted(
            {offset for span in rendered.spans for offset in (span.start, span.end)}
            - {0, len(rendered.text)}
        )

    def _tokenize_texts(
        self, texts: list[str], edges: list[list[int]]
    ) -> list[tuple[list[int], Offsets]]:
        """Returns the tokens of each text, and their positions. If the tokenizer cannot report
        positions, the texts are split at the positions in `edges`. Every token of a part then gets
        the beginning and the end of this part as its position.
        """
        if not self.has_offsets:
            return [
                self._tokenize_parts(text, text_edges) for text, text_edges in zip(texts, edges)
            ]
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return list(zip(encoded["input_ids"], encoded["offset_mapping"]))

    def _tokenize_parts(self, text: str, edges: list[int]) -> tuple[list[int], Offsets]:
        """Finds the tokens of each part of a text for a tokenizer that reports no positions. The
        parts lie between the positions in `edges`. The method tokenises the text up to the end of
        each part; the tokens that the part adds are its tokens. If the part changes earlier tokens,
        it is tokenised on its own.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        begin = 0  # start of the text that is tokenised
        start = 0  # start of the current part
        fixed_count = 0  # number of tokens before `begin`, which no longer change
        for edge in [*edges, len(text)]:
            ids_to_edge = self.ids(text[begin:edge])
            if ids[fixed_count:] != ids_to_edge[: len(ids) - fixed_count]:
                begin = start
                fixed_count = len(ids)
                ids_to_edge = self.ids(text[begin:edge])
            new_ids = ids_to_edge[len(ids) - fixed_count :]
            ids += new_ids
            offsets += [(start, edge)] * len(new_ids)
            start = edge
        return ids, offsets

    def _build_row(
        self,
        rendered: RenderedRow,
        ids: list[int],
        offsets: Offsets,
        prompts: Iterable[list[int]],
        tally: Tally,
    ) -> tuple[Row, bool] | None:
        ids, offsets = self._tokenize_answers_separately(rendered, ids, offsets, prompts, tally)
        learnt = [False] * len(ids)
        is_whole = (
            len(rendered.spans) == 1
            and rendered.spans[0].start == 0
            and rendered.spans[0].end == len(rendered.text)
        )
        for span in rendered.spans:
            first, last = self._span_tokens(rendered, ids, offsets, span, tally, is_whole=is_whole)
            learnt[first:last] = [True] * (last - first)
        if rendered.is_literal:
            tally.special_in_content += self._has_special_token(ids)
            if self.prefix_ids and ids[: len(self.prefix_ids)] == self.prefix_ids:
                prefix = []
            else:
                prefix = self.prefix_ids
            suffix = [] if self.suffix_ids and ids[-1:] == self.suffix_ids else self.suffix_ids
            learnt = [is_whole] * len(prefix) + learnt + [True] * len(suffix)
            ids = prefix + ids + suffix
        if (
            self.picture_token is not None
            and (count := ids.count(self.picture_token[0])) != rendered.picture_tokens
        ):
            token = self.picture_token[1]
            reason = (
                f"{count} times {token}, which stands for a picture, and the row's pictures have"
                f" {rendered.picture_tokens}"
            )
            tally.bad.add(BadRow(rendered.location, reason, f"take {token} out of the text"))
            return None
        is_cut = len(ids) > self.max_length
        if is_cut and rendered.pictures and offsets[self.max_length - 1][1] < rendered.pictures_end:
            picture_end_token = sum(start < rendered.pictures_end for start, _ in offsets)
            reason = (
                f"{len(ids)} tokens, its last picture ends at {picture_end_token}, and data.max_length is"
                f" {self.max_length}"
            )
            tally.bad.add(
                BadRow(
                    rendered.location,
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
                    if is_cut
                    else "no token to learn"
                ),
                rendered.location,
            )
            return None
        labels = tuple(i if is_learnt else IGNORE_INDEX for i, is_learnt in zip(ids, learnt))
        return Row(tuple(ids), labels, learnt.index(True), pictures=rendered.pictures), is_cut

    def _span_tokens(
        self,
        rendered: RenderedRow,
        ids: list[int],
        offsets: Offsets,
        span: Span,
        tally: Tally,
        *,
        is_whole: bool,
    ) -> tuple[int, int]:
        """Returns the range of tokens of a span. The range includes the end-of-turn token. The
        model does not learn the white space that the template writes after the end-of-turn token.
        """
        first = next((k for k, (a, _) in enumerate(offsets) if a >= span.start), len(ids))
        last = next((k for k in range(first, len(ids)) if offsets[k][0] >= span.end), len(ids))
        if rendered.is_literal or is_whole:
            return first, last
        closing = last - 1 if span.is_closed else last
        step = -1 if span.is_closed else 1
        while (
            first <= closing < len(ids)
            and ids[closing] not in self.special_tokens
            and not self._token_text(rendered, ids[closing], offsets[closing]).strip()
        ):
            closing += step
        if first <= closing < len(ids) and ids[closing] in self.special_tokens:
            tally.end_of_turn[self.special_tokens[ids[closing]]] += 1
            return first, closing + 1
        tally.end_of_turn["none"] += 1
        return first, last

    def _token_text(self, rendered: RenderedRow, token: int, offset: tuple[int, int]) -> str:
        return rendered.text[slice(*offset)] if self.has_offsets else self.tokenizer.decode([token])

    def _tokenize_answers_separately(
        self,
        rendered: RenderedRow,
        ids: list[int],
        offsets: Offsets,
        prompts: Iterable[list[int]],
        tally: Tally,
    ) -> tuple[list[int], Offsets]:
        """Tokenises each answer, with the text after it, separately from its prompt. This is done
        only if the tokens of the prompt change when the answer follows it.

        The tokens can differ because a tokenizer may merge the last character of the prompt with
        the first character of the answer. A tokenizer may also split white space differently at the
        end of a text than in the middle of a text.
        """
        # number of characters and tokens before the last cut
        cut_at = 0
        fixed_count = 0
        for span, prompt in zip(rendered.spans, prompts):
            if span.start == 0:
                continue
            if cut_at:
                prompt = self.ids(rendered.text[cut_at : span.start])
            if ids[fixed_count : fixed_count + len(prompt)] == prompt:
                continue
            tally.borders += 1
            sides = [rendered.text[cut_at : span.start], rendered.text[span.start :]]
            parts = ((cut_at, span.start), (span.start, len(rendered.text)))
            edges = [
                [edge - begin for edge in self._span_edges(rendered) if begin < edge < end]
                for begin, end in parts
            ]
            ids = ids[:fixed_count]
            offsets = list(offsets[:fixed_count])
            for (begin, _), (tokens, token_offsets) in zip(
                parts, self._tokenize_texts(sides, edges)
            ):
                fixed_count = len(ids)
                ids += tokens
                offsets += [(a + begin, b + begin) for a, b in token_offsets]
            cut_at = span.start
        return ids, offsets


def _split_windows(pieces: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """Splits the tokens of all pieces into windows of `size` tokens and yields the windows. The
    last window may be shorter.
    """
    waiting_ids: list[int] = []
    for piece in pieces:
        waiting_ids += piece
        start = 0
        while len(waiting_ids) - start > size:
            yield waiting_ids[start : start + size]
            start += size
        del waiting_ids[:start]
    if waiting_ids:
        yield waiting_ids


def example_messages(example: Example) -> tuple[Message, ...] | None:
    """Returns an example as a conversation. A prompt with a completion becomes a question with an
    answer. Returns None for plain text.
    """
    if example.messages is not None:
        return example.messages
    if example.completion is None:
        return None
    return (
        {"role": "user", "content": example.prompt},
        {"role": "assistant", "content": example.completion},
    )
