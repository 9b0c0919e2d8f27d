"""Makes findings with the facts that are printed under each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from ....dtypes import format_dtype
from ....finding import Finding, Place
from ....observe.origin import short_path
from ....pages.finding_sheet import load_finding_formatter
from ..causes import SHEET
from ..evidence import Evidence, Operand, describe_autocast
from ..failed_node import ENGINE_CALL
from ..frames import CallFrame
from ..hooks import find_handler
from ..model_casts import find_default_dtype_setter
from ..operand_origins import find_operand_origin
from ..weight_record import RECORD
from .operands import list_floating, passed_expression, passed_location

_format_finding = load_finding_formatter(SHEET)
_LABEL_WIDTH = 28
# functions of torch whose variables say nothing about the cause
_PLUMBING = (ENGINE_CALL, "_unscale_grads_")
MAX_GROUPS = 4  # classes of modules that one row of the report counts, or operands in a title
MAX_ROWS = 6  # operands that are listed


def make_finding(
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


def make_operand_finding(code: str, evidence: Evidence, operand: Operand, **values: Any) -> Finding:
    """Returns a finding about one operand of the expression that failed. Its text contains the
    user's expression for the operand, the operand's dtype, and the line of the user's code that
    passes it on. `values` can replace these parts of the text, or add others.
    """
    producer = evidence.producer_of(operand)
    facts = {
        "value": passed_expression(evidence, operand, producer),
        "has": operand.dtype_name,
        "at": passed_location(evidence, producer),
    }
    return make_finding(code, evidence, **{**facts, **values})


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
    for operand in evidence.operands[:MAX_ROWS]:
        if evidence.frames[operand.frame_index].function in _PLUMBING:
            continue
        if operand.list_name and (operand.list_name, operand.dtype) in lists:
            continue  # one item of a list stands for all of a dtype
        lists.add((operand.list_name, operand.dtype))
        label, state = _name_optimizer_tensor(evidence, operand)
        text = operand.describe() + state
        producer = evidence.producers.get(id(operand))
        is_named = (
            producer is not None and operand.weight is None and producer.text != operand.label
        )
        if producer is not None and is_named and not producer.location.startswith("torch/"):
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
        share = format_share(evidence.floating_share(majority))
        kind = "parameters"
        if not all(dtype.is_floating_point for dtype in evidence.dtype_counts):
            kind = "floating-point parameters"
        details.append(("model", f"{share} of the {kind} are {format_dtype(majority)}"))
        details.extend(_describe_odd_weights(evidence, majority))
    if evidence.settings:
        settings = ", ".join(map(str, evidence.settings))
        details.append(("settings", settings))
    details.extend(("next", advice) for advice in _list_next_commands(evidence))
    return tuple(details)


def _list_next_commands(evidence: Evidence) -> list[str]:
    """Returns the commands that show more than the frames do."""
    commands = []
    unknown = _list_unknown_origins(evidence)
    if unknown:
        lines = f"the lines that gave {' and '.join(unknown)} their dtypes"
        if len(unknown) == 1:
            lines = f"the line that gave {unknown[0]} its dtype"
        commands.append(f"isotype doctor run --trace names {lines}")
    is_in_engine = evidence.frames[-1].function == ENGINE_CALL
    if is_in_engine and not evidence.has_forward_line and not torch.is_anomaly_enabled():
        commands.append(
            "isotype doctor run --forward-lines prints the line of the forward operator"
        )
    return commands


def _list_unknown_origins(evidence: Evidence) -> list[str]:
    """Returns the labels of the operands whose dtype has an origin that the frames do not show."""
    if RECORD.is_complete or evidence.runs_eagerly:
        return []  # `--trace` runs the program without the compiler
    labels = []
    for operand in list_floating(evidence)[:MAX_ROWS]:
        producer = evidence.producers.get(id(operand))
        if producer is not None and operand.weight is None and not producer.is_proven:
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
        parts = [f"{count} {kind}" for kind, count in counts.most_common(MAX_GROUPS)]
        rest = " and others" if len(counts) > MAX_GROUPS else ""
        yield f"{format_dtype(dtype)} weights", f"{', '.join(parts)}{rest}"


def format_share(share: float) -> str:
    """Returns a percentage, which is 100% only for all."""
    text = f"{100 * share:.0f}%"
    return "more than 99%" if share < 1 and text == "100%" else text


def _shorten(label: str) -> str:
    """Shortens an expression that is used as the heading of a row."""
    return label if len(label) <= _LABEL_WIDTH else f"{label[: _LABEL_WIDTH - 3]}..."
