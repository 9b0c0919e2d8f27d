"""Compares the tensors of a written model with those of the run. A tensor counts as different if
its values deviate by more than the rounding of its type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...dtypes import to_torch
from ...errors import UsageError
from ...training.memory.device import trim_freed_blocks
from ..run_weights import RunWeights
from .reference import ReferenceModel
from .written_model import WrittenModel, WrittenTensor

# the largest relative error of one rounding
_ROUNDING = {"F32": 2.0**-23, "F16": 2.0**-11, "BF16": 2.0**-8}
# the largest relative error of rounding to a dtype
_DTYPE_ROUNDING = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}
_SMALLEST_FP16 = 2.0**-24  # the smallest fp16 number above zero
# the largest error in a block of 32, as a share of the block's largest value
_BLOCK_ROUNDING = {
    "Q8_0": 1 / 127,
    "Q5_0": 1 / 12,
    "Q5_1": 1 / 12,
    "Q4_0": 1 / 6,
    "Q4_1": 1 / 6,
    "IQ4_NL": 1 / 6,
}
# the largest relative error of a tensor, root mean square, for types with blocks of 256, and for
# the formats of published quantised checkpoints
TENSOR_ROUNDING = {
    "Q2_K": 0.5, "Q3_K": 0.3, "Q4_K": 0.2, "Q5_K": 0.1, "Q6_K": 0.05,
    "fp8": 0.06, "int8": 0.05, "int4": 0.25, "nvfp4": 0.2, "mxfp4": 0.25, "nf4": 0.2, "fp4": 0.3,
}  # fmt: skip
# errors of fp32 sums, and of the 1 that Gemma's norms are stored with
_FP32_ERROR = 2e-6
_ADAPTER_ERROR = 1e-5
_MIN_SHARE = 0.5  # of the change that a file could contain
_PART_SIZE = 1 << 19  # values of a tensor that are compared at once
_ATTENTION = re.compile(r"(self_attn|attention|attn)\.")
_EXPERTS = re.compile(r"\.(experts|shared_expert|block_sparse_moe)\b")


@dataclass(frozen=True)
class Difference:
    """Describes a difference between a file and the run from which it was written.

    kind      tensor or setting
    name      the tensor or the setting in the file
    message   what differs
    file_value, run_value  the two values of a setting
    """

    kind: str
    name: str
    message: str
    file_value: Any = None
    run_value: Any = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass
class ChangeShare:
    """Measures which share of a change to the weights a file contains. For this, the difference
    between the file's weights and the base is projected onto the change.

    size                the squared norm of the change
    file_projection     the dot product of the change with the change in the file
    rounded_projection  the dot product of the change with the change that rounding leaves
    """

    size: float = 0.0
    file_projection: float = 0.0
    rounded_projection: float = 0.0

    def add(self, change: Tensor, change_in_file: Tensor, rounded_change: Tensor) -> None:
        """Adds a weight, or a part of it, to the sums."""
        direction = change.double().flatten()
        self.size += float(direction.square().sum())
        self.file_projection += float(change_in_file.double().flatten() @ direction)
        self.rounded_projection += float(rounded_change.double().flatten() @ direction)

    @property
    def kept(self) -> float | None:
        """Returns the share of the change that the file contains; None without a change."""
        return self.file_projection / self.size if self.size else None

    @property
    def expected(self) -> float | None:
        """Returns the share of the change that rounding leaves; None without a change."""
        return self.rounded_projection / self.size if self.size else None


def has_change(kept: float | None, expected: float | None) -> bool:
    """Returns False if a file contains only a small share of the change that it could contain.

    kept, expected  the shares of `ChangeShare`
    """
    return kept is None or expected is None or kept > _MIN_SHARE * expected


@dataclass
class TensorComparison:
    """Contains the result of comparing all tensors of a file with those of its run.

    read_names        weights that were read from the file
    rounded_names     for each group of weights, the weights whose values in the file differ from
                      the merged values
    change            the shares of the change by training that the file's weights contain, and that
                      the merged weights contain after their cast
    """

    differences: list[Difference] = field(default_factory=list)
    read_names: set[str] = field(default_factory=set)
    rounded_names: dict[str, list[str]] = field(default_factory=dict)
    is_merge_exact: bool = True
    changed_total: int = 0
    changed_different: int = 0
    unlike_base: int = 0
    frozen_total: int = 0
    frozen_different: int = 0
    change: ChangeShare = field(default_factory=ChangeShare)


def tensor_group(name: str) -> str:
    """Returns the part of a model to which a weight belongs."""
    if "embed" in name or "lm_head" in name:
        return "embedding and head"
    if "norm" in name:
        return "norms"
    if _EXPERTS.search(name):
        return "experts"
    if _ATTENTION.search(name):
        return "attention"
    return "mlp"


def cast_to_merge(value: Tensor, dtype: str) -> Tensor:
    """Rounds a weight to the dtype of the merged model, and returns it in fp32."""
    return value.to(to_torch(dtype)).float()


def _read_merged(weights: RunWeights, written: WrittenModel, name: str) -> Tensor:
    return cast_to_merge(weights.trained(name), written.merge_dtype)


def fill_and_compare(
    reference: ReferenceModel, weights: RunWeights, written: WrittenModel
) -> TensorComparison:
    """Fills the reference model with the file's values, and compares each value with the run's
    value.

    A tensor that the file lacks, or that has another shape, gets the run's value. A weight that an
    adapter file does not change gets the base's value.

    Raises  UsageError for a file of another model or of another run
    """
    _refuse_other_shapes(reference, weights, written)
    comparison = TensorComparison()
    for name in reference.names:
        _fill_and_compare_tensor(comparison, reference, weights, written, name)
        # malloc keeps freed values; returning them after every small tensor takes a third more time
        if math.prod(reference.shapes[name]) > 8 * _PART_SIZE:
            trim_freed_blocks()
    for stored_name in written.unexpected:
        message = "the run's model has no such tensor"
        comparison.differences.append(Difference("tensor", stored_name, message))
    return comparison


def _fill_and_compare_tensor(
    comparison: TensorComparison,
    reference: ReferenceModel,
    weights: RunWeights,
    written: WrittenModel,
    name: str,
) -> None:
    trained = weights.trained_without_widening(name)
    tensor = written.tensors.get(name)
    message = _absence(tensor, name, trained, weights, written)
    if message:
        stored_name = tensor.name if tensor is not None else name
        comparison.differences.append(Difference("tensor", stored_name, message))
    if tensor is not None and not message:
        value = tensor.read().to(trained.device)
        comparison.read_names.add(name)
        reference.fill(written.read, [name])
    elif written.adapter_only:
        value = weights.base(name)
        reference.fill(weights.base, [name])
    else:
        value = cast_to_merge(trained, written.merge_dtype)
        reference.fill(partial(_read_merged, weights, written), [name])
    if tensor is not None and not message:
        _compare_values(comparison, weights, written, name, value, trained)
    if not _has_merged_values(value, trained, written.merge_dtype):
        comparison.rounded_names.setdefault(tensor_group(name), []).append(name)
    comparison.is_merge_exact &= _is_merge_exact(trained, written.merge_dtype)


def _split(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tensors in fp32 parts along their first dimension. All tensors have the same
    shape. The comparison needs several intermediate results, which are as large as a part.
    """
    first = tensors[0]
    if first.ndim == 0 or not first.numel():
        yield tuple(tensor.float() for tensor in tensors)
        return
    row_size = first[0].numel()
    rows = max(1, _PART_SIZE // row_size)
    for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        yield tuple(part.float() for part in parts)


def _has_merged_values(value: Tensor, trained: Tensor, dtype: str) -> bool:
    """Returns True if the values are those of the merged model, within the error of fp32 sums."""
    return all(
        torch.allclose(part, cast_to_merge(trained_part, dtype), rtol=_FP32_ERROR, atol=0.0)
        for part, trained_part in _split(value, trained)
    )


def _is_merge_exact(trained: Tensor, dtype: str) -> bool:
    return all(torch.equal(cast_to_merge(part, dtype), part) for (part,) in _split(trained))


def _absence(
    tensor: WrittenTensor | None,
    name: str,
    trained: Tensor,
    weights: RunWeights,
    written: WrittenModel,
) -> str:
    """Returns the reason why a tensor of the file cannot be used; "" if the tensor can be used, or
    if the file may lack it.
    """
    if tensor is None:
        if written.adapter_only and name not in weights.changed_names:
            return ""
        return "the file has no such tensor"
    if tensor.shape != tuple(trained.shape):
        return f"its shape is {list(tensor.shape)}, the run's is {list(trained.shape)}"
    return ""


def _refuse_other_shapes(
    reference: ReferenceModel, weights: RunWeights, written: WrittenModel
) -> None:
    """Raises UsageError if most tensors are missing or have a different shape, which means that the
    file contains a different model.
    """
    needed = weights.changed_names if written.adapter_only else reference.names
    shapes = {name: reference.shapes[name] for name in needed if name in reference.shapes}
    fitting = [
        name
        for name, shape in shapes.items()
        if name in written.tensors and written.tensors[name].shape == shape
    ]
    if 2 * len(fitting) <= len(shapes):
        raise UsageError(
            f"the file holds another model: {len(fitting)} of {len(shapes)} tensors have the shapes"
            " of the run's model",
            fix="give the file that was written from this run",
        )


def _compare_values(
    comparison: TensorComparison,
    weights: RunWeights,
    written: WrittenModel,
    name: str,
    value: Tensor,
    trained: Tensor,
) -> None:
    tensor = written.tensors[name]
    bad_values = sum(int((~part.isfinite()).sum()) for (part,) in _split(value))
    if bad_values:
        message = f"{bad_values} of its values are not finite"
        comparison.differences.append(Difference("tensor", tensor.name, message))
        return
    is_changed = name in weights.changed_names
    base = weights.base(name) if is_changed else trained
    message = _deviation(tensor.kind, written, value, trained, base)
    if not is_changed:
        if value.ndim > 1:  # norms may be ones in every model
            comparison.frozen_total += 1
            comparison.frozen_different += bool(message)
    else:
        for value_part, trained_part, base_part in _split(value, trained, base):
            merged_part = cast_to_merge(trained_part, written.merge_dtype)
            comparison.change.add(
                trained_part - base_part, value_part - base_part, merged_part - base_part
            )
        comparison.changed_total += 1
        comparison.changed_different += bool(message)
        comparison.unlike_base += bool(_deviation(tensor.kind, written, value, base, base))
    if message:
        comparison.differences.append(Difference("tensor", tensor.name, message))


def _deviation(
    kind: str, written: WrittenModel, value: Tensor, expected: Tensor, base: Tensor
) -> str:
    """Returns a text that says how far a tensor is from its expected values. The text is empty if
    the distance is within the rounding of the tensor's type.
    """
    if not expected.numel():
        return ""
    if kind in TENSOR_ROUNDING and not written.adapter_only:
        return _relative_deviation(kind, value, expected)
    largest = _largest_magnitude(expected)
    adapter_limit = 0.0
    if written.adapter_only:
        change = max(float((part - other).abs().max()) for part, other in _split(expected, base))
        adapter_limit = 4 * _ROUNDING.get(kind, 1 / 100) * change + _ADAPTER_ERROR * largest
    count = 0
    largest_error = 0.0
    for value_part, expected_part in _split(value, expected):
        error = (value_part - expected_part).abs()
        if written.adapter_only:
            is_off = error > adapter_limit
        else:
            is_off = error > rounding_limits(kind, written.merge_dtype, expected_part, largest)
        count += int(is_off.sum())
        largest_error = max(largest_error, float(error.max()))
    if not count:
        return ""
    return (
        f"{count / expected.numel():.1%} of its values are off by more than the rounding of {kind},"
        f" the largest by {largest_error:.3g}"
    )


def _relative_deviation(kind: str, value: Tensor, expected: Tensor) -> str:
    """Does the same as `_deviation`, for a type whose rounding error is measured over the whole
    tensor and not for each value.
    """
    squared_error = 0.0
    squared_norm = 0.0
    for value_part, expected_part in _split(value, expected):
        squared_error += float((value_part - expected_part).square().sum())
        squared_norm += float(expected_part.square().sum())
    relative = math.sqrt(squared_error / squared_norm) if squared_norm else math.inf
    if relative <= TENSOR_ROUNDING[kind] or not squared_error:
        return ""
    return f"its values are off by {relative:.0%}, more than the rounding of {kind}"


def _largest_magnitude(tensor: Tensor) -> float:
    smallest, largest = tensor.aminmax()
    return max(float(largest), -float(smallest))


def rounding_limits(
    kind: str, merge_dtype: str, expected: Tensor, largest: float | None = None
) -> Tensor:
    """Returns the largest error that is allowed for each value. A limit is the sum of the possible
    errors of the cast to the merged dtype, of the file's type, and of sums in fp32.

    largest  the largest magnitude in the whole tensor, if `expected` is a part of it
    """
    magnitude = expected.abs()
    if largest is None:
        largest = _largest_magnitude(expected) if expected.numel() else 0.0
    limits = magnitude * _DTYPE_ROUNDING[merge_dtype] + _FP32_ERROR * largest
    if kind in _BLOCK_ROUNDING:
        blocks = magnitude.reshape(-1, 32).amax(1, keepdim=True).expand(-1, 32)
        return limits + blocks.reshape(magnitude.shape) * _BLOCK_ROUNDING[kind]
    return limits + magnitude * _ROUNDING[kind] + _SMALLEST_FP16


def refuse_other_run(comparison: TensorComparison) -> None:
    """Raises UsageError if the file's weights belong to another base or to another run."""
    if 2 * comparison.frozen_different > comparison.frozen_total:
        raise UsageError(
            f"the file holds another base model: {comparison.frozen_different} of"
            f" {comparison.frozen_total} matrices that the run did not train differ",
            fix="give the file that was written from this run",
        )
    share = comparison.change.kept
    if share is None or 0.5 < share < 2.0:
        return
    total = comparison.changed_total
    if 2 * comparison.changed_different > total and 2 * comparison.unlike_base > total:
        raise UsageError(
            f"the file was written from another run: {comparison.changed_different} of {total}"
            " trained tensors have neither this run's values nor the base's",
            fix="give the file that was written from this run",
        )


def unmerged_difference(comparison: TensorComparison) -> Difference | None:
    """Returns a difference if the file contains the base without the run's changes; None if the
    file contains the changes.
    """
    share = comparison.change.kept
    expected = comparison.change.expected
    if share is None or expected is None or has_change(share, expected):
        return None
    message = (
        f"the file's weights hold {max(0.0, share):.0%} of the change that the run made; the merged"
        f" weights hold {expected:.0%}: the adapter is not merged into the file"
    )
    return Difference("tensor", "adapter", message)
