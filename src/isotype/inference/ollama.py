"""Writes a folder from which `ollama create` makes a model. The folder contains the weights, and a
Modelfile with the run's template and stop tokens.

Ollama's templates are Go templates. The text that the chat template writes around each message is
found by rendering conversations with known contents. The resulting Go template is compared with the
chat template on other conversations.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from ..data.chat import chat_template
from ..errors import UsageError

# classes that Ollama's converter of safetensors supports (0.12 to 0.17), besides the families that
# this package writes as GGUF
CONVERTED = (
    "MixtralForCausalLM", "GemmaForCausalLM", "Gemma4ForCausalLM", "Olmo3ForCausalLM", "CohereForCausalLM", "GptOssForCausalLM",
    "DeepseekV3ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Qwen3NextForCausalLM",
)  # fmt: skip
_TRIAL_CONTENTS = (
    "What is\na bf16?",
    "Eight bits of mantissa, 7 stored.",
    "And fp16?",
    "Eleven; ten stored.",
    "Thanks! {{ x }}",
)


@dataclass(frozen=True)
class TurnTexts:
    """The texts that a chat template writes around the messages. They do not contain the BOS token
    that the server adds (`adds_bos`).

    begin   the text before the first question if there is no system message
    system  the texts before and after a system message, up to the first question; None if the
            template accepts no system message
    answer  the text between a question and its answer
    next    the text between an answer and the next question
    prompt  the text after the last question
    """

    begin: str
    system: tuple[str, str] | None
    answer: str
    next: str
    prompt: str

    def text(self, messages: list[dict[str, str]]) -> str:
        """Returns the text that the Go template writes for the messages."""
        system = "\n\n".join(
            message["content"] for message in messages if message["role"] == "system"
        )
        if system and self.system:
            text = self.system[0] + system + self.system[1]
        else:
            text = self.begin
        is_first_question = True
        last_role = ""
        for message in (message for message in messages if message["role"] != "system"):
            if message["role"] != "user":
                text += self.answer
            elif not is_first_question:
                text += self.next
            else:
                is_first_question = False
            last_role = message["role"]
            text += message["content"]
        if last_role == "user":
            text += self.prompt
        return text

    def to_go_template(self) -> str:
        begin = _literal(self.begin)
        if self.system:
            prefix, suffix = map(_literal, self.system)
            begin = (
                f"{{{{ if .System }}}}{prefix}{{{{ .System }}}}{suffix}{{{{ else }}}}{begin}{{{{ end"
                " }}"
            )
        return (
            '{{ $first := true }}{{ $last := "" }}'
            + begin
            + '{{ range .Messages }}{{ if eq .Role "user" }}'
            "{{ if $first }}{{ $first = false }}{{ else }}"
            + _literal(self.next)
            + '{{ end }}{{ .Content }}{{ $last = .Role }}{{ else if eq .Role "assistant" }}'
            + _literal(self.answer)
            + '{{ .Content }}{{ $last = .Role }}{{ end }}{{ end }}{{ if eq $last "user" }}'
            + _literal(self.prompt)
            + "{{ end }}"
        )


def _literal(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')


def find_turns(tokenizer: Any) -> TurnTexts:
    """Finds the text around messages in a chat template. Raises UsageError for a template that
    changes the contents of messages or earlier turns, because `TurnTexts` cannot represent such a
    template.
    """
    template = chat_template(tokenizer, None)
    bos_text = tokenizer.bos_token if adds_bos(tokenizer) else ""

    def messages(contents: list[str], system: str | None) -> list[dict[str, str]]:
        system_messages = [{"role": "system", "content": system}] if system else []
        return [
            *system_messages,
            *(
                {"role": ("user", "assistant")[i % 2], "content": content}
                for i, content in enumerate(contents)
            ),
        ]

    def render(contents: list[str], system: str | None = None) -> str:
        text = template.render(
            messages(contents, system),
            generation_prompt=len(contents) % 2 == 1,
            location="the chat template",
        )
        return text.removeprefix(bos_text)

    def split_around(text: str, contents: list[str]) -> list[str]:
        parts = []
        for content in contents:
            text_before, separator, text = text.partition(content)
            if not separator:
                raise _unsupported_template()
            parts.append(text_before)
        return [*parts, text]

    contents_tried = ["QuestionOne", "AnswerOne", "QuestionTwo"]
    begin, answer, next_, prompt = split_around(render(contents_tried), contents_tried)
    try:
        prefix, suffix, _ = split_around(
            render(contents_tried[:1], "SystemOne"), ["SystemOne", contents_tried[0]]
        )
        system = (prefix, suffix)
    except UsageError:  # the template refuses a system message, or omits it
        system = None
    turns = TurnTexts(begin, system, answer, next_, prompt)
    for count in (1, 3, 5):
        for system_text in (None, "Be brief.\n\nBe right.") if system else (None,):
            contents = list(_TRIAL_CONTENTS[-1:] if count == 1 else _TRIAL_CONTENTS[:count])
            if turns.text(messages(contents, system_text)) != render(contents, system_text):
                raise _unsupported_template()
    return turns


def _unsupported_template() -> UsageError:
    return UsageError(
        "the chat template is no plain row of turns, and a Go template of it is not made here",
        fix="export --to gguf --type BF16, and write a Modelfile with FROM and TEMPLATE for it",
    )


def adds_bos(tokenizer: Any) -> bool:
    """Returns True if llama.cpp and Ollama must add the BOS token before a text. This is the case
    if the tokenizer adds the token, unless the chat template writes conversations without BOS.

    If only the template writes BOS, the BOS stays in the template. SmolLM2 is an example. If
    llama.cpp added the token too, the text would begin with two BOS tokens.
    """
    if tokenizer.bos_token is None or tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return False
    if not tokenizer.chat_template:
        return True
    conversation = [{"role": "user", "content": "a"}]
    return (
        chat_template(tokenizer, None)
        .render(conversation, generation_prompt=True, location="the chat template")
        .startswith(tokenizer.bos_token)
    )


def modelfile(folder: Path | str, weights: str) -> str:
    """Returns the Modelfile of a model whose tokenizer and generation_config are in `folder`.
    Raises UsageError.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    turns = find_turns(tokenizer) if tokenizer.chat_template else None
    template = turns.to_go_template() if turns else "{{ .Prompt }}"
    eos_token_id = None
    with suppress(OSError):
        eos_token_id = GenerationConfig.from_pretrained(folder).eos_token_id
    end_ids = (
        eos_token_id if isinstance(eos_token_id, list) else [eos_token_id, tokenizer.eos_token_id]
    )
    stops = [tokenizer.convert_ids_to_tokens(index) for index in end_ids if index is not None]
    if turns:
        # a template may end a turn with another token than the tokenizer's end token
        stops += [
            token for token in tokenizer.get_added_vocab() if turns.next.lstrip().startswith(token)
        ]
    if '"""' in template or any('"' in stop for stop in stops):
        raise _unsupported_template()
    lines = [
        f"FROM {weights}",
        f'TEMPLATE """{template}"""',
        *(f'PARAMETER stop "{stop}"' for stop in dict.fromkeys(stops)),
    ]
    return "\n".join(lines) + "\n"


def write_for_converter(folder: Path) -> None:
    """Adds the entries of config.json and tokenizer_config.json that Ollama's converter reads and transformers 5 does not write.

    If the configuration contains `rope_parameters` but no `rope_theta` next to it, the converter
    uses 10,000 or 0 as the base of the rotary embedding.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    rope = dict(config.get("rope_parameters") or {})
    if "rope_theta" in rope:
        config["rope_theta"] = rope.pop("rope_theta")
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = rope | {"type": rope["rope_type"]}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"add_bos_token": adds_bos(tokenizer)}
    if isinstance(tokenizer.chat_template, str):
        settings["chat_template"] = tokenizer.chat_template
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
