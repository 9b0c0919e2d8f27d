"""Labels: exactly the answers and their end-of-turn tokens, for every family of templates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.api import Encoder, Example, Tally

from isotype.data.chat import chat_template
from isotype.data.rows import IGNORE_INDEX, Row

FAMILIES = ("chatml", "thinking", "llama3", "gemma", "mistral")
# Any text but the marks of templates, which a tokenizer reads as special tokens, ▁, which stands
# for a space in two of the tokenizers, and the two private-use characters by which a turn's words
# are found.
words = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="<>[]▁\0\U000f0f0e\U000f0f0f"),
    min_size=1,
    max_size=40,
).filter(lambda t: t.strip() == t)


def encoder_of(families: SimpleNamespace, family: str, **changes: object) -> Encoder:
    tokenizer = families.of(family)
    wanted: dict = {
        "max_length": 4096,
        "loss_on": "assistant",
        "template": chat_template(tokenizer, None),
    } | changes
    return Encoder(tokenizer, **wanted)


def row_of(encoder: Encoder, example: Example) -> Row:
    ((_, row, _),) = list(encoder.encode_rows([example], Tally()))
    return row


def chat(*turns: str) -> Example:
    return Example(
        "x:1",
        messages=tuple(
            {"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)
        ),
    )


def learnt(encoder: Encoder, row: Row) -> str:
    return encoder.tokenizer.decode([label for label in row.labels if label != IGNORE_INDEX])


def answers_alone_are_learnt(families: SimpleNamespace, family: str, turns: list[str]) -> None:
    encoder = encoder_of(families, family)
    row = row_of(encoder, chat(*turns))
    end, answers = families.end_of_turn[family], turns[1::2]
    if family == "thinking":
        answers = [a.split("</think>")[-1].lstrip("\n") for a in answers]
        answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
    if family == "mistral":
        answers = [" " + a for a in answers]
    assert learnt(encoder, row) == "".join(a + end for a in answers)
    assert all(
        label in (IGNORE_INDEX, i) for label, i in zip(row.labels, row.input_ids, strict=True)
    )
    assert row.labels[row.prompt_length] != IGNORE_INDEX
    assert set(row.labels[: row.prompt_length]) == {IGNORE_INDEX}
    assert encoder.template is not None
    prompt = encoder.template.render(
        [{"role": "user", "content": turns[0]}], generation_prompt=True
    )
    assert list(row.input_ids[: row.prompt_length]) == encoder.ids(prompt), (
        "not what generation gets"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_the_answers_and_their_end_of_turn(
    families: SimpleNamespace, family: str
) -> None:
    answers_alone_are_learnt(
        families, family, ["What is bf16?", "A float.", "How long?", "16 bits."]
    )


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=st.lists(words, min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0))
def test_labels_are_the_answers_of_any_conversation(
    families: SimpleNamespace, family: str, turns: list[str]
) -> None:
    answers_alone_are_learnt(families, family, turns)


def test_no_beginning_of_text_is_doubled(families: SimpleNamespace) -> None:
    for family in FAMILIES:
        tokenizer = families.of(family)
        for example, template in (
            (chat("hi", "yes"), chat_template(tokenizer, None)),
            (Example("x:1", text="plain text"), None),
        ):
            ids = row_of(encoder_of(families, family, template=template), example).input_ids
            assert ids.count(tokenizer.bos_token_id) == (0 if tokenizer.bos_token is None else 1)


def test_an_answer_that_would_change_its_prompts_tokens_is_tokenised_apart(
    families: SimpleNamespace,
) -> None:
    tokenizer = families.of("chatml")
    encoder, tally = encoder_of(families, "chatml"), Tally()
    assert len(encoder.ids("\n\n")) == 1, (
        "the tokenizer must merge the two line ends for this test to mean anything"
    )
    ((_, row, _),) = list(encoder.encode_rows([chat("hi", "\n\nyes")], tally))
    assert tally.borders == 1
    assert learnt(encoder, row) == "\n\nyes<|im_end|>"
    assert tokenizer.decode(row.input_ids).endswith("assistant\n\n\nyes<|im_end|>\n")


def test_a_tokenizer_in_python_alone_works() -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer(extra_ids=0, additional_special_tokens=["<turn>"])
    tokenizer.chat_template = (
        "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
    )
    assert not tokenizer.is_fast
    encoder = Encoder(
        tokenizer, max_length=200, loss_on="assistant", template=chat_template(tokenizer, None)
    )
    tally = Tally()
    ((_, row, _),) = list(encoder.encode_rows([chat("how?", "so, ünd so", "why?", "thus")], tally))
    assert learnt(encoder, row) == "so, ünd so</s>thus</s>"
    assert tally.end_of_turn == {"</s>": 2}
    assert list(row.input_ids) == encoder.ids(
        encoder.template.render(chat("how?", "so, ünd so", "why?", "thus").messages)
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(
        st.one_of(words, st.sampled_from(["\n", " a", "<|im_end|>", "</s>", "<"])), max_size=4
    )
)
def test_a_prompts_tokens_are_those_of_its_text_alone(families, family, texts):
    encoder = encoder_of(families, family)
    calls = []
    ids = encoder.ids

    def counted(text):
        calls.append(text)
        return ids(text)

    encoder.ids = counted
    answers = [*texts, "".join(texts) + "so"]
    examples = [chat("why?", answer) for answer in answers if answer.strip()]
    rendered = [encoder.render(example, Tally()) for example in examples]
    encoded = encoder._tokenize_texts([r.text for r in rendered], [[] for _ in rendered])
    prompts = encoder._tokenize_prompts(rendered, encoded)
    texts_alone = [r.text[: span.start] for r in rendered for span in r.spans]
    assert prompts == [ids(text) for text in texts_alone]
    if family in ("chatml", "llama3", "gemma"):
        assert len(set(calls)) == len(calls) <= 2, "the role's name is tokenised once"
