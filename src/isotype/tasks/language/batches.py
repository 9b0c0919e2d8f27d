"""Makes batches for a causal language model. A batch contains rows of tokens as padded or packed
tensors. This module also makes the inputs of the model's forward and of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data.pictures import Pictures
from ...data.rows import IGNORE_INDEX, LoadedData, Row, RowStream, row_lengths
from ...environment.planned_device import target_device_type
from ...ops.attention import Documents
from ...optimize.attention import DocumentMask, mask_needs
from ...optimize.head import Targets
from ...training.task import Feed
from ...wording import pluralise

# Rows are padded to a multiple of one of these, because half-precision products are faster for
# aligned sizes. On a GPU a larger multiple gives fewer different lengths, because cuDNN's attention
# builds a plan for each new length, which takes about 170 ms on an H100.
CPU_MULTIPLE = 8
SHORT_ROW_MULTIPLE = 32
GPU_MULTIPLE = 128


def padded_length(longest: int, device_type: str) -> int:
    """Returns the length of a batch whose longest row has `longest` tokens."""
    is_short = longest <= GPU_MULTIPLE
    if device_type == "cpu":
        multiple = CPU_MULTIPLE
    elif is_short:
        multiple = SHORT_ROW_MULTIPLE
    else:
        multiple = GPU_MULTIPLE
    return longest + -longest % multiple


@dataclass(frozen=True)
class Batch:
    """The inputs of the model and the labels of the loss.

    input_ids, labels     int[B T]
    attention_mask        int[B T]  1 for real tokens, 0 for padding; None if rows are packed
    tokens                          the number of real tokens
    supervised                      the number of tokens for which a causal loss is computed
    position_ids          int[B T]  positions in packed rows, which begin at 0 in each document;
                                    transformers uses them to separate documents
    supervised_positions  int[N]    the sorted positions in the flattened B x T at which a loss is
                                    computed for the next token; None if this is the case at all
                                    positions. They are computed on the host, so that the host knows
                                    N without waiting for the device
    documents                       the positions at which the documents of packed rows begin,
                                    computed on the host
    pictures                        the processor's outputs for the pictures of the rows, by the
                                    names of the model's arguments; they are pixels, grids and token
                                    types
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    labels: Tensor
    tokens: int
    supervised: int
    position_ids: Tensor | None = None
    supervised_positions: Tensor | None = None
    documents: Documents | None = None
    pictures: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.input_ids)

    @property
    def weight(self) -> int:
        return self.supervised

    @property
    def units(self) -> int:
        return self.tokens

    def __str__(self) -> str:
        return f"{pluralise(self.rows, 'row')} of {pluralise(self.input_ids.shape[1], 'token')}"

    def to(self, device: torch.device) -> Batch:
        return replace(
            self,
            **(
                move_to_device(vars(self), device)
                | {"pictures": move_to_device(self.pictures, device)}
            ),
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the arguments for the forward of a causal model. The cache is switched off,
        because transformers ignores the positions if the cache is on.
        """
        if self.position_ids is None:
            mask_or_positions = {"attention_mask": self.attention_mask}
        else:
            mask_or_positions = {"position_ids": self.position_ids}
        return {
            "input_ids": self.input_ids,
            **mask_or_positions,
            **self.pictures,
            "use_cache": False,
        }

    def join_packed_rows(self) -> Batch:
        """Joins the packed rows of the batch into one row, because varlen attention requires a
        single row. The first label of each row is already masked.
        """
        assert self.position_ids is not None, "only packed rows may lie in one"
        ids, labels, positions = (
            t.reshape(1, -1) for t in (self.input_ids, self.labels, self.position_ids)
        )
        return replace(
            self, input_ids=ids, attention_mask=None, labels=labels, position_ids=positions
        )


def move_to_device(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns the tensors and batches in `values`, moved to this device. Other values are left out."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)
        for name, value in values.items()
        if hasattr(value, "to")
    }


def collate(
    rows: Sequence[Row], *, pad_id: int, device_type: str = "cpu", pictures: Pictures | None = None
) -> Batch:
    """Makes a batch of rows. They are padded on the right to the length that `padded_length`
    computes from the longest row. No loss is computed for padding.

    Either all rows must have pictures, or no row may have any. If no row is packed, the batch has
    an attention mask. If a row is packed, the batch has positions in place of this mask. Then the
    padding at the end of a row counts as one more document.
    """
    longest = padded_length(max(len(row.input_ids) for row in rows), device_type)
    input_ids = torch.full((len(rows), longest), pad_id, dtype=torch.long)
    labels = torch.full((len(rows), longest), IGNORE_INDEX, dtype=torch.long)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    is_packed = any(row.documents for row in rows)
    positions = torch.empty_like(mask) if is_packed else None
    lengths: list[int] = []
    for i, row in enumerate(rows):
        n = len(row.input_ids)
        input_ids[i, :n] = torch.tensor(row.input_ids, dtype=torch.long)
        labels[i, :n] = torch.tensor(row.labels, dtype=torch.long)
        mask[i, :n] = 1
        if positions is not None:
            labels[i, 0] = IGNORE_INDEX
            parts = [*(row.documents or (n,)), longest - n]
            lengths += parts
            positions[i] = torch.cat([torch.arange(part) for part in parts])
    # nothing predicts the first label of a row: the loss uses labels[1:]
    supervised_positions = (
        (F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten() != IGNORE_INDEX)
        .nonzero()
        .squeeze(-1)
    )
    documents = Documents.from_lengths(lengths) if is_packed else None
    if pictures is not None and rows[0].pictures:
        picture_inputs = pictures.inputs(input_ids, mask, [row.pictures for row in rows])
    else:
        picture_inputs = {}
    return Batch(
        input_ids,
        None if is_packed else mask,
        labels,
        int(mask.sum()),
        supervised_positions.numel(),
        positions,
        supervised_positions,
        documents,
        picture_inputs,
    )


def split_by_pictures(rows: Sequence[Any]) -> list[Sequence[Any]]:
    """Splits rows into rows with pictures and rows without pictures. A batch must not contain both
    kinds, because a processor needs pictures for all rows of a batch or for none.
    """
    has_pictures = [bool(getattr(row, "pictures", ())) for row in rows]
    if all(has_pictures) or not any(has_pictures):
        return [rows]
    return [
        [row for row, row_has_pictures in zip(rows, has_pictures) if row_has_pictures is value]
        for value in (True, False)
    ]


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Returns the arguments for the model's forward. The attention mask is left out or kept as
    small as possible. Every token for which a loss is computed still attends to the right tokens.

    Causal attention needs no mask for padding on the right, because no real token attends to later
    tokens, and padding has no loss. With a mask, attention cannot use its fast kernels. So the mask
    is removed unless the model needs it for something else. The bounds of packed documents are
    used to separate the documents. With these bounds, fast kernels compute only the pairs of tokens
    of the same document. On a GPU, they can also compute attention with windows and softcaps.
    """
    inputs = batch.inputs
    if batch.position_ids is not None and has_grid_positions(model):
        # the first row separates documents; the others are time, height and width, which are equal
        # for text
        inputs["position_ids"] = batch.position_ids.expand(4, -1, -1)
    if batch.pictures:
        # the model makes its mask itself: tokens of a picture may attend to each other (Gemma 3),
        # or text to its pictures by cross-attention (Llama 3.2 Vision)
        return inputs
    # on a CPU, a batch that is not packed needs bounds only for windows: otherwise its attention is
    # causal, without a mask
    reads_bounds = (
        target_device_type(batch.input_ids.device) == "cuda"
        or batch.documents is not None
        or has_shorter_window(model, batch.input_ids.shape[1])
    )
    if reads_bounds and not mask_needs(model).document_mask_blocker:
        documents = batch.documents or Documents.from_rows(
            batch.input_ids.shape[0], batch.input_ids.shape[1], batch.input_ids.device
        )
        return inputs | {"attention_mask": DocumentMask(documents)}
    if batch.attention_mask is not None and not mask_needs(model).padding_mask_reason:
        return inputs | {"attention_mask": None}
    return inputs


def has_shorter_window(model: nn.Module, positions: int) -> bool:
    """Returns True if the model has sliding windows of fewer than `positions` tokens."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    window = getattr(text, "sliding_window", None)
    return isinstance(window, int) and window < positions


def has_grid_positions(model: nn.Module) -> bool:
    """Returns True if the model's positions have separate rows for time, height and width, as in
    Qwen's vision-language models. If the packed positions had only one row, Qwen2.5-VL would treat
    all documents as a single document.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return "mrope_section" in (getattr(text, "rope_parameters", None) or {})


def needs_single_packed_row(model: nn.Module) -> bool:
    """Returns True if packed rows must be joined into one row, so that attention separates their
    documents. FlashAttention's varlen function reads the positions of only one row.
    """
    return "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def next_tokens(batch: Batch, *, every_row: bool) -> Targets:
    """Returns the targets of a causal loss. The label at t is the target of position t - 1. The
    value -100 means that there is no label.

    every_row  whether to include positions without a label, which the loss skips; otherwise only
               the positions in `batch.supervised_positions` are included
    """
    # shifts the labels instead of the hidden states, since shifting would copy these
    targets_N = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
    if every_row or batch.supervised_positions is None:
        return Targets(targets_N)
    return Targets(
        targets_N.index_select(0, batch.supervised_positions), batch.supervised_positions
    )


def row_feed(data: LoadedData, *, seed: int, shuffle: bool) -> Feed[Row]:
    """Returns a feed, which yields the training rows in the order in which the run uses them."""
    if data.stream is not None:
        stream: Feed[Row] = data.stream
        return stream
    return RowStream(data.train, seed=seed, shuffle=shuffle, shares=data.shares)


def longest_rows(rows: Sequence[Any], count: int) -> list[Any]:
    """Returns the `count` longest rows, beginning with the longest."""
    lengths = row_lengths(rows)
    return [rows[i] for i in sorted(range(len(rows)), key=lambda i: -lengths[i])[:count]]


def mean_longest(lengths: Sequence[int], count: int) -> float:
    """Returns the mean length of the longest row of `count` rows that are chosen at random. Returns
    0 if there are no rows.
    """
    if not len(lengths):
        return 0.0
    lengths_N = torch.as_tensor(lengths, dtype=torch.float64).sort().values
    # the probability that none of the chosen rows is longer than the n-th shortest row
    shares_N = torch.arange(1, len(lengths_N) + 1, dtype=torch.float64) / len(lengths_N)
    no_longer_N = shares_N**count
    return float((lengths_N * no_longer_N.diff(prepend=no_longer_N.new_zeros(1))).sum())


def shortest_rows(rows: Sequence[Any], count: int) -> list[Any]:
    """Returns the `count` shortest rows, beginning with the shortest. Rows with pictures come
    before rows without pictures, because rows with pictures also run the vision tower.
    """
    lengths = row_lengths(rows)
    has_pictures = [bool(getattr(row, "pictures", ())) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (not has_pictures[i], lengths[i]))
    return [rows[i] for i in order[:count]]
