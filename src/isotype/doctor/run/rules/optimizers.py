"""Recognises faults of an optimizer's states, of gradients, and of a loss scaler."""

from __future__ import annotations

import ast
import os
from collections import Counter

import torch

from ....dtypes import format_dtype
from ....finding import Finding
from ..evidence import Evidence
from ..expressions import node_keyword, read_value
from ..model_casts import find_model_cast, find_state_write
from ..recorded_origins import find_state_load, find_tensor_origin
from ..weight_origins import find_weight_origin
from .findings import make_finding, make_operand_finding
from .operands import add_brackets, find_model_variable


def find_scaler_over_halves(evidence: Evidence) -> Finding | None:
    if "unscale FP16 gradients" not in evidence.message or evidence.optimizer is None:
        return None
    counts = evidence.optimizer.parameters
    half_parameters = [
        parameter
        for group in evidence.optimizer.optimizer.param_groups
        for parameter in group["params"]
        if parameter.dtype == torch.float16
    ]
    paths = [evidence.names.tensor_path(parameter) for parameter in half_parameters]
    path_list = paths[0] if paths and paths[0] else "names not in the frames"
    if len(paths) > 1:
        path_list += f" and {len(paths) - 1} more"
    setters = [str(setting) for setting in evidence.settings if "fp16" in str(setting)]
    model = find_model_variable(evidence, half_parameters)
    has_frozen = any(
        not parameter.requires_grad
        for root in evidence.names.roots
        for parameter in root.parameters()
    )
    origin = None
    if half_parameters:
        origin = find_tensor_origin(half_parameters[0])
        owner = evidence.names.tensor_owner(half_parameters[0])
        if origin is None and owner is not None:
            origin = find_weight_origin(evidence.frames, evidence.names, owner, torch.float16)
    is_cast = origin is not None and origin.kind == "cast"
    return make_finding(
        "RN006",
        evidence,
        origin="" if origin is None or is_cast else origin.describe("them", "fp16"),
        is_adapter=origin is not None and origin.kind == "adapters",
        rebuilt="" if origin is None else origin.with_dtype(torch.float32),
        origin_at="" if origin is None else origin.location,
        count=len(half_parameters),
        total=counts.total(),
        shown=path_list,
        whole=len(half_parameters) == counts.total(),
        has_frozen=has_frozen,
        setter=" and ".join([*setters[:2], "the loss scaler"]),
        model=model,
        cast=origin.removable_text if origin is not None and is_cast else "",
        cast_at="" if origin is None else origin.location,
        # the states of a step are older than this cast
        is_late=evidence.optimizer is not None and bool(evidence.optimizer.states),
    )


def find_stale_optimizer_states(evidence: Evidence) -> Finding | None:
    facts = evidence.optimizer
    is_step = any(
        f"{os.sep}torch{os.sep}optim" in frame.file or frame.function == "step"
        for frame in evidence.frames[-6:]
    )
    if facts is None or not is_step or evidence.in_backward:
        return None
    if not type(facts.optimizer).__module__.startswith("torch.optim"):
        return None  # other optimizers may choose the dtype of their states
    states = set(facts.states)
    parameters = set(facts.parameters)
    if states <= parameters and set(facts.gradients) <= parameters and not facts.has_odd_tensor:
        return None
    cast = None
    write = find_state_write(evidence.frames)
    if write is None and not states <= parameters and len(parameters) == 1:
        tensors = (p for group in facts.optimizer.param_groups for p in group["params"])
        cast = find_model_cast(evidence.frames, next(tensors))
    return make_finding(
        "RN007",
        evidence,
        cast="" if cast is None else cast.text,
        cast_at="" if cast is None else cast.location,
        function="" if cast is None else cast.function,
        callback="" if cast is None else cast.callback,
        write="" if write is None else write.text,
        write_at="" if write is None else write.location,
        holder=_name_of_optimizer(evidence, facts.optimizer),
        device=_first_device(facts.optimizer),
        target=str(next(iter(parameters), "")),
        optimizer=facts.class_name,
        states=_join_dtypes(facts.states) if not states <= parameters else "",
        parameters_dtype=_join_dtypes(facts.parameters),
        gradients=_join_dtypes(facts.gradients),
    )


def _name_of_optimizer(evidence: Evidence, optimizer: torch.optim.Optimizer) -> str:
    """Returns the variable of the user's code that holds the optimizer."""
    for frame in reversed(evidence.frames):
        for name, value in frame.variables.items():
            if frame.is_user_code and value is optimizer and name != "self":
                return name
    return "optimizer"


def find_cast_of_loaded_states(evidence: Evidence) -> Finding | None:
    """Finds states that the user's optimizer creates in fp32, and that `load_state_dict` cast."""
    facts = evidence.optimizer
    if facts is None or evidence.user_frame.variables.get("self") is not facts.optimizer:
        return None
    created = _dtype_of_created_state(evidence, facts.optimizer)
    load = find_state_load(facts.optimizer)
    if created is None or load is None or not isinstance(load[0].func, ast.Attribute):
        return None
    return make_finding(
        "RN007",
        evidence,
        device=_first_device(facts.optimizer),
        target=str(next(iter(facts.parameters), "")),
        optimizer=facts.class_name,
        states=_join_dtypes(facts.states),
        parameters_dtype=_join_dtypes(facts.parameters),
        gradients=_join_dtypes(facts.gradients),
        load=ast.unparse(load[0]),
        load_at=load[1],
        holder=ast.unparse(load[0].func.value),
        saved=ast.unparse(load[0].args[0]),
        created=format_dtype(created),
    )


def _dtype_of_created_state(
    evidence: Evidence, optimizer: torch.optim.Optimizer
) -> torch.dtype | None:
    """Returns the dtype in which the running step creates the state that it failed to write, if
    this is not the state's dtype. The state has the dtype of its parameter.
    """
    frame = evidence.user_frame
    if not evidence.operands or frame.scope is None:
        return None
    state = evidence.operands[0].tensor
    if state is None:
        return None
    keys = {
        key
        for parameter, states in optimizer.state.items()
        for key, value in states.items()
        if value is state and state.dtype == parameter.dtype
    }
    for node in ast.walk(frame.scope):
        match node:
            case ast.Assign([ast.Subscript(_, ast.Constant(key))], ast.Call() as call):
                dtype = read_value(node_keyword(call, "dtype"), frame)
                is_other = isinstance(dtype, torch.dtype) and dtype != state.dtype
                if key in keys and is_other:
                    return dtype  # type: ignore[no-any-return]
    return None


def _first_device(optimizer: torch.optim.Optimizer) -> str:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next((p.device.type for p in parameters), "cpu")


def _join_dtypes(counts: Counter[torch.dtype]) -> str:
    return " and ".join(format_dtype(dtype) for dtype, _ in counts.most_common())


def find_assigned_gradient(evidence: Evidence) -> Finding | None:
    """Finds an assignment to `.grad` whose value has another dtype than the parameter."""
    if evidence.operation != "assignment of .grad" or len(evidence.operands) < 2:
        return None
    parameter, gradient = evidence.operands[:2]
    if parameter.dtype == gradient.dtype:
        return None
    return make_operand_finding(
        "RN022",
        evidence,
        gradient,
        value=add_brackets(gradient.label),
        parameter=parameter.label,
        needs=parameter.dtype_name,
        at=evidence.user_frame.location,
    )
