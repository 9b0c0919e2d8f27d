"""Registers functions as PyTorch operators. Compiled graphs, tracers, fake tensors and dispatch
modes then see one operator and its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ..observe.operators import OPERATORS_WITH_CONTRACT, PRODUCTS_WITH_CONTRACT

_OPS = torch.library.Library("isotype", "FRAGMENT")
F = TypeVar("F", bound=Callable[..., Any])


def library_op(
    schema: str, *, fake: Callable[..., Any], is_product: bool = False
) -> Callable[[F], F]:
    """Registers the decorated function as `torch.ops.isotype.NAME` for every device.

    fake        returns outputs without values
    is_product  whether the operator computes what one of PyTorch's matrix products, convolutions or
                attention functions computes, so that an observer counts the dtype of its operands

    The operator has no autograd formula, because the autograd.Function of the op calls it.
    `torch.library.custom_op` does the same, but imports torch._dynamo at its first call (1.2 s and
    148 MiB in a process that compiles nothing), and takes 8 us per call instead of 2 us.
    """
    name = schema[: schema.index("(")]
    _OPS.define(schema)
    OPERATORS_WITH_CONTRACT.add(f"isotype::{name}")
    if is_product:
        PRODUCTS_WITH_CONTRACT.add(f"isotype::{name}")
    torch.library.register_fake(f"isotype::{name}", fake, lib=_OPS)

    def register(function: F) -> F:
        _OPS.impl(name, function, "CompositeExplicitAutograd")
        # the operator parses its arguments by the schema
        op = getattr(torch.ops.isotype, name).default
        op.__wrapped__ = function  # the function itself, without a dispatch mode
        return cast(F, op)

    return register
