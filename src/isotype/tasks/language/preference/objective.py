"""dpo, ipo, simpo, orpo and cpo: what a language run does with preference pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....config.kind import WITH_REFERENCE
from ....config.schema import RunConfig
from ....data.formats import FormatName
from ....data.pairs import Labelled, Pairs
from ....data.rows import LoadedData, Share
from ....data.tokens import TokenRows
from ....distributed.world import World
from ....errors import UsageError
from ....precision.precision import Precision
from ....training.feed import RowStream
from ....training.task import Check, Feed, Words, micro_batch
from ..batches import Batch, longest_of
from ..checks import CHECKS
from ..objective import Beside
from .batch import PairBatch, answer_log_probs, collate_pairs
from .losses import Answers, judged
from .reference import Header, add_reference

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")  # of models that call the function themselves
LOGPS = ("logps/chosen", "logps/rejected")


class Preference:
    """Learns from pairs. A step's loss is the mean over its pairs."""

    words = Words(
        units="tokens", unit="tok", weight="pairs", row="pair", evaluated="pairs", measures=REWARDS + LOGPS,
        live=("rewards/margins", "rewards/accuracies"),
    )  # fmt: skip
    format: FormatName | None = "preference"
    each = 2
    scored = False

    train: Pairs | Labelled
    eval: Pairs | Labelled

    def __init__(self, config: RunConfig) -> None:
        self.config, self.name = config, config.train.objective
        self.beside_reference = self.name in WITH_REFERENCE

    def check(self) -> None:
        data, adapter, aux_loss = self.config.data, self.config.adapter, self.config.train.aux_loss
        reasons = {
            "data.packing: true": ("each answer is judged as a whole", data.packing),
            "data.stream: true": ("all its rows are read before training", data.stream),
            "data.loss_on: all": ("an answer is judged, not its prompt", data.loss_on == "all"),
            f"train.aux_loss: {aux_loss}": ("its loss judges answers, and no balancing loss beside it", bool(aux_loss)),
            f"adapter.dropout: {adapter.dropout:g}": (
                "the reference has no dropout, so that the first step would already differ", self.beside_reference and adapter.dropout > 0
            ),
        }  # fmt: skip
        for setting, (reason, given) in reasons.items():
            if given:
                key = setting.partition(":")[0]
                raise UsageError(f"train.objective: {self.name} cannot run with {setting}: {reason}", fix=f"leave out {key}")

    def take(self, data: LoadedData) -> None:
        self._refuse_pictures(data)
        self.train, self.eval = Pairs(cast(TokenRows, data.train)), Pairs(cast(TokenRows, data.eval))
        self.shares: Sequence[Share] = [Share(share.rows // 2, share.weight) for share in data.shares]
        self.fingerprints = data.fingerprints()

    def _refuse_pictures(self, data: LoadedData) -> None:
        if data.pictures is not None:
            raise UsageError(
                f"train.objective: {self.name} with pictures is not offered", fix="train.objective: sft, or rows without pictures"
            )

    def check_model(self, model: nn.Module) -> None:
        if not self.beside_reference:
            return
        for name, module in model.named_modules():
            shares = [module.p] if isinstance(module, nn.Dropout) else [getattr(module, name, 0.0) for name in DROPOUTS]
            dropped = max(share for share in (*shares, 0.0) if isinstance(share, float))
            if dropped > 0:
                raise UsageError(
                    f"train.objective: {self.name} cannot train a model with dropout ({name}: {dropped:g}): the reference has none",
                    fix="set it to 0 in the model's config.json",
                )

    def beside(self, tokenizer: Any, precision: Precision, device: torch.device | None) -> Beside:
        return Beside()

    def feed(self) -> Feed[Any]:
        return RowStream(self.train, seed=self.config.train.seed, shuffle=self.config.data.shuffle, shares=self.shares)

    def largest(self, count: int) -> list[Any]:
        return longest_of(self.train, count)

    def collate(self, rows: Sequence[Any], *, pad_id: int, device_type: str) -> Any:
        return collate_pairs(rows, pad_id=pad_id, device_type=device_type)

    def outlined(self, batch: Batch) -> Any:
        return PairBatch(batch, torch.empty(batch.rows, device=batch.input_ids.device), None)

    def loss_sum(self, model: nn.Module, batch: Any, divisor: int = 1, *, dtype: str) -> Tensor:
        """fp32[1 + measures]. A reference that is not known yet is taken to be the model itself, as it is in the first step."""
        logps = answer_log_probs(model, batch.answers, dtype=dtype)
        reference = batch.reference if batch.reference is not None else logps.detach()
        if not self.beside_reference:
            reference = torch.zeros_like(logps)
        both = (logps, reference, batch.lengths)
        made = judged(self.name, self.config.preference, Answers(*(values[side::2] for values in both for side in (0, 1))))
        chosen, rejected = made.chosen_rewards, made.rejected_rewards
        measures = (chosen, rejected, (chosen > rejected).float(), chosen - rejected, made.chosen_logps, made.rejected_logps)
        return torch.stack([made.losses.sum(), *(values.detach().sum() for values in measures)]) / divisor

    def reference_log_probs(self, model: nn.Module, batch: Any, *, dtype: str) -> Tensor:
        """fp32[2 B]: two values a row of the data."""
        return answer_log_probs(model, batch.answers, dtype=dtype)

    def before_step(self, model: nn.Module, batches: Iterable[Any], world: World, *, dtype: str) -> Iterable[Any]:
        return batches

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        return CHECKS

    def before_training(self, model: nn.Module, device: torch.device, folder: Path, world: World, *, pad_id: int, dtype: str) -> Header:
        if not self.beside_reference:
            return []

        def log_probs(rows: Sequence[Any]) -> list[float]:
            batch = self.collate(rows, pad_id=pad_id, device_type=device.type).to(device)
            found: list[float] = self.reference_log_probs(model, batch, dtype=dtype).tolist()
            return found

        return add_reference(
            model, self.train, self.eval, log_probs=log_probs, batch_size=micro_batch(self.config.train), fingerprints=self.fingerprints,
            folder=folder, world=world,
        )  # fmt: skip
