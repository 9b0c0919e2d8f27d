"""`kto`: learns from answers with a label. Source: Ethayarajh et al. 2024, equation 8.

h = beta (c - cr - z) of a wanted answer, beta (z - (c - cr)) of an unwanted one; its loss is w (1 -
sigmoid(h)), w its side's weight
c, cr  log-probability of the answer, and that under the model as the run starts
z      max(0, mean of p - pr) of the partners of a whole step, without gradient: an estimate of how
       far the model is from its start
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...data.formats import FormatName
from ...data.pairs import Answer, Labelled
from ...data.rows import LoadedData
from ...data.tokens import TokenRows
from ...distributed.world import World
from ...errors import UsageError
from ...training.task import Idle, MetricNames, eval_mode
from ...wording import pluralise
from .batches import Batch, collate
from .preference import OfAnswers, Preference, answer_log_probs, references

PARTS = (
    "wanted",
    "chosen",
    "rejected",
    "chosen logps",
    "rejected logps",
    "rewards/accuracies",
    "kl",
)


def named(sums: Mapping[str, float]) -> dict[str, float]:
    """TRL's metrics of a step or an evaluation from its means over all answers; a side without
    answers has none.
    """
    found = {name: sums[name] for name in ("rewards/accuracies", "kl")}
    for side, share in (("chosen", sums["wanted"]), ("rejected", 1.0 - sums["wanted"])):
        if share > 1e-9:
            found |= {
                f"rewards/{side}": sums[side] / share,
                f"logps/{side}": sums[f"{side} logps"] / share,
            }
    if "rewards/chosen" in found and "rewards/rejected" in found:
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


@dataclass(frozen=True)
class AnswerBatch(OfAnswers):
    """answers, partners  B rows each
    wanted             bool[B]
    reference          fp32[2 B]  of each answer and its partner in turn, under the model as the run
                       starts; None where not known
    point              fp32[]     z, once the whole step's is known
    """

    answers: Batch
    partners: Batch
    wanted: Tensor
    reference: Tensor | None
    point: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.wanted)

    def __str__(self) -> str:
        return f"{pluralise(self.rows, 'answer')} of {pluralise(self.input_ids.shape[1], 'token')}"


class FromLabels(Preference):
    """Learns from labels. A step's loss is the mean over its answers."""

    metric_names = MetricNames(
        units="tokens",
        unit="tok",
        weight="answers",
        row="answer",
        eval_weight="answers",
        measures=PARTS,
        derive=named,
        live=("rewards/margins", "kl"),
    )
    format: FormatName | None = "labelled"
    each = 1

    def take(self, data: LoadedData) -> None:
        self._refuse_pictures(data)
        rows = cast(TokenRows, data.train)
        evaluation = cast(TokenRows, data.eval)
        wanted = rows.column("wanted")
        if wanted.all() or not wanted.any():
            raise UsageError(
                f"every training answer is labelled {'true' if wanted.all() else 'false'}, and kto"
                " learns from both",
                fix="rows of the other label"
                + ("; train.objective: sft learns wanted answers" if wanted.all() else ""),
            )
        seed = self.config.train.seed
        length = self.config.data.max_length
        self.train = Labelled(rows, rows, seed=seed, max_length=length)
        self.eval = Labelled(evaluation, rows, seed=seed, max_length=length)
        self.shares = data.shares
        found = data.fingerprints()
        self.fingerprints = {name: f"{value}, seed {seed}" for name, value in found.items()}
        self.fingerprints["evaluation"] += f", partners of {found['training']}"

    def collate(self, rows: Sequence[Answer], *, pad_id: int, device_type: str) -> AnswerBatch:
        own, partners = (
            collate(side, pad_id=pad_id, device_type=device_type)
            for side in zip(*((a.row, a.partner) for a in rows))
        )
        return AnswerBatch(
            own, partners, torch.tensor([answer.wanted for answer in rows]), references(rows)
        )

    def outlined(self, batch: Batch) -> AnswerBatch:
        wanted = torch.empty(batch.rows, dtype=torch.bool, device=batch.input_ids.device)
        return AnswerBatch(batch, batch, wanted, None)

    def reference_log_probs(self, model: nn.Module, batch: AnswerBatch, *, dtype: str) -> Tensor:
        sides = [
            answer_log_probs(model, rows, dtype=dtype) for rows in (batch.answers, batch.partners)
        ]
        return torch.stack(sides, 1).flatten()

    def prepare_step(
        self, model: nn.Module, batches: Iterable[Any], world: World, *, dtype: str
    ) -> Iterable[Any]:
        """Gives the batches of a step, or of an evaluation, their reference point."""
        held = list(batches)
        drifts = []
        count = 0.0
        with eval_mode(model):
            for batch in held:
                inner: Any = batch.batch if isinstance(batch, Idle) else batch
                partners = answer_log_probs(model, inner.partners, dtype=dtype)
                if inner.reference is None:
                    drift = torch.zeros_like(partners)
                else:
                    drift = partners - inner.reference[1::2]
                drifts.append(drift.sum() * (0.0 if isinstance(batch, Idle) else 1.0))
                count += batch.weight
        total = torch.stack(drifts).sum()
        if world.size > 1:
            whole, count = world.sum([float(total), count])
            total = torch.full_like(total, whole)
        point = (total / max(1.0, count)).clamp(min=0.0)

        def placed(batch: Any) -> Any:
            if isinstance(batch, Idle):
                return Idle(placed(batch.batch))
            return replace(batch, point=point)

        return [placed(batch) for batch in held]

    def loss_sum(
        self, model: nn.Module, batch: AnswerBatch, divisor: int = 1, *, dtype: str
    ) -> Tensor:
        """fp32[1 + measures]. A reference that is not known yet is taken to be the model itself, as
        it is in the first step.
        """
        logps = answer_log_probs(model, batch.answers, dtype=dtype)
        section = self.config.preference
        gain = logps - (logps.detach() if batch.reference is None else batch.reference[::2])
        point = torch.zeros((), device=gain.device) if batch.point is None else batch.point
        h = torch.where(batch.wanted, gain - point, point - gain)
        weights = torch.where(batch.wanted, section.desirable_weight, section.undesirable_weight)
        losses = weights * torch.sigmoid(-section.beta * h)
        yes = batch.wanted.float()
        rewards = section.beta * gain.detach()
        said = logps.detach()
        no = 1.0 - yes
        measures = (
            yes,
            rewards * yes,
            rewards * no,
            said * yes,
            said * no,
            (h.detach() > 0).float(),
            point.expand_as(yes),
        )
        return torch.stack([losses.sum(), *(values.sum() for values in measures)]) / divisor
