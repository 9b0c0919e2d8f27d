"""What is run: the function, the inputs of one call, and the dtype combinations that a trainer
produces: dtypes of inputs and parameters, autocast, and where backward runs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...dtypes import TRAINING_FLOATS, name, to_torch
from ...errors import UsageError
from ...finding import Place
from ...ops.contract import OpContract

INPUT = "input"
PARAM = "param"
FIXED = "fixed"
TRAINED = tuple(to_torch(word) for word in TRAINING_FLOATS)


@dataclass(frozen=True)
class Slot:
    """One tensor of a sample: its name, its group (tensors of a group share a dtype), and whether
    it requires a gradient.

    group  `input`, `param`, a contract's free letter, or `fixed` (never changes dtype)
    """

    name: str
    index: int
    group: str
    wants_grad: bool


@dataclass(frozen=True)
class Sample:
    """One call's arguments, flattened: `leaves` in order, `slots` for the floating tensors among
    them.
    """

    leaves: tuple[Any, ...]
    tree: Any
    slots: tuple[Slot, ...]
    guessed: bool  # whether the groups were guessed from shapes
    # dtypes of the parameters that the subject itself owns, as built
    owned: frozenset[torch.dtype] = frozenset()
    # whether the function is handed clones, so that it may work in place
    behind_clone: bool = False

    @property
    def device(self) -> str:
        return next((leaf.device.type for leaf in self.leaves if isinstance(leaf, Tensor)), "cpu")

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot.group for slot in self.slots if slot.group != FIXED))

    def tensor(self, slot: Slot) -> Tensor:
        leaf: Tensor = self.leaves[slot.index]
        return leaf

    def built_dtypes(self) -> dict[str, torch.dtype]:
        """Group -> the dtype its first tensor was given in."""
        dtypes: dict[str, torch.dtype] = {}
        for slot in self.slots:
            dtypes.setdefault(slot.group, self.tensor(slot).dtype)
        return dtypes

    def dtypes_in_play(self, dtypes: Mapping[str, torch.dtype] | None) -> set[torch.dtype]:
        """Every floating dtype in play with each group in its dtype (None: as built)."""
        if dtypes is not None:
            return set(dtypes.values())
        return {self.tensor(slot).dtype for slot in self.slots} | self.owned

    def fresh(
        self,
        dtypes: Mapping[str, torch.dtype] | None,
        *,
        widen_to: torch.dtype | None = None,
        frozen: str | None = None,
    ) -> tuple[list[Any], dict[str, Tensor]]:
        """Copies of the leaves with each group in its dtype (None: as built), and the tensors by
        name.

        widen_to  afterwards widened to this dtype, so that values are those of the narrow dtype
        frozen  the slot that requires no gradient in this trial
        """
        leaves = [
            leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves
        ]
        tensors = {}
        for slot in self.slots:
            original = self.tensor(slot)
            if dtypes is None or slot.group == FIXED:
                dtype = original.dtype
            else:
                dtype = dtypes.get(slot.group, original.dtype)
            tensor = original.detach().to(dtype)
            tensor = tensor.to(widen_to) if widen_to is not None else tensor
            tensor = tensor.clone() if tensor.data_ptr() == original.data_ptr() else tensor
            tensor.requires_grad_(slot.wants_grad and slot.name != frozen)
            leaves[slot.index], tensors[slot.name] = (
                (tensor.clone() if self.behind_clone else tensor),
                tensor,
            )
        return leaves, tensors

    def call_arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
            list(leaves), self.tree
        )
        return call

    def with_tensors(self, tensors: Mapping[int, Tensor]) -> Sample:
        """The same sample with some leaves exchanged, by index."""
        return replace(
            self, leaves=tuple(tensors.get(i, leaf) for i, leaf in enumerate(self.leaves))
        )

    def describe(self) -> str:
        return ", ".join(
            f"{s.name} {name(self.tensor(s).dtype)}{list(self.tensor(s).shape)}" for s in self.slots
        )


def read_samples(
    inputs: Any,
    params: Sequence[Any] = (),
    *,
    contract: OpContract | None = None,
    names: Sequence[str] = (),
    owns_parameters: bool = False,
) -> list[Sample]:
    """What a caller may pass as `inputs`: one tensor, a tuple of arguments, a dict of keyword
    arguments, or a list of such samples.
    """
    several = (
        isinstance(inputs, list)
        and inputs
        and all(isinstance(item, (tuple, Mapping)) for item in inputs)
    )
    samples = [
        _read_sample(item, tuple(params), contract, names, not owns_parameters)
        for item in (inputs if several else [inputs])
    ]
    if not owns_parameters and not any(sample.slots for sample in samples):
        raise UsageError(
            "ampcheck needs at least one floating tensor among its inputs",
            fix="pass the tensors the function is called with",
        )
    return samples


def _read_sample(
    item: Any,
    params: tuple[Any, ...],
    contract: OpContract | None,
    names: Sequence[str],
    grads_by_default: bool,
) -> Sample:
    args, kwargs = _split_arguments(item)
    paths, tree = pytree.tree_flatten_with_path(((*args, *params), kwargs))
    leaves = tuple(leaf for _, leaf in paths)
    first_param = len(args) if params else None
    tensors = [
        (i, path, leaf)
        for i, (path, leaf) in enumerate(paths)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    is_marked = any(leaf.requires_grad for _, _, leaf in tensors) or not grads_by_default
    declared = list(contract.inputs.items()) if contract else []
    slots = []
    for (i, path, leaf), group in zip(tensors, _guess_groups([leaf for _, _, leaf in tensors])):
        # -1 for a name
        indices = [key.idx if isinstance(key, pytree.SequenceKey) else -1 for key in path]
        position = indices[1] if indices[0] == 0 and len(path) == 2 else None
        label = _label(path, names if not declared else [n for n, _ in declared])
        if first_param is not None and indices[0] == 0:
            group = PARAM if indices[1] >= first_param else INPUT
        if leaf.dtype not in TRAINED and leaf.dtype != torch.float64:
            group = FIXED  # fp8 and other storage formats
        if declared and position is not None and position < len(declared):
            spec = declared[position][1]
            if spec.is_free:
                group = spec.dtype
            elif spec.dtype not in ("any", "float"):
                group = FIXED
            else:
                group = group
        slots.append(Slot(label, i, group, leaf.requires_grad if is_marked else True))
    return Sample(
        leaves,
        tree,
        tuple(slots),
        guessed=first_param is None and not declared and len({s.group for s in slots}) > 1,
    )


def _split_arguments(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(item, Mapping):
        return (), dict(item)
    if isinstance(item, (tuple, list)):
        return tuple(item), {}
    return (item,), {}


def _label(path: Sequence[Any], names: Sequence[str]) -> str:
    """`gate`, `input 2`, `batch['mask']`: the argument's name, and the way inside it."""
    first, *rest = path[1:]
    key = getattr(first, "idx", None)
    head = str(
        getattr(first, "key", None)
        or (names[key] if key is not None and key < len(names) else f"input {key}")
    )
    return head + pytree.keystr(tuple(rest)) if rest else head


def _guess_groups(tensors: Sequence[Tensor]) -> list[str]:
    """The group of each: which tensors are activations and which are weights, from dtypes and
    shapes alone.

    Tensors built in different dtypes are grouped by dtype. Built alike, those that share the
    leading size of the first one are activations; the others are weights, which a trainer keeps in
    another dtype than activations.
    """
    dtypes = list(dict.fromkeys(t.dtype for t in tensors))
    if len(dtypes) > 1:
        groups = [INPUT, PARAM, *(f"{PARAM} {i}" for i in range(2, len(dtypes)))]
        return [groups[dtypes.index(t.dtype)] for t in tensors]
    lead = next((t.shape[0] for t in tensors if t.dim() and not isinstance(t, nn.Parameter)), None)
    weights = [
        isinstance(t, nn.Parameter) or bool(t.dim() and lead is not None and t.shape[0] != lead)
        for t in tensors
    ]
    return [PARAM if weight else INPUT for weight in weights]


def parameter_names(function: Callable[..., Any], *, skip: int = 0) -> list[str]:
    """The positional parameters' names; empty where the signature says `*args` or nothing."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def lengthen(sample: Sample, rows: int) -> Sample | None:
    """The sample with its rows drawn again and again until there are `rows` of them; None where
    that cannot be done.

    A row is an index of the leading dimension that the first tensor has; every tensor of that
    leading size that does not look like a weight is drawn with the same indices, so that labels
    stay with their rows.
    """
    first = next((s for s in sample.slots if s.group != PARAM and sample.tensor(s).dim()), None)
    if first is None:
        return None
    rows_of = sample.tensor(first)
    lead = rows_of.shape[0]
    if rows_of.dim() > 1:
        per_row = max(1, rows_of.numel() // max(1, lead) // max(1, rows_of.shape[-1]))
    else:
        per_row = 1
    draws = -(-rows // per_row)
    if lead == 0 or draws <= lead:
        return None
    draw = torch.randint(0, lead, (draws,), generator=torch.Generator().manual_seed(0))
    weights = {s.index for s in sample.slots if s.group == PARAM}
    drawn = {}
    for i, leaf in enumerate(sample.leaves):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == lead and i not in weights:
            drawn[i] = leaf.detach()[draw.to(leaf.device)]
    return sample.with_tensors(drawn)


LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Setting:
    """One combination.

    dtypes   group -> dtype; None: as built
    inside   backward runs inside the autocast region (trainers run it outside)
    produced whether a trainer is sure to produce it; a combination resting on guessed groups is
    only worth a note
    """

    dtypes: tuple[tuple[str, torch.dtype], ...] | None
    autocast: torch.dtype | None = None
    inside: bool = False
    produced: bool = True

    @property
    def group_dtypes(self) -> dict[str, torch.dtype] | None:
        return None if self.dtypes is None else dict(self.dtypes)

    def lowest(self, sample: Sample) -> torch.dtype:
        """The narrowest dtype in play: what results may be rounded to."""
        dtypes = sample.dtypes_in_play(self.group_dtypes) | (
            {self.autocast} if self.autocast else set()
        )
        return max(dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float32)

    def produced_by_any_trainer(self, sample: Sample) -> bool:
        """Under autocast: not the combination that torch's own layers refuse (inputs wider than the
        weights).
        """
        dtypes = dict(self.dtypes) if self.dtypes is not None else sample.built_dtypes()
        weights = [d for g, d in dtypes.items() if g.startswith(PARAM)]
        inputs = [d for g, d in dtypes.items() if not g.startswith(PARAM)]
        return not any(torch.finfo(i).bits > torch.finfo(w).bits for i in inputs for w in weights)

    def describe(self) -> str:
        if self.dtypes is None:
            dtypes = "as built"
        elif len({d for _, d in self.dtypes}) == 1:
            dtypes = f"all {name(str(self.dtypes[0][1]))}"
        else:
            dtypes = " ".join(f"{group} {name(str(dtype))}" for group, dtype in self.dtypes)
        parts = [dtypes, f"autocast {name(str(self.autocast)) if self.autocast else 'off'}"]
        if self.autocast:
            parts.append("backward inside" if self.inside else "backward outside")
        return ", ".join(parts)


def uniform_setting(
    sample: Sample, dtype: torch.dtype, groups: tuple[str, ...], autocast: torch.dtype | None = None
) -> Setting:
    return Setting(tuple((group, dtype) for group in groups), autocast)


def settings(sample: Sample, groups: tuple[str, ...], *, exhaustive: bool) -> Iterator[Setting]:
    """The combinations to try, the likeliest first.

    groups  the sample's groups, and `param` for a module's own parameters
    exhaustive  also those that only a reference or a contract can judge: every dtype of every group
            under every autocast
    """
    distinct: dict[Any, Setting] = {}
    for setting in _candidate_settings(sample, groups, exhaustive):
        distinct.setdefault((setting.dtypes, setting.autocast), setting)
    for setting in distinct.values():
        yield setting
        if setting.autocast is not None:
            yield replace(setting, inside=True)


def _candidate_settings(
    sample: Sample, groups: tuple[str, ...], exhaustive: bool
) -> Iterator[Setting]:
    low_as_built = set(LOW) & sample.dtypes_in_play(None)
    for autocast in (None, *LOW):
        # not a realistic combination: a model in one low dtype under autocast to the other, which
        # torch's own cat and stack refuse
        if autocast is None or not low_as_built - {autocast}:
            yield Setting(None, autocast)
    for autocast in (None, *LOW):
        yield uniform_setting(sample, torch.float32, groups, autocast)
    for low in LOW:
        yield uniform_setting(sample, low, groups)
        yield uniform_setting(sample, low, groups, low)
    weights = [g for g in groups if g.startswith(PARAM)]
    if weights and len(weights) < len(groups):
        for low in LOW:
            # activations that an autocast op made, weights kept in fp32
            yield Setting(tuple((g, torch.float32 if g in weights else low) for g in groups), low)
            # a model in the low dtype that meets an fp32 norm's output
            yield Setting(
                tuple((g, low if g in weights else torch.float32) for g in groups),
                low,
                produced=not sample.guessed,
            )
    if exhaustive and 1 < len(groups) <= 3:
        for dtypes in itertools.product(TRAINED, repeat=len(groups)):
            for autocast in (None, *LOW):
                yield Setting(tuple(zip(groups, dtypes)), autocast, produced=False)


class Subject:
    """Makes, for every run, a callable and the parameters it owns, in the dtypes asked for."""

    def __init__(self, target: Any) -> None:
        self.target = target
        owner = getattr(target, "__self__", None)
        applied = owner if getattr(target, "__name__", "") == "apply" else target
        is_function = inspect.isclass(applied) and issubclass(applied, torch.autograd.Function)
        if is_function:
            self.function_class: type[torch.autograd.Function] | None = applied
        else:
            self.function_class = None
        self.module = (
            target
            if isinstance(target, nn.Module)
            else owner
            if isinstance(owner, nn.Module)
            else None
        )
        if self.function_class is None and not callable(target):
            raise UsageError(
                f"ampcheck cannot call a {type(target).__name__}",
                fix="pass an autograd.Function, an nn.Module or a callable",
            )
        self.label = self._label()

    def _label(self) -> str:
        if self.function_class is not None:
            return self.function_class.__qualname__
        if self.module is not None:
            return type(self.module).__qualname__
        if isinstance(self.target, functools.partial):
            target = self.target.func
        else:
            target = self.target
        return str(getattr(target, "__qualname__", type(target).__qualname__)).removeprefix(
            "build.<locals>."
        )

    @property
    def location(self) -> Place:
        """Where the target is defined, as far as `inspect` can find it."""
        target = self.function_class or (
            type(self.module) if self.module is not None else self.target
        )
        try:
            file = inspect.getsourcefile(target)
            line: int | None = inspect.getsourcelines(target)[1]
        except (TypeError, OSError):
            code = getattr(target, "__code__", None)
            file, line = (code.co_filename, code.co_firstlineno) if code else (None, None)
        return Place(file=file, line=line, symbol=self.label)

    @property
    def argument_names(self) -> list[str]:
        if self.function_class is not None:
            return parameter_names(
                self.function_class.forward, skip=0 if self.sets_up_context else 1
            )
        # of an operator made with torch.library.custom_op
        written = getattr(self.target, "_init_fn", self.target)
        return parameter_names(
            self.target.forward if isinstance(self.target, nn.Module) else written
        )

    @property
    def sets_up_context(self) -> bool:
        assert self.function_class is not None
        return self.function_class.setup_context is not torch.autograd.Function.setup_context

    @property
    def groups(self) -> tuple[str, ...]:
        """`param` when it owns parameters of its own."""
        if self.module is not None and any(p.is_floating_point() for p in self.module.parameters()):
            return (PARAM,)
        return ()

    def owned_dtypes(self) -> frozenset[torch.dtype]:
        """Dtypes of its own floating parameters, as built."""
        if self.module is not None:
            return frozenset(p.dtype for p in self.module.parameters() if p.is_floating_point())
        return frozenset()

    def instantiate(
        self,
        dtypes: Mapping[str, torch.dtype] | None,
        *,
        widen_to: torch.dtype | None = None,
        frozen: str | None = None,
    ) -> tuple[Callable[..., Any], dict[str, Tensor]]:
        """A callable for one run and the parameters it owns, by name; a module is copied, so that
        no run sees another's.
        """
        if self.function_class is not None:
            function = self.function_class
            # looked up when called: `twin` exchanges it
            return lambda *args, **kwargs: function.apply(*args, **kwargs), {}
        if self.module is None:
            return self.target, {}
        module = copy.deepcopy(self.module)
        if dtypes is not None and PARAM in dtypes:
            module = module.to(dtypes[PARAM])
        if widen_to is not None:
            module = module.to(widen_to)
        module.zero_grad(set_to_none=True)
        parameters: dict[str, Tensor] = {
            n: p for n, p in module.named_parameters() if p.is_floating_point()
        }
        if frozen in parameters:
            parameters[frozen].requires_grad_(False)
        if isinstance(self.target, nn.Module):
            run: Callable[..., Any] = module
        else:
            run = MethodType(self.target.__func__, module)
        return run, parameters

    def shares_parameters(self, module: nn.Module) -> bool:
        """Whether a plain callable holds on to parameters of this very module."""
        parameter_ids = {id(p) for p in module.parameters()}
        return any(id(t) in parameter_ids for t in self._captured_tensors())

    def captured_dtypes(self) -> set[torch.dtype]:
        """Dtypes of the floating tensors a plain callable holds on to (closure, default or partial
        arguments, globals it names).
        """
        return {t.dtype for t in self._captured_tensors() if t.is_floating_point()}

    def _captured_tensors(self) -> Iterator[Tensor]:
        if self.function_class is not None or self.module is not None:
            return iter(())
        return _find_captured_tensors(self.target, depth=3)


def _find_captured_tensors(target: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(target, Tensor):
        yield target
    elif isinstance(target, nn.Module):
        yield from target.parameters()
        yield from target.buffers()
    elif isinstance(target, (list, tuple)):
        for item in target:
            yield from _find_captured_tensors(item, depth)
    elif isinstance(target, Mapping):
        yield from _find_captured_tensors(list(target.values()), depth)
    elif isinstance(target, functools.partial):
        yield from _find_captured_tensors([target.func, target.args, target.keywords], depth)
    elif inspect.ismethod(target) and not inspect.isclass(target.__self__):
        yield from _find_captured_tensors(
            [target.__func__, list(getattr(target.__self__, "__dict__", {}).values())], depth
        )
    elif inspect.isfunction(target) and depth:
        names = target.__code__.co_names
        captured = list(target.__defaults__ or ())
        with suppress(ValueError):  # a variable that is not bound yet
            captured += inspect.getclosurevars(target).nonlocals.values()
        captured += [target.__globals__[n] for n in names if n in target.__globals__]
        for item in captured:
            if (
                isinstance(item, (Tensor, nn.Module, list, tuple, functools.partial))
                or inspect.isfunction(item)
                or inspect.ismethod(item)
            ):
                yield from _find_captured_tensors(item, depth - 1)
