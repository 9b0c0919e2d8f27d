"""Catches kernel launches instead of running them, with the exact signature that Triton's own launcher would have compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .signature import Combination, Reach
from .unwrap import OPTION_NAMES

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
