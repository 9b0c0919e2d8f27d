"""A wrapper called for every input dtype while its launches are trapped: the kernels it reaches, with the signatures it gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from .signature import Combination, Reach

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


def call_trapped(function: Callable[..., Any], inputs: Any, target: Any, *, backward: bool = True, mixed: bool = True) -> Calls:
    """Calls `function(*inputs)` (or `**inputs`) in every dtype, and backward where a gradient can be asked for."""
    import torch

    calls = Calls()
    if hasattr(function, "forward") and hasattr(function, "apply") and isinstance(function, type):
        function = getattr(function, "apply")  # noqa: B009  an autograd.Function
    for label, reach, words in input_variants(inputs):
        if reach == Reach.MIXED and not mixed:
            continue
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
        from .trap import trap_launches

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
