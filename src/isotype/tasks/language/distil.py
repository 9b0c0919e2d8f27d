"""Implements the objective `distil`. At every position with a label, the model learns the teacher's
probability distribution of the next token. The teacher has the same vocabulary as the model.

The loss of a token is (1 - cross_entropy) * D + cross_entropy * (-ln p(token)). D is the divergence
that `ops.linear_divergence` defines. It depends on `beta` and `temperature`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer

from ...config.schema import DistilSection, RunConfig
from ...data.rows import IGNORE_INDEX, LoadedData
from ...dtypes import to_torch
from ...errors import UsageError
from ...model.architecture import auto_class
from ...model.gguf import read_architecture
from ...model.load import Source, explain_loading_errors, load_base
from ...ops import linear_cross_entropy, linear_divergence
from ...ops.cross_entropy.op import apply_rule
from ...ops.cross_entropy.rule import LossRule
from ...ops.linear_divergence.op import divergence
from ...optimize import optimize
from ...optimize.head import Targets, compute_loss
from ...precision.apply import apply_precision
from ...precision.precision import Precision
from ...precision.quantised_base import quantisation_from_config
from ...training.task import MetricNames
from ...wording import format_binary_bytes
from .batches import Batch, model_inputs, needs_single_packed_row, next_tokens
from .objective import NextToken, OtherModels, refuse_balancing_loss


class Distil(NextToken):
    """The objective `distil`. The loss of a step is the mean over the tokens that the model learns."""

    teacher: nn.Module | None = None

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.settings = config.distil
        measures = ("divergence", "cross_entropy") if self.settings.cross_entropy else ()
        self.metric_names = MetricNames(
            units="tokens", unit="tok", weight="supervised", measures=measures
        )

    def check(self) -> None:
        if self.config.train.aux_loss:
            raise UsageError(
                "train.aux_loss with train.objective: distil is not offered",
                fix="leave out train.aux_loss",
            )
        if self.settings.teacher is None:
            raise UsageError(
                "train.objective: distil needs a teacher",
                fix="distil.teacher: a folder or a hub id",
            )

    def set_data(self, data: LoadedData) -> None:
        if data.pictures is not None:
            raise UsageError(
                "train.objective: distil with pictures is not offered", fix="rows without pictures"
            )
        super().set_data(data)

    def check_model(self, model: nn.Module) -> None:
        refuse_balancing_loss(model, self.config.train.aux_loss, "distil")

    def load_other_models(
        self, tokenizer: Any, precision: Precision, device: torch.device | None
    ) -> OtherModels:
        """Loads the teacher in the dtype `precision.compute`. Its weights are frozen. Raises
        UsageError if the teacher has another vocabulary.
        """
        assert self.settings.teacher is not None, "checked before anything is loaded"
        name = self.settings.teacher
        revision = self.settings.revision
        with explain_loading_errors(name, "tokenizer", revision):
            vocabulary = tokenizer.get_vocab()
            teacher_vocabulary = AutoTokenizer.from_pretrained(name, revision=revision).get_vocab()
        if difference_count := len(vocabulary.items() ^ teacher_vocabulary.items()):
            raise UsageError(
                f"distil.teacher: {name} has another vocabulary than the model:"
                f" {difference_count:,} entries"
                f" differ ({len(teacher_vocabulary):,} tokens there, {len(vocabulary):,} here)",
                fix="a teacher of the same family",
            )
        with explain_loading_errors(name, "model", revision), torch.device("meta"):
            architecture = read_architecture(name, revision)
            if quantisation_from_config(architecture) is not None:
                raise UsageError(
                    f"distil.teacher: {name} is quantised before it is saved: not offered",
                    fix="the model that is not",
                )
            elements = sum(
                p.numel() for p in auto_class(architecture).from_config(architecture).parameters()
            )
        dtype = precision.compute
        notes = list[str]()
        if device is not None:
            teacher_precision = Precision(base=dtype, compute=dtype, generate=dtype, save=dtype)
            source = Source(name, revision)
            base = load_base(
                source,
                teacher_precision,
                attention=self.config.model.attention,
                device=device,
                trainable=False,
                notes=notes,
            )
            base.config.use_cache = False
            if self.config.model.optimize:
                optimize(base, teacher_precision, device_type=device.type)
            apply_precision(base, teacher_precision, device_type=device.type)
            self.teacher = base.requires_grad_(False).eval()
        size = elements * to_torch(dtype).itemsize
        return OtherModels(
            size,
            [
                (
                    f"distil.teacher: {name}, {elements:,} parameters, frozen in {dtype},"
                    f" {format_binary_bytes(size)}"
                ),
                *notes,
            ],
        )

    def loss_sum(self, model: nn.Module, batch: Batch, divisor: int = 1, *, dtype: str) -> Tensor:
        """Returns the sum of the losses, float[]. If cross-entropy is a part of the loss, returns
        float[3], which also contains the two parts of the loss that are logged. In a memory plan,
        no teacher is loaded, and the student is used in its place.
        """
        teacher = model if self.teacher is None else self.teacher
        if batch.position_ids is not None and (
            needs_single_packed_row(model) or needs_single_packed_row(teacher)
        ):
            batch = batch.join_packed_rows()
        targets = replace(next_tokens(batch, every_row=False), dtype=dtype)
        recorder = HeadRecorder(targets.classes, targets.rows, dtype=dtype)
        with torch.no_grad():
            compute_loss(teacher, model_inputs(teacher, batch), recorder)
        (teacher_head,) = recorder.heads
        return (
            compute_loss(
                model,
                model_inputs(model, batch),
                StudentTargets(
                    targets.classes,
                    targets.rows,
                    dtype=dtype,
                    teacher_head=teacher_head,
                    settings=self.settings,
                ),
            )
            / divisor
        )


class HeadInputs(NamedTuple):
    """The inputs from which a head computes its logits. If `weight` is None, `hidden` contains the
    logits themselves.

    Let z = hidden @ weight^T + bias. Then the logits are scale * z. With a softcap, the logits are
    softcap * tanh(scale * z / softcap).
    """

    hidden: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None

    def logits(self, classes: int, dtype: str) -> Tensor:
        """Returns the logits of the first `classes` tokens of the vocabulary, [N classes] in
        `dtype`.
        """
        if self.weight is None:
            return self.hidden[:, :classes].to(to_torch(dtype))
        z = F.linear(self.hidden, self.weight, self.bias)[:, :classes].to(to_torch(dtype))
        return apply_rule(
            z,
            LossRule.from_options(
                ignore_index=IGNORE_INDEX, logit_scale=self.scale, softcap=self.softcap
            ),
        )

    @property
    def classes(self) -> int:
        if self.weight is None:
            return self.hidden.shape[-1]
        return self.weight.shape[0]


@dataclass(frozen=True, slots=True)
class HeadRecorder(Targets):
    """Records the inputs of the teacher's head. The teacher gets an object of this class in place
    of the targets, so that it computes no loss.
    """

    heads: list[HeadInputs] = field(default_factory=list)

    def loss_from_hidden(
        self, head: nn.Linear, hidden: Tensor, scale: float | None, softcap: float | None
    ) -> Tensor:
        self.heads.append(
            HeadInputs(_select_rows(hidden, self.rows), head.weight, head.bias, scale, softcap)
        )
        return hidden.new_zeros(())

    def loss_from_logits(self, logits_BTV: Tensor) -> Tensor:
        self.heads.append(HeadInputs(_select_rows(logits_BTV, self.rows)))
        return logits_BTV.new_zeros(())


def _select_rows(x_BTH: Tensor, rows: Tensor | None) -> Tensor:
    x_NH = x_BTH.reshape(-1, x_BTH.shape[-1])
    return x_NH if rows is None else x_NH.index_select(0, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentTargets(Targets):
    """Computes the student's loss from the recorded inputs of the teacher's head. The student gets
    an object of this class in place of the targets. If a vocabulary is padded, the two heads may
    have different numbers of classes. In this case, only the classes that both heads have are
    compared.
    """

    teacher_head: HeadInputs
    settings: DistilSection

    def loss_from_hidden(
        self, head: nn.Linear, hidden: Tensor, scale: float | None, softcap: float | None
    ) -> Tensor:
        teacher = self.teacher_head
        beta = self.settings.beta
        temperature = self.settings.temperature
        x_NH = _select_rows(hidden, self.rows)
        classes = min(head.weight.shape[0], teacher.classes)
        if teacher.weight is None:
            return self._loss_from_logits(
                HeadInputs(x_NH, head.weight, head.bias, scale, softcap).logits(
                    head.weight.shape[0], self.dtype
                )
            )
        divergences_N = linear_divergence(
            x_NH,
            head.weight[:classes],
            teacher.hidden,
            teacher.weight[:classes],
            bias=None if head.bias is None else head.bias[:classes],
            teacher_bias=None if teacher.bias is None else teacher.bias[:classes],
            beta=beta,
            temperature=temperature,
            logit_scale=scale,
            softcap=softcap,
            teacher_logit_scale=teacher.scale,
            teacher_softcap=teacher.softcap,
        )
        nll = None
        if self.settings.cross_entropy:
            nll = linear_cross_entropy(
                x_NH,
                head.weight,
                self.classes,
                bias=head.bias,
                logit_scale=scale,
                softcap=softcap,
                ignore_index=IGNORE_INDEX,
                reduction="sum",
            )
        return self._combine_losses(divergences_N, nll)

    def loss_from_logits(self, logits_BTV: Tensor) -> Tensor:
        return self._loss_from_logits(_select_rows(logits_BTV, self.rows).to(to_torch(self.dtype)))

    def _loss_from_logits(self, logits_NV: Tensor) -> Tensor:
        classes = min(logits_NV.shape[-1], self.teacher_head.classes)
        logits_pair = (logits_NV[:, :classes], self.teacher_head.logits(classes, self.dtype))
        student_log_probs, teacher_log_probs = (
            (logits / self.settings.temperature).log_softmax(-1) for logits in logits_pair
        )
        if self.settings.cross_entropy:
            nll = F.cross_entropy(logits_NV, self.classes, reduction="sum")
        else:
            nll = None
        return self._combine_losses(
            divergence(student_log_probs, teacher_log_probs, self.settings.beta), nll
        )

    def _combine_losses(self, divergences_N: Tensor, nll: Tensor | None) -> Tensor:
        divergence_sum = divergences_N.sum()
        share = self.settings.cross_entropy
        if nll is None:
            return divergence_sum
        return torch.stack(
            [(1 - share) * divergence_sum + share * nll, divergence_sum.detach(), nll.detach()]
        )
