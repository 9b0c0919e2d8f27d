"""From checked examples to rows of tokens with labels.

A chat is rendered by its template, which writes every special token itself: nothing is added, so no beginning-of-text token is doubled.
Plain text, and prompt/completion under a tokenizer without a template, get what the tokenizer puts before a text by itself, and the
end-of-text token after it. The tokens of a prompt are those that generation will see: where the tokenizer would cut the prompt differently
because of the answer behind it, the two are tokenised apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..errors import UsageError
from .chat import ChatTemplate, Span
from .formats import Example, Message
from .rows import IGNORED, Row

BATCH = 256  # texts handed to the tokenizer at once
Offsets = Sequence[tuple[int, int]]  # of each token, in characters
_PIECE = 1 << 16  # characters of a plain text tokenised at once, cut at line ends


@dataclass
class Tally:
    """What happened to the examples of one side (training or evaluation) on their way to rows."""

    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)
    end_of_turn: Counter[str] = field(default_factory=Counter)
    borders: int = 0
    """Answers that had to be tokenised apart from their prompts."""
    special_in_content: int = 0

    def drop(self, reason: str, place: str) -> None:
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, place)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as text, with the parts to learn."""

    place: str
    text: str
    spans: Sequence[Span]
    literal: bool
    """Not from a template: gets the tokenizer's own beginning, and the end-of-text token."""


class Encoder:
    """Turns examples into rows with one tokenizer, one template and one length."""

    def __init__(self, tokenizer: Any, *, max_length: int, loss_on: str, template: ChatTemplate | None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UsageError(
                "the tokenizer has no fast version (tokenizer.json), which the labels need: convert it with AutoTokenizer and save it"
            )
        self.tokenizer, self.max_length, self.loss_on, self.template = tokenizer, max_length, loss_on, template
        bare = tokenizer("a", add_special_tokens=False).input_ids
        whole = tokenizer("a").input_ids
        self.before: list[int] = next((whole[:i] for i in range(len(whole)) if whole[i : i + len(bare)] == bare), [])
        self.after: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items()}
        # One Python integer per token id, shared by all rows: a row costs 8 bytes a token and not 36.
        self._shared = list(range(max([len(tokenizer), *self.special]) + 1))
        if max_length < len(self.before) + 2:
            raise UsageError(f"data.max_length is {max_length}: a row needs at least {len(self.before) + 2} tokens to teach anything")

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, nothing added."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def rows(self, examples: Iterable[Example], tally: Tally) -> Iterator[tuple[Example, Row, bool]]:
        """Examples with their rows, in order, and whether they were cut; those that teach nothing are dropped and counted."""
        examples = iter(examples)
        while batch := list(islice(examples, BATCH)):
            rendered = [self.render(example, tally) for example in batch]
            encoded = self.tokenizer([r.text for r in rendered], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            before = [r.text[: span.start] for r in rendered for span in r.spans]
            prompts = iter(self.tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"])
            for source, r, ids, offsets in zip(batch, rendered, encoded["input_ids"], encoded["offset_mapping"]):
                row = self._row(r, ids, offsets, list(islice(prompts, len(r.spans))), tally)
                if row is not None:
                    yield source, *row

    def render(self, example: Example, tally: Tally | None = None) -> Rendered:
        """The text of an example and what is learnt of it."""
        messages = as_messages(example) if self.template is not None else None
        if messages is not None:
            assert self.template is not None
            chat = Example(example.place, messages=messages, tools=example.tools)
            text = self.template.render(messages, tools=example.tools, place=example.place)
            if tally is not None:
                tally.special_in_content += any(s in str(m.get("content")) for m in messages for s in self.special.values() if len(s) > 2)
            spans = [Span(0, len(text), closed=True)] if self.loss_on == "all" else self.template.spans(chat, text)
            return Rendered(example.place, text, spans, literal=False)
        if example.text is not None:
            return Rendered(example.place, example.text, [Span(0, len(example.text), closed=True)], literal=True)
        text = example.prompt + (example.completion or "")
        start = 0 if self.loss_on == "all" else len(example.prompt)
        return Rendered(example.place, text, [Span(start, len(text), closed=True)], literal=True)

    def windows(self, text: str, place: str, tally: Tally) -> Iterator[Row]:
        """A plain text cut into rows of `max_length`, each with the tokenizer's beginning; the end-of-text token closes the last."""
        ids = [i for piece in _pieces(text) for i in self.ids(piece)]
        ids += self.after
        body = self.max_length - len(self.before)
        for start in range(0, len(ids), body):
            row_ids = self._tuple(self.before + ids[start : start + body])
            row = Row(row_ids, row_ids, 0)
            if row.supervised:
                yield row
            else:
                tally.drop("one token alone at the end of a text teaches nothing", place)

    def _row(self, r: Rendered, ids: list[int], offsets: Offsets, prompts: Iterable[list[int]], tally: Tally) -> tuple[Row, bool] | None:
        ids, offsets = self._apart(r, ids, offsets, prompts, tally)
        learnt = [False] * len(ids)
        whole = len(r.spans) == 1 and r.spans[0].start == 0 and r.spans[0].end == len(r.text)
        for span in r.spans:
            first, last = self._tokens(r, ids, offsets, span, tally, whole=whole)
            learnt[first:last] = [True] * (last - first)
        if r.literal:
            before = [] if self.before and ids[: len(self.before)] == self.before else self.before
            after = [] if self.after and ids[-1:] == self.after else self.after
            learnt = [whole] * len(before) + learnt + [True] * len(after)
            ids = before + ids + after
        cut = len(ids) > self.max_length
        ids, learnt = ids[: self.max_length], learnt[: self.max_length]
        if not any(learnt[1:]):
            tally.drop(f"no answer left within data.max_length {self.max_length}" if cut else "no token to learn", r.place)
            return None
        shared = self._tuple(ids)
        labels = shared if all(learnt) else tuple(i if on else IGNORED for i, on in zip(shared, learnt))
        return Row(shared, labels, learnt.index(True)), cut

    def _tokens(self, r: Rendered, ids: list[int], offsets: Offsets, span: Span, tally: Tally, *, whole: bool) -> tuple[int, int]:
        """The tokens of a span, from the first to its end-of-turn token; white space the template writes after that is not learnt."""
        first = next((k for k, (a, _) in enumerate(offsets) if a >= span.start), len(ids))
        last = next((k for k in range(first, len(ids)) if offsets[k][0] >= span.end), len(ids))
        if r.literal or whole:
            return first, last
        closing = last - 1 if span.closed else last
        step = -1 if span.closed else 1
        while first <= closing < len(ids) and ids[closing] not in self.special and not r.text[slice(*offsets[closing])].strip():
            closing += step
        if first <= closing < len(ids) and ids[closing] in self.special:
            tally.end_of_turn[self.special[ids[closing]]] += 1
            return first, closing + 1
        tally.end_of_turn["none"] += 1
        return first, last

    def _apart(
        self, r: Rendered, ids: list[int], offsets: Offsets, prompts: Iterable[list[int]], tally: Tally
    ) -> tuple[list[int], Offsets]:
        """Tokenises the text from an answer on by itself, where the prompt alone has other tokens than the prompt with its answer.

        A tokenizer may merge the last character of one with the first of the other, or cut white space differently at the end of a text.
        """
        cut_at, kept = 0, 0  # characters and tokens up to the last cut
        for span, prompt in zip(r.spans, prompts):
            if span.start == 0:
                continue
            if cut_at:
                prompt = self.ids(r.text[cut_at : span.start])
            if ids[kept : kept + len(prompt)] == prompt:
                continue
            tally.borders += 1
            sides = [r.text[cut_at : span.start], r.text[span.start :]]
            encoded = self.tokenizer(sides, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            (left, right), (left_at, right_at) = encoded["input_ids"], encoded["offset_mapping"]
            ids = ids[:kept] + left + right
            offsets = (
                list(offsets[:kept])
                + [(a + cut_at, b + cut_at) for a, b in left_at]
                + [(a + span.start, b + span.start) for a, b in right_at]
            )
            cut_at, kept = span.start, kept + len(left)
        return ids, offsets

    def _tuple(self, ids: Sequence[int]) -> tuple[int, ...]:
        shared = self._shared
        return tuple(shared[i] if i < len(shared) else i for i in ids)


def as_messages(example: Example) -> tuple[Message, ...] | None:
    """An example as a conversation: messages as they are, prompt and completion as a question and its answer; None for text."""
    if example.messages is not None:
        return example.messages
    if example.completion is None:
        return None
    return ({"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.completion})


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1
        end = end if end > 0 else len(text)
        yield text[start:end]
        start = end
