"""`lora_linear` computes x Wᵀ + bias + scale (x Aᵀ) Bᵀ in one autograd function. Groups of
projections (`lora.group`) also use the functions of this module.

These tensors are saved for backward: x (or the tensors from which x is recomputed, see
`ops.recomputable`), x Aᵀ (tokens x rank), the weight, A and B, and one byte per element with
dropout. The matrix products for the gradients of A and B are summed in fp32. The sums are
multiplied by the scale before they are rounded.

T is the number of tokens, K the number of input features, O the number of output features, and R
the rank. In the contracts of ops, `*n` are the leading dimensions of x (T is their product), and
the lower-case letters k, o and r are K, O and R. The upper-case letters before the brackets are
dtypes: X of x, W of the weight, and A of both adapter matrices.

In names, `branch` is the computation with the adapter, scale (x Aᵀ) Bᵀ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dtypes import format_dtype
from ..environment.planned_device import target_device_type
from ..errors import DtypeError, ShapeError
from ..ops.backend import (
    apply_function,
    autocast_dtype,
    autocast_off,
    eager_apply,
    fast_autocast_off,
    refuse_second_derivative,
    unsafe_view,
)
from ..ops.contract import OpContract
from ..ops.recomputable import recompute, saved_or_recomputed
from ..ops.recomputed_layer import is_output_unused, placeholder_tensor, running_checkpointed_layers
from ..ops.widened_products import (
    addmm_,
    linear,
    matmul,
    matmul_fp32,
    matmul_with_branch,
    widens_products,
)
from .products import (
    MAX_FEW_ROWS,
    MAX_KERNEL_RANK,
    add_product_,
    can_add_in_one_pass,
    can_call_few_rows,
    can_call_kernels_directly,
    can_run_few_rows,
    cast_adapters,
    few_rows_product,
    gradient_product,
    row_blocks,
    scaled_product,
    should_save_uncast_adapters,
)
from .quantised import (
    bias_gradient,
    dequantise_for_forward,
    dequantise_weight,
    packed_product,
)

LORA_LINEAR = OpContract(
    "x: X[*n k], weight: W[o k], a: A[r k], b: A[o r] -> X[*n o]",
    inside="X, or fp32 for the branch of an adapter whose dtype is not X",
    grads={"x": "X", "weight": "W", "a": "A", "b": "A"},
    autocast="follows",
)
"""The contract for a dense weight. Without autocast X and W must be the same dtype. With autocast
they are autocast's dtype (`autocast="follows"`). `inside` is the dtype of the arithmetic.
"""


class LoraDtypes(NamedTuple):
    """The dtypes of one call.

    compute        the dtype of both operands of the matrix product with the base weight
    output         the dtype of the result, the same as with PEFT
    widens_branch  whether the adapter branch is computed in fp32 although `compute` is narrower.
                   The input is then widened one block of rows at a time. Otherwise the branch is
                   computed in the dtype `compute`
    """

    compute: torch.dtype
    output: torch.dtype
    widens_branch: bool


def resolve_dtypes(
    x: Tensor,
    weight_dtype: torch.dtype,
    adapter_dtype: torch.dtype | None,
    *,
    is_quantised: bool,
    branch_fp32: bool = False,
    x_dtype: torch.dtype | None = None,
) -> LoraDtypes:
    """Determines the dtypes in which one call of a LoRA layer computes.

    weight_dtype   the dtype of a dense weight; for a quantised weight the layer's compute dtype
    adapter_dtype  the promoted dtype of A and B; None without an adapter
    branch_fp32    whether the user wants the adapter branch in fp32. It is computed in fp32 for
                   another reason too, see below
    x_dtype        the dtype of the input, given if the input is not computed yet; then only the
                   device of `x` is used

    compute: the dtype of autocast for a dense weight, if autocast is on. For a quantised weight it
    is the layer's compute dtype. The result is then cast to the input's dtype, as in bitsandbytes.

    widens_branch: PEFT computes the adapter branch in autocast's dtype, or in the adapter's dtype
    if autocast is off. If this dtype differs from a `compute` in bf16 or fp16, we compute the
    branch in fp32, so that no precision is lost in comparison with PEFT.

    Raises  DtypeError DT001 if autocast is off and the dtypes of a dense weight and its input
            differ, as `nn.Linear` does
    """
    cast_dtype = autocast_dtype(x)
    x_dtype = x_dtype or x.dtype
    if is_quantised:
        compute = weight_dtype
        output = x_dtype
    elif cast_dtype is not None and torch.float64 not in (x_dtype, weight_dtype):
        compute = output = cast_dtype
    elif x_dtype == weight_dtype:
        compute = output = x_dtype
    else:
        raise DtypeError(
            f"LoRA linear got an input in {format_dtype(x_dtype)} and a weight in {format_dtype(weight_dtype)} with"
            " autocast off, and needs the same dtype for both",
            code="DT001",
            fix=f"x.to({weight_dtype}), or run under torch.autocast({x.device.type!r}, dtype=...)",
        )
    peft_branch_dtype = adapter_dtype if cast_dtype is None else cast_dtype
    is_narrow = compute in (torch.bfloat16, torch.float16)
    return LoraDtypes(
        compute,
        output,
        adapter_dtype is not None and is_narrow and (branch_fp32 or peft_branch_dtype != compute),
    )


# --- dropout: a mask of one byte per element, and a factor that is included in the branch's scale


def draw_dropout_mask(like: Tensor, p: float) -> Tensor:
    """Draws a dropout mask. The mask is a bool tensor with the shape of `like`, and is true for
    elements that are kept. The mask is drawn in the same way as in PEFT, so that on a CPU the same
    seed gives the same mask.

    PyTorch draws random numbers in the order of a tensor's memory, so the mask of a transposed
    tensor is transposed too.
    """
    return torch.empty_like(like, dtype=torch.bool).bernoulli_(1.0 - p)


def scale_with_dropout(scale: float, p: float) -> float:
    """Returns the scale of the adapter branch times dropout's factor 1 / (1 - p), or 0 if p is 1."""
    if p >= 1.0:
        return 0.0
    return scale / (1.0 - p)


def apply_dropout_mask(x_TK: Tensor, keep_mask_TK: Tensor | None) -> Tensor:
    """Returns x with zeros for the elements that dropout drops. The factor 1 / (1 - p) is part of
    the scale of the adapter branch.
    """
    if keep_mask_TK is None:
        return x_TK
    return x_TK * keep_mask_TK


# --- the base product


def base_product(
    x_TK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    quant_state: Any,
    *,
    calls_kernels_directly: bool = False,
) -> Tensor:
    """Computes x Wᵀ + bias in the dtype of x."""
    dtype = x_TK.dtype
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    if quant_state is not None:
        return packed_product(x_TK, weight, quant_state, bias)
    if can_call_few_rows(x_TK, calls_kernels_directly=calls_kernels_directly) and can_run_few_rows(
        x_TK, weight, bias
    ):
        return few_rows_product(x_TK, weight, bias)
    return linear(x_TK, weight if weight.dtype == dtype else weight.to(dtype), bias)


def weight_gradient(dy_TO: Tensor, x_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes dyᵀ x, the gradient of a trainable base weight, in `dtype`."""
    if dtype == torch.float32 and widens_products(dy_TO):
        return matmul_fp32(dy_TO.t(), x_TK)
    return matmul(dy_TO.t(), x_TK).to(dtype)


def out_features(weight: Tensor, quant_state: Any) -> int:
    if quant_state is None:
        return weight.shape[0]
    return int(quant_state.shape[0])


def base_weight(weight: Tensor, quant_state: Any, dtype: torch.dtype) -> Tensor:
    if quant_state is None:
        return weight.to(dtype)
    return dequantise_weight(weight, quant_state, dtype)


def should_run_adapter_first(x: Tensor) -> bool:
    """Whether the adapter branch is computed before the matrix product with the base weight. This
    is the case on a GPU if x has more than one row. For a single row, as in the generation of one
    token, packed weights have a special kernel, which cannot add its result to another tensor.
    """
    if x.is_cpu or target_device_type(x.device) == "cpu":
        return False
    has_several_rows = x.numel() > x.shape[-1]
    return has_several_rows and not torch.compiler.is_compiling()


def adapted_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    quant_state: Any,
    xa_TR: Tensor,
    b_OR: Tensor,
    scale: float,
    *,
    adapter_first: bool,
    calls_kernels_directly: bool,
) -> Tensor:
    """Computes x Wᵀ + bias + scale xa Bᵀ as a new tensor with the dtype and leading dimensions of
    x.

    On a GPU the adapter branch is computed first, and the matrix multiplication with the base
    weight adds its result to it. This needs less memory traffic. The adapter's matrix
    multiplication is short, so its time is that of moving the output. If it comes first, it only
    writes the output (2 bytes per element in bf16). If it came second, it would read the base
    product and write the sum (4 bytes per element).

    adapter_first           the result of `should_run_adapter_first(x)`
    calls_kernels_directly  the result of `can_call_kernels_directly` for x
    """
    dtype = x.dtype
    if quant_state is None and xa_TR.shape[0] <= MAX_FEW_ROWS:
        x_TK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if can_call_few_rows(
            x_TK, calls_kernels_directly=calls_kernels_directly
        ) and can_run_few_rows(x_TK, weight, bias):
            y_TO = few_rows_product(x_TK, weight, bias, xa_TR, b_OR, scale)
            return y_TO if x.dim() == 2 else unsafe_view(y_TO, (*x.shape[:-1], y_TO.shape[-1]))
    if widens_products(x) and not adapter_first:
        # one sum in fp32, so that the output is rounded once
        x_TK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if quant_state is None:
            w_OK = weight.to(dtype)
        else:
            w_OK = dequantise_for_forward(weight, quant_state, dtype)
        y_TO = matmul_with_branch(x_TK, w_OK.t(), xa_TR, b_OR.t(), scale, bias)
        return y_TO if x.dim() == 2 else unsafe_view(y_TO, (*x.shape[:-1], y_TO.shape[-1]))
    if not adapter_first and quant_state is None and bias is None and weight.dtype == dtype:
        y: Tensor = F.linear(x, weight)
        y_TO = y
        if y.dim() != 2:
            y_TO = y.view(-1, y.shape[-1])
        add_product_(y_TO, xa_TR, b_OR.t(), scale, calls_kernels_directly=calls_kernels_directly)
        return y
    x_TK = x
    if x.dim() != 2:
        x_TK = x.reshape(-1, x.shape[-1])
    if not adapter_first:
        y_TO = add_product_(
            base_product(x_TK, weight, bias, quant_state),
            xa_TR,
            b_OR.t(),
            scale,
            calls_kernels_directly=calls_kernels_directly,
        )
    else:
        w_OK = base_weight(weight, quant_state, dtype)
        if bias is None:
            y_TO = scaled_product(xa_TR, b_OR.t(), scale)
        else:
            y_TO = torch.addmm(bias.to(dtype), xa_TR, b_OR.t(), alpha=scale)
        y_TO.addmm_(x_TK, w_OK.t())
    if x.dim() == 2:
        return y_TO
    return unsafe_view(y_TO, (*x.shape[:-1], y_TO.shape[-1]))


# --- the adapter branch in fp32, while the matrix product with the base weight is computed in bf16
# or fp16 (`LoraDtypes.widens_branch`). PEFT casts the whole input to fp32 in this case. The
# functions below cast one block of rows at a time, so that there is no fp32 copy of an activation


def add_branch_fp32(
    y_TO: Tensor,
    x_TK: Tensor,
    keep_mask_TK: Tensor | None,
    a_RK: Tensor,
    b_OR: Tensor,
    scale: float,
) -> Tensor:
    """Adds scale (x Aᵀ) Bᵀ to `y` in place and returns x Aᵀ.

    y       any float [T O]   written in place; a new tensor of the caller
    x       any float [T K]
    a, b    fp32[R K], fp32[O R]
    ->      fp32[T R]
    """
    xa_TR = torch.empty(x_TK.shape[0], a_RK.shape[0], dtype=torch.float32, device=x_TK.device)
    for rows in row_blocks(x_TK.shape[0], x_TK.shape[1] + y_TO.shape[1], x_TK.device):
        xa_TR[rows] = _read_block_fp32(x_TK, keep_mask_TK, rows) @ a_RK.t()
        y_TO[rows] = torch.addmm(y_TO[rows].float(), xa_TR[rows], b_OR.t(), alpha=scale).to(
            y_TO.dtype
        )
    return xa_TR


def _read_block_fp32(x_TK: Tensor, keep_mask_TK: Tensor | None, rows: slice) -> Tensor:
    block = x_TK[rows].float()
    if keep_mask_TK is None:
        return block
    return block * keep_mask_TK[rows]


def branch_gradients_fp32(
    dy_TO: Tensor,
    x_TK: Tensor | None,
    xa_TR: Tensor | None,
    keep_mask_TK: Tensor | None,
    a_RK: Tensor,
    b_OR: Tensor,
    scale: float,
    dx_TK: Tensor | None,
    *,
    needs_a: bool,
    needs_b: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns (dA, dB) in fp32. If `dx` is not None, the gradient of x through the adapter branch
    is added to it in place.

    dy      any float [T O]
    dx      any float [T K]   written in place; a new tensor of the caller
    """
    da = db = None
    if needs_a:
        da = torch.zeros_like(a_RK)
    if needs_b:
        db = torch.zeros_like(b_OR)
    for rows in row_blocks(dy_TO.shape[0], dy_TO.shape[1] + a_RK.shape[1], dy_TO.device):
        dy_fp32 = dy_TO[rows].float()
        if db is not None:
            assert xa_TR is not None
            db.addmm_(dy_fp32.t(), xa_TR[rows], alpha=scale)
        if da is None and dx_TK is None:
            continue
        dxa_fp32 = dy_fp32 @ b_OR
        if da is not None:
            assert x_TK is not None
            da.addmm_(dxa_fp32.t(), _read_block_fp32(x_TK, keep_mask_TK, rows), alpha=scale)
        if dx_TK is not None:
            if keep_mask_TK is None:
                branch_dx = dxa_fp32 @ a_RK
            else:
                branch_dx = (dxa_fp32 @ a_RK).mul_(keep_mask_TK[rows])
            dx_TK[rows] = branch_dx.mul_(scale).add_(dx_TK[rows]).to(dx_TK.dtype)
    return da, db


# --- a projection


class Projection(NamedTuple):
    """Holds the tensors of a linear layer and its LoRA adapter. `weight` is [O K], or a packed
    (quantised) weight with its state. `bias` is [O] or None. `a` is [r K] and `b` is [O r]; both
    are None without an adapter.

    quant_state  the state of a packed weight; None for a dense weight
    scale        the factor of the adapter branch (alpha / rank)
    dropout      the probability with which elements of the branch's input are dropped
    dtype_key    all values that decide the call's dtypes besides the input and autocast: (the
                 weight's dtype, or the compute dtype of a packed layer; whether the weight is
                 dense; the dtype of A; the dtype of B; whether the branch is requested in fp32)
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    quant_state: Any = None
    scale: float = 1.0
    dropout: float = 0.0
    dtype_key: tuple[Any, ...] = ()

    @property
    def in_features(self) -> int:
        """The layer's number of input features, also for a packed weight."""
        if self.a is not None:
            return self.a.shape[1]
        if self.quant_state is not None:
            return int(self.quant_state.shape[1])
        return self.weight.shape[1]


# --- reference


def lora_linear_reference(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    keep_mask: Tensor | None = None,
) -> Tensor:
    """Computes `lora_linear` in plain PyTorch. It also supports fp64 inputs. `keep_mask` is true
    for the elements of x that dropout keeps in the adapter branch.
    """
    branch_input = x
    if keep_mask is not None:
        branch_input = x * keep_mask
    xa = F.linear(branch_input, a)
    branch = F.linear(xa, b)
    return F.linear(x, weight, bias) + scale * branch


# --- the op


class LinearChoices(NamedTuple):
    """Describes how one call of a LoRA layer is computed. `choose_linear` decides this at the start
    of forward, and backward uses the same decisions.

    dtypes          the dtypes of the matrix products and of the output, and whether the branch is
                    computed in fp32
    scale           scale of the branch, including dropout's factor 1 / (1 - p)
    quant_state     state of a packed weight; None for a dense weight
    skip_output     whether the call is a recompute whose output is not read; backward then needs
                    only x Aᵀ
    calls_kernels_directly  whether the C++ kernels are called without PyTorch's dispatcher
    adapter_first   whether the adapter branch is computed before the matrix product with the base
                    weight
    """

    dtypes: LoraDtypes
    scale: float
    quant_state: Any
    skip_output: bool
    calls_kernels_directly: bool
    adapter_first: bool


def choose_linear(
    ctx: Any, x: Tensor, scale: float, quant_state: Any, dtypes: LoraDtypes
) -> LinearChoices:
    """Decides how a call of a LoRA layer is computed, and returns the decisions (`LinearChoices`).

    Call this function exactly once per forward of the LoRA layer. `is_output_unused` recognises the
    LoRA layers of a recomputed decoder layer by the order of its calls. A further call would shift
    this order.
    """
    # the list is checked first, because an empty list is the usual case
    is_unused = bool(running_checkpointed_layers) and is_output_unused(ctx)
    if dtypes.widens_branch:
        return LinearChoices(
            dtypes,
            scale,
            quant_state,
            skip_output=False,
            calls_kernels_directly=False,
            adapter_first=False,
        )
    calls_kernels_directly = can_call_kernels_directly(dtypes.compute, x)
    return LinearChoices(
        dtypes,
        scale,
        quant_state,
        skip_output=is_unused,
        calls_kernels_directly=calls_kernels_directly,
        adapter_first=not calls_kernels_directly and should_run_adapter_first(x),
    )


class LoraLinear(torch.autograd.Function):
    """Computes `lora_linear_reference` in the dtypes of `LoraDtypes`, and these gradients:

    dx = dy W + scale (dy B A) * keep      dA = scale (dy B)ᵀ (x * keep)
    dW = dyᵀ x    dbias = sum of dy        dB = scale dyᵀ ((x * keep) Aᵀ)
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a_RK: Tensor,
        b_OR: Tensor,
        keep_mask: Tensor | None,
        scale: float,
        quant_state: Any,
        dtypes: LoraDtypes,
    ) -> Tensor:
        choices = choose_linear(ctx, x, scale, quant_state, dtypes)
        calls_kernels_directly = choices.calls_kernels_directly
        compute = dtypes.compute
        x_TK = x
        if x.dim() != 2:
            x_TK = x.reshape(-1, x.shape[-1])
        keep_mask_TK = None if keep_mask is None else keep_mask.reshape(x_TK.shape)
        with fast_autocast_off() if calls_kernels_directly else autocast_off(x):
            x_compute_TK = x_TK if x_TK.dtype == compute else x_TK.to(compute)
            if dtypes.widens_branch:
                branch_input_TK = x_TK
                a = a_RK.float()
                b = b_OR.float()
                y_TO = base_product(x_compute_TK, weight, bias, quant_state).to(dtypes.output)
                xa_TR = add_branch_fp32(y_TO, branch_input_TK, keep_mask_TK, a, b, scale)
                y = unsafe_view(y_TO, (*x.shape[:-1], y_TO.shape[-1]))
            else:
                branch_input_TK = x_compute_TK
                a, (cast_b,) = cast_adapters(
                    [a_RK], [b_OR], like=a_RK, features=a_RK.shape[1], dtype=compute
                )
                assert cast_b is not None
                b = cast_b
                xa_TR = scaled_product(
                    apply_dropout_mask(branch_input_TK, keep_mask_TK),
                    a.t(),
                    calls_kernels_directly=calls_kernels_directly,
                )
                if choices.skip_output:
                    y_shape = (*x.shape[:-1], out_features(weight, quant_state))
                    y = placeholder_tensor(y_shape, x_compute_TK, dtypes.output)
                else:
                    y = adapted_product(
                        x_compute_TK.view(x.shape),
                        weight,
                        bias,
                        quant_state,
                        xa_TR,
                        b,
                        scale,
                        adapter_first=choices.adapter_first,
                        calls_kernels_directly=calls_kernels_directly,
                    )
        needs_x, needs_weight, _, needs_a, needs_b = ctx.needs_input_grad[:5]
        # x as backward reads it, for the gradients of A and of the weight
        backward_x = branch_input_TK if needs_a or needs_weight else None
        ctx.recompute_x, saved_x = saved_or_recomputed(x, backward_x)
        # A and B as they were passed, or cast to the branch's dtype
        saved_adapters = (a_RK, b_OR) if should_save_uncast_adapters(x) else (a, b)
        ctx.save_for_backward(
            weight if needs_x else None,
            *saved_adapters,
            xa_TR if needs_b else None,
            keep_mask_TK if needs_x or needs_a else None,
            *saved_x,
        )
        ctx.choices = choices
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        ctx.leaf_dtypes = weight.dtype, None if bias is None else bias.dtype, a_RK.dtype, b_OR.dtype
        return y if y.dtype == dtypes.output else y.to(dtypes.output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("lora_linear")
        choices: LinearChoices = ctx.choices
        compute, _, widens_branch = choices.dtypes
        branch_dtype = torch.float32 if widens_branch else compute
        scale = choices.scale
        # a dispatch mode that observes backward must see its operators
        calls_kernels_directly = (
            choices.calls_kernels_directly and not torch._C._len_torch_dispatch_stack()
        )
        needs_x, needs_weight, needs_bias, needs_a, needs_b = ctx.needs_input_grad[:5]
        weight_dtype, bias_dtype, a_dtype, b_dtype = ctx.leaf_dtypes
        weight, a, b, xa_TR, keep_mask_TK, *saved_x = ctx.saved_tensors
        dx = dx_TK = dweight = dbias = da = db = None
        with fast_autocast_off() if calls_kernels_directly else autocast_off(dy):
            dy_TO = dy.reshape(-1, dy.shape[-1])
            dy_compute_TO = dy_TO.to(compute)
            a = a.to(branch_dtype)
            b = b.to(branch_dtype)
            if ctx.recompute_x is None:
                (x_TK,) = saved_x
            else:
                x_TK = recompute(ctx.recompute_x, saved_x).reshape(-1, a.shape[1])
                if not widens_branch:
                    x_TK = x_TK.to(compute)
            if needs_weight:
                dweight = weight_gradient(dy_compute_TO, x_TK.to(compute), weight_dtype)
            if needs_bias:
                dbias = bias_gradient(dy_TO, bias_dtype)
            if widens_branch:
                if needs_x:
                    dx_TK = matmul(dy_compute_TO, base_weight(weight, choices.quant_state, compute))
                    dx_TK = dx_TK.to(ctx.x_dtype)
                da, db = branch_gradients_fp32(
                    dy_TO,
                    x_TK,
                    xa_TR,
                    keep_mask_TK,
                    a,
                    b,
                    scale,
                    dx_TK,
                    needs_a=needs_a,
                    needs_b=needs_b,
                )
                if da is not None:
                    da = da.to(a_dtype)
                if db is not None:
                    db = db.to(b_dtype)
            else:
                if needs_x or needs_a:
                    dxa_TR = scaled_product(
                        dy_compute_TO, b, calls_kernels_directly=calls_kernels_directly
                    )
                if needs_b:
                    db = gradient_product(
                        dy_compute_TO,
                        xa_TR,
                        scale,
                        b_dtype,
                        calls_kernels_directly=calls_kernels_directly,
                    )
                if needs_a:
                    da = gradient_product(
                        dxa_TR,
                        apply_dropout_mask(x_TK, keep_mask_TK),
                        scale,
                        a_dtype,
                        calls_kernels_directly=calls_kernels_directly,
                    )
                # frees a recomputed x before its gradient is allocated
                del x_TK
                if needs_x:
                    dx_TK = _input_gradient(
                        dy_compute_TO,
                        dxa_TR,
                        weight,
                        a,
                        keep_mask_TK,
                        choices,
                        ctx.x_dtype,
                        calls_kernels_directly=calls_kernels_directly,
                    )
            if dx_TK is not None:
                dx = dx_TK.to(ctx.x_dtype).view(ctx.x_shape)
        return dx, dweight, dbias, da, db, None, None, None, None


def _input_gradient(
    dy_TO: Tensor,
    dxa_TR: Tensor,
    weight: Tensor,
    a_RK: Tensor,
    keep_mask_TK: Tensor | None,
    choices: LinearChoices,
    x_dtype: torch.dtype,
    *,
    calls_kernels_directly: bool,
) -> Tensor:
    """Computes dy W + scale (dxa A) * keep in the dtype of x.

    dy, dxa, a  have the compute dtype
    """
    compute = choices.dtypes.compute
    scale = choices.scale
    if choices.quant_state is None and weight.dtype == compute:
        w_OK = weight
    else:
        w_OK = base_weight(weight, choices.quant_state, compute)
    if keep_mask_TK is None:
        adds_directly = (
            calls_kernels_directly and x_dtype == compute and a_RK.shape[0] <= MAX_KERNEL_RANK
        )
        if adds_directly or can_add_in_one_pass(x_dtype, dxa_TR, a_RK):
            return add_product_(
                dy_TO @ w_OK, dxa_TR, a_RK, scale, calls_kernels_directly=calls_kernels_directly
            )
        if widens_products(dy_TO):
            return matmul_with_branch(dy_TO, w_OK, dxa_TR, a_RK, scale).to(x_dtype)
    # dxa A is rounded to the compute dtype before the scale and dy W are applied. `addmm_` computes
    # beta * branch_dx + dy W, so that the scale is beta
    branch_dx_TK = apply_dropout_mask(matmul(dxa_TR, a_RK), keep_mask_TK)
    if x_dtype == compute:
        return addmm_(branch_dx_TK, dy_TO, w_OK, beta=scale)
    return matmul(dy_TO, w_OK).to(x_dtype).add_(branch_dx_TK, alpha=scale)


_apply_eagerly = eager_apply(LoraLinear)


def apply_linear(
    x: Tensor, projection: Projection, dtypes: LoraDtypes, *, is_eager: bool = False
) -> Tensor:
    """Applies a linear layer with its adapter to x. `dtypes` are the dtypes of the computation.

    is_eager  the call is neither under torch.func nor in a compiled graph
    """
    weight, bias, a, b, quant_state, scale, dropout, _ = projection
    assert a is not None
    assert b is not None
    if x.shape[-1] != a.shape[1] or b.shape[-1] != a.shape[0]:
        raise ShapeError(
            f"x is {list(x.shape)}, a {list(a.shape)}, b {list(b.shape)}; the shapes must be"
            " [*n k], [r k] and [o r]",
            code="SH001",
        )
    keep_mask = None
    if dropout:
        keep_mask = draw_dropout_mask(x, dropout)
        scale = scale_with_dropout(scale, dropout)
    args = (x, weight, bias, a, b, keep_mask, scale, quant_state, dtypes)
    output: Tensor = _apply_eagerly(*args) if is_eager else apply_function(LoraLinear, *args)
    return output


def lora_linear(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    dropout: float = 0.0,
    quant_state: Any = None,
    compute_dtype: torch.dtype | None = None,
    branch_fp32: bool = False,
) -> Tensor:
    """Computes x Wᵀ + bias + scale (dropout(x) Aᵀ) Bᵀ in one autograd function, with the dtypes of
    PEFT's layer.

    x        X[*n k]
    weight   W[o k]     dense, or packed with its `quant_state` (of `ops.packed`, or bitsandbytes'
             4-bit state)
    a, b     A[r k], A[o r]
    bias     any float dtype [o], or None
    ->       Y[*n o]    Y is autocast's dtype, or X if autocast is off; for a packed weight always X
    inside   the matrix product with the base weight is computed in Y, or for a packed weight in
             `compute_dtype` (X by default). The adapter branch is computed in the same dtype, or in
             fp32 if `branch_fp32` is True or if PEFT would compute the branch in another dtype.
             Adapter gradients are summed in fp32
    grads    each in the dtype of its tensor; none for a packed weight
    Raises   DtypeError DT001 when autocast is off and X is not W; ShapeError SH001
    """
    weight_dtype = weight.dtype
    if quant_state is not None:
        weight_dtype = compute_dtype or x.dtype
    adapter_dtype = torch.promote_types(a.dtype, b.dtype)
    dtypes = resolve_dtypes(
        x,
        weight_dtype,
        adapter_dtype,
        is_quantised=quant_state is not None,
        branch_fp32=branch_fp32,
    )
    return apply_linear(x, Projection(weight, bias, a, b, quant_state, scale, dropout), dtypes)
