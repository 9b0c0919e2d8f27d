"""Contains a case for each op, with which `isotype proof` and the first run on a device check the
op's kernels.

An op and its reference in plain PyTorch run on the same inputs. The error of each is its difference
from the reference in fp64. The op passes if its error is at most twice the error of the plain
reference. `isotype proof` uses the sizes of real models: rows of 4,096 values, vocabularies of
128,256 tokens and of an odd number of tokens, and 16,384 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor

from .adamw.op import AdamwHyperparameters, adamw_
from .attention.op import ATTENTION, attention, attention_reference
from .backend import forced_backend
from .contract import OpContract
from .cross_entropy.op import CROSS_ENTROPY, cross_entropy, cross_entropy_reference
from .experts.activation import Clamped
from .experts.op import EXPERTS, Adapter, experts, experts_reference
from .gated.op import (
    GELU,
    GELU_MUL,
    SILU_MUL,
    gelu,
    gelu_mul,
    gelu_mul_reference,
    gelu_reference,
    silu_mul,
    silu_mul_reference,
)
from .linear_cross_entropy.op import (
    LINEAR_CROSS_ENTROPY,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from .linear_divergence.op import (
    LINEAR_DIVERGENCE,
    linear_divergence,
    linear_divergence_reference,
)
from .modulation.op import (
    GATED_RESIDUAL,
    MODULATED_LAYER_NORM,
    gated_residual,
    gated_residual_reference,
    modulated_layer_norm,
    modulated_layer_norm_reference,
)
from .packed import formats
from .packed.formats import KINDS, Layout
from .packed.state import PackedState, dequantise_4bit
from .rms_norm.op import ADD_RMS_NORM, RMS_NORM, add_rms_norm, rms_norm, rms_norm_reference
from .rope.op import ROPE, rope, rope_reference
from .token_log_probs import LINEAR_LOG_PROBS, linear_log_probs, linear_log_probs_reference
from .tolerance import allowed_error, relative_error

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
SEED = 0  # of the random inputs
IGNORED_LABEL = -100  # the loss ignores rows with this label, as in PyTorch


class CheckResult(TypedDict):
    """The result of a check: the output or gradient with the largest ratio of its error to the
    allowed error.

    tensor       its name, such as `output 0` or `gradient of x`
    error        the relative error of the op
    plain_error  the relative error of the reference in plain PyTorch
    ratio        `error` divided by the allowed error; the check is passed if this is at most 1
    """

    passed: bool
    tensor: str
    error: float
    plain_error: float
    ratio: float


@dataclass(frozen=True)
class OpCase:
    """An op at one size.

    kernels        the name of the folder of the kernels that are checked
    op, reference  functions of the inputs
    contract       names the inputs, and the inputs whose gradients are checked
    shapes         the shape of each floating input
    tiny_shapes    smaller shapes, for a test
    make_integers  (shapes, device) -> the input that holds integers, if the op has one
    integer_place  the position of this integer input among all inputs
    has_head       whether the inputs at even positions are hidden states, each followed by the
                   weight of a head. The hidden states are scaled so that the logits are a few
                   units, as in a trained model
    dtypes         the only dtypes in which the kernels run, or () for all
    is_for_gpus    whether the kernels run on GPUs only
    """

    kernels: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    contract: OpContract
    shapes: Shapes
    tiny_shapes: Shapes
    make_integers: Callable[[Shapes, torch.device], Tensor] | None = None
    integer_place: int = -1
    has_head: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    is_for_gpus: bool = False

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the case runs on this device in this dtype."""
        if self.is_for_gpus and device.type == "cpu" and forced_backend() != "triton":
            return False
        return not self.dtypes or dtype in self.dtypes

    def check(
        self, device: torch.device, dtype: torch.dtype, *, is_tiny: bool = True
    ) -> CheckResult:
        """Compares outputs and gradients of the op with fp64, and returns the result for the tensor
        with the largest ratio of its error to the allowed error.
        """
        inputs = _draw_inputs(self, dtype, device, is_tiny=is_tiny)
        truth = _run(self.reference, self, [_widen(tensor) for tensor in inputs])
        plain = _run(self.reference, self, inputs)
        results = _run(self.op, self, inputs)
        worst: CheckResult = {
            "passed": True,
            "tensor": "",
            "error": 0.0,
            "plain_error": 0.0,
            "ratio": 0.0,
        }
        for tensor_name, result in results.items():
            error = relative_error(result, truth[tensor_name])
            plain_error = relative_error(plain[tensor_name], truth[tensor_name])
            ratio = error / allowed_error(plain_error, result.dtype)
            if ratio > worst["ratio"]:
                worst = {
                    "passed": ratio <= 1.0,
                    "tensor": tensor_name,
                    "error": error,
                    "plain_error": plain_error,
                    "ratio": ratio,
                }
        return worst


def _rotate(function: Callable[..., Any], q: Tensor, k: Tensor) -> Any:
    """Applies `rope` or its reference to q and k. The tables of cosines and sines are computed in
    fp32, as in transformers.
    """
    pairs = q.shape[-1] // 2
    positions = torch.arange(q.shape[2], device=q.device, dtype=torch.float64)
    rates = 10000.0 ** (-torch.arange(pairs, device=q.device, dtype=torch.float64) / pairs)
    angles = positions[:, None] * rates
    dtype = torch.promote_types(q.dtype, torch.float32)
    cos = angles.cos().to(torch.float32).to(dtype)
    sin = angles.sin().to(torch.float32).to(dtype)
    return function(q, k, cos[None], sin[None])


def _add_then_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The reference of `add_rms_norm`."""
    total = x + residual
    return rms_norm_reference(total, weight), total


def _log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    results = linear_log_probs(hidden, weight, labels, outputs=("log_probs", "entropy"))
    assert results.log_probs is not None
    assert results.entropy is not None
    return results.log_probs, results.entropy


def _log_probs_reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    results = linear_log_probs_reference(hidden, weight, labels)
    return results[0], results[1]


def _experts_with_adapters(
    function: Callable[..., Any],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *adapters: Tensor,
) -> Any:
    """Applies `experts` or its reference with LoRA adapters and gpt-oss's activation."""
    a_up, b_up, a_down, b_down = adapters
    return function(
        x,
        index,
        weights,
        up,
        down,
        up_adapter=Adapter(a_up, b_up, 2.0),
        down_adapter=Adapter(a_down, b_down, 0.5),
        activation=Clamped(1.702, 7.0),
    )


def _pack(kind: str, weight: Tensor, scale: Tensor) -> tuple[Tensor, PackedState]:
    """Returns a packed weight with arbitrary numbers and scales, as (bytes, state)."""
    rows, columns = weight.shape
    if kind == "int4":
        numbers = (weight.float() * 64).to(torch.int8).view(torch.int32)[:, : columns // 8]
        packed_tensor = ("weight_packed", torch.int32, (rows, columns // 8))
        layout = Layout("packed_rows", (rows, columns), packed_tensor, block=(1, 32), bits=4)
        tensors = {"weight_scale": scale}
    elif kind == "fp4":
        numbers = (weight.float() * 64).to(torch.int8)[:, : columns // 2]
        packed_tensor = ("weight_packed", torch.uint8, (rows, columns // 2))
        layout = Layout("mxfp4", (rows, columns), packed_tensor, block=(1, 32))
        exponents = (scale.float().abs() * 2).to(torch.uint8) + 125
        tensors = {"weight_scale": exponents}
    else:
        dtype = _EIGHT_BITS[kind]
        factor = 30.0 if kind == "int8" else 1.0
        numbers = (weight.float() * factor).to(dtype)
        packed_tensor = ("weight", dtype, (rows, columns))
        layout = Layout("scaled", (rows, columns), packed_tensor, block=(1, columns))
        tensors = {"weight_scale": scale[:, :1]}
        if kind == "int8":
            tensors["weight_zero_point"] = (scale[:, :1].float() * 8).to(torch.int8)
    # the name of the dtype is only used in messages; the layout decides how a weight is decoded
    state = PackedState(layout, dtype_name="int8", tensors=tensors)
    return numbers.contiguous().view(torch.uint8), state


# the dtype of the values of each 8-bit kind
_EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def _dequantise(kind: str, weight: Tensor, scale: Tensor) -> Tensor:
    packed, state = _pack(kind, weight, scale)
    return state.dequantise(packed, weight.dtype)


def _dequantise_reference(kind: str, weight: Tensor, scale: Tensor) -> Tensor:
    packed, state = _pack(kind, weight, scale)
    layout = state.layout
    name, dtype, shape = layout.packed_tensor
    tensors = {**state.tensors, name: packed.reshape(-1).view(dtype).view(shape)}
    decode: Callable[..., Tensor] = getattr(formats, layout.format)
    wide = torch.promote_types(torch.float32, weight.dtype)
    return decode(tensors, slice(0, layout.shape[0]), wide, layout).to(weight.dtype)


def _make_4bit_state(weight: Tensor, scale: Tensor, *, nested: bool) -> Any:
    """Returns a state like bitsandbytes' QuantState, with a table of 16 numbers."""
    state = SimpleNamespace(
        code=torch.linspace(-1, 1, 16, device=weight.device, dtype=torch.float32),
        absmax=scale.float().abs().reshape(-1),
        blocksize=_BLOCK_4BIT,
        quant_type="nf4",
        shape=torch.Size((weight.shape[0], weight.shape[1])),
        nested=nested,
    )
    if nested:
        state.state2 = SimpleNamespace(
            absmax=torch.full((1,), 3.0, device=weight.device),
            code=torch.linspace(-1, 1, 256, device=weight.device, dtype=torch.float32),
            blocksize=256,
        )
        state.offset = torch.tensor(1.5, device=weight.device)
        state.absmax = (state.absmax * 80).clamp(max=255).to(torch.uint8)
    return state


def _pack_4bit(weight: Tensor) -> Tensor:
    numbers = (weight.float() * 64).to(torch.int8).view(torch.uint8)
    return numbers.reshape(-1)[: weight.numel() // 2].contiguous()


def _dequantise_4bit(nested: bool, weight: Tensor, scale: Tensor) -> Tensor:
    state = _make_4bit_state(weight, scale, nested=nested)
    return dequantise_4bit(_pack_4bit(weight), state, weight.dtype)


def _dequantise_4bit_reference(nested: bool, weight: Tensor, scale: Tensor) -> Tensor:
    state = _make_4bit_state(weight, scale, nested=nested)
    absmax = state.absmax
    if nested:
        absmax = state.state2.code[absmax.long()] * state.state2.absmax + state.offset
    packed = _pack_4bit(weight)
    halves = torch.stack((packed >> 4, packed & 15), 1).reshape(-1, state.blocksize)
    numbers: Tensor = state.code[halves.long()] * absmax[:, None]
    return numbers.view(weight.shape).to(weight.dtype)


_BLOCK_4BIT = 64  # values that share a scale
_ADAMW = AdamwHyperparameters(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3)


def _update(seed: int | None, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weight, mean and square after one step of `adamw_`.

    seed  the seed of stochastic rounding; None rounds to the nearest value
    """
    mean, square = _make_moments(gradient)
    weight = weight.clone()
    adamw_(weight, gradient, mean, square, _ADAMW, seed=seed)
    return weight, mean, square


def _update_reference(weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a step of AdamW in fp64, and rounds each result once."""
    mean, square = _make_moments(gradient)
    settings = _ADAMW
    g = gradient.double()
    new_mean = mean.double() * settings.beta1 + g * (1 - settings.beta1)
    new_square = square.double() * settings.beta2 + g * g * (1 - settings.beta2)
    denominator = (new_square * settings.square_correction).sqrt() + settings.eps
    decay = weight.double() * settings.decay_rate
    change = decay + settings.step_size * new_mean / denominator
    new_weight = weight.double() - change
    return new_weight.to(weight.dtype), new_mean.to(mean.dtype), new_square.to(square.dtype)


def _make_moments(gradient: Tensor) -> tuple[Tensor, Tensor]:
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide * 0.5, wide.square() * 0.25


def _labels(shapes: Shapes, device: torch.device) -> Tensor:
    """Returns a label for each row; the loss ignores some of the labels. The last shape in `shapes`
    is the shape of the logits or of the head.
    """
    rows = shapes[0][0]
    classes = shapes[-1][0] if len(shapes) > 1 else shapes[0][1]
    # a prime number, so that the labels of neighbouring rows are far apart
    labels = torch.arange(rows, device=device) * 7919 % classes
    labels[1::5] = IGNORED_LABEL
    return labels


def _expert_choices(shapes: Shapes, device: torch.device) -> Tensor:
    """The experts of each token. One expert gets no token."""
    token_count, expert_count = shapes[0][0], shapes[-1][0]
    first = torch.arange(token_count, device=device) * 7 % (expert_count - 1)
    return torch.stack([first, (first + 1) % (expert_count - 1)], 1)


# --- contracts of functions that are no ops themselves

# T is the number of tokens, H the hidden size, C the number of experts per token, E the number of
# experts, G the features of gate and up together, I the inner size, and R the rank. `index` has the
# chosen experts of a token, and `weights` their weights. The adapters (A, B) belong to `up` and
# `down`. The letters before the brackets are dtypes: X of x, W of weights, U of up, D of down, and A
# of the adapters
ADAPTED_EXPERTS = OpContract(
    "x: X[t h], index: int[t c], weights: W[t c], up: U[e g h], down: D[e h i], a_up: A[e r h],"
    " b_up: A[e g r], a_down: A[e r i], b_down: A[e h r] -> X[t h]",
    grads={"x": "X", "a_up": "A", "b_up": "A", "a_down": "A", "b_down": "A"},
)
# O output features, K input features, and B blocks of a row with a scale each; F is any float dtype
PACKED = OpContract("weight: F[o k], scale: F[o b] -> F[o k]")
# N weights; the outputs are the new weight and the two moments
UPDATE = OpContract("weight: F[n], gradient: F[n] -> F[n], fp32[n], fp32[n]")


# name of the case in the results of `isotype proof` -> the case
CASES = {
    "rms_norm": OpCase(
        "rms_norm",
        rms_norm,
        rms_norm_reference,
        RMS_NORM,
        ((16384, 4096), (4096,)),
        ((40, 64), (64,)),
    ),
    "add_rms_norm": OpCase(
        "rms_norm",
        add_rms_norm,
        _add_then_norm,
        ADD_RMS_NORM,
        ((16384, 4096), (16384, 4096), (4096,)),
        ((40, 64), (40, 64), (64,)),
    ),
    "rms_norm of heads": OpCase(
        "rms_norm",
        rms_norm,
        rms_norm_reference,
        RMS_NORM,
        ((65536, 128), (128,)),
        ((80, 16), (16,)),
    ),
    "silu_mul": OpCase(
        "gated",
        silu_mul,
        silu_mul_reference,
        SILU_MUL,
        ((4096, 14336), (4096, 14336)),
        ((40, 72), (40, 72)),
    ),
    "gelu_mul": OpCase(
        "gated",
        partial(gelu_mul, approximate="tanh"),
        partial(gelu_mul_reference, approximate="tanh"),
        GELU_MUL,
        ((4096, 9216), (4096, 9216)),
        ((40, 72), (40, 72)),
    ),
    "gelu": OpCase("gated", gelu, gelu_reference, GELU, ((4608, 12288),), ((40, 72),)),
    "rope": OpCase(
        "rope",
        partial(_rotate, rope),
        partial(_rotate, rope_reference),
        ROPE,
        ((1, 32, 4096, 128), (1, 8, 4096, 128)),
        ((1, 4, 40, 16), (1, 2, 40, 16)),
    ),
    "attention": OpCase(
        "attention",
        attention,
        attention_reference,
        ATTENTION,
        ((1, 8, 2048, 128), (1, 2, 2048, 128), (1, 2, 2048, 128)),
        ((1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16)),
    ),
    "cross_entropy": OpCase(
        "cross_entropy",
        cross_entropy,
        cross_entropy_reference,
        CROSS_ENTROPY,
        ((512, 128256),),
        ((40, 203),),
        make_integers=_labels,
    ),
    "cross_entropy, odd vocabulary": OpCase(
        "cross_entropy",
        partial(cross_entropy, softcap=30.0, z_loss=1e-4),
        partial(cross_entropy_reference, softcap=30.0, z_loss=1e-4),
        CROSS_ENTROPY,
        ((512, 151937),),
        ((40, 201),),
        make_integers=_labels,
    ),
    "linear_cross_entropy": OpCase(
        "cross_entropy",
        linear_cross_entropy,
        linear_cross_entropy_reference,
        LINEAR_CROSS_ENTROPY,
        ((1024, 1024), (128256, 1024)),
        ((40, 32), (203, 32)),
        make_integers=_labels,
        has_head=True,
    ),
    "linear_log_probs": OpCase(
        "cross_entropy",
        _log_probs,
        _log_probs_reference,
        LINEAR_LOG_PROBS,
        ((1024, 1024), (32001, 1024)),
        ((40, 32), (203, 32)),
        make_integers=_labels,
        has_head=True,
    ),
    "linear_divergence": OpCase(
        "linear_divergence",
        partial(linear_divergence, beta=0.5),
        partial(linear_divergence_reference, beta=0.5),
        LINEAR_DIVERGENCE,
        ((1024, 1024), (32001, 1024), (1024, 1280), (32001, 1280)),
        ((40, 32), (203, 32), (40, 40), (203, 40)),
        has_head=True,
    ),
    "experts": OpCase(
        "experts",
        experts,
        experts_reference,
        EXPERTS,
        ((4096, 2048), (4096, 2), (16, 2048, 2048), (16, 2048, 1024)),
        ((40, 32), (40, 2), (4, 48, 32), (4, 32, 24)),
        make_integers=_expert_choices,
        integer_place=1,
    ),
    "experts with adapters": OpCase(
        "experts",
        partial(_experts_with_adapters, experts),
        partial(_experts_with_adapters, experts_reference),
        ADAPTED_EXPERTS,
        (
            (4096, 2048),
            (4096, 2),
            (16, 2048, 2048),
            (16, 2048, 1024),
            (16, 16, 2048),
            (16, 2048, 16),
            (16, 16, 1024),
            (16, 2048, 16),
        ),
        (
            (40, 32),
            (40, 2),
            (4, 48, 32),
            (4, 32, 24),
            (4, 8, 32),
            (4, 48, 8),
            (4, 8, 24),
            (4, 32, 8),
        ),
        make_integers=_expert_choices,
        integer_place=1,
    ),
    "modulated_layer_norm": OpCase(
        "modulation",
        modulated_layer_norm,
        modulated_layer_norm_reference,
        MODULATED_LAYER_NORM,
        ((1, 4608, 3072), (1, 3072), (1, 3072)),
        ((2, 40, 64), (2, 64), (2, 64)),
    ),
    "gated_residual": OpCase(
        "modulation",
        gated_residual,
        gated_residual_reference,
        GATED_RESIDUAL,
        ((1, 4608, 3072), (1, 4608, 3072), (1, 3072)),
        ((2, 40, 64), (2, 40, 64), (2, 64)),
    ),
    "adamw": OpCase(
        "adamw",
        partial(_update, None),
        _update_reference,
        UPDATE,
        ((1 << 22,), (1 << 22,)),
        ((1030,), (1030,)),
    ),
    "adamw, stochastic rounding": OpCase(
        "adamw",
        partial(_update, 7),
        _update_reference,
        UPDATE,
        ((1 << 22,), (1 << 22,)),
        ((1030,), (1030,)),
        dtypes=(torch.bfloat16,),
    ),
    **{
        f"dequantised {kind}": OpCase(
            "packed",
            partial(_dequantise, kind),
            partial(_dequantise_reference, kind),
            PACKED,
            ((4096, 4096), (4096, 128)),
            ((40, 64), (40, 2)),
        )
        for kind in KINDS
    },
    **{
        f"dequantised 4-bit{suffix}": OpCase(
            "packed",
            partial(_dequantise_4bit, nested),
            partial(_dequantise_4bit_reference, nested),
            PACKED,
            ((4096, 4096), (4096, 64)),
            ((40, 64), (40, 1)),
            is_for_gpus=True,
        )
        for suffix, nested in (("", False), (", quantised scales", True))
    },
}


def _draw_inputs(
    case: OpCase, dtype: torch.dtype, device: torch.device, *, is_tiny: bool
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(SEED)
    shapes = case.tiny_shapes if is_tiny else case.shapes
    inputs = [
        torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for shape in shapes
    ]
    if case.has_head:
        for hidden in inputs[::2]:
            hidden /= hidden.shape[1] ** 0.5
    if case.make_integers is not None:
        integers = case.make_integers(shapes, device)
        position = case.integer_place if case.integer_place >= 0 else len(inputs)
        inputs.insert(position, integers)
    return inputs


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _run(function: Callable[..., Any], case: OpCase, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Returns outputs and gradients by name. The upstream gradient of an output consists of evenly
    spaced values.
    """
    arguments = [tensor.detach().clone() for tensor in inputs]
    differentiable = {}
    for name, tensor in zip(case.contract.inputs, arguments):
        if name in case.contract.grads:
            differentiable[name] = tensor.requires_grad_()
    outputs = function(*arguments)
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    tensors_by_name = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    if not differentiable:
        return tensors_by_name
    products = [
        (output * _ramp(output)).sum()
        for output in outputs
        if isinstance(output, Tensor) and output.is_floating_point()
    ]
    total = sum(products[1:], start=products[0])
    gradients = torch.autograd.grad(total, list(differentiable.values()))
    tensors_by_name |= {
        f"gradient of {name}": gradient for name, gradient in zip(differentiable, gradients)
    }
    return tensors_by_name


def _ramp(output: Tensor) -> Tensor:
    ramp = torch.linspace(-1, 2, output.numel(), device=output.device, dtype=torch.float64)
    return ramp.view(output.shape).to(output.dtype)
