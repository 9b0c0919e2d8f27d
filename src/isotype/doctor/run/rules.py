"""Defines the rules that determine the cause of an exception from its stack frames (`Evidence`).
Each rule recognises one cause. It returns a finding if it recognises its cause, and otherwise None.
Only the first finding is reported. The texts of the findings are in `causes.txt`.
"""

from __future__ import annotations

import ast
import dataclasses
import linecache
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...dtypes import format_dtype, to_torch
from ...finding import Finding, Place
from ...observe.origin import short_path
from ...pages.finding_sheet import load_finding_formatter
from .autocast import starts_thread
from .batches import find_batch_item
from .causes import SHEET
from .checks import find_check_location, find_compared_dtypes, read_dtype_owner
from .dtype_settings import DtypeSetting, find_dtype_setting
from .evidence import NUMPY_DTYPE, Evidence, Operand, describe_autocast
from .expressions import is_tensor, node_keyword, read_function, read_value
from .frames import CallFrame
from .graph import find_widening_operation, read_grad_fn
from .hooks import find_handler
from .losses import find_loss_node, find_loss_target
from .mixed_weights import NEEDS_ONE_DTYPE, group_weights
from .model_casts import (
    find_default_dtype_creation,
    find_default_dtype_setter,
    find_model_cast,
    find_state_cast,
    find_state_write,
    find_unrestored_default_dtype,
    find_unwrapping,
)
from .modules import floating_weight_dtypes
from .operand_origins import add_value_origins, add_weight_origins, find_operand_origin
from .producer import Producer, Promotion
from .producers import (
    find_constructor_argument,
    find_passed_argument,
    find_producer,
)
from .recomputation import (
    Recomputation,
    find_changed_states,
    find_inner_autocast,
    find_recomputation,
)
from .recorded_origins import (
    find_construction,
    find_state_load,
    find_tensor_origin,
    is_cast_of_most_weights,
)
from .settings import find_arguments_without_autocast, is_prepared_model, runs_under_autocast
from .storages import StorageCreation, find_storage_creation
from .user_files import iterate_user_files
from .weight_origins import WeightOrigin, find_model_origin, find_weight_origin
from .weight_record import RECORD

_format_finding = load_finding_formatter(SHEET)
_LABEL_WIDTH = 28
# functions of torch whose variables say nothing about the cause
_PLUMBING = ("_engine_run_backward", "_unscale_grads_")
# functions of torch without kernels for bf16 and fp16 on a CPU
_FLOAT_ONLY = (
    "torch.fft.",
    "torch.linalg.",
    "torch.view_as_complex",
    "torch.polar",
    "torch.complex",
)
_MAX_GROUPS = 4  # classes of modules that one row of the report counts, or operands in a title
_MAX_ROWS = 6  # operands that are listed
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_NUMPY_FLOATS = ("float16", "float32", "float64")
_WRITING_OPERATIONS = frozenset(
    ("index_put", "index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_")
    + ("index_add", "index_copy", "scatter", "scatter_add", "masked_scatter", "masked_scatter_")
    + ("scatter_reduce_", "scatter_reduce", "index_reduce_", "index_reduce")
)
_OVERWRITING_OPERATIONS = frozenset(
    ("index_put", "index_put_", "index_copy_", "scatter_", "masked_scatter_")
)
# losses whose targets are classes
_CLASS_LOSSES = frozenset(("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd"))
_FLOAT_LOSSES = frozenset(
    ("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "huber_loss")
    + ("smooth_l1_loss", "l1_loss", "kl_div")
)


def decide_cause(evidence: Evidence) -> Finding:
    """Returns the finding of the first rule that recognises the cause. If no rule recognises the
    cause, returns RN000, a note that lists the facts.
    """
    if RECORD.tensors is not None:
        for operand in _floating(evidence)[:_MAX_ROWS]:
            evidence.producer_of(operand)  # shown with the operands
    for rule in RULES:
        finding = rule(evidence)
        if finding is not None:
            finding = add_value_origins(finding, evidence)
            return _check_fix(add_weight_origins(finding, evidence), evidence)
    first_line = evidence.message.strip().partition("\n")[0]
    return _make_finding(
        "RN000",
        evidence,
        operation=evidence.operation,
        error=f"{type(evidence.error).__name__}: {first_line}",
    )


# code in backticks, and the place at which it has to be typed
_CODE_OR_PLACE = re.compile(r"`(?P<code>[^`]+)`|(?: at|before) (?P<file>\S+):(?P<line>\d+)|[(;]")
_GENERAL_FIX = (
    "cast the value where your code makes it: the frames do not show this line, and `isotype"
    " doctor run --trace` names it"
)
_ADVICE_TO_TRACE = "; `isotype doctor run --trace` names the line"
_GENERAL_FIX_OF_RECORD = "cast the value where your code makes it"


def _check_fix(finding: Finding, evidence: Evidence) -> Finding:
    """Replaces a fix that cannot be applied as it is written by a general one. A fix never edits a
    line of a library.
    """
    library_files = {short_path(f.file) for f in evidence.frames if not f.is_user_code}
    places = {match["file"] for match in _CODE_OR_PLACE.finditer(finding.fix or "")}
    general_fix = _GENERAL_FIX
    if RECORD.tensors is not None:
        general_fix = _GENERAL_FIX_OF_RECORD
        fix = (finding.fix or "").replace(_ADVICE_TO_TRACE, "")
        finding = dataclasses.replace(finding, fix=fix)
    if places & library_files:
        return dataclasses.replace(finding, fix=general_fix)
    for code, file, line in _iterate_located_code(finding.fix or ""):
        if not _is_applicable(code, file, line, evidence):
            return dataclasses.replace(finding, fix=general_fix)
    return finding


def _iterate_located_code(fix: str) -> Iterator[tuple[str, str, int]]:
    """Yields each piece of code of a fix with the file and line at which it has to be typed. Several
    pieces may have one place: `q.half()` and `k.half()` at model.py:3.
    """
    pieces: list[str] = []
    for match in _CODE_OR_PLACE.finditer(fix):
        if match["code"]:
            pieces.append(match["code"])
            continue
        for code in pieces if match["file"] else ():
            yield code, match["file"], int(match["line"])
        pieces = []


def _is_applicable(code: str, file: str, line: int, evidence: Evidence) -> bool:
    """True if the file is the user's, and all names in the code are variables there or stand on the
    line. If the line is the running line of a frame, it must also contain the names.
    """
    frames = [frame for frame in evidence.frames if short_path(frame.file) == file]
    frames = [frame for frame in frames if frame.is_user_code]
    try:
        names = _names_in(code)
    except SyntaxError:
        return False
    if not any(all(frame.has_variable(name) for name in names) for frame in frames):
        trees = [
            tree
            for path, tree, _ in iterate_user_files(evidence.frames)
            if short_path(path) == file
        ]
        return any(names <= _names_in_lines(tree, line) for tree in trees)
    running = [frame for frame in frames if frame.line == line]
    if any(_calls_in_place_function(frame, evidence) for frame in running):
        return False  # it would change a copy
    return not running or any(names <= _names_in_statement(frame) for frame in running)


def _calls_in_place_function(frame: CallFrame, evidence: Evidence) -> bool:
    """True if the frame calls a Python function of a library whose name ends with `_`."""
    call = frame.expression
    if frame is evidence.failing_frame or not isinstance(call, ast.Call):
        return False
    return ast.unparse(call.func).endswith("_")


def _names_in(code: str) -> set[str]:
    """Returns the variables that an expression reads, without the names of modules of torch."""
    tree = ast.parse(code)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bound = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return names - bound - {"torch", "nn"}


def _names_in_lines(tree: ast.Module, line: int) -> set[str]:
    """Returns the names in the expressions of a file that begin on a line. An expression may end on
    a later line.
    """
    expressions = [
        node for node in ast.walk(tree) if isinstance(node, ast.expr) and node.lineno == line
    ]
    nodes = [part for expression in expressions for part in ast.walk(expression)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _names_in_statement(frame: CallFrame) -> set[str]:
    statement = frame.statement
    if statement is None:
        return set()
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _make_finding(
    code: str, evidence: Evidence, frame: CallFrame | None = None, **values: Any
) -> Finding:
    """Returns a finding with the location of the user's innermost line, or of `frame` if it is
    given.
    """
    if frame is None:
        frame = evidence.user_frame
    location = Place(
        file=short_path(frame.file), line=frame.line, symbol=evidence.module_path or frame.function
    )
    return _format_finding(code, location, _details(evidence, frame), **values)


def _make_operand_finding(
    code: str, evidence: Evidence, operand: Operand, **values: Any
) -> Finding:
    """Returns a finding about one operand of the expression that failed. Its text contains the
    user's expression for the operand, the operand's dtype, and the line of the user's code that
    passes it on. `values` can replace these parts of the text, or add others.
    """
    producer = evidence.producer_of(operand)
    facts = {
        "value": _passed(evidence, operand, producer),
        "has": operand.dtype_name,
        "at": _passed_at(evidence, producer),
    }
    return _make_finding(code, evidence, **{**facts, **values})


def _details(evidence: Evidence, frame: CallFrame) -> tuple[tuple[str, str], ...]:
    """Returns the facts that are printed under every finding, such as the line, the operands and
    the autocast state.
    """
    details = []
    if frame.is_user_code:
        details.append(("line", frame.text[:200]))
    default = torch.get_default_dtype()
    if default != torch.float32 and default in evidence.floating_dtypes:
        setter = find_default_dtype_setter(evidence.frames)
        origin = "" if setter is None else f", set by `{setter.text}` at {setter.location}"
        details.append(("default dtype", f"{format_dtype(default)}{origin}"))
    if frame is not evidence.user_frame:
        details.append(("raised at", evidence.user_frame.location))
    lists: set[tuple[str, torch.dtype]] = set()
    for operand in evidence.operands[:_MAX_ROWS]:
        if evidence.frames[operand.frame_index].function in _PLUMBING:
            continue
        if operand.list_name and (operand.list_name, operand.dtype) in lists:
            continue  # one item of a list stands for all of a dtype
        lists.add((operand.list_name, operand.dtype))
        label, state = _name_optimizer_tensor(evidence, operand)
        text = operand.describe() + state
        producer = evidence.producers.get(id(operand))
        if producer is not None and not operand.path and producer.text != operand.label:
            text += f"  from {producer.text} at {producer.location}"
        weight_origin = find_operand_origin(evidence, operand)
        if weight_origin is not None:
            text += f"  from {weight_origin.short_text} at {weight_origin.location}"
        details.append((_shorten(label), text))
    handler = find_handler(evidence.frames, evidence.names)
    if handler is not None:
        details.append((handler.kind, handler.text))
    phase = "in backward, " if evidence.in_backward else ""
    details.append(("autocast", phase + describe_autocast(evidence.autocast)))
    majority = evidence.majority_dtype
    if majority is not None:
        share = _format_share(evidence.floating_share(majority))
        kind = "parameters"
        if not all(dtype.is_floating_point for dtype in evidence.dtype_counts):
            kind = "floating-point parameters"
        details.append(("model", f"{share} of the {kind} are {format_dtype(majority)}"))
        details.extend(_describe_odd_weights(evidence, majority))
    if evidence.settings:
        settings = ", ".join(map(str, evidence.settings))
        details.append(("settings", settings))
    unknown = _list_unknown_origins(evidence)
    if unknown:
        lines = f"the lines that gave {' and '.join(unknown)} their dtypes"
        if len(unknown) == 1:
            lines = f"the line that gave {unknown[0]} its dtype"
        details.append(("next", f"isotype doctor run --trace names {lines}"))
    return tuple(details)


def _list_unknown_origins(evidence: Evidence) -> list[str]:
    """Returns the labels of the operands whose dtype has an origin that the frames do not show."""
    if RECORD.tensors is not None:
        return []
    labels = []
    for operand in _floating(evidence)[:_MAX_ROWS]:
        producer = evidence.producers.get(id(operand))
        if producer is not None and not operand.path and not producer.is_proven:
            labels.append(operand.label)
    return labels


def _name_optimizer_tensor(evidence: Evidence, operand: Operand) -> tuple[str, str]:
    """Returns the name of an operand, and what it is if it belongs to an optimizer: a state or a
    gradient of a parameter. The variables of the optimizer's own code have other names.
    """
    facts = evidence.optimizer
    if facts is None or operand.tensor is None or operand.path:
        return operand.label, ""
    for parameter in [p for group in facts.optimizer.param_groups for p in group["params"]]:
        path = evidence.names.tensor_path(parameter) or "a parameter"
        if operand.tensor is parameter.grad:
            return "grad", f"  gradient of {path}"
        states = facts.optimizer.state.get(parameter, {})
        for key, value in states.items():
            if value is operand.tensor:
                return str(key), f"  state of {path}"
    return operand.label, ""


def _describe_odd_weights(evidence: Evidence, majority: torch.dtype) -> Iterator[tuple[str, str]]:
    """Yields a row for each floating-point dtype of a few weights of the model: the number of its
    modules by class.
    """
    groups: dict[torch.dtype, Counter[str]] = {}
    for path, module in evidence.names.named_modules(evidence.model):
        kind = type(module).__name__
        if ".lora_" in path:
            kind = f"LoRA {kind}"
        for dtype in {parameter.dtype for parameter in module.parameters(recurse=False)}:
            if dtype.is_floating_point and dtype != majority:
                groups.setdefault(dtype, Counter())[kind] += 1
    for dtype, counts in groups.items():
        parts = [f"{count} {kind}" for kind, count in counts.most_common(_MAX_GROUPS)]
        rest = " and others" if len(counts) > _MAX_GROUPS else ""
        yield f"{format_dtype(dtype)} weights", f"{', '.join(parts)}{rest}"


def _format_share(share: float) -> str:
    """Returns a percentage, which is 100% only for all."""
    text = f"{100 * share:.0f}%"
    return "more than 99%" if share < 1 and text == "100%" else text


def _shorten(label: str) -> str:
    """Shortens an expression that is used as the heading of a row."""
    return label if len(label) <= _LABEL_WIDTH else f"{label[: _LABEL_WIDTH - 3]}..."


def _floating(evidence: Evidence) -> list[Operand]:
    return [operand for operand in evidence.operands if operand.dtype.is_floating_point]


# names of arguments of a model that its layers do not compute with
_NO_INPUT = re.compile("label|target|weight")
_NEEDS_ONE_DTYPE = re.compile(r"same dtype|should be the same|expected scalar type")


def _computed(evidence: Evidence) -> list[Operand]:
    """Returns the operands from which a result is computed: the floating-point ones, and integers
    if the operator needs one dtype for all of its operands.
    """
    floats = _floating(evidence)
    if _differ(floats) or not _NEEDS_ONE_DTYPE.search(evidence.message):
        return floats
    return list(evidence.operands)


def _differ(operands: Sequence[Operand]) -> bool:
    return len({operand.dtype for operand in operands}) > 1


def _first_of_other_dtype(operands: Sequence[Operand]) -> Operand:
    """Returns the first operand whose dtype is not that of `operands[0]`."""
    return next(operand for operand in operands if operand.dtype != operands[0].dtype)


def _describe(operand: Operand) -> str:
    """Describes an operand for use in a sentence, for example as `fp32 x` or `bf16
    layers.0.weight`.
    """
    return f"{operand.dtype_name} {operand.path or operand.label}"


def _passed(evidence: Evidence, operand: Operand, producer: Producer) -> str:
    """Returns the user's expression for an operand. The expression is put in brackets if this is
    needed to call a method on it. If it is not known which expression in the user's code produced
    the operand, and the user's call has a single argument, the result is this argument.
    """
    return _brackets(_passed_argument(evidence, operand, producer) or operand.label)


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
    if len(call.args) == 1:
        value = read_value(call.args[0], frame)
        is_other = is_tensor(value) and value.dtype != operand.dtype
        return "" if is_other else ast.unparse(call.args[0])
    if operand.path or evidence.frames[operand.frame_index] is frame:
        return ""
    values = {ast.unparse(part.value): read_value(part.value, frame) for part in _keywords(call)}
    texts = [t for t, value in values.items() if is_tensor(value) and value.dtype == operand.dtype]
    return texts[0] if len(texts) == 1 else ""


def _is_in_user_line(evidence: Evidence, operand: Operand, producer: Producer) -> bool:
    """True if the user's line contains an expression for the operand. Otherwise the operand's name
    is a variable of a library.
    """
    if _passed_argument(evidence, operand, producer):
        return True
    if isinstance(evidence.frames[operand.frame_index].statement, ast.Raise):
        return False
    return evidence.frames[operand.frame_index].is_user_code


def _passed_at(evidence: Evidence, producer: Producer) -> str:
    return producer.passed_at or evidence.user_frame.location


def _half_dtype(operands: Sequence[Operand]) -> torch.dtype | None:
    """Returns the half-precision dtype of one of the operands, if autocast would cast all other
    operands to this dtype.
    """
    dtypes = {operand.dtype for operand in operands}
    if torch.float64 in dtypes:
        return None
    return next((dtype for dtype in _HALF_DTYPES if dtype in dtypes), None)


def find_compiled_operands(evidence: Evidence) -> Finding | None:
    """Finds operands of different dtypes in code that `torch.compile` traces. The frames are those
    of the compiler: only its message contains the user's line.
    """
    operands = _floating(evidence)
    if evidence.compiled_location is None or not _differ(operands):
        return None
    file, line = evidence.compiled_location
    second = _first_of_other_dtype(operands)
    finding = _make_finding(
        "RN021",
        evidence,
        line=linecache.getline(file, line).strip(),
        at=f"{short_path(file)}:{line}",
        first=operands[0].dtype_name,
        second=second.dtype_name,
        target=str(second.dtype),
    )
    return dataclasses.replace(finding, place=Place(file=short_path(file), line=line))


def find_changed_checkpoint(evidence: Evidence) -> Finding | None:
    """Finds a second run of a checkpointed function whose dtypes are not those of the first."""
    if type(evidence.error).__name__ != "CheckpointError":
        return None
    recomputation = find_recomputation(evidence.frames)
    if recomputation is None:
        return None
    saved = re.search(r"saved metadata: .*'dtype': (torch\.\w+)", evidence.message)
    recomputed = re.search(r"recomputed metadata: .*'dtype': (torch\.\w+)", evidence.message)
    if saved is None or recomputed is None:
        if "different number of tensors" not in evidence.message:
            return None
        facts = _describe_changes(evidence, recomputation, None)
        if not facts["decided"]:
            return None  # the dtypes may be those of forward
        return _make_finding("RN019", evidence, saved="", recomputed="", layer="", **facts)
    if saved[1] == recomputed[1]:
        return None
    return _make_finding(
        "RN019",
        evidence,
        saved=format_dtype(saved[1]),
        recomputed=format_dtype(recomputed[1]),
        **_describe_changes(evidence, recomputation, to_torch(format_dtype(recomputed[1]))),
    )


def find_failed_recomputation(evidence: Evidence) -> Finding | None:
    """Finds an operator that fails when a checkpointed function runs again in backward. The same
    operator did not fail in forward.
    """
    operands = _floating(evidence)
    recomputation = find_recomputation(evidence.frames)
    if recomputation is None or not _differ(operands) or not evidence.in_backward:
        return None
    weights = [operand for operand in operands if operand.path]
    others = [operand for operand in operands if not operand.path]
    if not weights or not others:
        weights = [_first_of_other_dtype(operands)]
        others = [operands[0]]
    evidence.producer_of(others[0])  # shown with the operands
    is_weight_changed = any(
        tensor.is_floating_point() and tensor.dtype != weights[0].dtype
        for tensor in recomputation.inputs
    )
    cast_dtype = weights[0].dtype if is_weight_changed else None
    facts = _describe_changes(evidence, recomputation, cast_dtype)
    if not facts["changes"]:
        return None
    return _make_finding(
        "RN019",
        evidence,
        saved=others[0].dtype_name,
        recomputed=weights[0].dtype_name,
        layer=weights[0].path or weights[0].label,
        **facts,
    )


def _describe_changes(
    evidence: Evidence, recomputation: Recomputation, cast_dtype: torch.dtype | None
) -> dict[str, Any]:
    """Returns what may have changed the dtypes of a checkpointed function between forward and
    backward. `decided` names the kind of the only change that was found, or is "".

    cast_dtype  the dtype to which the weights may have been cast
    """
    frames = evidence.frames
    creation = find_default_dtype_creation(frames, recomputation.content)
    states = find_changed_states(recomputation, frames)
    region = find_inner_autocast(recomputation)
    cast = None
    if cast_dtype is not None and recomputation.module is not None:
        weights = (p for p in recomputation.module.parameters() if p.dtype == cast_dtype)
        weight = next(weights, None)
        cast = None if weight is None else find_model_cast(frames, weight)
    if cast is not None and not cast.function:
        cast = None  # the main code casts the model before forward
    changes = {}
    if creation is not None:
        changes["creation"] = f"`{creation.text}` ({creation.location})"
    if cast is not None:
        changes["cast"] = f"`{cast.text}` in {cast.function} ({cast.location})"
    for state in states:
        kind = "cache" if state.is_inside else "state"
        changes[kind] = f"`{state.text}` ({state.location})"
    if region is not None and not states:
        changes["region"] = f"`{region[0]}` ({region[1]})"
    is_decided = len(changes) == 1 and len(states) < 2
    return {
        "decided": next(iter(changes)) if is_decided else "",
        "change": next(iter(changes.values())) if is_decided else "",
        "changes": "; ".join(changes.values()),
        "setter": "" if creation is None else creation.function,
        "function": recomputation.describe(evidence.names),
        "device": evidence.device,
        "target": "" if cast_dtype is None else str(cast_dtype),
        "read": states[0].name if states else "",
        "context": states[0].context if states else "",
    }


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
    model = _name_of_model(evidence, half_parameters)
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
    return _make_finding(
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
    )


def _name_of_model(evidence: Evidence, parameters: Sequence[nn.Parameter]) -> str:
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
    return _make_finding(
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
    return _make_finding(
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
    return _make_finding(
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


def find_integer_parameter(evidence: Evidence) -> Finding | None:
    if not re.search(r"(?i)only tensors of floating point .*require gradients", evidence.message):
        return None
    integers = [operand for operand in evidence.operands if not operand.dtype.is_floating_point]
    if not integers:
        return None
    is_parameter = "Parameter" in evidence.user_frame.text
    weight = integers[0]
    return _make_operand_finding(
        "RN012",
        evidence,
        weight,
        is_parameter=is_parameter,
        path=weight.path or weight.label,
        storage=weight.storage or "",
    )


def find_numpy_dtype(evidence: Evidence) -> Finding | None:
    """Finds a dtype of torch, or the name of one, that was passed to NumPy."""
    match = NUMPY_DTYPE.search(evidence.message)
    if match is None:
        return None
    name = match["name"]
    files = [frame.file.replace("\\", "/") for frame in evidence.frames]
    call = evidence.user_frame.expression
    text = evidence.user_frame.text if call is None else " ".join(ast.unparse(call).split())
    reads_file = any("/safetensors/" in file for file in files) or ".get_tensor(" in text
    return _make_finding(
        "RN013",
        evidence,
        value=text,
        has=format_dtype(name),
        at=evidence.user_frame.location,
        use="file" if reads_file else "dtype",
        numpy_dtype=name if name in _NUMPY_FLOATS else "float32",
        exists=name in _NUMPY_FLOATS,
    )


def find_numpy_conversion(evidence: Evidence) -> Finding | None:
    match = re.search(r"unsupported ScalarType (\w+)", evidence.message)
    if match is None:
        return None
    facts: dict[str, Any] = {
        "has": format_dtype(match[1]),
        "later": " and ".join(_find_later_conversions(evidence.user_frame)),
    }
    match evidence.user_frame.expression:
        case ast.Call(ast.Attribute(owner, "numpy")):
            facts["value"] = _brackets(ast.unparse(owner))
            facts["at"] = evidence.user_frame.location
    if evidence.operands:
        producer = evidence.producer_of(evidence.operands[0])
        facts["origin"] = producer.describe(evidence.operands[0].dtype_name)
        return _make_operand_finding("RN013", evidence, evidence.operands[0], **facts)
    if "value" in facts:  # the value of a call, which no variable holds
        node = evidence.user_frame.expression
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Attribute)
        index = max(i for i, f in enumerate(evidence.frames) if f is evidence.user_frame)
        producer = find_producer(
            node.func.value, evidence.frames, index, to_torch(facts["has"]), evidence.names
        )
        facts["origin"] = producer.describe(facts["has"])
        return _make_finding("RN013", evidence, evidence.user_frame, **facts)
    return None


def _describe_others(evidence: Evidence, others: Sequence[Operand]) -> str:
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


def _find_later_conversions(frame: CallFrame) -> list[str]:
    """Returns the later lines of the running function that convert a tensor to NumPy whose dtype
    NumPy does not have.
    """
    lines = []
    for node in () if frame.scope is None else ast.walk(frame.scope):
        match node:
            case ast.Call(ast.Attribute(owner, "numpy")) if node.lineno > frame.line:
                value = read_value(owner, frame)
                if is_tensor(value) and value.dtype == torch.bfloat16:
                    lines.append(f"`{_brackets(ast.unparse(owner))}.float()` at line {node.lineno}")
    return lines


_NO_KERNEL = re.compile(
    r"not implemented for '(?P<dtype>\w+)'|Unsupported dtype (?P<plain>\w+)"
    r"|[Ll]ow precision dtypes not supported. Got (?P<low>\w+)"
    r"|must be either float or double dtype|only supports floating-point dtypes"
    r"|Input dtype must be either a floating point"
    r"|(?:only supported for|inputs to be) (?i:half|float)[\w, ]* tensors"
    r"|only supports? (?:floating point|float)[\w ,]* dtypes"
    r"|doesn't support tensors of type: (?P<type>\w+)"
    r"|Promotion for Float8 Types is not supported, attempted to promote (?:\w+ and )?(?P<float8>Float8\w+)"
)
_FOURIER = re.compile("fft|stft")


# operators of bool and integers, which have no kernels for floats on any device
_BITWISE_OPERATIONS = frozenset(
    ("bitand", "bitor", "bitxor", "invert", "__and__", "__or__", "__xor__", "__iand__", "__ior__")
    + ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")
)
_INTEGER_OPERATIONS = frozenset(
    ("lshift", "rshift", "bitwise_left_shift", "bitwise_right_shift", "gcd", "lcm")
)


def find_missing_kernel(evidence: Evidence) -> Finding | None:
    match = _NO_KERNEL.search(evidence.message)
    if match is None or not evidence.operands:
        return None
    name = next((name for name in match.groupdict().values() if name is not None), None)
    operands = list(evidence.operands)
    if name is not None:
        operands = [
            operand for operand in operands if operand.dtype_name == format_dtype(name)
        ] or operands
    # a variable decides the dtype of a table that the same line makes like it
    operand = next((part for part in operands if part.tensor is not None), operands[0])
    producer = evidence.producer_of(operand)
    passed = _passed(evidence, operand, producer)
    is_read_twice = passed.isidentifier() and len(_reads_of(passed, evidence.user_frame)) > 1
    later_calls = _find_later_calls(evidence.failing_frame, operand.dtype)
    needed = _needed_integer_dtype(evidence)
    if needed is None and not operand.dtype.is_floating_point:
        needed = torch.float32
    creation = "" if needed is None else _creation_of(producer, str(needed).partition(".")[2])
    return _make_operand_finding(
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
        also=" and ".join(_list_like_operands(evidence, operand)),
        is_fourier=bool(_FOURIER.search(evidence.operation)),
        **_describe_stored_weights(evidence, operand),
        is_complex=evidence.operation in ("polar", "complex", "view_as_complex"),
    )


def _list_like_operands(evidence: Evidence, operand: Operand) -> list[str]:
    """Returns casts for the other operands of a Fourier transform in the same dtype, such as the
    window of a signal.
    """
    if not _FOURIER.search(evidence.operation):
        return []
    like = [o for o in evidence.operands if o is not operand and o.dtype == operand.dtype]
    return [f"`{_brackets(other.label)}.float()`" for other in like]


def _describe_stored_weights(evidence: Evidence, operand: Operand) -> dict[str, Any]:
    """Returns what keeps the weights of a model in fp8, a dtype in which PyTorch computes no
    arithmetic.
    """
    is_stored = operand.dtype.itemsize == 1 and operand.dtype == evidence.majority_dtype
    if not is_stored or evidence.model is None:
        return {}
    origin = find_model_origin(evidence.frames, evidence.model, operand.dtype)
    name = _name_of_model(evidence, list(evidence.model.parameters()))
    return {
        "stored": "" if origin is None else origin.describe("the weights", operand.dtype_name),
        "stored_cast": f"{name}.to(torch.bfloat16)" if name else "cast the model to torch.bfloat16",
    }


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
            lines[call.lineno] = f"line {call.lineno}"
        elif name.startswith(_FLOAT_ONLY) and call.args and dtype in _HALF_DTYPES:
            value = read_value(call.args[0], frame)
            if is_tensor(value) and value.dtype == dtype:
                lines.setdefault(call.lineno, f"line {call.lineno} for `{ast.unparse(call)}`")
    return [lines[line] for line in sorted(lines)]


def _creation_of(producer: Producer, dtype: str) -> str:
    """Returns the call of torch that created a tensor, with another dtype. Returns "" if the tensor
    was not created by such a call, or if the call already gives a dtype.
    """
    text = producer.text
    is_plain = text.startswith("torch.") and text.endswith(")") and "dtype=" not in text
    if producer.kind != "creation" or not is_plain:
        return ""
    if text.startswith("torch.from_numpy("):
        return f"{text}.to(torch.{dtype})"
    return f"{text[:-1]}, dtype=torch.{dtype})"


def find_float_indices(evidence: Evidence) -> Finding | None:
    is_index_error = re.search(
        r"argument #\d+ 'indices'|used as indices must be|index.*(?:int64|int32|long)",
        evidence.message,
    )
    floats = [operand for operand in _floating(evidence) if not operand.path]
    if is_index_error is None or not floats:
        return None
    producer = evidence.producer_of(floats[-1])
    return _make_operand_finding(
        "RN015",
        evidence,
        floats[-1],
        operation=evidence.operation,
        is_in_user_line=_is_in_user_line(evidence, floats[-1], producer),
        is_cast=producer.kind == "cast" and producer.is_proven,
        source=producer.text,
        source_at=producer.location,
    )


def find_assigned_gradient(evidence: Evidence) -> Finding | None:
    """Finds an assignment to `.grad` whose value has another dtype than the parameter."""
    if evidence.operation != "assignment of .grad" or len(evidence.operands) < 2:
        return None
    parameter, gradient = evidence.operands[:2]
    if parameter.dtype == gradient.dtype:
        return None
    return _make_operand_finding(
        "RN022",
        evidence,
        gradient,
        value=_brackets(gradient.label),
        parameter=parameter.label,
        needs=parameter.dtype_name,
        at=evidence.user_frame.location,
    )


def find_loss_weight(evidence: Evidence) -> Finding | None:
    """Finds a weight of a loss function, such as class weights, whose dtype is not that of the
    prediction.
    """
    operation = evidence.operation
    operands = evidence.operands
    if evidence.in_backward or operation not in _CLASS_LOSSES | _FLOAT_LOSSES:
        return None
    if not operands:
        return None
    # autocast casts bf16 and fp16 to fp32 for a loss, and leaves fp64 as it is
    needed_dtype = torch.float32 if evidence.autocast.is_on else operands[0].dtype
    weights = [operand for operand in operands[1:] if operand.label in ("weight", "pos_weight")]
    different = [operand for operand in weights if operand.dtype != needed_dtype]
    if evidence.autocast.is_on:
        different = [operand for operand in different if operand.dtype == torch.float64]
    if not different:
        return None
    weight = different[0]
    owner = evidence.names.tensor_owner(weight.tensor)
    producer = None
    if owner is not None:
        name = weight.path.rpartition(".")[2]
        producer = find_constructor_argument(
            owner, name, evidence.frames, weight.dtype, evidence.names
        )
    if producer is None:
        producer = evidence.producer_of(weight)
    return _make_finding(
        "RN023",
        evidence,
        loss=operation.removesuffix("_nd").removesuffix("_loss"),
        weight=weight.label,
        has=weight.dtype_name,
        needs=format_dtype(needed_dtype),
        source=producer.text,
        source_at=producer.location,
        passed=_brackets(producer.passed) if producer.passed else "",
        at=producer.passed_at,
        target=str(needed_dtype),
    )


def find_wrong_target(evidence: Evidence) -> Finding | None:
    operation = evidence.operation
    is_class_loss = operation in _CLASS_LOSSES
    if evidence.in_backward or len(evidence.operands) < 2:
        return None
    if not is_class_loss and operation not in _FLOAT_LOSSES:
        return None
    prediction, target = evidence.operands[:2]
    needed_dtype = torch.int64 if is_class_loss else prediction.dtype
    if target.dtype == needed_dtype:
        return None
    producer = evidence.producer_of(target)
    method = ".long()" if is_class_loss else f".to({needed_dtype})"
    label = _passed(evidence, target, producer)
    is_cast = producer.kind == "cast" and producer.is_proven
    is_known = is_cast or (producer.is_proven and producer.text != label)
    item = find_batch_item(evidence.frames, target.tensor)
    batch = "" if item is None else item.key
    return _make_finding(
        "RN010",
        evidence,
        loss=operation.removesuffix("_nd").removesuffix("_loss") if is_class_loss else operation,
        target=label,
        is_cast=is_cast,
        source=producer.text if is_known else "",
        source_at=producer.location,
        has=target.dtype_name,
        needs=format_dtype(needed_dtype),
        method=method,
        at=_passed_at(evidence, producer),
        batch="" if _is_in_user_line(evidence, target, producer) else batch,
        trainer_at=_trainer_location(evidence),
    )


def _trainer_location(evidence: Evidence) -> str:
    """Returns the user's line that runs the Trainer."""
    locations = [frame.location for frame in evidence.frames if frame.is_user_code]
    return locations[0] if locations else ""


def find_wrong_target_in_backward(evidence: Evidence) -> Finding | None:
    """Finds a loss function that accepts a target of another dtype in forward but fails with it in
    backward.
    """
    match = re.search(r"Found dtype (\w+) but expected (\w+)", evidence.message)
    if match is None or not evidence.in_backward:
        return None
    target_dtype = to_torch(format_dtype(match[1]))
    dtype = to_torch(format_dtype(match[2]))
    nodes = [
        read_grad_fn(output.tensor) for output in evidence.operands if output.tensor is not None
    ]
    losses = [find_loss_node(node, target_dtype) for node in nodes]
    loss = next((loss for loss in losses if loss is not None), None)
    if loss is None:
        return None
    target = find_loss_target(evidence.frames, loss)
    batch, producer = _batch_target(evidence, target_dtype)
    creation = ""
    if producer is not None:
        creation = _creation_of(producer, str(dtype).removeprefix("torch."))
    if target is not None and target.variable is not None and producer is None:
        producer = find_producer(
            target.variable, evidence.frames, target.frame_index, target_dtype, evidence.names
        )
    if producer is not None and target is not None and ":" not in target.location:
        creation = _creation_of(producer, str(dtype).removeprefix("torch."))
    label = "target"
    if target is not None and target.text:
        label, batch = _brackets(target.text), ""
    source = ""
    if producer is not None and producer.is_proven and producer.text != label:
        source = producer.text
    return _make_finding(
        "RN010",
        evidence,
        loss=loss.name,
        target=batch or label,
        is_cast=False,
        source=source,
        source_at=producer.location if producer else "",
        has=format_dtype(target_dtype),
        needs=format_dtype(dtype),
        method=f".to({dtype})",
        at=f"the call of {loss.name}" if target is None else target.location,
        batch=batch,
        trainer_at=_trainer_location(evidence),
        creation=creation,
        creation_at=producer.location if producer else "",
    )


def _batch_target(evidence: Evidence, dtype: torch.dtype) -> tuple[str, Producer | None]:
    """Returns the key of the only tensor of a dtype in the batch of a Trainer, and the expression
    of the user's code that made the tensor.
    """
    item = find_batch_item(evidence.frames, dtype)
    if item is None:
        return "", None
    node = ast.parse(f"{item.variable}[{item.key!r}]", mode="eval").body
    producer = find_producer(node, evidence.frames, item.frame_index, dtype, evidence.names)
    return item.key, producer


def find_failed_check(evidence: Evidence) -> Finding | None:
    """Finds a check of the program about the dtypes of tensors: `assert x.dtype == y.dtype`, `if
    x.dtype != y.dtype: raise`, or a raised message such as "x must be of type float32".
    """
    frame = evidence.failing_frame
    compare = find_compared_dtypes(frame)
    if compare is None:
        return _find_stated_check(evidence)
    sides = [compare.left, *compare.comparators]
    dtypes = [read_value(side, frame) for side in sides]
    if not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        return _find_stated_check(evidence)
    owners = [read_dtype_owner(side, frame) for side in sides]
    if isinstance(frame.statement, ast.Raise) and None not in owners:
        return None  # two tensors that differ: the rule for operands of an operator decides
    index = _find_odd_side(dtypes, owners, evidence)
    if index is None:
        return None
    owner = read_dtype_owner(sides[index], frame)
    assert owner is not None
    needed = next(dtype for dtype in dtypes if dtype != dtypes[index])
    others = [side.value for side in sides if read_dtype_owner(side, frame) not in (None, owner)]  # type: ignore[attr-defined]
    other_texts = [ast.unparse(other) for other in others]
    return _make_check_finding(evidence, owner, dtypes[index], needed, other_texts)


# messages of a check that name a value and the dtype that it needs
_STATED_DTYPE = re.compile(
    r"`?(?P<name>[A-Za-z_][\w.]*)`? (?:tensor )?(?:must|should|has to|needs to) be (?:a |an )?"
    r"(?:of )?(?:type |dtype )?(?:torch\.)?(?P<dtype>float32|float16|bfloat16|float64|[bf]p?16|fp32)\b"
)


def _find_stated_check(evidence: Evidence) -> Finding | None:
    """Finds a raised message that names a tensor of the failing function and the dtype it needs."""
    match = _STATED_DTYPE.search(evidence.message)
    if match is None or not isinstance(evidence.failing_frame.statement, ast.Raise):
        return None
    needed = to_torch(format_dtype(match["dtype"]))
    for operand in _floating(evidence):
        if operand.label == match["name"] and operand.dtype != needed:
            assert isinstance(operand.node, ast.expr)
            return _make_check_finding(evidence, operand.node, operand.dtype, needed, [])
    return None


def _make_check_finding(
    evidence: Evidence,
    owner: ast.expr,
    dtype: torch.dtype,
    needed: torch.dtype,
    others: Sequence[str],
) -> Finding:
    """Returns the finding about a tensor in a check of the program.

    owner   the expression of the tensor in the failing frame
    others  the tensors with which the check compares it
    """
    operands = {operand.label: operand for operand in evidence.operands}
    operand = operands.get(ast.unparse(owner))
    if operand is None or operand.dtype != dtype:
        index = len(evidence.frames) - 1
        producer = find_producer(owner, evidence.frames, index, dtype, evidence.names)
    else:
        producer = evidence.producer_of(operand)
    compared = [operands[other] for other in others if other in operands]
    passed, passed_at = _find_passed_argument(owner, evidence)
    is_autocast = producer.kind in ("module", "autocast") and evidence.autocast.is_on
    return _make_finding(
        "RN020",
        evidence,
        value=ast.unparse(owner),
        others=" and ".join(others),
        others_origin=_describe_others(evidence, compared),
        has=format_dtype(dtype),
        needs=format_dtype(needed),
        source=producer.text,
        source_at=producer.location,
        autocast=is_autocast and dtype == evidence.autocast.dtype,
        target=str(needed),
        at=producer.location,
        is_cast=producer.kind == "cast" and producer.is_proven,
        passed=passed,
        passed_at=passed_at,
    )


def _find_odd_side(
    dtypes: Sequence[torch.dtype], owners: Sequence[ast.expr | None], evidence: Evidence
) -> int | None:
    """Returns the index of the side of a failed comparison whose tensor has the wrong dtype: another
    one than a dtype that the code names, than most sides, or than most weights of the model.
    """
    counts = Counter(dtypes)
    indices = [i for i, owner in enumerate(owners) if owner is not None]
    if len(counts) < 2 or not indices:
        return None
    named = {dtype for dtype, owner in zip(dtypes, owners) if owner is None}
    usual = evidence.autocast.dtype if evidence.autocast.is_on else evidence.majority_dtype
    for is_odd in (
        lambda i: bool(named) and dtypes[i] not in named,
        lambda i: counts[dtypes[i]] < max(counts.values()),
        lambda i: dtypes[i] != usual,
    ):
        odd = [i for i in indices if is_odd(i)]
        if odd:
            return odd[0]
    return indices[0]


def _find_passed_argument(node: ast.expr, evidence: Evidence) -> tuple[str, str]:
    """Returns the expression that a caller in the user's code passes for a parameter of the running
    function, and its place. Callers that only pass their own parameter on are skipped. Returns ""
    for other expressions, and for a parameter to which the function assigns another value.
    """
    index = len(evidence.frames) - 1
    passed = ("", "")
    while index > 0 and isinstance(node, ast.Name):
        frame, caller = evidence.frames[index], evidence.frames[index - 1]
        argument = find_passed_argument(frame, caller, node.id)
        if argument is None or not caller.is_user_code:
            break
        passed = (_brackets(ast.unparse(argument)), caller.location_of(argument))
        node, index = argument, index - 1
    return passed


def find_in_place_result(evidence: Evidence) -> Finding | None:
    """Finds an operator that writes floats or complex numbers into a tensor that cannot hold them."""
    if "can't be cast to the desired output type" not in evidence.message or not evidence.operands:
        return None
    destination, *values = evidence.operands
    is_wider = [value for value in values if value.dtype.is_complex or not _is_wide(destination)]
    odd = next((value for value in is_wider if _is_wide(value)), None)
    origin = ""
    if odd is not None:
        producer = evidence.producer_of(odd)
        origin = producer.describe(odd.dtype_name)
        origin = "" if producer.text == odd.label and not producer.reason else origin
    frame = evidence.failing_frame
    return _make_finding(
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
                for bound in [part.value for part in _keywords(call)]:
                    value = read_value(bound, frame)
                    is_float = is_tensor(value) and value.dtype.is_floating_point
                    if is_float and is_tensor(destination) and value.dtype != destination.dtype:
                        text = _brackets(ast.unparse(bound))
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
    return _make_operand_finding("RN018", evidence, halves[0])


def find_attention_operand(evidence: Evidence) -> Finding | None:
    operands = _floating(evidence)
    if "attention" not in evidence.operation or not _differ(operands):
        return None
    odd = _odd_operand(evidence, operands)
    if evidence.majority_dtype is None:  # a table promotes query and key; nothing narrows one
        odd = max(operands, key=lambda operand: operand.dtype.itemsize)
    others = [operand for operand in operands if operand.dtype != odd.dtype]
    odd_labels = list(dict.fromkeys(o.label for o in operands if o.dtype == odd.dtype))
    producer = evidence.producer_of(odd)
    return _make_finding(
        "RN011",
        evidence,
        odd=" and ".join(odd_labels),
        odd_dtype=odd.dtype_name,
        others=" and ".join(operand.label for operand in others),
        others_dtype=others[0].dtype_name,
        others_origin=_describe_others(evidence, others),
        source=producer.text,
        source_at=producer.location,
        reason=producer.reason,
        at=evidence.user_frame.location,
        target=str(others[0].dtype),
        casts=" and ".join(f"`{_brackets(label)}.to({others[0].dtype})`" for label in odd_labels),
        is_in_user_line=evidence.frames[odd.frame_index] is evidence.user_frame,
        is_cast=producer.kind == "cast" and producer.is_proven,
        stored=_brackets(producer.stored) if producer.stored else "",
        stored_at=producer.stored_at,
        set_by=_describe_setting(evidence, producer, odd.dtype, others[0].dtype),
    )


def find_attention_mask(evidence: Evidence) -> Finding | None:
    """Finds a mask whose dtype `scaled_dot_product_attention` rejects."""
    match = re.search(r"attn_mask\.dtype: (\w+(?: \w+)?) and", evidence.message)
    if match is None or not evidence.operands:
        return None
    query, *others = evidence.operands
    masks = [operand for operand in others if operand.dtype != query.dtype]
    masks = [operand for operand in masks if operand.dtype != torch.bool]
    if not masks:
        return None
    mask = masks[-1]
    return _make_operand_finding(
        "RN024",
        evidence,
        mask,
        is_integer=not mask.dtype.is_floating_point,
        query_dtype=query.dtype_name,
        target=str(query.dtype),
    )


def find_packed_weight(evidence: Evidence) -> Finding | None:
    """Finds a product with the integer codes of a quantised weight."""
    if not _floating(evidence) or not _NEEDS_ONE_DTYPE.search(evidence.message):
        return None
    for operand in evidence.operands:
        if operand.dtype not in (torch.int8, torch.uint8):
            continue
        frame = evidence.frames[operand.frame_index]
        weight = _find_viewed_parameter(operand.node, frame)
        if weight is None:
            continue
        path = evidence.names.tensor_path(weight) or operand.path
        return _make_finding(
            "RN025",
            evidence,
            operation=evidence.operation,
            weight=path or operand.label,
            has=operand.dtype_name,
            kind=type(weight).__name__,
            layer=path.rpartition(".")[0],
            at=evidence.failing_frame.location,
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


def _describe_uncast_operands(
    evidence: Evidence, operands: Sequence[Operand], half_dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the facts of an error that autocast would have prevented: two operands of different
    dtypes, their device, and the dtype to which autocast would have cast both.
    """
    return {
        "device": evidence.device,
        "target": str(half_dtype),
        "first": _describe(operands[0]),
        "second": _describe(_first_of_other_dtype(operands)),
    }


def find_autocast_of_other_device(evidence: Evidence) -> Finding | None:
    """Finds operands that autocast would cast if it were switched on for their device."""
    operands = _floating(evidence)
    half = _half_dtype(operands)
    state = evidence.autocast
    if not state.unused_at or state.is_on or not _differ(operands) or half is None:
        return None
    return _make_finding(
        "RN026",
        evidence,
        region_device=state.unused_device,
        region_at=state.unused_at,
        **_describe_uncast_operands(evidence, operands, half),
    )


def find_lost_autocast(evidence: Evidence) -> Finding | None:
    operands = _floating(evidence)
    half_dtype = _half_dtype(operands)
    if not evidence.autocast.lost_at or not _differ(operands) or half_dtype is None:
        return None
    start = max(i for i, frame in enumerate(evidence.frames) if starts_thread(frame))
    frames = [*evidence.frames[start:], *evidence.frames]
    function = next(frame.function for frame in frames if frame.is_user_code)
    return _make_finding(
        "RN004",
        evidence,
        region_at=evidence.autocast.lost_at,
        function=function,
        **_describe_uncast_operands(evidence, operands, half_dtype),
    )


def find_custom_backward(evidence: Evidence) -> Finding | None:
    operands = _floating(evidence)
    frame = evidence.user_frame
    context = frame.variables.get("ctx", frame.variables.get("self"))
    # the context of a forward has the same type
    is_custom_backward = isinstance(context, torch.autograd.function.BackwardCFunction)
    if not evidence.in_backward or not is_custom_backward or not _differ(operands):
        return None
    first = operands[0]
    second = _first_of_other_dtype(operands)
    is_decorated = any(frame.function == "decorate_bwd" for frame in evidence.frames)
    modes = [_setting_dtype(str(setting)) for setting in evidence.settings]
    has_autocast = evidence.other_region is not None or any(mode is not None for mode in modes)
    return _make_finding(
        "RN005",
        evidence,
        owner=type(context).__name__.removesuffix("Backward"),
        first=_describe(first),
        second=_describe(second),
        device=evidence.device,
        decorated=is_decorated,
        has_autocast=has_autocast,
        cast=_brackets(first.label),
        target=str(second.dtype),
        at=frame.location,
    )


def _brackets(text: str) -> str:
    """Puts an expression in brackets if this is needed to call a method on it."""
    tree = ast.parse(text, mode="eval").body
    is_primary = isinstance(tree, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
    return text if is_primary else f"({text})"


def find_write(evidence: Evidence) -> Finding | None:
    operands = evidence.operands
    operation = evidence.operation
    has_out = "out tensor to have dtype" in evidence.message
    is_in_place = operation.endswith("_") and not operation.startswith("__")
    is_writing = operation in _WRITING_OPERATIONS or is_in_place
    if not operands or not (is_writing or has_out):
        return None
    destination = operands[-1] if has_out else operands[0]
    values = [
        operand
        for operand in _floating(evidence)
        if operand is not destination and operand.dtype != destination.dtype
    ]
    if not values:
        return None
    maker = evidence.producer_of(values[0])
    source = evidence.producer_of(destination)
    origin = _find_module_origin(evidence, maker, values[0].dtype)
    is_explicit = maker.is_proven and maker.kind in ("cast", "creation", "parameter")
    is_autocast = evidence.autocast.is_on and evidence.autocast.dtype in (None, values[0].dtype)
    is_autocast = is_autocast and not is_explicit
    labels = dict.fromkeys(_cast_text(operand, destination) for operand in values)
    later_casts = _find_later_writes(evidence.failing_frame)
    setting = _describe_write_setting(evidence, maker, values[0].dtype, destination.dtype)
    if has_out:
        setting = _describe_write_setting(evidence, source, destination.dtype, values[0].dtype)
    creation = _find_odd_storage(evidence, destination, values[0].dtype)
    loading = find_operand_origin(evidence, destination)
    if loading is not None and loading.kind != "assignment":
        loading = None
    return _make_finding(
        "RN008",
        evidence,
        loading="" if loading is None else loading.text,
        loading_at="" if loading is None else loading.location,
        creation="" if creation is None else creation.text,
        creation_at="" if creation is None else creation.location,
        is_code=creation is not None and creation.text.endswith(f"dtype={values[0].dtype})"),
        majority=values[0].dtype,
        autocast=bool(is_autocast),
        source=source.text if source.text != destination.label else "",
        source_at=source.location,
        operation=operation,
        destination=_brackets(destination.label),
        destination_dtype=destination.dtype_name,
        value=_brackets(values[0].label),
        value_dtype=values[0].dtype_name,
        casts=" and ".join(labels),
        later_casts=" and ".join(later_casts),
        origin=""
        if origin is None
        else origin.describe(f"the weights of {maker.path}", values[0].dtype_name),
        maker=maker.text,
        at=evidence.failing_frame.location,
        **_describe_written_cast(evidence, maker, destination),
        **_describe_loaded_state(evidence, destination),
        **setting,
        out=has_out,
        out_at=source.location if source.text != destination.label else "",
    )


def _describe_write_setting(
    evidence: Evidence, producer: Producer, dtype: torch.dtype, wanted_dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the line that set the dtype of an operand, and its fix if the model's weights have
    the other dtype.
    """
    setting = _find_setting(evidence, producer, dtype, wanted_dtype)
    if setting is None:
        return {}
    is_odd = wanted_dtype == evidence.majority_dtype
    return {"set_by": setting.describe(), "set_fix": setting.fix if is_odd else ""}


def _find_odd_storage(
    evidence: Evidence, destination: Operand, dtype: torch.dtype
) -> StorageCreation | None:
    """Returns the code that creates the destination of a write, if it is an attribute, such as a
    cache, and if all weights of the model have the dtype of the value.
    """
    frame = evidence.frames[destination.frame_index]
    if evidence.operation not in _OVERWRITING_OPERATIONS:
        return None  # a sum may be kept wider than the weights
    match destination.node:
        case ast.Attribute(ast.Name("self"), name):
            is_odd = set(evidence.dtype_counts) == {dtype} and destination.dtype.is_floating_point
            if is_odd and not isinstance(destination.tensor, nn.Parameter):
                owner = frame.variables.get("self")
                return find_storage_creation(evidence.frames, owner, name, dtype)
    return None


def _describe_written_cast(
    evidence: Evidence, maker: Producer, destination: Operand
) -> dict[str, Any]:
    """Returns the facts about a cast that gave a written value its dtype, if the destination has
    the dtype of most weights.
    """
    is_odd = maker.is_proven and destination.dtype == evidence.majority_dtype
    if maker.kind != "cast" or not is_odd:
        return {}
    return {
        "cast": maker.text,
        "cast_at": maker.location,
        "setting": _read_setting_of_cast(maker.text),
        "needed": str(destination.dtype),
    }


def _describe_loaded_state(evidence: Evidence, destination: Operand) -> dict[str, Any]:
    """Returns the line that cast the loaded states of an optimizer, and the call that loaded them, if
    a value is written into a state whose dtype is not that of its parameter.
    """
    facts = evidence.optimizer
    load = None if facts is None else find_state_load(facts.optimizer)
    state = destination.tensor
    if facts is None or load is None or state is None:
        return {}
    for parameter, states in facts.optimizer.state.items():
        for key, value in states.items():
            if value is not state or state.dtype == parameter.dtype:
                continue
            cast = find_state_cast(evidence.frames, state.dtype)
            return {
                "state": key,
                "load": ast.unparse(load[0]),
                "load_at": load[1],
                "state_cast": "" if cast is None else cast.text,
                "state_cast_at": "" if cast is None else cast.location,
                "parameter_dtype": format_dtype(parameter.dtype),
            }
    return {}


def _read_setting_of_cast(text: str) -> str:
    """Returns the attribute of `self` to which a cast such as `x.to(self.precision)` casts, or ""."""
    match ast.parse(text, mode="eval").body:
        case ast.Call(_, [ast.Attribute(ast.Name("self"), _) as setting]):
            return ast.unparse(setting)
    return ""


def _find_later_writes(frame: CallFrame) -> list[str]:
    """Returns casts for the later assignments `TENSOR[...] = VALUE` of the running function whose
    value has another dtype than the tensor.
    """
    if frame.scope is None or not frame.is_user_code:
        return []
    casts = []
    for node in ast.walk(frame.scope):
        match node:
            case ast.Assign([ast.Subscript(target)], source) if node.lineno > frame.line:
                destination, value = read_value(target, frame), read_value(source, frame)
                if not is_tensor(destination) or not is_tensor(value):
                    continue
                if value.dtype.is_floating_point and value.dtype != destination.dtype:
                    cast = f"{_brackets(ast.unparse(source))}.to({ast.unparse(target)}.dtype)"
                    casts.append(f"`{cast}` at line {node.lineno}")
    return casts


def _cast_text(operand: Operand, destination: Operand) -> str:
    """Returns code that casts an operand to the dtype of the destination. If the operand is an item
    of a list, the code casts all tensors of the list.
    """
    if operand.list_name:
        return f"`[tensor.to({destination.dtype}) for tensor in {operand.list_name}]`"
    return f"`{_brackets(operand.label)}.to({_brackets(destination.label)}.dtype)`"


def find_call_outside_autocast(evidence: Evidence) -> Finding | None:
    operands = _floating(evidence)
    if not _differ(operands) or _half_dtype(operands) is None or evidence.autocast.is_on:
        return None
    if evidence.autocast.location and evidence.autocast.is_on is False:
        return None  # the program switches it off for this code
    region = evidence.other_region
    if region is not None and not region.runs_model and _has_cast_input(evidence, operands):
        return None  # another model runs under autocast
    if region is not None:
        text = f"{region.location} opens autocast"
        dtype = region.dtype or _half_dtype(operands)
        device = region.device or evidence.device
    else:
        modes = [
            setting for setting in evidence.settings if _setting_dtype(str(setting)) is not None
        ]
        if not modes or not runs_under_autocast(evidence.frames, evidence.model):
            return None
        text = f"{modes[0]} runs the training forward under autocast"
        dtype = _setting_dtype(str(modes[0]))
        device = evidence.device
    frame = _outermost_call(evidence)
    unwrapping = None
    if is_prepared_model(evidence.frames, evidence.model):
        unwrapping = find_unwrapping(evidence.frames)
    evidence.producer_of(operands[0])  # shown with the operands
    return _make_finding(
        "RN003",
        evidence,
        frame,
        call=frame.text,
        call_at=frame.location,
        region=text,
        unwrapping="" if unwrapping is None else unwrapping.text,
        unwrapping_at="" if unwrapping is None else unwrapping.location,
        device=device,
        target=str(dtype),
        first=_describe(operands[0]),
        second=_describe(_first_of_other_dtype(operands)),
    )


def _has_cast_input(evidence: Evidence, operands: Sequence[Operand]) -> bool:
    """True if the program casts the input of a layer, and all weights of its model have one other
    dtype, as an fp32 VAE beside a model that runs under autocast.
    """
    inputs = [operand for operand in operands if not operand.path]
    weights = {operand.dtype for operand in operands if operand.path}
    if len(weights) != 1 or not inputs or set(evidence.dtype_counts) != weights:
        return False
    producers = [evidence.producer_of(operand) for operand in inputs]
    return any(producer.kind == "cast" and producer.is_proven for producer in producers)


def _setting_dtype(setting: str) -> torch.dtype | None:
    """Returns the autocast dtype that a setting asks for, for example bf16 for
    `SFTConfig.bf16=True` or for `Accelerator.mixed_precision=bf16`.
    """
    match = re.search(r"\.(bf16|fp16)=True|mixed_precision=(bf16|fp16)", setting)
    if match is None:
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[match[1] or match[2]]


def _outermost_call(evidence: Evidence) -> CallFrame:
    """Returns the user's frame that calls the model. The frame is the last one before the first
    frame that belongs to a module.
    """
    caller = evidence.user_frame
    for frame in evidence.frames:
        if isinstance(frame.variables.get("self"), nn.Module):
            break
        if frame.is_user_code:
            caller = frame
    return caller


def find_left_default_dtype(evidence: Evidence) -> Finding | None:
    """Finds weights in a default dtype that a function of the program set and did not restore."""
    operands = _floating(evidence)
    default = torch.get_default_dtype()
    if default == torch.float32 or not _differ(operands):
        return None
    weights = [operand for operand in operands if operand.path and operand.dtype == default]
    setter = find_unrestored_default_dtype(evidence.frames)
    if not weights or setter is None:
        return None
    origin = find_operand_origin(evidence, weights[0])
    if origin is not None and origin.kind == "cast":
        return None  # the program asks for this dtype
    other = _first_of_other_dtype([weights[0], *operands])
    evidence.producer_of(other)  # shown with the operands
    return _make_finding(
        "RN027",
        evidence,
        weight=weights[0].path,
        has=weights[0].dtype_name,
        other=_describe(other),
        setter=setter.text,
        setter_at=setter.location,
        function=setter.function,
    )


def find_odd_weight(evidence: Evidence) -> Finding | None:
    operands = _floating(evidence)
    majority = evidence.majority_dtype
    if not _differ(operands) or majority is None or evidence.autocast.is_on:
        return None
    weights = [operand for operand in operands if operand.path and operand.dtype != majority]
    others = [operand for operand in operands if not operand.path]
    if not weights or any(operand.dtype != majority for operand in others) or not others:
        return None
    weight = weights[0]
    is_trained = isinstance(weight.tensor, nn.Parameter) and weight.tensor.requires_grad
    owner = evidence.names.tensor_owner(weight.tensor)
    origin = None
    if owner is not None:
        origin = find_weight_origin(evidence.frames, evidence.names, owner, weight.dtype)
    others_origin = None
    if evidence.model is not None:
        others_origin = find_model_origin(evidence.frames, evidence.model, majority)
    return _make_finding(
        "RN002",
        evidence,
        narrow_input=_cast_input_of_model_cast(evidence, origin, weight, others[0]),
        line_at=evidence.user_frame.location,
        origin="" if origin is None else origin.describe("it", weight.dtype_name),
        cast=origin.removable_text if origin is not None and origin.kind == "cast" else "",
        origin_at="" if origin is None else origin.location,
        rebuilt="" if origin is None else origin.with_dtype(majority),
        others_origin=""
        if others_origin is None
        else others_origin.describe("the others", format_dtype(majority)),
        weight=weight.path,
        has=weight.dtype_name,
        share=_format_share(evidence.floating_share(majority)),
        usual=format_dtype(majority),
        trained=is_trained and majority in _HALF_DTYPES and weight.dtype == torch.float32,
        device=evidence.device,
        target=str(majority),
        owner=weight.path.rpartition(".")[0],
        **_find_root_variable(evidence, weight),
    )


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
    if not _is_in_user_line(evidence, operand, producer):
        return ""
    return f"{_passed(evidence, operand, producer)}.to({weight.dtype})"


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


def find_layer_input(evidence: Evidence) -> Finding | None:
    operands = _computed(evidence)
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
    passed = _passed(evidence, operand, producer)
    passed_at = _passed_at(evidence, producer)
    is_item = bool(operand.list_name) and not _is_tensor_there(passed, evidence.user_frame)
    items = [o for o in different if o.list_name == operand.list_name]
    is_known = producer.kind != "unknown"
    promotion = _find_promotion(operand, producer)
    return _make_finding(
        "RN001",
        evidence,
        hook=producer.hook,
        reason=producer.reason,
        item=_item_cast(producer, str(weight.dtype)),
        promoted="" if promotion is None else _brackets(promotion.operand),
        promoted_at="" if promotion is None else promotion.location,
        layer=weight.path.rpartition(".")[0] or evidence.module_path,
        has=operand.dtype_name,
        needs=weight.dtype_name,
        passed=passed,
        is_in_user_line=not is_item and _is_in_user_line(evidence, operand, producer),
        passed_at=passed_at,
        others=_cast_other_arguments(evidence, operand, weight, passed),
        kind=_proven_kind(producer),
        producer=producer.text if is_known else passed,
        producer_at=producer.location if is_known else passed_at,
        creation=_creation_of(producer, str(weight.dtype).removeprefix("torch."))
        if is_item
        else "",
        path=producer.path,
        items=is_item and len(items) > 1,
        is_castable=_is_cast_by_autocast(operand.dtype) and _is_cast_by_autocast(weight.dtype),
        # autocast does not cast the operands of some functions, such as norms on a CPU
        autocast=evidence.autocast.is_on is not False,
        off_at="" if evidence.autocast.is_on else evidence.autocast.location,
        function=evidence.operation,
        target=str(weight.dtype),
        **_explain_weights(evidence, operand, weight, producer),
        set_by=_describe_setting(evidence, producer, operand.dtype, weight.dtype),
    )


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
    texts = [ast.unparse(argument.value) for argument in _keywords(call)]
    if passed not in texts:
        return ""
    casts = []
    for argument, text in zip(_keywords(call), texts):
        value = read_value(argument.value, frame)
        is_input = text != passed and not _NO_INPUT.search(argument.arg or text)
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or not is_input:
            continue
        if value.dtype == operand.dtype:
            casts.append(f" and `{_brackets(text)}.to({weight.dtype})`")
    return "".join(casts)


def _keywords(call: ast.Call) -> list[ast.keyword]:
    """Returns the arguments of a call, those by position as keywords without a name."""
    return [*(ast.keyword(None, argument) for argument in call.args), *call.keywords]


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
    origin = _find_module_origin(evidence, producer, operand.dtype)
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
    facts |= _describe_origin(
        origin, f"the weights of {producer.path}", operand.dtype, weight.dtype
    )
    if evidence.model is not None and model_origin is None and loading is None and is_other_model:
        construction = find_construction(evidence.model)
        if construction is not None:
            name = type(evidence.model).__name__
            text = construction.describe(f"the weights of {name}", weight.dtype_name)
            facts["uncast"] = text
            facts["holder"] = _find_holder(evidence, evidence.model)
            facts["input_dtype"] = str(operand.dtype)
    if model_origin is not None:
        weights = "the weights of the model"
        facts["model_origin"] = model_origin.describe(weights, weight.dtype_name)
        facts["model_origin_at"] = model_origin.location
        if model_origin.kind == "checkpoint":
            facts["reloaded"] = model_origin.with_dtype(operand.dtype)
    return facts


def _is_part(module: nn.Module, model: nn.Module | None) -> bool:
    return model is not None and any(part is module for part in model.modules())


def _find_holder(evidence: Evidence, model: nn.Module) -> str:
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


def _find_module_origin(
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


def _find_setting(
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


def _describe_setting(
    evidence: Evidence, producer: Producer, dtype: torch.dtype, wanted_dtype: torch.dtype
) -> str:
    """Returns the line of `_find_setting` as a part of a sentence, or ""."""
    setting = _find_setting(evidence, producer, dtype, wanted_dtype)
    return "" if setting is None else setting.describe()


def _find_promotion(operand: Operand, producer: Producer) -> Promotion | None:
    """Returns the operation that widened an operand, if autograd's graph confirms it."""
    if not producer.is_proven or not producer.promotions:
        return None
    operation = find_widening_operation(operand.tensor)
    matches = [promotion for promotion in producer.promotions if promotion.operation == operation]
    return matches[0] if matches else None


def _odd_operand(evidence: Evidence, operands: Sequence[Operand]) -> Operand:
    """Returns the operand whose dtype differs from the dtype of autocast, or else of the model. If no model is known,
    returns the operand whose dtype differs from the dtype of most operands. If two dtypes are
    equally frequent, returns the operand with the wider dtype. An operand in fp64 is never usual.
    """
    counts = Counter(operand.dtype for operand in operands)
    usual = evidence.majority_dtype
    if evidence.autocast.is_on and evidence.autocast.dtype in counts:
        usual = evidence.autocast.dtype
    if usual not in counts:
        floats = [dtype for dtype in counts if dtype.is_floating_point]
        floats = [dtype for dtype in floats if dtype != torch.float64] or floats
        usual = max(floats or counts, key=lambda dtype: (counts[dtype], -dtype.itemsize))
    return next(operand for operand in operands if operand.dtype != usual)


def _has_no_half_kernel(evidence: Evidence) -> bool:
    """True if the failing call is one of a function that PyTorch has for fp32 and fp64 only."""
    call = evidence.failing_frame.expression
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(_FLOAT_ONLY)


def find_mixed_operands(evidence: Evidence) -> Finding | None:
    operands = _computed(evidence)
    if not _differ(operands):
        return None
    odd = _odd_operand(evidence, operands)
    others = [operand for operand in operands if operand.dtype != odd.dtype]
    halves = [operand for operand in operands if operand.dtype in _HALF_DTYPES]
    if _has_no_half_kernel(evidence) and others[0] in halves:
        odd, others = others[0], [operand for operand in operands if operand not in halves]
    producer = evidence.producer_of(odd)
    names = [operand.path or operand.label for operand in others]
    if len(names) > _MAX_GROUPS:
        names = [*names[:2], f"{len(names) - 2} others"]
    return _make_finding(
        "RN017",
        evidence,
        operation=evidence.operation,
        odd=odd.path or odd.label,
        odd_dtype=odd.dtype_name,
        others=" and ".join(names),
        others_dtype=others[0].dtype_name,
        others_origin=_describe_others(evidence, others),
        source=producer.text,
        source_at=producer.location,
        reason=producer.reason,
        passed=_passed(evidence, odd, producer),
        is_in_user_line=_is_in_user_line(evidence, odd, producer),
        check_at=_check_location(evidence, odd),
        at=_passed_at(evidence, producer),
        target=str(others[0].dtype),
        autocast=bool(evidence.autocast.is_on),
        set_by=_describe_setting(evidence, producer, odd.dtype, others[0].dtype),
    )


def _check_location(evidence: Evidence, operand: Operand) -> str:
    """Returns the place of the check of the user's code that failed for a variable, or "". A cast
    before this line changes the variable.
    """
    frame = evidence.failing_frame
    is_check = isinstance(frame.statement, (ast.Raise, ast.Assert)) and frame.is_user_code
    is_variable = operand.label.isidentifier() and evidence.frames[operand.frame_index] is frame
    return find_check_location(frame) if is_check and is_variable else ""


# in the order of evaluation: the more specific rules come first
RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    find_compiled_operands,
    find_changed_checkpoint,
    find_failed_recomputation,
    find_scaler_over_halves,
    find_mixed_weights,
    find_stale_optimizer_states,
    find_cast_of_loaded_states,
    find_integer_parameter,
    find_numpy_dtype,
    find_numpy_conversion,
    find_missing_kernel,
    find_float_indices,
    find_assigned_gradient,
    find_wrong_target,
    find_loss_weight,
    find_wrong_target_in_backward,
    find_failed_check,
    find_in_place_result,
    find_constant_overflow,
    find_attention_mask,
    find_attention_operand,
    find_packed_weight,
    find_autocast_of_other_device,
    find_lost_autocast,
    find_write,
    find_custom_backward,
    find_call_outside_autocast,
    find_left_default_dtype,
    find_odd_weight,
    find_layer_input,
    find_mixed_operands,
)
