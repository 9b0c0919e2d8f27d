"""Replaces attention in diffusers' transformers. The attention is over the tokens of a picture, or
over the tokens of picture and text together. An attention layer is recognised by its child modules
and by its output for a small test input.

The new forward calls the same child modules and the ops `rope` and `attention`. For backward it
saves the projections. From these it recomputes query and key after normalisation, concatenation and
rotation.

B is the number of pictures, S the number of tokens, N the number of heads, and D the head size.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import format_dtype, to_torch
from ..environment.planned_device import plan_device
from ..instance_method import Placement, get_forward_settings
from ..ops import attention, rope
from ..ops.attention import choose_backend
from ..ops.recomputable import propagate_recomputable
from .instances import (
    ProbeLayer,
    cache_by_module_kind,
    computes_same_in_train_and_eval,
    make_probe_copy,
    place_replacement,
    replacement_blocker,
)

PART_NAME = "joint attention"  # the value of `Placement.part`
_PICTURE = ("to_q", "to_k", "to_v")  # names of the projections of the picture's tokens
_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj")  # names of the projections of the text's tokens
# names of the norms of queries and keys
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
_TABLES = "image_rotary_emb"  # the argument with the tables of cosines and sines
_HEADS = 2  # of the probe
_SIZE = 4  # features of a head of the probe


@dataclass(frozen=True)
class JointSettings:
    """Describes an attention layer.

    is_joint               whether attention is also over the tokens of the text
    is_text_first          whether the tokens of the text come before those of the picture
    has_output_layer       whether to_out is applied to the picture's result
    has_text_output_layer  whether to_add_out is applied to the text's result
    has_rotary             whether query and key are rotated by the tables `image_rotary_emb`
    """

    is_joint: bool
    is_text_first: bool
    has_output_layer: bool
    has_text_output_layer: bool
    has_rotary: bool


def is_candidate(module: nn.Module) -> bool:
    """Whether this is an attention layer of diffusers that has a processor, and whose query, key
    and value have the same input.
    """
    return (
        type(module).__module__.startswith("diffusers.")
        and hasattr(module, "processor")
        and isinstance(getattr(module, "heads", None), int)
        and all(isinstance(getattr(module, name, None), nn.Module) for name in _PICTURE)
        and getattr(module, "is_cross_attention", False) is not True
    )


@cache_by_module_kind
def recognise(module: Any) -> tuple[JointSettings, type] | str:
    """Finds the settings with which `compute_joint_attention` gives the same output as this module
    for a small test input. Returns these settings and the class of the module's processor. If there
    are no such settings, returns a text with the reason.
    """
    unknown_form_reason = (
        "for random inputs, its output differs from one attention over all its tokens"
    )
    width = _HEADS * _SIZE
    names = [
        name
        for name in (*_PICTURE, *_TEXT, *_NORMS, "to_add_out")
        if getattr(module, name, None) is not None
    ]
    stubs: dict[str, nn.Module] = {name: ProbeLayer(0.1 * (i + 1)) for i, name in enumerate(names)}
    has_out = getattr(module, "to_out", None) is not None
    if has_out:
        stubs["to_out"] = nn.ModuleList([ProbeLayer(1.5), nn.Identity()])
    probe = make_probe_copy(module, stubs, {})
    vars(probe).update(heads=_HEADS, head_dim=_SIZE)
    generator = torch.Generator().manual_seed(0)
    picture, text = (
        torch.randn(1, token_count, width, generator=generator, dtype=torch.float64)
        for token_count in (3, 2)
    )
    joint = all(name in stubs for name in _TEXT)
    angle = torch.randn(
        3 + 2 * joint, _SIZE // 2, generator=generator, dtype=torch.float64
    ).repeat_interleave(2, -1)
    inputs = {"hidden_states": picture}
    if joint:
        inputs["encoder_hidden_states"] = text
    table_names = {
        name for name in inspect.signature(module.processor.__call__).parameters if "rot" in name
    }
    if table_names - {_TABLES}:
        # the model will pass its tables under another name
        return unknown_form_reason
    for rotary, text_first, output, text_out in product((True, False), repeat=4):
        settings = JointSettings(joint, text_first, output, text_out, rotary)
        is_missing_child = (
            (rotary and not table_names)
            or (output and not has_out)
            or (text_out and "to_add_out" not in stubs)
        )
        if is_missing_child or (not joint and (text_first or text_out)):
            continue
        tables = (angle.cos(), angle.sin()) if rotary else None
        original_forward = partial(
            type(module).forward, probe, **inputs, **({_TABLES: tables} if rotary else {})
        )
        form_forward = partial(
            compute_joint_attention, probe, settings, picture, text if joint else None, tables
        )
        if computes_same_in_train_and_eval(
            probe,
            partial(_concatenate_outputs, original_forward),
            partial(_concatenate_outputs, form_forward),
            *inputs.values(),
        ):
            return settings, type(module.processor)
    return unknown_form_reason


def _concatenate_outputs(function: Callable[[], Any]) -> Tensor:
    """Concatenates the outputs into one tensor."""
    outputs = function()
    return torch.cat(outputs, 1) if isinstance(outputs, tuple) else outputs


def compute_joint_attention(
    module: Any,
    settings: JointSettings,
    picture: Tensor,
    text: Tensor | None,
    tables: tuple[Tensor, Tensor] | None,
) -> Tensor | tuple[Tensor, Tensor]:
    queries, keys, values = ([getattr(module, name)(picture)] for name in _PICTURE)
    norms = {0: ["norm_q"], 1: ["norm_k"]}
    if text is not None:
        text_position = 0 if settings.is_text_first else 1
        for i, (parts, name) in enumerate(zip((queries, keys, values), _TEXT)):
            parts.insert(text_position, getattr(module, name)(text))
            if i in norms:
                norms[i].insert(text_position, ("norm_added_q", "norm_added_k")[i])
    query, key = (
        join_projections(module, parts, norms[i]) for i, parts in enumerate((queries, keys))
    )
    value = join_projections(module, values, [])
    if tables is not None:
        cos, sin = (table[..., ::2] for table in tables)
        rotated = rope(query, key, cos, sin, interleaved=True)
        query, key = (
            propagate_recomputable(new, _rotate, old, cos, sin)
            for new, old in zip(rotated, (query, key))
        )
    output = attention(query, key, value).transpose(1, 2).flatten(2, 3).to(query.dtype)
    if text is None:
        return _apply_output_layers(module, output) if settings.has_output_layer else output
    if settings.is_text_first:
        lengths = [text.shape[1], picture.shape[1]]
    else:
        lengths = [picture.shape[1], text.shape[1]]
    parts = output.split(lengths, dim=1)
    text_output, picture_output = parts if settings.is_text_first else parts[::-1]
    if settings.has_output_layer:
        picture_output = _apply_output_layers(module, picture_output)
    if settings.has_text_output_layer:
        text_output = module.to_add_out(text_output)
    return picture_output, text_output


def join_projections(module: Any, parts: list[Tensor], norms: list[str]) -> Tensor:
    """Concatenates projections [B S_i N*D] along the tokens and returns [B N S D]. If the module
    has a norm for a projection, the norm is applied first.
    """
    heads = []
    for i, part in enumerate(parts):
        norm = getattr(module, norms[i], None) if norms else None
        x_BSND = part.unflatten(-1, (module.heads, -1))
        if norm is not None:
            x_BSND = norm(x_BSND)
        heads.append(x_BSND)
    if len(heads) == 1:
        joined = heads[0]
    else:
        joined = propagate_recomputable(torch.cat(heads, 1), _concatenate_tokens, *heads)
    return propagate_recomputable(joined.transpose(1, 2), _transpose_heads, joined)


def _concatenate_tokens(*parts: Tensor) -> Tensor:
    return torch.cat(parts, 1)


def _transpose_heads(x_BSND: Tensor) -> Tensor:
    return x_BSND.transpose(1, 2)


def _rotate(x_BNSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rope(x_BNSD, x_BNSD[:, :0], cos, sin, interleaved=True)[0]


def _apply_output_layers(module: Any, x: Tensor) -> Tensor:
    for layer in module.to_out:
        x = layer(x)
    return x


def joint_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
    **extra: Any,
) -> Any:
    """Replaces the forward of an attention layer. It calls `compute_joint_attention`. The forward
    of the class runs if a call has other arguments, if the processor was replaced, or if the
    projections are fused.
    """
    settings, processor = get_forward_settings(self)
    unknown_arguments = {name: value for name, value in extra.items() if value is not None}
    runs_recognised_form = (
        attention_mask is None
        and not unknown_arguments
        and settings.is_joint == (encoder_hidden_states is not None)
    )
    runs_recognised_form = (
        runs_recognised_form
        and settings.has_rotary == (image_rotary_emb is not None)
        and type(self.processor) is processor
    )
    runs_recognised_form = runs_recognised_form and not getattr(self, "fused_projections", False)
    for setting in ("_attention_backend", "_parallel_config"):
        runs_recognised_form = (
            runs_recognised_form and getattr(self.processor, setting, None) is None
        )
    if runs_recognised_form:
        return compute_joint_attention(
            self, settings, hidden_states, encoder_hidden_states, image_rotary_emb
        )
    if image_rotary_emb is not None:
        extra[_TABLES] = image_rotary_emb
    return type(self).forward(self, hidden_states, encoder_hidden_states, attention_mask, **extra)


def describe_backends(model: nn.Module, compute_dtype: str, *, device_type: str) -> str:
    """Names the attention back ends that a denoiser uses in a training step, with the number of
    layers for each. Returns "" for other models.
    """
    layers = [
        m
        for m in model.modules()
        if type(m).__module__.startswith("diffusers.") and hasattr(m, "processor")
    ]
    backends = Counter(
        _describe_backend(layer, to_torch(compute_dtype), device_type) for layer in layers
    )
    return ", ".join(
        f"{name} ({count} of {len(layers)} layers)" if len(backends) > 1 else name
        for name, count in backends.most_common()
    )


def _describe_backend(layer: Any, dtype: torch.dtype, device_type: str) -> str:
    if getattr(vars(layer).get("forward"), "__func__", None) is not joint_forward:
        return f"{type(layer.processor).__name__}'s own"
    weight = layer.to_q.weight
    depth = getattr(weight, "quant_state", weight).shape[0] // layer.heads
    with nullcontext() if device_type == "cpu" else plan_device(device_type):
        x = torch.empty(
            1,
            layer.heads,
            128,
            depth,
            dtype=dtype,
            device="cpu" if device_type == "cpu" else "meta",
        )
        return f"{choose_backend(dtype, x, x, x, None, causal=False)} in {format_dtype(dtype)}"


def place_joint_attention(path: str, module: nn.Module) -> Placement:
    """Replaces the forward of an attention layer, if the new forward computes the same output."""
    settings_or_reason = replacement_blocker(module) or recognise(module)
    note = (
        "with rope"
        if not isinstance(settings_or_reason, str) and settings_or_reason[0].has_rotary
        else ""
    )
    return place_replacement(
        PART_NAME,
        path,
        module,
        joint_forward,
        "attention",
        settings_or_reason=settings_or_reason,
        note=note,
    )
