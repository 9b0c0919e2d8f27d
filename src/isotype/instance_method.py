"""Defines `InstanceMethod`, a method of one instance that replaces the method of its class, and
`Placement`, the record of which op runs in a module. `optimize` and `apply_precision` put such
methods on modules.

A plain bound method in an instance's `__dict__` is pickled by its name, which the class does not
have: such a file can be written but not read. If another library has wrapped the method, removing
it from the `__dict__` would remove the wrapper too. `InstanceMethod` avoids both.

`is_current` tells whether the class still has the method that was replaced. It is checked once per
step, not at each call. This module imports no torch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any


class InstanceMethod:
    """Calls `function(instance, ...)`. A deep copy or a pickle of the instance has the method too,
    bound to the copy.

    function   `factory` itself, or the result of `factory(replaced, *arguments)` if there are
               arguments. Reading a pickle calls the factory again
    factory    an importable function, because a pickle stores it by its name
    name       the name of the method
    previous   the previous value of this name in the instance's `__dict__`; None if there was none
    replaced   the method of the class, which `function` replaces; None if the class had
               another method when this was pickled
    """

    # Instances have no __dict__: functools.update_wrapper, which other libraries call, would copy
    # its content to their wrapper.
    __slots__ = (
        "__weakref__",
        "arguments",
        "factory",
        "function",
        "instance",
        "name",
        "previous",
        "replaced",
    )

    def __init__(
        self,
        factory: Callable[..., Any],
        instance: Any,
        name: str = "forward",
        arguments: tuple[Any, ...] | None = None,
    ) -> None:
        self.replaced: Any = getattr(type(instance), name)
        self.factory = factory
        self.arguments = arguments
        self.instance = instance
        self.name = name
        self.previous = None
        self.function = factory if arguments is None else factory(self.replaced, *arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.instance, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> InstanceMethod:
        duplicate = memo[id(self)] = object.__new__(type(self))
        for slot in self.__slots__[1:]:
            value = getattr(self, slot)
            setattr(
                duplicate,
                slot,
                copy.deepcopy(value, memo) if slot in ("instance", "previous") else value,
            )
        return duplicate

    def __getstate__(self) -> tuple[Any, ...]:
        # `replaced` is not pickled. It is looked up when the pickle is read, because the class may
        # have another method under this name by then.
        return (
            self.is_current,
            (self.factory, self.instance, self.name, self.arguments),
            self.previous,
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        was_current, constructor_arguments, previous = state
        self.__init__(*constructor_arguments)  # type: ignore[misc]  # the same arguments
        self.previous = previous
        if not was_current:
            self.function = getattr(type(self.instance), self.name)
            self.replaced = None

    @property
    def is_current(self) -> bool:
        """True if the class still has the replaced method, or transformers' wrapper of it.

        Two changes of the class are harmless: FSDP2 gives each unit a class of its own, and
        transformers wraps the forward that a subclass of its decoder layers inherits.
        """
        current = getattr(type(self.instance), self.name)
        return current is self.replaced or (
            self.replaced is not None
            and _unwrap_checkpointing(current) is _unwrap_checkpointing(self.replaced)
        )

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.function

    @property
    def __self__(self) -> Any:
        return self.instance

    @property
    def __signature__(self) -> inspect.Signature:
        # The signature of the class's method: trainers read from it which columns of the data a
        # model takes.
        return inspect.signature(self.bound_class_method())

    def bound_class_method(self) -> MethodType:
        """Returns the class's method, bound to the instance."""
        return MethodType(getattr(type(self.instance), self.name), self.instance)

    def install(self) -> None:
        # bypasses nn.Module's __setattr__
        self.previous = self.instance.__dict__.get(self.name)
        self.instance.__dict__[self.name] = self

    def uninstall(self) -> None:
        """Restores the previous method. If other code has wrapped this method, its wrapper stays
        and calls the previous method from then on.
        """
        attributes = self.instance.__dict__
        original: Any = self.bound_class_method() if self.previous is None else self.previous
        if attributes.get(self.name) is self:
            del attributes[self.name]
            if self.previous is not None:
                attributes[self.name] = self.previous
        for key in [key for key, value in attributes.items() if value is self]:
            # accelerate stores the forward that it wraps and restores it when its hook is removed
            attributes[key] = original
        # a wrapper's closure still holds this object
        self.function = self.factory = original.__func__
        self.arguments = None
        if self.previous is None:
            self.replaced = None


def _unwrap_checkpointing(method: Any) -> Any:
    while getattr(method, "__globals__", {}).get(
        "__name__"
    ) == "transformers.modeling_layers" and hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


# key in a module's `__dict__` for the settings of its installed forward
INSTALLED_KEY = "_isotype_settings"


def install_forward(
    module: Any, forward: Callable[..., Any], settings: Any, entries: int = 1
) -> None:
    """Replaces the forward of the module by `forward(self, ...)` or by an `InstanceMethod`.
    `get_forward_settings` later returns `settings`.

    settings  what the forward needs at each call, for example a dtype or a tuple of modules
    entries   how many entries of the manifest describe this forward
    """
    if isinstance(forward, InstanceMethod):
        method = forward
    else:
        method = InstanceMethod(forward, module)
    # Written to the instance's __dict__: nn.Module's __setattr__ would register a module that is in
    # the settings.
    module.__dict__[INSTALLED_KEY] = settings, entries, method
    method.install()


def get_forward_settings(module: Any) -> Any:
    """Returns the settings of the module's installed forward; None if none is installed."""
    return module.__dict__.get(INSTALLED_KEY, (None,))[0]


def get_method(module: Any) -> InstanceMethod | None:
    """Returns the module's installed forward; None if none is installed."""
    method: InstanceMethod | None = module.__dict__.get(INSTALLED_KEY, (None, 0, None))[2]
    return method


def uninstall_forward(module: Any) -> int:
    """Undoes `install_forward`, also if other code has wrapped the forward. Returns how many
    entries of the manifest described this forward; 0 if no forward was installed.
    """
    if INSTALLED_KEY not in module.__dict__:
        return 0
    _, entries, method = module.__dict__.pop(INSTALLED_KEY)
    method.uninstall()
    count: int = entries
    return count


@dataclass(frozen=True, slots=True)
class Placement:
    """One module and the op that runs in it.

    part    the kind of place: norm, layer, gated mlp, rotary, attention, head, lora, 4-bit,
            generate, experts, or foreign (another library's module); a denoiser also has block,
            modulated norm, joint attention and activation
    module  the path of the module in the model; "" is the model itself
    kind    the class of the module; for a LoRA layer, the class of its base layer
    op      the op that runs in the module; None if the module runs its own code
    reason  why the module has no op; if it has one, the result of its test call or ""
    """

    part: str
    module: str
    kind: str
    op: str | None
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.module or '(the model)'}: {self.op or 'left alone'}"
        return f"{text}: {self.reason}" if self.reason else text
