"""Computes matrix products with the adapter matrices A and B. In these matrix products, one
dimension is the rank of the adapter, which is small. C++ kernels compute them for bf16 on a CPU
that has bf16 instructions. PyTorch computes them in all other cases.

A kernel reads each large operand once, sums in fp32 and rounds the result once. The gradient of an
adapter is summed and returned in fp32, although the operands are bf16 or fp16. On a CPU, PyTorch
has no matrix multiplication that does this. Without the kernels, the gradient is computed by two
matrix multiplications for bf16, and in blocks of rows for fp16. So there is never an fp32 copy of a
whole activation.

T is the number of tokens, M and N are numbers of features, and R is the rank.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..environment.memory_limits import status_bytes, usable_memory
from ..environment.planned_device import target_device_type
from ..ops.backend import PLAIN_TENSOR_TYPES, arithmetic_dtype, forced_backend, has_fp32_output
from ..ops.cpp import CppKernels, fallback_reasons
from ..ops.library import library_op
from ..ops.widened_products import (
    addmm_,
    matmul,
    matmul_fp32,
    widens_products,
)

# Elements of a widened block of rows. On a CPU it is 1 MiB in fp32, which fits into a core's cache.
# On a GPU it is 256 MiB, which is a single block for most layers, since each block is a launch
BLOCK_ELEMENTS_CPU = 2**18
BLOCK_ELEMENTS_GPU = 2**26

# Below this many elements operands are widened, since the overhead of calls dominates: 128 x (256 +
# 16) elements take 25 us widened and 46 us in two terms; 256 x (512 + 16) take 94 and 78 us
SMALL_ELEMENTS = 2**16

# Up to this rank a kernel is not slower than PyTorch's product: with 2048 x 768 they take 0.52 and
# 0.53 ms at rank 64, and 2.4 and 2.0 ms at rank 256
MAX_KERNEL_RANK = 64

# Up to this number of rows the kernel for few rows is faster than PyTorch's product: with a weight
# of 3072 x 1024 in bf16 they take 0.52 and 0.87 ms for one row, 0.66 and 1.15 ms for 4, 1.8 and 2.1
# ms for 16, and 3.4 and 3.2 ms for 32. In fp32 on AVX2, with a weight of 1536 x 576, they take 0.47 and
# 0.89 ms for 8 rows, 0.71 and 0.88 ms for 16, and 0.94 and 1.1 ms for 24
MAX_FEW_ROWS = 16


# Elements of a block of memory for copies of weights in bf16, which is 64 MB
COPY_BLOCK_ELEMENTS = 2**25


# --- the kernels

KERNELS = CppKernels(
    __file__,
    source="kernels.cpp",
    in_graphs=True,
    native="a",
    shrink="pppiiiiiiif",
    expand="pppiiiiiiif",
    gradient="pppiiiiiiif",
    few_rows="ppppppiiiiiiiiif",
    project_rows="ipaaipppii",
    narrow_weight="ppia",
    project_normed_rows="iaaaaaaaaipppiif",
    decode_mlp_half="iaaaaaaiaaiaaif",
)

# the result of `kernels_available`, once it is known. A layer asks for it three times per step, and
# Dynamo cannot trace the calls of that function
_availability: dict[str, bool] = {}


def kernels_available() -> bool:
    """Whether the kernels can run on this machine. The kernels must be built and must agree with
    their reference, and the processor and the compiler must support AVX512-BF16.
    """
    is_available = _availability.get("native")
    if is_available is None:
        is_available = KERNELS.has_bf16_instructions()
        # while the kernels are checked, the result is not known yet
        if not KERNELS.is_being_checked:
            _availability["native"] = is_available
    return is_available


def kernels_unavailable_reason() -> str:
    """Returns the reason why PyTorch's matrix products run on this CPU instead of the kernels, or
    "" if the kernels run.
    """
    if kernels_available():
        return ""
    return fallback_reasons().get(
        KERNELS.op, "no AVX512-BF16 in this processor, or in its compiler"
    )


def can_run_kernels(x: Tensor) -> bool:
    """Whether the C++ kernels can compute matrix products with x. This is true if x is a bf16
    tensor on a CPU and the kernels are available.
    """
    if x.dtype is not torch.bfloat16 or not x.is_cpu:
        return False
    if torch.compiler.is_dynamo_compiling():
        return _availability.get("native", False)
    # a compiled graph cannot read which path is forced
    return kernels_available() and (
        torch.compiler.is_compiling() or forced_backend() in (None, "cpp")
    )


def can_call_kernels_directly(dtype: torch.dtype, x: Tensor) -> bool:
    """Whether matrix products with the operand x in `dtype` may call the C++ kernels without
    PyTorch's dispatcher. The dispatcher is needed if a compiler or a dispatch mode has to see the
    operators. (Isotype observes dtypes and plans memory with dispatch modes.) An autograd function
    calls this once for all its matrix products.
    """
    if dtype is not torch.bfloat16 or not x.is_cpu or torch.compiler.is_dynamo_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or type(x) not in PLAIN_TENSOR_TYPES:
        return False
    return kernels_available() and forced_backend() in (None, "cpp")


@library_op(
    "lora_shrink_cpp(Tensor x, Tensor a, float scale) -> Tensor",
    fake=lambda x, a, scale: x.new_empty(x.shape[0], a.shape[0]),
)
def _shrink(x_TN: Tensor, a_RN: Tensor, scale: float) -> Tensor:
    return scaled_product(x_TN, a_RN.t(), scale, calls_kernels_directly=True)


@library_op(
    "lora_expand_cpp(Tensor(a!) y, Tensor left, Tensor right, float scale) -> ()",
    fake=lambda *_: None,
)
def _expand_(y_TN: Tensor, left_TR: Tensor, right_RN: Tensor, scale: float) -> None:
    add_product_(y_TN, left_TR, right_RN, scale, calls_kernels_directly=True)


@library_op(
    "lora_gradient_cpp(Tensor left, Tensor right, float scale) -> Tensor",
    fake=lambda left, right, scale: left.new_empty(
        left.shape[1], right.shape[1], dtype=torch.float32
    ),
)
def _gradient(left_TM: Tensor, right_TN: Tensor, scale: float) -> Tensor:
    return gradient_product(left_TM, right_TN, scale, torch.float32, calls_kernels_directly=True)


# --- products. `calls_kernels_directly` is the result of `can_call_kernels_directly`. The kernels
# need adjacent elements in each row of an operand. A matrix with ranks may have them in each column
# instead


def scaled_product(
    left: Tensor, right: Tensor, scale: float = 1.0, *, calls_kernels_directly: bool = False
) -> Tensor:
    """Computes scale * left @ right in the operands' dtype. The number of columns of right is the
    rank of an adapter. Each sum is multiplied by the scale before it is rounded.

    left    F[T N]
    right   F[N R]
    """
    features, ranks = right.shape
    if calls_kernels_directly and ranks <= MAX_KERNEL_RANK:
        if left.stride(1) != 1:
            left = left.contiguous()
        if 1 not in right.stride():
            right = right.contiguous()
        out = left.new_empty((left.shape[0], ranks))
        threads = torch.get_num_threads()
        KERNELS.calls["shrink"](
            left.data_ptr(),
            right.data_ptr(),
            out.data_ptr(),
            left.shape[0],
            features,
            ranks,
            left.stride(0),
            right.stride(1),
            right.stride(0),
            ranks,
            scale,
            threads,
        )
        return out
    if ranks <= MAX_KERNEL_RANK and left.dtype is torch.bfloat16 and can_run_kernels(right):
        return _shrink(left, right.t(), scale)
    return matmul(left, right, scale)


def can_add_in_one_pass(dtype: torch.dtype, left_TR: Tensor, right_RN: Tensor) -> bool:
    """Whether `add_product_` runs as one kernel if y, the tensor to which it adds, has this dtype.
    The kernel does not round the matrix product left @ right before it adds the product to y.
    """
    return (
        dtype == left_TR.dtype
        and 0 < right_RN.shape[0] <= MAX_KERNEL_RANK
        and can_run_kernels(left_TR)
    )


def add_product_(
    y_TN: Tensor,
    left_TR: Tensor,
    right_RN: Tensor,
    scale: float = 1.0,
    *,
    calls_kernels_directly: bool = False,
) -> Tensor:
    """Computes y += scale * left @ right. All tensors have the same dtype, and the sum is rounded
    once.
    """
    ranks = right_RN.shape[0]
    if calls_kernels_directly and 0 < ranks <= MAX_KERNEL_RANK:
        if left_TR.stride(1) != 1:
            left_TR = left_TR.contiguous()
        if 1 not in right_RN.stride():
            right_RN = right_RN.contiguous()
        rows, columns = y_TN.shape
        assert y_TN.stride(1) == 1
        KERNELS.calls["expand"](
            y_TN.data_ptr(),
            left_TR.data_ptr(),
            right_RN.data_ptr(),
            rows,
            columns,
            ranks,
            y_TN.stride(0),
            left_TR.stride(0),
            right_RN.stride(0),
            right_RN.stride(1),
            scale,
            torch.get_num_threads(),
        )
        return y_TN
    # In a compiled graph y is always the result of a product, so its strides need no check. Dynamo
    # cannot read strides in a backward: it would trace the backward again, and autocast would stay
    # off afterwards (torch 2.13)
    if can_add_in_one_pass(y_TN.dtype, left_TR, right_RN) and (
        torch.compiler.is_dynamo_compiling() or y_TN.stride(-1) == 1
    ):
        _expand_(y_TN, left_TR, right_RN, scale)
        return y_TN
    return addmm_(y_TN, left_TR, right_RN, alpha=scale)


def gradient_product(
    left_TM: Tensor,
    right_TN: Tensor,
    scale: float,
    dtype: torch.dtype,
    *,
    calls_kernels_directly: bool = False,
) -> Tensor:
    """Computes scale * leftᵀ @ right in `dtype` and rounds the result once. If `dtype` is wider
    than the operands, the fp32 sums are not rounded to the operands' dtype.
    """
    if dtype == left_TM.dtype and scale == 1.0:
        return matmul(left_TM.t(), right_TN)
    if not calls_kernels_directly:
        return product_fp32(left_TM, right_TN, scale).to(dtype)
    if left_TM.stride(1) != 1:
        left_TM = left_TM.contiguous()
    if right_TN.stride(1) != 1:
        right_TN = right_TN.contiguous()
    tokens, left_features = left_TM.shape
    right_features = right_TN.shape[1]
    out_MN = left_TM.new_empty((left_features, right_features), dtype=torch.float32)
    # the kernel takes the narrower operand as the one whose features are ranks
    if left_features <= right_features:
        large = right_TN
        small = left_TM
        output_strides = (right_features, 1)
    else:
        large = left_TM
        small = right_TN
        output_strides = (1, right_features)
    KERNELS.calls["gradient"](
        large.data_ptr(),
        small.data_ptr(),
        out_MN.data_ptr(),
        tokens,
        max(left_features, right_features),
        min(left_features, right_features),
        large.stride(0),
        small.stride(0),
        *output_strides,
        scale,
        torch.get_num_threads(),
    )
    if dtype is torch.float32:
        return out_MN
    return out_MN.to(dtype)


def product_fp32(left_TM: Tensor, right_TN: Tensor, scale: float = 1.0) -> Tensor:
    """Computes scale * leftᵀ @ right. The result is summed and returned in fp32 (in fp64 for fp64
    operands). This function computes the gradients of adapters, so that these gradients are not
    rounded to bf16.

    The relative error for bf16 operands (2048 tokens, rank 16) is 1e-7 on a GPU, 4e-7 with the
    kernels, 2.5e-6 with two matrix products in bf16, and 1.7e-3 if the result is rounded to bf16.

    left    F[T M]
    right   F[T N]   in the dtype of left
    ->      fp32[M N]
    """
    assert left_TM.dtype == right_TN.dtype
    if can_run_kernels(left_TM):
        return _gradient(left_TM, right_TN, scale)
    product_MN = _product_fp32(left_TM, right_TN)
    if scale != 1.0:
        product_MN.mul_(scale)
    return product_MN


def _product_fp32(left_TM: Tensor, right_TN: Tensor) -> Tensor:
    dtype = arithmetic_dtype(left_TM.dtype)
    if left_TM.dtype == dtype:
        return left_TM.t() @ right_TN
    if widens_products(left_TM):
        return matmul_fp32(left_TM.t(), right_TN)
    if has_fp32_output(left_TM.dtype, left_TM.device):
        return torch.mm(left_TM.t(), right_TN, out_dtype=dtype)
    if left_TM.numel() + right_TN.numel() <= SMALL_ELEMENTS:
        return left_TM.to(dtype).t() @ right_TN.to(dtype)
    if left_TM.dtype == torch.bfloat16:
        return _two_term_product(left_TM, right_TN)
    if torch.compiler.is_compiling():
        return left_TM.to(dtype).t() @ right_TN.to(dtype)
    out_MN = torch.zeros(left_TM.shape[1], right_TN.shape[1], dtype=dtype, device=left_TM.device)
    for rows in row_blocks(left_TM.shape[0], left_TM.shape[1] + right_TN.shape[1], left_TM.device):
        out_MN.addmm_(left_TM[rows].to(dtype).t(), right_TN[rows].to(dtype))
    return out_MN


def _two_term_product(left_TM: Tensor, right_TN: Tensor) -> Tensor:
    """Returns the matrix product in fp32, although PyTorch returns it only in bf16. A second matrix
    multiplication computes the rounding error of the bf16 result: it subtracts this result from the
    fp32 sum before it rounds the difference. The function returns the sum of the bf16 result and
    its rounding error.

    On some CPUs, `addmm` rounds before it adds. The computed rounding error is then zero.
    """
    rounded_MN = left_TM.t() @ right_TN
    error_MN = torch.addmm(rounded_MN, left_TM.t(), right_TN, beta=-1.0)
    return rounded_MN.float().add_(error_MN)


def row_blocks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Divides `rows` rows of `width` elements into blocks and yields a slice for each block. A
    block has about BLOCK_ELEMENTS_CPU or BLOCK_ELEMENTS_GPU elements. In a compiled graph there is
    only one slice.
    """
    if torch.compiler.is_compiling():
        step = rows
    elif target_device_type(device) == "cpu":
        step = max(BLOCK_ELEMENTS_CPU // max(width, 1), 16)
    else:
        step = max(BLOCK_ELEMENTS_GPU // max(width, 1), 16)
    # at least one slice, so that an empty batch takes the same path
    return (slice(start, start + step) for start in range(0, max(rows, 1), max(step, 1)))


# --- products of a few rows with a base weight, as in the generation of tokens


def can_call_few_rows(x_TK: Tensor, *, calls_kernels_directly: bool) -> bool:
    """Whether `few_rows_product` may be called for x. Unlike the other kernels, it also runs on a
    CPU without bf16 instructions.

    calls_kernels_directly  the result of `can_call_kernels_directly` for x
    """
    if calls_kernels_directly:
        return True
    if (
        x_TK.shape[0] > MAX_FEW_ROWS
        or x_TK.dtype is not torch.bfloat16
        or not widens_products(x_TK)
    ):
        return False
    if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return type(x_TK) in PLAIN_TENSOR_TYPES and KERNELS.load() and forced_backend() in (None, "cpp")


def can_run_few_rows(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> bool:
    """Whether `few_rows_product` can compute x Wᵀ + bias. The caller must also check that
    `can_call_few_rows` returns True for x.
    """
    return (
        0 < x_TK.shape[0] <= MAX_FEW_ROWS
        and x_TK.dtype is weight_NK.dtype is torch.bfloat16
        and type(weight_NK) in PLAIN_TENSOR_TYPES
        and weight_NK.is_cpu
        and weight_NK.stride(1) == 1
        and (bias_N is None or bias_N.dtype is torch.bfloat16)
    )


def few_rows_product(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    xa_TR: Tensor | None = None,
    b_NR: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Computes x Wᵀ + bias + scale xa Bᵀ with the C++ kernel and rounds the sum once. It reads the
    weight once. We measured 12.9 GB/s on one core, and 7.5 GB/s with PyTorch's matrix product. A
    row of the result does not depend on the other rows of x.
    """
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    tokens, features = x_TK.shape
    columns = weight_NK.shape[0]
    y_TN = x_TK.new_empty((tokens, columns))
    ranks = xa_step = b_step = 0
    xa_pointer = b_pointer = bias_pointer = None
    if xa_TR is not None and b_NR is not None:
        if xa_TR.stride(1) != 1:
            xa_TR = xa_TR.contiguous()
        if b_NR.stride(1) != 1:
            b_NR = b_NR.contiguous()
        ranks = xa_TR.shape[1]
        xa_step = xa_TR.stride(0)
        b_step = b_NR.stride(0)
        xa_pointer = xa_TR.data_ptr()
        b_pointer = b_NR.data_ptr()
    if bias_N is not None:
        bias_pointer = bias_N.contiguous().data_ptr()
    KERNELS.calls["few_rows"](
        x_TK.data_ptr(),
        weight_NK.data_ptr(),
        bias_pointer,
        xa_pointer,
        b_pointer,
        y_TN.data_ptr(),
        tokens,
        features,
        columns,
        ranks,
        x_TK.stride(0),
        weight_NK.stride(0),
        xa_step,
        b_step,
        columns,
        scale,
        torch.get_num_threads(),
    )
    return y_TN


# --- A and B in the dtype of the products. Autograd does not see the cast: the fused functions get
# the original matrices and return gradients in their dtype


def should_save_uncast_adapters(x: Tensor) -> bool:
    """Whether forward saves A and B in their own dtype for backward, which then casts them again.
    This takes no memory, because A and B are parameters. On a GPU, forward saves the cast matrices
    instead, because each further cast would be a kernel launch.
    """
    return x.is_cpu or target_device_type(x.device) == "cpu"


def cast_adapters(
    a_matrices: Sequence[Tensor | None],
    b_matrices: Sequence[Tensor | None],
    *,
    like: Tensor,
    features: int,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns (one tensor with all A, the list of all B), in `dtype`. Within `keep_cast_adapters`,
    the result of an earlier call is returned.

    like, features  the device, and the number of input features, of the first tensor if no
                    projection has an adapter. The tensor then has no rows
    """
    kept: dict[Any, Any] | None = getattr(_generation, "cast_adapters", None)
    key: tuple[Any, ...] = ()
    if kept is not None:
        key = (dtype, *map(id, a_matrices), *map(id, b_matrices))
        if key in kept:
            joined_a, cast_b, _ = kept[key]
            return joined_a, cast_b
    cast_a: list[Tensor] = []
    cast_b = []
    for a, b in zip(a_matrices, b_matrices):
        if a is not None:
            cast_a.append(a.to(dtype))
        cast_b.append(None if b is None else b.to(dtype))
    if not cast_a:
        joined_a = torch.empty(0, features, dtype=dtype, device=like.device)
    elif len(cast_a) == 1:
        joined_a = cast_a[0]
    else:
        joined_a = torch.cat(cast_a)
    if kept is not None:
        # the matrices are stored too, so that no other tensor gets the id of one of them
        kept[key] = (joined_a, cast_b, (*a_matrices, *b_matrices))
    return joined_a, cast_b


class KeptRowLayers(dict[Any, Any]):
    """What `lora.few_rows` has read of the layers in a call of `generate`.

    rotary_tables  the last (cos, sin, their form, cos and sin as the op reads them)
    blocks         the memory for copies of weights in bf16. A later call of `generate` may use it
                   again: the first write to 160 MB of new memory takes 110 ms on a virtual machine
                   with an AMD EPYC, and a write to the same memory 35 ms
    copy_bytes     how many bytes such copies may still take. Together with the other memory of the
                   process, they take at most half of the usable memory
    """

    def __init__(self, blocks: list[Tensor]) -> None:
        super().__init__()
        self.rotary_tables: tuple[Tensor, Tensor, str, Tensor, Tensor] | None = None
        self.blocks = blocks
        self.used_blocks = 0
        self.free_elements = torch.empty(0, dtype=torch.bfloat16)
        self.copy_bytes = usable_memory() // 2 - status_bytes("VmRSS")
        self.copy_bytes += 2 * sum(block.numel() for block in blocks)

    def memory_for_copy(self, shape: Sequence[int]) -> Tensor | None:
        """Returns memory for a copy in bf16, or None if the copies would take too much memory. The
        next call returns the same memory unless the caller calls `keep_copy`.
        """
        elements = math.prod(shape)
        if 2 * elements > self.copy_bytes:
            return None
        while elements > self.free_elements.numel():
            if self.used_blocks == len(self.blocks):
                size = max(elements, COPY_BLOCK_ELEMENTS)
                self.blocks.append(torch.empty(size, dtype=torch.bfloat16))
            self.free_elements = self.blocks[self.used_blocks]
            self.used_blocks += 1
        return self.free_elements[:elements].view(shape)

    def keep_copy(self, copy: Tensor) -> None:
        self.copy_bytes -= 2 * copy.numel()
        self.free_elements = self.free_elements[copy.numel() :]


_generation = threading.local()


@contextmanager
def keep_cast_adapters(blocks: list[Tensor] | None = None) -> Iterator[None]:
    """Within this block, A and B are cast only once, not in each call of a layer, and the kernel for
    the few rows of a token is used (`lora.few_rows`). The values of adapters and weights must not
    change within the block. One example is a call of `generate`, which calls every layer once for
    each new token.

    blocks  as in `KeptRowLayers`
    """
    previous = getattr(_generation, "cast_adapters", None), kept_row_layers()
    _generation.cast_adapters = {}
    _generation.row_layers = KeptRowLayers([] if blocks is None else blocks)
    try:
        yield
    finally:
        _generation.cast_adapters, _generation.row_layers = previous


def kept_row_layers() -> KeptRowLayers | None:
    """Returns the dictionary in which `lora.few_rows` keeps the layers of a call of `generate`, or
    None outside such a call.
    """
    layers: KeptRowLayers | None = getattr(_generation, "row_layers", None)
    return layers
