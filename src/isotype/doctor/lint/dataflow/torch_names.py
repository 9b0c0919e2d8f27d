"""What torch's functions do to dtypes, by name: the same tables serve `torch.f(x)`, `F.f(x)` and `x.f()`.

Source  the op lists of torch 2.13's autocast documentation; promotion and out= rules as torch 2.13 enforces them
"""

# ruff: noqa: SIM905, E501 - the tables are read and edited as words
from __future__ import annotations

# Matrix products: under autocast every floating operand is cast first; without it all operands must have one dtype.
LOWER = frozenset(
    "matmul mm bmm mv addmm addbmm baddbmm addmv linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "einsum chain_matmul multi_dot tensordot scaled_dot_product_attention".split()
)
# The same in place: autocast leaves these alone.
LOWER_IN_PLACE = frozenset("addmm_ addbmm_ baddbmm_ addmv_".split())
# How many leading arguments of each are tensors to be multiplied (the rest is numbers), where that is not all of them.
ATTENTION = "scaled_dot_product_attention"

# Arithmetic that promotes.
PROMOTE = frozenset(
    "add sub mul div true_divide multiply subtract divide maximum minimum where lerp pow float_power atan2 fmod remainder rsub logaddexp "
    "hypot outer ger addcmul addcdiv xlogy dot kron cat concat concatenate stack hstack vstack dstack block_diag cross meshgrid".split()
)
IN_PLACE = frozenset(
    "add_ sub_ mul_ div_ multiply_ subtract_ divide_ copy_ fill_ zero_ clamp_ clamp_min_ clamp_max_ masked_fill_ pow_ exp_ log_ sqrt_ "
    "rsqrt_ neg_ abs_ sigmoid_ tanh_ relu_ silu_ addcmul_ addcdiv_ lerp_ normal_ uniform_ fill_diagonal_ requires_grad_ detach_ "
    "squeeze_ unsqueeze_ transpose_ t_ tril_ triu_ softmax_ nan_to_num_ foreach_add_".split()
)
# No kernel for bf16, on a CPU or on CUDA.
NOT_IN_BF16 = frozenset(
    "svd svdvals eigh eigvalsh eig eigvals qr cholesky inv pinv solve lstsq det slogdet lu_factor matrix_rank inverse pinverse "
    "view_as_complex complex stft istft quantile nanquantile".split()
)
# Of torch.fft, or of a package's own module around it.
SPECTRA = frozenset("fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn hfft ihfft".split())
# In-place writes at indices: source and destination must have one dtype; autocast leaves them alone.
SCATTER = frozenset(
    "index_add_ index_add index_copy_ index_copy index_put_ index_put scatter_ scatter scatter_add_ scatter_add "
    "masked_scatter_ masked_scatter".split()
)

# The dtype of the first tensor stays.
KEEP = frozenset(
    "abs acos asin atan ceil floor round trunc frac exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh sigmoid silu gelu relu relu6 "
    "leaky_relu elu selu mish softplus logsigmoid hardtanh hardswish hardsigmoid erf erfinv neg negative sign sqrt rsqrt square reciprocal "
    "clamp clamp_min clamp_max clip nan_to_num positive cumsum cumprod logcumsumexp sum mean prod amax amin norm std var median logsumexp softmax "
    "log_softmax softmin normalize layer_norm rms_norm group_norm batch_norm instance_norm dropout dropout1d dropout2d alpha_dropout "
    "view reshape flatten unflatten view_as reshape_as expand expand_as permute transpose swapaxes swapdims movedim t adjoint contiguous clone "
    "detach squeeze unsqueeze repeat repeat_interleave tile roll flip rot90 narrow select index_select gather take take_along_dim masked_fill "
    "masked_select tril triu diag diagonal diag_embed diagonal_scatter slice_scatter select_scatter ravel pad cuda cpu pin_memory unfold fold "
    "requires_grad_ data_parallel glu max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool2d interpolate pixel_shuffle "
    "pixel_unshuffle broadcast_to as_strided to_dense coalesce trace dropout_ nanmean nansum cummax renorm retain_grad rename "
    "atleast_1d atleast_2d atleast_3d unsafe_view alias mT".split()
)
# Reductions: without dim= the result has no dimensions.
REDUCE = frozenset("sum mean prod amax amin norm std var median logsumexp max min trace nansum nanmean".split())
# Losses reduce to no dimensions unless reduction="none".
LOSS = frozenset(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits".split()
)
# On CUDA autocast runs these in fp32, on the CPU mostly not: a low-precision input has no dtype that holds on both.
DEVICE_DEPENDENT = frozenset(
    "softmax log_softmax softmin exp expm1 log log2 log10 log1p pow rsqrt reciprocal sum prod cumsum cumprod norm normalize layer_norm rms_norm "
    "group_norm softplus sinh cosh tan acos asin erfinv dist cdist renorm cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss "
    "kl_div binary_cross_entropy_with_logits cosine_similarity gelu batch_norm instance_norm interpolate trace nansum".split()
)
# Several tensors of the input's dtype.
SPLIT = frozenset("split chunk unbind tensor_split split_with_sizes hsplit vsplit dsplit tolist_".split())
# Some elements of the tensor; other names of KEEP leave the same memory or make new.
PART = frozenset("narrow select index_select".split())
# (values in the input's dtype, integers)
VALUES_AND_INDICES = frozenset("topk sort kthvalue mode".split())

TO_INTEGER = frozenset("argmax argmin argsort nonzero searchsorted bucketize count_nonzero bincount".split())
TO_BOOL = frozenset(
    "eq ne lt le gt ge equal isnan isinf isfinite logical_and logical_or logical_not logical_xor isin allclose any all isclose".split()
)
CASTS = {
    "float": "fp32", "double": "fp64", "half": "fp16", "bfloat16": "bf16", "long": "int64", "int": "int32", "short": "int16",
    "char": "int8", "byte": "uint8", "bool": "bool",
}  # fmt: skip

LIKE = frozenset("zeros_like ones_like empty_like full_like rand_like randn_like".split())
NEW = frozenset("new_zeros new_ones new_empty new_full new_tensor".split())
FACTORIES = frozenset(
    "zeros ones empty full rand randn arange linspace eye tensor as_tensor scalar_tensor hann_window hamming_window logspace".split()
)
NOT_TENSOR = frozenset(
    "size dim numel item tolist stride ndimension is_contiguous data_ptr element_size nelement get_device is_floating_point "
    "storage_offset".split()
)

TENSOR_ATTRIBUTES = frozenset("T mT H mH data grad real".split())
PLAIN_ATTRIBUTES = frozenset("shape device ndim requires_grad is_cuda is_leaf layout itemsize nbytes is_sparse grad_fn names".split())
# Attributes and methods whose use shows that a name is a tensor.
SHOWS_TENSOR = frozenset(
    {*KEEP, *CASTS, *LOWER, *SPLIT, *"T mT dtype shape size to type_as is_cuda data_ptr stride numel new_zeros".split()}
)
