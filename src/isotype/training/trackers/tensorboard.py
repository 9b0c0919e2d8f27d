"""TensorBoard: writes event files into RUN/tensorboard. A resumed run hides the points of the steps that it repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...config.yaml_text import write_value
from ..task import Sample


class TensorBoard:
    """Opens its file at the first row, whose step tells where a resumed run continues."""

    name = "tensorboard"

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder / "tensorboard", settings
        self._writer: Any = None
        self.address = f"tensorboard --logdir {folder}"

    def _open(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step if step else None)
            rows = [
                f"| {section}.{key} | {write_value(value)} |" for section, part in self._settings.items() for key, value in part.items()
            ]
            self._writer.add_text("settings", "\n".join(["| key | value |", "|---|---|", *rows]), step)
        return self._writer

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        writer = self._open(step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a killed run keeps its curves

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for i, one in enumerate(samples):
            # four spaces: Markdown leaves what a model wrote as it is
            asked, made = one.lines()
            said = "\n".join("    " + line for line in (made or "(nothing)").splitlines())
            self._open(step).add_text(f"samples/{i}", f"**{asked}**\n\n{said}", step)

    def close(self, exit_status: int) -> None:
        if self._writer is not None:
            self._writer.close()
