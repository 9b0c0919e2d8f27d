"""What attributes and calls are, and where each is worked out. The tables of names are in `torch_names.py`."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any

from ....dtypes import parse
from . import torch_names as names
from .matrix_products import matrix_product
from .torch_calls import spectrum, torch_call
from .values import (
    NONE,
    UNFOLLOWED,
    UNKNOWN,
    Closure,
    Context,
    Dtype,
    Env,
    Instance,
    Items,
    Layer,
    Mapping,
    Method,
    Module,
    Partial,
    Scalar,
    Tensor,
)

if TYPE_CHECKING:
    from .interpreter import Interpreter


_NUMBERS = {f"{module}.{name}": getattr(math, name) for module in ("math", "torch", "numpy") for name in ("pi", "e", "inf", "nan", "tau")}


def attribute(run: Interpreter, owner: Any, node: ast.Attribute) -> Any:
    """`owner.name`: a property of a tensor, an attribute of ctx or self, a dtype of torch, or something to be called."""
    name = node.attr
    if isinstance(owner, Tensor):
        return _tensor_attribute(run, owner, node)
    if isinstance(owner, Context):
        if name in ("saved_tensors", "saved_variables"):
            return owner.saved
        if name == "needs_input_grad":
            return Items(each=Scalar(True))
        return owner.attributes.get(name, Method(owner, name))
    if isinstance(owner, Instance):
        if name in owner.attributes:
            return owner.attributes[name]
        return Method(owner, name)
    if isinstance(owner, Module):
        static = _static_method(run, owner.dotted, name)
        if static is not None:
            return static
        dotted = f"{owner.dotted}.{name}"
        if dotted in _NUMBERS:
            return Scalar(_NUMBERS[dotted])
        if dotted.startswith("torch.") and dotted.count(".") == 1:
            try:
                return Dtype(parse(name), f"{name}, written here", literal=True) if name not in ("int", "long") else Dtype("int64")
            except ValueError:
                pass
        return Module(dotted)
    if isinstance(owner, Layer) and name == "weight":
        return owner.weight
    if isinstance(owner, (Items, Mapping)):
        return Method(owner, name)
    return UNKNOWN


def _static_method(run: Interpreter, cls: str, name: str) -> Closure | None:
    """`Name.method` of a class of this file."""
    if "static_methods" not in run.file.memo:
        run.file.memo["static_methods"] = {
            (c.name, item.name): item
            for c in run.file.nodes(ast.ClassDef)
            for item in c.body
            if isinstance(item, ast.FunctionDef) and [getattr(d, "id", "") for d in item.decorator_list] == ["staticmethod"]
        }
    found = run.file.memo["static_methods"].get((cls, name))
    return Closure(found, run.file, Env()) if found is not None else None


def _tensor_attribute(run: Interpreter, owner: Tensor, node: ast.Attribute) -> Any:
    name = node.attr
    if name == "dtype":
        return Dtype(owner.dtype, f"the dtype of {run.text(node.value)}")
    if name in names.TENSOR_ATTRIBUTES:
        return owner
    if name in names.PLAIN_ATTRIBUTES:
        return Scalar()
    return Method(owner, name)


def call(
    run: Interpreter, function: Any, args: list[Any], kwargs: dict[str, Any], node: ast.Call, env: Env, sources: list[ast.expr]
) -> Any:
    """The result of calling what is no function of these files; `sources` are those of `args`."""
    if isinstance(function, Method):
        return _call_method(run, function, args, kwargs, node, env)
    if isinstance(function, Module):
        return _call_dotted(run, function.dotted, args, kwargs, node, env, sources)
    if isinstance(function, Layer):
        return _call_layer(run, function, args, node)
    return UNKNOWN


def _call_layer(run: Interpreter, layer: Layer, args: list[Any], node: ast.Call) -> Any:
    if not args or not node.args:
        return UNKNOWN
    if layer.kind == "linear":
        return matrix_product(run, "linear", node, [(run.text(node.args[0]), args[0]), (run.text(node.func) + ".weight", layer.weight)])
    if layer.kind == "embedding":
        return layer.weight.but(why=f"`{run.text(node)}`: {layer.weight.why}", node=node)
    if layer.kind == "norm":  # fp32 under CUDA's autocast; refused or not, by device, where weight and input differ
        same = isinstance(args[0], Tensor) and args[0].dtype == layer.weight.dtype and run.autocast is None
        return args[0] if same else UNFOLLOWED
    return args[0] if layer.kind == "keep" else UNKNOWN


def _call_method(run: Interpreter, method: Method, args: list[Any], kwargs: dict[str, Any], node: ast.Call, env: Env) -> Any:
    if isinstance(method.of, Tensor):
        source = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        return torch_call(run, method.name, [method.of, *args], [source, *node.args], kwargs, node, env)
    if isinstance(method.of, Context):
        if method.name == "save_for_backward":
            method.of.saved = Items(known=args)
        return NONE if method.name != "autocast" else UNKNOWN
    if isinstance(method.of, Instance):
        return _call_own_method(run, method, args, kwargs, node)
    if isinstance(method.of, Mapping):
        return _of_mapping(method.of, method.name, args)
    if isinstance(method.of, Items):
        if method.name in ("append", "insert", "extend", "pop"):
            if method.name == "append" and args and method.of.known is not None and len(method.of.known) < 4:
                method.of.known = [*method.of.known, args[0]]
            elif method.name != "append" or not args or method.of.each != args[0]:
                method.of.known, method.of.each = None, UNKNOWN
            method.of.filled = method.name in ("append", "insert")
            return NONE
        return UNKNOWN
    return UNKNOWN


def distinct(items: Items) -> Items:
    """A set of dtypes, when each is known; of anything else, how many there are is not."""
    known = items.known or []
    words = {v.word: v for v in known if isinstance(v, Dtype) and v.word is not None}
    if known and all(isinstance(v, Dtype) and v.word is not None for v in known):
        return Items(known=list(words.values()))
    return Items(each=items.element(), filled=bool(known))


def mapping_of(pairs: Any) -> Mapping:
    """`dict(pairs)`, of another dict or of pairs whose keys may be known."""
    if isinstance(pairs, Mapping):
        return Mapping(dict(pairs.entries), pairs.open)
    rows = pairs.known if isinstance(pairs, Items) and pairs.known is not None else [None]
    mapping = Mapping()
    for row in rows:
        key, value = row.known if isinstance(row, Items) and row.known is not None and len(row.known) == 2 else (UNKNOWN, UNKNOWN)
        if isinstance(key, Scalar) and isinstance(key.value, (str, int)):
            mapping.entries[key.value] = value
        else:
            mapping.open = True
    return mapping


def _of_mapping(mapping: Mapping, name: str, args: list[Any]) -> Any:
    """A dict's own methods."""
    if name in ("get", "pop") and args and isinstance(args[0], Scalar) and isinstance(args[0].value, (str, int)):
        return mapping.entries.get(args[0].value, UNKNOWN if mapping.open or len(args) < 2 else args[1])
    if name == "copy":
        return mapping_of(mapping)
    if name == "update":
        given = mapping_of(args[0]) if args else Mapping(open=True)
        mapping.entries |= given.entries
        mapping.open = mapping.open or given.open
        return NONE
    if mapping.open:
        return UNKNOWN
    keys = [Scalar(key) for key in mapping.entries]
    values = list(mapping.entries.values())
    if name == "items":
        return Items(known=[Items(known=[key, value]) for key, value in zip(keys, values)])
    return Items(known=keys if name == "keys" else values) if name in ("keys", "values") else UNKNOWN


def _call_own_method(run: Interpreter, method: Method, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
    """`self.other(...)`: run, when the class itself defines it as a plain method."""
    cls = method.of.cls
    for item in cls.body if cls else ():
        if isinstance(item, ast.FunctionDef) and item.name == method.name:
            decorators = {getattr(d, "id", getattr(d, "attr", "")) for d in item.decorator_list}
            if not decorators:
                return run.call_closure(Closure(item, run.file, Env(), method.of), args, kwargs, node)
            if decorators == {"staticmethod"}:
                return run.call_closure(Closure(item, run.file, Env()), args, kwargs, node)
    if method.name == "register_buffer" and len(args) > 1 and isinstance(args[0], Scalar) and isinstance(args[0].value, str):
        method.of.attributes[args[0].value] = args[1]
        return NONE
    return UNKNOWN


def _call_dotted(
    run: Interpreter, dotted: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call, env: Env, nodes: list[ast.expr]
) -> Any:
    head, _, name = dotted.rpartition(".")
    if dotted == "functools.partial" and args:
        return Partial(args[0], args[1:], kwargs, nodes[1:])
    if "autocast" in name and ("enabled" in kwargs or name == "autocast"):  # a package's own, made like torch's
        return Method(_autocast_region(run, args, kwargs), "autocast")
    if dotted in ("torch.is_autocast_enabled", "torch.is_autocast_cpu_enabled"):
        return Scalar(run.autocast is not None)
    if dotted in ("torch.get_autocast_dtype", "torch.get_autocast_gpu_dtype", "torch.get_autocast_cpu_dtype"):
        return Dtype(run.autocast or "fp16", "autocast's dtype")
    if head == "torch.fft":
        return spectrum(run, name, args)
    if head in ("torch", "torch.nn.functional", "torch.special", "torch.linalg") and name not in ("is_tensor", "jit", "compile"):
        if not args and "input" in kwargs:  # torch.sin(input=x)
            args, nodes = [kwargs["input"]], [k.value for k in node.keywords if k.arg == "input"]
            kwargs = {k: v for k, v in kwargs.items() if k != "input"}
        return torch_call(run, name, args, nodes, kwargs, node, env)
    if head == "":
        return _builtin(run, name, args, kwargs, node)
    if head == "math":
        return Scalar()
    return UNKNOWN


def _builtin(run: Interpreter, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
    """Python's own functions that matter to the flow of tensors."""
    first = args[0] if args else UNKNOWN
    if name == "len" and isinstance(first, Items) and first.known is not None and not first.filled:
        return Scalar(len(first.known))
    if name in ("int", "float", "bool", "len", "str", "round", "id", "hash", "type"):
        return Scalar()
    if name in ("abs",):
        return first
    if name == "dict":
        given = mapping_of(first) if args else Mapping()
        return Mapping(given.entries | kwargs, given.open or any(k.arg is None for k in node.keywords))
    if name == "reversed" and isinstance(first, Items) and first.known is not None:
        return Items(known=first.known[::-1])
    if name == "set" and isinstance(first, Items):
        return distinct(first)
    if name in ("list", "tuple", "reversed", "sorted", "iter"):
        return Items(known=list(first.known)) if isinstance(first, Items) and first.known is not None else Items(each=run.element_of(first))
    if name == "range":
        return Items(each=Scalar())
    if name == "zip":
        columns = [a.known for a in args if isinstance(a, Items) and a.known is not None]
        if columns and len(columns) == len(args) and min(map(len, columns)) <= 8:
            return Items(known=[Items(known=list(row)) for row in zip(*columns)])
        return Items(each=Items(known=[run.element_of(a) for a in args]))
    if name == "map" and len(args) == 2 and isinstance(first, Closure):
        items = args[1]
        if isinstance(items, Items) and items.known is not None and len(items.known) <= 8:
            return Items(known=[run.call_closure(first, [item], {}, node) for item in items.known])
        return Items(each=run.call_closure(first, [run.element_of(items)], {}, node))
    if name == "enumerate":
        return Items(each=Items(known=[Scalar(), run.element_of(first)]))
    if name == "sum" and isinstance(first, Items):
        element = first.element()
        if isinstance(element, Tensor):
            run.emit("accumulate", node, "sum()", (run.text(node), element), value=node)
        return element
    if name in ("any", "all") and isinstance(first, Items):
        members = first.known if first.known is not None else [first.each]
        answers = [m.value for m in members if isinstance(m, Scalar) and m.value is not UNKNOWN]
        return Scalar((any if name == "any" else all)(answers)) if answers and len(answers) == len(members) else Scalar()
    if name in ("min", "max") and all(isinstance(a, Scalar) for a in args):
        return Scalar()
    if name == "isinstance":
        if isinstance(first, Tensor) and node.args[1:] and run.file.dotted(node.args[1]) == "torch.Tensor":
            return Scalar(True)
        return Scalar()
    if name == "getattr":
        return UNKNOWN
    return UNKNOWN


def _autocast_region(run: Interpreter, args: list[Any], kwargs: dict[str, Any]) -> str | None:
    """The dtype inside `with autocast(...)`, or None when it is switched off."""
    enabled = kwargs.get("enabled", args[2] if len(args) > 2 else Scalar(True))
    dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
    if isinstance(enabled, Scalar) and enabled.value is False:
        return None
    if isinstance(args[0] if args else None, Scalar) and args[0].value is False:  # torch.cuda.amp.autocast(False)
        return None
    if isinstance(enabled, Scalar) and enabled.value is UNKNOWN:
        return run.autocast
    if dtype is UNKNOWN and run.phase == "backward":  # `torch.autocast(**kept)`: what forward had noted
        return run.scenario.autocast
    return dtype.word if isinstance(dtype, Dtype) and dtype.word else run.autocast or run.scenario.inputs
