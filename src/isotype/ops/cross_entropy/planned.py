"""The loss's two GPU kernels as operators on tensors without data, for plans: what they read and write. T tokens, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from ..library import library_op
from .rule import LossRule


def _losses(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    loss_T = torch.empty(logits_TV.shape[0], dtype=torch.float32, device=logits_TV.device)
    return loss_T, torch.empty_like(loss_T)


@library_op("cross_entropy_kernel_forward(Tensor logits, Tensor targets) -> (Tensor, Tensor)", fake=_losses)
def _forward(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("this operator has no data: the kernel is triton.cross_entropy_forward")


@library_op("cross_entropy_kernel_backward(Tensor logits, Tensor targets, Tensor lse, Tensor(a!) out) -> ()", fake=lambda *_: None)
def _backward(logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor, out_TV: Tensor) -> None:
    raise NotImplementedError("this operator has no data: the kernel is triton.cross_entropy_backward")


def cross_entropy_forward(logits_TV: Tensor, targets_T: Tensor, rule: LossRule) -> tuple[Tensor, Tensor]:
    return _forward(logits_TV, targets_T)


def cross_entropy_backward(
    logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor, dloss_T: Tensor, rule: LossRule, out_TV: Tensor, classes: int, first: int = 0
) -> Tensor:
    _backward(logits_TV, targets_T, lse_T, out_TV)
    return out_TV


def loss_and_gradient(logits_TV: Tensor, targets_T: Tensor, rule: LossRule, out_TV: Tensor, dloss: Tensor) -> tuple[Tensor, Tensor]:
    loss_T, lse_T = _forward(logits_TV, targets_T)
    _backward(logits_TV, targets_T, lse_T, out_TV)
    return loss_T, lse_T
