"""Finds the policy with which FSDP2 gathers a weight in another dtype than it is stored in."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .frames import CallFrame, source_text
from .modules import ModelNames
from .program_source import ProgramSource, SourceFile

_POLICY = "MixedPrecisionPolicy"
_POLICY_KEYWORD = "mp_policy"


@dataclass(frozen=True, slots=True)
class GatheredWeight:
    """A weight that FSDP2 casts when it gathers its parts.

    stored_dtype  the dtype of the parts
    policy        the call that makes the policy of FSDP2, and its file and line; "" if the program has
    policy_at     no such call, or several
    shard         a call of `fully_shard` for the layer of the weight alone, with a policy for another
                  dtype; "" if it is not known which call shards the module around the layer
    outer         the call that shards the module around the layer, and its file and line
    outer_at
    """

    stored_dtype: torch.dtype
    policy: str = ""
    policy_at: str = ""
    shard: str = ""
    outer: str = ""
    outer_at: str = ""


def find_gathered_weight(
    frames: Sequence[CallFrame], names: ModelNames, weight: torch.Tensor, dtype: torch.dtype
) -> GatheredWeight | None:
    """Returns how FSDP2 gathers a weight. Returns None if it is not sharded, or not cast.

    dtype  the dtype that the layer of the weight would need
    """
    owner = names.tensor_owner(weight)
    match = next((pair for pair in _iterate_sharded(names) if _holds(pair[1], owner, weight)), None)
    if match is None or owner is None or match[1].param_dtype != weight.dtype:
        return None
    unit, parameter = match
    program = ProgramSource(frames)
    policy = program.find_only_call(_POLICY)
    outer = _find_outer_call(program)
    texts: dict[str, str] = {}
    if policy is not None:
        texts |= {"policy": source_text(policy[1]), "policy_at": policy[0].location_of(policy[1])}
    if policy is not None and outer is not None and owner is not unit:
        path = next(name for name, module in unit.named_modules() if module is owner)
        texts["shard"] = _shard_layer(outer[1], path, policy[1], dtype)
        texts |= {"outer": source_text(outer[1]), "outer_at": outer[0].location_of(outer[1])}
    return GatheredWeight(parameter.orig_dtype, **texts)


def _iterate_sharded(names: ModelNames) -> Iterator[tuple[nn.Module, Any]]:
    """Yields the sharded parameters of FSDP2, each with the module that was sharded."""
    for root in names.roots:
        for module in root.modules():
            read_state = getattr(type(module), "_get_fsdp_state", None)
            state = None if read_state is None else read_state(module)
            for group in getattr(state, "_fsdp_param_groups", ()):
                for parameter in group.fsdp_params:
                    yield module, parameter


def _holds(parameter: Any, owner: nn.Module | None, weight: torch.Tensor) -> bool:
    info = parameter._module_info
    return info.module is owner and owner._parameters.get(info.param_name) is weight


def _find_outer_call(program: ProgramSource) -> tuple[SourceFile, ast.Call] | None:
    """Returns the only call of `fully_shard` that is not in a loop, such as one over layers."""
    calls = [
        (source, call)
        for source, call in program.list_calls("fully_shard")
        if not any(isinstance(parent, ast.For) for parent, _ in source.iterate_parents(call))
    ]
    return calls[0] if len(calls) == 1 and calls[0][1].args else None


def _shard_layer(call: ast.Call, path: str, policy: ast.Call, dtype: torch.dtype) -> str:
    """Returns the source code of a call of `fully_shard` for one layer, in another dtype."""
    layer = f'{ast.unparse(call.args[0])}.get_submodule("{path}")'
    keywords = [keyword for keyword in call.keywords if keyword.arg != _POLICY_KEYWORD]
    code = f"{ast.unparse(policy.func)}(param_dtype={dtype})"
    keywords.append(ast.keyword(_POLICY_KEYWORD, ast.parse(code, mode="eval").body))
    layer_node = ast.parse(layer, mode="eval").body
    return source_text(ast.Call(call.func, [layer_node, *call.args[1:]], keywords))
