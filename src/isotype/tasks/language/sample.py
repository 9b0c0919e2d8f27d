"""Generates samples during training, in the same precision as training. This does not change the
state of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...data.pictures import Pictures
from ...data.rows import SamplePrompt
from ...distributed.world import ALONE, World
from ...precision.apply import use_generate_dtype
from ...training.task import eval_mode, preserve_random_state

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """A generated answer. If the prompt comes from a row of the data, `reference` is the answer in
    this row.
    """

    prompt: str
    answer: str
    reference: str | None
    file: tuple[str, bytes] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "answer": self.answer, "reference": self.reference}

    def lines(self) -> tuple[str, str]:
        return self.prompt, self.answer


def generation_config(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    min_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> GenerationConfig:
    """Returns the settings for generating text. With temperature 0, decoding is greedy. The
    generation ends at the tokenizer's end token, or at one of the end tokens in the model's
    configuration.
    """
    from transformers import GenerationConfig

    model_end_ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    end_ids = {
        tokenizer.eos_token_id,
        *(model_end_ids if isinstance(model_end_ids, list | tuple) else [model_end_ids]),
    } - {None}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    else:
        sampling = {"do_sample": False}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(end_ids) or None,
        **sampling,
    )


def sample(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[SamplePrompt],
    *,
    max_new_tokens: int,
    min_new_tokens: int | None = None,
    device: torch.device,
    temperature: float = 0.0,
    top_p: float = 1.0,
    world: World = ALONE,
    pictures: Pictures | None = None,
) -> list[Sample]:
    """Generates answers for one prompt after the other. Decoding is greedy by default. The training
    steps after it are bit-identical to those of a run without samples.

    min_new_tokens  the smallest number of tokens of an answer
    world           the processes that share the model and call this together; all processes
                    continue until the longest answer is complete
    """
    config = generation_config(
        model,
        tokenizer,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_p=top_p,
    )
    samples: list[Sample] = []
    with preserve_random_state(), eval_mode(model), use_generate_dtype(model):
        for prompt in prompts:
            inputs = prompt_inputs(prompt, pictures, device)
            out = model.generate(**inputs, generation_config=config, synced_gpus=world.size > 1)
            answer = str(
                tokenizer.decode(out[0, len(prompt.input_ids) :], skip_special_tokens=True)
            )
            samples.append(Sample(prompt.text, answer.strip(), prompt.reference))
    return samples


def prompt_inputs(
    prompt: SamplePrompt, pictures: Pictures | None, device: torch.device
) -> dict[str, Tensor]:
    """Returns the arguments of `generate` for a prompt, including the prompt's pictures."""
    ids = torch.tensor([list(prompt.input_ids)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if prompt.pictures and pictures is not None:
        inputs |= pictures.inputs(ids, inputs["attention_mask"], [prompt.pictures])
    return {name: value.to(device) for name, value in inputs.items()}
