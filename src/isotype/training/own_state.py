"""Restores the state of a program's own objects: what its dataset, collator, loss and modules change when a preflight calls them.

Counters, lists, caches, generators of random numbers and small tensors are put back, also in a function's closure, its module's
variables and class attributes; objects of libraries are left alone below the first level. An iterator cannot be put back: it is reported
before it is read.
"""

from __future__ import annotations

import functools
import io
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..libraries import of_a_library, package_of

_DEPTH = 8
# longer containers are restored, but what is in them is not looked at: they are rows
_LONG = 256
_LARGE = 1 << 20  # elements of a tensor or an array


class OwnState:
    """The state that can be reached from `roots`.

    iterators  names of the types of iterators and open files among it
    """

    def __init__(self, roots: Iterable[Any], *, without: Iterable[Any] = ()) -> None:
        self.iterators: list[str] = []
        self._puts: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {id(x): x for x in without}
        for root in roots:
            self._look(root, 0)

    def put_back(self) -> None:
        for put in self._puts:
            put()

    def _look(self, value: Any, depth: int) -> None:
        if value is None or isinstance(value, bool | int | float | str | bytes | nn.Parameter) or id(value) in self._seen or depth > _DEPTH:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Generator):
            self._puts.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._puts.append(functools.partial(setattr, bits, "state", bits.state))
        elif isinstance(value, np.random.RandomState):
            self._puts.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._puts.append(functools.partial(value.setstate, value.getstate()))
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            if value.size <= _LARGE and value.flags.writeable:
                self._puts.append(functools.partial(np.copyto, value, value.copy()))
        elif isinstance(value, list | deque | set):
            self._puts.append(functools.partial(_fill, value, list(value)))
            self._each(value, depth)
        elif isinstance(value, tuple | frozenset):
            self._each(value, depth)
        elif isinstance(value, dict):
            self._bindings(value, depth)
        else:
            self._object(value, depth)

    def _object(self, value: Any, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, MethodType):
            self._look(value.__self__, depth)
            self._look(value.__func__, depth)
        elif isinstance(value, functools.partial):
            self._each((value.func, *value.args, *value.keywords.values()), depth)
        elif isinstance(value, Iterator | io.IOBase):
            self.iterators.append(type(value).__name__)
        elif isinstance(value, type):
            if _own(value):
                self._class(value, depth)
        elif depth == 0 or isinstance(value, nn.Module | Dataset) or _own(type(value)):
            if isinstance(getattr(value, "__dict__", None), dict):
                self._bindings(value.__dict__, depth)
            for cls in type(value).__mro__:
                self._look(cls, depth + 1)

    def _each(self, values: Any, depth: int) -> None:
        if len(values) <= _LONG:
            for value in list(values):
                self._look(value, depth + 1)

    def _bindings(self, names: dict[Any, Any], depth: int) -> None:
        self._puts.append(functools.partial(_rebind, names, dict(names)))
        self._each(names.values(), depth)

    def _function(self, function: FunctionType, depth: int) -> None:
        if not _own(function):
            return
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._puts.append(functools.partial(setattr, cell, "cell_contents", held))
            self._look(held, depth + 1)
        self._each((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()), depth)
        around = function.__globals__
        for name in function.__code__.co_names:
            if name in around and not isinstance(around[name], type):
                self._puts.append(functools.partial(around.__setitem__, name, around[name]))
                self._look(around[name], depth + 1)

    def _class(self, cls: type, depth: int) -> None:
        for name, value in list(vars(cls).items()):
            if name.startswith("__") and not isinstance(value, FunctionType):
                continue
            if isinstance(value, bool | int | float | str | None):
                self._puts.append(functools.partial(_set_again, cls, name, value))
            else:
                self._look(getattr(value, "__func__", value), depth + 1)

    def _tensor(self, tensor: Tensor) -> None:
        if type(tensor) is Tensor and tensor.numel() <= _LARGE and not tensor.is_inference() and not tensor.is_meta:
            self._puts.append(functools.partial(_restore_tensor, tensor, tensor._version, tensor.detach().clone()))


def modules_of_own_code(model: nn.Module) -> list[nn.Module]:
    """Those whose class none of the libraries wrote, as a model's that brings its own code."""
    return [module for module in model.modules() if _own(type(module))]


@contextmanager
def own_state_restored(roots: Iterable[Any], *, without: Iterable[Any] = ()) -> Iterator[OwnState]:
    """Puts back, on exit, what was reached from `roots` on entry; `without` and what only it leads to is left alone."""
    state = OwnState(roots, without=without)
    try:
        yield state
    finally:
        state.put_back()


def _own(made: Any) -> bool:
    """Whether a class or a function was written by none of the libraries."""
    package = package_of(made)
    return package == "__main__" or not (of_a_library(made) or package in sys.stdlib_module_names)


def _fill(container: Any, before: list[Any]) -> None:
    if len(container) != len(before) or any(a is not b for a, b in zip(container, before)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(before)


def _rebind(names: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in [name for name in names if name not in before]:
        del names[name]
    for name, value in before.items():
        if name not in names or names[name] is not value:
            names[name] = value


def _set_again(cls: type, name: str, before: object) -> None:
    # only what changed: an Enum refuses to have a member set, even to itself
    if vars(cls).get(name) is not before:
        setattr(cls, name, before)


def _restore_tensor(tensor: Tensor, version: int, before: Tensor) -> None:
    if tensor._version != version:
        with torch.no_grad():
            tensor.copy_(before)
