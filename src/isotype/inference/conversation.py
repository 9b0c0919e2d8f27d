"""A conversation with a run: the chat template renders all earlier turns, and the answer streams to the terminal."""

from __future__ import annotations

import torch
from transformers import TextStreamer

from ..data.chat import chat_template
from ..precision.apply import generating
from ..printable import printable
from ..tasks.language.sample import generation_config
from .loaded import LoadedRun


class _Stream(TextStreamer):  # type: ignore[misc]
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text), stream_end)


class Conversation:
    """Stores the earlier turns. A run whose tokenizer has no template continues the given text instead."""

    def __init__(self, run: LoadedRun, *, max_new_tokens: int, temperature: float, top_p: float, stream: bool = True) -> None:
        self.run, self.stream = run, stream
        self.config = generation_config(run.model, run.tokenizer, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
        self.messages: list[dict[str, str]] = []

    def clear(self) -> None:
        self.messages.clear()

    def say(self, text: str) -> str:
        """Answers, streaming to stdout. An answer that is interrupted leaves the conversation as it was."""
        tokenizer, model = self.run.tokenizer, self.run.model
        asked = [*self.messages, {"role": "user", "content": text}]
        if tokenizer.chat_template:
            text = chat_template(tokenizer, None).render(asked, generation_prompt=True, place="the question")
        ids = torch.tensor([tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]], device=self.run.device)
        streamer = _Stream(tokenizer, skip_prompt=True, skip_special_tokens=True) if self.stream else None
        with torch.no_grad(), generating(model):
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=self.config, streamer=streamer)
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
        if tokenizer.chat_template:
            self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer
