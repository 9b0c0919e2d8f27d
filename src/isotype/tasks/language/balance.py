"""A mixture's balancing loss, which keeps its router from choosing few experts: the family's own function and coefficient.

transformers adds it to the loss of a model that is given labels and has `output_router_logits`. The head's loss is computed apart from the
model here, so that the routers' scores are read by hooks, and the family's function is called on them with the mask of the data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...errors import UsageError

NAME = "aux_loss"
_FUNCTION = "load_balancing_loss_func"
# the routers of each model, in its order
_known: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()


def coefficient_of(model: nn.Module, asked: float | None) -> float:
    """The coefficient of a run: `train.aux_loss`, else the model's own where its config asks for the loss, else 0.

    Raises  UsageError for a model whose family has no such loss
    """
    lm = mixture(model)
    if lm is None:
        if asked:
            raise UsageError(
                f"train.aux_loss: {asked} has no effect: the model's family has no balancing loss of its own",
                fix="leave train.aux_loss out",
            )
        return 0.0
    own = float(getattr(lm, "router_aux_loss_coef", 0.0)) if getattr(lm.config, "output_router_logits", False) else 0.0
    return own if asked is None else asked


def mixture(model: nn.Module) -> Any:
    """The causal LM inside that has routers and a balancing loss, or None."""
    found = (m for m in model.modules() if hasattr(m, "router_aux_loss_coef") and hasattr(sys.modules[type(m).__module__], _FUNCTION))
    return next(found, None)


class Scores:
    """What the routers of a forward gave, layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        self.lm, self.logits = mixture(model), list[Tensor]()
        if model not in _known:
            kind = next(found["router_logits"].target_class for m in model.modules() if "router_logits" in (found := _recorded(m)))
            _known[model] = [m for m in model.modules() if type(m) is kind]
        self.routers = _known[model]

    def loss(self, mask: Tensor | None) -> Tensor:
        """fp32[]: of the tokens that are no padding."""
        function = getattr(sys.modules[type(self.lm).__module__], _FUNCTION)
        wide = tuple(logits.float() for logits in self.logits)
        made: Tensor = function(wide, self.lm.num_experts, self.lm.num_experts_per_tok, mask)
        return made


def _recorded(module: Any) -> Any:
    return getattr(module, "_can_record_outputs", None) or {}


@contextmanager
def scores_of(model: nn.Module) -> Iterator[Scores]:
    """The scores of the forward that runs within this block; a recompute's, inside backward, are not read."""
    scores = Scores(model)

    def keep(_: nn.Module, args: Any, output: Any) -> None:
        # (scores before the choice, weights, indices)
        scores.logits.append(output[0])

    hooks = [router.register_forward_hook(keep) for router in scores.routers]
    try:
        yield scores
    finally:
        for hook in hooks:
            hook.remove()


def with_balance(loss: Tensor, aux: Tensor, share: float, coefficient: float, *, training: bool) -> Tensor:
    """float[2]: the loss with the balancing loss of these tokens, and the balancing loss, both as shares of a step's.

    share  of the step's tokens that are this batch's
    An evaluation's loss stays the tokens' own.
    """
    mine = aux.to(loss.device) * share
    return torch.stack((loss.float() + coefficient * mine if training else loss.float(), mine.detach()))
