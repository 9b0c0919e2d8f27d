"""Checks every op on the card, forward and backward, in every dtype that the card supports.

An op and its plain PyTorch reference compute the same inputs. Their errors are the differences from
the reference in fp64. The op passes if its error is at most twice the error of the plain reference.
The sizes are those of real models. There are rows of 4,096 values, vocabularies of 128,256 tokens
and of an odd number of tokens, and 16,384 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import ops
from ..dtypes import to_torch
from ..environment.hardware import detect
from ..ops.attention.op import ATTENTION, attention_reference
from ..ops.contract import OpContract
from ..ops.cross_entropy.op import CROSS_ENTROPY, cross_entropy_reference
from ..ops.experts.op import EXPERTS, experts_reference
from ..ops.gated.op import (
    GELU,
    GELU_MUL,
    SILU_MUL,
    gelu_mul_reference,
    gelu_reference,
    silu_mul_reference,
)
from ..ops.linear_cross_entropy.op import LINEAR_CROSS_ENTROPY, linear_cross_entropy_reference
from ..ops.linear_divergence.op import LINEAR_DIVERGENCE, linear_divergence_reference
from ..ops.modulation.op import (
    GATED_RESIDUAL,
    MODULATED_LAYER_NORM,
    gated_residual_reference,
    modulated_layer_norm_reference,
)
from ..ops.rms_norm.op import ADD_RMS_NORM, RMS_NORM, rms_norm_reference
from ..ops.rope.op import ROPE, rope_reference
from ..ops.token_log_probs import LINEAR_LOG_PROBS, linear_log_probs_reference
from .card import supported_dtypes
from .parts import Row, Scale
from .tolerance import allowed_error, relative_error

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
SEED = 0
IGNORED_LABEL = -100


@dataclass(frozen=True)
class OpCase:
    """An op at one size.

    op, reference  functions of the inputs
    shapes         the shape of each floating input
    tiny_shapes    the same for a test
    make_integers  (shapes, device) -> the input that holds integers, if the op has one
    integer_place  the position of that input among all inputs
    has_head       whether pairs of inputs are hidden states and the weights of a head. The states
                   are scaled so that the logits are a few units, as in a trained model
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    contract: OpContract
    shapes: Shapes
    tiny_shapes: Shapes
    make_integers: Callable[[Shapes, str], Tensor] | None = None
    integer_place: int = -1
    has_head: bool = False


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
    results = ops.linear_log_probs(hidden, weight, labels, outputs=("log_probs", "entropy"))
    assert results.log_probs is not None
    assert results.entropy is not None
    return results.log_probs, results.entropy


def _log_probs_reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    results = linear_log_probs_reference(hidden, weight, labels)
    return results[0], results[1]


def _labels(shapes: Shapes, device: str) -> Tensor:
    """Returns a label for each row; the loss ignores some of the labels. The last shape in `shapes`
    is the shape of the logits or of the head.
    """
    rows = shapes[0][0]
    classes = shapes[-1][0] if len(shapes) > 1 else shapes[0][1]
    labels = torch.arange(rows, device=device) * 7919 % classes
    labels[1::5] = IGNORED_LABEL
    return labels


def _expert_choices(shapes: Shapes, device: str) -> Tensor:
    """The experts of each token. One expert gets no token."""
    tokens, experts = shapes[0][0], shapes[-1][0]
    first = torch.arange(tokens, device=device) * 7 % (experts - 1)
    return torch.stack([first, (first + 1) % (experts - 1)], 1)


CASES = {
    "rms_norm": OpCase(
        ops.rms_norm,
        rms_norm_reference,
        RMS_NORM,
        ((16384, 4096), (4096,)),
        ((40, 64), (64,)),
    ),
    "add_rms_norm": OpCase(
        ops.add_rms_norm,
        _add_then_norm,
        ADD_RMS_NORM,
        ((16384, 4096), (16384, 4096), (4096,)),
        ((40, 64), (40, 64), (64,)),
    ),
    "rms_norm of heads": OpCase(
        ops.rms_norm, rms_norm_reference, RMS_NORM, ((65536, 128), (128,)), ((80, 16), (16,))
    ),
    "silu_mul": OpCase(
        ops.silu_mul,
        silu_mul_reference,
        SILU_MUL,
        ((4096, 14336), (4096, 14336)),
        ((40, 72), (40, 72)),
    ),
    "gelu_mul": OpCase(
        partial(ops.gelu_mul, approximate="tanh"),
        partial(gelu_mul_reference, approximate="tanh"),
        GELU_MUL,
        ((4096, 9216), (4096, 9216)),
        ((40, 72), (40, 72)),
    ),
    "gelu": OpCase(ops.gelu, gelu_reference, GELU, ((4608, 12288),), ((40, 72),)),
    "rope": OpCase(
        partial(_rotate, ops.rope),
        partial(_rotate, rope_reference),
        ROPE,
        ((1, 32, 4096, 128), (1, 8, 4096, 128)),
        ((1, 4, 40, 16), (1, 2, 40, 16)),
    ),
    "attention": OpCase(
        ops.attention,
        attention_reference,
        ATTENTION,
        ((1, 8, 2048, 128), (1, 2, 2048, 128), (1, 2, 2048, 128)),
        ((1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16)),
    ),
    "cross_entropy": OpCase(
        ops.cross_entropy,
        cross_entropy_reference,
        CROSS_ENTROPY,
        ((512, 128256),),
        ((40, 203),),
        make_integers=_labels,
    ),
    "cross_entropy, odd vocabulary": OpCase(
        partial(ops.cross_entropy, softcap=30.0, z_loss=1e-4),
        partial(cross_entropy_reference, softcap=30.0, z_loss=1e-4),
        CROSS_ENTROPY,
        ((512, 151937),),
        ((40, 201),),
        make_integers=_labels,
    ),
    "linear_cross_entropy": OpCase(
        ops.linear_cross_entropy,
        linear_cross_entropy_reference,
        LINEAR_CROSS_ENTROPY,
        ((1024, 1024), (128256, 1024)),
        ((40, 32), (203, 32)),
        make_integers=_labels,
        has_head=True,
    ),
    "linear_log_probs": OpCase(
        _log_probs,
        _log_probs_reference,
        LINEAR_LOG_PROBS,
        ((1024, 1024), (32001, 1024)),
        ((40, 32), (203, 32)),
        make_integers=_labels,
        has_head=True,
    ),
    "linear_divergence": OpCase(
        partial(ops.linear_divergence, beta=0.5),
        partial(linear_divergence_reference, beta=0.5),
        LINEAR_DIVERGENCE,
        ((1024, 1024), (32001, 1024), (1024, 1280), (32001, 1280)),
        ((40, 32), (203, 32), (40, 40), (203, 40)),
        has_head=True,
    ),
    "experts": OpCase(
        ops.experts,
        experts_reference,
        EXPERTS,
        ((4096, 2048), (4096, 2), (16, 2048, 2048), (16, 2048, 1024)),
        ((40, 32), (40, 2), (4, 48, 32), (4, 32, 24)),
        make_integers=_expert_choices,
        integer_place=1,
    ),
    "modulated_layer_norm": OpCase(
        ops.modulated_layer_norm,
        modulated_layer_norm_reference,
        MODULATED_LAYER_NORM,
        ((1, 4608, 3072), (1, 3072), (1, 3072)),
        ((2, 40, 64), (2, 64), (2, 64)),
    ),
    "gated_residual": OpCase(
        ops.gated_residual,
        gated_residual_reference,
        GATED_RESIDUAL,
        ((1, 4608, 3072), (1, 4608, 3072), (1, 3072)),
        ((2, 40, 64), (2, 40, 64), (2, 64)),
    ),
}


def check_ops(scale: Scale) -> Iterator[Row]:
    """Yields a row with the result for each op and each dtype."""
    dtype_names = supported_dtypes(detect(scale.device))
    for name, case in CASES.items():
        for dtype_name in dtype_names:
            yield {"name": f"{name}, {dtype_name}", **check_op(case, dtype_name, scale)}


def check_op(case: OpCase, dtype_name: str, scale: Scale) -> Row:
    """Compares outputs and gradients of one op with fp64, and returns the largest ratio of an error
    to the allowed error.

    ->  passed, `error` and `plain_error` of the tensor with the largest ratio, its name, and the
        `ratio` of the op's error to the allowed one
    """
    dtype = to_torch(dtype_name)
    inputs = _draw_inputs(case, dtype, scale)
    truth = _run(case.reference, case, [_widen(tensor) for tensor in inputs])
    plain = _run(case.reference, case, inputs)
    results = _run(case.op, case, inputs)
    worst: Row = {"passed": True, "tensor": "", "error": 0.0, "plain_error": 0.0, "ratio": 0.0}
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


def _draw_inputs(case: OpCase, dtype: torch.dtype, scale: Scale) -> list[Tensor]:
    generator = torch.Generator(scale.device).manual_seed(SEED)
    shapes = case.tiny_shapes if scale.is_tiny else case.shapes
    inputs = [
        torch.randn(shape, generator=generator, device=scale.device).to(dtype) for shape in shapes
    ]
    if case.has_head:
        for hidden in inputs[::2]:
            hidden /= hidden.shape[1] ** 0.5
    if case.make_integers is not None:
        integers = case.make_integers(shapes, scale.device)
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
    total = sum(
        (output * _ramp(output)).sum()
        for output in outputs
        if isinstance(output, Tensor) and output.is_floating_point()
    )
    gradients = torch.autograd.grad(total, list(differentiable.values()))  # type: ignore[arg-type]  # a tensor
    tensors_by_name = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    tensors_by_name |= {
        f"gradient of {name}": gradient for name, gradient in zip(differentiable, gradients)
    }
    return tensors_by_name


def _ramp(output: Tensor) -> Tensor:
    ramp = torch.linspace(-1, 2, output.numel(), device=output.device, dtype=torch.float64)
    return ramp.view(output.shape).to(output.dtype)
