"""Where answers lie when a template is unusual (tools, thinking, answers first, an end token only
at the end) or has a name of ours.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.api import Encoder, Example, Tally, add_tokens

from isotype.data.chat import NAMED_TEMPLATES, ChatTemplate, chat_template
from isotype.data.rows import IGNORE_INDEX
from isotype.errors import UsageError

TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools[0].function.name + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '\\n<call>' + call.function.name + '</call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
END_AT_END = """\
{%- for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"""


def learnt(
    families: SimpleNamespace, template: str, messages: list[dict[str, Any]], tools: Any = None
) -> tuple[str, Tally]:
    tokenizer, tally = families.of("chatml"), Tally()
    encoder = Encoder(
        tokenizer,
        max_length=512,
        loss_on="assistant",
        template=ChatTemplate(tokenizer, template, "file"),
    )
    found = list(
        encoder.encode_rows([Example("x:1", messages=tuple(messages), tools=tools)], tally)
    )
    tally.bad.refuse(usable_rows=1)
    ((_, row, _),) = found
    return tokenizer.decode([label for label in row.labels if label != IGNORE_INDEX]), tally


def said(*turns: str) -> list[dict[str, Any]]:
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def test_tool_calls_are_part_of_the_answer(families: SimpleNamespace) -> None:
    messages = said("u the weather?", "a let me see", "t rain", "a it rains")
    messages[1]["tool_calls"] = [
        {"type": "function", "function": {"name": "weather", "arguments": {}}}
    ]
    tools = [
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}
    ]
    text, _ = learnt(families, TOOLS, messages, tools)
    assert text == "let me see\n<call>weather</call><|im_end|>it rains<|im_end|>"


@pytest.mark.parametrize(
    ("template", "turns", "wanted"),
    [
        ("no system", ("a hello", "u hi", "a bye"), "hello<|im_end|>bye<|im_end|>"),
        ("chatml", ("s be brief", "u hi", "a hello", "a again", "u bye"), "hello<|im_end|>again<|im_end|>"),
        # what the template drops from earlier turns
        ("thinking", ("u a", "a <think>hm</think>\n\none", "u b", "a two"), "one<|im_end|><think>\n\n</think>\n\ntwo<|im_end|>"),
        ("thinking", ("u ok", "a ok", "u ok", "a ok"), "ok<|im_end|><think>\n\n</think>\n\nok<|im_end|>"),
    ],
    ids=["an answer first", "two answers in a row", "thoughts", "the same answer twice"],
)  # fmt: skip
def test_answers_wherever_they_stand(
    families: SimpleNamespace, template: str, turns: tuple[str, ...], wanted: str
) -> None:
    text = families.templates["chatml"] if template == "no system" else families.templates[template]
    if template == "no system":
        text = "{%- for" + text.split("{%- for")[1]
    assert learnt(families, text, said(*turns))[0] == wanted


def test_an_end_token_only_at_the_end(families: SimpleNamespace) -> None:
    text, tally = learnt(families, END_AT_END, said("u a", "a one", "u b", "a two"))
    assert text == "onetwo\n<|im_end|>"
    assert tally.end_of_turn == {"none": 1, "<|im_end|>": 1}


def test_a_template_that_drops_the_answer_is_refused(families: SimpleNamespace) -> None:
    with pytest.raises(
        UsageError, match=r"x:1: the chat template renders nothing for messages\[1\]"
    ):
        learnt(
            families,
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            said("u hi", "a hello"),
        )


def test_no_template_and_no_end_token_is_refused(families: SimpleNamespace) -> None:
    tokenizer = families.new("chatml", template=False)
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match=r"set data\.chat_template"):
        chat_template(tokenizer, None)


def tokenizer_for(families: SimpleNamespace, name: str):
    tokenizer = families.new("mistral", template=False)
    add_tokens(
        tokenizer, [t for t in NAMED_TEMPLATES[name].tokens if t not in tokenizer.get_vocab()]
    )
    return tokenizer


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_answers_and_their_end_token_are_learnt(families: SimpleNamespace, name: str) -> None:
    tokenizer = tokenizer_for(families, name)
    template = chat_template(tokenizer, name)
    encoder = Encoder(tokenizer, max_length=512, loss_on="assistant", template=template)
    turns = (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": "me"},
    )
    ((_, row, _),) = list(encoder.encode_rows([Example("x:1", messages=turns)], tally := Tally()))
    end = NAMED_TEMPLATES[name].end or tokenizer.eos_token
    assert tally.end_of_turn == {end: 1}
    assert tokenizer.eos_token == end
    labels = [label for label in row.labels if label != IGNORE_INDEX]
    assert labels[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(labels, skip_special_tokens=True).strip() == "me"
    prompt = template.render(turns[:2], generation_prompt=True)
    assert "be brief" in prompt
    assert list(row.input_ids[: row.prompt_length]) == encoder.ids(prompt)
    two = template.render(
        [{"role": "system", "content": "answer in French"}, *turns[:2]], generation_prompt=True
    )
    assert "answer in French" in two
    assert "be brief" in two


def test_a_missing_token_is_named_with_its_fix(families: SimpleNamespace) -> None:
    with pytest.raises(
        UsageError,
        match=r'chatml: the tokenizer has no token "<\|im_start\|>", "<\|im_end\|>"(.|\n)*model\.add_tokens',
    ):
        chat_template(families.new("mistral", template=False), "chatml")
    with pytest.raises(
        UsageError,
        match=r"chatnl: no such file, and no template of that name(.|\n)*did you mean chatml",
    ):
        chat_template(families.new("mistral"), "chatnl")
