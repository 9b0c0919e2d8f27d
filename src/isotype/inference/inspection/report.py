"""Writes the result of an inspection: a screen of text, or a JSON object."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...wording import align_columns, format_bytes, format_compact, format_percent, pluralise
from .checkpoint import ADAPTER, GGUF, SAFETENSORS, StoredTensor
from .findings import Facts, is_matrix
from .inspect import Inspection
from .tokens import TokenSettings
from .values import ValueRange

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")  # a number between dots or underscores
_MAX_ROWS = 24  # rows of a table that are printed without --verbose
_LABEL_WIDTH = 14  # characters of the column of labels


@dataclass
class TensorGroup:
    """Contains tensors that have the same dtype and whose names differ only in numbers.

    pattern  the name with `*` in place of the numbers
    """

    pattern: str
    dtype: str
    tensors: list[StoredTensor] = field(default_factory=list)
    values: ValueRange = field(default_factory=ValueRange)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return sorted({tensor.shape for tensor in self.tensors})

    @property
    def size(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        result = {
            "pattern": self.pattern,
            "dtype": self.dtype,
            "count": len(self.tensors),
            "shapes": [list(shape) for shape in self.shapes],
            "bytes": self.size,
        }
        if self.values.count:
            result["values"] = asdict(self.values)
        return result


def group_tensors(
    tensors: Iterable[StoredTensor], ranges: Mapping[str, ValueRange]
) -> list[TensorGroup]:
    """Groups tensors by their pattern and dtype, in the order of the file."""
    groups: dict[tuple[str, str], TensorGroup] = {}
    for tensor in tensors:
        pattern = _NUMBER.sub("*", tensor.name)
        group = groups.setdefault((pattern, tensor.dtype), TensorGroup(pattern, tensor.dtype))
        group.tensors.append(tensor)
        if tensor.name in ranges:
            group.values = group.values + ranges[tensor.name]
    return list(groups.values())


def report_lines(inspection: Inspection, *, is_verbose: bool = False) -> list[str]:
    """Returns the lines of the report, without the list of faults."""
    facts = inspection.facts
    tensors = facts.checkpoint.tensors
    if is_verbose:
        groups = [
            TensorGroup(t.name, t.dtype, [t], facts.ranges.get(t.name, ValueRange()))
            for t in tensors.values()
        ]
    else:
        groups = group_tensors(tensors.values(), facts.ranges)
    total = sum(tensor.size_bytes for tensor in tensors.values())
    files = pluralise(len(facts.checkpoint.files), "file")
    lines = [
        _line(_label(facts), _describe_path(facts)),
        _line("tensors", f"{len(tensors):,}, {format_bytes(total)} in {files}"),
        "",
        *_table(groups, None if is_verbose else _MAX_ROWS),
        "",
        _line("values", _describe_values(facts)),
    ]
    for label, text in _setting_lines(facts):
        lines.append(_line(label, text))
    for program, text in inspection.readers.items():
        lines.append(_line(program, text))
    return lines


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}"


def _label(facts: Facts) -> str:
    if facts.adapter is not None:
        return ADAPTER
    return "file" if facts.checkpoint.kind == SAFETENSORS else facts.checkpoint.kind


def _describe_path(facts: Facts) -> str:
    checkpoint = facts.checkpoint
    description = str(checkpoint.path)
    if facts.adapter is not None and facts.adapter.description:
        description += f": {facts.adapter.description}"
        if facts.adapter.base:
            description += f", on {facts.adapter.base}"
    elif checkpoint.kind == GGUF:
        description += f": {checkpoint.fields.get('general.architecture', 'no architecture')}"
    return description


def _table(groups: list[TensorGroup], limit: int | None) -> list[str]:
    rows = [("count", "stored", "shape", "largest", "name")]
    for group in groups[:limit]:
        shapes = [str(list(shape)).replace(",", "") for shape in group.shapes]
        shape = shapes[0] if len(shapes) == 1 else f"{len(shapes)} shapes"
        largest = f"{group.values.largest:.3g}" if group.values.count else ""
        rows.append((str(len(group.tensors)), group.dtype, shape, largest, group.pattern))
    lines = align_columns(rows, right_aligned=(0, 3))
    if limit is not None and len(groups) > limit:
        lines.append(f"... {len(groups) - limit} more patterns (--verbose)")
    return lines


def _describe_values(facts: Facts) -> str:
    total = sum(facts.ranges.values(), ValueRange())
    if not total.count:
        return "no floating-point numbers"
    parts = []
    if total.nan or total.infinite:
        parts.append(f"{total.nan:,} NaN, {total.infinite:,} infinite")
    else:
        parts.append("all finite")
    tensors = facts.checkpoint.tensors
    matrices = [name for name in facts.ranges if is_matrix(tensors[name])]
    zero = sum(facts.ranges[name].is_all_zero for name in matrices)
    zero_matrices = pluralise(zero, "matrix", "matrices") if zero else "no matrix"
    parts.append(f"{zero_matrices} all zero")
    lost = []
    if total.overflow:
        lost.append(f"{total.overflow:,} become infinite")
    if total.vanishing:
        lost.append(f"{format_percent(total.vanishing / total.count)} become zero")
    if total.subnormal:
        lost.append(f"{format_percent(total.subnormal / total.count)} lose bits")
    parts.append("a cast to fp16: " + (", ".join(lost) or "all in its range"))
    return f"{format_compact(total.count)}; {'; '.join(parts)}"


def _setting_lines(facts: Facts) -> list[tuple[str, str]]:
    lines = []
    loading = facts.loading
    if loading is not None:
        lines.append(("scales", _describe_scales(facts)))
        lines.append(("ties", _describe_ties(facts)))
    config = facts.checkpoint.config
    declared = config.get("dtype") or config.get("torch_dtype")
    if config and facts.checkpoint.kind != ADAPTER:
        lines.append(("config.json", f"dtype {declared or 'not set'}"))
    if facts.tokens is not None:
        lines += _token_lines(facts.tokens)
    return lines


def _describe_scales(facts: Facts) -> str:
    assert facts.loading is not None
    scales = facts.loading.scales
    total = len(scales.quantised) + len(scales.missing)
    if not total and not scales.orphaned:
        return "none: the weights are not quantised"
    quantisation = facts.loading.quantisation
    how = "in no declared format" if quantisation is None else f"in {quantisation}"
    text = f"{pluralise(total, 'weight')} {how}"
    missing = f"{len(scales.missing)} without" if scales.missing else "each with its scales"
    orphaned = f", {len(scales.orphaned)} scales without a quantised weight"
    return f"{text}, {missing}{orphaned if scales.orphaned else ''}"


def _describe_ties(facts: Facts) -> str:
    assert facts.loading is not None
    if facts.loading.problem:
        return "not known"
    if not facts.loading.ties:
        return "none"
    texts = []
    for name, source in facts.loading.ties.items():
        if name not in facts.equal_ties:
            stored = "stored once"
        elif facts.equal_ties[name]:
            stored = "stored twice, equal"
        else:
            stored = "stored twice, not equal"
        texts.append(f"{name} = {source}, {stored}")
    return "; ".join(texts)


def _token_lines(tokens: TokenSettings) -> list[tuple[str, str]]:
    ends = [
        f"{source} {', '.join(map(tokens.describe, ids))}" for source, ids in tokens.end_ids.items()
    ]
    pads = [f"{source} {tokens.describe(number)}" for source, number in tokens.pad_ids.items()]
    return [
        ("end tokens", "; ".join(ends) or "none"),
        ("pad token", "; ".join(pads) or "none"),
        ("chat template", tokens.template or "none"),
    ]


def report_json(inspection: Inspection, *, is_verbose: bool = False) -> dict[str, Any]:
    """Returns the report for `--json`, without the list of faults."""
    facts = inspection.facts
    checkpoint = facts.checkpoint
    groups = group_tensors(checkpoint.tensors.values(), facts.ranges)
    result: dict[str, Any] = {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        "bytes": sum(tensor.size_bytes for tensor in checkpoint.tensors.values()),
        "tensors": [group.to_json() for group in groups],
        "values": asdict(sum(facts.ranges.values(), ValueRange())),
        "readers": inspection.readers,
    }
    if is_verbose:
        result["each"] = [
            _tensor_json(tensor, facts.ranges.get(tensor.name))
            for tensor in checkpoint.tensors.values()
        ]
    if facts.loading is not None:
        loading = facts.loading
        result["scales"] = asdict(loading.scales)
        result["ties"] = [
            {"name": name, "source": source, "is_equal": facts.equal_ties.get(name)}
            for name, source in loading.ties.items()
        ]
        keys = ("class_name", "dtype", "problem", "missing", "unexpected", "mismatched", "narrowed")
        result["transformers"] = {key: getattr(loading, key) for key in keys}
        result["quantisation"] = None if loading.quantisation is None else str(loading.quantisation)
    if facts.tokens is not None:
        result["tokens"] = asdict(facts.tokens)
    if facts.adapter is not None:
        result["adapter"] = asdict(facts.adapter)
    return result


def _tensor_json(tensor: StoredTensor, values: ValueRange | None) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "file": tensor.file.name,
        "bytes": tensor.size_bytes,
        "values": None if values is None else asdict(values),
    }
