"""Defines servers that offer more functions than the OpenAI interface. These servers can also
render templates, return tokens, and return the log-probabilities of given tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .openai import COMPLETION, OpenAiServer, conversation, entry_text
from .server import Answer, Prompt, RefusedError, Remedies, Scores

ALTERNATIVES = 5  # most probable tokens that are asked for each position
_LARGE_BIAS = 1e6  # added to a logit, so that this token is drawn


class LlamaCppServer(OpenAiServer):
    """llama.cpp's server."""

    remedies = Remedies(
        template="--jinja --chat-template-file RUN/adapter/chat_template.jinja",
        first_token=(
            "--override-kv tokenizer.ggml.add_bos_token=bool:true or false, and the run's template"
        ),
        stop="tokenizer.ggml.eos_token_id in the file, and no --ignore-eos",
        thinking="--chat-template-kwargs with the run's data.template_kwargs",
        adapter="--lora FILE with the adapter, or -m with the merged model",
        context="-c with more tokens",
        rounding="Q8_0 or BF16 rounds less",
    )

    def render(self, prompt: Prompt) -> str | None:
        return self.request_field("/apply-template", conversation(prompt), "prompt", str)

    def tokenize(self, prompt: Prompt) -> tuple[int, ...] | None:
        text = self.render(prompt) if prompt.messages else prompt.text
        if text is None:
            return None
        return self._tokenize(text, add_special=True)

    def tokenize_text(self, text: str) -> tuple[int, ...] | None:
        return self._tokenize(text, add_special=False)

    def _tokenize(self, text: str, *, add_special: bool) -> tuple[int, ...] | None:
        body = {"content": text, "add_special": add_special, "parse_special": True}
        return self.request_field("/tokenize", body, "tokens", _read_ids)

    def complete(self, ids: Sequence[int], max_tokens: int) -> Answer | None:
        try:
            return self._complete(ids, max_tokens)
        except RefusedError:
            return self._complete_stepwise(ids, max_tokens)

    def _complete(self, ids: Sequence[int], max_tokens: int, **options: Any) -> Answer:
        body = {
            "prompt": list(ids),
            "n_predict": max_tokens,
            "temperature": 0,
            "n_probs": ALTERNATIVES,
            "return_tokens": True,
        }
        answer = self.connection.post("/completion", body | options)
        with self.connection.reading("/completion"):
            entries = answer.get("completion_probabilities") or []
            tokens = [entry["id"] for entry in entries] or answer["tokens"]
            return Answer(
                text=answer["content"],
                ids=tuple(tokens),
                texts=tuple(entry_text(entry) for entry in entries),
                logprobs=tuple(float(entry["logprob"]) for entry in entries) or None,
                alternatives=tuple(_alternatives(entry["top_logprobs"]) for entry in entries),
                has_ended=answer.get("stop_type") in ("eos", "word"),
                prompt_tokens=answer.get("tokens_evaluated"),
            )

    def chat(self, prompt: Prompt, max_tokens: int) -> Answer:
        """Requests the answer to a chat. llama.cpp returns status 500 if its own parser refuses the
        text of the answer, for example because it is not valid UTF-8. The answer is then requested
        token by token.
        """
        try:
            return super().chat(prompt, max_tokens)
        except RefusedError:
            ids = self.tokenize(prompt)
            if ids is None:
                raise
            return self._complete_stepwise(ids, max_tokens)

    def _complete_stepwise(self, ids: Sequence[int], max_tokens: int) -> Answer:
        tokens: list[int] = []
        text = ""
        has_ended = False
        while len(tokens) < max_tokens and not has_ended:
            try:
                step = self._complete((*ids, *tokens), 1)
            except RefusedError:
                break
            tokens += step.ids or ()
            text += step.text
            has_ended = step.has_ended
        return Answer(text, tuple(tokens), has_ended=has_ended, prompt_tokens=len(ids))

    def score(self, ids: Sequence[int], positions: Sequence[int]) -> Scores | None:
        """Requests one token at a time. A bias makes the server choose the given token. The
        returned log-probability is computed from the logits without this bias.
        """
        values: Scores = []
        for position in positions:
            bias = [[ids[position], _LARGE_BIAS]]
            try:
                answer = self._complete(ids[:position], 1, logit_bias=bias, n_probs=1)
            except RefusedError:  # a part of a character
                values.append(None)
                continue
            if answer.logprobs is None or answer.ids is None or answer.ids[0] != ids[position]:
                return None
            values.append(answer.logprobs[0])
        return values


def _read_ids(tokens: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(token) for token in tokens)


def _alternatives(entries: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    return {int(entry["id"]): float(entry["logprob"]) for entry in entries}


class VllmServer(OpenAiServer):
    """vLLM's server."""

    remedies = Remedies(
        template="--chat-template RUN/adapter/chat_template.jinja",
        first_token="add_bos_token in tokenizer_config.json of the served folder",
        stop="eos_token_id in generation_config.json of the served folder",
        thinking="--default-chat-template-kwargs with the run's data.template_kwargs",
        adapter="--enable-lora --lora-modules NAME=FOLDER, and --model NAME here",
        context="--max-model-len with more tokens",
        rounding=(
            "the adapter with --enable-lora is not rounded, and isotype merge --dtype fp32 with"
            " vLLM's --dtype float32 rounds nothing"
        ),
    )

    def render(self, prompt: Prompt) -> str | None:
        ids = self.tokenize(prompt)
        if ids is None:
            return None
        body = {"model": self.facts.model, "tokens": list(ids)}
        return self.request_field("/detokenize", body, "prompt", str)

    def tokenize(self, prompt: Prompt) -> tuple[int, ...] | None:
        body: dict[str, Any] = {"model": self.facts.model}
        if prompt.messages:
            body |= conversation(prompt) | {"add_generation_prompt": True}
        else:
            body |= {"prompt": prompt.text, "add_special_tokens": True}
        return self._tokenize(body)

    def tokenize_text(self, text: str) -> tuple[int, ...] | None:
        return self._tokenize(
            {"model": self.facts.model, "prompt": text, "add_special_tokens": False}
        )

    def _tokenize(self, body: Mapping[str, Any]) -> tuple[int, ...] | None:
        return self.request_field("/tokenize", body, "tokens", _read_ids)

    def complete(self, ids: Sequence[int], max_tokens: int) -> Answer | None:
        body = self._completion(ids, max_tokens) | {"logprobs": ALTERNATIVES}
        answer = self.connection.post(COMPLETION, body)
        return self.read_answer(answer)

    def _completion(self, ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.facts.model,
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_tokens_as_token_ids": True,
        }

    def score(self, ids: Sequence[int], positions: Sequence[int]) -> Scores | None:
        body = self._completion(ids, 1) | {"prompt_logprobs": 0}
        try:
            answer = self.connection.post(COMPLETION, body)
        except RefusedError:  # --max-logprobs 0
            return None
        with self.connection.reading(COMPLETION):
            entries = answer["choices"][0].get("prompt_logprobs")
            if entries is None:
                return None
            return [
                float(entries[position][str(ids[position])]["logprob"]) for position in positions
            ]


class SglangServer(OpenAiServer):
    """SGLang's server."""

    remedies = Remedies(
        template="--chat-template RUN/adapter/chat_template.jinja",
        first_token="add_bos_token in tokenizer_config.json of the served folder",
        stop="eos_token_id in generation_config.json of the served folder",
        thinking="chat_template_kwargs of each request, as in data.template_kwargs",
        adapter="--lora-paths NAME=FOLDER, and --model NAME here",
        context="--context-length with more tokens",
        rounding="the adapter with --lora-paths is not rounded",
    )

    def complete(self, ids: Sequence[int], max_tokens: int) -> Answer | None:
        answer = self._generate(ids, max_tokens, top_logprobs_num=ALTERNATIVES)
        if answer is None:
            return None
        with self.connection.reading("/generate"):
            facts = answer["meta_info"]
            entries = facts["output_token_logprobs"]
            reason = facts.get("finish_reason") or {}
            return Answer(
                text=answer.get("text", ""),
                ids=tuple(int(entry[1]) for entry in entries),
                logprobs=tuple(float(entry[0]) for entry in entries) or None,
                alternatives=tuple(
                    {int(entry[1]): float(entry[0]) for entry in position}
                    for position in facts.get("output_top_logprobs") or ()
                ),
                has_ended=reason.get("type") == "stop",
                prompt_tokens=facts.get("prompt_tokens"),
            )

    def score(self, ids: Sequence[int], positions: Sequence[int]) -> Scores | None:
        answer = self._generate(ids, 1, logprob_start_len=0)
        if answer is None:
            return None
        with self.connection.reading("/generate"):
            entries = answer["meta_info"]["input_token_logprobs"]
            return [float(entries[position][0]) for position in positions]

    def _generate(self, ids: Sequence[int], max_tokens: int, **options: Any) -> Any:
        sampling = {"max_new_tokens": max_tokens, "temperature": 0}
        body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
        return self.connection.try_post("/generate", body | options)


class OllamaServer(OpenAiServer):
    """Implements Ollama's own interface. Ollama's OpenAI interface is not used, because it does not
    accept `repeat_penalty`, whose default is not 1.
    """

    remedies = Remedies(
        template="TEMPLATE in the Modelfile; isotype export --to ollama writes it",
        first_token="tokenizer.ggml.add_bos_token in the file",
        stop='PARAMETER stop "..." in the Modelfile; isotype export --to ollama writes it',
        thinking="TEMPLATE in the Modelfile",
        adapter="FROM the merged model, or ADAPTER in the Modelfile",
        context="PARAMETER num_ctx in the Modelfile",
        rounding="Q8_0 or BF16 rounds less",
    )

    def chat(self, prompt: Prompt, max_tokens: int) -> Answer:
        options = {"temperature": 0, "num_predict": max_tokens, "seed": 0, "repeat_penalty": 1.0}
        body = {"model": self.facts.model, "stream": False, "options": options, "logprobs": True}
        if prompt.messages:
            messages = [dict(message) for message in prompt.messages]
            tools = {"tools": prompt.tools} if prompt.tools else {}
            answer = self.connection.post("/api/chat", body | {"messages": messages} | tools)
        else:
            answer = self.connection.post("/api/generate", body | {"prompt": prompt.text})
        with self.connection.reading("Ollama's interface"):
            message = answer.get("message")
            text = answer["response"] if message is None else message["content"]
            entries = answer.get("logprobs") or []
            return Answer(
                text=text,
                texts=tuple(entry_text(entry) for entry in entries),
                logprobs=tuple(float(entry["logprob"]) for entry in entries) or None,
                has_ended=answer.get("done_reason") == "stop",
                prompt_tokens=answer.get("prompt_eval_count"),
            )
