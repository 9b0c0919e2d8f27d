"""Frozen layers of quantised checkpoints in a training program: those that pass no gradient on, and those that are packed no longer."""

from __future__ import annotations

from typing import Any

import torch

from ...dtypes import name as dtype_name
from ...finding import Finding, listed
from ...observe.origin import Site, here, place_of
from ...wording import counted
from .context import Context, Watcher, at, say

_ZERO = ("RoundBackward", "FloorBackward", "CeilBackward", "TruncBackward", "SignBackward")  # nodes whose derivative is zero
_WHOLE = (torch.bfloat16, torch.float16, torch.float32)


class Cuts(Watcher):
    """Looks at the graph of each frozen linear layer as it leaves: whether a gradient of its output reaches its input.

    transformers' W8A8 models of compressed-tensors round activations under no_grad, torchao's by `round`: LoRA gradients are 97% off.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._found: dict[str, tuple[Site | None, str]] = {}  # layer -> where it was called, why

    def left(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        if not torch.is_grad_enabled() or not _is_frozen_linear(module) or not args or type(output) is not torch.Tensor:
            return
        given = args[0]
        if not isinstance(given, torch.Tensor) or not given.requires_grad or not given.is_floating_point():
            return
        if not _reaches(output, given):
            rounds = output.requires_grad or not output.is_floating_point()
            why = "by an operator whose derivative is zero" if rounds else "where none is recorded (no_grad, detach or whole numbers)"
            self._found.setdefault(self._context.names.of(module), (here(), why))

    def findings(self) -> list[Finding]:
        if not self._found:
            return []
        name, (site, why) = next(iter(self._found.items()))
        layers = counted(len(self._found), "frozen layer")
        return [say("TR025", place_of(site, name), at("at", site), layers=layers, shown=listed(list(self._found)), why=why)]


class Widened(Watcher):
    """Looks at the layers of a model whose configuration says that it is quantised, after a forward that trains."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._found: dict[str, Any] | None = None

    def left(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        if self._context.stack or self._found is not None or not torch.is_grad_enabled():
            return
        given = getattr(getattr(module, "config", None), "quantization_config", None)
        if given is None:
            return
        head = getattr(module, "get_output_embeddings", lambda: None)()
        layers = [m for m in module.modules() if m is not head and _is_frozen_linear(m)]
        weights = [w for m in layers if isinstance(w := getattr(m, "weight", None), torch.Tensor)]
        # subclasses of Tensor (torchao) say bf16 and hold other bytes
        if weights and all(type(w.data) is torch.Tensor and w.dtype in _WHOLE for w in weights):
            settings = given if isinstance(given, dict) else given.to_dict()
            library = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
            word, count = dtype_name(weights[0].dtype), len(weights)
            self._found = {"model": self._context.names.of(module), "site": here(), "library": library, "word": word, "count": count}

    def findings(self) -> list[Finding]:
        if self._found is None:
            return []
        site = self._found["site"]
        return [say("TR026", place_of(site, self._found["model"]), at("at", site), **self._found)]


def _is_frozen_linear(module: torch.nn.Module) -> bool:
    frozen = not any(p.requires_grad for p in module._parameters.values() if p is not None)
    return frozen and hasattr(module, "in_features") and not module._modules


def _reaches(output: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether a gradient of `output` reaches `given` by nodes whose derivative is not zero."""
    if output.grad_fn is None:
        return output is given
    goal = torch.autograd.graph.get_gradient_edge(given).node
    oldest, waiting, seen = goal._sequence_nr() if given.grad_fn is not None else -1, [output.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is goal:
            return True
        # a node that was made before `given` does not lead to it
        if node in seen or node.name().startswith(_ZERO) or (oldest >= 0 and node._sequence_nr() < oldest):
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return False
