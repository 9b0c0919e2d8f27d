"""Defines the checked function (`Subject`), the inputs of one call (`Sample`), and the dtype
combinations that a trainer produces (`Setting`). A `Setting` consists of the dtypes of inputs and
parameters, the autocast dtype, and whether backward runs under autocast.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...dtypes import TRAINING_FLOATS, TensorSpec, format_dtype, to_torch
from ...errors import UsageError
from ...finding import Place
from ...ops.contract import OpContract

INPUT = "input"
PARAM = "param"
FIXED = "fixed"
# group -> dtype; None leaves the dtypes of all groups unchanged
GroupDtypes = Mapping[str, torch.dtype] | None
# positional and keyword arguments
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
TRAINED = tuple(map(to_torch, TRAINING_FLOATS))


@dataclass(frozen=True)
class Slot:
    """Describes one tensor of a sample. It contains the name of the tensor, its index in the
    flattened arguments, its group, and whether it requires a gradient. All tensors of a group have
    the same dtype.

    group  `input`, `param`, the letter that a contract uses for a dtype that is not fixed, or
           `fixed` for a tensor that always keeps its dtype
    """

    name: str
    index: int
    group: str
    requires_grad: bool


@dataclass(frozen=True)
class Sample:
    """The arguments of one call. `leaves` contains all values in these arguments as a flat
    sequence. `slots` describes the floating-point tensors in `leaves`.

    tree  the structure of the arguments, from which they are rebuilt
    """

    leaves: tuple[Any, ...]
    tree: Any
    slots: tuple[Slot, ...]
    has_guessed_groups: bool  # whether the groups were guessed from shapes
    # original dtypes of the parameters of the checked function, if it is a module
    parameter_dtypes: frozenset[torch.dtype] = frozenset()
    # whether clones are passed to the function, so that it may write in place
    passes_clones: bool = False

    @property
    def device(self) -> str:
        """Returns the device type of the first tensor."""
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                return leaf.device.type
        return "cpu"

    @property
    def groups(self) -> tuple[str, ...]:
        """Returns the groups whose dtype may change, without duplicates."""
        groups = [slot.group for slot in self.slots]
        return tuple(group for group in dict.fromkeys(groups) if group != FIXED)

    def tensor(self, slot: Slot) -> Tensor:
        """Returns the original tensor that the slot describes."""
        leaf: Tensor = self.leaves[slot.index]
        return leaf

    def built_dtypes(self) -> dict[str, torch.dtype]:
        """Returns the original dtype of each group of tensors, that is, the dtype of its first
        tensor.
        """
        dtypes: dict[str, torch.dtype] = {}
        for slot in self.slots:
            dtypes.setdefault(slot.group, self.tensor(slot).dtype)
        return dtypes

    def dtypes_in_play(self, dtypes: GroupDtypes) -> set[torch.dtype]:
        """Returns all floating-point dtypes that occur in a call if the groups have these dtypes.
        If a group has the dtype None, its tensors keep their original dtypes.
        """
        if dtypes is not None:
            return set(dtypes.values())
        return {self.tensor(slot).dtype for slot in self.slots} | self.parameter_dtypes

    def copy_leaves(
        self,
        dtypes: GroupDtypes,
        *,
        widen_to: torch.dtype | None = None,
        frozen: str | None = None,
    ) -> tuple[list[Any], dict[str, Tensor]]:
        """Returns copies of all values in the arguments. Also returns the copied tensors in a dict
        whose keys are their names. The tensors are cast to the dtypes of their groups. If `dtypes`
        is None, the tensors keep their original dtypes.

        widen_to  the dtype to which each tensor is cast afterwards; the values remain rounded to
                  the dtype of the group
        frozen    the name of a tensor that must not require a gradient in this run
        """
        leaves = list(self.leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[index] = leaf.detach().clone()
        tensors = {}
        for slot in self.slots:
            original = self.tensor(slot)
            if dtypes is None or slot.group == FIXED:
                dtype = original.dtype
            else:
                dtype = dtypes.get(slot.group, original.dtype)
            tensor = original.detach().to(dtype)
            if widen_to is not None:
                tensor = tensor.to(widen_to)
            if tensor.data_ptr() == original.data_ptr():
                tensor = tensor.clone()
            tensor.requires_grad_(slot.requires_grad and slot.name != frozen)
            tensors[slot.name] = tensor
            leaves[slot.index] = tensor
            if self.passes_clones:
                leaves[slot.index] = tensor.clone()
        return leaves, tensors

    def call_arguments(self, leaves: Sequence[Any]) -> Arguments:
        """Builds the positional and keyword arguments of a call from these values."""
        arguments: Arguments = pytree.tree_unflatten(list(leaves), self.tree)
        return arguments

    def with_tensors(self, tensors: Mapping[int, Tensor]) -> Sample:
        """Returns a copy of the sample in which the values at these indices are replaced."""
        leaves = list(self.leaves)
        for index, tensor in tensors.items():
            leaves[index] = tensor
        return replace(self, leaves=tuple(leaves))

    def describe(self) -> str:
        """Returns the tensors as text, such as `x bf16[2 3], weight fp32[3 3]`."""
        descriptions = []
        for slot in self.slots:
            tensor = self.tensor(slot)
            descriptions.append(f"{slot.name} {format_dtype(tensor.dtype)}{list(tensor.shape)}")
        return ", ".join(descriptions)


def read_samples(
    inputs: Any,
    params: Sequence[Any] = (),
    *,
    contract: OpContract | None = None,
    names: Sequence[str] = (),
    owns_parameters: bool = False,
) -> list[Sample]:
    """Creates samples from `inputs`, which may be one tensor, a tuple of arguments, a dict of
    keyword arguments, or a list of these.
    """
    calls = [inputs]
    is_list = isinstance(inputs, list) and bool(inputs)
    if is_list and all(isinstance(item, (tuple, Mapping)) for item in inputs):
        calls = inputs
    samples = [
        _read_sample(call, tuple(params), contract, names, not owns_parameters) for call in calls
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
    """Creates a sample from the arguments of one call."""
    args, kwargs = _split_arguments(item)
    paths, tree = pytree.tree_flatten_with_path(((*args, *params), kwargs))
    leaves = tuple(leaf for _, leaf in paths)
    specs: list[TensorSpec] = []
    if contract:
        names = list(contract.inputs)
        specs = list(contract.inputs.values())
    tensors = {i: leaf for i, leaf in enumerate(leaves) if _is_floating(leaf)}
    # if no tensor requires a gradient, all are treated as if they did
    all_require_grad = grads_by_default and not any(t.requires_grad for t in tensors.values())
    guessed_groups = _guess_groups(list(tensors.values()))
    slots = []
    for i, group in zip(tensors, guessed_groups):
        path, tensor = paths[i]
        position = _position(path)
        if params and position is not None:
            group = PARAM if position >= len(args) else INPUT
        if tensor.dtype not in TRAINED and tensor.dtype != torch.float64:
            group = FIXED  # fp8 and other storage formats
        if position is not None and len(path) == 2 and position < len(specs):
            group = _declared_group(specs[position], group)
        requires_grad = all_require_grad or tensor.requires_grad
        slots.append(Slot(_label(path, names), i, group, requires_grad))
    if not params and not specs:
        slots = _tie_factors(slots)
    groups = {slot.group for slot in slots}
    has_guessed_groups = not params and not specs and len(groups) > 1
    return Sample(leaves, tree, tuple(slots), has_guessed_groups=has_guessed_groups)


# names of the factors of an adapter: lora_A, lora_down, w1_a, hada_w2_b
_FACTOR_NAME = re.compile(r"(?i)^(?:.*[_.])?(?:w\d+_?[ab]|lora_?(?:[ab]|down|up))$")
# names of what else an adapter with such factors has: a whole matrix w1, or a Tucker core t2
_ADAPTER_NAME = re.compile(r"(?i)^(?:.*[_.])?[wt]\d+$")


def _tie_factors(slots: list[Slot]) -> list[Slot]:
    """Puts the matrices of one adapter (such as A and B) into the same group, because adapter
    libraries create them with the same dtype.
    """
    factors = [slot for slot in slots if _FACTOR_NAME.match(slot.name)]
    if len(factors) < 2:
        return slots
    factors += [slot for slot in slots if _ADAPTER_NAME.match(slot.name)]
    group = INPUT if len(factors) == len(slots) else PARAM
    return [replace(slot, group=group) if slot in factors else slot for slot in slots]


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _position(path: Sequence[Any]) -> int | None:
    """Returns the index of the positional argument that contains this value. Returns None if a
    keyword argument contains the value.
    """
    root, argument = path[:2]
    if root.idx != 0:
        return None
    position: int = argument.idx
    return position


def _declared_group(spec: TensorSpec, group: str) -> str:
    """Returns the group that the contract gives to an argument. If the contract allows any dtype
    for the argument, returns `group`.
    """
    if spec.is_free:
        return spec.dtype
    if spec.dtype in ("any", "float"):
        return group
    return FIXED


def _split_arguments(item: Any) -> Arguments:
    """Converts one tensor, a tuple, a list or a dict to (positional arguments, keyword arguments)."""
    if isinstance(item, Mapping):
        return (), dict(item)
    if isinstance(item, (tuple, list)):
        return tuple(item), {}
    return (item,), {}


def _label(path: Sequence[Any], names: Sequence[str]) -> str:
    """Returns the name of a value in the arguments, such as `gate`, `input 2` or `batch['mask']`.
    The name of the value consists of the name of the argument and the keys inside this argument.
    """
    argument, *keys = path[1:]
    index = getattr(argument, "idx", None)
    label = getattr(argument, "key", None)
    if not label:
        if index is not None and index < len(names):
            label = names[index]
        else:
            label = f"input {index}"
    if not keys:
        return str(label)
    return str(label) + pytree.keystr(tuple(keys))


def _guess_groups(tensors: Sequence[Tensor]) -> list[str]:
    """Guesses from dtypes and shapes whether each tensor is an activation or a weight, and returns
    their groups.

    If the tensors have different dtypes, they are grouped by dtype. If all tensors have the same
    dtype, the shapes decide. A tensor whose first dimension is as large as that of the first tensor
    is then an activation. Any other tensor is a weight. (Trainers often keep weights and
    activations in different dtypes.)
    """
    dtypes = list(dict.fromkeys(t.dtype for t in tensors))
    if len(dtypes) > 1:
        further = [f"{PARAM} {i}" for i in range(2, len(dtypes))]
        groups_by_dtype = dict(zip(dtypes, [INPUT, PARAM, *further]))
        return [groups_by_dtype[t.dtype] for t in tensors]
    activations = [t for t in tensors if not isinstance(t, nn.Parameter)]
    leading_size = next((t.shape[0] for t in activations if t.dim()), None)
    groups = []
    for tensor in tensors:
        is_weight = isinstance(tensor, nn.Parameter)
        if tensor.dim() and leading_size is not None and tensor.shape[0] != leading_size:
            is_weight = True
        groups.append(PARAM if is_weight else INPUT)
    return groups


def parameter_names(function: Callable[..., Any], *, skip: int = 0) -> list[str]:
    """Returns the names of the positional parameters. The list is empty if the function has no
    signature, or only `*args`.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    names = []
    for parameter in list(signature.parameters.values())[skip:]:
        if parameter.kind in positional:
            names.append(parameter.name)
    return names


def lengthen(sample: Sample, rows: int) -> Sample | None:
    """Returns a longer sample with at least `rows` rows. The rows are drawn at random from the rows
    of the sample, with repetition. Returns None if no longer sample can be made.

    The random indices select entries of the first dimension. The same indices are applied to the
    first tensor, and to every other tensor with the same first dimension, except weights. So labels
    stay with the rows to which they belong.
    """
    inputs = [sample.tensor(slot) for slot in sample.slots if slot.group != PARAM]
    first = next((tensor for tensor in inputs if tensor.dim()), None)
    if first is None:
        return None
    leading_size = first.shape[0]
    rows_per_index = 1
    if first.dim() > 1:
        elements_per_index = first.numel() // max(1, leading_size)
        rows_per_index = max(1, elements_per_index // max(1, first.shape[-1]))
    draws = -(-rows // rows_per_index)
    if leading_size == 0 or draws <= leading_size:
        return None
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, leading_size, (draws,), generator=generator)
    weights = {slot.index for slot in sample.slots if slot.group == PARAM}
    drawn_tensors = {}
    for i, leaf in enumerate(sample.leaves):
        if i in weights or not isinstance(leaf, Tensor):
            continue
        if leaf.dim() and leaf.shape[0] == leading_size:
            drawn_tensors[i] = leaf.detach()[indices.to(leaf.device)]
    return sample.with_tensors(drawn_tensors)


def count_rows(sample: Sample) -> set[int]:
    """Returns the size of the first dimension of the first input, and the number of rows (vectors
    along the last dimension) in this input.
    """
    inputs = [sample.tensor(slot) for slot in sample.slots if slot.group != PARAM]
    first = next((tensor for tensor in inputs if tensor.dim()), None)
    if first is None:
        return set()
    return {first.shape[0], first.numel() // max(1, first.shape[-1])}


LOW = (torch.bfloat16, torch.float16)  # dtypes of 16 bits


@dataclass(frozen=True)
class Setting:
    """One combination of dtypes and autocast.

    dtypes                   group -> dtype; None leaves the original dtypes
    is_backward_in_autocast  whether backward runs inside the autocast region (trainers run it
                             outside of the region)
    is_produced_by_trainer   whether a trainer is known to produce the combination; faults of other
                             combinations are reported as notes
    """

    dtypes: tuple[tuple[str, torch.dtype], ...] | None
    autocast: torch.dtype | None = None
    is_backward_in_autocast: bool = False
    is_produced_by_trainer: bool = True

    @property
    def group_dtypes(self) -> dict[str, torch.dtype] | None:
        """Returns the dtype of each group, or None if all tensors keep their original dtypes."""
        if self.dtypes is None:
            return None
        return dict(self.dtypes)

    def lowest(self, sample: Sample) -> torch.dtype:
        """Returns the narrowest dtype that occurs in the call. Results may be rounded to this
        dtype.
        """
        dtypes = sample.dtypes_in_play(self.group_dtypes)
        if self.autocast:
            dtypes |= {self.autocast}
        return max(dtypes, key=_step, default=torch.float32)

    def may_come_from_trainer(self, sample: Sample) -> bool:
        """True if a trainer may produce the combination. A trainer may produce a combination if no
        input is wider than a weight. (Torch's layers raise an error for wider inputs under
        autocast.)
        """
        dtypes = self.group_dtypes
        if dtypes is None:
            dtypes = sample.built_dtypes()
        input_bits: list[int] = []
        weight_bits: list[int] = []
        for group, dtype in dtypes.items():
            bits = weight_bits if group.startswith(PARAM) else input_bits
            bits.append(torch.finfo(dtype).bits)
        if not input_bits or not weight_bits:
            return True
        return max(input_bits) <= min(weight_bits)

    def describe(self) -> str:
        if self.dtypes is None:
            dtypes = "as built"
        else:
            names = {group: format_dtype(str(dtype)) for group, dtype in self.dtypes}
            distinct = set(names.values())
            if len(distinct) == 1:
                dtypes = f"all {distinct.pop()}"
            else:
                dtypes = " ".join(f"{group} {label}" for group, label in names.items())
        if not self.autocast:
            return f"{dtypes}, autocast off"
        region = "inside" if self.is_backward_in_autocast else "outside"
        return f"{dtypes}, autocast {format_dtype(str(self.autocast))}, backward {region}"


def _step(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def uniform_setting(
    sample: Sample,
    dtype: torch.dtype,
    groups: tuple[str, ...],
    autocast: torch.dtype | None = None,
) -> Setting:
    """Returns the combination in which all groups have the same dtype."""
    return Setting(tuple((group, dtype) for group in groups), autocast)


def settings(sample: Sample, groups: tuple[str, ...], *, is_exhaustive: bool) -> Iterator[Setting]:
    """Yields the combinations to try, the most probable first.

    groups         the groups of the sample, and `param` if the checked function is a module with
                   parameters
    is_exhaustive  whether to yield every dtype of every group under every autocast dtype too; only
                   a reference or a contract can tell whether the function must support such
                   combinations
    """
    distinct: dict[Any, Setting] = {}
    for setting in _candidate_settings(sample, groups, is_exhaustive):
        distinct.setdefault((setting.dtypes, setting.autocast), setting)
    for setting in distinct.values():
        yield setting
        if setting.autocast is not None:
            yield replace(setting, is_backward_in_autocast=True)


def _candidate_settings(
    sample: Sample, groups: tuple[str, ...], is_exhaustive: bool
) -> Iterator[Setting]:
    """Yields the combinations in the order in which they should be tried. The same combination may
    occur more than once.
    """
    low_as_built = set(LOW) & sample.dtypes_in_play(None)
    autocasts = (None, *LOW)
    for autocast in autocasts:
        # a model in one low dtype under autocast to the other is not realistic: torch's cat and
        # stack reject it
        if autocast is None or not low_as_built - {autocast}:
            yield Setting(None, autocast)
    for autocast in autocasts:
        yield uniform_setting(sample, torch.float32, groups, autocast)
    for low in LOW:
        yield uniform_setting(sample, low, groups)
        yield uniform_setting(sample, low, groups, low)
    weights = [group for group in groups if group.startswith(PARAM)]
    if weights and len(weights) < len(groups):
        for low in LOW:
            # activations that come from an autocast operator, and weights that are kept in fp32
            yield _split_setting(groups, inputs=low, weights=torch.float32, autocast=low)
            # a model in the low dtype that gets the output of an fp32 norm
            setting = _split_setting(groups, inputs=torch.float32, weights=low, autocast=low)
            yield replace(setting, is_produced_by_trainer=not sample.has_guessed_groups)
    if is_exhaustive and 1 < len(groups) <= 3:
        for dtypes in itertools.product(TRAINED, repeat=len(groups)):
            group_dtypes = tuple(zip(groups, dtypes))
            for autocast in autocasts:
                yield Setting(group_dtypes, autocast, is_produced_by_trainer=False)


def _split_setting(
    groups: tuple[str, ...],
    *,
    inputs: torch.dtype,
    weights: torch.dtype,
    autocast: torch.dtype,
) -> Setting:
    """Returns the combination in which weights have the dtype `weights`, and all other tensors have
    the dtype `inputs`.
    """
    dtypes = []
    for group in groups:
        dtype = weights if group.startswith(PARAM) else inputs
        dtypes.append((group, dtype))
    return Setting(tuple(dtypes), autocast)


class Subject:
    """The checked function. For every run, the subject creates a callable that has the function's
    parameters in the requested dtypes.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        owner = getattr(target, "__self__", None)
        applied = target
        if getattr(target, "__name__", "") == "apply":
            applied = owner
        self.function_class: type[torch.autograd.Function] | None = None
        if inspect.isclass(applied) and issubclass(applied, torch.autograd.Function):
            self.function_class = applied
        self.module: nn.Module | None = None
        if isinstance(target, nn.Module):
            self.module = target
        elif isinstance(owner, nn.Module):
            self.module = owner
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
        target = self.target
        if isinstance(target, functools.partial):
            target = target.func
        qualified_name = getattr(target, "__qualname__", type(target).__qualname__)
        return str(qualified_name).removeprefix("build.<locals>.")

    @property
    def location(self) -> Place:
        """Returns the place at which the checked function is defined, if `inspect` can find it."""
        target = self.target
        if self.function_class is not None:
            target = self.function_class
        elif self.module is not None:
            target = type(self.module)
        file: str | None = None
        line: int | None = None
        try:
            file = inspect.getsourcefile(target)
            line = inspect.getsourcelines(target)[1]
        except (TypeError, OSError):
            file = None
            code = getattr(target, "__code__", None)
            if code:
                file = code.co_filename
                line = code.co_firstlineno
        return Place(file=file, line=line, symbol=self.label)

    @property
    def argument_names(self) -> list[str]:
        """Returns the names of the positional parameters, as far as the signature contains them."""
        if self.function_class is not None:
            # without setup_context the first parameter is ctx
            skip = 0 if self.sets_up_context else 1
            return parameter_names(self.function_class.forward, skip=skip)
        if isinstance(self.target, nn.Module):
            return parameter_names(self.target.forward)
        # for an operator of torch.library.custom_op, the function from which it was created
        return parameter_names(getattr(self.target, "_init_fn", self.target))

    @property
    def sets_up_context(self) -> bool:
        """True if the Function has a method `setup_context`. A Function with this method has a
        forward without the parameter ctx.
        """
        assert self.function_class is not None
        return self.function_class.setup_context is not torch.autograd.Function.setup_context

    @property
    def groups(self) -> tuple[str, ...]:
        """Returns the tuple (`param`,) if the function has floating-point parameters, otherwise an
        empty tuple.
        """
        if self.parameter_dtypes():
            return (PARAM,)
        return ()

    def parameter_dtypes(self) -> frozenset[torch.dtype]:
        """Returns the original dtypes of the function's floating parameters."""
        if self.module is None:
            return frozenset()
        dtypes = {parameter.dtype for parameter in self.module.parameters()}
        return frozenset(dtype for dtype in dtypes if dtype.is_floating_point)

    def instantiate(
        self,
        dtypes: GroupDtypes,
        *,
        widen_to: torch.dtype | None = None,
        frozen: str | None = None,
    ) -> tuple[Callable[..., Any], dict[str, Tensor]]:
        """Returns a callable for one run, and the parameters of this callable in a dict whose keys
        are their names. A module is copied, so that runs do not affect each other.
        """
        if self.function_class is not None:
            function = self.function_class
            # `apply` is looked up when it is called, since `plain_functions` replaces it
            return lambda *args, **kwargs: function.apply(*args, **kwargs), {}
        if self.module is None:
            return self.target, {}
        module = copy.deepcopy(self.module)
        if dtypes is not None and PARAM in dtypes:
            module = module.to(dtypes[PARAM])
        if widen_to is not None:
            module = module.to(widen_to)
        module.zero_grad(set_to_none=True)
        parameters: dict[str, Tensor] = {}
        for parameter_name, parameter in module.named_parameters():
            if parameter.is_floating_point():
                parameters[parameter_name] = parameter
        if frozen in parameters:
            parameters[frozen].requires_grad_(False)
        if isinstance(self.target, nn.Module):
            run: Callable[..., Any] = module
        else:
            run = MethodType(self.target.__func__, module)
        return run, parameters

    def shares_parameters(self, module: nn.Module) -> bool:
        """True if a plain callable refers to parameters of this module."""
        parameter_ids = {id(p) for p in module.parameters()}
        return any(id(t) in parameter_ids for t in self.captured_tensors())

    def captured_dtypes(self) -> set[torch.dtype]:
        """Returns the dtypes of the floating-point tensors to which a plain callable refers. The
        callable may refer to such tensors in its closure, its default arguments, the arguments of a
        partial function, or its globals. For an autograd Function the result is empty.
        """
        if self.function_class is not None:
            return set()
        return {t.dtype for t in self.captured_tensors() if t.is_floating_point()}

    def captured_tensors(self) -> Iterator[Tensor]:
        """Yields the tensors to which a plain callable or the methods of an autograd Function refer.
        For a module, nothing is yielded.
        """
        if self.module is not None:
            return iter(())
        targets = [self.target]
        if self.function_class is not None:
            methods = ("forward", "setup_context", "backward")
            targets += [getattr(self.function_class, method) for method in methods]
        return _find_captured_tensors(targets, depth=3)


def _find_captured_tensors(target: Any, depth: int) -> Iterator[Tensor]:
    """Yields the tensors to which an object refers, directly or through at most `depth` functions."""
    if isinstance(target, Tensor):
        yield target
        return
    if isinstance(target, nn.Module):
        yield from target.parameters()
        yield from target.buffers()
        return
    if inspect.isfunction(target):
        if depth == 0:
            return
        depth -= 1
        objects = _captured_by_function(target)
    else:
        objects = _captured_objects(target)
    for item in objects:
        yield from _find_captured_tensors(item, depth)


def _captured_objects(target: Any) -> list[Any]:
    """Returns the objects to which a container, a partial function or a bound method refers."""
    if isinstance(target, (list, tuple)):
        return list(target)
    if isinstance(target, Mapping):
        return list(target.values())
    if isinstance(target, functools.partial):
        return [target.func, target.args, target.keywords]
    if inspect.ismethod(target) and not inspect.isclass(target.__self__):
        attributes = getattr(target.__self__, "__dict__", {})
        return [target.__func__, attributes]
    return []


def _captured_by_function(function: FunctionType) -> list[Any]:
    """Returns defaults, closure variables and globals of a function that may contain tensors."""
    objects = list(function.__defaults__ or ())
    with suppress(ValueError):  # a variable that is not bound yet
        objects += inspect.getclosurevars(function).nonlocals.values()
    for global_name in function.__code__.co_names:
        if global_name in function.__globals__:
            objects.append(function.__globals__[global_name])
    containers = (Tensor, nn.Module, list, tuple, functools.partial)
    captured = []
    for item in objects:
        if isinstance(item, containers) or inspect.isfunction(item) or inspect.ismethod(item):
            captured.append(item)
    return captured
