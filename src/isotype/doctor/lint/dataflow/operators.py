"""What an operation does to dtypes, as torch 2.13 does it; emits the events. The tables of names are in `torch_names.py`."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from ....dtypes import is_float, parse, promote
from . import torch_names as names
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
    Made,
    Mapping,
    Method,
    Module,
    Scalar,
    Tensor,
)

if TYPE_CHECKING:
    from .interpreter import Interpreter

Labelled = tuple[str, Any]


# -- attributes --------------------------------------------------------------------------------------------------------------


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
        dotted = f"{owner.dotted}.{name}"
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


def _tensor_attribute(run: Interpreter, owner: Tensor, node: ast.Attribute) -> Any:
    name = node.attr
    if name == "dtype":
        return Dtype(owner.dtype, f"the dtype of {run.text(node.value)}")
    if name in names.TENSOR_ATTRIBUTES:
        return owner
    if name in names.PLAIN_ATTRIBUTES:
        return Scalar()
    return Method(owner, name)


# -- calls -------------------------------------------------------------------------------------------------------------------


def call(run: Interpreter, function: Any, args: list[Any], kwargs: dict[str, Any], node: ast.Call, env: Env) -> Any:
    """The result of calling what is no function of these files."""
    if isinstance(function, Method):
        return _call_method(run, function, args, kwargs, node, env)
    if isinstance(function, Module):
        return _call_dotted(run, function.dotted, args, kwargs, node, env)
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
        return _torch(run, method.name, [method.of, *args], [source, *node.args], kwargs, node, env)
    if isinstance(method.of, Context):
        if method.name == "save_for_backward":
            method.of.saved = Items(known=args)
        return NONE if method.name != "autocast" else UNKNOWN
    if isinstance(method.of, Instance):
        return _call_own_method(run, method, args, kwargs, node)
    if isinstance(method.of, Items):
        if method.name in ("append", "insert", "extend", "pop"):
            if method.name == "append" and args and method.of.known == []:
                method.of.known, method.of.each = None, args[0]
            elif method.name != "append" or not args or method.of.each != args[0]:
                method.of.known, method.of.each = None, UNKNOWN
            method.of.filled = method.name in ("append", "insert")
            return NONE
        return UNKNOWN
    return UNKNOWN


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
    return UNKNOWN


def _call_dotted(run: Interpreter, dotted: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call, env: Env) -> Any:
    head, _, name = dotted.rpartition(".")
    if name == "autocast":
        return Method(_autocast_region(run, args, kwargs), "autocast")
    if dotted in ("torch.is_autocast_enabled", "torch.is_autocast_cpu_enabled"):
        return Scalar(run.autocast is not None)
    if dotted in ("torch.get_autocast_dtype", "torch.get_autocast_gpu_dtype", "torch.get_autocast_cpu_dtype"):
        return Dtype(run.autocast or "fp16", "autocast's dtype")
    if head in ("torch", "torch.nn.functional", "torch.special", "torch.linalg") and name not in ("is_tensor", "jit", "compile"):
        return _torch(run, name, args, list(node.args), kwargs, node, env)
    if head == "":
        return _builtin(run, name, args, kwargs, node)
    if head == "math":
        return Scalar()
    return UNKNOWN


def _builtin(run: Interpreter, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
    """Python's own functions that matter to the flow of tensors."""
    first = args[0] if args else UNKNOWN
    if name in ("int", "float", "bool", "len", "str", "round", "id", "hash", "type"):
        return Scalar()
    if name in ("abs",):
        return first
    if name == "dict" and not args:
        return Mapping(dict(kwargs), open=any(k.arg is None for k in node.keywords))
    if name in ("list", "tuple", "reversed", "sorted", "iter"):
        return Items(known=list(first.known)) if isinstance(first, Items) and first.known is not None else Items(each=run.element_of(first))
    if name == "range":
        return Items(each=Scalar())
    if name == "zip":
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
    return dtype.word if isinstance(dtype, Dtype) and dtype.word else run.autocast or run.scenario.inputs


def _torch(run: Interpreter, name: str, args: list[Any], nodes: list[ast.expr], kwargs: dict[str, Any], node: ast.Call, env: Env) -> Any:
    """A function of torch or method of a tensor: `args` with the tensor itself first, `nodes` their sources."""
    first = args[0] if args else kwargs.get("input", UNKNOWN)
    out = kwargs.get("out")
    if name in names.LOWER or name in names.LOWER_IN_PLACE:
        return _product_call(run, name, args, nodes, kwargs, node, env)
    if name in names.SCATTER:
        return _scatter_call(run, name, args, nodes, kwargs, node)
    if name in names.IN_PLACE:
        if (
            isinstance(first, Tensor)
            and name in ("add_", "sub_", "addcmul_")
            and nodes
            and isinstance(nodes[0], ast.Name)
            and len(args) > 1
        ):
            note_in_place(run, nodes[0], node, first, args[1], node, env)
        return first
    if isinstance(out, Tensor):
        return out
    if name in names.LIKE or name in names.NEW or name in names.FACTORIES:
        return _factory(run, name, args, kwargs, node)
    if name in ("to", "type", "type_as"):
        return _cast_call(run, name, args, kwargs, node)
    if name in names.CASTS and isinstance(first, Tensor):
        return cast(run, first, Dtype(names.CASTS[name], f".{name}()", literal=True), node)
    if name in names.PROMOTE:
        return _promote_call(run, name, args, nodes, kwargs, node)
    if name == "is_floating_point" and isinstance(first, Tensor) and first.dtype is not None:
        return Scalar(first.floating)
    if name in names.NOT_TENSOR:
        return Scalar()
    if name in names.TO_INTEGER:
        return Tensor("int64")
    if name in names.TO_BOOL:
        return Tensor("bool")
    if name in ("finfo", "iinfo", "no_grad", "enable_grad", "device", "Size", "manual_seed"):
        return Scalar()
    if not isinstance(first, Tensor):
        return UNKNOWN
    if name in ("cos", "sin", "polar"):
        at = 1 if name == "polar" and len(args) > 1 else 0  # polar(radius, angle)
        if isinstance(args[at], Tensor) and args[at].positional:
            run.emit("table", node, name, (run.text(nodes[at]), args[at]))
    if name in names.SPLIT:
        return Items(each=first)
    if name in names.VALUES_AND_INDICES or (name in ("max", "min", "median", "cummax") and (len(args) > 1 or "dim" in kwargs)):
        return (
            Items(known=[first, Tensor("int64")])
            if not (len(args) > 1 and isinstance(args[1], Tensor))
            else elementwise(run, node, args[:2], nodes)
        )
    if name in names.LOSS:
        return _reduced(_autocast_result(run, name, _with_dtype(run, first, kwargs, node)), kwargs)
    if name in names.REDUCE:
        result = _autocast_result(run, name, _with_dtype(run, first, kwargs, node))
        whole = len(args) == 1 and "dim" not in kwargs and "axis" not in kwargs
        if first.dtype is not None and not is_float(first.dtype) and name in ("sum", "prod"):
            result = result.but(dtype="int64") if "dtype" not in kwargs else result
        return result.but(zero_dim=True) if whole else result
    if name == "embedding":
        return args[1] if len(args) > 1 else UNFOLLOWED
    if name in names.KEEP:
        return _autocast_result(run, name, _with_dtype(run, first, kwargs, node))
    return UNKNOWN


def _with_dtype(run: Interpreter, tensor: Tensor, kwargs: dict[str, Any], node: ast.Call) -> Tensor:
    """softmax(x, dtype=...) and its like cast first."""
    dtype = kwargs.get("dtype")
    if dtype is None or (isinstance(dtype, Scalar) and dtype.value is None):
        return tensor
    return cast(run, tensor, dtype, node) if isinstance(dtype, Dtype) else tensor.but(dtype=None)


def _autocast_result(run: Interpreter, name: str, tensor: Tensor) -> Tensor:
    if run.autocast and tensor.low and name in names.DEVICE_DEPENDENT:
        return tensor.but(dtype=None)
    return tensor


def _reduced(tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
    reduction = kwargs.get("reduction", Scalar("mean"))
    known = reduction.value if isinstance(reduction, Scalar) else UNKNOWN
    return tensor.but(zero_dim=None if known is UNKNOWN else known != "none")


# -- casts and factories -----------------------------------------------------------------------------------------------------


def cast(run: Interpreter, tensor: Tensor, dtype: Dtype, node: ast.expr) -> Tensor:
    """The tensor in another dtype; a cast to what it already is changes nothing, its history included."""
    if dtype.word is not None and dtype.word == tensor.dtype and not (tensor.positional and tensor.low):
        return tensor
    made = Made.LITERAL if dtype.literal else Made.FOLLOWS
    lowered = tensor.lowered
    if dtype.word in ("bf16", "fp16") and tensor.positional:
        lowered = lowered or node
    return tensor.but(
        dtype=dtype.word, made=made, why=f"cast by `{run.text(node)}` (line {node.lineno})", node=node, lowered=lowered, buffer=None
    )


def _cast_call(run: Interpreter, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
    if not args or not isinstance(args[0], Tensor):
        return UNKNOWN
    tensor = args[0]
    wanted = kwargs.get("dtype")
    for candidate in [*args[1:], *([wanted] if wanted is not None else []), kwargs.get("other")]:
        if isinstance(candidate, Dtype):
            return cast(run, tensor, candidate, node)
        if isinstance(candidate, Tensor):
            return cast(run, tensor, Dtype(candidate.dtype, "another tensor's"), node)
    if name == "type" and not args[1:] and wanted is None:
        return Dtype(tensor.dtype, "its type()")
    # `.to(device)`: an argument that is not understood may be a dtype as well, unless it is called a device
    doubtful = [a for a in [*args[1:], wanted] if a is UNKNOWN or isinstance(a, Module)]
    if doubtful and not all("device" in ast.unparse(a) or "rank" in ast.unparse(a) for a in node.args):
        return tensor.but(dtype=None, buffer=None)
    return tensor


def _factory(run: Interpreter, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
    text = run.text(node)
    dtype = kwargs.get("dtype")
    # only an empty shape written out makes a tensor without dimensions
    zero_dim: bool | None = bool(args) and isinstance(args[0], Items) and args[0].known == []
    if name in ("tensor", "as_tensor", "scalar_tensor"):
        data = args[0] if args else UNKNOWN
        zero_dim = True if isinstance(data, Scalar) else (None if not isinstance(data, Items) else False)
    counted = [*node.args, *(k.value for k in node.keywords if k.arg in ("start", "end", "step"))]
    positional = name == "arange" and not any(_COUNTS_FEATURES.search(ast.unparse(a)) for a in counted)
    buffer = node if name.startswith(("zeros", "empty", "new_zeros", "new_empty", "full", "new_full")) else None
    if isinstance(dtype, Dtype):
        made = Made.LITERAL if dtype.literal else Made.FOLLOWS
        lowered = node if positional and dtype.word in ("bf16", "fp16") else None
        return Tensor(dtype.word, made, f"made by `{text}` (line {node.lineno})", node, zero_dim, positional, lowered, buffer)
    if dtype is not None and not (isinstance(dtype, Scalar) and dtype.value is None):
        return Tensor(None, node=node, zero_dim=zero_dim, positional=positional)
    if name in names.LIKE or name in names.NEW:
        like = args[0] if args else UNFOLLOWED
        if not isinstance(like, Tensor):
            return UNFOLLOWED
        return Tensor(
            like.dtype,
            Made.FOLLOWS,
            f"made by `{text}` (line {node.lineno})",
            node,
            like.zero_dim if name in names.LIKE else False,
            buffer=buffer,
        )
    if name == "arange":
        floats = [a for a in args if isinstance(a, Scalar) and isinstance(a.value, float)]
        doubtful = [a for a in args if not (isinstance(a, Scalar))]
        word = None if doubtful else ("fp32" if floats else "int64")
        return Tensor(word, Made.DEFAULT, f"made by `{text}` (line {node.lineno})", node, False, positional)
    if name == "full":
        fill = args[1] if len(args) > 1 else kwargs.get("fill_value", UNKNOWN)
        if isinstance(fill, Tensor):
            return Tensor(fill.dtype, Made.FOLLOWS, node=node, zero_dim=zero_dim)
        value = fill.value if isinstance(fill, Scalar) else UNKNOWN
        if isinstance(value, (bool, int)):
            return Tensor("bool" if isinstance(value, bool) else "int64", Made.DEFAULT, node=node)
        if value is UNKNOWN and not _is_float_text(node):
            return Tensor(None, node=node, zero_dim=zero_dim)
    if name in ("tensor", "as_tensor", "scalar_tensor"):
        data = args[0] if args else UNKNOWN
        if not (isinstance(data, Scalar) and isinstance(data.value, float)):
            return Tensor(None, node=node, zero_dim=zero_dim)
    return Tensor("fp32", Made.DEFAULT, f"made by `{text}` without dtype (line {node.lineno})", node, zero_dim, buffer=buffer)


# arange over these numbers the features of a table, and not the positions: exact in bf16 and another matter
_COUNTS_FEATURES = re.compile(r"dim|feat|channel|half|embed|freq")


def _is_float_text(node: ast.Call) -> bool:
    """full(..., float("-inf")), full(..., torch.finfo(dtype).min), full(..., -math.inf): certainly floating."""
    if len(node.args) < 2 and not any(k.arg == "fill_value" for k in node.keywords):
        return False
    fill = node.args[1] if len(node.args) > 1 else next(k.value for k in node.keywords if k.arg == "fill_value")
    text = ast.unparse(fill).replace(" ", "")
    return any(word in text for word in ("float(", "finfo(", "math.inf", "torch.inf", "np.inf"))


# -- arithmetic --------------------------------------------------------------------------------------------------------------


def arithmetic(run: Interpreter, node: ast.BinOp | ast.AugAssign, left: Any, right: Any) -> Any:
    """`a + b` of tensors and numbers."""
    if isinstance(node, ast.BinOp):
        sources = [node.left, node.right]
    else:
        sources = [node.target, node.value]
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        result = elementwise(run, node, [left, right], sources)
        if isinstance(node.op, ast.Pow) and isinstance(left, Scalar) and left.value in (2, 2.0) and isinstance(result, Tensor):
            return result.but(positional=False, lowered=None)  # powers of two are exact in every dtype
        return result
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        return Scalar()
    return UNKNOWN


def elementwise(run: Interpreter, node: ast.AST, values: list[Any], sources: list[ast.expr]) -> Any:
    """The promoted dtype of operands; numbers do not take part (an integer tensor times a float number is fp32)."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    if not tensors:
        return UNKNOWN
    positional = any(t.positional for t in tensors)
    lowered = next((t.lowered for t in tensors if t.lowered is not None), None)
    if any(v is UNKNOWN or isinstance(v, (Module, Method)) for v in values) or any(t.dtype is None for t in tensors):
        wide = next((t for t in tensors if t.dtype == "fp32" and t.zero_dim is False), None)
        if wide is None:
            return Tensor(None, positional=positional, lowered=lowered)
        return wide.but(positional=positional, lowered=lowered, buffer=None)  # what is not known is hardly fp64
    winner = _winner(tensors)
    if winner is None:
        return Tensor(None, positional=positional, lowered=lowered)
    numbers = [v for v in values if isinstance(v, Scalar)]
    if not winner.floating and (any(isinstance(n.value, float) or n.value is UNKNOWN for n in numbers) or _divides(node)):
        word = "fp32" if any(isinstance(n.value, float) for n in numbers) or _divides(node) else None
        return Tensor(word, Made.DEFAULT, f"an integer tensor in `{run.text(node)}`", node, winner.zero_dim, positional, lowered)
    zero_dim: bool | None = False if any(t.zero_dim is False for t in tensors) else (True if all(t.zero_dim for t in tensors) else None)
    return winner.but(zero_dim=zero_dim, positional=positional, lowered=lowered, buffer=None)


def _divides(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def _winner(tensors: list[Tensor]) -> Tensor | None:
    """The tensor whose dtype the result has; None when that depends on dimensions that are not known."""
    floating = [t for t in tensors if t.floating]
    if not floating:
        return tensors[0] if len({t.dtype for t in tensors}) == 1 else Tensor("int64", tensors[0].made, node=tensors[0].node)
    if len({t.dtype for t in floating}) == 1:
        return floating[0]
    certain = [t for t in floating if t.zero_dim is False]
    doubtful = [t for t in floating if t.zero_dim is None]
    pool = certain or floating
    word = pool[0].dtype or ""
    if any((t.dtype or "").startswith("fp8") for t in floating):
        return None  # torch promotes no float8
    for tensor in pool[1:]:
        word = promote(word, tensor.dtype or "")
    if any(promote(word, t.dtype or "") != word for t in doubtful):
        return None
    return next((t for t in pool if t.dtype == word), Tensor(word, node=pool[0].node))


def _promote_call(run: Interpreter, name: str, args: list[Any], nodes: list[ast.expr], kwargs: dict[str, Any], node: ast.Call) -> Any:
    if name in ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "block_diag"):
        pieces = args[0] if args else kwargs.get("tensors", UNKNOWN)
        if isinstance(pieces, Items):
            values = pieces.known if pieces.known is not None else [pieces.each]
            result = elementwise(run, node, values, [])
            return result.but(zero_dim=False) if isinstance(result, Tensor) else UNKNOWN
        return UNKNOWN
    return elementwise(run, node, args[1:] if name == "where" and len(args) == 3 else args, nodes)


# -- matrix products ---------------------------------------------------------------------------------------------------------


def matrix_product(run: Interpreter, name: str, node: ast.expr | ast.stmt, operands: list[Labelled]) -> Any:
    """A product that autocast covers: cast under autocast, else all operands alike or refused."""
    tensors = [(label, v) for label, v in operands if isinstance(v, Tensor)]
    if not tensors:
        return UNKNOWN
    positional = any(t.positional for _, t in tensors)
    lowered = next((t.lowered for _, t in tensors if t.lowered is not None), None)
    if run.autocast:
        if any(t.dtype == "fp64" for _, t in tensors):
            return Tensor("fp64", positional=positional)
        if positional and run.autocast in ("bf16", "fp16"):
            lowered = lowered or node
        why = f"`{run.text(node)}` under autocast (line {node.lineno})"
        return Tensor(run.autocast, Made.AUTOCAST, why, node, positional=positional, lowered=lowered)
    _same_dtype(run, "attention" if name == names.ATTENTION else "matmul", node, name, tensors)
    known = next((t for _, t in tensors if t.dtype is not None), UNFOLLOWED)
    if len(tensors) < len(operands) and known.made is not Made.LITERAL:
        known = known if any(v is not UNKNOWN for _, v in operands) else UNFOLLOWED
    return known.but(zero_dim=False, positional=positional, lowered=lowered, buffer=None)


def _same_dtype(run: Interpreter, kind: Any, node: ast.expr | ast.stmt, name: str, tensors: list[tuple[str, Tensor]]) -> None:
    floating = [(label, t) for label, t in tensors if t.floating]
    for label, tensor in floating[1:]:
        if tensor.dtype != floating[0][1].dtype:
            run.refuse(kind, node, name, floating[0], (label, tensor))


def _product_call(
    run: Interpreter, name: str, args: list[Any], nodes: list[ast.expr], kwargs: dict[str, Any], node: ast.Call, env: Env
) -> Any:
    labelled: list[Labelled] = [(run.text(n), v) for n, v in zip(nodes, args)]
    labelled += [
        (f"{k}=", v)
        for k, v in kwargs.items()
        if k in ("input", "mat1", "mat2", "weight", "bias", "other", "tensor", "key", "query", "value")
    ]
    if name in ("einsum", "multi_dot", "chain_matmul"):
        flat: list[Labelled] = []
        for label, value in labelled:
            inner = value.known if isinstance(value, Items) and value.known is not None else [value]
            flat += [(label, v) for v in inner]
        labelled = [pair for pair in flat if not isinstance(pair[1], Scalar)]
        if name == "einsum" and len(labelled) == 1:
            return labelled[0][1] if isinstance(labelled[0][1], Tensor) else UNKNOWN
    if name == names.ATTENTION:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        labelled = labelled[:3] + ([("attn_mask", mask)] if isinstance(mask, Tensor) and mask.floating else [])
    elif name in ("linear", "bilinear") or name.startswith(("conv", "addmm", "addbmm", "baddbmm", "addmv")):
        labelled = labelled[:3]
    elif name not in ("einsum", "multi_dot", "chain_matmul"):
        labelled = labelled[:2]
    if any(v is UNKNOWN for _, v in labelled[:2]) and run.autocast is None and not isinstance(kwargs.get("out"), Tensor):
        known = [t for _, t in labelled if isinstance(t, Tensor)]
        return known[0].but(zero_dim=False, buffer=None) if known else UNFOLLOWED
    out = kwargs.get("out")
    if name in names.LOWER_IN_PLACE or isinstance(out, Tensor):
        return _uncovered_product(run, name, labelled, out, kwargs, node, env)
    dtype = kwargs.get("out_dtype")
    result = matrix_product(run, name, node, labelled)
    return result.but(dtype=dtype.word, made=Made.LITERAL) if isinstance(dtype, Dtype) and isinstance(result, Tensor) else result


def _uncovered_product(
    run: Interpreter, name: str, labelled: list[Labelled], out: Any, kwargs: dict[str, Any], node: ast.Call, env: Env
) -> Any:
    """`out=` and in-place products: autocast casts nothing, so every operand and the destination must already agree."""
    tensors = [(label, v) for label, v in labelled if isinstance(v, Tensor)]
    in_place = name in names.LOWER_IN_PLACE
    if "out_dtype" in kwargs:  # the destination may be wider; the factors may not differ
        factors = tensors[-2:] if name.startswith(("add", "badd")) else tensors
        _same_dtype(run, "out", node, name, factors)
    else:
        destination = [] if in_place else [("out=", out)]
        _same_dtype(run, "in_place" if in_place else "out", node, name, [*tensors, *destination])
    target = labelled[0][1] if in_place else out
    source = node.func.value if in_place and isinstance(node.func, ast.Attribute) else None
    if not in_place:
        source = next((k.value for k in node.keywords if k.arg == "out"), None)
        if not (name.startswith(("add", "badd")) and node.args and source and ast.dump(node.args[0]) == ast.dump(source)):
            source = None  # overwritten, not added to
    if isinstance(source, ast.Name) and isinstance(target, Tensor):
        added = tensors[-1][1] if tensors else UNFOLLOWED
        note_in_place(run, source, node, target, added, node, env)
    return target if isinstance(target, Tensor) else UNFOLLOWED


# -- writes ------------------------------------------------------------------------------------------------------------------


def _scatter_call(run: Interpreter, name: str, args: list[Any], nodes: list[ast.expr], kwargs: dict[str, Any], node: ast.Call) -> Any:
    first = args[0] if args else UNKNOWN
    if not isinstance(first, Tensor):
        return UNKNOWN
    position = 2 if name.startswith(("index_put", "masked_scatter")) else 3
    source = kwargs.get("src", kwargs.get("source", kwargs.get("values", args[position] if len(args) > position else None)))
    if isinstance(source, Tensor) and first.floating and source.floating and first.dtype != source.dtype and source.zero_dim is False:
        label = run.text(nodes[position]) if len(nodes) > position else "source"
        run.refuse("scatter", node, name, (run.text(nodes[0]), first), (label, source))
    return first


def write_at_index(run: Interpreter, target: ast.Subscript, node: ast.stmt, owner: Tensor, index: Any, value: Any) -> None:
    """`x[i] = v` casts `v` for numbers and slices; for a tensor of integers it is index_put_, which does not."""
    indices = index.known if isinstance(index, Items) and index.known is not None else [index]
    by_tensor = any(isinstance(i, Tensor) and i.dtype in ("int64", "int32") for i in indices)
    if (
        by_tensor
        and isinstance(value, Tensor)
        and owner.floating
        and value.floating
        and value.dtype != owner.dtype
        and value.zero_dim is False
    ) and isinstance(node, ast.Assign):
        run.refuse("scatter", node, "index_put_", (run.text(target.value), owner), (run.text(node.value), value))


def note_in_place(
    run: Interpreter, target: ast.expr, node: ast.expr | ast.stmt, before: Tensor, added: Any, source: ast.expr, env: Env
) -> None:
    """An in-place sum in a loop, into something that was there before the loop."""
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice) and target.slice.lower is target.slice.upper is None:
        target = target.value
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and target.slice.value is ...:
        target = target.value
    if not isinstance(target, ast.Name) or not any(target.id in bound for _, bound in run.loops):
        return
    if isinstance(node, ast.AugAssign) and not isinstance(node.op, (ast.Add, ast.Sub)):
        return
    if isinstance(added, Tensor):
        run.emit("accumulate", node, "+=", (target.id, before), (run.text(source), added), value=before.buffer)


def note_accumulation(run: Interpreter, name: str, node: ast.Assign, value: ast.expr, env: Env) -> None:
    """`acc = acc + part` in a loop, where `acc` was there before the loop."""
    if not any(name in bound for _, bound in run.loops):
        return
    if isinstance(value, ast.IfExp):  # acc = part if acc is None else acc + part
        for arm in (value.body, value.orelse):
            note_accumulation(run, name, node, arm, env)
        return
    parts: list[ast.expr] = []
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        parts = [value.left, value.right]
    elif isinstance(value, ast.Call) and run.file.dotted(value.func) == "torch.add":
        parts = value.args[:2]
    own = [p for p in parts if isinstance(p, ast.Name) and p.id == name]
    before = env.names.get(name)
    if len(parts) == 2 and len(own) == 1 and isinstance(before, Tensor):
        other = parts[1] if parts[0] is own[0] else parts[0]
        run.emit("accumulate", node, "+", (name, before), (run.text(other), UNFOLLOWED), value=before.buffer)
