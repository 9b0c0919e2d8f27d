"""Prompts answered during training: from the first evaluation rows, or the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from ..config.schema import RunSection
from ..errors import UsageError
from .chat import ChatTemplate
from .encode import Encoder, Rendered, as_messages
from .formats import Example, Message
from .rows import LoadedData, SamplePrompt

SAMPLES = 4  # prompts taken from the data
_TEXT_PROMPT = 24  # tokens of a plain text that are shown as its prompt


def prompts_from(
    texts: Iterable[str | dict[str, Any]], tokenizer: Any, *, chat_template: str | None = None
) -> list[SamplePrompt]:
    """The user's own prompts (`run.samples`): a question to the template's assistant, or, without a
    template, the beginning of a text.
    """
    encoder = Encoder(tokenizer, max_length=2**31, loss_on="all", template=None)
    if chat_template:
        template = ChatTemplate(tokenizer, chat_template, "tokenizer")
    else:
        template = None
    found = []
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise UsageError(
                f"run.samples[{i}]: a mapping: only a prompt of a picture has settings of its own",
                fix="give the text",
            )
        if not text.strip():
            raise UsageError(f"run.samples[{i}]: the prompt is empty")
        if template is None:
            found.append(SamplePrompt(text, (*encoder.before, *encoder.ids(text))))
        else:
            found.append(
                _question(
                    encoder,
                    template,
                    [{"role": "user", "content": text}],
                    None,
                    place=f"run.samples[{i}]",
                )
            )
    return found


def prompts_of_run(run: RunSection, data: LoadedData, tokenizer: Any) -> list[SamplePrompt]:
    """The prompts for samples: the configured ones, else prompts of the data. Raises UsageError for
    prompts that are never used.
    """
    if not run.samples:
        return list(data.prompts)
    if run.sample_every == 0:
        raise UsageError(
            "run.samples has no effect: run.sample_every is 0", fix="leave one of the two out"
        )
    return prompts_from(run.samples, tokenizer, chat_template=data.chat_template)


def prompts_of(examples: Iterable[Example], encoder: Encoder) -> list[SamplePrompt]:
    """Prompts with their reference answers from examples."""
    return [
        prompt
        for example in examples
        if (prompt := _prompt_of(example, encoder)) is not None and prompt.input_ids
    ]


def _prompt_of(example: Example, encoder: Encoder) -> SamplePrompt | None:
    messages = as_messages(example)
    if messages is None:
        return prompt_of_text((*encoder.before, *encoder.ids(example.text or "")), encoder)
    if encoder.template is None:
        return SamplePrompt(
            example.prompt,
            (*encoder.before, *encoder.ids(example.prompt)),
            (example.completion or "").strip(),
        )
    asked = list(takewhile(lambda message: message["role"] != "assistant", messages))
    if not asked:
        return None
    answer = messages[len(asked)]["content"] if len(asked) < len(messages) else None
    parts = [
        part
        for message in asked
        if not isinstance(message["content"], str)
        for part in message["content"]
    ]
    pictures = example.pictures[: sum(part.get("type") == "image" for part in parts)]
    about: dict[str, Any] = {
        "tools": example.tools,
        "place": example.place,
        "folder": example.folder,
    }
    return _question(encoder, encoder.template, asked, answer, pictures=pictures, **about)


def prompt_of_text(ids: Sequence[int], encoder: Encoder) -> SamplePrompt:
    """The beginning of a text as a prompt, the remainder as its reference."""
    cut = min(len(encoder.before) + _TEXT_PROMPT, max(1, len(ids) // 2))
    following = ids[cut : cut + 2 * _TEXT_PROMPT]
    if encoder.after and encoder.after[0] in following:  # the next text is another matter
        following = following[: following.index(encoder.after[0])]
    text, rest = (
        encoder.tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:cut], following)
    )
    return SamplePrompt(text.strip(), tuple(ids[:cut]), rest.strip() or None)


def _question(
    encoder: Encoder,
    template: ChatTemplate,
    messages: Sequence[Message],
    answer: str | None,
    *,
    tools: Any = None,
    place: str,
    pictures: Sequence[Any] = (),
    folder: str = ".",
) -> SamplePrompt:
    rendered = template.render(messages, tools=tools, generation_prompt=True, place=place)
    asked: Any = next(
        (m["content"] for m in reversed(messages) if m["role"] == "user"), messages[-1]["content"]
    )
    if isinstance(asked, str):
        asked = asked
    else:
        asked = "".join(part.get("text", "") for part in asked)
    if not pictures:
        return SamplePrompt(asked.strip(), tuple(encoder.ids(rendered)), answer)
    found = encoder.with_pictures(Rendered(place, rendered, [], literal=False), pictures, folder)
    return SamplePrompt(asked.strip(), tuple(encoder.ids(found.text)), answer, found.pictures)
