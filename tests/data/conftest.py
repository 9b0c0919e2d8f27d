"""Tokenizers of four families, trained on the spot, with chat templates in each family's style:
what stock templates do, in few lines.

None has a `{% generation %}` block, like the stock ones.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As Qwen3's: thoughts come from the content or a key, are written behind the last question, empty
# or not, and left out before it, so that to render a prefix gives something else than a prefix of
# the rendering.
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- set content, thought = m.content, '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in m.content %}
{%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

LLAMA3 = """\
{%- for message in messages %}
{%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{- content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}
{%- endfor %}"""

END_OF_TURN = {
    "chatml": "<|im_end|>",
    "thinking": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
}
_SPECIAL = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "thinking": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    "gemma": ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<unk>", "<s>", "</s>"],
}
_BOS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>"}
_EOS = {
    "chatml": "<|im_end|>",
    "thinking": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<eos>",
    "mistral": "</s>",
}
_TEMPLATES = {
    "chatml": CHATML,
    "thinking": THINKING,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
}
_CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n\n",
    "What is the answer? It is forty-two, as always.\n",
    "user assistant system model",
] * 4


def tokenizer_of(family: str, *, template: bool = True) -> PreTrainedTokenizerFast:
    """A small tokenizer of a family: byte-level BPE, or, like Gemma's and Mistral's, with spaces as
    ▁ and bytes as a fallback.
    """
    special = _SPECIAL[family]
    if family in ("gemma", "mistral"):
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=special[0], fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="first" if family == "mistral" else "never", split=False
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = [f"<0x{i:02X}>" for i in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=special + alphabet, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    if bos := _BOS.get(family):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BOS.get(family),
        eos_token=_EOS[family],
        pad_token=special[0],
    )
    made.chat_template = _TEMPLATES[family] if template else None
    return made


@pytest.fixture(scope="session")
def families() -> SimpleNamespace:
    """`of(family)` is a family's tokenizer with its template, one for all tests; `new(family,
    template=)` is a fresh one.
    """
    return SimpleNamespace(
        of=cache(tokenizer_of), new=tokenizer_of, end_of_turn=END_OF_TURN, templates=_TEMPLATES
    )
