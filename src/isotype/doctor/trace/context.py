"""What watchers share: the state of a trace (`Context`), the names of modules and parameters, and the events that a watcher may want.

The tracer is the `Context`; no file that uses it imports the tracer.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ...finding import Finding
from ...observe.operators import Operator
from ...observe.origin import Site
from ...observe.tape import Modules, Running
from ...pages.sheets import texts
from .origin import Origin

UNWATCHED = "or made by a step like those before it, which was not watched"
_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


say = texts(Path(__file__).with_name("findings.txt"))


def at(label: str, site: Site | None) -> tuple[tuple[str, str], ...]:
    """A finding's detail that shows a line with its text."""
    return ((label, f"{site}: {site.text}"),) if site is not None else ()


def clean(path: str) -> str:
    """A path without the names that wrappers put in."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


class Names:
    """Module paths and the owner and name of every parameter and buffer of the modules seen."""

    def __init__(self) -> None:
        self.modules: dict[int, str] = {}  # id of a live module -> its path ("" for a root)
        self._roots: list[weakref.ref[torch.nn.Module]] = []
        self._watched: dict[int, weakref.ref[torch.nn.Module]] = {}

    def learn(self, root: torch.nn.Module) -> None:
        """Names everything below a module that nothing named before; a larger tree replaces what its parts were called."""
        self._roots = [ref for ref in self._roots if (known := ref()) is not None and known is not root]
        inside = set()
        for path, module in root.named_modules():
            inside.add(id(module))
            self.modules[id(module)] = clean(path)
            if id(module) not in self._watched:
                self._watched[id(module)] = weakref.ref(module, self._forget(id(module)))
        self._roots = [ref for ref in self._roots if id(ref()) not in inside]
        self._roots.append(weakref.ref(root))

    def _forget(self, key: int) -> Callable[[object], None]:
        def gone(_: object) -> None:
            self.modules.pop(key, None)
            self._watched.pop(key, None)

        return gone

    def of(self, module: torch.nn.Module) -> str:
        """The module's path, or its class for a root."""
        return self.modules.get(id(module)) or type(module).__name__

    def roots(self) -> list[torch.nn.Module]:
        return [root for ref in self._roots if (root := ref()) is not None]

    def root_of(self, module: torch.nn.Module) -> torch.nn.Module:
        """The root that holds the module, or the module itself where none does."""
        return next((root for root in self.roots() if any(inner is module for inner in root.modules())), module)

    def find_live(self) -> None:
        """Learns the models that exist but have not run yet (for an error while wrapping or preparing one)."""
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module) and id(thing) not in self.modules]
        children = {id(child) for module in found for child in module.modules() if child is not module}
        for module in found:
            if id(module) not in children and next(module.parameters(), None) is not None:
                self.learn(module)

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """kind, name and tensor of every parameter and buffer of the roots."""
        for root in self.roots():
            for name, parameter in root.named_parameters():
                yield "parameter", clean(name), parameter
            for name, buffer in root.named_buffers():
                yield "buffer", clean(name), buffer

    def parameter_name(self, tensor: torch.Tensor) -> str | None:
        return next((name for _, name, known in self.tensors() if known is tensor), None)

    def census(self, root: torch.nn.Module | None = None) -> Counter[torch.dtype]:
        """Floating parameter elements by dtype, of one root or of all."""
        count: Counter[torch.dtype] = Counter()
        for module in [root] if root is not None else self.roots():
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    count[parameter.dtype] += parameter.numel()
        return count


def now_and_then(count: int, first: int) -> bool:
    """Whether something that costs is looked at for the count-th time: the `first` times, then where the count is a power of two."""
    return count <= first or not count & (count - 1)


@dataclass(frozen=True, slots=True)
class Recompute:
    module: str
    before: str
    after: str
    site: Site | None


class Context(Protocol):
    """The state of a trace: what runs now, the names and origins of tensors, and the other parts of the trace, by their names."""

    names: Names
    modules: Modules
    calling: Any
    device: str
    forwards: int
    autocast_around: bool
    provenance: Any
    pace: Any
    failures: Any
    # watchers that others ask
    updates: Any
    autocast: Any
    parameters: Any
    sums: Any
    defaults: Any

    @property
    def stack(self) -> list[Running]: ...
    def suspend(self, *, hooks: bool) -> bool: ...
    def resume(self) -> None: ...
    def here(self) -> tuple[Site | None, str, str]: ...
    def between_passes(self) -> bool: ...
    def calling_name(self) -> str: ...
    def default_dtype_decides(self, site: Site | None, dtype: torch.dtype, op: Operator) -> bool: ...
    def cast_by_engine(self) -> bool: ...
    def cast_by_autocast(self) -> bool: ...
    def unrecorded(self, tensor: torch.Tensor) -> Origin: ...
    def promoted(self, op: Operator, origin: Origin, wide: torch.Tensor, narrow: torch.Tensor, out: torch.Tensor) -> None: ...
    def cast(self, op: Operator, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None: ...
    def dtypes_changed(self) -> None: ...
    def census(self) -> Counter[torch.dtype]: ...
    def census_of_failure(self) -> Counter[torch.dtype]: ...


Before = Callable[[Operator, tuple, dict | None], Any]
After = Callable[[Any], None]


class Watcher:
    """One way in which a program goes wrong without an error."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def start(self) -> None:
        """The trace begins."""

    def stop(self) -> None:
        """The trace ends."""

    def root_called(self, module: torch.nn.Module) -> None:
        """The model is about to run, also where the trace will not watch this forward."""

    def forward_begins(self) -> None:
        """A watched forward of the model is about to run."""

    def entered(self, module: torch.nn.Module, args: tuple) -> None:
        """A module's forward begins; the module is the last of `context.stack`."""

    def left(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        """A module's forward has ended; `context.stack` holds the modules around it."""

    def before_ops(self) -> dict[str, Before | tuple[Before, After]]:
        """By name of an op: what is called with (op, args, kwargs) before it runs, and with what that returned (not None) after it."""
        return {}

    def promoted(self, op: Operator, origin: Origin, wide: torch.Tensor, narrow: torch.Tensor, out: torch.Tensor) -> None:
        """An op widened one of its operands to the dtype of another."""

    def cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        """A tensor was cast: by the program, by autocast, or by autograd (`origin.kind`)."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""

    def findings(self) -> list[Finding]:
        """What was found so far."""
        return []


EVENTS = ("root_called", "forward_begins", "entered", "left", "promoted", "cast", "stepping", "stepped")


class Subscriptions:
    """For each event, the methods of the watchers that declare it."""

    def __init__(self, watchers: list[Watcher]) -> None:
        def wanted(event: str) -> list[Any]:
            return [getattr(watcher, event) for watcher in watchers if getattr(type(watcher), event) is not getattr(Watcher, event)]

        self.root_called, self.forward_begins, self.entered, self.left, *others = map(wanted, EVENTS)
        self.promoted, self.cast, self.stepping, self.stepped = others
        self._ops: dict[str, tuple[Before, After | None]] = {}
        for watcher in watchers:
            for name, given in watcher.before_ops().items():
                assert name not in self._ops, f"two watchers before {name}"
                self._ops[name] = given if isinstance(given, tuple) else (given, None)

    def of_op(self, name: str) -> tuple[Before | None, After | None]:
        """What is called before an op of this name, and after it; None for most ops."""
        return self._ops.get(name, (None, None))
