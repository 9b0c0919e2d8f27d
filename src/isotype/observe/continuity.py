"""Continuity: what an update leaves behind is what the next step finds, whoever ran between: a
scheduler, a callback, an evaluation.

After an update some elements of some trained weights, of their optimizer states, of averages and of
buffers are kept as bytes; before the next step they are compared. Which tensors are kept changes
with each update, and those that PyTorch counts a write of come first. No step waits for its device
for this: the answer is one number there, which the step reads with its loss.

Values have few bits where every sampled one that is not zero ends in the zero bits that a narrower
dtype leaves. After an update only elements that it moved are judged, as weights of a bf16
checkpoint are trained in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..dtypes import name, to_torch
from ..precision.parts import local_part
from .record import Observation

WEIGHT = "weight"
STATE = "state"
AVERAGE = "average"
BUFFER = "buffer"
# of a sample: most tensors of a kind, most elements of each
TENSORS = 16
ELEMENTS = 64
# values by which a tensor is judged: that so many end in 16 zero bits by chance has a probability
# of 2 to the -128
_FEWEST = 8
# the last bits of an fp32 number that a narrower dtype leaves zero
_ZEROS = {"bf16": 0xFFFF, "fp16": 0x1FFF}
# in the keys of states that are averages; others, as a previous gradient, may be a copy
_AVERAGES = ("avg", "momentum", "exp_")

Key = tuple[str, ...]  # kind, name of the parameter or buffer, key of the state


@dataclass(frozen=True)
class Difference:
    """narrower: the dtype to which it was narrowed, in its storage or in its values, else empty;
    how: what became of it, in words.
    """

    kind: str
    tensor: str
    narrower: str = ""
    how: str = "changed"


def narrow_values(values: Tensor) -> str:
    """bf16 or fp16 where this dtype has the bits of each fp32 value that is not zero, and there are
    enough of them to tell; else empty.
    """
    if values.dtype != torch.float32:
        return ""
    bits = values[(values != 0) & values.isfinite()].view(torch.int32)
    if bits.numel() < _FEWEST:
        return ""
    return next((word for word, zeros in _ZEROS.items() if not bool((bits & zeros).any())), "")


def _rounding(before: Tensor, after: Tensor) -> str:
    """The dtype of which the changed values of an fp32 tensor have the bits, where the values
    before had more.
    """
    if before.dtype != torch.float32 or after.dtype != torch.float32:
        return ""
    if before.shape == after.shape and (
        word := next((w for w in _ZEROS if torch.equal(before.to(to_torch(w)).float(), after)), "")
    ):
        return word  # also of a tensor with few elements
    word = narrow_values(after[after != before] if before.shape == after.shape else after)
    if word and bool((before.view(torch.int32) & _ZEROS[word]).any()):
        return word
    return ""


Kind = tuple[torch.device, torch.dtype]


@dataclass
class _Sample:
    """tensors  key -> device, dtype and how many elements; values: the elements, of each device and
    dtype together, in the order of keys
    """

    tensors: dict[Key, tuple[Kind, int]] = field(default_factory=dict)
    values: dict[Kind, Tensor] = field(default_factory=dict)

    def on_host(self) -> Iterator[tuple[Key, torch.dtype, Tensor]]:
        """Each tensor's elements, read in one transfer from each device and dtype."""
        read = {kind: together.cpu() for kind, together in self.values.items()}
        start = dict.fromkeys(read, 0)
        for key, (kind, size) in self.tensors.items():
            yield key, kind[1], read[kind][start[kind] : start[kind] + size]
            start[kind] += size


class Continuity:
    """Of one model and its optimizer: `take` after an update and `begin` before the next step;
    `differences` says what differs.

    flags     0-d fp32, one for each device and dtype: above 0 where a sampled byte differed at
              `begin`
    averages  name -> an average of a weight, kept beside the model
    kinds     which tensors are kept
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
        # the module and the key: a tensor may be exchanged
        self._parameters = [(full, *_owner(model, full)) for full, _ in model.named_parameters()]
        self._buffers = [(full, *_owner(model, full)) for full, _ in model.named_buffers()]
        self.moment = ""
        self.flags: list[Tensor] = []
        self._taken = 0
        self._sample = _Sample()
        self._marks: dict[Key, tuple[int, int]] = {}
        self._written: list[Key] = []

    def take(self, moment: str) -> None:
        """Keeps a sample of the tensors as they are now. `moment`: in words, as in `the update of
        step 3`.
        """
        found = dict(self._tensors())
        self.moment = moment
        self._marks = {key: _mark(tensor) for key, tensor in found.items()}
        self._sample = _sample({key: found[key] for key in self._chosen(list(found))})
        self._written = []
        self._taken += 1

    def begin(self) -> None:
        """At the beginning of a step: compares, and reads nothing from a device. `flags` has the
        answer.
        """
        self.flags = []
        if not self._sample.tensors:
            return
        found = dict(self._tensors())
        self._written = [
            key for key, tensor in found.items() if self._marks.get(key) != _mark(tensor)
        ]
        now = self._again(found)
        if now.tensors != self._sample.tensors:
            self.flags = [torch.ones(())]
        else:
            self.flags = [
                (_bytes_of(now.values[kind]) != _bytes_of(before)).any().float()
                for kind, before in self._sample.values.items()
            ]

    def differences(self) -> list[Difference]:
        """What differs from the last `take`. Reads the sample from its devices."""
        return _differences(self._sample, self._again())

    def differences_from(self, given: Callable[[Key], Tensor | None]) -> list[Difference]:
        """What differs, at the last `take`, from what a file holds under each key; None where it
        holds nothing of it.
        """
        held = {key: tensor for key in self._sample.tensors if (tensor := given(key)) is not None}
        return _differences(_sample(held), self._sample)

    def moved_with_few_bits(self) -> list[Difference]:
        """Trained weights, averages of gradients and of weights in fp32 of which each sampled
        element that changed since the last `take` has the bits of a narrower dtype: to call after
        an update.
        """
        now = {key: values for key, _, values in self._again().on_host()}
        found = []
        for key, dtype, before in self._sample.on_host():
            after = now.get(key)
            if (
                after is None
                or not _is_judged(key)
                or (after.dtype, after.shape) != (dtype, before.shape)
            ):
                continue
            if word := narrow_values(after[after != before]):
                found.append(Difference(key[0], _said(key), word))
        return found

    def loaded_with_few_bits(self) -> list[Difference]:
        """After the state of a trained run was loaded: fp32 weights, or states of one key, of which
        every sampled value has few bits.

        They are judged together: a tensor that no update reached still has the values of a bf16
        checkpoint.
        """
        together: dict[tuple[str, str], list[Tensor]] = {}
        for key, dtype, values in self._sample.on_host():
            if _is_judged(key) and dtype == torch.float32:
                together.setdefault((key[0], key[2] if key[0] == STATE else ""), []).append(values)
        found = []
        for (kind, state), parts in together.items():
            if word := narrow_values(torch.cat(parts)):
                found.append(Difference(kind, f"{state or kind} of every sampled tensor", word))
        return found

    def _again(self, found: Mapping[Key, Tensor] | None = None) -> _Sample:
        found = dict(self._tensors()) if found is None else found
        return _sample({key: found[key] for key in self._sample.tensors if key in found})

    def _tensors(self) -> Iterator[tuple[Key, Tensor]]:
        states = self.optimizer.state if self.optimizer is not None else {}
        for full, module, key in self._parameters:
            parameter = module._parameters.get(key)
            if parameter is None or not parameter.requires_grad:
                continue
            if WEIGHT in self.kinds and _is_plain(parameter):
                yield (WEIGHT, full), parameter
            if STATE in self.kinds and parameter in states:
                for state, value in states[parameter].items():
                    if isinstance(value, Tensor) and _is_plain(value):
                        yield (STATE, full, state), value
        if AVERAGE in self.kinds:
            yield from (((AVERAGE, full), average) for full, average in self.averages.items())
        if BUFFER in self.kinds:
            for full, module, key in self._buffers:
                buffer = module._buffers.get(key)
                if buffer is not None and _is_plain(buffer):
                    yield (BUFFER, full), buffer

    def _chosen(self, keys: list[Key]) -> list[Key]:
        """Of each kind at most so many as a sample has: first those that were written outside an
        update, then others in turn. The states of a parameter go with it.
        """
        chosen: list[Key] = []
        for kind in (WEIGHT, AVERAGE, BUFFER):
            own = [key for key in keys if key[0] == kind]
            first = [key for key in self._written if key[0] == kind][:TENSORS]
            start = self._taken * TENSORS % len(own) if len(own) > TENSORS else 0
            turned = [key for key in own[start:] + own[:start] if key not in first]
            chosen += (first + turned)[:TENSORS]
        if WEIGHT in self.kinds:
            of_weights = {key[1] for key in chosen if key[0] == WEIGHT}
        else:
            of_weights = None
        return chosen + [
            key for key in keys if key[0] == STATE and (of_weights is None or key[1] in of_weights)
        ]


class FrozenWeights:
    """A sample of the weights that a run does not train, as they are when it starts; `changed` says
    which are others now. One transfer from each device and dtype.

    They may lie in files that are mapped into memory, into which another program can write.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._start = _sample(self._tensors())

    def changed(self) -> list[str]:
        """Names of those of which a sampled byte differs. A weight that is not here in the form
        that it had at the start, as a part that was gathered, is left out.
        """
        now = self._tensors()
        for key in [key for key in now if key not in self._start.tensors]:
            del now[key]
        current = {key: (dtype, values) for key, dtype, values in _sample(now).on_host()}
        names: list[str] = []
        for key, dtype, values in self._start.on_host():
            sampled = current.get(key)
            if sampled is None or (sampled[0], sampled[1].shape) != (dtype, values.shape):
                continue
            if not torch.equal(_bytes_of(sampled[1]), _bytes_of(values)):
                names.append(key[1])
        return names

    def _tensors(self) -> dict[Key, Tensor]:
        return {
            (WEIGHT, full): parameter
            for full, parameter in self._model.named_parameters()
            if not parameter.requires_grad and _is_plain(parameter)
        }


def differing(
    observation: Observation, found: list[Difference], after: str, before: str, *, strict: bool
) -> None:
    """Adds what differs to an observation: as a violation where numbers were narrowed, and, if
    `strict`, where weights or states differ at all; else as a place that was not watched.

    after, before  the two moments, in words
    """
    between = f"between {after} and {before}"
    for (kind, how), these in _alike(found).items():
        if these[0].narrower or (strict and kind != BUFFER):
            observation.report(
                _ROLES[kind],
                f"{_said_of(these)} {how} {between}",
                symbol=these[0].tensor,
                rule=_CARRIED,
                observed=these[0].narrower or "other numbers",
                cause="code that ran there: a scheduler, a callback, an evaluation, a save",
                fix="leave its numbers as the update made them, or work on a copy",
            )
        else:
            observation.unobserved[_said_of(these)] = f"{how} {between} by code outside a step"


def of_few_bits(observation: Observation, found: list[Difference], after: str) -> None:
    """Adds fp32 tensors that hold numbers of a narrower dtype, as violations. `after`: an update or
    a load, in words.
    """
    for (kind, _), these in _alike(found).items():
        word = these[0].narrower
        observation.report(
            _ROLES[kind],
            f"{_said_of(these)} stored in fp32 with numbers of {word} {after}",
            symbol=these[0].tensor,
            observed=f"{word} in fp32",
            rule=_ALL_BITS,
            cause="something rounds it in each update, or the file held it so",
            fix=f"find what casts it to {word}, or declare {word}",
        )


def _alike(found: list[Difference]) -> dict[tuple[str, str], list[Difference]]:
    """(kind, what became of them) -> these."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for one in found:
        groups.setdefault(
            (one.kind, f"rounded to {one.narrower}" if one.narrower else one.how), []
        ).append(one)
    return groups


def _said_of(these: list[Difference]) -> str:
    first = these[0]
    if len(these) == 1:
        return f"{first.kind} {first.tensor} was"
    return f"{len(these)} sampled {first.kind}s, first {first.tensor}, were"


_CARRIED = (
    "weights, states, averages and buffers are at the start of a step what the last update left"
)
_ALL_BITS = "trained weights, states and averages of fp32 have the bits of fp32"
_ROLES = {WEIGHT: "trainable", STATE: "optimizer", AVERAGE: "optimizer", BUFFER: "compute"}


def _differences(before: _Sample, after: _Sample) -> list[Difference]:
    """A tensor that is in one of them only, as one that is no longer trained, is left out."""
    now = {key: values for key, _, values in after.on_host()}
    found = []
    for key, dtype, was in before.on_host():
        values = now.get(key)
        if values is None:
            continue
        if values.dtype != dtype or not torch.equal(_bytes_of(values), _bytes_of(was)):
            if values.dtype.itemsize < dtype.itemsize:
                narrower = name(values.dtype)
            else:
                narrower = _rounding(was, values)
            if values.dtype == dtype:
                how = "changed"
            else:
                how = f"{name(dtype)} and now {name(values.dtype)}"
            found.append(Difference(key[0], _said(key), narrower, how))
    return found


def _owner(model: nn.Module, full: str) -> tuple[nn.Module, str]:
    module, _, key = full.rpartition(".")
    return model.get_submodule(module), key


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values lie in one storage as its dtype says; not those of a wrapper that keeps
    others.
    """
    part = local_part(tensor)
    return (
        type(part) in (Tensor, nn.Parameter, nn.Buffer)
        and part.layout is torch.strided
        and part.numel() > 0
    )


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Identity and PyTorch's count of writes."""
    return id(tensor), tensor._version


def _said(key: Key) -> str:
    return f"{key[2]} of {key[1]}" if key[0] == STATE else key[1]


def _is_judged(key: Key) -> bool:
    return key[0] in (WEIGHT, AVERAGE) or (
        key[0] == STATE and any(part in key[2] for part in _AVERAGES)
    )


def _elements(tensor: Tensor) -> Tensor:
    """Elements at even distances: a view, of one row where the tensor is not contiguous."""
    part = local_part(tensor)
    while not part.is_contiguous() and part.dim() > 1:
        part = part[part.shape[0] // 2]
    size = part.numel()
    apart = -(-size // ELEMENTS)
    own = part.stride(0) if part.dim() == 1 else 1
    return part.as_strided((-(-size // apart),), (apart * own,))


@torch.no_grad()
def _sample(tensors: Mapping[Key, Tensor]) -> _Sample:
    made = _Sample()
    parts: dict[Kind, list[Tensor]] = {}
    for key, tensor in tensors.items():
        part = _elements(tensor)
        kind = part.device, part.dtype
        made.tensors[key] = kind, part.numel()
        parts.setdefault(kind, []).append(part)
    made.values = {kind: torch.cat(these) for kind, these in parts.items()}
    return made


def _bytes_of(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
