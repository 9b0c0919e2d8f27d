"""A method of one instance that replaces its class's, and a line on what became of a module.
`optimize` and `apply_precision` put such methods on modules.

A plain bound method in an instance's `__dict__` is pickled by its name, which the class does not
have: such a file can be written but not read. And once another library has wrapped the method,
taking it out of the `__dict__` would take the wrapper too.

Whether the class still has the method that was replaced is asked once a step (`stands`), not at a
call. Imports no torch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any


class InstanceMethod:
    """`function(instance, ...)`; a deep copy or a pickle of the instance carries it along, bound to
    the copy.

    function   `make`, or with arguments `make(the class's method, *arguments)`, which is made again
               where a pickle is read
    make       importable by its name, which is what a pickle holds
    name       the method's
    before     what the instance had in its place when this one was put there; None for its class's
    over       the class's method that the function computes; None where the class had another one
               as this was pickled
    """

    # no __dict__: functools.update_wrapper, which other libraries call, would copy its content to
    # their wrapper
    __slots__ = (
        "__weakref__",
        "arguments",
        "before",
        "function",
        "instance",
        "make",
        "name",
        "over",
    )

    def __init__(
        self,
        make: Callable[..., Any],
        instance: Any,
        name: str = "forward",
        arguments: tuple[Any, ...] | None = None,
    ) -> None:
        self.over: Any = getattr(type(instance), name)
        self.make = make
        self.arguments = arguments
        self.instance = instance
        self.name = name
        self.before = None
        self.function = make if arguments is None else make(self.over, *arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.instance, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> InstanceMethod:
        made = memo[id(self)] = object.__new__(type(self))
        for slot in self.__slots__[1:]:
            value = getattr(self, slot)
            setattr(
                made, slot, copy.deepcopy(value, memo) if slot in ("instance", "before") else value
            )
        return made

    def __getstate__(self) -> tuple[Any, ...]:
        # `over` is looked up where it is read: a pickle would hold it by its name, under which a
        # class may have another method by then
        return self.stands, (self.make, self.instance, self.name, self.arguments), self.before

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        stood, made, before = state
        self.__init__(*made)  # type: ignore[misc]  # as it was made
        self.before = before
        if not stood:
            self.function = getattr(type(self.instance), self.name)
            self.over = None

    @property
    def stands(self) -> bool:
        """Whether the class has the method that it had, or transformers' wrapper of it.

        FSDP2 gives each unit a class of its own, and transformers wraps the forward that a subclass
        of its decoder layers inherits.
        """
        own = getattr(type(self.instance), self.name)
        return own is self.over or (
            self.over is not None and _within_checkpointing(own) is _within_checkpointing(self.over)
        )

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.function

    @property
    def __self__(self) -> Any:
        return self.instance

    @property
    def __signature__(self) -> inspect.Signature:
        # the signature of the class's method: trainers read from it which columns of the data a
        # model takes
        return inspect.signature(self.own())

    def own(self) -> MethodType:
        """The class's method, bound."""
        return MethodType(getattr(type(self.instance), self.name), self.instance)

    def put(self) -> None:
        # bypasses nn.Module's __setattr__
        self.before = self.instance.__dict__.get(self.name)
        self.instance.__dict__[self.name] = self

    def take_back(self) -> None:
        """Restores what was there before. A wrapper that other code has put around this method
        stays, and then calls what was there before.
        """
        attributes = self.instance.__dict__
        there: Any = self.own() if self.before is None else self.before
        if attributes.get(self.name) is self:
            del attributes[self.name]
            if self.before is not None:
                attributes[self.name] = self.before
        for key in [key for key, value in attributes.items() if value is self]:
            # accelerate keeps the forward it found, to give it back when its own hook is removed
            attributes[key] = there
        # a wrapper's closure still holds this object
        self.function = self.make = there.__func__
        self.arguments = None
        if self.before is None:
            self.over = None


def _within_checkpointing(method: Any) -> Any:
    while getattr(method, "__globals__", {}).get(
        "__name__"
    ) == "transformers.modeling_layers" and hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


MARK = "_isotype_settings"


def put(module: Any, forward: Callable[..., Any], settings: Any, entries: int = 1) -> None:
    """`forward(self, ...)`, or a method made for the instance, becomes its forward; `settings` is
    what it reads back with `settings_of`.

    entries  the number of entries of the manifest that it belongs to
    """
    if isinstance(forward, InstanceMethod):
        method = forward
    else:
        method = InstanceMethod(forward, module)
    # in the instance's __dict__, past Any's __setattr__, which would register a module found in
    # settings
    module.__dict__[MARK] = settings, entries, method
    method.put()


def settings_of(module: Any) -> Any:
    """What `put` was given for this instance; None where nothing was put."""
    return module.__dict__.get(MARK, (None,))[0]


def method_of(module: Any) -> InstanceMethod | None:
    """What `put` has put on this instance; None where nothing was put."""
    found: InstanceMethod | None = module.__dict__.get(MARK, (None, 0, None))[2]
    return found


def take_back(module: Any) -> int:
    """Undoes `put`, also below what others have put around it since. Returns the number of its
    entries in the manifest, 0 where there was nothing to undo.
    """
    if MARK not in module.__dict__:
        return 0
    _, entries, method = module.__dict__.pop(MARK)
    method.take_back()
    count: int = entries
    return count


@dataclass(frozen=True, slots=True)
class Placement:
    """One module, and the op that runs there now.

    part    norm, layer, gated mlp, rotary, attention, head, lora, 4-bit, generate, experts, or
            foreign; of a denoiser also block, modulated norm, joint attention, activation
    module  its path in the model; "" is the model itself
    kind    its class; of a LoRA layer, the class of its base layer
    op      the op; None where the module runs its own code
    reason  without an op: why there is none. With one: what the probe found out, or ""
    """

    part: str
    module: str
    kind: str
    op: str | None
    reason: str = ""

    def __str__(self) -> str:
        said = f"{self.module or '(the model)'}: {self.op or 'left alone'}"
        return f"{said}: {self.reason}" if self.reason else said
