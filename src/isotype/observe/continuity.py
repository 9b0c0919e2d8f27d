"""Checks that a training step starts with the values that the last update wrote. Between the update
and the step, other code may have run, such as a scheduler, a callback or an evaluation.

After an update, the module copies some elements of a few tensors: trained weights, their optimizer
states, averages and buffers. Before the next step, it compares the bytes of these elements with the
copies. After each update, it chooses other tensors. It first chooses tensors that were written
after the last update. PyTorch's version counter shows which tensors these are. The comparison does
not make the CPU wait for the GPU. Its result is a number on the GPU, and the step reads this number
together with its loss.

This module also finds fp32 tensors whose values were rounded to bf16 or fp16. In such a tensor, the
last bits of every sampled value are zero. After an update, only the elements that the update
changed are checked for rounding. The other elements may still have the values of a bf16 checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..dtypes import format_dtype, to_torch
from ..precision.parts import local_part
from .record import Observation

WEIGHT = "weight"
STATE = "state"
AVERAGE = "average"
BUFFER = "buffer"
# the largest number of tensors of each kind in a sample, and of elements of each tensor
SAMPLED_TENSORS = 16
SAMPLED_ELEMENTS = 64
# how many values are needed to call a tensor rounded: the probability that 8 values end in 16 zero
# bits each by chance is 2 to the power of -128
_MIN_VALUES = 8
# the last bits of an fp32 number that are zero after rounding to a narrower dtype
_ZERO_BITS = {"bf16": 0xFFFF, "fp16": 0x1FFF}
# parts of the keys of optimizer states that are averages; other states, such as a previous
# gradient, may be copies of narrow values
_AVERAGE_KEYS = ("avg", "momentum", "exp_")

Key = tuple[str, ...]  # kind of tensor, name of the parameter or buffer, and key of the state


@dataclass(frozen=True)
class Difference:
    """A tensor that has changed since the previous step: some of its values differ from the values
    that were stored then.

    narrower  the dtype to which the tensor was cast or its values were rounded, if this dtype is
              narrower; else empty
    change    a description of the change
    """

    kind: str
    tensor: str
    narrower: str = ""
    change: str = "changed"


def find_narrow_dtype(values: Tensor) -> str:
    """Returns bf16 or fp16 if this dtype can represent every one of these fp32 values. Returns ""
    if neither dtype can represent all values, or if too few values differ from zero.
    """
    if values.dtype != torch.float32:
        return ""
    bits = values[(values != 0) & values.isfinite()].view(torch.int32)
    if bits.numel() < _MIN_VALUES:
        return ""
    return next(
        (dtype_name for dtype_name, mask in _ZERO_BITS.items() if not bool((bits & mask).any())), ""
    )


def _find_rounding(old: Tensor, new: Tensor) -> str:
    """Returns the dtype to which the changed values of an fp32 tensor were rounded. Returns "" if
    they were not rounded, or if the old values were rounded too.
    """
    if old.dtype != torch.float32 or new.dtype != torch.float32:
        return ""
    if old.shape == new.shape and (
        dtype_name := next(
            (width for width in _ZERO_BITS if torch.equal(old.to(to_torch(width)).float(), new)), ""
        )
    ):
        return dtype_name  # works for a tensor with few elements too
    dtype_name = find_narrow_dtype(new[new != old] if old.shape == new.shape else new)
    if dtype_name and bool((old.view(torch.int32) & _ZERO_BITS[dtype_name]).any()):
        return dtype_name
    return ""


# the values of tensors with the same device and dtype are stored together
StorageKind = tuple[torch.device, torch.dtype]


@dataclass
class Sample:
    """Sampled elements of many tensors.

    tensors  key -> device, dtype and number of elements
    values   (device, dtype) -> the elements of all its tensors in one tensor, in the order of keys
    """

    tensors: dict[Key, tuple[StorageKind, int]] = field(default_factory=dict)
    values: dict[StorageKind, Tensor] = field(default_factory=dict)

    def on_host(self) -> Iterator[tuple[Key, torch.dtype, Tensor]]:
        """Copies the elements of each tensor to the host, with one transfer per device and dtype."""
        host_values = {kind: tensor.cpu() for kind, tensor in self.values.items()}
        start = dict.fromkeys(host_values, 0)
        for key, (kind, size) in self.tensors.items():
            yield key, kind[1], host_values[kind][start[kind] : start[kind] + size]
            start[kind] += size


class Continuity:
    """Copies some elements of the tensors of a model and its optimizer (a sample), and later
    compares them with the current values. Call `take_sample` after an update and `compare` before
    the next step. `differences` lists the tensors that differ.

    flags     0-d fp32, one for each device and dtype: above 0 if a sampled byte differed in
              `compare`
    averages  name -> a moving average of a weight
    kinds     the kinds of tensors that are sampled
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        averages: Mapping[str, Tensor] | None = None,
        *,
        kinds: tuple[str, ...] = (WEIGHT, STATE, AVERAGE, BUFFER),
    ) -> None:
        self.optimizer = optimizer
        self.averages = averages or {}
        self.kinds = kinds
        # stored by module and key, because a tensor may be replaced
        self._parameters = [
            (full_name, *_owner(model, full_name)) for full_name, _ in model.named_parameters()
        ]
        self._buffers = [
            (full_name, *_owner(model, full_name)) for full_name, _ in model.named_buffers()
        ]
        self.moment = ""
        self.flags: list[Tensor] = []
        self._samples_taken = 0
        self._sample = Sample()
        self._write_marks: dict[Key, tuple[int, int]] = {}
        self._written: list[Key] = []

    def take_sample(self, moment: str) -> None:
        """Copies some elements of the tensors. `moment` describes when this is done: `the update of
        step 3`.
        """
        tensors = dict(self._tensors())
        self.moment = moment
        self._write_marks = {key: _write_mark(tensor) for key, tensor in tensors.items()}
        self._sample = _take_sample({key: tensors[key] for key in self._choose_keys(list(tensors))})
        self._written = []
        self._samples_taken += 1

    def compare(self) -> None:
        """Compares the tensors with the last sample. It is called at the beginning of a step. The
        results are written to `flags`, and nothing is read from a device.
        """
        self.flags = []
        if not self._sample.tensors:
            return
        tensors = dict(self._tensors())
        self._written = [
            key
            for key, tensor in tensors.items()
            if self._write_marks.get(key) != _write_mark(tensor)
        ]
        sample = self._resample(tensors)
        if sample.tensors != self._sample.tensors:
            self.flags = [torch.ones(())]
        else:
            self.flags = [
                (_byte_view(sample.values[kind]) != _byte_view(values)).any().float()
                for kind, values in self._sample.values.items()
            ]

    def differences(self) -> list[Difference]:
        """Lists the tensors whose values differ from the last sample. It copies the last sample and
        the current values from their devices to the host.
        """
        return _compare_samples(self._sample, self._resample())

    def compare_tensors(self, read_tensor: Callable[[Key], Tensor | None]) -> list[Difference]:
        """Lists the tensors of a file whose values differ from the last sample.

        read_tensor  returns the file's tensor for a key, or None if there is none
        """
        tensors = {
            key: tensor for key in self._sample.tensors if (tensor := read_tensor(key)) is not None
        }
        return _compare_samples(_take_sample(tensors), self._sample)

    def find_narrow_updates(self) -> list[Difference]:
        """Finds fp32 weights and averages that an update rounded. A tensor counts as rounded if a
        narrower dtype can represent all sampled elements that the update changed. Call it after an
        update.
        """
        new_values = {key: values for key, _, values in self._resample().on_host()}
        differences = []
        for key, dtype, old in self._sample.on_host():
            new = new_values.get(key)
            if (
                new is None
                or not _is_full_precision(key)
                or (new.dtype, new.shape) != (dtype, old.shape)
            ):
                continue
            if dtype_name := find_narrow_dtype(new[new != old]):
                differences.append(Difference(key[0], _tensor_label(key), dtype_name))
        return differences

    def find_narrow_loads(self) -> list[Difference]:
        """Checks the fp32 tensors after the state of a run was loaded. It finds the cases in which
        a narrower dtype can represent all values of the weights, or all values of one kind of
        optimizer state.

        All tensors of one kind are checked together, because a single tensor that no update changed
        may still have the values of a bf16 checkpoint.
        """
        groups: dict[tuple[str, str], list[Tensor]] = {}
        for key, dtype, values in self._sample.on_host():
            if _is_full_precision(key) and dtype == torch.float32:
                groups.setdefault((key[0], key[2] if key[0] == STATE else ""), []).append(values)
        differences = []
        for (kind, state), parts in groups.items():
            if dtype_name := find_narrow_dtype(torch.cat(parts)):
                differences.append(
                    Difference(kind, f"{state or kind} of every sampled tensor", dtype_name)
                )
        return differences

    def _resample(self, tensors: Mapping[Key, Tensor] | None = None) -> Sample:
        tensors = dict(self._tensors()) if tensors is None else tensors
        return _take_sample({key: tensors[key] for key in self._sample.tensors if key in tensors})

    def _tensors(self) -> Iterator[tuple[Key, Tensor]]:
        states = self.optimizer.state if self.optimizer is not None else {}
        for full_name, module, key in self._parameters:
            parameter = module._parameters.get(key)
            if parameter is None or not parameter.requires_grad:
                continue
            if WEIGHT in self.kinds and _is_plain(parameter):
                yield (WEIGHT, full_name), parameter
            if STATE in self.kinds and parameter in states:
                for state, value in states[parameter].items():
                    if isinstance(value, Tensor) and _is_plain(value):
                        yield (STATE, full_name, state), value
        if AVERAGE in self.kinds:
            yield from (
                ((AVERAGE, full_name), average) for full_name, average in self.averages.items()
            )
        if BUFFER in self.kinds:
            for full_name, module, key in self._buffers:
                buffer = module._buffers.get(key)
                if buffer is not None and _is_plain(buffer):
                    yield (BUFFER, full_name), buffer

    def _choose_keys(self, keys: list[Key]) -> list[Key]:
        """Chooses at most SAMPLED_TENSORS tensors of each kind (weights, averages and buffers).
        Tensors that were written outside an update are chosen first. Each sample contains the next
        tensors of the list, so that after some samples every tensor was in one of them. If a
        parameter is chosen, its optimizer states are sampled as well.
        """
        chosen: list[Key] = []
        for kind in (WEIGHT, AVERAGE, BUFFER):
            candidates = [key for key in keys if key[0] == kind]
            written = [key for key in self._written if key[0] == kind][:SAMPLED_TENSORS]
            start = (
                self._samples_taken * SAMPLED_TENSORS % len(candidates)
                if len(candidates) > SAMPLED_TENSORS
                else 0
            )
            remaining = [
                key for key in candidates[start:] + candidates[:start] if key not in written
            ]
            chosen += (written + remaining)[:SAMPLED_TENSORS]
        if WEIGHT in self.kinds:
            chosen_weights = {key[1] for key in chosen if key[0] == WEIGHT}
        else:
            chosen_weights = None
        return chosen + [
            key
            for key in keys
            if key[0] == STATE and (chosen_weights is None or key[1] in chosen_weights)
        ]


class FrozenWeights:
    """Copies some elements of the frozen weights when a run starts. `changed` returns the names of
    the weights whose elements differ from these copies later. This needs only one transfer to the
    host per device and dtype.

    The check is needed because frozen weights may be read from files that are mapped into memory.
    Another program can write into these files.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._start = _take_sample(self._tensors())

    def changed(self) -> list[str]:
        """Returns the names of the weights in which a sampled byte has changed. A weight is left
        out if its dtype or its size has changed, for example because it was gathered.
        """
        tensors = self._tensors()
        for key in [key for key in tensors if key not in self._start.tensors]:
            del tensors[key]
        current = {key: (dtype, values) for key, dtype, values in _take_sample(tensors).on_host()}
        names: list[str] = []
        for key, dtype, values in self._start.on_host():
            sampled = current.get(key)
            if sampled is None or (sampled[0], sampled[1].shape) != (dtype, values.shape):
                continue
            if not torch.equal(_byte_view(sampled[1]), _byte_view(values)):
                names.append(key[1])
        return names

    def _tensors(self) -> dict[Key, Tensor]:
        return {
            (WEIGHT, full_name): parameter
            for full_name, parameter in self._model.named_parameters()
            if not parameter.requires_grad and _is_plain(parameter)
        }


def report_differences(
    observation: Observation, differences: list[Difference], start: str, end: str, *, strict: bool
) -> None:
    """Adds differences to an observation. Values that were rounded or cast to a narrower dtype are
    violations. If `strict` is set, any difference of weights or states is a violation too. Other
    differences are only listed in `unobserved` of the observation.

    start, end  descriptions of the two moments
    """
    between = f"between {start} and {end}"
    for (kind, change), group in _group_differences(differences).items():
        if group[0].narrower or (strict and kind != BUFFER):
            observation.report(
                _ROLES[kind],
                f"{_describe_group(group)} {change} {between}",
                location=group[0].tensor,
                rule=_CONTINUITY_RULE,
                observed=group[0].narrower or "other numbers",
                cause="code that ran there: a scheduler, a callback, an evaluation, a save",
                fix="leave its numbers as the update made them, or work on a copy",
            )
        else:
            observation.unobserved[_describe_group(group)] = (
                f"{change} {between} by code outside a step"
            )


def report_narrow_values(
    observation: Observation, differences: list[Difference], moment: str
) -> None:
    """Reports a violation for fp32 tensors whose values could all be stored in a narrower dtype.

    moment  a description of the update or load
    """
    for (kind, _), group in _group_differences(differences).items():
        dtype_name = group[0].narrower
        observation.report(
            _ROLES[kind],
            f"{_describe_group(group)} stored in fp32 with numbers of {dtype_name} {moment}",
            location=group[0].tensor,
            observed=f"{dtype_name} in fp32",
            rule=_ALL_BITS_RULE,
            cause="something rounds it in each update, or the file held it so",
            fix=f"find what casts it to {dtype_name}, or declare {dtype_name}",
        )


def _group_differences(differences: list[Difference]) -> dict[tuple[str, str], list[Difference]]:
    """Returns a dict from (kind of tensor, description of the change) to all differences of this
    kind.
    """
    groups: dict[tuple[str, str], list[Difference]] = {}
    for difference in differences:
        groups.setdefault(
            (
                difference.kind,
                f"rounded to {difference.narrower}" if difference.narrower else difference.change,
            ),
            [],
        ).append(difference)
    return groups


def _describe_group(group: list[Difference]) -> str:
    first = group[0]
    if len(group) == 1:
        return f"{first.kind} {first.tensor} was"
    return f"{len(group)} sampled {first.kind}s, first {first.tensor}, were"


_CONTINUITY_RULE = (
    "weights, states, averages and buffers are at the start of a step what the last update left"
)
_ALL_BITS_RULE = "trained weights, states and averages of fp32 have the bits of fp32"
# kind of a tensor -> the role that declares its dtype
_ROLES = {WEIGHT: "trainable", STATE: "optimizer", AVERAGE: "optimizer", BUFFER: "compute"}


def _compare_samples(old: Sample, new: Sample) -> list[Difference]:
    """Lists the tensors that differ between two samples. A tensor that is in only one of the two
    samples is left out.
    """
    new_values = {key: current for key, _, current in new.on_host()}
    differences = []
    for key, dtype, old_values in old.on_host():
        current = new_values.get(key)
        if current is None:
            continue
        if current.dtype != dtype or not torch.equal(_byte_view(current), _byte_view(old_values)):
            if current.dtype.itemsize < dtype.itemsize:
                narrower = format_dtype(current.dtype)
            else:
                narrower = _find_rounding(old_values, current)
            if current.dtype == dtype:
                change = "changed"
            else:
                change = f"{format_dtype(dtype)} and now {format_dtype(current.dtype)}"
            differences.append(Difference(key[0], _tensor_label(key), narrower, change))
    return differences


def _owner(model: nn.Module, full_name: str) -> tuple[nn.Module, str]:
    module, _, key = full_name.rpartition(".")
    return model.get_submodule(module), key


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor itself stores its values, in its own dtype. Returns False for a subclass
    that wraps other tensors.
    """
    part = local_part(tensor)
    return (
        type(part) in (Tensor, nn.Parameter, nn.Buffer)
        and part.layout is torch.strided
        and part.numel() > 0
    )


def _write_mark(tensor: Tensor) -> tuple[int, int]:
    """Returns the tensor's id and its version counter, which PyTorch increases with each in-place
    write.
    """
    return id(tensor), tensor._version


def _tensor_label(key: Key) -> str:
    return f"{key[2]} of {key[1]}" if key[0] == STATE else key[1]


def _is_full_precision(key: Key) -> bool:
    return key[0] in (WEIGHT, AVERAGE) or (
        key[0] == STATE and any(part in key[2] for part in _AVERAGE_KEYS)
    )


def _sample_elements(tensor: Tensor) -> Tensor:
    """Returns a view of some elements of the tensor, at equal distances from each other. If the
    tensor is not contiguous, all selected elements are from one row. Otherwise the distance has no
    factor in common with the length of a row, so that the elements are from many columns.

    If a layer sees one token only, its gradient is dy xᵀ: all elements of a column have the factor
    x_j. With x_j = 0.5, for example, they are products of bf16 values that bf16 can store.
    """
    part = local_part(tensor)
    while not part.is_contiguous() and part.dim() > 1:
        part = part[part.shape[0] // 2]
    size = part.numel()
    distance = -(-size // SAMPLED_ELEMENTS)
    if part.dim() > 1:
        while math.gcd(distance, part.shape[-1]) > 1:
            distance += 1
    stride = part.stride(0) if part.dim() == 1 else 1
    return part.as_strided((-(-size // distance),), (distance * stride,))


@torch.no_grad()
def _take_sample(tensors: Mapping[Key, Tensor]) -> Sample:
    sample = Sample()
    elements_by_kind: dict[StorageKind, list[Tensor]] = {}
    for key, tensor in tensors.items():
        part = _sample_elements(tensor)
        kind = part.device, part.dtype
        sample.tensors[key] = kind, part.numel()
        elements_by_kind.setdefault(kind, []).append(part)
    sample.values = {kind: torch.cat(elements) for kind, elements in elements_by_kind.items()}
    return sample


def _byte_view(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
