"""Detects forwards that another library has replaced. Compares a new forward with the forward of
the class for a small test input. Creates copies of forwards in which some global variables are
replaced.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..instance_method import INSTALLED_KEY, InstanceMethod, Placement, install_forward
from ..ops.widened_calls import run_with_widened_calls

T = TypeVar("T")
# import names of libraries whose kernels a model may already run
KERNEL_LIBRARIES = ("liger_kernel", "unsloth", "unsloth_zoo", "cut_cross_entropy")


def library_name(function: Any) -> str:
    """Returns the name of the package that defines a function or class. If a function wraps a
    function of a kernel library, returns the name of this library.
    """
    current_function = getattr(function, "__func__", function)
    packages = []
    while current_function is not None:
        # functools.wraps copies __module__, but the globals name the wrapper's own module
        module = (
            getattr(current_function, "__globals__", {}).get("__name__")
            or getattr(current_function, "__module__", None)
            or "another library"
        )
        packages.append(str(module).split(".")[0])
        current_function = (
            None
            if inspect.isclass(current_function)
            else getattr(current_function, "__wrapped__", None)
        )
    return next((package for package in packages if package in KERNEL_LIBRARIES), packages[0])


def foreign_kernel_reason(module: nn.Module) -> str | None:
    """If kernels of another library already run in this module, returns the reason. Otherwise
    returns None. The class of the module may be from that library, or the library may have replaced
    the forward of the class or of the instance.
    """
    class_library = library_name(type(module))
    if class_library in KERNEL_LIBRARIES:
        return f"it is {class_library}'s {type(module).__name__}"
    if "forward" in module.__dict__:
        return f"its forward was already replaced by {library_name(module.__dict__['forward'])}"
    forward_library = library_name(type(module).forward)
    if forward_library in KERNEL_LIBRARIES:
        return f"its class's forward was replaced by {forward_library}"
    return None


def replacement_blocker(module: nn.Module) -> str | None:
    """Returns the reason why this instance's forward must not be replaced, or None if it may be."""
    if INSTALLED_KEY in module.__dict__:
        return "already optimized"
    return foreign_kernel_reason(module)


def make_placement(
    part: str, path: str, module: nn.Module, op: str | None, reason: str = ""
) -> Placement:
    """Creates the manifest's entry for the module at this path of the model."""
    return Placement(part, path, type(module).__name__, op, reason)


def place_replacement(
    part: str,
    path: str,
    module: nn.Module,
    forward: Callable[..., Any],
    op: str,
    *,
    settings_or_reason: Any,
    note: str = "",
) -> Placement:
    """Installs `forward` on the module and returns the manifest's entry. If `settings_or_reason` is
    a text, the text is the reason why the module cannot be replaced, and the module is not changed.

    part                the kind of module, as in `Placement.part`
    op                  the name of the op that `forward` runs
    settings_or_reason  the settings that `forward` needs at each call, or the reason as a text
    """
    if isinstance(settings_or_reason, str):
        return make_placement(part, path, module, None, settings_or_reason)
    install_forward(module, forward, settings_or_reason)
    return make_placement(part, path, module, op, note)


def make_probe_copy(
    module: nn.Module, modules: dict[str, nn.Module], parameters: dict[str, nn.Parameter]
) -> nn.Module:
    """Returns a shallow copy of the module with tiny children and parameters in fp64. A test runs
    the forward of the class and the new forward on this copy and compares their results.

    The module itself is never called, because on some CPUs a forward in evaluation mode permanently
    repacks 4-bit layers. Children that are not replaced are copied too, so that training or
    evaluation mode can be set on the copy (`computes_same_in_train_and_eval`).
    """
    probe_copy = copy.copy(module)
    copies = {
        name: child if child is None else make_probe_copy(child, {}, {})
        for name, child in module._modules.items()
        if name not in modules
    }
    probe_copy._modules = {**module._modules, **copies, **modules}
    probe_copy._parameters = {**module._parameters, **parameters}
    probe_copy._forward_hooks = type(module._forward_hooks)()
    probe_copy._forward_pre_hooks = type(module._forward_pre_hooks)()
    return probe_copy


# types of attributes that are settings of a module
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class ProbeLayer(nn.Module):
    """In a test, takes the place of a projection, a norm or an MLP. It computes a simple function
    that depends on `variant`.
    """

    def __init__(self, variant: float, *, returns_tuple: bool = False) -> None:
        super().__init__()
        self.variant = variant
        self.returns_tuple = returns_tuple

    def forward(self, x: Tensor) -> Any:
        output = (x * (1.0 + self.variant)).sin() + self.variant
        return (output, None) if self.returns_tuple else output


def module_kind(module: Any) -> tuple[Any, ...]:
    """Returns a key that describes the code and the settings of a module. If two modules have the
    same key, they differ only in their weights.
    """
    parts = tuple((name, type(child), _settings(child)) for name, child in module.named_children())
    weights = tuple(
        (name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items()
    )
    processor_calls = tuple(
        type(value).__call__ for name, value in vars(module).items() if name == "processor"
    )
    return type(module), type(module).forward, _settings(module), parts, weights, processor_calls


def _settings(module: Any) -> tuple[Any, ...]:
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if _is_plain(value) and name != "training"
    )


def _is_plain(value: Any) -> bool:
    """Whether this is a number, a string, a dtype, or a tuple of such values. A tuple that contains
    modules is no setting. As part of a key, it would also keep these modules in memory.
    """
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def cache_by_module_kind(recognise: Callable[[Any], T]) -> Callable[[Any], T]:
    """Caches the result of `recognise(module)` for all modules of the same kind (`module_kind`),
    because a large model has hundreds of modules of one kind.
    """
    results: dict[tuple[Any, ...], T] = {}

    @functools.wraps(recognise)
    def look_up(module: Any) -> T:
        if module._buffers:  # the values of buffers are not part of the key
            return recognise(module)
        kind = module_kind(module)
        try:
            return results[kind]
        except KeyError:
            return results.setdefault(kind, recognise(module))
        except TypeError:  # a setting that is not hashable
            return recognise(module)

    return look_up


# tolerance for outputs. An fp32 step inside the original (a norm's .float()) limits the agreement
# to 1.6e-7 in 30 families of transformers. Rounding to hundredths is 1e-4 of a probe's values, and
# must be detected
_VALUE_TOLERANCE = 2e-6
# tolerance for gradients. A norm's gradient has more fp32 steps than its output. A custom backward
# that stores 8 or 16 bits differs by 2e-4 or more
_GRADIENT_TOLERANCE = 2e-5


def computes_same(
    reference: Callable[[], Tensor], candidate: Callable[[], Tensor], *inputs: Tensor
) -> bool:
    """Whether candidate and reference return the same output and the same gradients with respect to
    `inputs`. Returns False if one of them raises an error.

    The gradients are compared because a model may have a custom backward, for example an autograd
    function or hooks on saved tensors.
    """
    try:
        with torch.no_grad():
            if not _is_close(reference(), candidate(), _VALUE_TOLERANCE):
                return False
        inputs = tuple(x for x in inputs if not x.is_inference())
        return all(
            _is_close(*pair, _GRADIENT_TOLERANCE)
            for pair in zip(
                _gradients(reference, inputs), _gradients(candidate, inputs), strict=True
            )
        )
    except Exception:
        return False


def _is_close(expected: Tensor | None, candidate: Tensor | None, tolerance: float) -> bool:
    if expected is None or candidate is None:
        return expected is candidate
    expected = expected.double()
    candidate = candidate.double()
    return torch.allclose(
        expected, candidate, rtol=0.0, atol=tolerance * float(expected.abs().max())
    )


def _gradients(function: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Computes the gradients of a weighted sum of the outputs of `function`, with a different weight for
    each value.
    """
    if not inputs:
        return ()
    required_grad = [x.requires_grad for x in inputs]
    try:
        for x in inputs:
            x.requires_grad_(True)
        with torch.enable_grad():
            output = function()
            weights = (
                torch.arange(1, output.numel() + 1, dtype=output.dtype, device=output.device)
                .cos()
                .view_as(output)
            )
            return torch.autograd.grad(output, inputs, weights, allow_unused=True)
    finally:
        for x, trained in zip(inputs, required_grad, strict=True):
            x.requires_grad_(trained)


def computes_same_in_train_and_eval(
    probe_copy: nn.Module,
    reference: Callable[[], Tensor],
    candidate: Callable[[], Tensor],
    *inputs: Tensor,
) -> bool:
    """Whether `computes_same` returns True both in training and in evaluation mode. The gradients
    of the copy's trained weights are compared too. Both modes are tested because dropout is only
    active in training, and models are loaded in evaluation mode.
    """
    tensors_by_id = {
        id(t): t for t in (*inputs, *(p for p in probe_copy.parameters() if p.requires_grad))
    }
    return all(
        computes_same(reference, candidate, *tensors_by_id.values())
        for _ in map(probe_copy.train, (True, False))
    )


@dataclass(frozen=True, slots=True)
class Replacement:
    """Describes how a global variable is replaced. The new value is `make(value, *options)`.

    name     the name of the global
    make     a function or class at module level, so that a pickle finds it by name
    options  plain values
    """

    name: str
    make: Callable[..., Any]
    options: tuple[Any, ...] = ()

    @property
    def form(self) -> str:
        """Returns a text that identifies this replacement among all replacements of the same global
        variable.
        """
        return "-".join((self.name, self.make.__name__, *map(str, self.options)))


def rebuild_blocker(forward: Any) -> str | None:
    """Returns the reason why this forward cannot be copied with other global variables, or None if
    it can. A decorator is copied with it if it is a Python function that holds the decorated function
    in a variable of its closure, as with `functools.wraps`.
    """
    function = forward
    while isinstance(function, FunctionType):
        if not hasattr(function, "__wrapped__"):
            return None
        if not any(value is function.__wrapped__ for value in _read_closure(function)):
            break
        function = function.__wrapped__
    return "its forward is decorated: rebuilt over other globals it would lose the decorator"


def _read_closure(function: FunctionType) -> list[Any]:
    """Returns the values of the variables in a function's closure, and None for one without a
    value.
    """
    values: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            values.append(None)
    return values


def install_rebuilt_forward(
    module: nn.Module, replacements: list[Replacement], *, widens_calls: bool = False
) -> None:
    """Installs a copy of the instance's forward that uses these replacements of global variables.

    widens_calls  whether the copy runs within `WidenedCalls`
    """
    factory = rebuild_widened_forward if widens_calls else rebuild_forward
    install_forward(
        module,
        InstanceMethod(factory, module, arguments=(replacements,)),
        None,
        len(replacements),
    )


def rebuild_widened_forward(forward: Any, replacements: list[Replacement]) -> Any:
    return run_with_widened_calls(rebuild_forward(forward, replacements))


def rebuild_forward(forward: Any, replacements: list[Replacement]) -> Any:
    """Returns a copy of a forward in which these global variables are replaced. If the Python
    module of the forward has no such global variables, other code has replaced the forward. It is
    then returned unchanged.
    """
    if rebuild_blocker(forward):
        return forward
    if hasattr(forward, "__wrapped__"):
        rebuilt = rebuild_forward(forward.__wrapped__, replacements)
        return forward if rebuilt is forward.__wrapped__ else _decorate_again(forward, rebuilt)
    if any(replacement.name not in forward.__globals__ for replacement in replacements):
        return forward
    name = ".".join(
        (
            "isotype.optimize.globals_of",
            forward.__module__,
            *(replacement.form for replacement in replacements),
        )
    )
    module = sys.modules.get(name)
    if module is None:
        module = ModuleType(
            name,
            f"Globals of {forward.__module__} with {', '.join(replacement.name for replacement in replacements)}"
            " replaced.",
        )
        # the copy includes __builtins__, which Dynamo needs
        module.__dict__.update(
            {
                k: v
                for k, v in forward.__globals__.items()
                if k not in ("__name__", "__loader__", "__spec__")
            }
        )
        module.__dict__.update(
            {
                replacement.name: replacement.make(
                    forward.__globals__[replacement.name], *replacement.options
                )
                for replacement in replacements
            }
        )
        sys.modules[name] = module
    return _copy_function(forward, module.__dict__, forward.__closure__)


def _decorate_again(decorated: FunctionType, function: FunctionType) -> FunctionType:
    """Returns a copy of a decorated function that calls another function in place of the one that
    it wraps.
    """
    wrapped: Any = decorated.__wrapped__  # type: ignore[attr-defined]
    cells = tuple(
        CellType(function) if value is wrapped else cell
        for cell, value in zip(decorated.__closure__ or (), _read_closure(decorated), strict=True)
    )
    copied = _copy_function(decorated, decorated.__globals__, cells)
    copied.__dict__.update(decorated.__dict__)
    copied.__dict__["__wrapped__"] = function
    return copied


def _copy_function(
    function: FunctionType,
    global_variables: dict[str, Any],
    closure: tuple[CellType, ...] | None,
) -> FunctionType:
    copied = FunctionType(
        function.__code__, global_variables, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__doc__ = function.__doc__
    copied.__annotations__ = function.__annotations__
    copied.__qualname__ = function.__qualname__
    return copied
