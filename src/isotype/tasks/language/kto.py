"""Implements the objective `kto`, which learns from answers that are labelled as wanted or
unwanted.

The loss of an answer is w * (1 - sigmoid(h)). For a wanted answer, h = beta * (c - cr - z). For an
unwanted answer, h = beta * (z - (c - cr)).

w       the weight of wanted answers or of unwanted answers
c, cr   the log-probability of the answer under the model, and under the reference. The reference is
        the model at the start of the run
z       max(0, mean of p - pr) over a whole step, computed without gradient. It is an estimate of
        how much the model differs from the reference
p, pr   the log-probabilities of the answer's partner under the model and under the reference. The
        partner is the same prompt with the answer to another prompt
Source  Ethayarajh et al. 2024, equation 8
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...data.pairs import Answer, LabelledAnswers
from ...data.row_keys import FormatName
from ...data.rows import LoadedData, format_row
from ...data.tokens import TokenRows
from ...distributed.world import World
from ...errors import UsageError
from ...training.task import HeaderRows, IdleBatch, MetricNames, eval_mode
from ...wording import pluralise
from .batches import Batch, collate
from .preference import BatchOfAnswers, Preference, answer_log_probs, stack_references

KTO_MEASURES = (
    "wanted",
    "chosen",
    "rejected",
    "chosen logps",
    "rejected logps",
    "rewards/accuracies",
    "kl",
)


def kto_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Computes the same metrics as TRL for a step or an evaluation. `sums` contains the mean of
    each measured value over all answers of the step or evaluation. If there are no wanted answers,
    the metrics for wanted answers are left out. If there are no unwanted answers, the metrics for
    unwanted answers are left out.
    """
    metrics = {name: sums[name] for name in ("rewards/accuracies", "kl")}
    for side, share in (("chosen", sums["wanted"]), ("rejected", 1.0 - sums["wanted"])):
        if share > 1e-9:
            metrics |= {
                f"rewards/{side}": sums[side] / share,
                f"logps/{side}": sums[f"{side} logps"] / share,
            }
    if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics


@dataclass(frozen=True)
class AnswerBatch(BatchOfAnswers):
    """A batch of labelled answers. Each answer has a partner, which is the same prompt with the
    answer to another prompt.

    answers, partners             B rows each
    desirable          bool[B]    whether the answer is wanted
    reference          fp32[2 B]  log-probabilities under the reference, for each answer followed by
                                  its partner; None until they are computed
    reference_point    fp32[]     the value z of the whole step; None until `prepare_step` is called
    """

    answers: Batch
    partners: Batch
    desirable: Tensor
    reference: Tensor | None
    reference_point: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.desirable)

    def __str__(self) -> str:
        return f"{pluralise(self.rows, 'answer')} of {pluralise(self.input_ids.shape[1], 'token')}"


class Kto(Preference):
    """The objective `kto`. The loss of a step is the mean over its answers."""

    metric_names = MetricNames(
        units="tokens",
        unit="tok",
        weight="answers",
        row_noun="answer",
        eval_weight="answers",
        measures=KTO_MEASURES,
        compute_metrics=kto_metrics,
        live_line=("rewards/margins", "kl"),
    )
    format: FormatName | None = "labelled"
    answers_per_row = 1

    def set_data(self, data: LoadedData) -> None:
        self._refuse_pictures(data)
        rows = cast(TokenRows, data.train)
        evaluation = cast(TokenRows, data.eval)
        labels = rows.column("wanted")
        if labels.all() or not labels.any():
            raise UsageError(
                f"every training answer is labelled {'true' if labels.all() else 'false'}, and"
                " kto learns from both",
                fix="rows of the other label"
                + ("; train.objective: sft learns wanted answers" if labels.all() else ""),
            )
        seed = self.config.train.seed
        length = self.config.data.max_length
        self.train = LabelledAnswers(rows, rows, seed=seed, max_length=length)
        self.eval = LabelledAnswers(evaluation, rows, seed=seed, max_length=length)
        self.shares = data.shares
        fingerprints = data.fingerprints()
        self.fingerprints = {name: f"{value}, seed {seed}" for name, value in fingerprints.items()}
        self.fingerprints["evaluation"] += f", partners of {fingerprints['training']}"

    def describe_example(self, data: LoadedData, tokenizer: Any) -> HeaderRows:
        label = "wanted" if cast(TokenRows, data.train).column("wanted")[0] else "unwanted"
        answer_text = format_row(data.train[0], tokenizer)
        return [(label, f"the first answer, between >>> and <<<:\n{answer_text}")]

    def collate(self, rows: Sequence[Answer], *, pad_id: int, device_type: str) -> AnswerBatch:
        answers, partners = (
            collate(side, pad_id=pad_id, device_type=device_type)
            for side in zip(*((answer.row, answer.partner) for answer in rows))
        )
        return AnswerBatch(
            answers,
            partners,
            torch.tensor([answer.is_wanted for answer in rows]),
            stack_references(rows),
        )

    def outline_batch(self, batch: Batch) -> AnswerBatch:
        labels = torch.empty(batch.rows, dtype=torch.bool, device=batch.input_ids.device)
        return AnswerBatch(batch, batch, labels, None)

    def reference_log_probs(self, model: nn.Module, batch: AnswerBatch, *, dtype: str) -> Tensor:
        sides = [
            answer_log_probs(model, rows, dtype=dtype) for rows in (batch.answers, batch.partners)
        ]
        return torch.stack(sides, 1).flatten()

    def prepare_step(
        self, model: nn.Module, batches: Iterable[Any], world: World, *, dtype: str
    ) -> Iterable[Any]:
        """Computes the reference point z of a step or of an evaluation, and adds it to the batches."""
        batch_list = list(batches)
        drifts = []
        count = 0.0
        with eval_mode(model):
            for batch in batch_list:
                inner_batch: Any = batch.batch if isinstance(batch, IdleBatch) else batch
                partners = answer_log_probs(model, inner_batch.partners, dtype=dtype)
                if inner_batch.reference is None:
                    drift = torch.zeros_like(partners)
                else:
                    drift = partners - inner_batch.reference[1::2]
                drifts.append(drift.sum() * (0.0 if isinstance(batch, IdleBatch) else 1.0))
                count += batch.weight
        total = torch.stack(drifts).sum()
        if world.size > 1:
            global_total, count = world.sum([float(total), count])
            total = torch.full_like(total, global_total)
        reference_point = (total / max(1.0, count)).clamp(min=0.0)

        def set_reference_point(batch: Any) -> Any:
            if isinstance(batch, IdleBatch):
                return IdleBatch(set_reference_point(batch.batch))
            return replace(batch, reference_point=reference_point)

        return [set_reference_point(batch) for batch in batch_list]

    def loss_sum(
        self, model: nn.Module, batch: AnswerBatch, divisor: int = 1, *, dtype: str
    ) -> Tensor:
        """Returns the sum of the losses, followed by the sum of each value that is logged, fp32[1 +
        measures]. If the reference values are not computed yet, the log-probabilities of the model
        itself are used. In the first step, the model and the reference are the same.
        """
        logps = answer_log_probs(model, batch.answers, dtype=dtype)
        section = self.config.preference
        gain = logps - (logps.detach() if batch.reference is None else batch.reference[::2])
        reference_point = (
            torch.zeros((), device=gain.device)
            if batch.reference_point is None
            else batch.reference_point
        )
        h = torch.where(batch.desirable, gain - reference_point, reference_point - gain)
        weights = torch.where(batch.desirable, section.desirable_weight, section.undesirable_weight)
        losses = weights * torch.sigmoid(-section.beta * h)
        desirable = batch.desirable.float()
        rewards = section.beta * gain.detach()
        detached_logps = logps.detach()
        undesirable = 1.0 - desirable
        measures = (
            desirable,
            rewards * desirable,
            rewards * undesirable,
            detached_logps * desirable,
            detached_logps * undesirable,
            (h.detach() > 0).float(),
            reference_point.expand_as(desirable),
        )
        return torch.stack([losses.sum(), *(values.sum() for values in measures)]) / divisor
