"""A wrapper called with CPU tensors of every input dtype: the kernels it reaches, with the signatures that Triton's launcher would compile.

Launches are caught instead of run (`trap_launches`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from .check import Report, check_combinations
from .signature import DEFAULT, OPTION_NAMES, Combination, Reach, parse_target, require_triton

MOST_CONFIGURATIONS = 8  # of one autotuned kernel: the first configurations differ as much as the last


@dataclass
class Launch:
    """One `kernel[grid](...)`: the function, its arguments as given, and the configuration chosen by autotuning."""

    function: Any
    args: tuple
    kwargs: dict[str, Any]

    def combination(self, target: Any, label: str, reach: Reach = Reach.GIVEN) -> Combination:
        """What Triton's launcher makes of the arguments: types, constexprs (also an integer 1 and None), divisibility."""
        from triton._utils import find_paths_if, get_iterable_path
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(target)
        names = list(self.function.arg_names)
        bind = create_function_from_signature(self.function.signature, self.function.params, backend)
        options = {k: v for k, v in self.kwargs.items() if k in OPTION_NAMES and k not in names}
        kwargs = {k: _stand_in(v) for k, v in self.kwargs.items() if k in names}
        bound, specialization, _ = bind(*(_stand_in(a) for a in self.args), **kwargs)
        types = [kind for kind, _ in specialization]
        constant = find_paths_if(types, lambda _, kind: kind == "constexpr")
        values = list(bound.values())
        known = ["" if kind == "constexpr" else value for kind, value in specialization]
        described = find_paths_if(known, lambda _, value: isinstance(value, str))
        return Combination(
            label,
            dict(zip(names, types)),
            {path: get_iterable_path(values, path) for path in constant},
            {path: backend.parse_attr(get_iterable_path(known, path)) for path in described},
            options,
            reach,
        )


def _stand_in(value: Any) -> Any:
    """A tensor as Triton's launcher sees it: a dtype and an aligned pointer."""
    import torch
    from triton.runtime.jit import MockTensor

    if isinstance(value, torch.Tensor):
        return MockTensor(value.dtype)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_stand_in(v) for v in value)
    return value


class _NotRun:
    """What a trapped launch returns: code that reads a compiled kernel's figures gets modest ones."""

    n_regs, n_spills, n_max_threads = 32, 0, 1024

    def __init__(self) -> None:
        from types import SimpleNamespace

        self.metadata = SimpleNamespace(shared=0, num_warps=4, num_stages=2, num_ctas=1)
        self.asm: dict[str, str] = {}

    def _init_handles(self) -> None:
        pass

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self


@dataclass
class Trap:
    """The launches caught so far, and notes on what could not be followed."""

    launches: list[Launch] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@contextlib.contextmanager
def trap_launches() -> Iterator[Trap]:
    """No kernel runs inside; every launch, for every autotuning configuration, is kept."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    trap = Trap()
    run, tuned_run = JITFunction.run, Autotuner.run

    def trapped(function: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        trap.launches.append(Launch(function, args, kwargs))
        return _NotRun()

    def trapped_tuned(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, args))
        try:
            configs = list(tuner.prune_configs(kwargs))
        except Exception as error:
            trap.remarks.append(
                f"{getattr(tuner.base_fn, '__name__', 'a kernel')}: its pruning of configurations failed ({error}); the first ones are used"
            )
            configs = list(tuner.configs)
        result: Any = None
        for config in configs[:MOST_CONFIGURATIONS]:
            result = tuner.fn.run(*args, **{**kwargs, **_all_kwargs(config)})
        tuner.nargs = None
        return result

    JITFunction.run, Autotuner.run = trapped, trapped_tuned
    try:
        yield trap
    finally:
        JITFunction.run, Autotuner.run = run, tuned_run


def _all_kwargs(config: Any) -> Mapping[str, Any]:
    return {**config.kwargs, **{n: getattr(config, n, None) for n in OPTION_NAMES if getattr(config, n, None) is not None}}


WORDS = ("fp32", "bf16", "fp16")


@dataclass
class Reached:
    """A kernel and the combinations in which calls launched it."""

    function: Any
    combinations: list[Combination] = field(default_factory=list)


@dataclass
class Calls:
    """What calling a wrapper showed.

    refused  label -> the wrapper's own error: it refuses that combination, which is its right
    """

    reached: dict[int, Reached] = field(default_factory=dict)
    tried: int = 0
    launches: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def _leaves(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _mapped(v, change) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(v, change) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(v, change) for v in value)
    return value


def _cast(value: Any, words: Sequence[str]) -> Any:
    """The inputs with float tensors, in order of appearance, in these dtypes; a tensor given twice stays one tensor."""
    from ...dtypes import to_torch

    queue, made = iter(words), {}

    def change(tensor: Any) -> Any:
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        word = next(queue)
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach().to(to_torch(word), copy=True).requires_grad_(tensor.requires_grad or tensor.is_leaf)
        return made[id(tensor)]

    return _mapped(value, change)


def input_variants(inputs: Any) -> Iterator[tuple[str, Reach, list[str]]]:
    """First all float tensors in one dtype, then the dtypes as given, then each tensor alone in another dtype than bf16."""
    from ...dtypes import name

    floats = [t for t in _leaves(inputs) if t.is_floating_point()]
    own = [name(t.dtype) for t in floats]
    yield "inputs as given", Reach.GIVEN, own
    alike = len(set(own)) <= 1  # inputs of several dtypes are meant so: their roles are the author's
    for word in WORDS:
        yield f"{word} inputs", Reach.GIVEN if alike else Reach.MIXED, [word] * len(floats)
    if len(floats) > 1:
        for i in range(len(floats)):
            for word in ("fp32", "fp16"):
                yield f"bf16 inputs, float tensor {i} {word}", Reach.MIXED, [word if i == j else "bf16" for j in range(len(floats))]


def call_trapped(function: Callable[..., Any], inputs: Any, target: Any, *, backward: bool = True) -> Calls:
    """Calls `function(*inputs)` (or `**inputs`) in every dtype, and backward where a gradient can be asked for."""
    import torch

    calls = Calls()
    if hasattr(function, "forward") and hasattr(function, "apply") and isinstance(function, type):
        function = getattr(function, "apply")  # noqa: B009  an autograd.Function
    for label, reach, words in input_variants(inputs):
        given = _cast(inputs, words)
        one = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
        if isinstance(one, torch.nn.Module) and words and label != "inputs as given":
            from ...dtypes import to_torch

            one = one.to(to_torch(max(set(words), key=words.count)))
        calls.tried += 1
        with Recording(calls, target, label, reach):
            try:
                result = one(**given) if isinstance(given, dict) else one(*given)
                if backward:
                    _backward(result)
            except Exception as error:
                calls.refused[label] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return calls


class Recording:
    """Inside, launches are trapped on a pretended GPU; on leaving, `calls` holds the combinations they have."""

    def __init__(self, calls: Calls, target: Any, label: str, reach: Reach = Reach.GIVEN) -> None:
        self.calls, self.target, self.label, self.reach = calls, target, label, reach
        self._stack = ExitStack()

    def __enter__(self) -> Recording:
        import torch._dynamo  # noqa: F401  its table of torch's functions must hold the real ones, not the pretended ones

        from .pretend import pretend_gpu

        self.trap = self._stack.enter_context(trap_launches())
        self._stack.enter_context(pretend_gpu(self.target))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)
        calls, trap = self.calls, self.trap
        calls.launches += len(trap.launches)
        calls.remarks += trap.remarks
        for launch in trap.launches:
            name = launch.function.__name__
            try:
                combination = launch.combination(self.target, self.label, self.reach)
            except Exception as error:
                calls.remarks.append(f"{name}: Triton refuses the arguments of a launch: {' '.join(str(error).split())[:200]}")
                continue
            calls.reached.setdefault(id(launch.function), Reached(launch.function)).combinations.append(combination)
        calls.remarks = list(dict.fromkeys(calls.remarks))


def _backward(result: Any) -> None:
    import torch

    outputs = [t for t in _leaves(result) if t.requires_grad and t.is_floating_point()]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def several(inputs: Any) -> list[Any]:
    """The calls that `inputs` stands for: a list whose items are tuples or dicts is several, anything else is one."""
    import torch

    if isinstance(inputs, list) and inputs and all(isinstance(i, (tuple, dict)) for i in inputs):
        return inputs
    if inputs is None:
        return [()]
    return [(inputs,)] if isinstance(inputs, torch.Tensor) else [inputs]


def check_wrapper(
    function: Callable[..., Any], inputs: Any, targets: Sequence[str | int] = (DEFAULT,), *, backward: bool = True, binary: bool = False
) -> Report:
    """Exact signatures, constexprs, autotuning configurations and heuristics, as the wrapper's own launches have them."""
    require_triton()
    return check_reached(call_trapped(function, inputs, parse_target(targets[0]), backward=backward), targets, binary=binary)


def check_reached(calls: Calls, targets: Sequence[str | int], *, binary: bool = False) -> Report:
    result = Report(launches=calls.launches, refused=calls.refused, remarks=list(calls.remarks))
    for reached in calls.reached.values():
        result.add(check_combinations(reached.function, reached.combinations, targets, binary=binary))
    return result
