"""Finds what a user's own code wrote: PyTorch's counts of writes in place, and the bytes of a few elements, before and after."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..precision.parts import local_part
from .spread import spread

# what PyTorch does not count as a write (`p.data`, NumPy) is found in a sample: a few tensors, some elements of each
_SAMPLED_PARAMETERS, _SAMPLED_ELEMENTS = 32, 64


class Snapshot:
    """Of a model's parameters and an optimizer's states. `changed` names the first tensor that was written or exchanged since."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._versions, self._values = _versions(model, optimizer), _values(model, optimizer)

    def changed(self) -> str | None:
        """A parameter, whether it is trained, or a state of the optimizer; None where nothing changed."""
        before, now = self._versions, _versions(self.model, self.optimizer)
        found = next((key for key in before.keys() | now.keys() if before.get(key) != now.get(key)), None)
        if found is None:
            after = _values(self.model, self.optimizer)
            found = next((key for key in self._values if self._values[key] != after[key]), None)
        return found


def _versions(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, ...]]:
    """(identity, PyTorch's count of writes in place) of every parameter and of every tensor among the optimizer's states; of parameters
    whether they are trained too."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, tuple[int, ...]] = {name: (id(p), p._version, p.requires_grad) for name, p in model.named_parameters()}
    for p, states in optimizer.state.items():
        for key, state in states.items():
            if isinstance(state, Tensor):
                found[f"the optimizer's {key} of {names.get(id(p), 'a parameter')}"] = (id(state), state._version)
    return found


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """The bytes of some elements of some trained parameters, and of the optimizer's states of these: a NaN equals itself by them alone."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found: dict[str, Tensor] = {}
    for name, p in spread(trained, _SAMPLED_PARAMETERS):
        found[name] = _elements(p)
        for key, state in optimizer.state.get(p, {}).items():
            if isinstance(state, Tensor):
                found[f"the optimizer's {key} of {name}"] = _elements(state)
    return _on_the_host(found)


def _on_the_host(elements: dict[str, Tensor]) -> dict[str, bytes]:
    """Read in one transfer from each device: the host waits for a GPU once, not once a tensor."""
    read: dict[str, bytes] = {}
    for device in {t.device for t in elements.values()}:
        here = {name: t for name, t in elements.items() if t.device == device}
        together = torch.cat(list(here.values())).cpu().numpy().tobytes()
        start = 0
        for name, t in here.items():
            read[name] = together[start : start + t.numel()]
            start += t.numel()
    return read


def _elements(tensor: Tensor) -> Tensor:
    """uint8[...]: their bytes."""
    flat = local_part(tensor).detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)].clone().view(torch.uint8)
