"""Replaces blocks, adaptive norms and activations of diffusers' transformers by ops. The module
`joint_attention` replaces attention.

A block has one residual stream for the picture and one for the text, or one stream for both (Flux,
SD3). A block is recognised by its child modules and by its output for a small test input. The new
forward calls the children of the block and uses `gated_residual` to add their outputs to the
residual. In a block with one stream, the input of the last layer is the concatenation of
attention's output and the activation. The concatenation and the activation are not saved. Backward
computes them again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..instance_method import Placement, get_forward_settings
from ..ops import gated_residual, gelu, modulated_layer_norm
from ..ops.recomputable import find_recompute_recipe, mark_recomputable, propagate_recomputable
from ..precision.apply import denoiser_blocks
from . import joint_attention
from .forwards import hooks_change_input
from .instances import (
    cache_by_module_kind,
    computes_same_in_train_and_eval,
    make_probe_copy,
    place_replacement,
    replacement_blocker,
)

# the kinds of parts in the manifest (`Placement.part`)
BLOCK = "block"
NORM = "modulated norm"
ACTIVATION = "activation"
# names of the child modules by which a block is recognised
_TWO_STREAM_CHILDREN = ("norm1", "norm1_context", "attn", "norm2", "ff")
_ONE_STREAM_CHILDREN = ("norm", "proj_mlp", "act_mlp", "attn", "proj_out")
_PROBE_WIDTH = 6  # the number of features of the small test inputs


BlockForward = Callable[..., Any]  # run_two_streams or run_one_stream


def is_block(module: nn.Module) -> bool:
    if not type(module).__module__.startswith("diffusers."):
        return False
    child_names = {name for name, child in module._modules.items() if child is not None}
    return child_names.issuperset(_TWO_STREAM_CHILDREN) or child_names.issuperset(
        _ONE_STREAM_CHILDREN
    )


# the forwards of the two forms of a block:
# (block, picture [B T H], text [B S H], time embedding [B H], further arguments of attention)
# -> (text, picture)


def run_two_streams(
    block: Any, picture: Tensor, text: Tensor, emb: Tensor, attention_kwargs: dict[str, Any]
) -> tuple[Tensor | None, Tensor]:
    # the outputs of an adaptive norm (AdaLayerNormZero): the modulated norm of the picture [B T H],
    # and the modulation [B H] of attention's output and of the MLP
    normed, gate, mlp_shift, mlp_scale, mlp_gate, *attn2_outputs = block.norm1(picture, emb=emb)
    is_last_block = block.norm2_context is None
    if is_last_block:
        # the last block does not return the text, so its text has no gates and no MLP
        text_normed = block.norm1_context(text, emb)
    else:
        text_normed, text_gate, *text_mlp_modulation = block.norm1_context(text, emb=emb)
    attended, text_attended = block.attn(
        hidden_states=normed, encoder_hidden_states=text_normed, **attention_kwargs
    )
    picture = _add_gated_recomputable(picture, attended, gate)
    if attn2_outputs:
        # the blocks of SD3.5 with a second attention, which sees only the picture
        attn2_normed, attn2_gate = attn2_outputs
        attn2_attended = block.attn2(hidden_states=attn2_normed, **attention_kwargs)
        picture = _add_gated_recomputable(picture, attn2_attended, attn2_gate)
    picture = _add_mlp(
        block.norm2, block.ff, picture, scale=mlp_scale, shift=mlp_shift, gate=mlp_gate
    )
    if is_last_block:
        return None, picture
    text = _add_gated_recomputable(text, text_attended, text_gate)
    text_shift, text_scale, text_mlp_gate = text_mlp_modulation
    text = _add_mlp(
        block.norm2_context,
        block.ff_context,
        text,
        scale=text_scale,
        shift=text_shift,
        gate=text_mlp_gate,
    )
    return text, picture


def _add_gated(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Computes residual + gate * x with the op, or in plain PyTorch if the dtypes differ."""
    if residual.dtype == x.dtype:
        return gated_residual(residual, x, gate)
    return residual + gate[:, None] * x


def _add_gated_recomputable(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Computes the same as `_add_gated`, and marks the sum so that backward recomputes it. The next
    norm of the block then does not save its input, which is this sum. The tensors for the
    recomputation are in memory anyway: the previous norm saved the residual, and the gradient of
    the gate needs x.

    Do not use this function for the output of a block. Gradient checkpointing saves that output, so
    the residual and x would stay in memory for nothing.
    """
    total = _add_gated(residual, x, gate)
    if gate.requires_grad and find_recompute_recipe(residual) is None:
        return mark_recomputable(total, _add_gated, residual, x, gate)
    return total


def _add_mlp(
    norm: nn.Module, mlp: nn.Module, x: Tensor, *, scale: Tensor, shift: Tensor, gate: Tensor
) -> Tensor:
    return _add_gated(x, mlp(modulate(norm, x, scale_BH=scale, shift_BH=shift)), gate)


def run_one_stream(
    block: Any, picture: Tensor, text: Tensor, emb: Tensor, attention_kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    stream = torch.cat((text, picture), 1)
    features, gate = _attend_and_activate(block, stream, emb, attention_kwargs)
    stream = _add_gated(stream, block.proj_out(features), gate)
    text, picture = stream.split((text.shape[1], picture.shape[1]), 1)
    return text, picture


def _attend_and_activate(
    block: Any, stream: Tensor, emb: Tensor, attention_kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns the input of the last layer, which is the concatenation of attention's output and the
    activation, and the gate. This is a separate function so that its intermediate tensors are freed
    before the last layer runs.
    """
    normed, gate = block.norm(stream, emb=emb)
    activated = block.act_mlp(block.proj_mlp(normed))
    attended = block.attn(hidden_states=normed, **attention_kwargs)
    return propagate_recomputable(
        torch.cat((attended, activated), 2), _concatenate_features, attended, activated
    ), gate


def _concatenate_features(attended: Tensor, activated: Tensor) -> Tensor:
    return torch.cat((attended, activated), 2)


class _ProbeLayer(nn.Module):
    """Replaces a child module in the test by a simple function. The input of this function is one
    tensor, or one tensor for the picture and one for the text.

    variant       a number that is different in each child, so that each computes another function
    extra_count   the number of outputs after the first. Each is computed from the embedding and has
                  the shape [B H], like a scale, a shift or a gate
    repeat_at     the position of the extra output that is computed from x and has its shape, like
                  the second norm of `attn2`; -1 for none
    width_factor  the number of output features divided by the number of input features
    """

    def __init__(
        self, variant: float, extra_count: int = 0, *, repeat_at: int = -1, width_factor: int = 1
    ) -> None:
        super().__init__()
        self.variant = variant
        self.extra_count = extra_count
        self.repeat_at = repeat_at
        self.width_factor = width_factor

    def forward(self, x: Tensor | None = None, emb: Tensor | None = None, **kwargs: Any) -> Any:
        x = kwargs.get("hidden_states") if x is None else x
        assert x is not None
        text = kwargs.get("encoder_hidden_states")
        if text is not None:
            return self._compute(x) + self._compute(text).mean(1, keepdim=True), self._compute(
                text
            ) - self._compute(x).mean(1, keepdim=True)
        output = self._compute(x) if emb is None else self._compute(x) * emb[:, None]
        if not self.extra_count:
            return output
        assert emb is not None
        return output, *(
            self._compute(x) * 0.3 if i == self.repeat_at else (emb * (i + 2 + self.variant)).cos()
            for i in range(self.extra_count)
        )

    def _compute(self, x: Tensor) -> Tensor:
        mapped = (x * (1.0 + self.variant)).sin() + self.variant
        return torch.cat([mapped * (i + 1) for i in range(self.width_factor)], -1)


class _NarrowingProbeLayer(_ProbeLayer):
    """Replaces a child module in the test if the child has more input features than output
    features.
    """

    def _compute(self, x: Tensor) -> Tensor:
        parts = x.split(_PROBE_WIDTH, -1)
        return sum(
            ((part * (i + 1.0)).sin() for i, part in enumerate(parts)), torch.zeros_like(parts[0])
        )


@cache_by_module_kind
def recognise_block(module: Any) -> BlockForward | str:
    """Returns the function (for one or two streams) that computes the same output as this module
    for a small test input. If neither function does, returns a text with the reason.
    """
    unknown_form_reason = "for random inputs, its output differs from that of every known form"
    stubs: dict[str, nn.Module]
    if isinstance(getattr(module, "norm1_context", None), nn.Module):
        is_last = getattr(module, "norm2_context", None) is None
        has_second_attention = getattr(module, "attn2", None) is not None
        stubs = {
            "norm1": _ProbeLayer(0.1, 4),
            "norm1_context": _ProbeLayer(0.2, 4),
            "attn": _ProbeLayer(0.3),
            "ff": _ProbeLayer(0.5),
        }
        if has_second_attention:
            stubs["norm1"] = _ProbeLayer(0.1, 6, repeat_at=4)
            stubs["attn2"] = _ProbeLayer(0.6)
        if is_last:
            stubs["norm1_context"] = _ProbeLayer(0.2)
        else:
            stubs["ff_context"] = _ProbeLayer(0.8)
        norms = {
            name: getattr(module, name)
            for name in ("norm2", "norm2_context")
            if getattr(module, name, None) is not None
        }
        if not all(is_plain_norm(norm) for norm in norms.values()):
            return unknown_form_reason
        stubs |= {
            name: nn.LayerNorm(_PROBE_WIDTH, norm.eps, elementwise_affine=False)
            for name, norm in norms.items()
        }
    else:
        stubs = {
            "norm": _ProbeLayer(0.1, 1),
            "proj_mlp": _ProbeLayer(0.2, width_factor=4),
            "act_mlp": _ProbeLayer(0.3),
            "attn": _ProbeLayer(0.4),
            "proj_out": _NarrowingProbeLayer(0.5),
        }
    form: BlockForward = run_two_streams if "norm1_context" in stubs else run_one_stream
    probe = make_probe_copy(module, stubs, {})
    generator = torch.Generator().manual_seed(0)
    picture, text = (
        torch.randn(2, token_count, _PROBE_WIDTH, generator=generator, dtype=torch.float64)
        for token_count in (3, 2)
    )
    emb = torch.randn(2, _PROBE_WIDTH, generator=generator, dtype=torch.float64)
    original_forward = partial(
        type(module).forward, probe, hidden_states=picture, encoder_hidden_states=text, temb=emb
    )
    form_forward = partial(form, probe, picture, text, emb, {})
    is_same = computes_same_in_train_and_eval(
        probe,
        partial(_flatten_outputs, original_forward),
        partial(_flatten_outputs, form_forward),
        picture,
        text,
        emb,
    )
    return form if is_same else unknown_form_reason


def stream_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    **extra: Any,
) -> Any:
    """Replaces the forward of a block. It runs the function that `recognise_block` found. It runs
    the forward of the class in the cases that this function does not compute: further arguments of
    attention, a feed-forward layer that is computed in chunks (`_chunk_size`), and fp16, in which
    diffusers clips the values.
    """
    streams = (hidden_states, encoder_hidden_states)
    runs_recognised_form = (
        not joint_attention_kwargs and not extra and getattr(self, "_chunk_size", None) is None
    )
    runs_recognised_form = (
        runs_recognised_form
        and all(x.dtype != torch.float16 and x.dim() == 3 for x in streams)
        and temb.dim() == 2
    )
    rotary = {} if image_rotary_emb is None else {"image_rotary_emb": image_rotary_emb}
    if runs_recognised_form:
        form: BlockForward = get_forward_settings(self)
        return form(self, hidden_states, encoder_hidden_states, temb, rotary)
    if joint_attention_kwargs is None:
        joint_kwargs = {}
    else:
        joint_kwargs = {"joint_attention_kwargs": joint_attention_kwargs}
    return type(self).forward(
        self, hidden_states, encoder_hidden_states, temb, **rotary, **joint_kwargs, **extra
    )


def gelu_forward(self: Any, x: Tensor) -> Tensor:
    return gelu(x, approximate=self.approximate)


def projected_gelu_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return gelu(self.proj(hidden_states), approximate=self.approximate)


def is_activation(module: Any) -> bool:
    """Whether this is diffusers' GELU module, which is a linear layer followed by GELU."""
    is_diffusers_gelu = (
        type(module).__module__.startswith("diffusers.") and type(module).__name__ == "GELU"
    )
    return (
        is_diffusers_gelu
        and isinstance(getattr(module, "proj", None), nn.Module)
        and module.approximate in ("none", "tanh")
    )


def place_activation(path: str, module: Any) -> Placement:
    """Installs `gelu` on the GELU module of diffusers or PyTorch, if it computes the same output as
    the module.
    """
    reason = replacement_blocker(module)
    forward: BlockForward = gelu_forward
    if hasattr(module, "proj"):
        forward = projected_gelu_forward
    if reason is None and hasattr(module, "proj"):
        probe = make_probe_copy(module, {"proj": nn.Identity()}, {})
        x = torch.linspace(-3.0, 3.0, 12, dtype=torch.float64)
        if not computes_same_in_train_and_eval(
            probe,
            partial(type(module).forward, probe, x),
            partial(projected_gelu_forward, probe, x),
            x,
        ):
            reason = "for random inputs, its output differs from that of GELU"
    return place_replacement(ACTIVATION, path, module, forward, "gelu", settings_or_reason=reason)


def place_block(path: str, module: Any, norm_output_dtype: torch.dtype | None) -> list[Placement]:
    """Installs the new forward on a block, and ops on its norms and activation, if the block is
    recognised.

    norm_output_dtype  see `place_denoiser_part`
    """
    placements = [
        place_replacement(
            BLOCK,
            path,
            module,
            stream_forward,
            "gated_residual",
            settings_or_reason=replacement_blocker(module) or recognise_block(module),
        )
    ]
    if placements[0].op is None:
        return placements
    for name in ("norm2", "norm2_context"):
        if getattr(module, name, None) is not None:
            placements.append(
                place_norm(f"{path}.{name}", getattr(module, name), norm_output_dtype)
            )
    if type(getattr(module, "act_mlp", None)) is nn.GELU:
        placements.append(place_activation(f"{path}.act_mlp", module.act_mlp))
    return placements


# --- adaptive LayerNorm: a LayerNorm without weights, followed by a scale and a shift per picture.
# Two kinds of modules apply the scale and the shift. `AdaLayerNormZero` and similar classes compute
# them from the time embedding. They return the modulated norm, and often further values for the
# block, such as the gate of attention. A block also modulates the output of a norm itself, before
# its MLP. In both cases our forward calls the norm through `modulate`, so that hooks on the norm
# that observe it see a call


@dataclass(frozen=True)
class AdaptiveSettings:
    """Describes how an adaptive norm computes and returns its results.

    argument            the name of the embedding in the forward
    embedding_is_first  whether the embedding is the first argument after x
    chunk_count         the number of chunks into which the linear layer's output is split
    scale_index, shift_index
                        the indices of the chunks that are the scale and the shift
    returns_norm_only   whether only the modulated norm is returned, without the other chunks
    has_second_norm     whether the forward returns a second modulated norm of x, for a second
                        attention. There are then nine chunks, and the outputs are the first
                        modulated norm, the chunks 2 to 5, the second modulated norm (with chunk 6
                        as its shift and chunk 7 as its scale), and chunk 8
    """

    argument: str
    embedding_is_first: bool
    chunk_count: int
    scale_index: int
    shift_index: int
    returns_norm_only: bool
    has_second_norm: bool


def is_plain_norm(module: Any) -> bool:
    """Whether this is PyTorch's LayerNorm over the last dimension, without weights."""
    return (
        type(module) is nn.LayerNorm
        and not module.elementwise_affine
        and len(module.normalized_shape) == 1
    )


def is_adaptive_norm(module: nn.Module) -> bool:
    """Whether this is an adaptive norm of diffusers: a norm with a linear layer that computes its
    scale and shift.
    """
    layers = ("linear", "silu", "norm")
    return (
        type(module).__module__.startswith("diffusers.")
        and "Norm" in type(module).__name__
        and all(isinstance(getattr(module, name, None), nn.Module) for name in layers)
        and getattr(module, "emb", None) is None
        and is_plain_norm(module.norm)
    )


def layer_norm_forward(
    self: Any, x: Tensor, modulation: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Replaces the forward of a LayerNorm without weights.

    modulation  (scale, shift), or None if another caller than `modulate` calls the norm
    """
    if modulation is None:
        normed: Tensor = type(self).forward(self, x)
        return normed
    return modulated_layer_norm(x, *modulation, self.eps, out_dtype=get_forward_settings(self))


def modulate(norm: Any, x: Tensor, *, scale_BH: Tensor, shift_BH: Tensor) -> Tensor:
    """Computes norm(x) * (1 + scale) + shift. It uses the op if `place_norm` installed the op on
    this norm, and if no hook changes the input or output of the norm.
    """
    if (
        getattr(vars(norm).get("forward"), "__func__", None) is layer_norm_forward
        and x.dim() == 3
        and not _hooks_change_norm(norm)
    ):
        normed: Tensor = norm(x, modulation=(scale_BH, shift_BH))
        return normed
    modulated: Tensor = norm(x) * (1 + scale_BH[:, None]) + shift_BH[:, None]
    return modulated


def _hooks_change_norm(norm: nn.Module) -> bool:
    """Whether a hook may change the norm's input or output. Returns False if a hook only casts the
    output to the op's output dtype.
    """
    if hooks_change_input(norm):
        return True
    norm_output_dtype = get_forward_settings(norm)
    output_hooks = [
        hook for hook in norm._forward_hooks.values() if not getattr(hook, "is_observer", False)
    ]
    return any(
        getattr(hook, "cast_dtype", None) is not norm_output_dtype or norm_output_dtype is None
        for hook in output_hooks
    )


def place_norm(path: str, norm: nn.Module, norm_output_dtype: torch.dtype | None) -> Placement:
    """Makes a LayerNorm without weights run `modulated_layer_norm` when `modulate` calls it.

    norm_output_dtype  see `place_denoiser_part`
    """
    return place_replacement(
        NORM,
        path,
        norm,
        layer_norm_forward,
        "modulated_layer_norm",
        settings_or_reason=replacement_blocker(norm) or norm_output_dtype,
    )


@cache_by_module_kind
def recognise_adaptive(module: Any) -> AdaptiveSettings | str:
    """Returns the settings with which `compute_adaptive` computes the same output as this module
    for a small test input. If no settings give the same output, returns a text with the reason.
    """
    unknown_form_reason = (
        "for random inputs, its output differs from that of a LayerNorm with scale and shift"
    )
    width = module.norm.normalized_shape[0]
    outer_width = getattr(module.linear, "out_features", 0)
    if outer_width % width:
        return unknown_form_reason
    chunk_count = outer_width // width
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(_PROBE_WIDTH, chunk_count * _PROBE_WIDTH, dtype=torch.float64)
    for p in linear.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    probe_children = {
        "linear": linear,
        "norm": nn.LayerNorm(_PROBE_WIDTH, eps=module.norm.eps, elementwise_affine=False),
    }
    probe = make_probe_copy(module, probe_children, {})
    x = torch.randn(2, 3, _PROBE_WIDTH, generator=generator, dtype=torch.float64) * 1e-2
    emb = torch.randn(2, _PROBE_WIDTH, generator=generator, dtype=torch.float64)
    names = list(inspect.signature(type(module).forward).parameters)[2:]
    argument = next((name for name in ("emb", "conditioning_embedding") if name in names), None)
    if argument is None:
        return unknown_form_reason
    for scale_index, shift_index in ((1, 0), (0, 1)):
        for returns_norm_only, has_second_norm in (
            (False, False),
            (True, False),
            (False, chunk_count == 9),
        ):
            settings = AdaptiveSettings(
                argument,
                names[0] == argument,
                chunk_count,
                scale_index,
                shift_index,
                returns_norm_only,
                has_second_norm,
            )
            original_forward = partial(type(module).forward, probe, x, **{argument: emb})
            form_forward = partial(compute_adaptive, probe, settings, x, emb)
            if computes_same_in_train_and_eval(
                probe,
                partial(_flatten_outputs, original_forward),
                partial(_flatten_outputs, form_forward),
                x,
                emb,
            ):
                return settings
    return unknown_form_reason


def _flatten_outputs(function: Callable[[], Any]) -> Tensor:
    """Concatenates the outputs of `function` into one vector. The first element of the vector is
    the number of outputs if `function` returns a tuple, or 0 if it returns a single tensor.
    """
    outputs = function()
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.cat(
        [
            torch.tensor([float(len(tensors) if tensors is outputs else 0)]),
            *(t.flatten() for t in tensors if t is not None),
        ]
    )


def compute_adaptive(module: Any, settings: AdaptiveSettings, x: Tensor, emb: Tensor) -> Any:
    chunks = module.linear(module.silu(emb).to(x.dtype)).chunk(settings.chunk_count, dim=1)
    normed = modulate(
        module.norm,
        x,
        scale_BH=chunks[settings.scale_index],
        shift_BH=chunks[settings.shift_index],
    )
    if settings.has_second_norm:
        second_normed = modulate(module.norm, x, scale_BH=chunks[7], shift_BH=chunks[6])
        return normed, *chunks[2:6], second_normed, chunks[8]
    if settings.returns_norm_only:
        return normed
    return (
        normed,
        *(
            chunk
            for i, chunk in enumerate(chunks)
            if i not in (settings.scale_index, settings.shift_index)
        ),
    )


def adaptive_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replaces the forward of an adaptive norm. It runs the forward of the class if the call has
    further arguments besides the embedding.
    """
    settings: AdaptiveSettings = get_forward_settings(self)
    emb = (
        args[0]
        if settings.embedding_is_first and len(args) == 1 and not kwargs
        else kwargs.get(settings.argument)
    )
    if not isinstance(emb, Tensor) or len(args) + len(kwargs) > 1:
        return type(self).forward(self, x, *args, **kwargs)
    return compute_adaptive(self, settings, x, emb)


def place_adaptive(
    path: str, module: Any, norm_output_dtype: torch.dtype | None
) -> list[Placement]:
    """Replaces the forward of an adaptive norm and installs the op on its inner norm, if this gives
    the same output.

    norm_output_dtype  see `place_denoiser_part`
    """
    placement = place_replacement(
        NORM,
        path,
        module,
        adaptive_forward,
        "modulated_layer_norm",
        settings_or_reason=replacement_blocker(module) or recognise_adaptive(module),
    )
    if placement.op is None:
        return [placement]
    return [placement, place_norm(f"{path}.norm", module.norm, norm_output_dtype)]


# --- all parts of a denoiser

# the folders of the ops that this module installs. Their C++ kernels are needed on a CPU
KERNEL_FOLDERS = ("gated", "modulation")


def is_denoiser(model: nn.Module) -> bool:
    return bool(denoiser_blocks(model))


def place_denoiser_part(
    path: str, module: nn.Module, norm_output_dtype: torch.dtype | None
) -> list[Placement]:
    """Replaces this module if it is a block, an adaptive norm, attention or a GELU. Returns the
    manifest entries of this module. For any other module, it returns an empty list.

    norm_output_dtype  the dtype of the outputs of norms; None for the dtype of their inputs
    """
    if is_block(module):
        return place_block(path, module, norm_output_dtype)
    if is_adaptive_norm(module):
        return place_adaptive(path, module, norm_output_dtype)
    if joint_attention.is_candidate(module):
        return [joint_attention.place_joint_attention(path, module)]
    if is_activation(module):
        return [place_activation(path, module)]
    return []
