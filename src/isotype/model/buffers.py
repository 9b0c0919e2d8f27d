"""Corrects buffers that transformers leaves uninitialised, or that depend on earlier batches.

transformers 5 builds a model on the meta device, and then allocates each buffer that is not saved
(`persistent=False`) without initialising it. The model classes of transformers 5 fill these buffers
in `_init_weights`. Model code that was written for transformers 4 fills them only in `__init__`.
The rotary table of such a model then contains random values, which differ at each start, and there
is no error message.

With dynamic rotary embeddings, transformers recomputes the table for a batch that has more
positions than all batches before. It keeps this table for later batches that are longer than the
original number of positions. The loss of a row then depends on earlier rows, including the rows of
an evaluation. A resumed or reloaded model starts with the original table, so its loss is different.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def mark_unfilled_memory() -> Iterator[None]:
    """Returns a context manager within which PyTorch fills new memory with NaN, the largest
    integer, or True. In this way, uninitialised memory is recognised. torch's deterministic mode
    does this by default.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warn_only)


def fill_buffers(model: PreTrainedModel, name: str) -> list[str]:
    """Fills buffers that the loader left uninitialised with the values that the model's constructor
    computes. Returns the names of these buffers.

    model   a model that was loaded within `mark_unfilled_memory`
    name    the name of the model, for the error
    Raises  UsageError if the constructor fails
    """
    unfilled = {
        buffer_name: buffer
        for buffer_name, buffer in model.named_non_persistent_buffers()
        if _is_unfilled(buffer)
    }
    if not unfilled:
        return []
    from accelerate import init_empty_weights

    try:
        # weights get no memory, buffers get their values
        with init_empty_weights(include_buffers=False):
            fresh: nn.Module = type(model)(copy.deepcopy(model.config))
        with torch.no_grad():
            for buffer_name, buffer in unfilled.items():
                buffer.copy_(fresh.get_buffer(buffer_name))
    except Exception as error:  # the model's custom code may raise any error
        raise UsageError(
            f"model {name}: its buffer {next(iter(unfilled))} is in no file and uninitialised:"
            " transformers 5 fills it only if the model's code does so in _init_weights, and"
            f" calling its constructor failed: {type(error).__name__}: {error}",
            fix=(
                "fill it in _init_weights, or save the model again with register_buffer(...,"
                " persistent=True)"
            ),
        ) from None
    return list(unfilled)


def _is_unfilled(buffer: Tensor) -> bool:
    """Returns True if all elements have the value that `mark_unfilled_memory` writes."""
    if not buffer.numel() or buffer.is_meta:
        return False
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return bool(buffer.isnan().all())
    if buffer.dtype == torch.bool:
        return bool(buffer.all())
    return bool((buffer == torch.iinfo(buffer.dtype).max).all())


def reset_dynamic_rope_tables(model: nn.Module) -> None:
    """Makes every forward of a dynamic rotary embedding start with the original table, so that a
    batch has the same result as in a newly loaded model.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic" and hasattr(module, "original_inv_freq"):
            module.register_forward_pre_hook(_restore_first_table)


def _restore_first_table(module: Any, _: object) -> None:
    if module.max_seq_len_cached > module.original_max_seq_len:
        module.register_buffer(
            "inv_freq", module.original_inv_freq.to(module.inv_freq.device), persistent=False
        )
        module.max_seq_len_cached = module.original_max_seq_len
