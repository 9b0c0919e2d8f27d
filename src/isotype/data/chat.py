"""Selects the chat template of a run, renders conversations with it, and locates the answers in the
rendered text.

The templates of Llama, Qwen and Gemma have no `{% generation %}` block, which would mark the
answers. So this module finds the position of each answer itself. First it renders the turns before
an answer, with the generation prompt. The answer begins where this text ends. Then it renders the
turns including the answer. The answer ends where this second text ends. Some templates render an
earlier turn differently from the last turn of a conversation. For example, Qwen3's template drops
the thoughts of earlier turns. For such a turn, this module renders the conversation a second time
with another text in place of the answer, and compares the two results.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from ..errors import UsageError
from .conversations import (
    CONTENT_KEY,
    END_THOUGHTS,
    THOUGHT_KEYS,
    hide_thought_tags,
    is_learnt,
    make_thought_probes,
    restore_thought_tags,
    select_thoughts,
)
from .formats import Example, Message
from .read import read_text, require_file
from .render import TemplateLimitError, TemplateRefusal, prepare_texts, render_text


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """A chat template that is part of Isotype. `end` is the token after an answer. If `end` is
    None, the tokenizer's end token follows an answer. Each text in `tokens` must be a single token
    of the vocabulary.
    """

    text: str
    end: str | None = None
    tokens: tuple[str, ...] = ()


_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA3 = """\
{{- bos_token or '' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# Gemma has no system role: the text of a system turn is put before the first question
_GEMMA = """\
{{- bos_token or '' }}
{%- set state = namespace(system='') %}
{%- for message in messages %}
{%- if message.role in ('system', 'developer') %}{% set state.system = state.system + message.content | trim + '\\n\\n' %}
{%- else %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
{{- ('' if message.role == 'assistant' else state.system) + message.content | trim + '<end_of_turn>\\n' }}
{%- if message.role != 'assistant' %}{% set state.system = '' %}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

_MISTRAL = """\
{{- bos_token or '' }}
{%- set state = namespace(system='') %}
{%- for message in messages %}
{%- if message.role in ('system', 'developer') %}{% set state.system = state.system + message.content | trim + '\\n\\n' %}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
{%- else %}{{ '[INST] ' + state.system + message.content | trim + ' [/INST]' }}{% set state.system = '' %}
{%- endif %}
{%- endfor %}"""

_ZEPHYR = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

NAMED_TEMPLATES: Mapping[str, NamedTemplate] = {
    "chatml": NamedTemplate(_CHATML, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "llama3": NamedTemplate(
        _LLAMA3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
    "gemma": NamedTemplate(_GEMMA, "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>")),
    "mistral": NamedTemplate(_MISTRAL),
    "zephyr": NamedTemplate(_ZEPHYR),
}


def _apply_named_template(name: str, tokenizer: Any) -> str:
    """Returns the text of a named template. The template's end-of-turn token becomes the
    tokenizer's end token, so that generation stops there.
    """
    template = NAMED_TEMPLATES[name]
    vocabulary = tokenizer.get_vocab()
    absent = [token for token in template.tokens if token not in vocabulary]
    if absent:
        token_names = ", ".join(f'"{token}"' for token in absent)
        raise UsageError(
            f"data.chat_template: {name}: the tokenizer has no token {token_names}",
            fix=f"model.add_tokens: [{token_names}]",
        )
    if template.end is not None:
        tokenizer.eos_token = template.end
    elif tokenizer.eos_token is None:
        raise UsageError(
            f"data.chat_template: {name}: the tokenizer has no end-of-text token, which ends its"
            " answers",
            fix=_CHATML_FIX,
        )
    return template.text


_CHATML_FIX = 'data.chat_template: chatml, with model.add_tokens: ["<|im_start|>", "<|im_end|>"]'


# For tokenizers without a template: `User:` and `Assistant:` lines, with the end-of-text token
# after every answer.
DEFAULT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{ 'User: ' + message.content + '\n' }}
{%- elif message.role == 'assistant' %}{{ 'Assistant: ' + message.content + eos_token + '\n' }}
{%- else %}{{ message.role | capitalize + ': ' + message.content + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

_OTHER_TEMPLATE_FIX = "data.chat_template: FILE.jinja, or a name, takes another template"
_TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")  # endings of the files of chat templates
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
# private-use characters, which templates and texts do not contain
_SENTINEL = "\U000f0f0e\U000f0f0f"


@dataclass(frozen=True, slots=True)
class Span:
    """The position of an answer in a rendered conversation, counted in characters.

    If `is_closed` is true, the span contains the whole turn with its end-of-turn token. Otherwise
    the end-of-turn token is the next special token after the span.
    """

    start: int
    end: int
    is_closed: bool


_THOUGHT_TAG = re.compile(r"[<\[][^\s<>\[\]]{1,40}[>\]]")  # `</think>`, `[THINK]`


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and the tokenizer that renders it.

    text      the template
    thoughts  the setting `data.thoughts`: what happens to the reasoning in answers
    """

    tokenizer: Any
    text: str
    source: str  # "tokenizer", "default", or the file
    # `data.template_kwargs`; the template's text begins with them
    default_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thoughts: str = "template"

    def reads_key(self, key: str) -> bool:
        """Returns True if the text of the template contains this key of a turn."""
        return re.search(rf"\b{re.escape(key)}\b", self.text) is not None

    @property
    def has_generation_block(self) -> bool:
        return _GENERATION_TAG.search(self.text) is not None

    @cached_property
    def needs_parts(self) -> bool:
        """True if the template writes a turn's content only if the content is a list of parts. For
        example, the templates of LLaVA and SmolVLM write nothing if the content is a string.
        """
        question = [{"role": "user", "content": _SENTINEL}]
        return (
            self.reads_key("type")
            and not self._writes_sentinel(question)
            and self._writes_sentinel(split_into_parts(question))
        )

    @cached_property
    def thought_positions(self) -> frozenset[tuple[str, bool]]:
        """Returns the positions of thoughts that the template writes. A position is a pair: the key
        of the turn that contains the thoughts, and whether the user asks another question later in
        the conversation.
        """
        return frozenset(
            position
            for position, turns in make_thought_probes(_SENTINEL)
            if self._writes_sentinel(split_into_parts(turns) if self.needs_parts else turns)
        )

    def _writes_sentinel(self, messages: Sequence[Message]) -> bool:
        try:
            return _SENTINEL in render_text(self.tokenizer, messages, chat_template=self.text)
        except TemplateLimitError as error:
            raise UsageError(
                f"chat template ({self.source}): {error}", fix=_OTHER_TEMPLATE_FIX
            ) from None
        except Exception:  # a template may reject a probe with any error
            return False

    @cached_property
    def _hides_tags(self) -> bool:
        return (
            self.thoughts == "all"
            and END_THOUGHTS in self.text
            and (CONTENT_KEY, True) not in self.thought_positions
        )

    def _render_arguments(
        self, messages: Sequence[Message], *, tools: Any, generation_prompt: bool
    ) -> tuple[Sequence[Message], dict[str, Any]]:
        """Returns the arguments for rendering a conversation, as a pair: the messages, and the
        options of the template.
        """
        if self._hides_tags:
            messages = hide_thought_tags(messages)
        if self.needs_parts:
            messages = split_into_parts(messages)
        options = {
            "chat_template": self.text,
            "tools": tools,
            "add_generation_prompt": generation_prompt,
        }
        return messages, options

    def prepare_rows(self, examples: Iterable[Example], *, has_spans: bool) -> None:
        """Starts to render these examples in the child process, so that later calls of `render`
        find the texts. If `has_spans` is true, also prepares the texts for `answer_spans`. The
        method `apply_thoughts` must already have been applied to the examples.
        """
        conversations = []
        for example in examples:
            messages = list(example.messages or ())
            tools = example.tools
            conversations.append(
                self._render_arguments(messages, tools=tools, generation_prompt=False)
            )
            for i in self._learnt_turns(example) if has_spans else ():
                if i:
                    conversations.append(
                        self._render_arguments(messages[:i], tools=tools, generation_prompt=True)
                    )
                if i != len(messages) - 1:
                    conversations.append(
                        self._render_arguments(
                            messages[: i + 1], tools=tools, generation_prompt=False
                        )
                    )
        prepare_texts(self.tokenizer, conversations)

    @staticmethod
    def _learnt_turns(example: Example) -> list[int]:
        """Returns the indices of the assistant's turns that the model learns."""
        return [
            i
            for i, message in enumerate(example.messages or ())
            if message["role"] == "assistant" and i >= example.learn_from and is_learnt(message)
        ]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        generation_prompt: bool = False,
        location: str = "prompt",
        switches: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation as text. Raises UsageError if the template is broken, or if it
        raises an error for this conversation.

        switches  variables of the template, such as `enable_thinking`
        """
        conversation, options = self._render_arguments(
            messages, tools=tools, generation_prompt=generation_prompt
        )
        try:
            text = render_text(self.tokenizer, conversation, **options, **(switches or {}))
            return restore_thought_tags(text) if self._hides_tags else text
        except UnicodeEncodeError:
            raise UsageError(
                f"{location}: the chat template writes half of a surrogate pair, which is not text"
            ) from None
        except (RecursionError, jinja2.TemplateSyntaxError) as error:
            raise _broken_template_error(self.source, error) from None
        except TemplateLimitError as error:
            raise UsageError(
                f"{location}: the chat template {error}", fix=_OTHER_TEMPLATE_FIX
            ) from None
        except TemplateRefusal as error:
            raise UsageError(f"{location}: the chat template refuses the row: {error}") from None

    def apply_thoughts(self, messages: Sequence[Message], location: str) -> Sequence[Message]:
        """Returns the turns without the thoughts that `data.thoughts` excludes."""
        if self.thoughts == "template":
            return messages
        return select_thoughts(
            messages,
            self.thoughts,
            written_positions=self.thought_positions,
            has_tags=END_THOUGHTS in self.text,
            location=location,
        )

    def answer_spans(self, example: Example, rendered: str) -> list[Span]:
        """Returns the spans of the answers that the model learns. `rendered` is the conversation of
        `example` after rendering.
        """
        messages = list(example.messages or ())
        return [
            self._answer_span(messages, i, example, rendered) for i in self._learnt_turns(example)
        ]

    def find_omissions(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str, location: str
    ) -> tuple[set[str], bool, bool, bool]:
        """Finds the parts of a conversation that the template did not write to `text`. Returns the
        roles of the missing turns, and whether tool calls, tools or reasoning are missing.

        Some templates silently drop later system turns, tool calls or thoughts. This method
        searches `text` for the text of each turn. If several turns contain the same text, `text`
        must contain it at least as many times. To find out whether the template writes tool calls
        or tools, the method renders the conversation once without them. If the text is the same
        without them, the template does not write them.
        """
        # text -> for each turn that contains it: the role, and whether the text is a thought
        expected: dict[str, list[tuple[str, bool]]] = {}
        for m in messages:
            content = m["content"] if isinstance(m.get("content"), str) else ""
            parts = [part.strip() for part in _THOUGHT_TAG.split(content) if part.strip()]
            thoughts = [
                m[key].strip()
                for key in THOUGHT_KEYS
                if isinstance(m.get(key), str) and m[key].strip() not in content
            ]
            has_thoughts = m["role"] == "assistant" and len(parts) > 1
            for content_text, is_thought in [
                *((part, has_thoughts) for part in parts),
                *((content_text, True) for content_text in thoughts),
            ]:
                expected.setdefault(content_text, []).append((m["role"], is_thought))
        missing = [
            turn
            for content_text, turns in expected.items()
            if not _occurs(content_text, text, len(turns))
            for turn in turns
        ]
        messages_without_calls = [
            {key: value for key, value in message.items() if key != "tool_calls"}
            for message in messages
        ]
        has_missing_calls = any(
            message.get("tool_calls") for message in messages
        ) and self._renders_same(text, messages_without_calls, tools, location)
        has_missing_tools = bool(tools) and self._renders_same(text, messages, None, location)
        return (
            {role for role, is_thought in missing if not is_thought},
            has_missing_calls,
            has_missing_tools,
            any(is_thought for _, is_thought in missing),
        )

    def _renders_same(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, location: str
    ) -> bool:
        try:
            return self.render(messages, tools=tools, location=location) == text
        except UsageError:  # the template may refuse a turn without its calls
            return False

    def _answer_span(
        self, messages: list[Message], index: int, example: Example, rendered: str
    ) -> Span:
        location = example.location
        tools = example.tools
        if index:
            opening = self.render(
                messages[:index], tools=tools, generation_prompt=True, location=location
            )
        else:
            opening = ""
        if index == len(messages) - 1:
            ending = rendered
        else:
            ending = self.render(messages[: index + 1], tools=tools, location=location)
        has_opening = index > 0 and rendered.startswith(opening)
        if has_opening and rendered.startswith(ending) and len(ending) > len(opening):
            return Span(len(opening), len(ending), is_closed=True)
        # The template renders this turn differently within the conversation: find the turn by
        # changing its text.
        changed = (
            messages[index]
            | {key: _SENTINEL for key in THOUGHT_KEYS if messages[index].get(key)}
            | {"content": _SENTINEL}
        )
        changed.pop("tool_calls", None)
        changed_text = self.render(
            [*messages[:index], changed, *messages[index + 1 :]], tools=tools, location=location
        )
        start = _common_prefix_length(rendered, changed_text)
        end = max(start, len(rendered) - _common_prefix_length(rendered[::-1], changed_text[::-1]))
        if end <= start:
            raise UsageError(
                f"{location}: the chat template renders nothing for messages[{index}] (assistant)"
            )
        if has_opening and len(opening) <= start:
            start = len(opening)
        is_closed = rendered.startswith(ending) and len(ending) >= end
        return Span(start, len(ending) if is_closed else end, is_closed)


def chat_template(
    tokenizer: Any,
    file: str | None,
    default_kwargs: Mapping[str, Any] | None = None,
    *,
    thoughts: str = "template",
) -> ChatTemplate:
    """Returns the template of a run. If `data.chat_template` is set, the template is the file or
    the name in this setting. Otherwise it is the tokenizer's template. If the tokenizer has no
    template, it is a plain default.

    default_kwargs  `data.template_kwargs`; these defaults are written at the beginning of the
                    template's text, so that a saved tokenizer has them too
    thoughts  `data.thoughts`
    Raises    UsageError if the template is missing or unusable, or if it does not read one of the
              settings
    """
    template = replace(_choose_template(tokenizer, file), thoughts=thoughts)
    return _add_defaults(template, default_kwargs) if default_kwargs else template


# variables that every template gets from a run or from transformers: a default for them would have
# no effect
_RESERVED_KWARGS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
)


def _add_defaults(template: ChatTemplate, default_kwargs: Mapping[str, Any]) -> ChatTemplate:
    try:
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            _GENERATION_TAG.sub("", template.text)
        )
    except (RecursionError, jinja2.TemplateSyntaxError) as error:
        raise _broken_template_error(template.source, error) from None
    names = jinja2.meta.find_undeclared_variables(parsed).difference(
        _RESERVED_KWARGS, template.tokenizer.special_tokens_map
    )
    if unread := [name for name in default_kwargs if name not in names]:
        if names:
            fix = f"it reads {', '.join(sorted(names))}"
        else:
            fix = "leave it out: it reads none"
        raise UsageError(
            f"data.template_kwargs.{unread[0]}: the chat template ({template.source}) reads no such"
            " setting",
            fix=fix,
        )
    for name, value in default_kwargs.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise UsageError(
                f"data.template_kwargs.{name}: {value!r} is no value of JSON",
                fix="quote it, if it is a text",
            ) from None
    start = "".join(
        f"{{%- if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif -%}}\n"
        for name, value in default_kwargs.items()
    )
    # the template in the tokenizer of a finished run already begins with these defaults
    text = template.text if template.text.startswith(start) else start + template.text
    return replace(template, text=text, default_kwargs=default_kwargs)


def _broken_template_error(
    source: str, error: RecursionError | jinja2.TemplateSyntaxError
) -> UsageError:
    if isinstance(error, RecursionError):
        detail = ": nested too deeply"
    else:
        detail = f", line {error.lineno}: {error.message}"
    return UsageError(f"chat template ({source}){detail}")


def _choose_template(tokenizer: Any, file: str | None) -> ChatTemplate:
    if file is not None and file in NAMED_TEMPLATES:
        return ChatTemplate(tokenizer, _apply_named_template(file, tokenizer), file)
    if file is not None:
        if not file.endswith(_TEMPLATE_SUFFIXES) and not Path(file).exists():
            near = difflib.get_close_matches(file.lower(), NAMED_TEMPLATES, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(
                f"data.chat_template: {file}: no such file, and no template of that name",
                fix=f"{hint}{', '.join(NAMED_TEMPLATES)}",
            )
        return ChatTemplate(
            tokenizer, read_text(require_file(file, _TEMPLATE_SUFFIXES), file), file
        )
    template_text = tokenizer.chat_template
    if isinstance(template_text, dict):
        template_text = template_text.get("default") or next(iter(template_text.values()), None)
    if template_text:
        return ChatTemplate(tokenizer, template_text, "tokenizer")
    if tokenizer.eos_token is None:
        message = (
            "data: the rows are chats, but the tokenizer has no chat template, and no end-of-text"
            " token for a plain one"
        )
        raise UsageError(message, fix=f"set data.chat_template to a Jinja file, or {_CHATML_FIX}")
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [
        tokenizer.bos_token_id
    ]
    return ChatTemplate(
        tokenizer, ("{{- bos_token }}" if adds_bos else "") + DEFAULT_TEMPLATE, "default"
    )


def split_into_parts(messages: Sequence[Message]) -> list[Message]:
    """Returns the conversation in a form in which each text content is a list with one part."""
    return [
        (
            message | {"content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message.get("content"), str)
            else message
        )
        for message in messages
    ]


def _occurs(part: str, text: str, count: int) -> bool:
    """Returns True if `text` contains `part` at least `count` times, either unchanged or with the
    escape characters of JSON.
    """
    if text.count(part) >= count:
        return True
    return any(
        text.count(json.dumps(part, ensure_ascii=is_ascii)[1:-1]) >= count
        for is_ascii in (True, False)
    )


def _common_prefix_length(first: str, second: str) -> int:
    """Returns the number of characters at the beginning that two texts have in common."""
    return next(
        (k for k, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second))
    )
