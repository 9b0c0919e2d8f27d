"""AC026: a hand-written operator whose output's dtype another operand decides, or whose fake kernel gives another dtype.

The wrapper of a kernel allocates its output with `dtype=weight.dtype`: fp32 activations come back in the weight's bf16, where PyTorch's own
arithmetic promotes. A custom operator is seen by the compiler through its fake kernel; what that says of the dtype is what compiled code
allocates and casts by.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...dtypes import name
from ...finding import Place, Severity
from .attempt import Outcome, attempt
from .fault import Fault, fault, method_place, owner_of_method
from .numerics import Numerics
from .samples import PARAM
from .settings import Setting

_TORCHS = ("aten", "prim", "prims", "profiler", "inductor", "_c10d_functional", "c10d", "quantized")


class _Operators(TorchDispatchMode):
    """Calls each operator that is not torch's once more on fake tensors; differing: operator, its dtypes and the fake ones."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.differing: list[tuple[Any, list[torch.dtype], list[torch.dtype]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in _TORCHS:
            return func(*args, **(kwargs or {}))
        fakes = FakeTensorMode()
        given = pytree.tree_map_only(Tensor, fakes.from_tensor, (args, dict(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        self.seen.append(func)
        try:
            with fakes:
                fake = func(*given[0], **given[1])
        except Exception:  # no fake kernel, or one that does not run: the compiler says that itself
            return result
        real, pretended = ([t.dtype for t in pytree.tree_leaves(r) if isinstance(t, Tensor)] for r in (result, fake))
        if real != pretended and len(real) == len(pretended):
            self.differing.append((func, real, pretended))
        return result


def operator_dtypes(numerics: Numerics, ran: Mapping[Setting, Outcome]) -> list[Fault]:
    """Looks at the combinations that ran, and at fp32 activations with bf16 weights, as an fp32 norm makes them."""
    subject, sample = numerics.subject, numerics.sample
    seen, mixed = _Operators(), _wide_activations(numerics)
    outcome = Outcome()
    for setting in [*(s for s in ran if s.autocast is None and not s.wrap), *([mixed] if mixed is not None else [])]:
        if setting is not mixed and outcome.ran and outcome.values and not seen.seen:
            continue  # no operator of its own: the first combination has shown that
        outcome = attempt(subject, sample, setting, around=lambda: seen, forward_only=True)
        if seen.differing:
            return [_of_a_fake_kernel(numerics, setting, *seen.differing[0])]
        if not seen.seen and not outcome.functions and outcome.ran:
            return []
    if mixed is None or numerics.plain is not None or not outcome.ran:
        return []
    weights = {t.dtype for t in outcome.tensors.values()} - {torch.float32}
    wide = [outcome.tensors[s.name] for s in sample.slots if outcome.tensors[s.name].dtype == torch.float32]
    for tensor in outcome.values:
        if tensor.dtype in weights and any(tensor.shape == a.shape for a in wide):
            place = subject.place
            if outcome.functions:
                place = method_place(outcome.functions[0], "forward", owner_of_method(outcome.functions[0], "forward"))
            low = name(str(tensor.dtype))
            return [
                fault(
                    "AC026",
                    f"{place.symbol} returns {low} for fp32 activations: its output's dtype is the weight's",
                    place,
                    f"the output is allocated in the dtype of another operand than the one that it has the shape of: where an fp32 norm or "
                    f"residual stream meets {low} weights, what comes back is rounded to {low}, and PyTorch's own arithmetic would promote",
                    "allocate it like the activation: torch.empty_like(x), or in torch.promote_types(x.dtype, weight.dtype)",
                    Severity.WARNING,
                    observed=mixed.describe(),
                )
            ]
    return []


def _wide_activations(numerics: Numerics) -> Setting | None:
    groups = tuple(dict.fromkeys((*numerics.sample.groups, *numerics.subject.groups)))
    weights = [g for g in groups if g.startswith(PARAM)]
    if not weights or len(weights) == len(groups):
        return None
    return Setting(tuple((g, torch.bfloat16 if g in weights else torch.float32) for g in groups), produced=False)


def _of_a_fake_kernel(numerics: Numerics, setting: Setting, operator: Any, real: list[torch.dtype], fake: list[torch.dtype]) -> Fault:
    written = OPDEFS.get(operator._schema.name)
    place = numerics.subject.place
    if written is not None:
        lines, first = inspect.getsourcelines(written._init_fn)
        line = first + next(i for i, text in enumerate(lines) if text.lstrip().startswith("def "))
        place = Place(file=inspect.getsourcefile(written._init_fn), line=line, symbol=operator._schema.name)
    got, said = (", ".join(name(str(d)) for d in dtypes) for dtypes in (real, fake))
    return fault(
        "AC026",
        f"{operator._schema.name} returns {got}, and its fake kernel says {said}",
        place,
        "a compiler sees the fake kernel only: what follows is compiled for a dtype that does not come, and differs from eager",
        "make the outputs alike in both: the same dtype expression in the operator and in register_fake",
        observed=setting.describe(),
    )
