"""Reads the operands of a failing expression, and how the user's code writes them."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from ....observe.origin import is_library_file
from ..dtype_settings import DtypeSetting, find_dtype_setting
from ..evidence import Evidence, Operand
from ..expressions import is_tensor, node_keyword, read_value
from ..frames import source_text
from ..modules import floating_weight_dtypes
from ..producer import Producer
from ..producers import find_producer
from ..weight_origins import WeightOrigin, find_weight_origin

# functions of torch without kernels for bf16 and fp16 on a CPU
FLOAT_ONLY_FUNCTIONS = (
    "torch.fft.",
    "torch.linalg.",
    "torch.view_as_complex",
    "torch.polar",
    "torch.complex",
)
HALF_DTYPES = (torch.bfloat16, torch.float16)
_CREATION = re.compile(
    r"(?!np\.|numpy\.|jnp\.)\w+\.(?:tensor|as_tensor|from_numpy|zeros|ones|full|empty|arange|linspace"
    r"|logspace|rand|randn|eye)\(.*\)"
)
_DTYPE_NAME = re.compile(r"\w+\.(?:float|double|half|bfloat)\d*")


def list_floating(evidence: Evidence) -> list[Operand]:
    return [operand for operand in evidence.operands if operand.dtype.is_floating_point]


NEEDS_EQUAL_DTYPES = re.compile(r"same dtype|should be the same|expected scalar type")


def list_computed(evidence: Evidence) -> list[Operand]:
    """Returns the operands from which a result is computed: the floating-point ones, and integers
    if the operator needs one dtype for all of its operands.
    """
    floats = list_floating(evidence)
    if have_different_dtypes(floats) or not NEEDS_EQUAL_DTYPES.search(evidence.message):
        return floats
    return list(evidence.operands)


def have_different_dtypes(operands: Sequence[Operand]) -> bool:
    return len({operand.dtype for operand in operands}) > 1


def first_of_other_dtype(operands: Sequence[Operand]) -> Operand:
    """Returns the first operand whose dtype is not that of `operands[0]`."""
    return next(operand for operand in operands if operand.dtype != operands[0].dtype)


def describe_operand(operand: Operand) -> str:
    """Describes an operand for use in a sentence, for example as `fp32 x` or `bf16
    layers.0.weight`.
    """
    return f"{operand.dtype_name} {operand.path or operand.label}"


def passed_expression(evidence: Evidence, operand: Operand, producer: Producer) -> str:
    """Returns the user's expression for an operand. The expression is put in brackets if this is
    needed to call a method on it. If it is not known which expression in the user's code produced
    the operand, and the user's call has a single argument, the result is this argument.
    """
    return add_brackets(_passed_argument(evidence, operand, producer) or operand.label)


def _passed_argument(evidence: Evidence, operand: Operand, producer: Producer) -> str:
    """Returns the user's expression for an operand, or "" if it is not known. A single argument
    of the user's call is this expression unless its value has another dtype, as token ids have.
    Of several arguments, it is the only one that has the dtype of the operand.
    """
    frame = evidence.user_frame
    call = frame.expression
    is_raise = isinstance(frame.statement, ast.Raise)
    if producer.passed or is_raise or not isinstance(call, ast.Call):
        return producer.passed
    shared = _find_shared_argument(evidence, operand, call)
    if shared:
        return shared
    if len(call.args) == 1 and not isinstance(call.args[0], ast.Starred):
        value = read_value(call.args[0], frame)
        is_other = is_tensor(value) and value.dtype != operand.dtype
        return "" if is_other else ast.unparse(call.args[0])
    if operand.path or evidence.frames[operand.frame_index] is frame:
        return ""
    values = {
        ast.unparse(part.value): read_value(part.value, frame) for part in list_keywords(call)
    }
    texts = [t for t, value in values.items() if is_tensor(value) and value.dtype == operand.dtype]
    return texts[0] if len(texts) == 1 else ""


def _find_shared_argument(evidence: Evidence, operand: Operand, call: ast.Call) -> str:
    """Returns the argument of the user's call of which an operand of a library's function is a view,
    such as an expanded covariance. Returns "" if there is none, or if several are.
    """
    frame = evidence.user_frame
    if operand.tensor is None or evidence.frames[operand.frame_index] is frame:
        return ""
    texts = []
    for part in list_keywords(call):
        value = read_value(part.value, frame)
        if is_tensor(value) and value.dtype == operand.dtype and _shares_memory(value, operand):
            texts.append(ast.unparse(part.value))
    return texts[0] if len(texts) == 1 else ""


def _shares_memory(tensor: object, operand: Operand) -> bool:
    if not isinstance(tensor, torch.Tensor) or operand.tensor is None:
        return False
    try:
        address = tensor.untyped_storage().data_ptr()
        return address != 0 and address == operand.tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return False  # such as a tensor of torch.func, which has no storage


def stands_in_user_line(evidence: Evidence, operand: Operand, producer: Producer) -> bool:
    """True if the user's line contains an expression for the operand. Otherwise the operand's name
    is a variable of a library.
    """
    if _passed_argument(evidence, operand, producer):
        return True
    if isinstance(evidence.frames[operand.frame_index].statement, ast.Raise):
        return False
    return evidence.frames[operand.frame_index].is_user_code


def passed_location(evidence: Evidence, producer: Producer) -> str:
    return producer.passed_at or evidence.user_frame.location


def find_half_dtype(operands: Sequence[Operand]) -> torch.dtype | None:
    """Returns the half-precision dtype of one of the operands, if autocast would cast all other
    operands to this dtype.
    """
    dtypes = {operand.dtype for operand in operands}
    if torch.float64 in dtypes:
        return None
    return next((dtype for dtype in HALF_DTYPES if dtype in dtypes), None)


def find_model_variable(evidence: Evidence, parameters: Sequence[nn.Parameter]) -> str:
    """Returns the variable of the user's code that holds the model with the given parameters."""
    expected = {id(parameter) for parameter in parameters}
    for frame in reversed(evidence.frames):
        if not frame.is_user_code:
            continue
        for name, value in frame.variables.items():
            if name == "self" or not isinstance(value, nn.Module):
                continue
            if expected <= {id(parameter) for parameter in value.parameters()}:
                return name
    return ""


def describe_others(evidence: Evidence, others: Sequence[Operand]) -> str:
    """Returns what made the first of some operands whose origin the source code proves, as a part
    of a sentence. The origins of weights are added to the finding later.
    """
    for operand in others:
        producer = evidence.producer_of(operand)
        description = producer.describe(operand.dtype_name)
        is_known = producer.text != operand.label or producer.reason
        if description and is_known and not operand.path:
            return f"{operand.label} is {operand.dtype_name}: {description}"
    return ""


def find_tensor_producer(
    evidence: Evidence, tensor: ast.expr, frame_index: int, dtype: torch.dtype
) -> Producer:
    """Returns what gave a tensor its dtype, from an operand with the same expression if there is one.

    tensor       the expression of the tensor
    frame_index  the frame of this expression
    """
    label = ast.unparse(tensor)
    operand = {operand.label: operand for operand in evidence.operands}.get(label)
    if operand is None or operand.dtype != dtype:
        return find_producer(tensor, evidence.frames, frame_index, dtype, evidence.names)
    return evidence.producer_of(operand)


def rebuild_creation(producer: Producer, dtype: str) -> str:
    """Returns the call of torch that created a tensor, with another dtype. Returns "" if the tensor
    was not created by such a call, or if the call takes its dtype from a variable.
    """
    if producer.kind != "creation" or _CREATION.match(producer.text) is None:
        return ""
    call = ast.parse(producer.text, mode="eval").body
    if not isinstance(call, ast.Call):
        return ""
    if producer.text.partition("(")[0].endswith(".from_numpy"):
        return f"{producer.text}.to(torch.{dtype})"
    argument = node_keyword(call, "dtype")
    if argument is None:
        return f"{producer.text[:-1]}, dtype=torch.{dtype})"
    if _DTYPE_NAME.fullmatch(ast.unparse(argument)) is None:
        return ""
    for keyword in call.keywords:
        if keyword.value is argument:
            keyword.value = ast.parse(f"torch.{dtype}", mode="eval").body
    return source_text(call)


def is_better_at_creation(producer: Producer, dtype: torch.dtype, wanted: torch.dtype) -> bool:
    """True if the fix is to create a tensor in another dtype. A cast of the tensor where it is used
    mends one line only, and other lines that use it would fail next. Timesteps and other values
    that bf16 or fp16 cannot hold exactly are cast where they are used.
    """
    is_exact = {dtype, wanted} == {torch.float32, torch.float64}
    return is_exact and producer.is_proven and is_in_user_file(producer.location)


def is_in_user_file(location: str) -> bool:
    """True if a place, as it is printed, is a line of the user's code."""
    path = location.rpartition(":")[0]
    return os.path.exists(path) and not is_library_file(os.path.abspath(path))


def cast_floats_only(text: str) -> str:
    """Returns the code of a cast `value.to(dtype)` that leaves tensors of integers as they are, or ""
    for a cast of another expression than a variable.
    """
    match ast.parse(text, mode="eval").body:
        case ast.Call(ast.Attribute(ast.Name(name))):
            return f"{text} if {name}.is_floating_point() else {name}"
    return ""


def add_brackets(text: str) -> str:
    """Puts an expression in brackets if this is needed to call a method on it."""
    tree = ast.parse(text, mode="eval").body
    is_primary = isinstance(tree, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
    return text if is_primary else f"({text})"


def list_keywords(call: ast.Call) -> list[ast.keyword]:
    """Returns the arguments of a call, those by position as keywords without a name."""
    return [*(ast.keyword(None, argument) for argument in call.args), *call.keywords]


def find_module_origin(
    evidence: Evidence, producer: Producer, dtype: torch.dtype
) -> WeightOrigin | None:
    """Returns the code that gave the weights of the module that computed a value their dtype, if
    this is the dtype of the value, and not that of the model.
    """
    module = producer.module
    if module is None or producer.hook or dtype == evidence.majority_dtype:
        return None
    if floating_weight_dtypes(module) != {dtype}:
        return None
    return find_weight_origin(evidence.frames, evidence.names, module, dtype)


def find_setting(
    evidence: Evidence, producer: Producer, dtype: torch.dtype, wanted_dtype: torch.dtype
) -> DtypeSetting | None:
    """Returns the line that set the dtype to which an expression casts, or in which it creates a
    tensor, if the expression reads this dtype from a variable.
    """
    if not producer.is_proven or producer.kind not in ("cast", "creation"):
        return None
    return find_dtype_setting(
        evidence.frames, producer.text, producer.location, dtype, wanted_dtype
    )


def describe_setting(
    evidence: Evidence, producer: Producer, dtype: torch.dtype, wanted_dtype: torch.dtype
) -> str:
    """Returns the line of `find_setting` as a part of a sentence, or ""."""
    setting = find_setting(evidence, producer, dtype, wanted_dtype)
    return "" if setting is None else setting.describe()


def list_source_casts(producer: Producer, target: torch.dtype) -> str:
    """Returns the calls of the user's code to change if a value is the result of fp16 with bf16: those
    whose result has another dtype than `target`.
    """
    sources = [source for source in producer.sources if source.location and source.dtype != target]
    return " and ".join(f"`{source.text}` at {source.location}" for source in sources)


def find_odd_operand(evidence: Evidence, operands: Sequence[Operand]) -> Operand:
    """Returns the operand whose dtype differs from the dtype of autocast, or else of the model. If no model is known,
    returns the operand whose dtype differs from the dtype of most operands. If two dtypes are
    equally frequent, returns the operand with the wider dtype. An operand in fp64 or fp8 is never
    usual, and a complex one always is.
    """
    counts = Counter(operand.dtype for operand in operands)
    usual = evidence.majority_dtype
    if evidence.autocast.is_on and evidence.autocast.dtype in counts:
        usual = evidence.autocast.dtype
    if usual not in counts:
        floats = [dtype for dtype in counts if dtype.is_floating_point]
        floats = [dtype for dtype in floats if dtype.itemsize in (2, 4)] or floats
        complexes = [dtype for dtype in counts if dtype.is_complex]
        usual = max(
            complexes or floats or counts, key=lambda dtype: (counts[dtype], -dtype.itemsize)
        )
    return next(operand for operand in operands if operand.dtype != usual)
