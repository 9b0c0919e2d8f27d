"""The sum at the end of one decoder layer and the first norm of the next, or the model's last norm, in one pass (`add_rms_norm`).

Known by the source of the model's own forward: a loop over its layers whose body is `x = layer(x, ...)` and nothing else, so that nothing
else reads or writes what one layer hands to the next. Each layer still returns the sum, and each norm is still called where the model
calls it. Not where a layer is called by anything but that forward, as by a wrapper around the layer or a loop of the caller's own, which
may write to the sum in ways that no tensor counts (`.data`, inference mode). Not where a layer is recomputed or compiled, nor where a hook
waits: on a module, for what it changes; on what autograd saves, as in a checkpoint around several layers; and an observer's, which has to
see the norm's arithmetic inside the norm.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from ..calling_frame import calling_frame, code_of, forward_above
from ..ops.backend import reference_runs
from . import ahead, norms
from .ahead import Next

_NEXT = "_isotype_next"
# sums in a row whose norm was not asked for, as after layers were taken out: then no more are made
MISSES = 8


class Loop(NamedTuple):
    """Names of a model's children: the list of its layers, and the norm that reads the last one's output, if one does so next."""

    layers: str
    norm: str | None


@cache
def loop_of(forward: Callable[..., Any]) -> Loop | None:
    """The loop over layers in this function's source; None where it has none of the form, or no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    for position, statement in enumerate(function.body):
        if isinstance(statement, ast.For) and (found := _layers(statement)) is not None:
            layers, variable = found
            return Loop(layers, _norm(function.body[position + 1 :], variable))
    return None


def _layers(loop: ast.For) -> tuple[str, str] | None:
    """(the list's name, the variable that goes through the layers) of `for layer in self.LAYERS: x = layer(x, ...)`."""
    item, over = loop.target, loop.iter
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "enumerate" and isinstance(item, ast.Tuple):
        item, over = item.elts[-1], over.args[0]
    over = over.value if isinstance(over, ast.Subscript) and isinstance(over.slice, ast.Slice) else over
    listed = _of_self(over)
    if listed is None or not isinstance(item, ast.Name) or len(loop.body) != 1 or loop.orelse:
        return None
    made = _assigned(loop.body[0])
    if made is None or not isinstance(made[1].func, ast.Name) or made[1].func.id != item.id:
        return None
    variable, call = made
    rest = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    return None if any(_mentions(node, variable) for node in rest) else (listed, variable)


def _norm(after: list[ast.stmt], variable: str) -> str | None:
    """The name of the child in `x = self.NORM(x)`, where this is the first statement that has x."""
    first = next((statement for statement in after if _mentions(statement, variable)), None)
    made = None if first is None else _assigned(first)
    if made is None or made[0] != variable or len(made[1].args) + len(made[1].keywords) != 1:
        return None
    return _of_self(made[1].func)


def _assigned(statement: ast.stmt) -> tuple[str, ast.Call] | None:
    """(x, the call) of `x = call(x, ...)`."""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.Call)):
        return None
    target, call = statement.targets[0], statement.value
    given = call.args[0] if call.args else None
    same = isinstance(target, ast.Name) and isinstance(given, ast.Name) and target.id == given.id
    return (target.id, call) if same and isinstance(target, ast.Name) else None


def _of_self(node: ast.expr) -> str | None:
    inner = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if inner and isinstance(node, ast.Attribute) else None


def _mentions(node: ast.AST, variable: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == variable for n in ast.walk(node))


def link(model: nn.Module, first_norm: Callable[[nn.Module], nn.Module | None]) -> None:
    """Tells each layer which norm reads its output next.

    first_norm  the norm that a layer of the form that `layers` runs begins with, or None
    """
    for parent in model.modules():
        loop = loop_of(inspect.unwrap(type(parent).forward)) if "forward" not in vars(parent) or _wraps_its_class(parent) else None
        layers = None if loop is None else getattr(parent, loop.layers, None)
        if loop is None or not isinstance(layers, nn.ModuleList):
            continue
        for layer, following in zip(layers, list(layers)[1:]):
            _link(type(parent), layer, first_norm(following), following)
        if loop.norm is not None and len(layers):
            _link(type(parent), layers[-1], getattr(parent, loop.norm, None), None)


def _wraps_its_class(parent: nn.Module) -> bool:
    """Whether what stands in place of the forward is Isotype's (`apply_precision`), which calls the class's."""
    return (getattr(getattr(vars(parent)["forward"], "__func__", None), "__module__", None) or "").split(".")[0] == "isotype"


def _link(model: type[nn.Module], layer: nn.Module, norm: nn.Module | None, following: nn.Module | None) -> None:
    if norm is None or not norms.is_ours(norm):
        return
    hooks = () if following is None else (following._forward_pre_hooks, following._backward_hooks, following._backward_pre_hooks)
    hooks = (*hooks, norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    vars(layer)[_NEXT] = Next(model, norm, hooks)


def unlink(layer: nn.Module) -> None:
    vars(layer).pop(_NEXT, None)


def next_of(layer: nn.Module) -> Next | None:
    """The norm with which this layer's last sum is made now, or None. Asked by the layer's own forward."""
    found: Next | None = vars(layer).get(_NEXT)
    if found is None or found.misses >= MISSES or torch.compiler.is_compiling() or reference_runs() or every_module._has_any_global_hook():
        return None
    if ahead.tensors_are_packed() or not _called_by(found.model):
        return None
    for hooks in (layer._forward_hooks, layer._backward_hooks, layer._backward_pre_hooks, *found.hooks):
        if hooks:
            return None
    return found if norms.is_ours(found.norm) else None


def _called_by(model: Any) -> bool:
    """Whether the forward of this class called the layer whose forward asks `next_of`, with nothing of anyone else's between."""
    frame = calling_frame(forward_above(2))
    return frame is not None and frame.f_code is code_of(model)


def sum_before(following: Next, residual: Tensor, term: Tensor) -> Tensor:
    """residual + term, its norm noted on it; the sum alone where the norm's weight is not at hand (shared, on another device)."""
    norm, weight = following.norm, following.norm._parameters["weight"]
    if type(weight) is not nn.Parameter or weight.device != term.device or weight.is_inference() or residual.dtype != term.dtype:
        return residual + term
    normed, total = norms.normed_sum(norm, term, residual)
    ahead.note(following, total, normed)
    return total
