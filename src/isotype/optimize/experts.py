"""Replaces the forward of the stacked experts of a mixture-of-experts layer. In transformers, the
experts of all model families take the same arguments, so one new forward can replace the forwards
of all families.

PEFT wraps the experts once for each stack that has an adapter. If there are adapters, the new
forward is installed on the outermost of PEFT's wrappers. It reads A and B of each wrapper in every
call.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..instance_method import INSTALLED_KEY, Placement, install_forward
from ..lora.attach import active_adapter, has_hooks, is_expert_stack, refuse_packed_adapter
from ..ops.experts import Adapter, Clamped, experts
from ..ops.experts.activation import Activation
from ..ops.packed import StackState
from .instances import (
    cache_by_module_kind,
    computes_same_in_train_and_eval,
    make_placement,
    make_probe_copy,
    replacement_blocker,
)

PART_NAME = "experts"  # the value of `Placement.part`
# sizes of a probe: number of experts, of hidden features and of inner features
_EXPERTS = 3
_HIDDEN = 6
_INNER = 10
_SIZES = (
    {"num_experts": _EXPERTS}
    | dict.fromkeys(("hidden_dim", "hidden_size"), _HIDDEN)
    | dict.fromkeys(("intermediate_dim", "intermediate_size"), _INNER)
)


@dataclass(frozen=True, slots=True)
class ExpertsSettings:
    """The names and layout of a module's stacks.

    up             the name of the stack that computes gate and up
    is_transposed  whether the stacks are stored as [in out]
    activation     None if the op calls the module's own activation function
    """

    up: str
    has_bias: bool
    is_transposed: bool
    activation: Activation | None


def unwrap_experts(module: Any) -> tuple[dict[str, Any], Any]:
    """Returns a mapping from the name of each stack to its PEFT wrapper, and the experts inside the
    wrappers.
    """
    wrappers = {}
    while is_expert_stack(module):
        wrappers[module.parameter_name] = module
        module = module.base_layer
    return wrappers, module


def has_stacks(module: nn.Module) -> bool:
    parameters = module._parameters.values() if hasattr(module, "num_experts") else ()
    return any(p is not None and (p.dim() == 3 or _packed_state(p) is not None) for p in parameters)


def _packed_state(stack: Tensor) -> StackState | None:
    """Returns the quantisation state of a packed stack, or None for a dense stack."""
    state = getattr(stack, "quant_state", None)
    return state if isinstance(state, StackState) else None


def _packed_state_on_device(stack: Any) -> StackState | None:
    """Returns `_packed_state` on the stack's device. This is needed because moving a module moves
    the packed bytes but not their scales.
    """
    if _packed_state(stack) is not None:
        stack.quant_state = stack.quant_state.to_device(stack.device)
    return _packed_state(stack)


def is_candidate(module: nn.Module) -> bool:
    """Whether this module contains the stacked experts of a mixture-of-experts layer. It may also
    be one of PEFT's wrappers around them. The caller skips the modules inside a wrapper.
    """
    return has_stacks(unwrap_experts(module)[1])


@cache_by_module_kind
def recognise(module: Any) -> ExpertsSettings | str:
    """Returns the settings with which the op computes the same output as these experts for a small
    test input. If no settings give the same output, returns a text with the reason.
    """
    if not all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed")):
        return "its experts do not have the attributes of transformers' experts"
    up = "gate_up_proj" if module.has_gate else "up_proj"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each expert"
    transposed = module.is_transposed
    biased = module.has_bias
    if any(
        not p.is_floating_point() and _packed_state(p) is None
        for p in module._parameters.values()
        if p is not None
    ):
        return "its weights are packed"
    gate = getattr(module, "act_fn", None)
    if isinstance(gate, nn.Module) and any(p.requires_grad for p in gate.parameters()):
        return "its activation has trained parameters"
    width = 2 * _INNER if module.has_gate else _INNER
    sizes: dict[str, tuple[int, ...]] = {up: (_HIDDEN, width), "down_proj": (_INNER, _HIDDEN)}
    shapes = {
        name: (_EXPERTS, *(size if transposed else size[::-1])) for name, size in sizes.items()
    }
    if biased:
        shapes |= {f"{name}_bias": (_EXPERTS, size[1]) for name, size in sizes.items()}
    if shapes.keys() != {name for name, p in module._parameters.items() if p is not None}:
        return "it has other weights than two stacks"
    generator = torch.Generator().manual_seed(0)
    probe_parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in shapes.items()
    }
    probe: Any = make_probe_copy(module, {}, probe_parameters)
    for name, size in _SIZES.items():
        if hasattr(probe, name):
            setattr(probe, name, size)
    x = torch.randn(7, _HIDDEN, generator=generator, dtype=torch.float64)
    index = torch.stack([torch.randperm(_EXPERTS, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator, dtype=torch.float64)
    original_forward = inspect.unwrap(type(module).forward)
    for activation in _activations(module):
        settings = ExpertsSettings(up, biased, transposed, activation)
        if computes_same_in_train_and_eval(
            probe,
            lambda: original_forward(probe, x, index, weights),
            partial(compute_experts, probe, {}, x, index, weights, settings),
            x,
            weights,
        ):
            return settings
    return "for random inputs, its output differs from that of stacked experts"


def _activations(module: Any) -> list[Activation | None]:
    if not module.has_gate:
        return [None]
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        return [Clamped(float(module.alpha), float(module.limit)), None]
    return ["silu", "gelu", "gelu_tanh", None]


def compute_experts(
    module: Any,
    adapters: dict[str, Adapter],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    settings: ExpertsSettings,
) -> Tensor:
    """Runs the op with this module's weights."""
    parameters = module._parameters
    if settings.activation is not None:
        activation = settings.activation
    elif module.has_gate:
        activation = module._apply_gate
    else:
        activation = module.act_fn
    return experts(
        x,
        index,
        weights,
        parameters[settings.up],
        parameters["down_proj"],
        up_bias=parameters[f"{settings.up}_bias"] if settings.has_bias else None,
        down_bias=parameters["down_proj_bias"] if settings.has_bias else None,
        up_adapter=adapters.get(settings.up),
        down_adapter=adapters.get("down_proj"),
        up_state=_packed_state_on_device(parameters[settings.up]),
        down_state=_packed_state_on_device(parameters["down_proj"]),
        activation=activation,
        transposed=settings.is_transposed,
    )


def read_adapter(wrapper: Any) -> Adapter:
    """Reads a wrapper's adapter. PEFT stores A as [(E R) N] and B as [O (R E)]. E is the number of
    experts, and R the rank.
    """
    name = active_adapter(wrapper)
    a = wrapper.lora_A[name].weight
    b = wrapper.lora_B[name].weight
    count = wrapper.num_experts
    return Adapter(
        a.view(count, -1, a.shape[-1]),
        b.view(b.shape[0], -1, count).permute(2, 0, 1),
        float(wrapper.scaling[name]),
    )


def experts_blocker(wrappers: dict[str, Any], module: Any, settings: ExpertsSettings) -> str | None:
    """Returns the reason why PEFT's or transformers' code must run for these experts in their
    current state. Returns None if the op can run.
    """
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are divided over several processes"
    for part in (*wrappers.values(), module):
        if has_hooks(part):
            return "a hook on the experts"
    for name, wrapper in wrappers.items():
        if name not in (settings.up, "down_proj"):
            return f"an adapter on {name}"
        if wrapper.merged_adapters:
            return "the adapter is merged into the weight"
        if not wrapper._disable_adapters and active_adapter(wrapper) is None:
            if len(wrapper.active_adapters) > 1:
                return "several adapters are active"
            return "no active adapter"
    return None


def experts_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    settings: ExpertsSettings = self.__dict__[INSTALLED_KEY][0]
    fits = (
        len(args) == 2
        and not kwargs
        and hidden_states.dim() == 2
        and not torch.compiler.is_dynamo_compiling()
    )
    wrappers, module = unwrap_experts(self)
    blocker = experts_blocker(wrappers, module, settings)
    if blocker is not None and wrappers and _packed_state(module.down_proj) is not None:
        refuse_packed_adapter(blocker)
    if not fits or blocker is not None:
        output: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return output
    adapters = {
        name: read_adapter(wrapper)
        for name, wrapper in wrappers.items()
        if not wrapper._disable_adapters
    }
    return compute_experts(module, adapters, hidden_states, args[0], args[1], settings)


def packed_forward(self: Any, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Replaces the forward of transformers' stacked experts if their weights are packed
    (quantised). It is installed when the experts are loaded.

    hidden_states  F[... K]
    index          int[... C], the experts of each token
    weights        F[... C], the weights of these experts in the sum
    ->             F[... K]
    """
    x_TK = hidden_states.reshape(-1, hidden_states.shape[-1])
    settings = ExpertsSettings("gate_up_proj", self.has_bias, self.is_transposed, None)
    total = compute_experts(
        self, {}, x_TK, index.reshape(len(x_TK), -1), weights.reshape(len(x_TK), -1), settings
    )
    return total.view(hidden_states.shape)


def place_experts(path: str, module: Any, *, branch_fp32: bool) -> Placement:
    """Installs the op on the experts, or on their outermost wrapper, if it computes the same
    output.
    """
    wrappers, base = unwrap_experts(module)
    replaceable = [  # `packed_forward` does not belong to another library
        m
        for m in (*wrappers.values(), base)
        if INSTALLED_KEY in vars(m)
        or getattr(vars(m).get("forward"), "function", None) is not packed_forward
    ]
    settings_or_reason = next(
        (blocker for part in replaceable if (blocker := replacement_blocker(part)) is not None),
        None,
    ) or recognise(base)
    if not isinstance(settings_or_reason, str):
        settings_or_reason = (
            experts_blocker(wrappers, base, settings_or_reason) or settings_or_reason
        )
    if isinstance(settings_or_reason, str):
        return make_placement(PART_NAME, path, base, None, settings_or_reason)
    install_forward(module, experts_forward, settings_or_reason)
    notes = [f"with LoRA on {' and '.join(sorted(wrappers))}"] if wrappers else []
    if wrappers and branch_fp32:
        notes.append(
            "lora_branch: fp32 does not reach adapters on experts: they have the products' dtype,"
            " as in PEFT"
        )
    return make_placement(PART_NAME, path, base, "experts", "; ".join(notes))
