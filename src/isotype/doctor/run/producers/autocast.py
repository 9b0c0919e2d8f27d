"""Finds the operation whose result autocast computed in the dtype of a tensor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType, MethodType

import torch
from torch import nn

from ..autocast import AutocastState, name_caller, read_frame_region
from ..expressions import is_of_torch, read_function
from ..frames import source_text
from ..producer import Producer
from .search import Search

# functions and methods whose operands autocast casts to its dtype
AUTOCAST_FUNCTIONS = frozenset(
    ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "einsum", "linear")
    + ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    + ("scaled_dot_product_attention", "chain_matmul")
)
# functions and methods that autocast computes in fp32, on a CPU and on a GPU
_FP32_FUNCTIONS = frozenset(
    ("prod", "cdist", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss", "kl_div")
)
_FP32_FUNCTIONS_OF_GPUS = frozenset(
    ("exp", "log", "log2", "log10", "log1p", "pow", "rsqrt", "reciprocal", "softplus", "norm")
    + ("softmax", "log_softmax", "cumsum", "cumprod", "sum", "logsumexp", "layer_norm")
    + ("group_norm", "cosine_similarity", "cross_entropy")
)


def follow_autocast(search: Search, node: ast.AST, index: int, line: int) -> Producer | None:
    """Returns the operation that autocast computed in the wanted dtype, if autocast was on
    there. If a function that has returned switched it on, returns the call of this function.
    """
    is_cast = is_autocast_operation(search, node, index, line)
    if not is_cast and not is_fp32_operation(search, node, index, line):
        return None
    state, owner = find_autocast(search, index, line)
    is_of_device = not state.device or search.device in ("", state.device)
    wanted = torch.float32 if is_fp32_operation(search, node, index, line) else state.dtype
    if not state.is_on or search.dtype != wanted or not is_of_device:
        return None
    reason = f"it runs under autocast ({state.location})"
    if wanted != state.dtype:
        reason = f"autocast ({state.location}) computes it in fp32"
        return replace(search.producer("autocast", node, index, is_proven=True), reason=reason)
    while index in search.callers and search.callers[index][1] is not None:
        if index == owner:
            function = search.frames[index].code.co_qualname.rpartition("<locals>.")[2]
            reason = f"{function} runs under autocast ({state.location})"
        is_last = index == owner
        index, call, _ = search.callers[index]
        assert call is not None
        node = call
        if is_last:
            break
    return replace(search.producer("autocast", node, index, is_proven=True), reason=reason)


def is_fp32_operation(search: Search, node: ast.AST, index: int, line: int) -> bool:
    """True for a function or a method of a tensor that autocast computes in fp32."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name = node.func.attr
    is_known = name in _FP32_FUNCTIONS
    if search.device not in ("", "cpu"):
        is_known = is_known or name in _FP32_FUNCTIONS_OF_GPUS
    value = read_function(node.func, search.frame_at(index, line))
    is_own = isinstance(value, (FunctionType, MethodType, nn.Module))
    return is_known and (is_of_torch(value) or not is_own)


def is_autocast_operation(search: Search, node: ast.AST, index: int, line: int) -> bool:
    """True for a matrix product, for a function such as `F.linear`, and for a module that has
    weights of a matrix or a convolution.
    """
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Call):
        return False
    module = read_function(node.func, search.frame_at(index, line))
    if isinstance(module, nn.Module):
        return any(
            parameter.dim() > 1
            for part in module.modules()
            if not isinstance(part, nn.Embedding)
            for parameter in part.parameters(recurse=False)
        )
    return source_text(node.func).rpartition(".")[2] in AUTOCAST_FUNCTIONS


def find_autocast(search: Search, index: int, line: int) -> tuple[AutocastState, int]:
    """Returns the autocast state at a line, and the index of the frame whose code sets it. The
    line may be in a function that has returned. The index is -1 if no code sets the state.
    """
    for outer, outer_line in _iterate_lines(search, index, line):
        frame = search.frames[outer]
        state = read_frame_region(replace(frame, line=outer_line))
        if state is not None:
            return name_caller(state, frame, _find_user_line(search, outer)), outer
    return AutocastState(), -1


def _find_user_line(search: Search, index: int) -> str:
    """Returns the running line of the innermost function of the user's code around a frame, or ""."""
    for outer, line in _iterate_lines(search, index, search.frames[index].line):
        if search.frames[outer].is_user_code:
            return replace(search.frames[outer], line=line).location
    return ""


def _iterate_lines(search: Search, index: int, line: int) -> Iterator[tuple[int, int]]:
    """Yields the index of a frame and its line, and then those of its callers."""
    yield index, line
    while True:
        if index in search.callers:
            index, _, line = search.callers[index]
        elif 0 < index < search.running_count:
            index -= 1
            line = search.frames[index].line
        else:
            return
        yield index, line
