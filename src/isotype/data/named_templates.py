"""Chat templates by name, for tokenizers without one: `data.chat_template: chatml`.

Each frames turns as the family's own models do, with the tokens that end a turn; tool calls and reasoning are not written. The frames are
those of the public model cards of ChatML (Qwen 2), Llama 3, Gemma, Mistral and Zephyr.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """`end`: the token after an answer, None for the tokenizer's own end token. `tokens`: all that must be one token each."""

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

# a system turn is put before the first question: Gemma knows no such role
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

NAMED: Mapping[str, NamedTemplate] = {
    "chatml": NamedTemplate(_CHATML, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "llama3": NamedTemplate(_LLAMA3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "gemma": NamedTemplate(_GEMMA, "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>")),
    "mistral": NamedTemplate(_MISTRAL),
    "zephyr": NamedTemplate(_ZEPHYR),
}


def named_template(name: str, tokenizer: Any) -> str:
    """The text of a template. Its end-of-turn token becomes the tokenizer's end token, with which generation stops.

    Raises  UsageError where the tokenizer lacks one of its tokens
    """
    template = NAMED[name]
    vocabulary = tokenizer.get_vocab()
    absent = [token for token in template.tokens if token not in vocabulary]
    if absent:
        words = ", ".join(f'"{token}"' for token in absent)
        raise UsageError(f"data.chat_template: {name}: the tokenizer has no token {words}", fix=f"model.add_tokens: [{words}]")
    if template.end is not None:
        tokenizer.eos_token = template.end
    elif tokenizer.eos_token is None:
        raise UsageError(f"data.chat_template: {name}: the tokenizer has no end-of-text token, which ends its answers", fix=_WITH_OWN_END)
    return template.text


_WITH_OWN_END = 'data.chat_template: chatml, with model.add_tokens: ["<|im_start|>", "<|im_end|>"]'
