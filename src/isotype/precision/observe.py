"""What a run really did: dtypes of parameters, gradients, optimizer states, module outputs and averages, against what was declared.

`Observer.watch()` hooks every module for one step and nothing between, so observing costs nothing on the other steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import FLOATS, itemsize, name
from ..errors import DtypeError
from ..finding import Finding, Place, Severity
from .apply import inner_model, is_norm, is_quantised
from .precision import Precision


@dataclass
class Observation:
    """One look at a run.

    dtypes       role -> dtype -> number of tensors
    violations   what broke the declaration
    promotions   module outputs wider than `compute` that the declaration does not speak of: (module, dtype), counted
    """

    step: int
    dtypes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    violations: list[Finding] = field(default_factory=list)
    promotions: Counter[tuple[str, str]] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "dtypes": {role: dict(count) for role, count in self.dtypes.items()},
            "promotions": [{"module": module, "dtype": dtype, "times": n} for (module, dtype), n in self.promotions.most_common()],
            "violations": [f.as_json() for f in self.violations],
        }

    def raise_if_violated(self) -> None:
        """Raises  DtypeError DT003 naming tensor, module and both dtypes."""
        if self.violations:
            worst = self.violations[0]
            more = f" (and {len(self.violations) - 1} more: see precision.json)" if len(self.violations) > 1 else ""
            raise DtypeError(worst.render() + more, code=None)


class Observer:
    """Compares a model, its gradients and its optimizer with a `Precision`."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.model, self.precision = model, precision
        self._names = dict(model.named_parameters())

    def look(
        self,
        observation: Observation,
        *,
        gradient: Callable[[nn.Parameter], Tensor | None] | None = None,
        states: Callable[[nn.Parameter], Mapping[str, Any]] | None = None,
        averages: Iterable[tuple[str, Tensor]] = (),
        parameters: bool = True,
    ) -> Observation:
        """Adds parameters, and what is given of gradients, optimizer states and weight averages (EMA), to `observation`."""
        p = self.precision
        for full, parameter in self._names.items():
            if parameters:
                self._look_at_parameter(observation, full, parameter)
            if parameter.requires_grad and gradient is not None and (g := gradient(parameter)) is not None:
                self._note(observation, "grads", f"gradient of {full}", name(g.dtype), p.grads)
            if parameter.requires_grad and states is not None:
                for key, state in states(parameter).items():
                    # one element is a step count; 8-bit states are quantised by design and carry their own scales
                    if isinstance(state, Tensor) and state.numel() > 1 and state.is_floating_point() and state.shape == parameter.shape:
                        self._note(observation, "optimizer", f"{key} of {full}", name(state.dtype), p.optimizer)
        for full, average in averages:
            self._note(observation, "averages", f"average of {full}", name(average.dtype), p.optimizer)
        return observation

    def _look_at_parameter(self, observation: Observation, full: str, parameter: nn.Parameter) -> None:
        p = self.precision
        if is_quantised(parameter):
            kind = getattr(getattr(parameter, "quant_state", None), "quant_type", "int8")
            self._note(observation, "base", full, kind, p.base)
        elif parameter.is_floating_point():
            role, declared = ("trainable", p.trainable) if parameter.requires_grad else ("base", p.unquantised)
            self._note(observation, role, full, name(parameter.dtype), declared)

    @contextmanager
    def watch(self, step: int) -> Iterator[Observation]:
        """Within this block the outputs of every module are noted."""
        observation = Observation(step)
        inner = inner_model(self.model)
        hooks = [
            module.register_forward_hook(self._output_hook(observation, module_name or type(inner).__name__))
            for module_name, module in inner.named_modules()
        ]
        try:
            yield observation
        finally:
            for hook in hooks:
                hook.remove()

    def _output_hook(self, observation: Observation, module_name: str) -> Callable[[nn.Module, Any, Any], None]:
        compute = self.precision.compute
        outermost = inner_model(self.model)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            declared = isinstance(module, nn.Linear | nn.Embedding) or is_norm(module)
            for tensor in floating_tensors(output):
                dtype = name(tensor.dtype)
                if declared:
                    self._note(observation, "compute", f"output of {module_name} ({type(module).__name__})", dtype, compute)
                else:
                    observation.dtypes["outputs"][dtype] += 1
                    if module is not outermost and dtype in FLOATS and itemsize(dtype) > itemsize(compute):
                        observation.promotions[module_name, dtype] += 1

        return hook

    def _note(self, observation: Observation, role: str, tensor: str, dtype: str, declared: str) -> None:
        observation.dtypes[role][dtype] += 1
        if dtype != declared:
            observation.violations.append(
                Finding(
                    code="DT003",
                    severity=Severity.ERROR,
                    message=f"{tensor} is {dtype}, declared {declared}",
                    place=Place(symbol=tensor),
                    declared=f"precision.{role}: {declared}",
                    observed=dtype,
                    cause="something changed it after the precision was put on the model: a .to(), a hook, a callback or a library",
                    fix="find the cast (isotype trace shows it), or declare what you meant in the precision section",
                )
            )


def floating_tensors(output: Any) -> Iterator[Tensor]:
    """Every floating tensor in what a module returned, however it is nested."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from floating_tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from floating_tensors(value)


def share_changed(before: list[Tensor], after: list[Tensor]) -> float:
    """Share of sampled elements that differ: 1.0 when every update took, 0.0 when all rounded away."""
    total = sum(b.numel() for b in before)
    changed = sum(int(torch.count_nonzero(b != a)) for b, a in zip(before, after))
    return changed / total if total else 0.0
