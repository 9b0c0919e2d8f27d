"""What a run really did: dtypes of parameters, gradients, optimizer states, module outputs, averages and files, against what was declared.

`Observer.watch()` hooks every module for one step and nothing between, so observing costs nothing on the other steps. What cannot be seen
from outside (`UNSEEN`) is said so, with the reason, and never counted as observed (0091).
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..dtypes import FLOATS, itemsize, name, to_torch
from ..errors import DtypeError
from ..finding import Finding, Place, Severity
from .apply import declared_dtype, inner_model, is_narrowed, is_norm, is_quantised
from .kept import kept_modules
from .precision import Precision

# role -> why no run of one process observes it
UNSEEN = {
    "norms": "inside one kernel, Isotype's rms_norm (fp32 by its contract) or PyTorch's layer_norm; what leaves a norm is under compute",
    "reduce": "one process: nothing was summed across ranks",
}
_SUMS = frozenset((torch.ops.aten.mean, torch.ops.aten.pow, torch.ops.aten.rsqrt, torch.ops.aten.var, torch.ops.aten.sqrt))
_IN_FILES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64"}  # safetensors' names


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
            role = "trainable" if parameter.requires_grad else "base"
            declared = declared_dtype(self.model, full, parameter, p)
            self._note(observation, role, full, name(parameter.dtype), declared)

    def look_at_loss(self, observation: Observation, dtype: torch.dtype) -> None:
        self._note(observation, "loss", "the loss", name(dtype), self.precision.loss)

    def look_at_task(self, observation: Observation, tensors: Iterable[tuple[str, str, str]]) -> None:
        """(role, tensor, dtype) of the roles that only the run's task has."""
        for role, tensor, dtype in tensors:
            self._note(observation, role, tensor, dtype, getattr(self.precision, role))

    def look_at_files(self, observation: Observation, folder: Path, declared: str) -> None:
        """The floating tensors of a saved result, as its files have them; integers are packed 4-bit weights or ids."""
        from safetensors import safe_open

        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for full in file.keys():  # noqa: SIM118  # not a mapping
                    if dtype := _IN_FILES.get(file.get_slice(full).get_dtype()):
                        self._note(observation, "save", f"{full} in {path.name}", dtype, declared)

    @contextmanager
    def watch(self, step: int, *, role: str = "compute") -> Iterator[Observation]:
        """Within this block the outputs of every module are noted; `role` generate: of the products, while tokens are made."""
        observation = Observation(step)
        inner = inner_model(self.model)
        hooks = [
            module.register_forward_hook(self._output_hook(observation, module_name or type(inner).__name__, role))
            for module_name, module in inner.named_modules()
        ]
        # a forward that is the instance's own is an op's: one kernel, with nothing to see in it
        plain = [(n, m) for n, m in inner.named_modules() if is_norm(m) and "forward" not in m.__dict__] if role == "compute" else []
        for module_name, norm in plain:
            norm.forward = self._with_its_arithmetic(observation, module_name, norm.forward)  # type: ignore[method-assign]
        try:
            yield observation
        finally:
            for _, norm in plain:
                del norm.forward
            for hook in hooks:
                hook.remove()

    def _with_its_arithmetic(self, observation: Observation, module_name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a norm in plain PyTorch, with the dtypes of its sums noted."""

        def noted(dtype: torch.dtype) -> None:
            self._note(observation, "norms", f"arithmetic of {module_name}", name(dtype), self.precision.norms)

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with _Arithmetic(noted):
                return forward(*args, **kwargs)

        return watched

    def _output_hook(self, observation: Observation, module_name: str, role: str) -> Callable[[nn.Module, Any, Any], None]:
        compute = getattr(self.precision, role)
        generating = role == "generate"  # norms and embeddings leave in `compute` then too: only products are judged
        outermost = inner_model(self.model)
        kept = kept_modules(outermost, to_torch(self.precision.compute))

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            declared = (
                isinstance(module, nn.Linear) if generating else isinstance(module, nn.Linear | nn.Embedding) or is_narrowed(module, kept)
            )
            for tensor in floating_tensors(output):
                dtype = name(tensor.dtype)
                if declared:
                    self._note(observation, role, f"output of {module_name} ({type(module).__name__})", dtype, compute)
                elif not generating:
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


class _Arithmetic(TorchDispatchMode):
    """Tells of every sum, power and root by the dtype it was computed in."""

    def __init__(self, noted: Callable[[torch.dtype], None]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _SUMS and isinstance(out, Tensor) and out.is_floating_point():
            self.noted(out.dtype)
        return out


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
