"""Names of modules and parameters, learnt when a module first runs or, for an error outside any forward, by looking for them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import torch

_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


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
