"""AuraFlow: latents as pictures, the sequence of one T5 encoder, zero where it is padded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .family import Asked, Family


class AuraFlow(Family):
    pipeline = "AuraFlowPipeline"
    max_text_length = 256
    encoders = ("text_encoder", "tokenizer")
    adapted = ("AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock")

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["joint_attention_dim"]))}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, *_ = pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=max_length)
        return {"text": text_NSD}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(noisy_NCHW, encoder_hidden_states=text["text"], timestep=time_N, return_dict=False)[0]
        return made

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        every = text["text"].new_ones(text["text"].shape[:2])  # of the mask the pipeline checks the shape
        made: Tensor = pipe(
            prompt_embeds=text["text"], prompt_attention_mask=every, negative_prompt_embeds=empty["text"],
            negative_prompt_attention_mask=every, height=size, width=size, num_inference_steps=steps, guidance_scale=guidance,
            generator=generator, output_type="latent",
        ).images  # fmt: skip
        return made
