"""Finds the model in the frames of a traceback, and the paths of its modules, parameters and
buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .frames import CallFrame

# modules that wrap a model without changing its parts: their names are left out of paths
_WRAPPER_NAMES = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
)


class ModelNames:
    """Finds the models in the variables of a traceback, and stores the path of each of their
    modules, parameters and buffers.

    dtype_counts  for each model, the number of elements of its parameters by dtype
    """

    def __init__(self, frames: Sequence[CallFrame]) -> None:
        self.roots = _find_roots(frames)
        self._modules: dict[int, str] = {}
        self._tensors: dict[int, str] = {}
        self._owners: dict[int, nn.Module] = {}
        # the address of a storage -> the ids of the parameters and buffers that lie in it
        self._storages: dict[int, set[int]] = {}
        self._roots: dict[int, nn.Module] = {}
        self.dtype_counts: dict[int, Counter[torch.dtype]] = {}
        for root in self.roots:
            self.dtype_counts[id(root)] = Counter()
            self._register(root)

    def _register(self, root: nn.Module) -> None:
        for path, module in root.named_modules():
            if id(module) in self._modules:
                continue
            clean_path = _remove_wrappers(path)
            self._modules[id(module)] = clean_path
            self._roots[id(module)] = root
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in self._tensors:
                    self._add_tensor(clean_path, name, parameter, module)
                    self.dtype_counts[id(root)][parameter.dtype] += parameter.numel()
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in self._tensors:
                    self._add_tensor(clean_path, name, buffer, module)

    def _add_tensor(self, path: str, name: str, tensor: torch.Tensor, owner: nn.Module) -> None:
        self._tensors[id(tensor)] = ".".join(part for part in (path, name) if part)
        self._owners[id(tensor)] = owner
        self._storages.setdefault(_storage_address(tensor), set()).add(id(tensor))

    def module_path(self, module: nn.Module) -> str:
        """Returns the path of a module inside its model. For the model itself, the path is the name
        of its class.
        """
        return self._modules.get(id(module)) or type(module).__name__

    def find_root(self, module: nn.Module) -> nn.Module | None:
        """Returns the model that contains a module, or None."""
        return self._roots.get(id(module))

    def previous_layer(self, module: nn.Module) -> nn.Module | None:
        """Returns the layer before a layer of a `ModuleList` or `Sequential`, or None."""
        root = self._roots.get(id(module))
        for parent in () if root is None else root.modules():
            if isinstance(parent, (nn.ModuleList, nn.Sequential)):
                layers = list(parent)
                positions = [i for i, layer in enumerate(layers) if layer is module]
                if positions and positions[0] > 0:
                    return layers[positions[0] - 1]
        return None

    def previous_sequential_layer(self, module: nn.Module) -> nn.Module | None:
        """Returns the layer whose result is the input of a module, if an `nn.Sequential` calls
        both. The last layer of a nested `nn.Sequential` counts.
        """
        parents = {
            id(child): parent
            for root in self.roots
            for parent in root.modules()
            for child in parent.children()
        }
        parent = parents.get(id(module))
        while isinstance(parent, nn.Sequential):
            layers = list(parent)
            position = next(i for i, layer in enumerate(layers) if layer is module)
            if position > 0:
                previous = layers[position - 1]
                while isinstance(previous, nn.Sequential) and len(previous):
                    previous = previous[-1]
                return previous
            module, parent = parent, parents.get(id(parent))
        return None

    def named_modules(self, module: nn.Module | None) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of the model that contains a module, with their paths. Without a
        module, the model must be the only one.
        """
        root = self._roots.get(id(module))
        if root is None and len(self.roots) == 1:
            root = self.roots[0]
        if root is not None:
            yield from root.named_modules()

    def tensor_path(self, tensor: Any) -> str | None:
        """Returns the path of a parameter or buffer. For a view and for `parameter.data`, returns
        the path of the parameter or buffer to which it belongs.
        """
        return self._tensors.get(self._find_key(tensor))

    def tensor_owner(self, tensor: Any) -> nn.Module | None:
        """Returns the module that owns a parameter or buffer, a view of it, or its `data`."""
        return self._owners.get(self._find_key(tensor))

    def find_tensor(self, tensor: Any) -> torch.Tensor | None:
        """Returns the parameter or buffer to which a tensor belongs: itself, or the one of which it
        is a view or the `data`.
        """
        owner = self.tensor_owner(tensor)
        name = (self.tensor_path(tensor) or "").rpartition(".")[2]
        return None if owner is None else owner._parameters.get(name, owner._buffers.get(name))

    def _find_key(self, tensor: Any) -> int:
        """Returns the id of the parameter or buffer to which a tensor belongs."""
        if not isinstance(tensor, torch.Tensor) or id(tensor) in self._tensors:
            return id(tensor)
        if tensor._base is not None:
            return id(tensor._base)
        keys = self._storages.get(_storage_address(tensor), set())
        return next(iter(keys)) if len(keys) == 1 else id(tensor)

    def has_weight_dtype(self, dtype: torch.dtype) -> bool:
        return any(dtype in counts for counts in self.dtype_counts.values())

    def majority_dtype(self, module: nn.Module | None = None) -> torch.dtype | None:
        """Returns the floating-point dtype that most parameter elements of a model have."""
        counts = self.dtype_counts_of(module)
        dtypes = [dtype for dtype in counts if dtype.is_floating_point]
        return max(dtypes, key=lambda dtype: counts[dtype], default=None)

    def dtype_counts_of(self, module: nn.Module | None) -> Counter[torch.dtype]:
        """Returns the number of elements of the parameters by dtype, of the model that contains a
        module. If no model contains it, returns the numbers of all models.
        """
        root = self._roots.get(id(module))
        if root is not None and self.dtype_counts[id(root)]:
            return self.dtype_counts[id(root)]
        return sum(self.dtype_counts.values(), Counter())


def _storage_address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's memory. For a tensor without memory, returns a number that
    no other tensor has.
    """
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def floating_weight_dtypes(module: nn.Module) -> set[torch.dtype]:
    """Returns the floating-point dtypes of the parameters of a module and of its submodules."""
    return {p.dtype for p in module.parameters() if p.is_floating_point()}


def find_modules(values: Mapping[str, Any]) -> Iterator[nn.Module]:
    """Yields the modules among these values, and the modules that are stored in their attributes."""
    for value in values.values():
        if isinstance(value, nn.Module):
            yield value
        elif not isinstance(value, (type, torch.Tensor)):
            stored = getattr(value, "__dict__", None)
            if isinstance(stored, dict):
                yield from (item for item in stored.values() if isinstance(item, nn.Module))


def _find_roots(frames: Sequence[CallFrame]) -> list[nn.Module]:
    """Returns those modules in the frames that are not part of another module. The largest module
    comes first.
    """
    candidates: dict[int, nn.Module] = {}
    for frame in frames:
        for module in find_modules(frame.variables):
            candidates.setdefault(id(module), module)
    inner = {
        id(part)
        for module in candidates.values()
        for part in module.modules()
        if part is not module
    }
    roots = [module for key, module in candidates.items() if key not in inner]
    return sorted(roots, key=lambda root: -sum(p.numel() for p in root.parameters()))


def _remove_wrappers(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_NAMES)
