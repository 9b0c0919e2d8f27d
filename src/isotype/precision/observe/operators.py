"""The operators of PyTorch by what they do to a value: names of ATen, without overload and without a trailing underscore.

A table: what is in none of its sets is arithmetic by element.
"""

from __future__ import annotations

from typing import Any

PRODUCT, SUM, EXACT, CAST, CREATE, ROUND, BITS, ARITHMETIC, OPAQUE = (
    "product", "sum", "exact", "cast", "create", "round", "bits", "arithmetic", "opaque",
)  # fmt: skip

_PRODUCTS = """
mm addmm bmm baddbmm addbmm mv addmv dot vdot addr ger matmul linear linear_backward bilinear _trilinear
convolution convolution_overrideable _convolution convolution_backward convolution_backward_overrideable mkldnn_convolution
mkldnn_linear conv1d conv2d conv3d conv_transpose1d cudnn_convolution miopen_convolution
_scaled_mm _scaled_grouped_mm _int_mm _grouped_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int8pack_mm _addmm_activation
_scaled_dot_product_attention_math _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward scaled_dot_product_attention
_flash_attention_forward _flash_attention_backward _efficient_attention_forward _efficient_attention_backward
_native_multi_head_attention _transformer_encoder_layer_fwd lstm gru rnn_tanh rnn_relu _thnn_fused_lstm_cell _cdist_forward einsum
""".split()
# sums whose result has the dtype they were asked in: accumulating inside a kernel is wide, what leaves it is not
_SUMS = """
sum nansum mean prod var std var_mean std_mean norm linalg_vector_norm logsumexp cumsum cumprod logcumsumexp _logcumsumexp trace
_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data nll_loss_forward nll_loss2d_forward
nll_loss_backward mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
native_layer_norm native_group_norm native_batch_norm _fused_rms_norm rms_norm layer_norm avg_pool1d avg_pool2d adaptive_avg_pool2d
_adaptive_avg_pool2d renorm cosine_similarity dist
""".split()
# their own kernels compute in fp32 whatever they are given
WIDE_INSIDE = frozenset("native_layer_norm native_group_norm native_batch_norm _fused_rms_norm rms_norm layer_norm".split())
LOSSES = frozenset(
    """_log_softmax nll_loss_forward nll_loss2d_forward logsumexp mse_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits kl_div""".split()
)
# sums that mean the same wherever their result goes; a plain sum or mean may be a combination of a few values
NAMED_SUMS = frozenset(
    """_softmax _safe_softmax _log_softmax logsumexp var std var_mean std_mean norm linalg_vector_norm cumsum cumprod
    logcumsumexp""".split()
)
NORM_SUMS = frozenset("mean sum pow rsqrt var std var_mean std_mean sqrt norm linalg_vector_norm".split())
NORMALISING = frozenset("rsqrt var std var_mean std_mean linalg_vector_norm norm".split())
CURVED = frozenset(
    "cos sin tan exp exp2 expm1 log log2 log10 log1p pow sqrt rsqrt reciprocal tanh sigmoid erf polar softplus acos asin atan sinh cosh".split()
)
_EXACT = """
view _unsafe_view reshape _reshape_alias t transpose permute movedim expand slice select unsqueeze squeeze cat stack split
split_with_sizes unbind chunk narrow index gather index_select take embedding clone detach alias as_strided masked_fill where
constant_pad_nd pad fill zero repeat repeat_interleave roll flip tril triu diagonal lift lift_fresh index_put scatter masked_scatter
index_copy index_fill select_scatter slice_scatter diagonal_scatter as_strided_scatter masked_select unfold max min amax amin
aminmax argmax argmin topk sort argsort maximum minimum clamp clamp_min clamp_max neg abs relu threshold sign copysign eq ne lt le gt ge
logical_not logical_and logical_or isnan isinf isfinite nonzero any all view_as_real view_as_complex _conj resolve_conj real imag
is_same_size item _local_scalar_dense native_dropout dropout set resize _to_sparse values indices bernoulli contiguous
_nested_view_from_buffer reflection_pad1d replication_pad1d broadcast_tensors expand_as view_as max_pool2d max_pool2d_with_indices
unique unique2 _unique2 bincount searchsorted bucketize _index_put_impl pin_memory _pin_memory record_stream swapaxes
_foreach_copy _foreach_zero multinomial nan_to_num flatten equal _fused_dropout embedding_dense_backward
""".split()
_CREATE = """
empty empty_like empty_strided new_empty new_empty_strided empty_permuted zeros zeros_like new_zeros ones ones_like new_ones full full_like
new_full arange range linspace logspace eye rand rand_like randn randn_like randint randint_like randperm normal uniform scalar_tensor
tril_indices triu_indices exponential random log_normal cauchy geometric hann_window
""".split()
UNWRITTEN = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())
_CASTS = ("_to_copy", "copy", "to", "_autocast_to_reduced_precision", "_autocast_to_full_precision")
_ROUNDS = """
round floor ceil trunc fix frac fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
fake_quantize_per_tensor_affine fake_quantize_per_channel_affine _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine fused_moving_avg_obs_fake_quant
_fused_moving_avg_obs_fq_helper quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic dequantize frexp nextafter ldexp
floor_divide
""".split()
_BITS = """
bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__
__iand__ __ior__ __ixor__ __ilshift__ __irshift__
""".split()

_KINDS = {
    **dict.fromkeys(_EXACT, EXACT),
    **dict.fromkeys(_CREATE, CREATE),
    **dict.fromkeys(_CASTS, CAST),
    **dict.fromkeys(_SUMS, SUM),
    **dict.fromkeys(_PRODUCTS, PRODUCT),
    **dict.fromkeys(_ROUNDS, ROUND),
    **dict.fromkeys(_BITS, BITS),
}
# whose kernels another package holds to a contract: bitsandbytes' 4-bit products are declared by `base: nf4`
_TRUSTED = ("isotype", "bitsandbytes")
_ATEN = ("aten", "prims", "prim", "profiler", "rng_prims", "c10d", "_c10d_functional")


class Operator:
    """name, what it does, and for an operator that is not PyTorch's own where it comes from."""

    __slots__ = ("foreign", "kind", "name", "trusted", "writes")

    def __init__(self, func: Any) -> None:
        packet = getattr(func, "overloadpacket", func)
        full = str(getattr(packet, "_qualified_op_name", None) or f"higher_order::{getattr(func, '__name__', func)}")
        space, _, name = full.partition("::")
        plain = name if name.startswith("__") else name.rstrip("_")
        if plain.endswith("_copy") and plain not in ("_to_copy", "_foreach_copy", "index_copy"):
            plain = plain.removesuffix("_copy")
        self.name = plain
        self.foreign = None if space in _ATEN else full
        self.trusted = space in _TRUSTED
        self.kind = OPAQUE if self.foreign else _KINDS.get(plain, ARITHMETIC)
        schema = getattr(func, "_schema", None)
        self.writes = tuple(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments) if schema else ()


_known: dict[Any, Operator] = {}


def operator(func: Any) -> Operator:
    found = _known.get(func)
    if found is None:
        found = _known[func] = Operator(func)
    return found
