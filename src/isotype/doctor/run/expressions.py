"""Reads the values of expressions from the variables of a frame, without running code of the
program. The module can read names, stored attributes and items of containers. For common calls, the
module determines the dtype of the result.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .frames import CallFrame, source_text


class _Unknown:
    """The type of `UNKNOWN`."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()  # the value of an expression that cannot be read without running code

_UNREAD = object()  # stands for an object that no variable holds any more


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Describes the dtype of a tensor that an expression would compute. The tensor itself is not
    computed.
    """

    dtype: torch.dtype
    device: torch.device


_PLAIN_TYPES = (bool, int, float, str, list, tuple, dict, type(None))
_COMPARED_TYPES = (bool, int, float, str, type(None), torch.dtype, Enum)
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}

# methods whose result is a float also for a tensor of integers
_FLOAT_METHODS = frozenset(
    [
        "cos",
        "sin",
        "sqrt",
        "rsqrt",
        "exp",
        "log",
        "softmax",
        "log_softmax",
        "sigmoid",
        "tanh",
        "mean",
    ]
    + ["log2", "log10", "log1p", "expm1", "exp2", "tan", "sinh", "cosh", "erf", "logit", "sinc"]
    + ["reciprocal", "logsumexp", "std", "var", "norm", "quantile"]
)
# methods that compute real numbers from complex ones
_REAL_METHODS = frozenset(("abs", "norm", "std", "var"))
# methods whose result has the widest dtype of the tensor and the arguments
PROMOTING_METHODS = frozenset(
    ("add", "sub", "mul", "div", "true_divide", "multiply", "divide", "subtract", "remainder")
    + ("maximum", "minimum", "where", "matmul", "mm", "bmm", "dot", "outer", "addcmul", "lerp")
)
# method of a tensor -> the dtype to which it casts
CAST_METHODS = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "long": torch.int64,
    "int": torch.int32,
    "bool": torch.bool,
}
_CONVERTING_METHODS = frozenset(("to", "type", "type_as"))
CASTING_METHODS = frozenset((*CAST_METHODS, "to", "type"))  # of a tensor and of a module
# methods of a tensor whose result has the dtype of the tensor
DTYPE_KEEPING_METHODS = frozenset(
    [
        "t",
        "transpose",
        "permute",
        "view",
        "reshape",
        "contiguous",
        "unsqueeze",
        "squeeze",
        "expand",
        "flatten",
        "clone",
        "detach",
        "cuda",
        "cpu",
        "repeat",
        "expand_as",
        "view_as",
        "unflatten",
        "narrow",
        "select",
        "chunk",
        "movedim",
        "swapaxes",
        "requires_grad_",
        "clamp",
        "softmax",
        "log_softmax",
        "relu",
        "abs",
        "neg",
        "cos",
        "sin",
        "sqrt",
        "rsqrt",
        "pow",
        "square",
        "mean",
        "sum",
        "log",
        "masked_fill",
        "flip",
        "tanh",
        "sigmoid",
        "exp",
        "mul_",
        "add_",
    ]
    + [
        "clamp_min",
        "clamp_max",
        "clip",
        "clamp_",
        "relu_",
        "neg_",
        "abs_",
        "sign",
        "round",
        "floor",
    ]
    + ["ceil", "trunc", "frac", "nan_to_num", "log2", "log10", "log1p", "expm1", "exp2", "tan"]
    + ["sinh", "cosh", "erf", "logit", "sinc", "reciprocal", "logsumexp", "std", "var", "norm"]
    + ["prod", "cumsum", "cumprod", "amax", "amin", "nanmean", "quantile", "dropout"]
    + ["swapdims", "moveaxis", "ravel", "diagonal", "diag", "tril", "triu", "roll", "rot90", "tile"]
    + ["split", "tensor_split", "unbind", "unfold", "repeat_interleave", "broadcast_to"]
    + ["index_select", "gather", "take_along_dim", "masked_select", "index_fill", "index_add"]
    + ["scatter", "scatter_add", "masked_scatter", "masked_fill_", "pin_memory"]
    + ["sub_", "div_", "sqrt_", "exp_", "log_"]
)
_PLAIN_CONTAINERS = (dict, OrderedDict, list, tuple, torch.Size)  # whose code is not the program's
_INTEGER_CREATION = re.compile(r"torch\.(?:randint\(|arange\((?!.*(?:dtype|\d\.)))")
_DTYPE_KEEPING_ATTRIBUTES = frozenset(("T", "mT", "H", "data", "grad"))
CREATION_FUNCTIONS = frozenset(
    [
        "zeros",
        "ones",
        "full",
        "empty",
        "rand",
        "randn",
        "randint",
        "arange",
        "linspace",
        "eye",
        "tensor",
        "from_numpy",
        "as_tensor",
        "normal",
    ]
)


def read_value(node: ast.AST | None, frame: CallFrame) -> Any:
    """Returns the value of an expression, or UNKNOWN if reading it would run code of the program.
    If the expression would compute a tensor, the result is a `TensorFacts`.
    """
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return frame.get_variable(name) if frame.has_variable(name) else UNKNOWN
        case ast.Attribute(owner, name):
            return _read_attribute(read_value(owner, frame), name)
        case ast.Subscript(container, index):
            return _read_item(read_value(container, frame), index, frame)
        case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements):
            return [read_value(element, frame) for element in elements]
        case ast.UnaryOp(ast.USub(), operand):
            return _as_result(read_value(operand, frame))
        case ast.BinOp(left, operation, right):
            values = read_value(left, frame), read_value(right, frame)
            if isinstance(operation, ast.MatMult) and _have_other_dtypes(*values):
                return UNKNOWN  # autocast cast both
            result = _promote(*values)
            return _as_float(result) if isinstance(operation, ast.Div) else result
        case ast.Call():
            return _read_call(node, frame)
    return UNKNOWN


def read_function(node: ast.AST, frame: CallFrame) -> Any:
    """Returns the function, method or module that an expression names, or UNKNOWN."""
    value = read_value(node, frame)
    if value is not UNKNOWN or not isinstance(node, ast.Attribute):
        return value
    owner = read_value(node.value, frame)
    if owner is UNKNOWN and isinstance(node.value, ast.Call):
        constructor = read_value(node.value.func, frame)
        if isinstance(constructor, type):  # as in `Scheduler().compute_sigmas`
            method = inspect.getattr_static(constructor, node.attr, UNKNOWN)
            return MethodType(method, _UNREAD) if isinstance(method, FunctionType) else UNKNOWN
    if owner is UNKNOWN:
        return UNKNOWN
    function = inspect.getattr_static(type(owner), node.attr, UNKNOWN)
    if isinstance(function, staticmethod):
        return function.__func__
    return MethodType(function, owner) if isinstance(function, FunctionType) else UNKNOWN


def is_of_torch(function: Any) -> bool:
    """True if a module of torch defines a function. Some built-in functions name no module."""
    return str(getattr(function, "__module__", "")).startswith("torch")


def creates_integers(node: ast.AST) -> bool:
    """True for a call that creates integers, which later operations make floats."""
    return _INTEGER_CREATION.match(source_text(node)) is not None


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, TensorFacts))


def read_condition(node: ast.AST, frame: CallFrame) -> bool | None:
    """Evaluates a simple condition with the values that the variables had at the failure: a name,
    an attribute, `not`, `and`, `or`, `is None`, a comparison of plain values, or a call such as
    `torch.backends.mps.is_available()`. Returns None if the condition cannot be evaluated.
    """
    match node:
        case ast.UnaryOp(ast.Not(), operand):
            result = read_condition(operand, frame)
            return None if result is None else not result
        case ast.Compare(left, [ast.Is() | ast.IsNot() as comparison], [ast.Constant(None)]):
            value = read_value(left, frame)
            if value is UNKNOWN:
                return None
            return (value is None) == isinstance(comparison, ast.Is)
        case ast.Compare(left, [ast.Is() | ast.IsNot() as comparison], [right]):
            values = read_value(left, frame), read_value(right, frame)
            if not all(isinstance(value, (bool, Enum)) for value in values):
                return None
            return (values[0] is values[1]) == isinstance(comparison, ast.Is)
        case ast.Compare(left, [comparison], [right]):
            return _compare(read_value(left, frame), comparison, read_value(right, frame))
        case ast.BoolOp(connective, values):
            results = [read_condition(value, frame) for value in values]
            decisive = isinstance(connective, ast.Or)  # `or` is true if one part is true
            if decisive in results:
                return decisive
            return None if None in results else not decisive
        case ast.Call(ast.Attribute(owner, "is_available"), [], []):
            module = read_value(owner, frame)
            name = module.__name__ if isinstance(module, ModuleType) else ""
            return bool(module.is_available()) if name.startswith("torch.") else None
    value = read_value(node, frame)
    return bool(value) if isinstance(value, _PLAIN_TYPES) else None


def _compare(left: Any, comparison: ast.cmpop, right: Any) -> bool | None:
    """Compares two values of plain types. A value may be compared with a list of such values."""
    compare = _COMPARISONS.get(type(comparison))
    values = [left]
    if isinstance(comparison, (ast.In, ast.NotIn)):
        if not isinstance(right, (list, tuple, dict, set, frozenset)):
            return None
        values += right
    else:
        values.append(right)
    if compare is None or not all(isinstance(value, _COMPARED_TYPES) for value in values):
        return None
    try:
        return bool(compare(left, right))
    except TypeError:
        return None


def _as_result(value: Any) -> Any:
    """Describes a new tensor that has the dtype of `value`."""
    if is_tensor(value):
        return TensorFacts(value.dtype, value.device)
    return UNKNOWN


def _read_attribute(owner: Any, name: str) -> Any:
    """Reads a stored attribute. The function does not call properties, except a few properties of
    tensors.
    """
    if owner is UNKNOWN:
        return UNKNOWN
    if isinstance(owner, torch.Tensor):
        if name in ("dtype", "device", "shape"):
            return getattr(owner, name)
        if name == "data" and type(owner) in (torch.Tensor, nn.Parameter):
            return owner.data
        if name in _DTYPE_KEEPING_ATTRIBUTES:
            return _as_result(owner)
        return UNKNOWN
    if isinstance(owner, TensorFacts):
        return getattr(owner, name) if name in ("dtype", "device") else UNKNOWN
    if isinstance(owner, (ModuleType, type)):
        return getattr(owner, name, UNKNOWN)
    stored: dict[str, Any] = getattr(owner, "__dict__", {})
    if name in stored:
        return stored[name]
    if isinstance(owner, nn.Module):
        if name == "config" and "_internal_dict" in stored:
            return stored["_internal_dict"]  # a property of the models of diffusers
        for table in (owner._parameters, owner._buffers, owner._modules):
            if name in table:
                return table[name]
        parametrizations = owner._modules.get("parametrizations")
        if isinstance(parametrizations, nn.ModuleDict) and name in parametrizations:
            # `original`, or several, such as the norm and the direction of a weight
            return next(reversed(parametrizations[name]._parameters.values()), UNKNOWN)
    constant = inspect.getattr_static(type(owner), name, UNKNOWN)  # of the class, such as a dtype
    if isinstance(constant, (torch.dtype, bool, int, float, str)):
        return constant
    if name == "dtype" and isinstance(owner, nn.Module):
        return next((p.dtype for p in owner.parameters() if p.is_floating_point()), UNKNOWN)
    return UNKNOWN


def _read_item(container: Any, index: ast.AST, frame: CallFrame) -> Any:
    if is_tensor(container):
        return _as_result(container)
    key = read_value(index, frame)
    if key is UNKNOWN:
        return UNKNOWN
    if isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.ParameterList)):
        return container._modules.get(str(key), UNKNOWN)
    data = getattr(container, "data", None)  # BatchEncoding and BatchFeature of transformers
    if not isinstance(container, (dict, list, tuple)) and isinstance(data, dict):
        container = data
    if type(container) in _PLAIN_CONTAINERS:
        try:
            return container[key]
        except (KeyError, IndexError, TypeError):
            return UNKNOWN
    return UNKNOWN


def _promote(left: Any, right: Any) -> Any:
    if is_tensor(left) and is_tensor(right):
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            return TensorFacts(torch.result_type(left, right), left.device)
        return TensorFacts(torch.promote_types(left.dtype, right.dtype), left.device)
    if is_tensor(right) and isinstance(left, (int, float)):
        left, right = right, left
    if is_tensor(left) and isinstance(right, (int, float)):
        return _as_float(left) if isinstance(right, float) else _as_result(left)
    return UNKNOWN


def _have_other_dtypes(left: Any, right: Any) -> bool:
    return is_tensor(left) and is_tensor(right) and left.dtype != right.dtype


def _as_float(value: Any) -> Any:
    """Describes the result of an operation that computes floats, such as a division."""
    result = _as_result(value)
    if result is UNKNOWN or _is_float(result):
        return result
    return TensorFacts(torch.get_default_dtype(), result.device)


def _read_call(node: ast.Call, frame: CallFrame) -> Any:
    """Determines the dtype of the tensor that a call returns, if the called function is a common
    one.
    """
    if not isinstance(node.func, ast.Attribute):
        return UNKNOWN
    owner = read_value(node.func.value, frame)
    if is_tensor(owner):
        return _read_method(node, node.func.attr, owner, frame)
    if owner is torch:
        return _read_torch_function(node, node.func.attr, frame)
    return UNKNOWN


def _read_method(node: ast.Call, name: str, owner: Any, frame: CallFrame) -> Any:
    """Determines the dtype of the tensor that a method of a tensor returns."""
    if name in CAST_METHODS:
        return TensorFacts(CAST_METHODS[name], owner.device)
    if name in _CONVERTING_METHODS:
        return _read_conversion(node, owner, frame)
    if name in _REAL_METHODS and owner.dtype.is_complex:
        return TensorFacts(owner.dtype.to_real(), owner.device)
    if name == "size" and isinstance(owner, torch.Tensor) and len(node.args) == 1:
        return _read_item(owner.shape, node.args[0], frame)
    if name == "prod":  # autocast computes it in fp32, also on a CPU
        return UNKNOWN
    if name == "clamp":
        return _read_clamp(owner, node.args, node, frame)
    if name == "sum" and not _is_float(owner) and not node_keyword(node, "dtype"):
        return TensorFacts(torch.int64, owner.device)
    if name in DTYPE_KEEPING_METHODS and not node_keyword(node, "dtype"):
        return _as_float(owner) if name in _FLOAT_METHODS else _as_result(owner)
    return UNKNOWN


def _read_torch_function(node: ast.Call, name: str, frame: CallFrame) -> Any:
    """Determines the dtype of the tensor that `torch.clamp` or a creation, such as `torch.zeros`,
    returns. For `torch.get_default_dtype`, returns its result.
    """
    if name == "get_default_dtype":
        return torch.get_default_dtype()
    if name == "clamp" and node.args:
        return _read_clamp(read_value(node.args[0], frame), node.args[1:], node, frame)
    if name.endswith("_like") and node.args:
        return _read_like(node, frame)
    if name not in CREATION_FUNCTIONS:
        return UNKNOWN
    dtype_node = node_keyword(node, "dtype")
    dtype = None if dtype_node is None else read_value(dtype_node, frame)
    if isinstance(dtype, torch.dtype):
        return TensorFacts(dtype, torch.device("cpu"))
    if dtype is None and name in ("zeros", "ones", "empty", "rand", "randn", "eye", "linspace"):
        return TensorFacts(torch.get_default_dtype(), torch.device("cpu"))
    if dtype is None and name == "arange":
        return _read_range(node, frame)
    return UNKNOWN


def _read_range(node: ast.Call, frame: CallFrame) -> Any:
    """Determines the dtype of `torch.arange(start, end, step)`: int64 if all of them are integers. A
    later division makes floats of it.
    """
    bounds = [read_value(argument, frame) for argument in node.args]
    is_integer = bool(bounds) and all(isinstance(bound, int) for bound in bounds)
    return TensorFacts(torch.int64, torch.device("cpu")) if is_integer else UNKNOWN


def _read_like(node: ast.Call, frame: CallFrame) -> Any:
    """Determines the dtype of a tensor such as `torch.zeros_like(x)`."""
    model = read_value(node.args[0], frame)
    keyword = node_keyword(node, "dtype")
    dtype = read_value(keyword, frame)
    if isinstance(dtype, torch.dtype) and is_tensor(model):
        return TensorFacts(dtype, model.device)
    return UNKNOWN if keyword is not None else _as_result(model)


def _read_clamp(tensor: Any, bounds: Sequence[ast.expr], node: ast.Call, frame: CallFrame) -> Any:
    """Determines the dtype of a clamped tensor. A float as a bound makes integers floats."""
    result = _as_result(tensor)
    for bound in (*bounds, *(keyword.value for keyword in node.keywords)):
        value = read_value(bound, frame)
        if value is UNKNOWN:
            return UNKNOWN
        result = result if value is None else _promote(result, value)
    return result


def _is_float(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _read_conversion(node: ast.Call, owner: Any, frame: CallFrame) -> Any:
    """Determines the dtype of the tensor that `tensor.to(...)` returns."""
    arguments = [read_value(argument, frame) for argument in node.args]
    arguments += [read_value(keyword.value, frame) for keyword in node.keywords]
    for argument in arguments:
        if isinstance(argument, torch.dtype):
            return TensorFacts(argument, owner.device)
        if is_tensor(argument):
            return TensorFacts(argument.dtype, owner.device)
    if any(argument is UNKNOWN for argument in arguments):
        return UNKNOWN
    return _as_result(owner)


def node_keyword(node: ast.Call, name: str) -> ast.expr | None:
    """Returns the value of a keyword argument."""
    return next((keyword.value for keyword in node.keywords if keyword.arg == name), None)
