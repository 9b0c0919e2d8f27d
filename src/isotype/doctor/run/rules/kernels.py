"""Recognises operators that PyTorch does not implement for a dtype, or whose result a dtype cannot hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ....dtypes import format_dtype
from ....finding import Finding
from ..evidence import Evidence, Operand
from ..expressions import is_tensor, node_keyword, read_value
from ..frames import CallFrame
from ..producer import Producer
from ..recorded_origins import find_tensor_origin, was_integer
from ..weight_origins import find_model_origin
from .autocast import find_outermost_call
from .findings import make_finding, make_operand_finding
from .layers import find_holder
from .operands import (
    FLOAT_ONLY_FUNCTIONS,
    HALF_DTYPES,
    add_brackets,
    describe_setting,
    find_model_variable,
    list_keywords,
    passed_expression,
    rebuild_creation,
)

_NO_KERNEL = re.compile(
    r"not implemented for '(?P<dtype>\w+)'|Unsupported dtype (?P<plain>\w+)"
    r"|[Ll]ow precision dtypes not supported. Got (?P<low>\w+)"
    r"|must be either float or double dtype|only supports floating-point dtypes"
    r"|Input dtype must be either a floating point"
    r"|(?:only supported for|inputs to be) (?i:half|float)[\w, ]* tensors"
    r"|only supports? (?:floating point|float)[\w ,]* dtypes"
    r"|doesn't support tensors of type: (?P<type>\w+)"
    r"|Promotion for Float8 Types is not supported, attempted to promote (?:\w+ and )?(?P<float8>Float8\w+)"
    r"|Expected a floating point or complex tensor as input. Got (?P<norm>\w+)"
    r"|Quantize only works on Float Tensor, got (?P<quantised>\w+)"
    r"|Integral inputs not supported|Integers to negative integer powers"
    r"|is only implemented on integer and Boolean-type tensors|not supported for complex types"
)
_NEEDS_FLOATS = re.compile(r"Integral inputs|negative integer powers")
_FOURIER = re.compile("fft|stft")
# operators of bool and integers, which have no kernels for floats on any device
_BITWISE_OPERATIONS = frozenset(
    ("bitand", "bitor", "bitxor", "invert", "__and__", "__or__", "__xor__", "__iand__", "__ior__")
    + ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")
)
_INTEGER_OPERATIONS = frozenset(
    ("lshift", "rshift", "bitwise_left_shift", "bitwise_right_shift", "gcd", "lcm")
)


# operators whose result is complex for a real operand too
_COMPLEX_RESULTS = frozenset(("polar", "complex", "view_as_complex", "eig", "eigvals"))


def find_missing_kernel(evidence: Evidence) -> Finding | None:
    match = _NO_KERNEL.search(evidence.message)
    if match is None or not evidence.operands:
        return None
    name = next((name for name in match.groupdict().values() if name is not None), None)
    operands = list(evidence.operands)
    if name is not None:
        operands = _filter_dtype(operands, name, evidence)
    elif _NEEDS_FLOATS.search(evidence.message):
        operands = [o for o in operands if not o.dtype.is_floating_point] or operands
    if not operands:
        return None
    # a variable decides the dtype of a table that the same line makes like it
    operand = next((part for part in operands if part.tensor is not None), operands[0])
    producer = evidence.producer_of(operand)
    passed = passed_expression(evidence, operand, producer)
    is_read_twice = passed.isidentifier() and len(_reads_of(passed, evidence.user_frame)) > 1
    later_calls = _find_later_calls(evidence.failing_frame, operand.dtype)
    needed = _needed_integer_dtype(evidence)
    if needed is None and not operand.dtype.is_floating_point:
        needed = torch.float32
    creation = "" if needed is None else rebuild_creation(producer, str(needed).partition(".")[2])
    others = _list_like_operands(evidence, operand)
    if needed is not None and not needed.is_floating_point:
        others = _list_integer_casts(operands, operand, needed)
        creation = "" if others else creation
    return make_operand_finding(
        "RN014",
        evidence,
        operand,
        integers="" if needed is None or needed.is_floating_point else str(needed),
        is_read_twice=is_read_twice,
        later_calls=" and ".join(later_calls),
        creation=creation,
        creation_at=producer.location,
        operation=evidence.operation,
        device=operand.device.type,
        target=str(operand.dtype) if operand.dtype.is_floating_point else "",
        also=" and ".join(others),
        is_fourier=bool(_FOURIER.search(evidence.operation)),
        **_describe_cast_buffer(operand),
        **_describe_stored_weights(evidence, operand),
        **_describe_parametrization(evidence, operand),
        is_complex=evidence.operation in _COMPLEX_RESULTS,
        made_by=_describe_maker(evidence, operand, producer, passed),
        parts=_cast_parts(evidence, operand.dtype),
    )


def _filter_dtype(operands: Sequence[Operand], name: str, evidence: Evidence) -> list[Operand]:
    """Returns the operands of the dtype that a message names. If there are none, the function has
    cast its operands, as under autocast, or computes with a dtype that it got as an argument.
    """
    fitting = [operand for operand in operands if operand.dtype_name == format_dtype(name)]
    call = evidence.failing_frame.expression
    has_dtype = isinstance(call, ast.Call) and any(k.arg == "dtype" for k in call.keywords)
    return fitting if fitting or has_dtype else list(operands)


def _describe_maker(evidence: Evidence, operand: Operand, producer: Producer, passed: str) -> str:
    """Returns what gave an operand its dtype, as a part of a sentence, or "" if that is not known, or
    is the operand itself.
    """
    if operand.path or producer.text in (operand.label, passed):
        return ""
    setting = describe_setting(evidence, producer, operand.dtype, torch.float32)
    description = producer.describe(operand.dtype_name)
    return f"{description}; {setting}" if description and setting else description


def _cast_parts(evidence: Evidence, dtype: torch.dtype) -> str:
    """Returns code that casts the results of a function back, if the running line assigns them to
    several variables: `U, S, V = torch.svd(x)`. Returns "" for other lines.
    """
    match evidence.failing_frame.statement:
        case ast.Assign([ast.Tuple(parts)], ast.Call() as call):
            is_running = call is evidence.failing_frame.expression
            if is_running and all(isinstance(part, ast.Name) for part in parts):
                names = ", ".join(map(ast.unparse, parts))
                return f"{names} = (part.to({dtype}) for part in ({names}))"
    return ""


def _list_like_operands(evidence: Evidence, operand: Operand) -> list[str]:
    """Returns casts for the other operands of a Fourier transform in the same dtype, such as the
    window of a signal, and for the other arguments of a function of torch in Python, which computes
    with all of them.
    """
    if not _FOURIER.search(evidence.operation):
        return _cast_like_arguments(evidence, operand)
    like = [o for o in evidence.operands if o is not operand and o.dtype == operand.dtype]
    return [f"`{add_brackets(other.label)}.float()`" for other in like]


def _list_integer_casts(
    operands: Sequence[Operand], operand: Operand, needed: torch.dtype
) -> list[str]:
    """Returns casts for the other operands that an operator of integers rejects too."""
    others = [o for o in operands if o is not operand and o.dtype.is_floating_point]
    return [f"`{add_brackets(other.label)}.to({needed})`" for other in others]


def _describe_cast_buffer(operand: Operand) -> dict[str, Any]:
    """Returns the call that cast a buffer of integers to a dtype of floats."""
    if operand.weight is None or not was_integer(operand.weight):
        return {}
    origin = find_tensor_origin(operand.weight)
    return (
        {}
        if origin is None
        else {"buffer": operand.path, "cast": origin.text, "cast_at": origin.location}
    )


def _cast_like_arguments(evidence: Evidence, operand: Operand) -> list[str]:
    """Returns casts for the arguments of the user's call of a class of torch, such as a distribution,
    that have the dtype of the operand, except for the argument that is the operand.
    """
    frame = evidence.user_frame
    call = frame.expression
    if frame is evidence.failing_frame or not isinstance(call, ast.Call):
        return []
    if not isinstance(read_value(call.func, frame), type):
        return []
    passed = passed_expression(evidence, operand, evidence.producer_of(operand))
    casts = []
    for part in list_keywords(call):
        value = read_value(part.value, frame)
        text = add_brackets(ast.unparse(part.value))
        if is_tensor(value) and value.dtype == operand.dtype and text != passed:
            casts.append(f"`{text}.float()`")
    return casts


def _describe_stored_weights(evidence: Evidence, operand: Operand) -> dict[str, Any]:
    """Returns what keeps the weights of a model in fp8, a dtype in which PyTorch computes no
    arithmetic.
    """
    is_stored = operand.dtype.itemsize == 1 and operand.dtype == evidence.majority_dtype
    if not is_stored or evidence.model is None:
        return {}
    origin = find_model_origin(evidence.frames, evidence.model, operand.dtype)
    name = find_model_variable(evidence, list(evidence.model.parameters()))
    name = name or find_holder(evidence, evidence.model)
    frame = find_outermost_call(evidence)
    location = frame.location
    return {
        "stored": "" if origin is None else origin.describe("the weights", operand.dtype_name),
        "stored_cast": f"`{name}.to(torch.bfloat16)` before {location}"
        if name
        else f"cast the model to torch.bfloat16 before `{frame.text}` ({location})",
    }


def _describe_parametrization(evidence: Evidence, operand: Operand) -> dict[str, Any]:
    """Returns the parameter from which a parametrization of torch computes a weight, if this
    computation failed in a function of torch. The arguments of the user's line have no part in it.
    """
    inner_frames = evidence.frames[evidence.frames.index(evidence.user_frame) + 1 :]
    owners = [frame.variables.get("self") for frame in inner_frames]
    lists = [owner for owner in owners if isinstance(owner, ParametrizationList)]
    if not lists or not operand.dtype.is_floating_point:
        return {}
    originals = [
        parameter
        for parameter in lists[-1].parameters(recurse=False)
        if parameter.dtype == operand.dtype
    ]
    path = evidence.names.tensor_path(originals[0]) if originals else None
    if path is None:
        return {}
    layer, _, name = evidence.names.module_path(lists[-1]).partition("parametrizations.")
    layer = layer.rstrip(".")
    origin = find_tensor_origin(originals[0])
    is_cast = origin is not None and origin.kind in ("cast", "library")
    return {
        "layer": layer or "the model",
        "computed": f"{layer}.{name}".lstrip("."),
        "original": path,
        "origin": "" if origin is None else origin.describe("it", operand.dtype_name),
        "cast": origin.text if origin is not None and is_cast else "",
        "cast_at": origin.location if origin is not None and is_cast else "",
        "rewritten": _cast_around(evidence, lists[-1], operand.dtype),
        "rewritten_at": evidence.user_frame.location,
    }


def _cast_around(evidence: Evidence, inner: nn.Module, dtype: torch.dtype) -> str:
    """Returns the user's call of the module around `inner`, with its input in fp32 and its result
    cast back. Returns "" if the user's line is another call.
    """
    frame = evidence.user_frame
    match frame.expression:
        case ast.Call(function, [argument]):
            module = read_value(function, frame)
            is_around = isinstance(module, nn.Module) and inner in module.modules()
            value = read_value(argument, frame)
            if is_around and is_tensor(value) and value.dtype.is_floating_point:
                text = add_brackets(ast.unparse(argument))
                return f"{ast.unparse(function)}({text}.float()).to({dtype})"
    return ""


def _needed_integer_dtype(evidence: Evidence) -> torch.dtype | None:
    """Returns the dtype that a float must be cast to for an operator of bool and integers, such as
    `&`. Returns None for other operators.
    """
    operation = evidence.operation.removeprefix("in-place ").rpartition(".")[2]
    name = operation if operation.startswith("__") else operation.rstrip("_")
    if name not in _BITWISE_OPERATIONS | _INTEGER_OPERATIONS:
        return None
    dtypes = [operand.dtype for operand in evidence.operands]
    others = [dtype for dtype in dtypes if not dtype.is_floating_point]
    usual = torch.bool if name in _BITWISE_OPERATIONS else torch.int64
    return others[0] if others else usual


def _reads_of(name: str, frame: CallFrame) -> list[ast.Name]:
    """Returns the places in the running statement that read a variable."""
    statement = frame.statement
    nodes = () if statement is None else ast.walk(statement)
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return [node for node in names if isinstance(node.ctx, ast.Load)]


def _find_later_calls(frame: CallFrame, dtype: torch.dtype) -> list[str]:
    """Returns the later lines of the running function that will fail in the same way: calls of the
    same function of torch, and of other functions that have no kernels for bf16 or fp16, if their
    first argument has the dtype.
    """
    running = frame.expression
    scope = frame.scope
    if not isinstance(running, ast.Call) or scope is None or not frame.is_user_code:
        return []
    function = ast.unparse(running.func)
    if not function.startswith("torch.") or isinstance(scope, ast.Module):
        return []
    lines: dict[int, str] = {}
    for call in ast.walk(scope):
        if not isinstance(call, ast.Call) or call.lineno <= frame.line:
            continue
        name = ast.unparse(call.func)
        if name == function:
            argument = ast.unparse(call.args[0]) if call.args else ""
            lines[call.lineno] = _cast_at(argument, frame.location_of(call), call.lineno)
        elif name.startswith(FLOAT_ONLY_FUNCTIONS) and call.args and dtype in HALF_DTYPES:
            value = read_value(call.args[0], frame)
            if is_tensor(value) and value.dtype == dtype:
                cast = _cast_at(ast.unparse(call.args[0]), frame.location_of(call), call.lineno)
                lines.setdefault(call.lineno, cast)
    return [lines[line] for line in sorted(lines)]


def _cast_at(text: str, location: str, line: int) -> str:
    """Returns code that casts an argument of a later call to fp32, with its place."""
    return f"`{add_brackets(text)}.float()` at {location}" if text else f"the same at line {line}"


def find_in_place_result(evidence: Evidence) -> Finding | None:
    """Finds an operator that writes floats or complex numbers into a tensor that cannot hold them."""
    if "can't be cast to the desired output type" not in evidence.message or not evidence.operands:
        return None
    destination, *values = _put_output_first(evidence)
    is_wider = [value for value in values if value.dtype.is_complex or not _is_wide(destination)]
    odd = next((value for value in is_wider if _is_wide(value)), None)
    origin = ""
    if odd is not None:
        producer = evidence.producer_of(odd)
        origin = producer.describe(odd.dtype_name)
        origin = "" if producer.text == odd.label and not producer.reason else origin
    frame = evidence.failing_frame
    return make_finding(
        "RN016",
        evidence,
        operation=evidence.operation,
        value=destination.label,
        has=destination.dtype_name,
        result="complex" if "result type Complex" in evidence.message else "float",
        odd="" if odd is None else odd.label,
        odd_dtype="" if odd is None else odd.dtype_name,
        odd_origin=origin,
        casts=" and ".join(_cast_bounds(frame)),
        rewritten=_without_in_place(frame.expression, frame.statement),
        base=_base_of(destination.label),
        at=frame.location,
    )


def _put_output_first(evidence: Evidence) -> list[Operand]:
    """Returns the operands, with that of the keyword `out` before all others."""
    call = evidence.failing_frame.expression
    output = node_keyword(call, "out") if isinstance(call, ast.Call) else None
    return sorted(evidence.operands, key=lambda operand: operand.node is not output)


def _base_of(text: str) -> str:
    """Returns the tensor of which an expression is a part: `x` of `x[0]`."""
    node = ast.parse(text, mode="eval").body
    while isinstance(node, ast.Subscript):
        node = node.value
    return ast.unparse(node)


def _is_wide(operand: Operand) -> bool:
    return operand.dtype.is_floating_point or operand.dtype.is_complex


def _cast_bounds(frame: CallFrame) -> list[str]:
    """Returns casts for the bounds of `x.clamp_(low, high)` that are tensors of floats, if `x` is an
    integer, such as an index. The same line may clamp several tensors.
    """
    failing, statement = frame.expression, frame.statement
    is_clamp = isinstance(failing, ast.Call) and ast.unparse(failing.func).endswith("clamp_")
    casts = []
    for node in ast.walk(statement) if is_clamp and statement is not None else ():
        match node:
            case ast.Call(ast.Attribute(owner, "clamp_")) as call:
                destination = read_value(owner, frame)
                for bound in [part.value for part in list_keywords(call)]:
                    value = read_value(bound, frame)
                    is_float = is_tensor(value) and value.dtype.is_floating_point
                    if is_float and is_tensor(destination) and value.dtype != destination.dtype:
                        text = add_brackets(ast.unparse(bound))
                        casts.append(f"`{text}.to({ast.unparse(owner)}.dtype)`")
    return casts


def _without_in_place(node: ast.AST | None, statement: ast.stmt | None) -> str:
    """Returns the source code that computes a new tensor: `x = x * y` for `x *= y`, and `x.mul(y)`
    for `x.mul_(y)`. Returns "" if the result is written into a part of a tensor.
    """
    match node:
        case ast.AugAssign(ast.Subscript()) | ast.Call(ast.Attribute(ast.Subscript())):
            return ""
        case ast.AugAssign(target, operator, value):
            left = ast.parse(ast.unparse(target), mode="eval").body
            return f"{ast.unparse(target)} = {ast.unparse(ast.BinOp(left, operator, value))}"
        case ast.Call(ast.Attribute(owner, name), arguments, keywords) if name.endswith("_"):
            function = ast.Attribute(owner, name.rstrip("_"), ast.Load())
            text = ast.unparse(ast.Call(function, arguments, keywords))
            is_statement = isinstance(statement, ast.Expr) and statement.value is node
            return f"{ast.unparse(owner)} = {text}" if is_statement else text
    return ""


def find_constant_overflow(evidence: Evidence) -> Finding | None:
    halves = [operand for operand in evidence.operands if operand.dtype == torch.float16]
    if "without overflow" not in evidence.message or not halves:
        return None
    value = passed_expression(evidence, halves[0], evidence.producer_of(halves[0]))
    code = _replace_constant(evidence.user_frame, f"torch.finfo({value}.dtype)")
    return make_operand_finding("RN018", evidence, halves[0], rewritten=code)


def _replace_constant(frame: CallFrame, limits: str) -> str:
    """Returns the source code of the running call in which `limits.min` or `limits.max` replaces the
    one number that fp16 cannot hold, or "".
    """
    node = frame.expression
    numbers = [] if node is None else list(_iterate_large_numbers(node, frame))
    if not isinstance(node, ast.Call) or len(numbers) != 1:
        return ""
    text, number = numbers[0]
    code = ast.unparse(node)
    side = "min" if number < 0 else "max"
    return code.replace(text, f"{limits}.{side}") if code.count(text) == 1 else ""


def _iterate_large_numbers(node: ast.AST, frame: CallFrame) -> Iterator[tuple[str, float]]:
    """Yields the numbers and the variables with numbers in an expression that fp16 cannot hold."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, (ast.UnaryOp, ast.Constant, ast.Name)):
            value = read_value(part, frame)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and abs(value) > torch.finfo(torch.float16).max:
                yield ast.unparse(part), value
                continue
        yield from _iterate_large_numbers(part, frame)
