"""Implements the objectives dpo, ipo, simpo, orpo, cpo and reward, which learn from preference
pairs. This module makes their batches and computes their losses. It also computes the reference
log-probabilities, which come from the model at the start of the run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...config.kind import REFERENCE_OBJECTIVES
from ...config.schema import PreferenceSection, RunConfig
from ...data.pairs import LabelledAnswers, Pairs
from ...data.progress import track_progress
from ...data.row_keys import FormatName
from ...data.rows import LoadedData, RowStream, Share, format_row
from ...data.tokens import TokenRows
from ...distributed.agree import fingerprint_of_weights
from ...distributed.world import World
from ...errors import UsageError
from ...optimize.head import compute_loss
from ...precision.parts import local_part
from ...training.task import (
    Check,
    Feed,
    HeaderRows,
    MetricNames,
    eval_mode,
    evaluation_batch_size,
)
from ...wording import pluralise
from .batches import Batch, collate, longest_rows, model_inputs, move_to_device, next_tokens
from .checks import CHECKS, check_end_token
from .objective import Objective, refuse_balancing_loss

# metrics of the rewards, with TRL's names
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
# attributes with the dropout of modules that call `torch.nn.functional.dropout`
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
LOGPS = ("logps/chosen", "logps/rejected")  # metrics of the log-probabilities, with TRL's names


class BatchOfAnswers:
    """The base class for batches of pairs and for batches of labelled answers. `answers` contains
    the rows of the model's input, and `rows` is the number of rows of the data.
    """

    answers: Batch

    @property
    def rows(self) -> int:
        raise NotImplementedError

    def to(self, device: torch.device) -> Any:
        return replace(cast(Any, self), **move_to_device(vars(self), device))

    @property
    def weight(self) -> int:
        return self.rows

    @property
    def units(self) -> int:
        return self.answers.tokens

    @property
    def input_ids(self) -> Tensor:
        return self.answers.input_ids

    @property
    def labels(self) -> Tensor:
        return self.answers.labels

    @property
    def inputs(self) -> dict[str, Any]:
        return self.answers.inputs


@dataclass(frozen=True)
class PairBatch(BatchOfAnswers):
    """A batch of preference pairs.

    answers               2 B rows, for each pair the chosen answer followed by the rejected answer
    lengths    fp32[2 B]  for each answer, the number of tokens that the model learns
    reference  fp32[2 B]  log-probabilities under the model at the start of the run; None if they
                          are not computed yet or not used
    """

    answers: Batch
    lengths: Tensor
    reference: Tensor | None

    @property
    def rows(self) -> int:
        return len(self.lengths) // 2

    def __str__(self) -> str:
        return f"{pluralise(self.rows, 'pair')} of {pluralise(self.input_ids.shape[1], 'token')}"


def stack_references(rows: Sequence[Any]) -> Tensor | None:
    """Stacks the reference log-probabilities of rows, two for each row, fp32[2 B]. Returns None if
    they are not computed yet.
    """
    values = [row.reference for row in rows if row.reference is not None]
    if len(values) == len(rows):
        return torch.tensor(values, dtype=torch.float32).flatten()
    return None


def answer_log_probs(model: nn.Module, batch: Batch, *, dtype: str) -> Tensor:
    """Returns, for each row, the sum of the log-probabilities of the tokens that the model learns,
    fp32[B]. The head computes logits only at the positions that predict these tokens.

    inside  log-probabilities of tokens are computed in `dtype`, and their sum in fp32
    """
    targets = next_tokens(batch, every_row=False)
    log_probs_N = compute_loss(
        model, model_inputs(model, batch), replace(targets, per_row=True, dtype=dtype)
    )
    assert batch.supervised_positions is not None
    log_probs_by_position = torch.zeros(batch.labels.numel(), device=log_probs_N.device).index_copy(
        0, batch.supervised_positions, log_probs_N.float()
    )
    return row_sums(log_probs_by_position.view(batch.labels.shape))


def row_sums(values_BT: Tensor) -> Tensor:
    """Returns the sum of each row, fp32[B]. This function adds the first half of each row to its
    second half, and repeats this until one number is left. In this way, padding with zeros does not
    change the result. The sum of a row is bit for bit the same in batches of any length.
    """
    length = values_BT.shape[1]
    width = 1 << max(0, length - 1).bit_length()
    values = F.pad(values_BT, (0, width - length))
    while width > 1:
        width //= 2
        values = values[:, :width] + values[:, width:]
    return values.squeeze(1)


class Preference(Objective):
    """The objectives that learn from pairs. The loss of a step is the mean over its pairs."""

    metric_names = MetricNames(
        units="tokens",
        unit="tok",
        weight="pairs",
        row_noun="pair",
        eval_weight="pairs",
        measures=REWARDS + LOGPS,
        live_line=("rewards/margins", "rewards/accuracies"),
    )
    format: FormatName | None = "preference"
    answers_per_row = 2

    train: Pairs | LabelledAnswers
    eval: Pairs | LabelledAnswers

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.name = config.train.objective
        self.has_reference = self.name in REFERENCE_OBJECTIVES

    def check(self) -> None:
        data = self.config.data
        adapter = self.config.adapter
        aux_loss = self.config.train.aux_loss
        reasons = {
            "data.packing: true": ("each answer is judged as a whole", data.packing),
            "data.stream: true": ("all its rows are read before training", data.stream),
            "data.loss_on: all": ("an answer is judged, not its prompt", data.loss_on == "all"),
            f"train.aux_loss: {aux_loss}": (
                "its loss judges answers, and no balancing loss beside it",
                bool(aux_loss),
            ),
            f"adapter.dropout: {adapter.dropout:g}": (
                "the reference has no dropout, so that the first step would already differ",
                self.has_reference and adapter.dropout > 0,
            ),
        }
        for setting, (reason, applies) in reasons.items():
            if applies:
                key = setting.partition(":")[0]
                raise UsageError(
                    f"train.objective: {self.name} cannot run with {setting}: {reason}",
                    fix=f"leave out {key}",
                )

    def set_data(self, data: LoadedData) -> None:
        self._refuse_pictures(data)
        self.train = Pairs(cast(TokenRows, data.train))
        self.eval = Pairs(cast(TokenRows, data.eval))
        self.shares: Sequence[Share] = [
            Share(share.rows // 2, share.weight) for share in data.shares
        ]
        self.fingerprints = data.fingerprints()

    def describe_example(self, data: LoadedData, tokenizer: Any) -> HeaderRows:
        chosen, rejected = (format_row(row, tokenizer) for row in data.train[:2])
        mark = rejected.find(">>>")
        return [
            ("chosen", f"the answer of the first pair between >>> and <<<:\n{chosen}"),
            ("rejected", rejected[mark:]),
        ]

    def _refuse_pictures(self, data: LoadedData) -> None:
        if data.pictures is not None:
            raise UsageError(
                f"train.objective: {self.name} with pictures is not offered",
                fix="train.objective: sft, or rows without pictures",
            )

    def check_model(self, model: nn.Module) -> None:
        refuse_balancing_loss(model, self.config.train.aux_loss, self.name)
        if not self.has_reference:
            return
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                shares = [module.p]
            else:
                shares = [getattr(module, name, 0.0) for name in DROPOUTS]
            dropout = max(share for share in (*shares, 0.0) if isinstance(share, float))
            if dropout > 0:
                raise UsageError(
                    f"train.objective: {self.name} cannot train a model with dropout ({name}:"
                    f" {dropout:g}): the reference has none",
                    fix="set it to 0 in the model's config.json",
                )

    def feed(self) -> Feed[Any]:
        return RowStream(
            self.train,
            seed=self.config.train.seed,
            shuffle=self.config.data.shuffle,
            shares=self.shares,
        )

    def largest_rows(self, count: int) -> list[Any]:
        return longest_rows(self.train, count)

    def collate(self, rows: Sequence[Any], *, pad_id: int, device_type: str) -> Any:
        answers = [answer for pair in rows for answer in (pair.chosen, pair.rejected)]
        lengths = torch.tensor([answer.supervised for answer in answers], dtype=torch.float32)
        return PairBatch(
            collate(answers, pad_id=pad_id, device_type=device_type),
            lengths,
            stack_references(rows),
        )

    def outline_batch(self, batch: Batch) -> Any:
        return PairBatch(batch, torch.empty(batch.rows, device=batch.input_ids.device), None)

    def loss_sum(self, model: nn.Module, batch: Any, divisor: int = 1, *, dtype: str) -> Tensor:
        """Returns the sum of the losses, followed by the sum of each value that is logged, fp32[1 +
        measures]. If the reference values are not computed yet, the log-probabilities of the model
        itself are used. In the first step, the model and the reference are the same.
        """
        logps = answer_log_probs(model, batch.answers, dtype=dtype)
        reference = batch.reference if batch.reference is not None else logps.detach()
        if not self.has_reference:
            reference = torch.zeros_like(logps)
        values_by_answer = (logps, reference, batch.lengths)
        terms = pair_losses(
            self.name,
            self.config.preference,
            PairLogProbs(*(values[side::2] for values in values_by_answer for side in (0, 1))),
        )
        chosen = terms.chosen_rewards
        rejected = terms.rejected_rewards
        measures = (
            chosen,
            rejected,
            (chosen > rejected).float(),
            chosen - rejected,
            terms.chosen_logps,
            terms.rejected_logps,
        )
        return (
            torch.stack([terms.losses.sum(), *(values.detach().sum() for values in measures)])
            / divisor
        )

    def reference_log_probs(self, model: nn.Module, batch: Any, *, dtype: str) -> Tensor:
        """Computes the reference log-probabilities of a batch, fp32[2 B]. There are two values for
        each row of the data.
        """
        return answer_log_probs(model, batch.answers, dtype=dtype)

    def prepare_training(
        self,
        model: nn.Module,
        device: torch.device,
        folder: Path,
        world: World,
        *,
        pad_id: int,
        dtype: str,
    ) -> HeaderRows:
        if not self.has_reference:
            return []

        def log_probs(rows: Sequence[Any]) -> list[float]:
            batch = self.collate(rows, pad_id=pad_id, device_type=device.type).to(device)
            values: list[float] = self.reference_log_probs(model, batch, dtype=dtype).tolist()
            return values

        return add_reference(
            model,
            self.train,
            self.eval,
            log_probs=log_probs,
            batch_size=evaluation_batch_size(self.config.train),
            fingerprints=self.fingerprints,
            folder=folder,
            world=world,
        )


class PairLogProbs(NamedTuple):
    """The log-probabilities and the lengths of the answers of B pairs, each fp32[B]. If the
    objective does not use a reference, the reference values are 0.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_reference: Tensor
    rejected_reference: Tensor
    chosen_length: Tensor
    rejected_length: Tensor


class PairLosses(NamedTuple):
    """The losses of B pairs, with the rewards and log-probabilities as TRL defines them. Each is
    fp32[B].
    """

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    chosen_logps: Tensor
    rejected_logps: Tensor


def pair_losses(objective: str, settings: PreferenceSection, log_probs: PairLogProbs) -> PairLosses:
    """Returns the losses of an objective. They include the negative log-likelihood per token of the
    chosen answer, multiplied by the setting `nll`.

    The reward of an answer is beta times the difference between its log-probabilities under the
    model and under the reference. If the objective does not use a reference, the reference's
    log-probability is 0. In this reward, the objectives simpo and orpo use the mean log-probability
    of an answer's tokens, and all other objectives use the sum.
    """
    beta = settings.beta
    smoothing = settings.label_smoothing
    c = log_probs.chosen - log_probs.chosen_reference
    r = log_probs.rejected - log_probs.rejected_reference
    logps = log_probs.chosen, log_probs.rejected
    if objective in ("simpo", "orpo"):
        c = c / log_probs.chosen_length
        r = r / log_probs.rejected_length
        logps = c, r
    if objective == "ipo":
        losses = (
            c / log_probs.chosen_length - r / log_probs.rejected_length - 1 / (2 * beta)
        ).square()
    elif objective == "simpo":
        losses = -F.logsigmoid(beta * (c - r) - settings.simpo_gamma)
    elif objective == "orpo":
        losses = -beta * F.logsigmoid((c - r) - (log1mexp(c) - log1mexp(r)))
    else:
        h = beta * (c - r)
        if smoothing:
            losses = -(1 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)
        else:
            losses = -F.logsigmoid(h)
    weight = float(objective in ("orpo", "cpo")) if settings.nll is None else settings.nll
    if weight:
        losses = losses - weight * log_probs.chosen / log_probs.chosen_length
    return PairLosses(losses, beta * c, beta * r, *logps)


def log1mexp(x: Tensor) -> Tensor:
    """Computes ln(1 - e^x) for x < 0 without cancellation. The function goes to -inf if x goes to
    0. Therefore the result for x > -1e-6 is the value at x = -1e-6.
    """
    x = x.clamp(max=-1e-6)
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


# --- the reference: the log-probabilities of every answer under the model as the run starts, with
# its adapter. They are computed once, before step 1, and stored in the run folder. So no second
# model is in memory. The method is the same for full fine-tuning, a 4-bit base, an adapter that
# continues an earlier one, and an adapter whose start changes the base

REFERENCE_FILE = "reference.safetensors"
AnswerRows = Pairs | LabelledAnswers  # the rows of DPO and similar objectives, or of KTO
# recorded in place of a fingerprint if no process has the whole model
SHARDED_MODEL = "shared"


def add_reference(
    model: nn.Module,
    train: AnswerRows,
    evaluation: AnswerRows,
    *,
    log_probs: Callable[[Sequence[Any]], list[float]],
    batch_size: int,
    fingerprints: Mapping[str, str],
    folder: Path,
    world: World,
) -> HeaderRows:
    """Adds the reference log-probabilities to the rows. Returns a row for the header. If the run
    folder contains the log-probabilities of the same rows, they are read from there. Otherwise they
    are computed.

    log_probs  a function that computes two values for each row; they belong to the two answers of a
               pair, or to an answer and its partner
    Raises     UsageError if the folder contains the reference values of another model
    """
    is_sharded = any(local_part(p) is not p for p in model.parameters())
    identity = {
        **fingerprints,
        "model": SHARDED_MODEL if is_sharded else fingerprint_of_weights(model),
    }
    path = folder / REFERENCE_FILE
    start = time.perf_counter()
    sides = {"training": train, "evaluation": evaluation}
    log_probs_by_side: dict[str, list[float]] = world.run_on_first(
        lambda: _load_reference(path, identity)
    )
    missing = [name for name in sides if name not in log_probs_by_side]
    for name in missing:
        log_probs_by_side[name] = _compute_log_probs(
            model, sides[name], log_probs, batch_size, world
        )
    for name, pairs in sides.items():
        pairs.reference = np.asarray(log_probs_by_side[name], np.float32)
    if not missing:
        return [("reference", f"from {path}")]

    def write() -> None:
        temporary_path = path.with_name(f"{path.name}.new")
        save_file(
            {
                name: torch.tensor(values, dtype=torch.float32)
                for name, values in log_probs_by_side.items()
            },
            temporary_path,
            metadata=identity,
        )
        os.replace(temporary_path, path)

    world.run_on_first(write)
    answers = sum(2 * len(sides[name]) for name in missing)
    seconds = time.perf_counter() - start
    return [
        (
            "reference",
            (
                f"log-probabilities of {pluralise(answers, 'answer')} under the model as it"
                f" starts, {seconds:.1f} s, kept in {path}"
            ),
        )
    ]


def _compute_log_probs(
    model: nn.Module,
    pairs: AnswerRows,
    log_probs: Callable[[Sequence[Any]], list[float]],
    batch_size: int,
    world: World,
) -> list[float]:
    """Computes the reference log-probabilities. There are two values for each row, in the order of
    the rows. The batches are divided among the processes. All processes make the same number of
    forward passes, because a sharded model needs this.
    """
    by_length = np.argsort(pairs.lengths, kind="stable").tolist() if len(pairs) else []
    results = [0.0] * (2 * len(pairs))
    with eval_mode(model):
        for turn in track_progress(
            range(0, len(by_length), world.size * batch_size), "the reference's log-probabilities"
        ):
            start = turn + world.rank * batch_size
            local_rows = by_length[start : start + batch_size]
            values = log_probs([pairs[i] for i in local_rows or by_length[:1]])
            for k, i in enumerate(local_rows):
                results[2 * i : 2 * i + 2] = values[2 * k : 2 * k + 2]
    return world.sum(results)


def _load_reference(path: Path, identity: Mapping[str, str]) -> dict[str, list[float]]:
    """Reads the reference log-probabilities from the run folder, for the training rows and the
    evaluation rows. Values for other rows are ignored. Raises UsageError if the values were
    computed with another model.
    """
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            values_by_side = {
                name: file.get_tensor(name).tolist() for name in ("training", "evaluation")
            }
    except (SafetensorError, OSError):
        return {}
    if (
        metadata.get("model") not in (identity["model"], SHARDED_MODEL)
        and identity["model"] != SHARDED_MODEL
    ):
        raise UsageError(
            f"{path}: the reference of another model than this run starts from",
            fix="the base or adapter that the run was begun with; or start a new run",
        )
    return {
        name: values
        for name, values in values_by_side.items()
        if metadata.get(name) == identity.get(name)
    }


REWARD_MEASURES = ("accuracy", "margin", "mean_reward")


class Reward(Preference):
    """The objective `reward`, with which a reward model learns scores from pairs. The loss of a
    step is the mean over its pairs.
    """

    metric_names = MetricNames(
        units="tokens",
        unit="tok",
        weight="pairs",
        row_noun="pair",
        eval_weight="pairs",
        measures=REWARD_MEASURES,
        live_line=("margin", "accuracy"),
    )
    has_score_head = True

    def check(self) -> None:
        super().check()
        config = self.config
        if config.run.samples:
            raise UsageError(
                "run.samples has no effect: a reward model gives scores, and writes nothing",
                fix="leave out run.samples",
            )
        if config.model.add_tokens:
            raise UsageError(
                "model.add_tokens with train.objective: reward is not offered: the tokens were"
                " never trained"
            )

    def loss_sum(
        self, model: nn.Module, batch: PairBatch, divisor: int = 1, *, dtype: str
    ) -> Tensor:
        scores = model(**model_inputs(model, batch.answers)).logits.squeeze(-1).float()
        chosen = scores[::2]
        rejected = scores[1::2]
        margin = chosen - rejected
        losses = -F.logsigmoid(margin)
        if coefficient := self.config.preference.center_rewards_coefficient:
            losses = losses + coefficient * (chosen + rejected).square()
        measures = ((margin > 0).float(), margin, (chosen + rejected) / 2)
        return (
            torch.stack([losses.sum(), *(values.detach().sum() for values in measures)]) / divisor
        )

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        """Returns the checks of the data. The check of the end token is left out, because a reward
        model does not generate text. The check of packing is left out too, because this check reads
        logits at every position.
        """
        return {
            "data": tuple(check for check in CHECKS["data"] if check.run is not check_end_token)
        }
