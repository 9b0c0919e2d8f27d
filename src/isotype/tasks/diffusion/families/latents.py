"""The forms of latents: what a family's VAE is given and gives, and what stands between its latents and the denoiser's.

Shapes: N pictures, C channels and H x W pixels of the denoiser's latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

Config = Mapping[str, Any]


class Latents:
    """A picture's VAE (AutoencoderKL): one factor and one offset for all channels."""

    vae: ClassVar[str] = "AutoencoderKL"

    def downscale(self, config: Config) -> int:
        """Pixels in a latent pixel, in each direction."""
        return int(2 ** (len(config["block_out_channels"]) - 1))

    def channels(self, config: Config) -> int:
        """C"""
        return int(config["latent_channels"])

    def encode(self, vae: Any, x_N3HW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the posterior as the denoiser sees it: fp32[N C H W] each.

        x_N3HW  pixels in [-1, 1], in the VAE's dtype
        """
        found = vae.encode(x_N3HW).latent_dist
        offset, factor = float(vae.config.shift_factor or 0.0), float(vae.config.scaling_factor)
        return (found.mean.float() - offset) * factor, found.std.float() * factor

    def decode(self, vae: Any, latents_NCHW: Tensor) -> Tensor:
        """F[N 3 H W] in the VAE's dtype."""
        unscaled = latents_NCHW / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        made: Tensor = vae.decode(unscaled.to(vae.dtype), return_dict=False)[0]
        return made


class OfAVideo(Latents):
    """A video's VAE on one frame, with an offset and a factor for each channel (Qwen-Image)."""

    vae = "AutoencoderKLQwenImage"

    def downscale(self, config: Config) -> int:
        return int(2 ** len(config["temperal_downsample"]))

    def channels(self, config: Config) -> int:
        return int(config["z_dim"])

    def encode(self, vae: Any, x_N3HW: Tensor) -> tuple[Tensor, Tensor]:
        found = vae.encode(x_N3HW[:, :, None]).latent_dist
        offset, deviation = _by_channel(vae, x_N3HW.device)
        return (found.mean[:, :, 0].float() - offset) / deviation, found.std[:, :, 0].float() / deviation

    def decode(self, vae: Any, latents_NCHW: Tensor) -> Tensor:
        offset, deviation = _by_channel(vae, latents_NCHW.device)
        unscaled = (latents_NCHW * deviation + offset).to(vae.dtype)
        made: Tensor = vae.decode(unscaled[:, :, None], return_dict=False)[0]
        return made[:, :, 0]


def _by_channel(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """fp32[C 1 1] each: the mean and the deviation of the VAE's latents, in its configuration."""
    mean, deviation = (torch.tensor(values, device=device)[:, None, None] for values in (vae.config.latents_mean, vae.config.latents_std))
    return mean, deviation


class Deterministic(Latents):
    """A deep compression autoencoder, which has no posterior (Sana)."""

    vae = "AutoencoderDC"

    def downscale(self, config: Config) -> int:
        return int(2 ** (len(config["encoder_block_out_channels"]) - 1))

    def encode(self, vae: Any, x_N3HW: Tensor) -> tuple[Tensor, Tensor]:
        mean = vae.encode(x_N3HW).latent.float() * vae.config.scaling_factor
        return mean, torch.zeros_like(mean)

    def decode(self, vae: Any, latents_NCHW: Tensor) -> Tensor:
        made: Tensor = vae.decode((latents_NCHW / vae.config.scaling_factor).to(vae.dtype), return_dict=False)[0]
        return made


class Patched(Latents):
    """2 x 2 latent pixels in one, normalised by the VAE's running statistics (Flux.2)."""

    vae = "AutoencoderKLFlux2"

    def downscale(self, config: Config) -> int:
        return 2 * super().downscale(config)

    def channels(self, config: Config) -> int:
        return 4 * super().channels(config)

    def encode(self, vae: Any, x_N3HW: Tensor) -> tuple[Tensor, Tensor]:
        found = vae.encode(x_N3HW).latent_dist
        _, deviation = _running(vae)
        return self.normalised(vae, patched(found.mean.float())), patched(found.std.float()) / deviation

    def normalised(self, vae: Any, patched_NCHW: Tensor) -> Tensor:
        """fp32[N C H W]: the VAE's latents, patched, as the denoiser sees them."""
        offset, deviation = _running(vae)
        return (patched_NCHW - offset) / deviation

    def decode(self, vae: Any, latents_NCHW: Tensor) -> Tensor:
        offset, deviation = _running(vae)
        made: Tensor = vae.decode(unpatched(latents_NCHW * deviation + offset).to(vae.dtype), return_dict=False)[0]
        return made


def _running(vae: Any) -> tuple[Tensor, Tensor]:
    """fp32[C 1 1] each."""
    deviation = (vae.bn.running_var.float() + vae.config.batch_norm_eps).sqrt()
    return vae.bn.running_mean.float()[:, None, None], deviation[:, None, None]


def patched(x_NCHW: Tensor) -> Tensor:
    """F[N C H W] -> F[N 4C H/2 W/2], channel first, then row and column in the patch."""
    n, c, h, w = x_NCHW.shape
    return x_NCHW.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, 4 * c, h // 2, w // 2)


def unpatched(x_NCHW: Tensor) -> Tensor:
    """The inverse of `patched`."""
    n, c, h, w = x_NCHW.shape
    return x_NCHW.reshape(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // 4, 2 * h, 2 * w)
