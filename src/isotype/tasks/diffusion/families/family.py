"""What differs between diffusers' model families, as training needs it.

Shapes: N pictures, C latent channels, H x W latent pixels, S text tokens, D text width.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn


class Family:
    """One family. Latents are what the VAE gives after its own shift and scale, whatever the denoiser takes.

    pipeline         the `_class_name` in model_index.json, a class of diffusers
    time_scale       where the denoiser rounds its noise level to the dtype of its hidden states: what it multiplies the level by before
                     the sinusoidal embedding (`exact_time`); None where it takes the level as given
    downscale        latent pixels that the denoiser puts into one token, in each direction
    max_text_length  longest caption of the T5 encoder by default
    encoders         the names of text encoders and tokenizers in the folder
    """

    pipeline: ClassVar[str]
    time_scale: ClassVar[float | None] = None
    downscale: ClassVar[int] = 2
    max_text_length: ClassVar[int]
    encoders: ClassVar[tuple[str, ...]]

    def text_tokens(self, clip_length: int, max_length: int) -> int:
        """S, from the lengths of the CLIP tokenizer and of T5's sequence."""
        return max_length

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        """`text` F[N S D] and `pooled` F[N D] of the pipeline's own text encoders."""
        raise NotImplementedError

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, sigma_N: Tensor, text: dict[str, Tensor], *, guidance: float) -> Tensor:
        """The velocity F[N C H W] that the denoiser predicts for `noisy_NCHW` at noise level `sigma_N` in [0, 1]."""
        raise NotImplementedError

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        """Latents F[N C H W] from noise, as the denoiser sees them, through the pipeline's own denoising loop."""
        raise NotImplementedError
