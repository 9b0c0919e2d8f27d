"""Named chat templates: answers end in the family's end-of-turn token, prompts are what generation gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from isotype.data.chat import NAMED, chat_template
from isotype.data.encode import Encoder, Tally
from isotype.data.formats import Example
from isotype.data.rows import IGNORED
from isotype.errors import UsageError
from isotype.model.tokens import add_tokens


def tokenizer_for(families: SimpleNamespace, name: str):
    tokenizer = families.new("mistral", template=False)
    add_tokens(tokenizer, [t for t in NAMED[name].tokens if t not in tokenizer.get_vocab()])
    return tokenizer


@pytest.mark.parametrize("name", NAMED)
def test_answers_and_their_end_token_are_learnt(families: SimpleNamespace, name: str) -> None:
    tokenizer = tokenizer_for(families, name)
    template = chat_template(tokenizer, name)
    encoder = Encoder(tokenizer, max_length=512, loss_on="assistant", template=template)
    turns = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"})
    ((_, row, _),) = list(encoder.rows([Example("x:1", messages=turns)], tally := Tally()))
    end = NAMED[name].end or tokenizer.eos_token
    assert tally.end_of_turn == {end: 1}
    assert tokenizer.eos_token == end
    learnt = [label for label in row.labels if label != IGNORED]
    assert learnt[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(learnt, skip_special_tokens=True).strip() == "me"
    prompt = template.render(turns[:2], generation_prompt=True)
    assert "be brief" in prompt
    assert list(row.input_ids[: row.prompt_length]) == encoder.ids(prompt)
    two = template.render([{"role": "system", "content": "answer in French"}, *turns[:2]], generation_prompt=True)
    assert "answer in French" in two
    assert "be brief" in two


def test_a_missing_token_is_named_with_its_fix(families: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match=r'chatml: the tokenizer has no token "<\|im_start\|>", "<\|im_end\|>"(.|\n)*model\.add_tokens'):
        chat_template(families.new("mistral", template=False), "chatml")
    with pytest.raises(UsageError, match=r"chatnl: no such file, and no template of that name(.|\n)*did you mean chatml"):
        chat_template(families.new("mistral"), "chatnl")
