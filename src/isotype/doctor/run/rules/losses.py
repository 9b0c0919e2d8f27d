"""Recognises targets and weights of a loss function in the wrong dtype."""

from __future__ import annotations

import ast
import dataclasses
import re

import torch

from ....dtypes import format_dtype, to_torch
from ....finding import Finding
from ..batches import find_batch_item
from ..evidence import Evidence
from ..graph import read_grad_fn
from ..losses import find_loss_node, find_loss_target
from ..producer import Producer
from ..producers import find_constructor_argument, find_producer
from .findings import make_finding
from .operands import (
    add_brackets,
    passed_expression,
    passed_location,
    rebuild_creation,
    stands_in_user_line,
)

# losses whose targets are classes
_CLASS_LOSSES = frozenset(("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd"))
_FLOAT_LOSSES = frozenset(
    ("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "huber_loss")
    + ("smooth_l1_loss", "l1_loss", "kl_div")
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
    return make_finding(
        "RN023",
        evidence,
        loss=operation.removesuffix("_nd").removesuffix("_loss"),
        weight=weight.label,
        has=weight.dtype_name,
        needs=format_dtype(needed_dtype),
        source=producer.text,
        source_at=producer.location,
        passed=add_brackets(producer.passed) if producer.passed else "",
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
    label = passed_expression(evidence, target, producer)
    is_cast = producer.kind == "cast" and producer.is_proven
    is_known = is_cast or (producer.is_proven and producer.text != label)
    item = find_batch_item(evidence.frames, target.tensor)
    batch = "" if item is None else item.key
    return make_finding(
        "RN010",
        evidence,
        loss=operation.removesuffix("_nd").removesuffix("_loss") if is_class_loss else operation,
        target=label,
        is_cast=is_cast,
        source=producer.text if is_known else "",
        source_at=producer.location,
        reason=producer.reason,
        # other lines, such as the next loss, may use these classes too
        array=is_class_loss and producer.text.startswith("torch.from_numpy("),
        has=target.dtype_name,
        needs=format_dtype(needed_dtype),
        method=method,
        at=passed_location(evidence, producer),
        batch="" if stands_in_user_line(evidence, target, producer) else batch,
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
    evidence = dataclasses.replace(evidence, has_forward_line=bool(loss.lines))
    target = find_loss_target(evidence.frames, loss)
    batch, producer = _batch_target(evidence, target_dtype)
    creation = ""
    if producer is not None:
        creation = rebuild_creation(producer, str(dtype).removeprefix("torch."))
    if target is not None and target.variable is not None and producer is None:
        producer = find_producer(
            target.variable, evidence.frames, target.frame_index, target_dtype, evidence.names
        )
    if producer is not None and target is not None and ":" not in target.location:
        creation = rebuild_creation(producer, str(dtype).removeprefix("torch."))
    label = "target"
    if target is not None and target.text:
        label, batch = add_brackets(target.text), ""
    source = ""
    if producer is not None and producer.is_proven and producer.text != label:
        source = producer.text
    return make_finding(
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
