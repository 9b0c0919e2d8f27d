"""Defines the objectives of a language run. The setting `train.objective` selects one of them. An
objective defines the rows, the batches, the loss and the names of the metrics.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...config.schema import RunConfig
from ...data.pictures import Pictures
from ...data.row_keys import FormatName
from ...data.rows import LoadedData, format_row
from ...distributed.world import World
from ...environment.planned_device import target_device_type
from ...errors import UsageError
from ...optimize.head import compute_loss
from ...precision.precision import Precision
from ...training.task import Batch, Check, Feed, HeaderRows, MetricNames
from .batches import Batch as TokenBatch
from .batches import collate, model_inputs, needs_single_packed_row, next_tokens, row_feed
from .checks import CHECKS


@dataclass(frozen=True)
class OtherModels:
    """The other models that a run keeps in memory. Stores the size of these models in bytes, and
    lines of text that describe them.
    """

    bytes: int = 0
    notes: Sequence[str] = ()


class Objective(ABC):
    """The part of a language run that depends on its objective.

    format           the data format that the objective requires; None if all formats with one
                     answer per row are accepted
    answers_per_row  how many rows of the model's input are made from one row of the data
    has_score_head   whether the model has a score head in place of its language-model head
    train, eval      the training rows and the evaluation rows; they exist after `set_data`
    """

    metric_names: MetricNames
    format: FormatName | None = None
    answers_per_row = 1
    has_score_head = False
    train: Sequence[Any]
    eval: Sequence[Any]

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def check(self) -> None:  # noqa: B027  # some objectives support every setting
        """Raises UsageError if the objective does not support a setting."""

    @abstractmethod
    def set_data(self, data: LoadedData) -> None: ...

    def describe_example(self, data: LoadedData, tokenizer: Any) -> HeaderRows:
        """Returns rows for the header. They show the first row of the data, and mark the part that
        the model learns.
        """
        row = data.train[0]
        count_text = f"{row.supervised} of {len(row.input_ids)} tokens of the first row"
        return [("learnt", f"{count_text}, between >>> and <<<:\n{format_row(row, tokenizer)}")]

    @abstractmethod
    def check_model(self, model: nn.Module) -> None:
        """Raises UsageError if the objective cannot train this model."""

    def load_other_models(
        self, tokenizer: Any, precision: Precision, device: torch.device | None
    ) -> OtherModels:
        """Loads the other models that the objective needs. If no device is given, only counts their
        bytes. Raises UsageError.
        """
        return OtherModels()

    @abstractmethod
    def feed(self) -> Feed[Any]: ...

    @abstractmethod
    def largest_rows(self, count: int) -> list[Any]: ...

    @abstractmethod
    def collate(self, rows: Sequence[Any], *, pad_id: int, device_type: str) -> Batch: ...

    def outline_batch(self, batch: Any) -> Any:
        """Builds a batch of this objective for a memory plan. `batch` contains the tensors of the
        tokens, which have shapes but no data.
        """
        return batch

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: Any, divisor: int = 1, *, dtype: str) -> Tensor: ...

    def prepare_step(
        self, model: nn.Module, batches: Iterable[Any], world: World, *, dtype: str
    ) -> Iterable[Any]:
        """Implements `Task.prepare_step`. `batches` are the batches of a step or all batches of an
        evaluation.
        """
        return batches

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        return CHECKS

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
        return []


class NextToken(Objective):
    """The objective `sft`. Its loss is the cross-entropy of the tokens that the model learns."""

    metric_names = MetricNames(units="tokens", unit="tok", weight="supervised")

    def __init__(self, config: RunConfig, pictures: Pictures | None = None) -> None:
        super().__init__(config)
        self.pictures = pictures
        self.balance_coefficient = 0.0

    def set_data(self, data: LoadedData) -> None:
        self.data, self.train, self.eval, self.pictures = data, data.train, data.eval, data.pictures

    def check_model(self, model: nn.Module) -> None:
        """Accepts every model. If the model is a mixture of experts, reads the coefficient of its
        balancing loss.
        """
        self.balance_coefficient = balancing_coefficient(model, self.config.train.aux_loss)
        if self.balance_coefficient:
            self.metric_names = replace(
                self.metric_names, measures=(AUX_LOSS,), live_line=(AUX_LOSS,)
            )

    def feed(self) -> Feed[Any]:
        return row_feed(self.data, seed=self.config.train.seed, shuffle=self.config.data.shuffle)

    def largest_rows(self, count: int) -> list[Any]:
        return list(self.data.longest(count))

    def collate(self, rows: Sequence[Any], *, pad_id: int, device_type: str) -> Batch:
        return collate(rows, pad_id=pad_id, device_type=device_type, pictures=self.pictures)

    def loss_sum(self, model: nn.Module, batch: Any, divisor: int = 1, *, dtype: str) -> Tensor:
        if not self.balance_coefficient:
            return batch_loss_sum(model, batch, divisor, dtype=dtype)
        with record_router_scores(model) as scores:
            loss = batch_loss_sum(model, batch, divisor, dtype=dtype).float()
        # weighted by the batch's share of the step; in an evaluation it is not added to the loss
        balance_loss = balancing_loss(model, scores, batch.attention_mask).to(loss.device) * (
            batch.weight / divisor
        )
        return torch.stack(
            (
                loss + self.balance_coefficient * balance_loss if model.training else loss,
                balance_loss.detach(),
            )
        )


def batch_loss_sum(
    model: nn.Module, batch: TokenBatch, divisor: int = 1, *, dtype: str = "fp32"
) -> Tensor:
    """Returns the cross-entropy of a batch, float[] in `dtype`, which is `precision.loss`. It is
    summed over the tokens that have a label and divided by `divisor`.

    If the head is optimized and the loss is in fp32, one of Isotype's ops computes the loss without
    storing the logits.
    """
    if batch.position_ids is not None and needs_single_packed_row(model):
        batch = batch.join_packed_rows()
    # on a CPU the loss itself skips the positions without a label
    targets = next_tokens(batch, every_row=target_device_type(batch.labels.device) == "cpu")
    inputs = model_inputs(model, batch)
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        # `record_router_scores` reads them by hooks instead
        inputs["output_router_logits"] = False
    return compute_loss(model, inputs, replace(targets, divisor=divisor, dtype=dtype))


# --- the balancing loss of a mixture of experts, which prevents its router from choosing few
# experts. Function and coefficient are those of the model family. transformers adds the balancing
# loss to the loss of a model that gets labels and has `output_router_logits`. Here the loss is
# computed outside of the model. So hooks read the scores of the routers, and the family's function
# is called with these scores and the mask of the data

AUX_LOSS = "aux_loss"
_FUNCTION_NAME = "load_balancing_loss_func"
# model -> its routers, in the order of its layers
_ROUTERS: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()


def balancing_coefficient(model: nn.Module, configured: float | None) -> float:
    """Returns the coefficient of the balancing loss. It is `train.aux_loss` if that is set.
    Otherwise it is the model's coefficient if the model's config switches this loss on, and 0 if
    not.

    Raises  UsageError if the model's family has no such loss
    """
    mixture_model = find_mixture(model)
    if mixture_model is None:
        if configured:
            raise UsageError(
                f"train.aux_loss: {configured} has no effect: the model's family has no balancing"
                " loss of its own",
                fix="leave train.aux_loss out",
            )
        return 0.0
    if getattr(mixture_model.config, "output_router_logits", False):
        model_coefficient = float(getattr(mixture_model, "router_aux_loss_coef", 0.0))
    else:
        model_coefficient = 0.0
    return model_coefficient if configured is None else configured


def refuse_balancing_loss(model: nn.Module, configured: float | None, objective: str) -> None:
    """Raises UsageError if the config of a mixture of experts switches its balancing loss on, but
    the objective does not support this loss.
    """
    if coefficient := balancing_coefficient(model, configured):
        raise UsageError(
            f"train.objective: {objective} has no balancing loss beside its own, and the model's"
            f" config asks for one (output_router_logits, coefficient {coefficient:g})",
            fix="train.aux_loss: 0 trains without it",
        )


def find_mixture(model: nn.Module) -> Any:
    """Returns the causal language model within `model` that has routers and a balancing loss.
    Returns None if there is no such model.
    """
    candidates = (
        m
        for m in model.modules()
        if hasattr(m, "router_aux_loss_coef") and _find_balancing_function(m)
    )
    return next(candidates, None)


def _find_balancing_function(model: nn.Module) -> Any:
    """Returns the function with which the model's family computes its balancing loss. Returns None
    if the family has no such function. All base classes are searched, because FSDP replaces the
    model's class by a class in another Python module.
    """
    modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)
    return next(
        (getattr(module, _FUNCTION_NAME) for module in modules if hasattr(module, _FUNCTION_NAME)),
        None,
    )


@contextmanager
def record_router_scores(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within this block, records the scores of the routers in the forward, layer by layer. If a
    layer is recomputed in backward, its scores are not recorded again.
    """
    if model not in _ROUTERS:
        recordable_outputs = [
            getattr(m, "_can_record_outputs", None) or {} for m in model.modules()
        ]
        router_class = next(
            outputs["router_logits"].target_class
            for outputs in recordable_outputs
            if "router_logits" in outputs
        )
        _ROUTERS[model] = [m for m in model.modules() if type(m) is router_class]
    scores: list[Tensor] = []

    def record(_: nn.Module, args: Any, output: Any) -> None:
        # (scores before the choice, weights, indices)
        scores.append(output[0])

    hooks = [router.register_forward_hook(record) for router in _ROUTERS[model]]
    try:
        yield scores
    finally:
        for hook in hooks:
            hook.remove()


def balancing_loss(model: nn.Module, scores: list[Tensor], mask: Tensor | None) -> Tensor:
    """Returns the balancing loss, fp32[], over all tokens that are not padding."""
    mixture_model = find_mixture(model)
    loss: Tensor = _find_balancing_function(mixture_model)(
        tuple(logits.float() for logits in scores),
        mixture_model.num_experts,
        mixture_model.num_experts_per_tok,
        mask,
    )
    return loss
