"""Builds the prompts that the model answers during training. The prompts come from the first
evaluation rows or from the setting `run.samples`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from ..config.schema import RunSection
from ..errors import UsageError
from .chat import ChatTemplate
from .encode import Encoder, RenderedRow, example_messages
from .formats import Example, Message
from .rows import LoadedData, SamplePrompt

SAMPLES = 4  # number of prompts that are taken from the data
_TEXT_PROMPT = 24  # number of first tokens of a plain text that become a prompt


def user_prompts(
    texts: Iterable[str | dict[str, Any]], tokenizer: Any, *, chat_template: str | None = None
) -> list[SamplePrompt]:
    """Returns the user's prompts (`run.samples`). If there is a chat template, each prompt is a
    question to the assistant. Without a chat template, each prompt is the beginning of a text that
    the model continues.
    """
    encoder = Encoder(tokenizer, max_length=2**31, loss_on="all", template=None)
    if chat_template:
        template = ChatTemplate(tokenizer, chat_template, "tokenizer")
    else:
        template = None
    prompts = []
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise UsageError(
                f"run.samples[{i}]: a mapping: only a prompt of a picture has settings of its own",
                fix="give the text",
            )
        if not text.strip():
            raise UsageError(f"run.samples[{i}]: the prompt is empty")
        if template is None:
            prompts.append(SamplePrompt(text, (*encoder.prefix_ids, *encoder.ids(text))))
        else:
            prompts.append(
                _chat_prompt(
                    encoder,
                    template,
                    [{"role": "user", "content": text}],
                    None,
                    location=f"run.samples[{i}]",
                )
            )
    return prompts


def run_prompts(run: RunSection, data: LoadedData, tokenizer: Any) -> list[SamplePrompt]:
    """Returns the prompts for samples. These are the configured prompts, or prompts from the data
    if none are configured. Raises UsageError if prompts are configured but the run generates no
    samples.
    """
    if not run.samples:
        return list(data.prompts)
    if run.sample_every == 0:
        raise UsageError(
            "run.samples has no effect: run.sample_every is 0", fix="leave one of the two out"
        )
    return user_prompts(run.samples, tokenizer, chat_template=data.chat_template)


def example_prompts(examples: Iterable[Example], encoder: Encoder) -> list[SamplePrompt]:
    """Returns prompts with reference answers from examples."""
    return [
        prompt
        for example in examples
        if (prompt := _example_prompt(example, encoder)) is not None and prompt.input_ids
    ]


def _example_prompt(example: Example, encoder: Encoder) -> SamplePrompt | None:
    messages = example_messages(example)
    if messages is None:
        return text_prompt((*encoder.prefix_ids, *encoder.ids(example.text or "")), encoder)
    if encoder.template is None:
        return SamplePrompt(
            example.prompt,
            (*encoder.prefix_ids, *encoder.ids(example.prompt)),
            (example.completion or "").strip(),
        )
    turns = list(takewhile(lambda message: message["role"] != "assistant", messages))
    if not turns:
        return None
    answer = messages[len(turns)]["content"] if len(turns) < len(messages) else None
    parts = [
        part
        for message in turns
        if not isinstance(message["content"], str)
        for part in message["content"]
    ]
    pictures = example.pictures[: sum(part.get("type") == "image" for part in parts)]
    options: dict[str, Any] = {
        "tools": example.tools,
        "location": example.location,
        "folder": example.folder,
    }
    return _chat_prompt(encoder, encoder.template, turns, answer, pictures=pictures, **options)


def text_prompt(ids: Sequence[int], encoder: Encoder) -> SamplePrompt:
    """Returns a prompt from the beginning of a text. The tokens that follow it in the text are its
    reference answer.
    """
    cut = min(len(encoder.prefix_ids) + _TEXT_PROMPT, max(1, len(ids) // 2))
    reference_ids = ids[cut : cut + 2 * _TEXT_PROMPT]
    # tokens after the end-of-text token belong to another text
    if encoder.suffix_ids and encoder.suffix_ids[0] in reference_ids:
        reference_ids = reference_ids[: reference_ids.index(encoder.suffix_ids[0])]
    text, reference = (
        encoder.tokenizer.decode(part, skip_special_tokens=True)
        for part in (ids[:cut], reference_ids)
    )
    return SamplePrompt(text.strip(), tuple(ids[:cut]), reference.strip() or None)


def _chat_prompt(
    encoder: Encoder,
    template: ChatTemplate,
    messages: Sequence[Message],
    answer: str | None,
    *,
    tools: Any = None,
    location: str,
    pictures: Sequence[Any] = (),
    folder: str = ".",
) -> SamplePrompt:
    rendered = template.render(messages, tools=tools, generation_prompt=True, location=location)
    question: Any = next(
        (message["content"] for message in reversed(messages) if message["role"] == "user"),
        messages[-1]["content"],
    )
    if isinstance(question, str):
        question = question
    else:
        question = "".join(part.get("text", "") for part in question)
    if not pictures:
        ids = tuple(encoder.ids(rendered))
        return SamplePrompt(question.strip(), ids, answer, messages=tuple(messages), tools=tools)
    with_pictures = encoder.insert_pictures(
        RenderedRow(location, rendered, [], is_literal=False), pictures, folder
    )
    return SamplePrompt(
        question.strip(), tuple(encoder.ids(with_pictures.text)), answer, with_pictures.pictures
    )
