"""What computes attention, as a line of a run's header and of its plan."""

from __future__ import annotations

from torch import nn

from ..model.architecture import attention_line as of_transformers
from ..optimize import joint_attention
from ..precision.precision import Precision


def attention_line(model: nn.Module, asked: str, precision: Precision, *, device_type: str) -> str:
    """The implementation and why it is that one; of diffusers' models the back ends of their layers; "" where neither is known.

    asked  `model.attention`
    """
    return of_transformers(model, asked) or joint_attention.said(model, precision.compute, device_type=device_type)
