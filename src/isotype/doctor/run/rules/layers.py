"""Recognises an input of a layer in another dtype than its weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ....dtypes import format_dtype
from ....finding import Finding
from ..evidence import Evidence, Operand
from ..expressions import read_function, read_value
from ..frames import CallFrame
from ..graph import find_widening_operation
from ..modules import floating_weight_dtypes
from ..producer import Producer, Promotion
from ..recorded_calls import is_promoted_at, list_arrays_of_function
from ..recorded_origins import find_cast_in_call, find_construction
from ..settings import find_arguments_without_autocast
from ..weight_origins import WeightOrigin, find_model_origin
from .findings import make_finding
from .model_borders import reload_models
from .operands import (
    HALF_DTYPES,
    add_brackets,
    find_module_origin,
    find_setting,
    is_better_at_creation,
    list_computed,
    list_keywords,
    list_source_casts,
    passed_expression,
    passed_location,
    rebuild_creation,
    stands_in_user_line,
)

# names of arguments of a model that its layers do not compute with
_NO_INPUT = re.compile("label|target|weight")


def find_layer_input(evidence: Evidence) -> Finding | None:
    operands = list_computed(evidence)
    weights = [operand for operand in operands if operand.path]
    inputs = [operand for operand in operands if not operand.path]
    if not weights or not inputs or evidence.module is None:
        return None
    weight = weights[0]
    different = [operand for operand in inputs if operand.dtype != weight.dtype]
    if not different:
        return None
    operand = different[0]
    producer = evidence.producer_of(operand)
    passed = passed_expression(evidence, operand, producer)
    passed_at = passed_location(evidence, producer)
    is_item = bool(operand.list_name) and not _is_tensor_there(passed, evidence.user_frame)
    items = [o for o in different if o.list_name == operand.list_name]
    is_known = producer.kind != "unknown"
    promotion = _find_promotion(operand, producer)
    setting = find_setting(evidence, producer, operand.dtype, weight.dtype)
    return make_finding(
        "RN001",
        evidence,
        hook=producer.hook,
        reason=producer.reason,
        item=_item_cast(producer, str(weight.dtype)),
        promoted="" if promotion is None else add_brackets(promotion.operand),
        promoted_at="" if promotion is None else promotion.location,
        layer=weight.path.rpartition(".")[0] or evidence.module_path,
        has=operand.dtype_name,
        needs=weight.dtype_name,
        passed=passed,
        is_in_user_line=not is_item and stands_in_user_line(evidence, operand, producer),
        passed_at=passed_at,
        others=_cast_other_arguments(evidence, operand, weight, passed),
        kind=_proven_kind(producer),
        producer=producer.text if is_known else passed,
        producer_at=producer.location if is_known else passed_at,
        creation=rebuild_creation(producer, str(weight.dtype).removeprefix("torch."))
        if is_item or is_better_at_creation(producer, operand.dtype, weight.dtype)
        else "",
        path=producer.path,
        items=is_item and len(items) > 1,
        reloads=" and ".join(reload_models(evidence, operand, weight, producer)),
        recast=_cast_narrow_weights(evidence, operand, weight, producer),
        item_casts=_cast_items(evidence, items, weight.dtype) if is_item else "",
        is_castable=_is_cast_by_autocast(operand.dtype) and _is_cast_by_autocast(weight.dtype),
        # autocast does not cast the operands of some functions, such as norms on a CPU
        autocast=evidence.autocast.is_on is not False,
        off_at="" if evidence.autocast.is_on else evidence.autocast.location,
        function=evidence.operation,
        target=str(weight.dtype),
        **_explain_weights(evidence, operand, weight, producer),
        **_describe_cast_in_call(evidence, weight),
        is_library_constant=_is_library_constant(evidence, operand, producer, weight.dtype),
        source_casts=list_source_casts(producer, weight.dtype),
        set_by="" if setting is None else setting.describe(),
        set_fix="" if setting is None else setting.fix,
        array_casts=_cast_arrays(evidence, operand, weight.dtype),
    )


def _cast_narrow_weights(
    evidence: Evidence, operand: Operand, weight: Operand, producer: Producer
) -> str:
    """Returns code that builds the weights of the module that computed an operand in the dtype of
    the layer, if one is in bf16 and the other in fp16: no model mixes these two on purpose, while
    norms are often kept in fp32.
    """
    if {operand.dtype, weight.dtype} != set(HALF_DTYPES):
        return ""
    origin = find_module_origin(evidence, producer, operand.dtype)
    code = "" if origin is None else origin.with_dtype(weight.dtype)
    return f"`{code}` at {origin.location}" if code and origin is not None else ""


def _cast_items(evidence: Evidence, items: Sequence[Operand], dtype: torch.dtype) -> str:
    """Returns code that creates the tensors of a list in another dtype, or "" if the line of one of
    them is not known.
    """
    codes = []
    for item in items:
        producer = evidence.producer_of(item)
        code = rebuild_creation(producer, str(dtype).removeprefix("torch."))
        if not code or not producer.is_proven:
            return ""
        codes.append(f"`{code}` at {producer.location}")
    text = " and ".join(dict.fromkeys(codes))
    return f"{text}, for each such call of the line" if len(set(codes)) < len(codes) else text


def _cast_arrays(evidence: Evidence, operand: Operand, dtype: torch.dtype) -> str:
    """Returns code that casts an operand where it was made from an array of NumPy, and the tensors
    that the same function made from arrays of this dtype. Returns "" if there are no others.
    """
    if operand.tensor is None:
        return ""
    calls = list_arrays_of_function(operand.tensor, evidence.frames)
    return " and ".join(f"`{add_brackets(text)}.to({dtype})` at {place}" for text, place in calls)


def _cast_other_arguments(
    evidence: Evidence, operand: Operand, weight: Operand, passed: str
) -> str:
    """Returns code that casts the other arguments with the dtype of an operand, if the user's line
    calls a model whose weights all have one dtype: each of these arguments would fail in turn.
    """
    frame = evidence.user_frame
    call = frame.expression
    is_uniform = {key for key in evidence.dtype_counts if key.is_floating_point} == {weight.dtype}
    if not isinstance(call, ast.Call) or not is_uniform or evidence.model is None:
        return ""
    if read_function(call.func, frame) is evidence.module or evidence.module is evidence.model:
        return ""
    texts = [ast.unparse(argument.value) for argument in list_keywords(call)]
    if passed not in texts:
        return ""
    casts = []
    for argument, text in zip(list_keywords(call), texts):
        value = read_value(argument.value, frame)
        is_input = text != passed and not _NO_INPUT.search(argument.arg or text)
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or not is_input:
            continue
        if value.dtype == operand.dtype:
            casts.append(f" and `{add_brackets(text)}.to({weight.dtype})`")
    return "".join(casts)


def _item_cast(producer: Producer, target: str) -> str:
    """Returns code that casts a tensor where a dataset, a collator or the main code makes it. A
    dataset may also return arrays of NumPy or numbers, which a collator makes tensors.
    """
    if not producer.is_proven or producer.kind not in ("creation", "data", "call"):
        return ""
    if producer.text.startswith("torch."):
        return f"{producer.text}.to({target})"
    return f"torch.as_tensor({producer.text}, dtype={target})"


def _explain_weights(
    evidence: Evidence, operand: Operand, weight: Operand, producer: Producer
) -> dict[str, Any]:
    """Returns why the weights of the layer, and of the module before it, have their dtypes."""
    producer_dtype = ""
    origin = find_module_origin(evidence, producer, operand.dtype)
    module = producer.module
    if module is not None and floating_weight_dtypes(module) == {operand.dtype}:
        producer_dtype = operand.dtype_name
    loading = None
    model_origin = None
    is_default_before = origin is not None and origin.kind == "default"
    is_other_model = module is not None and not _is_part(module, evidence.model)
    is_explained = module is None or is_default_before or is_other_model
    if weight.dtype == evidence.majority_dtype and is_explained:
        if evidence.model is not None:
            model_origin = find_model_origin(evidence.frames, evidence.model, weight.dtype)
        if model_origin is not None and model_origin.kind == "assignment":
            loading, model_origin = model_origin, None
    trainer, flag = _trainer_without_autocast(evidence, weight.dtype)
    facts: dict[str, Any] = {
        "producer_dtype": producer_dtype,
        "several": _count_modules_of_dtype(evidence, operand.dtype) > 1,
        "trainer": trainer,
        "flag": flag,
        "loading": "" if loading is None else loading.text,
        "loading_at": "" if loading is None else loading.location,
    }
    weights = f"the weights of {producer.path}"
    if origin is None and producer.path and producer.weight_origin is not None:
        origin, weights = producer.weight_origin, "it"
        facts["odd_weight"] = producer.path
    facts |= _describe_origin(origin, weights, operand.dtype, weight.dtype)
    if evidence.model is not None and model_origin is None and loading is None and is_other_model:
        construction = find_construction(evidence.model)
        if construction is not None:
            name = type(evidence.model).__name__
            text = construction.describe(f"the weights of {name}", weight.dtype_name)
            facts["uncast"] = text
            facts["holder"] = find_holder(evidence, evidence.model)
            facts["input_dtype"] = str(operand.dtype)
    if model_origin is not None:
        weights = "the weights of the model"
        facts["model_origin"] = model_origin.describe(weights, weight.dtype_name)
        facts["model_origin_at"] = model_origin.location
        if model_origin.is_load_without_dtype:
            facts["reloaded"] = model_origin.with_dtype(operand.dtype)
    return facts


def _is_library_constant(
    evidence: Evidence, operand: Operand, producer: Producer, wanted: torch.dtype
) -> bool:
    """True if a library's line creates a tensor in the default dtype beside fp64 tensors of the user's
    code, such as a constant of torch.distributions.
    """
    frame = evidence.frames[operand.frame_index]
    is_created_there = producer.kind == "creation" and producer.location == frame.location
    is_default = operand.dtype == torch.get_default_dtype() and "dtype=" not in producer.text
    return not frame.is_user_code and is_created_there and is_default and wanted == torch.float64


def _describe_cast_in_call(evidence: Evidence, weight: Operand) -> dict[str, Any]:
    """Returns the line of a hook that casts the weights of the layer while the layer runs, as layers
    do that are stored in fp8. The hook must cast the input too.
    """
    owner = evidence.names.tensor_owner(weight.tensor)
    cast = None
    if weight.weight is not None:
        cast = find_cast_in_call(weight.weight, owner, evidence.frames)
    if cast is None:
        return {}
    arguments = cast.arguments
    casts = f"return tuple(value.to({weight.dtype}) for value in {arguments})"
    return {
        "hook_cast": cast.origin.text,
        "hook_cast_at": cast.origin.location,
        "stored": format_dtype(cast.stored_dtype),
        "hook_return": casts if arguments else "",
    }


def _is_part(module: nn.Module, model: nn.Module | None) -> bool:
    return model is not None and any(part is module for part in model.modules())


def find_holder(evidence: Evidence, model: nn.Module) -> str:
    """Returns the expression for a model in the user's line: a variable, or the attribute of an
    object, such as `pipe.vae`.
    """
    frame = evidence.user_frame
    for name, value in frame.variables.items():
        if value is model:
            return name
        stored = {} if isinstance(value, type) else getattr(value, "__dict__", {})
        for attribute, item in stored.items():
            if item is model:
                return f"{name}.{attribute}"
    return ""


def _describe_origin(
    origin: WeightOrigin | None, weights: str, dtype: torch.dtype, wanted_dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the facts about the expression that gave weights their dtype.

    wanted_dtype  the dtype that the weights would need
    """
    if origin is None:
        return {}
    return {
        "origin": origin.describe(weights, format_dtype(dtype)),
        "origin_kind": origin.kind,
        "cast": origin.removable_text if origin.kind == "cast" else "",
        "origin_at": origin.location,
        "rebuilt": origin.with_dtype(wanted_dtype),
    }


def _is_cast_by_autocast(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype != torch.float64


def _is_tensor_there(text: str, frame: CallFrame) -> bool:
    """False if an expression of a frame is a tuple or a list, which has no method `to`."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return True
    return not isinstance(read_value(node, frame), (tuple, list))


def _count_modules_of_dtype(evidence: Evidence, dtype: torch.dtype) -> int:
    """Returns the number of modules of the model that own a parameter of a dtype."""
    return sum(
        any(parameter.dtype == dtype for parameter in module.parameters(recurse=False))
        for root in evidence.names.roots
        for module in root.modules()
    )


def _trainer_without_autocast(evidence: Evidence, dtype: torch.dtype) -> tuple[str, str]:
    """Returns the class of a Trainer's arguments, and the argument that switches autocast on for a
    dtype. Returns empty texts if no Trainer runs without autocast.
    """
    flag = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    if flag is None:
        return "", ""
    class_name = find_arguments_without_autocast(evidence.frames)
    return (class_name, flag) if class_name else ("", "")


def _proven_kind(producer: Producer) -> str:
    """Returns the kind of an expression. An expression that may be a cast is of kind `call`."""
    is_unproven_cast = producer.kind == "cast" and not producer.is_proven
    return "call" if is_unproven_cast else producer.kind


def _find_promotion(operand: Operand, producer: Producer) -> Promotion | None:
    """Returns the operation that widened an operand, if the record or autograd's graph confirms it."""
    if not producer.is_proven or not producer.promotions:
        return None
    if operand.tensor is not None:
        recorded = [p for p in producer.promotions if is_promoted_at(operand.tensor, p.location)]
        if recorded:
            return recorded[0]
    operation = find_widening_operation(operand.tensor)
    matches = [promotion for promotion in producer.promotions if promotion.operation == operation]
    return matches[0] if matches else None
