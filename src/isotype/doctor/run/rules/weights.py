"""Recognises weights in another dtype than the rest of the model."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from torch import nn

from ....dtypes import format_dtype
from ....finding import Finding
from ..evidence import Evidence, Operand
from ..expressions import read_value
from ..frames import CallFrame
from ..gathered_weights import find_gathered_weight
from ..mixed_weights import NEEDS_ONE_DTYPE, group_weights
from ..model_casts import find_unrestored_default_dtype
from ..modules import floating_weight_dtypes
from ..operand_origins import find_operand_origin
from ..recorded_origins import (
    find_cast_in_call,
    find_part_construction,
    find_tensor_origin,
    is_cast_of_most_weights,
)
from ..weight_origins import WeightOrigin, find_model_origin, find_weight_origin
from .autocast import find_outermost_call
from .findings import format_share, make_finding, make_operand_finding
from .operands import (
    HALF_DTYPES,
    NEEDS_EQUAL_DTYPES,
    describe_operand,
    first_of_other_dtype,
    have_different_dtypes,
    is_in_user_file,
    list_floating,
    passed_expression,
    stands_in_user_line,
)

_MIN_LAYERS = 3  # layers of a model; a block of fewer layers is a part of one


def find_mixed_weights(evidence: Evidence) -> Finding | None:
    """Finds weights of several dtypes that a function takes together, such as FSDP, which keeps the
    weights of a module in one tensor.
    """
    if not NEEDS_ONE_DTYPE.search(evidence.message):
        return None
    models = [evidence.model, *evidence.names.roots]
    groups = [group_weights(evidence.names, model) for model in models if model is not None]
    mixed = next((group for group in groups if len(group) > 1), None)
    if mixed is None:
        return None
    usual, odd = mixed[:2]
    fixes = odd.rebuilt(usual.dtype)
    return make_finding(
        "RN028",
        evidence,
        odd=format_dtype(odd.dtype),
        usual=format_dtype(usual.dtype),
        odd_weights=odd.describe(),
        usual_weights=usual.describe(),
        fixes=" and ".join(fixes),
        places=", ".join(dict.fromkeys(origin.location for origin in odd.origins[:3])),
        target=str(usual.dtype),
    )


def find_integer_parameter(evidence: Evidence) -> Finding | None:
    if not re.search(r"(?i)only tensors of floating point .*require gradients", evidence.message):
        return None
    integers = [operand for operand in evidence.operands if not operand.dtype.is_floating_point]
    if not integers:
        return None
    is_parameter = "Parameter" in evidence.user_frame.text
    weight = integers[0]
    return make_operand_finding(
        "RN012",
        evidence,
        weight,
        is_parameter=is_parameter,
        path=weight.path or weight.label,
        storage=weight.storage or "",
    )


def find_packed_weight(evidence: Evidence) -> Finding | None:
    """Finds a product with the integer codes of a quantised weight."""
    if not list_floating(evidence) or not NEEDS_EQUAL_DTYPES.search(evidence.message):
        return None
    for operand in evidence.operands:
        if operand.dtype not in (torch.int8, torch.uint8):
            continue
        frame = evidence.frames[operand.frame_index]
        weight = _find_viewed_parameter(operand.node, frame)
        if weight is None:
            continue
        path = evidence.names.tensor_path(weight) or operand.path
        origin = None if evidence.failing_frame.is_user_code else find_tensor_origin(weight)
        return make_finding(
            "RN025",
            evidence,
            operation=evidence.operation,
            weight=path or operand.label,
            has=operand.dtype_name,
            kind=type(weight).__name__,
            layer=path.rpartition(".")[0],
            at=evidence.failing_frame.location,
            origin="" if origin is None else origin.short_text,
            origin_at="" if origin is None else origin.location,
        )
    return None


def _find_viewed_parameter(node: ast.AST, frame: CallFrame) -> nn.Parameter | None:
    """Returns the parameter of an expression such as `weight`, `weight.t()` or `weight.T[:8]`."""
    while True:
        value = read_value(node, frame)
        if isinstance(value, nn.Parameter):
            return value
        match node:
            case ast.Call(ast.Attribute(owner, _)) | ast.Attribute(owner, _):
                node = owner
            case ast.Subscript(owner, _):
                node = owner
            case _:
                return None


def find_left_default_dtype(evidence: Evidence) -> Finding | None:
    """Finds weights in a default dtype that a function of the program set and did not restore."""
    operands = list_floating(evidence)
    default = torch.get_default_dtype()
    if default == torch.float32 or not have_different_dtypes(operands):
        return None
    weights = [operand for operand in operands if operand.path and operand.dtype == default]
    setter = find_unrestored_default_dtype(evidence.frames)
    if not weights or setter is None:
        return None
    origin = find_operand_origin(evidence, weights[0])
    if origin is not None and origin.kind == "cast":
        return None  # the program asks for this dtype
    other = first_of_other_dtype([weights[0], *operands])
    evidence.producer_of(other)  # shown with the operands
    return make_finding(
        "RN027",
        evidence,
        weight=weights[0].path,
        has=weights[0].dtype_name,
        other=describe_operand(other),
        setter=setter.text,
        setter_at=setter.location,
        function=setter.function,
    )


def find_gathered_operand(evidence: Evidence) -> Finding | None:
    """Finds a weight that FSDP2 gathers in the dtype of its policy, beside an input of another one."""
    operands = list_floating(evidence)
    if not have_different_dtypes(operands):
        return None
    weights = [operand for operand in operands if isinstance(operand.weight, nn.Parameter)]
    inputs = [operand for operand in operands if operand.weight is None]
    if not weights or not inputs:
        return None
    weight, value = weights[0], inputs[0]
    assert weight.weight is not None
    gathered = find_gathered_weight(evidence.frames, evidence.names, weight.weight, value.dtype)
    if gathered is None:
        return None
    producer = evidence.producer_of(value)
    is_cast = producer.kind == "cast" and producer.is_proven and is_in_user_file(producer.location)
    return make_finding(
        "RN042",
        evidence,
        weight=weight.path,
        layer=weight.path.rpartition(".")[0],
        has=weight.dtype_name,
        stored=format_dtype(gathered.stored_dtype),
        policy=gathered.policy,
        policy_at=gathered.policy_at,
        input=value.dtype_name,
        source=producer.describe(value.dtype_name),
        cast=producer.text if is_cast else "",
        cast_at=producer.location,
        shard=gathered.shard,
        outer=gathered.outer,
        outer_at=gathered.outer_at,
        target=str(weight.dtype),
    )


def find_odd_weight(evidence: Evidence) -> Finding | None:
    operands = list_floating(evidence)
    majority = evidence.majority_dtype
    if not have_different_dtypes(operands) or majority is None or evidence.autocast.is_on:
        return None
    weights = [operand for operand in operands if operand.path and operand.dtype != majority]
    others = [operand for operand in operands if not operand.path]
    if not weights or any(operand.dtype != majority for operand in others) or not others:
        return None
    weight = weights[0]
    if _belongs_to_model_of_one_dtype(evidence, weight):
        return None
    is_trained = isinstance(weight.tensor, nn.Parameter) and weight.tensor.requires_grad
    owner = evidence.names.tensor_owner(weight.tensor)
    if weight.weight is not None and find_cast_in_call(weight.weight, owner, evidence.frames):
        return None  # the other weights are cast in the same way when their layers run
    origin = None
    if owner is not None:
        origin = _find_odd_origin(evidence, owner, weight)
    others_origin = None
    if evidence.model is not None:
        others_origin = find_model_origin(evidence.frames, evidence.model, majority)
    frame = find_outermost_call(evidence)
    return make_finding(
        "RN002",
        evidence,
        call=frame.text,
        call_at=frame.location,
        narrow_input=_cast_input_of_model_cast(evidence, origin, weight, others[0]),
        line_at=evidence.user_frame.location,
        origin="" if origin is None else origin.describe("it", weight.dtype_name),
        kept_by=_find_kept_module(evidence, weight, origin),
        cast=origin.removable_text if origin is not None and origin.kind == "cast" else "",
        origin_at="" if origin is None else origin.location,
        rebuilt="" if origin is None else origin.with_dtype(majority),
        others_origin=""
        if others_origin is None
        else others_origin.describe("the others", format_dtype(majority)),
        weight=weight.path,
        has=weight.dtype_name,
        share=format_share(evidence.floating_share(majority)),
        usual=format_dtype(majority),
        trained=is_trained and majority in HALF_DTYPES and weight.dtype == torch.float32,
        device=evidence.device,
        target=str(majority),
        owner=weight.path.rpartition(".")[0],
        **_find_root_variable(evidence, weight),
    )


def _find_kept_module(evidence: Evidence, weight: Operand, origin: WeightOrigin | None) -> str:
    """Returns the attribute of a class of transformers that keeps a weight in fp32 when the model is
    loaded in half precision, as a part of a sentence, or "".
    """
    if origin is None or origin.kind != "loading" or weight.dtype != torch.float32:
        return ""
    for path, module in evidence.names.named_modules(evidence.model):
        prefix = f"{path}." if path else ""
        if not weight.path.startswith(prefix):
            continue
        name = weight.path.removeprefix(prefix)
        for attribute in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"):
            parts = getattr(type(module), attribute, None) or ()
            part = next((part for part in parts if part in name), None)
            if part is not None:
                return f"`{type(module).__name__}.{attribute}` contains '{part}'"
    return ""


def _belongs_to_model_of_one_dtype(evidence: Evidence, weight: Operand) -> bool:
    """True if the outermost module is a pipeline of several models, and the one to which a weight
    belongs is all in the dtype of the weight. The weight is then not the odd one.
    """
    models = [] if evidence.model is None else list(evidence.model.children())
    for model in models:
        tensors = list(model.parameters())
        layers = [module for module in model.modules() if list(module.parameters(recurse=False))]
        if any(tensor is weight.tensor for tensor in tensors):
            return len(layers) >= _MIN_LAYERS and floating_weight_dtypes(model) == {weight.dtype}
    return False


def _find_odd_origin(evidence: Evidence, owner: nn.Module, weight: Operand) -> WeightOrigin | None:
    """Returns the call that gave a weight of a module its dtype. For a module that was built in the
    default dtype, such as in the first call of forward, returns the call that built it with all of
    its parts. The other weights of the module may have another dtype.
    """
    dtype = weight.dtype
    origin = find_weight_origin(evidence.frames, evidence.names, owner, dtype)
    if origin is not None and origin.kind != "default":
        return origin
    construction = find_part_construction(evidence.names, evidence.model, owner)
    if construction is not None or weight.tensor is None:
        return construction or origin
    return find_tensor_origin(weight.tensor) or origin


def _cast_input_of_model_cast(
    evidence: Evidence, origin: WeightOrigin | None, weight: Operand, operand: Operand
) -> str:
    """Returns code that casts the input of a layer to the dtype of its weight, if a cast of the
    whole model gave the weight this dtype: the program meant it, and changed other weights later.
    Returns "" in all other cases.
    """
    if origin is None or origin.kind != "cast":
        return ""
    if evidence.model is None or not is_cast_of_most_weights(origin, evidence.model):
        return ""
    producer = evidence.producer_of(operand)
    if not stands_in_user_line(evidence, operand, producer):
        return ""
    return f"{passed_expression(evidence, operand, producer)}.to({weight.dtype})"


def _find_root_variable(evidence: Evidence, weight: Operand) -> dict[str, Any]:
    """Returns the variable of the user's code that holds the model to which the path of a weight
    belongs, and the running line of the function that has this variable. `self` is taken only if
    there is no other variable.
    """
    variables = {"model": "model", "model_at": ""}
    for frame in reversed(evidence.frames):
        for name, value in frame.variables.items():
            is_root = frame.is_user_code and any(value is root for root in evidence.names.roots)
            if is_root and any(parameter is weight.tensor for parameter in value.parameters()):
                variables = {"model": name, "model_at": frame.location}
                if name != "self":
                    return variables
    return variables
