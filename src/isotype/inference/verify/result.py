"""Writes the result of `isotype verify` as JSON or as lines for the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...model.card import CARD_FILE, replace_verified_section
from ...report.page import REPORT, write_report
from ...runs.checkpoint.atomic_folder import SEAL, replace_sealed_file, write_text
from ...runs.folder import RunFolder
from ...wording import pluralise
from ..loaded import LoadedRun
from .tensors import Difference

VERIFY_FILE = "verify.json"  # in the run folder: file name -> the last result for this file
LINES_SHOWN = 8  # differences that are printed
SMALLEST_GAIN = 1e-3  # of the loss; less counts as nothing learnt
SMALLEST_SHOWN = 5e-5  # a change of the loss


@dataclass(frozen=True)
class Verification:
    """Contains the result of comparing a written file with the run from which it was written.

    file         the file's name
    description  the file's format, such as `GGUF, Q8_0`
    base_loss, trained_loss, file_loss  losses in fp32; file_loss is None if values are not finite
    noise        the standard error of the difference between base_loss and trained_loss, estimated
                 from the rows
    kept         the share of the run's improvement in loss that the file keeps; None if these rows
                 show no improvement
    min_kept     the smallest value of `kept` with which the file counts as the trained model
    agreement    the share of labelled tokens for which the file and the trained model predict the
                 same token
    rows, tokens, row_source  the rows of the comparison, and whether they were held out
    losses_by_cause  how much each cause increases the loss, by the name of the cause
    differences  tensors and settings that differ
    notes        messages about things that could not be compared
    """

    file: str
    description: str
    base_loss: float
    trained_loss: float
    file_loss: float | None
    noise: float
    kept: float | None
    min_kept: float
    agreement: float
    rows: int
    tokens: int
    row_source: str
    losses_by_cause: Mapping[str, float] = field(default_factory=dict)
    differences: Sequence[Difference] = ()
    notes: Sequence[str] = ()

    @property
    def is_worse(self) -> bool:
        """Returns True if the file is worse than the trained model. The file is worse if it keeps a
        smaller share of the run's improvement than `--keep` asks for. If the improvement cannot be
        measured, the file is worse if its loss is higher.
        """
        if self.file_loss is None:
            return True
        if self.kept is not None:
            return self.kept < self.min_kept
        return self.file_loss - self.trained_loss > 2 * self.noise + 0.01

    @property
    def is_same(self) -> bool:
        return not self.differences and not self.is_worse

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.is_same,
            "summary": self.result_sentence(),
            "kept": self.kept,
            "loss": {
                "base": self.base_loss,
                "trained": self.trained_loss,
                "served": self.file_loss,
            },
            "noise": self.noise,
            "agreement": self.agreement,
            "causes": dict(self.losses_by_cause),
            "differences": [difference.to_json() for difference in self.differences],
            "notes": list(self.notes),
            "rows": {"count": self.rows, "tokens": self.tokens, "source": self.row_source},
            "file": self.file,
            "format": self.description,
            "min_kept": self.min_kept,
        }

    def lines(self) -> list[str]:
        """Returns the report for the terminal."""
        rows = f"{pluralise(self.rows, f'{self.row_source} row')}, {self.tokens:,} learnt tokens"
        file_loss = "not finite" if self.file_loss is None else f"{self.file_loss:.4f}"
        lines = [
            f"verified  {self.file} ({self.description}), read back and run in fp32 on {rows}",
            f"loss      base {self.base_loss:.4f}, trained {self.trained_loss:.4f}, this file"
            f" {file_loss}",
            f"kept      {self.kept_sentence()}",
            f"tokens    {self.agreement:.1%} of the most probable next tokens are those of the"
            " trained model",
        ]
        for cause, change in self.losses_by_cause.items():
            lines.append(f"cause     {cause}: {self._change_text(change)}")
        for difference in self.differences[:LINES_SHOWN]:
            lines.append(f"differs   {difference.name}: {difference.message}")
        hidden = len(self.differences) - LINES_SHOWN
        if hidden > 0:
            lines.append(f"          and {hidden} more; --json lists them all")
        lines += [f"note      {note}" for note in self.notes]
        lines.append(f"result    {self.result_sentence()}")
        return lines

    def _change_text(self, change: float) -> str:
        if abs(change) < SMALLEST_SHOWN:
            return "no change of the loss"
        text = f"loss {change:+.4f}"
        gain = self.base_loss - self.trained_loss
        if self.kept is None:
            return text
        return f"{text}, {abs(change) / gain:.1%} of what was learnt"

    def kept_sentence(self) -> str:
        if self.file_loss is None:
            return "unknown: the file's model gives losses that are not finite"
        if self.kept is not None:
            return f"{self.kept:.1%} of what the run learnt"
        gain = self.base_loss - self.trained_loss
        return (
            f"unknown: on these rows training changed the loss by {-gain:+.4f}, which is not more"
            f" than the draw of rows explains (±{max(2 * self.noise, SMALLEST_GAIN):.4f});"
            " --verify-rows takes more rows"
        )

    def result_sentence(self) -> str:
        """Returns a sentence that says whether the file is the trained model and, if not, what to
        do.
        """
        if self.is_same:
            return "the file is the trained model, within the rounding of its type"
        parts = []
        if self.differences:
            number = pluralise(len(self.differences), "difference")
            parts.append(f"the file is not what was trained: {number}; export it again")
        if self.is_worse and self.kept is not None:
            parts.append(f"it keeps less than --keep {self.min_kept:g}: {self._advice()}")
        elif self.is_worse:
            parts.append(f"its loss is higher than the trained model's: {self._advice()}")
        return "; ".join(parts)

    def _advice(self) -> str:
        if self.file_loss is None:
            return "--type BF16 has a wider range"
        if "F32" in self.description or "fp32" in self.description:
            return "the differences above are the cause"
        if "F16" in self.description or "bf16" in self.description or "fp16" in self.description:
            return (
                "isotype merge --dtype fp32 keeps all of it; a higher learning rate of the adapter"
                " makes a change that survives the rounding"
            )
        wider = "fp8 or int8" if self.description.startswith("folder") else "Q8_0 or BF16"
        return (
            f"--type {wider} rounds less; a higher learning rate of the adapter makes a change"
            " that survives the rounding"
        )


def store_result(run: LoadedRun, name: str, result: Mapping[str, Any]) -> None:
    """Writes a result into verify.json of the run folder, where it replaces an earlier result of
    the same name. Writes the run's report and the card of the run's result again, if there are any.
    Does nothing if the folder is not a run folder.

    name  the name of the file, or the address of the server
    """
    folder = run.folder
    if not RunFolder(folder).is_run:
        return
    results = RunFolder(folder).read_json(VERIFY_FILE)
    results[name] = dict(result)
    write_text(folder / VERIFY_FILE, json.dumps(results, indent=1) + "\n")
    if (folder / REPORT).is_file():
        write_report(folder)
    saved = folder / run.weights_name
    card = saved / CARD_FILE
    if card.is_file() and (saved / SEAL).is_file():
        text = replace_verified_section(card.read_text(encoding="utf-8"), results)
        replace_sealed_file(saved, CARD_FILE, text)


def kept_share(base: float, trained: float, file: float, noise: float) -> float | None:
    """Returns the share of the improvement that the file keeps, (base - file) / (base - trained).
    Returns None if training lowered the loss by no more than twice the standard error, or by less
    than SMALLEST_GAIN.
    """
    gain = base - trained
    if not math.isfinite(file) or gain <= max(2 * noise, SMALLEST_GAIN):
        return None
    return (base - file) / gain
