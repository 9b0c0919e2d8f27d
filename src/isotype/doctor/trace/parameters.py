"""Detects parameters and buffers that change their dtype while the program runs. A cast to a
narrower dtype and back rounds the values permanently.

The module also detects two faults of quantised checkpoints. In one fault, frozen layers pass no
gradient on. In the other fault, the weights were converted back to plain tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from ...dtypes import format_dtype
from ...finding import Finding, join_names
from ...observe.operators import FLOATS
from ...observe.origin import (
    TORCH_FOLDER,
    Site,
    call_sites,
    innermost_site,
    innermost_user_site,
    is_library_file,
    site_place,
)
from ...wording import pluralise
from .context import Context, Watcher, make_finding, site_detail

SAMPLE = 4096  # the number of elements of a tensor that are compared before and after a cast
_EVALUATION_NAMES = frozenset(
    {"eval", "evaluate", "evaluation", "valid", "validate", "validation", "predict", "prediction"}
)
_MAX_CALLERS = 6  # the number of callers of a cast that are checked for an evaluation


@dataclass(slots=True)
class Change:
    """One change of a tensor's dtype.

    stack    the lines of code that were running, innermost first
    rounded  the fraction of the sampled values that the new dtype cannot represent
    calls    the number of forward calls of the owning module before the change
    steps    the number of optimizer steps before the change
    """

    name: str
    old_dtype: torch.dtype
    new_dtype: torch.dtype
    stack: list[Site]
    rounded: float
    calls: int
    steps: int

    @property
    def loses_bits(self) -> bool:
        return self.new_dtype.itemsize < self.old_dtype.itemsize and self.rounded > 0

    @property
    def site(self) -> Site:
        return innermost_user_site(self.stack) or self.stack[0]

    @property
    def evaluation_site(self) -> Site | None:
        """If a function whose name suggests an evaluation (such as `evaluate`) made the cast,
        returns the line in this function. Otherwise returns None.
        """
        near_sites = [site for site in self.stack if not site.file.startswith(TORCH_FOLDER)][
            :_MAX_CALLERS
        ]
        return next(
            (
                site
                for site in near_sites
                if _EVALUATION_NAMES & set(site.function.rpartition(".")[2].lower().split("_"))
            ),
            None,
        )

    def __str__(self) -> str:
        outer_sites = [
            site
            for site in self.stack[self.stack.index(self.site) + 1 :]
            if not is_library_file(site.file)
        ][:2]
        callers = "".join(f", called from {site}" for site in outer_sites)
        return (
            f"{self.name} changed from {format_dtype(self.old_dtype)} to {format_dtype(self.new_dtype)} at"
            f" {self.site}{callers}"
        )


@dataclass(slots=True)
class Fault:
    """A harmful change of dtype, with its kind and the names of the tensors."""

    kind: str  # round trip | between steps | before training
    cast_down: Change
    cast_back: Change | None
    names: list[str]


class Parameters(Watcher):
    """Watches `module.to(dtype)` and similar calls."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._history: dict[tuple[int, str], list[Change]] = {}
        self._calls: Counter[int] = Counter()  # id of a module -> its forward calls
        self._last_evaluation: Counter[int] = (
            Counter()
        )  # id of a module -> number of its last call without gradients
        # id of a parameter -> optimizer steps that updated it
        self._steps: Counter[int] = Counter()
        self._is_casting = False
        self._has_new_changes = True
        self._faults: dict[tuple[str, str], Fault] = {}
        # (module, its calls, parameter, cast down, cast back) of parameters used in between
        self._round_trips: list[tuple[int, int, int, Change, Change]] = []

    def activate(self) -> AbstractContextManager[Any]:
        original: Callable[..., Any] = torch.nn.Module._apply

        def _apply(module: torch.nn.Module, fn: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_casting:
                return original(module, fn, *args, **kwargs)
            self._is_casting = True
            try:
                snapshot = {
                    key: (tensor.dtype, tensor.detach().flatten()[:SAMPLE].clone())
                    for key, tensor in _module_tensors(module)
                    if tensor.dtype in FLOATS and tensor.device.type != "meta"
                }
                result = original(module, fn, *args, **kwargs)
                self._compare(module, snapshot)
                return result
            finally:
                self._is_casting = False

        return mock.patch.object(torch.nn.Module, "_apply", _apply)

    def on_module_enter(self, module: torch.nn.Module, args: tuple) -> None:
        self._calls[id(module)] += 1
        if not torch.is_grad_enabled():
            self._last_evaluation[id(module)] = self._calls[id(module)]

    def on_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Finds parameters that the optimizer trains although a cast has rounded their values.
        Either the parameters had a wider dtype in earlier steps, or an evaluation cast them to a
        narrower dtype.
        """
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if not self._has_new_changes and all(id(p) in self._steps for p in parameters[:1]):
            return
        self._steps.update(map(id, parameters))
        owners = {id(p): key for key, p in self._root_tensors()}
        for parameter in parameters:
            key = owners.get(id(parameter), (0, ""))
            change = next(
                (
                    change
                    for change in reversed(self._history.get(key, []))
                    if change.loses_bits and change.new_dtype == parameter.dtype
                ),
                None,
            )
            if change is not None and change.steps:
                self._add_fault("between steps", change, None)
            elif (
                change is not None
                and change.evaluation_site is not None
                and self._last_evaluation[key[0]] > change.calls
            ):
                self._add_fault("before training", change, None)
        self._has_new_changes = False

    def describe_change(self, tensor: torch.Tensor) -> str:
        """Returns a sentence about the last change of the dtype of a parameter, or "" if its dtype
        never changed.
        """
        for key, parameter in self._root_tensors():
            if parameter is tensor and self._history.get(key):
                return str(self._history[key][-1])
        return ""

    def describe_first_change(self, names: set[str]) -> str:
        """Returns a sentence about the last change of the dtype of one of these parameters, or ""
        if no dtype changed.
        """
        changes = (
            history[-1]
            for history in self._history.values()
            if history and history[-1].name in names
        )
        return next((str(change) for change in changes), "")

    def _root_tensors(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for root in self._context.names.roots():
            yield from _module_tensors(root)

    def _compare(
        self,
        module: torch.nn.Module,
        snapshot: dict[tuple[int, str], tuple[torch.dtype, torch.Tensor]],
    ) -> None:
        paths = {
            id(owner): self._context.names.modules.get(owner) or path
            for path, owner in module.named_modules()
        }
        for key, tensor in _module_tensors(module):
            dtype, values = snapshot.get(key, (tensor.dtype, tensor))
            if dtype != tensor.dtype:
                self._record(key, f"{paths[key[0]]}.{key[1]}".strip("."), dtype, values, tensor)

    def _record(
        self,
        key: tuple[int, str],
        name: str,
        old_dtype: torch.dtype,
        old_values: torch.Tensor,
        tensor: torch.Tensor,
    ) -> None:
        self._has_new_changes = True
        new_dtype = tensor.dtype
        self._context.on_dtype_change()
        if old_values.numel():
            rounded = float((old_values.to(new_dtype).to(old_dtype) != old_values).float().mean())
        else:
            rounded = 0.0
        change = Change(
            name,
            old_dtype,
            new_dtype,
            call_sites(3),
            rounded,
            self._calls[key[0]],
            self._steps[id(tensor)],
        )
        history = self._history.setdefault(key, [])
        cast_down = history[-1] if history else None
        if (
            cast_down is not None
            and cast_down.loses_bits
            and cast_down.old_dtype == new_dtype
            and (change.calls > cast_down.calls or cast_down.steps)
        ):
            self._round_trips.append((key[0], change.calls, id(tensor), cast_down, change))
        history.append(change)
        del history[:-4]

    def _add_fault(self, kind: str, cast_down: Change, cast_back: Change | None) -> None:
        fault = self._faults.setdefault(
            (kind, str(cast_down.site)), Fault(kind, cast_down, cast_back, [])
        )
        if cast_down.name not in fault.names:
            fault.names.append(cast_down.name)

    def _is_copy(self, module: int) -> bool:
        """True if a module belongs to a copy of another model. Rounding the weights of a copy does
        no harm if the copy is not trained later.
        """
        roots = self._context.names.roots()
        root_of_module = next(
            (root for root in roots if any(id(inner) == module for inner in root.modules())), None
        )
        if root_of_module is None:
            return True
        names = [name for name, _ in root_of_module.named_parameters()]
        return any(
            root is not root_of_module
            and type(root) is type(root_of_module)
            and [name for name, _ in root.named_parameters()] == names
            for root in roots
        )

    def findings(self) -> list[Finding]:
        for module, calls, parameter, cast_down, cast_back in self._round_trips:
            if self._steps[parameter] or self._calls[module] > calls or not self._is_copy(module):
                self._add_fault("round trip", cast_down, cast_back)
        self._round_trips.clear()
        return [_build_finding(fault) for fault in self._faults.values()]


def _module_tensors(module: torch.nn.Module) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
    """Yields every parameter and buffer, with the id of its module and its name in this module."""
    for owner in module.modules():
        for leaf, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                yield (id(owner), leaf), tensor


def _build_finding(fault: Fault) -> Finding:
    cast_down = fault.cast_down
    caller = cast_down.evaluation_site or next(
        (site for site in cast_down.stack if not site.file.startswith(TORCH_FOLDER)), cast_down.site
    )
    details = site_detail("called at", cast_down.site)
    if caller != cast_down.site:
        details += site_detail("cast by", caller)
    return make_finding(
        "TR011",
        site_place(cast_down.site),
        details,
        kind=fault.kind,
        count=len(fault.names),
        shown=join_names(fault.names, 4),
        wide=format_dtype(cast_down.old_dtype),
        low=format_dtype(cast_down.new_dtype),
        where=cast_down.site,
        up=fault.cast_back and fault.cast_back.site,
        share=100 * cast_down.rounded,
        name=cast_down.name,
    )


# autograd nodes whose derivative is zero
_ZERO_DERIVATIVE_NODES = (
    "RoundBackward",
    "FloorBackward",
    "CeilBackward",
    "TruncBackward",
    "SignBackward",
)
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class BlockedGradients(Watcher):
    """Checks whether each frozen linear layer passes the gradient of its output to its input.

    Some layers pass no gradient on, because they round their activations. In transformers, W8A8
    models of compressed-tensors have such layers, because they round under no_grad. Models of
    torchao have such layers too, because they use `round`. With such layers, the gradients of a
    LoRA adapter have a relative error of 97%.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._blocked_layers: dict[
            str, tuple[Site | None, str]
        ] = {}  # layer -> where it was called, and the reason

    def on_module_exit(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        if (
            not torch.is_grad_enabled()
            or not _is_frozen_linear(module)
            or not args
            or type(output) is not torch.Tensor
        ):
            return
        layer_input = args[0]
        if (
            not isinstance(layer_input, torch.Tensor)
            or not layer_input.requires_grad
            or not layer_input.is_floating_point()
        ):
            return
        if not _gradient_reaches(output, layer_input):
            has_zero_derivative = output.requires_grad or not output.is_floating_point()
            if has_zero_derivative:
                reason = "by an operator whose derivative is zero"
            else:
                reason = "where none is recorded (no_grad, detach or whole numbers)"
            self._blocked_layers.setdefault(
                self._context.names.module_path(module), (innermost_site(), reason)
            )

    def findings(self) -> list[Finding]:
        if not self._blocked_layers:
            return []
        name, (site, reason) = next(iter(self._blocked_layers.items()))
        layers = pluralise(len(self._blocked_layers), "frozen layer")
        return [
            make_finding(
                "TR025",
                site_place(site, name),
                site_detail("at", site),
                layers=layers,
                shown=join_names(list(self._blocked_layers)),
                why=reason,
            )
        ]


class DequantisedLayers(Watcher):
    """Finds models that should be quantised but are not. This class checks models whose
    configuration says that they are quantised. If all weights are plain tensors after a forward in
    training, it reports this.
    """

    def on_module_exit(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        quantization = getattr(getattr(module, "config", None), "quantization_config", None)
        if (
            quantization is None
            or self._context.stack
            or self.reports
            or not torch.is_grad_enabled()
        ):
            return
        head = getattr(module, "get_output_embeddings", lambda: None)()
        layers = [m for m in module.modules() if m is not head and _is_frozen_linear(m)]
        weights = [
            w for layer in layers if isinstance(w := getattr(layer, "weight", None), torch.Tensor)
        ]
        # Tensor subclasses of torchao report bf16 but hold quantised bytes
        if weights and all(
            type(weight.data) is torch.Tensor and weight.dtype in _PLAIN_DTYPES
            for weight in weights
        ):
            settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
            library = str(
                getattr(settings.get("quant_method"), "value", settings.get("quant_method"))
            )
            site = innermost_site()
            model = self._context.names.module_path(module)
            facts = {
                "model": model,
                "library": library,
                "word": format_dtype(weights[0].dtype),
                "count": len(weights),
            }
            self.reports[model] = make_finding(
                "TR026", site_place(site, model), site_detail("at", site), **facts
            )


def _is_frozen_linear(module: torch.nn.Module) -> bool:
    is_frozen = not any(p.requires_grad for p in module._parameters.values() if p is not None)
    return is_frozen and hasattr(module, "in_features") and not module._modules


def _gradient_reaches(output: torch.Tensor, source: torch.Tensor) -> bool:
    """True if a gradient of `output` reaches `source` through autograd nodes whose derivative is
    not zero.
    """
    if output.grad_fn is None:
        return output is source
    target_node = torch.autograd.graph.get_gradient_edge(source).node
    oldest_number = target_node._sequence_nr() if source.grad_fn is not None else -1
    pending = [output.grad_fn]
    visited = set[Any]()
    while pending:
        node = pending.pop()
        if node is target_node:
            return True
        # a node that is older than the target node does not lead to it
        if (
            node in visited
            or node.name().startswith(_ZERO_DERIVATIVE_NODES)
            or (oldest_number >= 0 and node._sequence_nr() < oldest_number)
        ):
            continue
        visited.add(node)
        pending += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return False
