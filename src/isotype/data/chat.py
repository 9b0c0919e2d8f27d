"""The chat template of a run: selects it, renders conversations with it, and locates the answers in the rendered text.

Stock templates of Llama, Qwen and Gemma have no `{% generation %}` block, so the learnt spans are derived: the text up to an answer is
what the template renders for the turns before it plus its generation prompt; the answer ends where rendering the turns up to and
including it ends. Where a template renders the past differently from the present (Qwen3 drops the thinking of earlier turns), the answer
is found by rendering it once more with other words and comparing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ..errors import UsageError
from .bounded import bounded, refuse_no_text
from .conversations import is_learnt
from .formats import Example, Message
from .named_templates import NAMED, named_template
from .read import existing_file, read_text

# For tokenizers that bring no template: `User:` and `Assistant:` lines, the end-of-text token after every answer.
DEFAULT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{ 'User: ' + message.content + '\n' }}
{%- elif message.role == 'assistant' %}{{ 'Assistant: ' + message.content + eos_token + '\n' }}
{%- else %}{{ message.role | capitalize + ': ' + message.content + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

_ENDINGS = (".jinja", ".jinja2", ".j2", ".txt")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SENTINEL = "\U000f0f0e\U000f0f0f"  # private-use characters: in no template, in no text


@dataclass(frozen=True, slots=True)
class Span:
    """An answer in a rendered conversation, in characters.

    `closed`: the span holds the whole turn with its end-of-turn token; otherwise that token is the special one that follows.
    """

    start: int
    end: int
    closed: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the tokenizer that renders it."""

    tokenizer: Any
    text: str
    source: str  # "tokenizer", "default", or the file

    def reads(self, key: str) -> bool:
        """Whether the template's text has this key of a turn."""
        return re.search(rf"\b{re.escape(key)}\b", self.text) is not None

    @property
    def has_generation_block(self) -> bool:
        return _GENERATION.search(self.text) is not None

    def render(self, messages: Sequence[Message], *, tools: Any = None, generation_prompt: bool = False, place: str = "prompt") -> str:
        """The text of a conversation; a template's own refusal (roles out of order, no system turn) becomes one line."""
        try:
            with bounded(place):
                text = self.tokenizer.apply_chat_template(
                    list(messages), chat_template=self.text, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
                )
            return refuse_no_text(text, place)
        except UsageError:
            raise
        except RecursionError:
            raise UsageError(f"chat template ({self.source}): nested too deeply") from None
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"chat template ({self.source}), line {error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            said = (str(error).splitlines() or [repr(error)])[0].strip("'")
            raise UsageError(f"{place}: the chat template refuses the row: {said}") from None

    def spans(self, example: Example, rendered: str) -> list[Span]:
        """Where the answers are in `rendered`, which is `render(example.messages)`."""
        messages = list(example.messages or ())
        found = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and i >= example.learn_from and is_learnt(message):
                found.append(self._span(messages, i, example, rendered))
        return found

    def _span(self, messages: list[Message], i: int, example: Example, rendered: str) -> Span:
        place, tools = example.place, example.tools
        opening = self.render(messages[:i], tools=tools, generation_prompt=True, place=place) if i else ""
        ending = rendered if i == len(messages) - 1 else self.render(messages[: i + 1], tools=tools, place=place)
        opens = i > 0 and rendered.startswith(opening)
        if opens and rendered.startswith(ending) and len(ending) > len(opening):
            return Span(len(opening), len(ending), closed=True)
        # The template renders this turn differently with the turns around it: find its words by changing them.
        changed = {key: value for key, value in messages[i].items() if key != "tool_calls"} | {"content": _SENTINEL}
        other = self.render([*messages[:i], changed, *messages[i + 1 :]], tools=tools, place=place)
        start = _agreeing(rendered, other)
        end = max(start, len(rendered) - _agreeing(rendered[::-1], other[::-1]))
        if end <= start:
            raise UsageError(f"{place}: the chat template renders nothing for messages[{i}] (assistant)")
        if opens and len(opening) <= start:
            start = len(opening)
        closed = rendered.startswith(ending) and len(ending) >= end
        return Span(start, len(ending) if closed else end, closed)


def chat_template(tokenizer: Any, file: str | None) -> ChatTemplate:
    """The template of a run: the file or name in `data.chat_template`, else the tokenizer's own, else a plain default."""
    if file is not None and file in NAMED:
        return ChatTemplate(tokenizer, named_template(file, tokenizer), file)
    if file is not None:
        if not file.endswith(_ENDINGS) and not Path(file).exists():
            near = difflib.get_close_matches(file.lower(), NAMED, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"data.chat_template: {file}: no such file, and no template of that name", fix=f"{hint}{', '.join(NAMED)}")
        return ChatTemplate(tokenizer, read_text(existing_file(file, _ENDINGS), file), file)
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default") or next(iter(own.values()), None)
    if own:
        return ChatTemplate(tokenizer, own, "tokenizer")
    if tokenizer.eos_token is None:
        raise UsageError(
            "data: the rows are chats, but the tokenizer has no chat template, and no end-of-text token for a plain one: "
            "set data.chat_template to a Jinja file, or to chatml with model.add_tokens: ['<|im_start|>', '<|im_end|>']"
        )
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return ChatTemplate(tokenizer, ("{{- bos_token }}" if adds_bos else "") + DEFAULT_TEMPLATE, "default")


def _agreeing(one: str, other: str) -> int:
    """The length of the common beginning of two texts, in characters."""
    return next((k for k, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
