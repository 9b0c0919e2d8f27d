"""Lists the effects of PyTorch's operators on dtypes. An operator is listed by its ATen name
without overload and trailing underscore.

An operator that is in none of the lists is elementwise arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

PRODUCT = "product"
SUM = "sum"
EXACT = "exact"
CAST = "cast"
CREATE = "create"
ARITHMETIC = "arithmetic"
FOREIGN = "opaque"

# floating-point and complex dtypes
FLOATS = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)
# float dtypes with fewer bits than fp32
NARROW_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})


def split_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PRODUCTS = split_names("""
    mm addmm bmm baddbmm addbmm mv addmv dot vdot addr ger matmul linear linear_backward bilinear _trilinear convolution
    convolution_overrideable _convolution convolution_backward convolution_backward_overrideable mkldnn_convolution mkldnn_linear conv1d
    conv2d conv3d conv_transpose1d cudnn_convolution miopen_convolution _scaled_mm _scaled_grouped_mm _int_mm _grouped_mm
    _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int8pack_mm _addmm_activation _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention_backward scaled_dot_product_attention _flash_attention_forward _flash_attention_backward
    _efficient_attention_forward _efficient_attention_backward _native_multi_head_attention _transformer_encoder_layer_fwd lstm gru
    rnn_tanh rnn_relu _thnn_fused_lstm_cell _cdist_forward einsum
    """)
# sums. PyTorch's kernels accumulate a sum in a wide dtype, but its result has the requested dtype,
# which may be narrow
_SUMS = split_names("""
    sum nansum mean prod var std var_mean std_mean norm linalg_vector_norm logsumexp cumsum cumprod logcumsumexp _logcumsumexp trace
    _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data nll_loss_forward nll_loss2d_forward
    nll_loss_backward mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div native_layer_norm
    native_group_norm native_batch_norm _fused_rms_norm rms_norm layer_norm avg_pool1d avg_pool2d adaptive_avg_pool2d
    _adaptive_avg_pool2d renorm cosine_similarity dist _foreach_norm index_add scatter_add
    """)
LOSSES = split_names("""
    _log_softmax binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div logsumexp mse_loss nll_loss2d_forward
    nll_loss_forward smooth_l1_loss
    """)
# these belong to a loss only where the loss is computed; in a layer they are part of a softmax
LOG_SUMS = split_names("_log_softmax logsumexp")
# operators with which a norm computes its divisor
NORM_SUMS = split_names("linalg_vector_norm mean norm pow rsqrt sqrt std std_mean sum var var_mean")
# functions whose values models store in tables, for example the cosines of a rotary embedding
NONLINEAR = split_names("""
    acos asin atan cos cosh erf exp exp2 expm1 log log10 log1p log2 polar pow reciprocal rsqrt sigmoid sin sinh softplus sqrt tan tanh
    """)
# operators that move, choose or compare values
_EXACT = split_names("""
    view _unsafe_view reshape _reshape_alias t transpose permute movedim expand slice select unsqueeze squeeze cat stack split
    split_with_sizes unbind chunk narrow index gather index_select take embedding clone detach alias as_strided masked_fill where
    constant_pad_nd pad fill zero repeat repeat_interleave roll flip tril triu diagonal lift lift_fresh index_put scatter masked_scatter
    index_copy index_fill select_scatter slice_scatter diagonal_scatter as_strided_scatter masked_select unfold max min amax amin
    aminmax argmax argmin topk sort argsort maximum minimum clamp clamp_min clamp_max neg abs relu threshold sign copysign eq ne lt le
    gt ge logical_not logical_and logical_or isnan isinf isfinite nonzero any all view_as_real view_as_complex _conj resolve_conj real
    imag is_same_size item _local_scalar_dense native_dropout dropout set resize _to_sparse _to_dense to_mkldnn to_padded_tensor _values
    values _indices indices bernoulli contiguous _nested_view_from_buffer reflection_pad1d replication_pad1d broadcast_tensors expand_as
    view_as max_pool2d max_pool2d_with_indices unique unique2 _unique2 bincount searchsorted bucketize _index_put_impl pin_memory
    _pin_memory record_stream swapaxes _foreach_copy _foreach_zero multinomial nan_to_num flatten equal _fused_dropout
    embedding_dense_backward
    """)
_CREATES = split_names("""
    empty empty_like empty_strided new_empty new_empty_strided empty_permuted zeros zeros_like new_zeros ones ones_like new_ones full
    full_like new_full arange range linspace logspace eye rand rand_like randn randn_like randint randint_like randperm normal uniform
    scalar_tensor tril_indices triu_indices exponential random log_normal cauchy geometric hann_window
    """)
_CASTS = split_names("_to_copy copy to _autocast_to_reduced_precision _autocast_to_full_precision")
ADDITIONS = split_names(
    "add sub addcmul addcdiv lerp _foreach_add _foreach_sub _foreach_addcmul _foreach_addcdiv"
    " _foreach_lerp"
)
DIVISIONS = split_names("div true_divide reciprocal")
RAMPS = split_names("arange range linspace logspace")
# operators with which a router chooses experts
ROUTER_CHOICES = split_names("topk argmax sort argsort max")
# operators that bring memory from outside the dispatcher; their result counts as newly created
_LIFTS = split_names("lift lift_fresh lift_fresh_copy")

# name of an operator -> what it does to the precision of its inputs
_KINDS = {
    name: kind
    for kind, members in (
        (EXACT, _EXACT),
        (CREATE, _CREATES),
        (CAST, _CASTS),
        (SUM, _SUMS),
        (PRODUCT, _PRODUCTS),
    )
    for name in members
}
# Isotype's own operators, which have tested contracts; each adds its name where it is defined
OPERATORS_WITH_CONTRACT: set[str] = set()
# those that compute PyTorch's matrix products, convolutions or attention
PRODUCTS_WITH_CONTRACT: set[str] = set()
# namespace of a quantisation library -> the values of `base` for which its operators are expected
QUANTISATION_LIBRARIES = {"bitsandbytes": ("nf4", "fp4", "int8")}
_ATEN = ("aten", "prims", "prim", "profiler", "rng_prims", "c10d", "_c10d_functional")


class Operator:
    """Describes one overload of an operator. This description is read once from the operator's
    schema.

    name          the schema's name, `add_`; `base_name` is without the trailing underscore and
                  `_copy`
    kind          its effect on dtypes
    foreign_name  its full name if it is not one of PyTorch's operators
    is_written    whether each argument is written
    has_written_arguments  whether any argument is written
    is_product    whether it is a matrix product (and not the backward of one)
    is_lift       whether its result is memory from outside the dispatcher
    is_factory    whether its result is new: it takes no tensor, or is a lift
    is_to_call    whether it is a call of `to` or `type_as`
    is_view       whether its result shares memory with its input
    on_call       a function that is called with (op, args, kwargs) before the operator; its result
                  is passed to `on_return`
    """

    __slots__ = (
        "base_name",
        "foreign_name",
        "func",
        "has_written_arguments",
        "is_factory",
        "is_lift",
        "is_product",
        "is_to_call",
        "is_view",
        "is_written",
        "kind",
        "name",
        "on_call",
        "on_return",
    )

    def __init__(self, func: Any) -> None:
        packet = getattr(func, "overloadpacket", func)
        schema = getattr(func, "_schema", None)
        qualified_name = str(
            getattr(packet, "_qualified_op_name", None)
            or f"higher_order::{getattr(func, '__name__', func)}"
        )
        namespace, _, self.name = qualified_name.partition("::")
        base_name = self.name if self.name.startswith("__") else self.name.rstrip("_")
        if base_name.endswith("_copy") and base_name not in (
            "_to_copy",
            "_foreach_copy",
            "index_copy",
        ):
            base_name = base_name.removesuffix("_copy")
        self.func = func
        self.base_name = base_name
        self.foreign_name = None if namespace in _ATEN else qualified_name
        self.kind = FOREIGN if self.foreign_name else _KINDS.get(base_name, ARITHMETIC)
        if schema:
            self.is_written = tuple(
                argument.alias_info is not None and argument.alias_info.is_write
                for argument in schema.arguments
            )
        else:
            self.is_written = ()
        self.has_written_arguments = any(self.is_written)
        # operators that only return sizes, strides or layout
        if (
            self.kind == ARITHMETIC
            and schema
            and not self.has_written_arguments
            and not any("Tensor" in str(result.type) for result in schema.returns)
        ):
            self.kind = EXACT
        self.is_product = self.kind == PRODUCT and not base_name.endswith("_backward")
        self.is_to_call = self.name in ("_to_copy", "to", "type_as")
        self.is_lift = self.name in _LIFTS
        shares = (
            schema is not None and bool(schema.returns) and schema.returns[0].alias_info is not None
        )
        self.is_view = shares and not self.has_written_arguments and not self.is_lift
        self.is_factory = self.is_lift or (
            schema is not None
            and not any("Tensor" in str(argument.type) for argument in schema.arguments)
        )
        self.on_call: Any = None
        self.on_return: Any = None

    def has_contract(self, base: str) -> bool:
        """Whether a custom operator belongs to Isotype, or to the quantisation library that the
        declared `base` needs.
        """
        full_name = self.foreign_name or ""
        return full_name in OPERATORS_WITH_CONTRACT or base in QUANTISATION_LIBRARIES.get(
            full_name.partition("::")[0], ()
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)

    def operands(self, args: tuple, kwargs: dict) -> Iterator[tuple[str, Tensor]]:
        """Yields (label, tensor) of every floating operand. The label is the argument's name in the
        schema, with the index for items of lists.
        """
        yield from iterate_floating(
            [(a.name, value) for a, value in zip(self.func._schema.arguments, args)]
            + list(kwargs.items())
        )


def iterate_floating(named_values: list[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the floating tensors among named values, also those directly inside lists, tuples and
    dicts.
    """
    for label, value in named_values:
        if isinstance(value, Tensor):
            if value.dtype in FLOATS:
                yield label, value
        elif isinstance(value, list | tuple | dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(item, Tensor) and item.dtype in FLOATS:
                    yield f"{label}[{key!r}]", item


def floating_operands(args: tuple) -> list[Tensor]:
    """Lists the floating tensors of positional arguments, also those directly inside lists. It is
    faster than `Operator.operands`.
    """
    operands = []
    for value in args:
        if isinstance(value, Tensor):
            if value.dtype in FLOATS:
                operands.append(value)
        elif type(value) in (list, tuple):
            operands += [
                item for item in value if isinstance(item, Tensor) and item.dtype in FLOATS
            ]
    return operands
