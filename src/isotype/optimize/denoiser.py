"""The parts of diffusers' transformers that have ops: blocks, adaptive norms, activations;
attention has a file of its own.

Blocks of diffusers' transformers with a stream for the picture and one for the text, or one for
both (Flux, SD3): known by their children and a probe.

The instance's forward becomes one that calls the same children and adds to a stream by
`gated_residual`. In a block of one stream the last layer reads attention's result and the
activation side by side, and backward makes both again from what they were made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..instance_method import Placement, get_settings
from ..ops import gated_residual, gelu, modulated_layer_norm
from ..ops.recomputable import find_recipe, mark_recomputable, propagate_recomputable
from ..precision.apply import denoiser_blocks
from . import joint_attention
from .forwards import changed_before
from .instances import once_a_kind, put_found, same_in_both_modes, stand_in, taken

BLOCK = "block"
NORM = "modulated norm"
ACTIVATION = "activation"
_TWO = ("norm1", "norm1_context", "attn", "norm2", "ff")
_TEXT = ("norm2_context", "ff_context")
_ONE = ("norm", "proj_mlp", "act_mlp", "attn", "proj_out")
_WIDTH = 6


Form = Callable[..., Any]  # two_streams or one_stream


def is_block(module: nn.Module) -> bool:
    has = [name for name in (*_TWO, *_ONE) if isinstance(getattr(module, name, None), nn.Module)]
    return type(module).__module__.startswith("diffusers.") and (
        set(_TWO) <= set(has) or set(_ONE) <= set(has)
    )


# the forms: (block, picture [B T H], text [B S H], embedding of the time [B H], what attention is
# given besides) -> (text, picture)


def two_streams(
    block: Any, picture: Tensor, text: Tensor, emb: Tensor, given: dict[str, Any]
) -> tuple[Tensor | None, Tensor]:
    rows, gate, *of_mlp = block.norm1(picture, emb=emb)
    second = of_mlp[3:]
    last = block.norm2_context is None
    if last:
        text_rows, *of_text = (block.norm1_context(text, emb),)
    else:
        text_rows, *of_text = block.norm1_context(text, emb=emb)
    attended, text_attended = block.attn(
        hidden_states=rows, encoder_hidden_states=text_rows, **given
    )
    picture = _added_within(picture, attended, gate)
    if second:
        picture = _added_within(picture, block.attn2(hidden_states=second[0], **given), second[1])
    picture = _after_mlp(block.norm2, block.ff, picture, *of_mlp[:3])
    if last:
        return None, picture
    text = _added_within(text, text_attended, of_text[0])
    return _after_mlp(block.norm2_context, block.ff_context, text, *of_text[1:]), picture


def _added(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """The stream with x added to it; a stream of another dtype is added to as the class does."""
    if residual.dtype == x.dtype:
        return gated_residual(residual, x, gate)
    return residual + gate[:, None] * x


def _added_within(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """`_added`, for a norm that follows in the same block and makes it again: the norm before keeps
    the residual, the gate's gradient x. A block's result is the next one's input: where blocks
    recompute, it would keep both alive.
    """
    made = _added(residual, x, gate)
    if gate.requires_grad and find_recipe(residual) is None:
        return mark_recomputable(made, _added, residual, x, gate)
    return made


def _after_mlp(
    norm: nn.Module, mlp: nn.Module, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor
) -> Tensor:
    return _added(x, mlp(modulated(norm, x, scale, shift)), gate)


def one_stream(
    block: Any, picture: Tensor, text: Tensor, emb: Tensor, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    stream = torch.cat((text, picture), 1)
    both, gate = _attended_and_inner(block, stream, emb, given)
    stream = _added(stream, block.proj_out(both), gate)
    text, picture = stream.split((text.shape[1], picture.shape[1]), 1)
    return text, picture


def _attended_and_inner(
    block: Any, stream: Tensor, emb: Tensor, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(what the last layer reads, the gate): a function, so that what they are made of is given up
    before that layer runs.
    """
    rows, gate = block.norm(stream, emb=emb)
    inner = block.act_mlp(block.proj_mlp(rows))
    attended = block.attn(hidden_states=rows, **given)
    return propagate_recomputable(
        torch.cat((attended, inner), 2), _side_by_side, attended, inner
    ), gate


def _side_by_side(attended: Tensor, inner: Tensor) -> Tensor:
    return torch.cat((attended, inner), 2)


class _Rows(nn.Module):
    """Stands for a child in the probe: a function of its own, of one tensor or of picture and text,
    with more outputs where it has those.

    more  the outputs after the rows: vectors of the embedding, or (at `again`) the rows a second
          time
    """

    def __init__(self, shift: float, more: int = 0, *, again: int = -1, wider: int = 1) -> None:
        super().__init__()
        self.shift = shift
        self.more = more
        self.again = again
        self.wider = wider

    def forward(self, x: Tensor | None = None, emb: Tensor | None = None, **given: Any) -> Any:
        x = given.get("hidden_states") if x is None else x
        assert x is not None
        text = given.get("encoder_hidden_states")
        if text is not None:
            return self._rows(x) + self._rows(text).mean(1, keepdim=True), self._rows(
                text
            ) - self._rows(x).mean(1, keepdim=True)
        rows = self._rows(x) if emb is None else self._rows(x) * emb[:, None]
        if not self.more:
            return rows
        assert emb is not None
        return rows, *(
            self._rows(x) * 0.3 if i == self.again else (emb * (i + 2 + self.shift)).cos()
            for i in range(self.more)
        )

    def _rows(self, x: Tensor) -> Tensor:
        made = (x * (1.0 + self.shift)).sin() + self.shift
        return torch.cat([made * (i + 1) for i in range(self.wider)], -1)


class _Narrower(_Rows):
    """Stands for a layer whose input is wider than its output."""

    def _rows(self, x: Tensor) -> Tensor:
        parts = x.split(_WIDTH, -1)
        return sum(
            ((part * (i + 1.0)).sin() for i, part in enumerate(parts)), torch.zeros_like(parts[0])
        )


@once_a_kind
def recognise_block(module: Any) -> Form | str:
    """The form that gives this module's output on a probe, or why none does."""
    unknown = "its output is not that of a known form on a probe"
    stubs: dict[str, nn.Module]
    if isinstance(getattr(module, "norm1_context", None), nn.Module):
        last = getattr(module, "norm2_context", None) is None
        second = getattr(module, "attn2", None) is not None
        stubs = {
            "norm1": _Rows(0.1, 6, again=4) if second else _Rows(0.1, 4),
            "norm1_context": _Rows(0.2, 0 if last else 4),
            "attn": _Rows(0.3),
            "ff": _Rows(0.5),
            **({"attn2": _Rows(0.6)} if second else {}),
            **({} if last else {"ff_context": _Rows(0.8)}),
        }
        norms = {
            name: getattr(module, name)
            for name in ("norm2", "norm2_context")
            if getattr(module, name, None) is not None
        }
        if not all(is_plain_norm(norm) for norm in norms.values()):
            return unknown
        stubs |= {
            name: nn.LayerNorm(_WIDTH, norm.eps, elementwise_affine=False)
            for name, norm in norms.items()
        }
    else:
        stubs = {
            "norm": _Rows(0.1, 1),
            "proj_mlp": _Rows(0.2, wider=4),
            "act_mlp": _Rows(0.3),
            "attn": _Rows(0.4),
            "proj_out": _Narrower(0.5),
        }
    form: Form = two_streams if "norm1_context" in stubs else one_stream
    twin = stand_in(module, stubs, {})
    generator = torch.Generator().manual_seed(0)
    picture, text = (
        torch.randn(2, n, _WIDTH, generator=generator, dtype=torch.float64) for n in (3, 2)
    )
    emb = torch.randn(2, _WIDTH, generator=generator, dtype=torch.float64)
    own = partial(
        type(module).forward, twin, hidden_states=picture, encoder_hidden_states=text, temb=emb
    )
    ours = partial(form, twin, picture, text, emb, {})
    same = same_in_both_modes(
        twin, partial(_in_one_row, own), partial(_in_one_row, ours), picture, text, emb
    )
    return form if same else unknown


def stream_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    **others: Any,
) -> Any:
    """The form; the class's forward where attention is told more, rows are cut into chunks, or fp16
    is to be clipped.
    """
    streams = (hidden_states, encoder_hidden_states)
    usual = not joint_attention_kwargs and not others and getattr(self, "_chunk_size", None) is None
    usual = (
        usual
        and all(x.dtype != torch.float16 and x.dim() == 3 for x in streams)
        and temb.dim() == 2
    )
    given = {} if image_rotary_emb is None else {"image_rotary_emb": image_rotary_emb}
    if usual:
        form: Form = get_settings(self)
        return form(self, hidden_states, encoder_hidden_states, temb, given)
    if joint_attention_kwargs is None:
        more = {}
    else:
        more = {"joint_attention_kwargs": joint_attention_kwargs}
    return type(self).forward(
        self, hidden_states, encoder_hidden_states, temb, **given, **more, **others
    )


def gelu_forward(self: Any, x: Tensor) -> Tensor:
    return gelu(x, approximate=self.approximate)


def projected_gelu_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return gelu(self.proj(hidden_states), approximate=self.approximate)


def is_activation(module: Any) -> bool:
    """Whether it is diffusers' layer of an MLP with its GELU."""
    ours = type(module).__module__.startswith("diffusers.") and type(module).__name__ == "GELU"
    return (
        ours
        and isinstance(getattr(module, "proj", None), nn.Module)
        and module.approximate in ("none", "tanh")
    )


def place_activation(path: str, module: Any) -> Placement:
    """Puts `gelu` on diffusers' layer of an MLP, or on PyTorch's GELU, where it gives the module's
    output.
    """
    reason = taken(module)
    if reason is None and hasattr(module, "proj"):
        twin = stand_in(module, {"proj": nn.Identity()}, {})
        x = torch.linspace(-3.0, 3.0, 12, dtype=torch.float64)
        if not same_in_both_modes(
            twin,
            partial(type(module).forward, twin, x),
            partial(projected_gelu_forward, twin, x),
            x,
        ):
            reason = "its output is not GELU's on a probe"
    return put_found(
        ACTIVATION,
        path,
        module,
        reason,
        projected_gelu_forward if hasattr(module, "proj") else gelu_forward,
        "gelu",
    )


def place_block(path: str, module: Any, out_dtype: torch.dtype | None) -> list[Placement]:
    """Puts the form on the block at this path of the model, and ops on its norms and its
    activation, where it gives the block's output.
    """
    made = [
        put_found(
            BLOCK,
            path,
            module,
            taken(module) or recognise_block(module),
            stream_forward,
            "gated_residual",
        )
    ]
    if made[0].op is None:
        return made
    for name in ("norm2", "norm2_context"):
        if getattr(module, name, None) is not None:
            made.append(place_norm(f"{path}.{name}", getattr(module, name), out_dtype))
    if type(getattr(module, "act_mlp", None)) is nn.GELU:
        made.append(place_activation(f"{path}.act_mlp", module.act_mlp))
    return made


# --- LayerNorm without weights that a picture's own scale and shift follow (adaptive LayerNorm).
# Two kinds of place: a module that computes scale, shift and more of the time's embedding and
# returns the modulated rows with the rest (`AdaLayerNormZero` and its like), and a block that
# modulates a norm's output itself. Either calls the norm through `modulated`, so that whoever
# observes the norm sees a call of it


@dataclass(frozen=True)
class AdaptiveSettings:
    """argument    the embedding's name in the forward; first: it is the first one after x
    chunks      of the linear layer's output
    scale, shift  which of them; the others are returned after the rows
    alone       the rows are returned without others
    twice       nine chunks: after the fourth of the others, the same rows come again with the
                seventh as shift and the eighth as scale
    """

    argument: str
    first: bool
    chunks: int
    scale: int
    shift: int
    alone: bool
    twice: bool


def is_plain_norm(module: Any) -> bool:
    """Whether it is PyTorch's own LayerNorm over the last dimension, without weights."""
    return (
        type(module) is nn.LayerNorm
        and not module.elementwise_affine
        and len(module.normalized_shape) == 1
    )


def is_adaptive_norm(module: nn.Module) -> bool:
    """Whether it is a norm of diffusers with its own linear layer for scale and shift."""
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
    if modulation is None:
        own: Tensor = type(self).forward(self, x)
        return own
    return modulated_layer_norm(x, *modulation, self.eps, out_dtype=get_settings(self))


def modulated(norm: Any, x: Tensor, scale_BH: Tensor, shift_BH: Tensor) -> Tensor:
    """norm(x) * (1 + scale) + shift, by the op where `place_norm` has put it and nothing else
    follows the norm.
    """
    if (
        getattr(vars(norm).get("forward"), "__func__", None) is layer_norm_forward
        and x.dim() == 3
        and not _changed_by_hooks(norm)
    ):
        made: Tensor = norm(x, modulation=(scale_BH, shift_BH))
        return made
    rows: Tensor = norm(x) * (1 + scale_BH[:, None]) + shift_BH[:, None]
    return rows


def _changed_by_hooks(norm: nn.Module) -> bool:
    """Whether a hook may change what the norm is given or gives: one that only narrows the output
    to the op's own dtype does not.
    """
    if changed_before(norm):
        return True
    out_dtype = get_settings(norm)
    after = [hook for hook in norm._forward_hooks.values() if not getattr(hook, "observes", False)]
    return any(
        getattr(hook, "narrows_to", None) is not out_dtype or out_dtype is None for hook in after
    )


def place_norm(path: str, norm: nn.Module, out_dtype: torch.dtype | None) -> Placement:
    """Lets a LayerNorm without weights run `modulated_layer_norm` where `modulated` calls it."""
    return put_found(
        NORM, path, norm, taken(norm) or out_dtype, layer_norm_forward, "modulated_layer_norm"
    )


@once_a_kind
def recognise_adaptive(module: Any) -> AdaptiveSettings | str:
    """The settings with which `adaptive_forward` gives this module's output on a probe, or why none
    do.
    """
    unknown = "its output is not a LayerNorm's, scaled and shifted, on a probe"
    width = module.norm.normalized_shape[0]
    outer = getattr(module.linear, "out_features", 0)
    if outer % width:
        return unknown
    chunks = outer // width
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(_WIDTH, chunks * _WIDTH, dtype=torch.float64)
    for p in linear.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    tiny = {
        "linear": linear,
        "norm": nn.LayerNorm(_WIDTH, eps=module.norm.eps, elementwise_affine=False),
    }
    twin = stand_in(module, tiny, {})
    x = torch.randn(2, 3, _WIDTH, generator=generator, dtype=torch.float64) * 1e-2
    emb = torch.randn(2, _WIDTH, generator=generator, dtype=torch.float64)
    names = list(inspect.signature(type(module).forward).parameters)[2:]
    argument = next((name for name in ("emb", "conditioning_embedding") if name in names), None)
    if argument is None:
        return unknown
    for scale, shift in ((1, 0), (0, 1)):
        for alone, twice in ((False, False), (True, False), (False, chunks == 9)):
            s = AdaptiveSettings(argument, names[0] == argument, chunks, scale, shift, alone, twice)
            own = partial(type(module).forward, twin, x, **{argument: emb})
            ours = partial(compute, twin, s, x, emb)
            if same_in_both_modes(
                twin, partial(_in_one_row, own), partial(_in_one_row, ours), x, emb
            ):
                return s
    return unknown


def _in_one_row(make: Callable[[], Any]) -> Tensor:
    """The outputs in one row, their number first: 0 for a tensor that is in no tuple."""
    made = make()
    many = made if isinstance(made, tuple) else (made,)
    return torch.cat(
        [
            torch.tensor([float(len(many) if many is made else 0)]),
            *(t.flatten() for t in many if t is not None),
        ]
    )


def compute(module: Any, s: AdaptiveSettings, x: Tensor, emb: Tensor) -> Any:
    parts = module.linear(module.silu(emb).to(x.dtype)).chunk(s.chunks, dim=1)
    rows = modulated(module.norm, x, parts[s.scale], parts[s.shift])
    if s.twice:
        return rows, *parts[2:6], modulated(module.norm, x, parts[7], parts[6]), parts[8]
    if s.alone:
        return rows
    return (rows, *(part for i, part in enumerate(parts) if i not in (s.scale, s.shift)))


def adaptive_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The form; the class's forward for a call with other arguments than the embedding."""
    s: AdaptiveSettings = get_settings(self)
    emb = args[0] if s.first and len(args) == 1 and not kwargs else kwargs.get(s.argument)
    if not isinstance(emb, Tensor) or len(args) + len(kwargs) > 1:
        return type(self).forward(self, x, *args, **kwargs)
    return compute(self, s, x, emb)


def place_adaptive(path: str, module: Any, out_dtype: torch.dtype | None) -> list[Placement]:
    """Puts the form on the module at this path of the model, and the op on its norm, where it gives
    the module's output.
    """
    made = put_found(
        NORM,
        path,
        module,
        taken(module) or recognise_adaptive(module),
        adaptive_forward,
        "modulated_layer_norm",
    )
    if made.op is None:
        return [made]
    return [made, place_norm(f"{path}.norm", module.norm, out_dtype)]


# --- all of them

OPS = ("gated", "modulation")


def is_denoiser(model: nn.Module) -> bool:
    return bool(denoiser_blocks(model))


def place(path: str, module: nn.Module, out_dtype: torch.dtype | None) -> list[Placement]:
    """What became of this module of the model; nothing for one that is no such part."""
    if is_block(module):
        return place_block(path, module, out_dtype)
    if is_adaptive_norm(module):
        return place_adaptive(path, module, out_dtype)
    if joint_attention.is_candidate(module):
        return [joint_attention.place(path, module)]
    if is_activation(module):
        return [place_activation(path, module)]
    return []
