"""Makes batches of rows. It reads the encoded latents and texts. For each row, it chooses at random
the noise, the noise level, the window, whether the picture is mirrored, and the caption.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

from ...dtypes import format_dtype, to_torch
from .batches import Batch, DrawnRow, PlacedRow, Row, row_generator, stack_rows
from .encode import Store, entry_controls
from .loss import EvaluationDraw
from .resolved_run import ResolvedRun


class BatchMaker:
    """Makes training and evaluation batches.

    observed  a mapping to which the dtypes of the batches are added. It maps a key of `precision`
              and the name of a tensor to the dtype
    """

    def __init__(
        self, run: ResolvedRun, store: Store, observed: MutableMapping[tuple[str, str], str]
    ) -> None:
        self.run = run
        self.store = store
        self.observed = observed

    def make_training_batch(self, rows: Sequence[PlacedRow]) -> Batch:
        """Makes a batch of rows of one shape. All random numbers of a row depend only on the seed
        and on the row's position in the stream.
        """
        return self._stack([self._draw_training_row(placed) for placed in rows])

    def _draw_training_row(self, placed_row: PlacedRow) -> DrawnRow:
        config = self.run.config
        row = placed_row.row
        generator = row_generator("train", config.train.seed, placed_row.position)
        sigma = self.run.objective.draw(
            generator, self.run.sizes.count_tokens(row.size, row.latent_frames)
        )
        dropout_draw, mirror_draw, window_draw, caption_draw = torch.rand(
            4, generator=generator
        ).tolist()
        keys = row.mirrored if row.mirrored and mirror_draw < 0.5 else row.latents
        entry = self.store.get(keys[int(window_draw * len(keys))])
        eps, noise = (torch.randn(entry["mean"].shape, generator=generator) for _ in range(2))
        if (offset := config.diffusion.noise_offset) > 0:
            noise = noise + offset * torch.randn(len(noise), 1, 1, generator=generator)
        if dropout_draw < config.images.caption_dropout:
            text = row.empty
        else:
            text = row.text[int(caption_draw * len(row.text))]
        latents = entry["mean"] + entry["std"] * eps
        return self._drawn_row(row, entry, latents, noise, sigma, text)

    def make_evaluation_batch(self, draws: Sequence[EvaluationDraw]) -> Batch:
        """Makes a batch for an evaluation, without random choices. For each row, it uses the first
        window, with the mean of the VAE's posterior, and the first caption. The noise depends only
        on the seed and on the number of the draw.
        """
        drawn = []
        for number, row, level in draws:
            entry = self.store.get(row.latents[0])
            generator = row_generator("evaluation", self.run.config.train.seed, number)
            noise = torch.randn(entry["mean"].shape, generator=generator)
            drawn.append(self._drawn_row(row, entry, entry["mean"], noise, level, row.text[0]))
        return self._stack(drawn)

    def _drawn_row(
        self,
        row: Row,
        entry: dict[str, Tensor],
        latents_CHW: Tensor,
        noise_CHW: Tensor,
        sigma: float,
        text: str,
    ) -> DrawnRow:
        return DrawnRow(
            latents_CHW,
            noise_CHW,
            sigma,
            self.store.get(text),
            entry["cut"],
            entry.get("mask"),
            row.weight,
            entry_controls(entry),
        )

    def _stack(self, drawn: Sequence[DrawnRow]) -> Batch:
        batch = stack_rows(
            drawn,
            dtype=to_torch(self.run.precision.latents),
            keeps_text_lengths=self.run.family.keeps_text_lengths,
        )
        for name in ("latents", "noise", "sigma"):
            self.observed["latents", name] = format_dtype(getattr(batch, name).dtype)
        return batch
