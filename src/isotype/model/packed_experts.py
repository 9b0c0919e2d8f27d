"""Packed experts of a checkpoint: stacked in its file (gpt-oss), or one linear layer each (Qwen3-MoE, DeepSeek).

transformers' code has stacks of them, [E O K]. Here a stack stays packed: the tensors of every expert, one behind the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..instance_method import InstanceMethod
from ..lora.quantised import PackedWeight
from ..ops.packed import StackState
from ..ops.packed.formats import Layout
from ..ops.packed.recognise import OF_ACTIVATIONS, Part, recognise, state_of
from ..optimize.experts import packed_forward
from ..precision.packing import Packing

_SEPARATE = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)$")
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PLAN = "_isotype_packed"
_DENSE = "a base that is not packed"


def wait_for_experts(
    model: Any, packed: Mapping[str, Mapping[str, Part]], names: Mapping[str, Part], packing: Packing, where: str
) -> set[str]:
    """Gives each mixture's experts parameters that wait for the file's packed tensors, in the place of their stacks.

    packed  owner -> its tensors, of layers
    names   every tensor of the files
    ->      the owners that are experts
    Raises  UsageError for a mixture whose code is not transformers' stacked experts
    """
    taken: set[str] = set()
    for full in sorted(names):
        path, _, name = full.rpartition(".")
        if name == "gate_up_proj_blocks":
            _wait_for_blocks(_experts(model, path, where), path, names, where)
            taken.add(path)
    separate: dict[str, list[str]] = {}
    for owner in packed:
        if found := _SEPARATE.match(owner):
            separate.setdefault(found["experts"], []).append(owner)
    for path, owners in separate.items():
        _wait_for_layers(_experts(model, path, where), path, packed, packing, where)
        taken.update(owners)
    return taken


def _experts(model: nn.Module, path: str, where: str) -> Any:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    stacked = all(
        hasattr(module, flag) for flag in ("num_experts", "has_gate", "_apply_gate", "is_transposed", "gate_up_proj", "down_proj")
    )
    if module is None or not stacked or not getattr(module, "has_gate", False) or getattr(module, "has_post_expert_norm", False):
        what = "no such module" if module is None else type(module).__name__
        raise UsageError(f"model {where}: {path} are packed experts, and the model's code has other ones there ({what})", fix=_DENSE)
    return module


def _wait(module: Any, name: str, part: Part) -> None:
    module.register_parameter(name, nn.Parameter(torch.empty(part.shape, dtype=part.dtype, device="meta"), requires_grad=False))


def _wait_for_blocks(module: Any, path: str, names: Mapping[str, Part], where: str) -> None:
    """gpt-oss: `_blocks` uint8[E O K/32 16] and `_scales` uint8[E O K/32] of a stack that its code has as [E K O]."""
    plan = {}
    for stack in _STACKS:
        experts, columns, rows = getattr(module, stack).shape
        shapes = {f"{stack}_blocks": (experts, rows, columns // 32, 16), f"{stack}_scales": (experts, rows, columns // 32)}
        for name, shape in shapes.items():
            found = names.get(f"{path}.{name}")
            if found is None or tuple(found.shape) != shape:
                said = "is missing" if found is None else f"is {list(found.shape)}, expected {list(shape)}"
                raise UsageError(f"model {where}: {path}.{name} {said}", fix="get the files again from where they came")
            _wait(module, name, found)
        plan[stack] = Layout("mxfp4", (rows, columns), ("weight_packed", torch.uint8, (rows, columns // 2)), (1, 32))
        delattr(module, stack)
    # transformers initialises what lacks a tensor, by the names that are gone
    vars(module)[_PLAN], module._is_hf_initialized = plan, True


def _wait_for_layers(module: Any, path: str, packed: Mapping[str, Mapping[str, Part]], packing: Packing, where: str) -> None:
    """A linear layer an expert, under its own name in the file, which transformers then does not join."""
    plan: dict[str, Layout] = {}
    if module.is_transposed or not module.is_concatenated:
        raise UsageError(f"model {where}: {path} are packed one by one, and the model's code interleaves them", fix=_DENSE)
    for stack, layers in _STACKS.items():
        _, rows, columns = getattr(module, stack).shape
        shape = (rows // len(layers), columns)
        for expert in range(module.num_experts):
            for layer in layers:
                owner = f"{path}.{expert}.{layer}"
                parts = {name: part for name, part in packed.get(owner, {}).items() if name not in OF_ACTIVATIONS}
                layout = recognise(f"model {where}: {owner}", parts, packing, shape)
                if plan.setdefault(stack, layout) != layout:
                    raise UsageError(f"model {where}: {owner} is packed in another way than expert 0", fix=_DENSE)
                holder = module._modules.setdefault(str(expert), nn.Module())
                holder.add_module(layer, nn.Module())
                for name, part in parts.items():
                    _wait(holder._modules[layer], name, part)
        delattr(module, stack)
    # transformers initialises what lacks a tensor, by the names that are gone
    vars(module)[_PLAN], module._is_hf_initialized = plan, True


def pack_experts(model: nn.Module, packing: Packing) -> None:
    """Stacks what the experts waited for, one layer at a time, and puts their forward over packed stacks; also on the meta device."""
    for path, module in list(model.named_modules()):
        plan: dict[str, Layout] | None = vars(module).pop(_PLAN, None)
        for stack, layout in (plan or {}).items():
            own = list(_pieces(module, path, stack))
            pieces = [[state_of(of, layout, packing.word, t) for of, t in one] for one in own]
            tensors = {
                name: torch.stack([torch.stack([piece.tensors[name] for piece in one]) for one in pieces]) for name in pieces[0][0].tensors
            }
            main = torch.stack([torch.stack([t[layout.main[0]] for _, t in one]) for one in own])
            del own, pieces
            for name in (f"{stack}_blocks", f"{stack}_scales"):
                module._parameters.pop(name, None)
            for expert in module._modules.values():
                for layer in _STACKS[stack]:
                    getattr(expert, "_modules", {}).pop(layer, None)
            state = StackState(
                layout, packing.word, tensors, experts=main.shape[0], pieces=main.shape[1], transposed=bool(module.is_transposed)
            )
            module.register_parameter(stack, PackedWeight(main, state))
        if plan:
            for name in [name for name in module._modules if name.isdecimal()]:
                del module._modules[name]
            InstanceMethod(packed_forward, module).put()


def _pieces(module: Any, path: str, stack: str) -> Iterator[list[tuple[str, dict[str, Tensor]]]]:
    """Of every expert, what lies one below the other in its matrix: (name, tensors)."""
    blocks, scales = (module._parameters.get(f"{stack}_{word}") for word in ("blocks", "scales"))
    for expert in range(module.num_experts):
        if blocks is not None:
            yield [(f"{path}.{stack}[{expert}]", {"weight_packed": blocks.data[expert].flatten(1), "weight_scale": scales.data[expert]})]
            continue
        layers = {layer: module._modules[str(expert)]._modules[layer] for layer in _STACKS[stack]}
        yield [
            (f"{path}.{expert}.{name}", {part: p.data for part, p in layer._parameters.items() if p is not None})
            for name, layer in layers.items()
        ]
