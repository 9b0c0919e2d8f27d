"""Computes the predictions of a model with fp32 weights and fp32 matrix products, as a reference
for comparisons. Only the weights of one block are read at a time. So the same model object can
compute the results of all sets of weights that are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from ...data.pictures import Pictures
from ...data.rows import IGNORE_INDEX, Row
from ...model.architecture import auto_class
from ...optimize.deferred import DeferredLogits, defer
from ...precision.vision import vision_parts
from ...tasks.language.batches import Batch, collate, model_inputs, split_by_pictures
from ...training.memory.device import trim_freed_blocks
from ..loaded import LoadedRun
from ..run_weights import RunWeights, is_tied

Reader = Callable[[str], Tensor]  # name of a weight -> its values
_LOGITS_PER_BATCH = 1 << 25  # values of fp32 logits that are not deferred: 0.125 GB
_TOKENS_PER_BATCH = 2048  # limit for the tokens of the rows that are computed together
_TOKENS_PER_LOSS = 32  # tokens whose loss is computed at once


@dataclass(frozen=True)
class Scores:
    """Contains the losses and predictions that the model with one set of weights has on the
    evaluation rows.

    row_losses   fp64[rows]   the loss of each row, summed over its labelled tokens
    row_tokens   int[rows]    the number of labelled tokens of each row
    predictions  int[tokens]  the most probable token at each labelled position
    """

    row_losses: Tensor
    row_tokens: Tensor
    predictions: Tensor

    @property
    def loss(self) -> float:
        return float(self.row_losses.sum() / self.row_tokens.sum())

    def agreement(self, reference: Scores) -> float:
        """Returns the share of labelled positions at which these scores and `reference` predict the
        same token.
        """
        return float((self.predictions == reference.predictions).double().mean())

    def noise(self, reference: Scores) -> float:
        """Returns the standard error of the difference between the two losses, estimated from the
        differences between rows. For a single row it is 0, because one row allows no estimate.
        """
        count = len(self.row_losses)
        if count < 2:
            return 0.0
        difference = self.row_losses - reference.row_losses
        mean = difference.sum() / self.row_tokens.sum()
        residual = difference - mean * self.row_tokens
        spread = residual.square().sum().sqrt() * (count / (count - 1)) ** 0.5
        return float(spread / self.row_tokens.sum())


class ReferenceModel:
    """An fp32 model of the run's architecture. Its weights are read when a block needs them and
    released after it, so that the model needs memory for one block.

    names   the names of its weights; a head that is tied to the embedding has no name of its own
    shapes  the shape of each weight, by its name
    """

    def __init__(self, run: LoadedRun, weights: RunWeights) -> None:
        self.device = run.device
        self.pad_id = run.tokenizer.pad_token_id or 0
        self.config = copy.deepcopy(weights.inner.config)
        if hasattr(self.config, "quantization_config"):
            del self.config.quantization_config
        self.trusts_remote_code = run.source.trust_remote_code
        self.text_only = vision_parts(weights.inner) is None
        self.is_tied = is_tied(weights)
        for config in (self.config, self.config.get_text_config()):
            config.tie_word_embeddings = self.is_tied
        self.readers: dict[str, Reader] = {}
        self.is_held = False
        self.build(self.config)

    def build(self, config: Any) -> None:
        """Builds the model of a configuration. Its weights have no values."""
        # sdpa leaves out Gemma 2's softcap
        has_softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        auto = auto_class(config, text_only=self.text_only)
        # on the CPU memory without values is not used
        with no_init_weights():
            self.model: Any = auto.from_config(
                config,
                dtype=torch.float32,
                trust_remote_code=self.trusts_remote_code,
                **({"attn_implementation": "eager"} if has_softcap else {}),
            )
        self.model.tie_weights()
        self.model.eval().requires_grad_(False)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in _stored_tensors(self.model)}
        self.names = list(self.shapes)
        for parameter in self.model.parameters():
            parameter.data = torch.empty(0)
        self.model.to(self.device)
        stored_tensors = _stored_tensors(self.model)
        self._names_by_tensor = {id(tensor): name for name, tensor in stored_tensors}
        self._release([tensor for _, tensor in stored_tensors])
        for unit, recurse in _find_units(self.model):
            stored = [
                tensor
                for tensor in (*unit.parameters(recurse), *unit.buffers(recurse))
                if id(tensor) in self._names_by_tensor
            ]
            if stored:
                unit.register_forward_pre_hook(partial(self._read, stored))
                unit.register_forward_hook(partial(self._release, stored), always_call=True)

    @torch.no_grad()
    def _read(self, tensors: Sequence[Tensor], *_: Any) -> None:
        for tensor in tensors:
            if tensor.numel() == 0:
                name = self._names_by_tensor[id(tensor)]
                value = self.readers[name](name)
                tensor.data = value.to(self.device, torch.float32)

    def _release(self, tensors: Sequence[Tensor], *_: Any) -> None:
        if self.is_held:
            return
        for tensor in tensors:
            tensor.data = torch.empty(0, device=self.device)
        # glibc keeps freed weights of up to 32 MiB: 0.4 GB after a pass over SmolLM2-135M
        trim_freed_blocks()

    @contextmanager
    def holding_weights(self) -> Iterator[None]:
        """Returns a context manager within which the weights stay in memory between calls of the
        model. Generation uses it, because it calls the model once for each token.
        """
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False
            self._release([tensor for _, tensor in _stored_tensors(self.model)])

    def fill(self, read: Reader, names: Iterable[str] | None = None) -> None:
        """Sets the function that reads the values of the weights. If `names` is given, the function
        is set only for the weights in `names`.
        """
        for name in self.names if names is None else names:
            self.readers[name] = read

    def score_with(self, config: Any, batches: Sequence[Batch]) -> Scores:
        """Returns the scores of the current weights with another configuration, which must have the
        same weight shapes.
        """
        self.build(config)
        scores = self.score(batches)
        self.build(self.config)
        return scores

    @torch.no_grad()
    def score(self, batches: Sequence[Batch]) -> Scores:
        losses = []
        counts = []
        predictions = []
        for batch in batches:
            inputs = model_inputs(self.model, batch.to(self.device))
            labels = batch.labels[:, 1:].to(self.device)
            is_learnt = labels != IGNORE_INDEX
            learnt_logits = self._learnt_logits(inputs, is_learnt)
            token_losses, token_predictions = _score_tokens(learnt_logits, labels[is_learnt])
            rows = is_learnt.nonzero()[:, 0]
            row_losses = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
            losses.append(row_losses.index_add_(0, rows, token_losses.double()).cpu())
            counts.append(is_learnt.sum(1).cpu())
            predictions.append(token_predictions.cpu())
            del learnt_logits
            trim_freed_blocks()
        return Scores(torch.cat(losses), torch.cat(counts), torch.cat(predictions))

    def _learnt_logits(self, inputs: dict[str, Any], is_learnt: Tensor) -> Tensor:
        """Returns the logits that predict learnt tokens. The head gets only the hidden states at
        these positions. If the head is a plain linear layer, the logits are deferred: they are
        computed when their rows are used.

        is_learnt  bool[rows tokens-1]
        ->         fp32[learnt tokens, vocabulary]
        """
        head = self.model.get_output_embeddings()
        if head is None:
            logits: Tensor = self.model(**inputs).logits
            return logits[:, :-1][is_learnt]
        hook = head.register_forward_pre_hook(
            lambda _, arguments: (arguments[0][:, :-1][is_learnt][None], *arguments[1:])
        )
        with hook, _deferring_head(head):
            learnt_logits: Tensor = self.model(**inputs).logits[0]
        return learnt_logits

    def batches(self, rows: Sequence[Row], pictures: Pictures | None) -> list[Batch]:
        """Returns the rows in batches, sorted by length. A batch is limited by its number of
        tokens. If the logits are not deferred, it is also limited by their size at learnt
        positions.
        """
        ordered = sorted(rows, key=lambda row: len(row.input_ids))
        groups: list[list[Row]] = [[]]
        is_deferred = type(self.model.get_output_embeddings()) is nn.Linear
        most_learnt = _LOGITS_PER_BATCH // self.config.get_text_config().vocab_size
        learnt_count = 0
        for row in ordered:
            learnt_count += row.supervised
            token_count = (len(groups[-1]) + 1) * len(row.input_ids)
            has_large_logits = learnt_count > most_learnt and not is_deferred
            if groups[-1] and (token_count > _TOKENS_PER_BATCH or has_large_logits):
                groups.append([])
                learnt_count = row.supervised
            groups[-1].append(row)
        return [
            collate(part, pad_id=self.pad_id, device_type=self.device.type, pictures=pictures)
            for group in groups
            for part in split_by_pictures(group)
        ]


@contextmanager
def _deferring_head(head: nn.Module) -> Iterator[None]:
    """Returns a context manager within which a plain linear head returns deferred logits. The
    weight stays in memory as long as these logits do.
    """
    instance: Any = head
    if type(head) is not nn.Linear:
        yield
        return

    def defer_logits(hidden: Tensor) -> Tensor:
        bias = None if instance.bias is None else instance.bias.detach()
        return defer(hidden, instance.weight.detach(), bias)

    instance.forward = defer_logits
    try:
        yield
    finally:
        del instance.forward


def _score_tokens(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the loss of each token, and the most probable token at its position. Only a part of
    the logits is computed or copied at a time.

    logits  fp32[tokens, vocabulary]
    """
    # created first: malloc returns freed logits only if no tensor lies after them
    losses = torch.empty(len(labels), device=labels.device)
    predictions = torch.empty_like(labels)
    for start in range(0, len(labels), _TOKENS_PER_LOSS):
        tokens = slice(start, start + _TOKENS_PER_LOSS)
        part = logits[tokens]
        if isinstance(part, DeferredLogits):
            part = part.materialise()
        losses[tokens] = F.cross_entropy(part, labels[tokens], reduction="none")
        predictions[tokens] = part.argmax(-1)
    return losses, predictions


def _stored_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns (name, tensor) of every parameter and of every persistent buffer of floating-point
    numbers.
    """
    persistent = model.state_dict(keep_vars=True)
    buffers = [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name in persistent and buffer.is_floating_point()
    ]
    return [*model.named_parameters(), *buffers]


def _find_units(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yields the modules whose weights are read together. These are the blocks, and each module
    outside the blocks. Each module comes with a bool, which is True if the weights of its
    submodules are read too.
    """
    blocks = _find_blocks(model)
    inner = {id(module) for block in blocks for module in block.modules()}
    for block in blocks:
        yield block, True
    for module in model.modules():
        if id(module) not in inner:
            yield module, False


def _find_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the elements of the outermost lists of modules, such as the decoder's layers. An
    nn.MultiheadAttention, as in SigLIP's pooling, uses the weight of its `out_proj` without calling
    this submodule, so it counts as one block.
    """
    if isinstance(module, nn.ModuleList):
        return list(module)
    if isinstance(module, nn.MultiheadAttention):
        return [module]
    return [block for child in module.children() for block in _find_blocks(child)]
