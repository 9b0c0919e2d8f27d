"""Judges matrix products: each in `compute`, in adapters in the dtype of their branch."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from ...dtypes import FLOATS
from .call import Call, float_word
from .callers import ENGINE, OURS, PRACTICE, is_lora_branch
from .lineage import Lineage
from .regions import BACKWARD, FORWARD, GRADIENTS, LOSS, UPDATE

# autograd's nodes of products; other nodes, as a triangular solve's, may multiply in their own dtype
_PRODUCT_NODE = re.compile(r"(Mm|Addmm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Convolution|Linear|ScaledDot|GroupedMm|Trilinear)\w*Backward")

_UNFUSED = "no op runs this adapter, and PEFT's own code computes in autocast's dtype (see the manifest)"


def judge_product(call: Call, dtype: str, made: Lineage) -> Lineage:
    """Judges a product and returns the record of its result, without the losses of the operands."""
    step, adapter = call.step, "lora_" in call.module
    clean = replace(made, marks=())
    if call.region in (UPDATE, GRADIENTS, LOSS) and not (call.region == LOSS and call.by.kind == OURS):
        call.seen.dtypes["other_products"][dtype] += 1
        # backward mirrors a product of the loss, as that of a contrastive one, in its dtype
        step.wide_forward = step.wide_forward or (call.region == LOSS and dtype != step.compute)
        return clean
    if adapter and step.lora_branch == "fp32" and dtype != "fp32" and dtype in FLOATS:
        # a layer that no op runs: PEFT's own code follows autocast
        step.product_outside(
            call.module, dtype, call.by, call.symbol, declared="fp32", rule="model.lora_branch: fp32", cause=_UNFUSED,
            fix="model.lora_branch: compute",
        )  # fmt: skip
    wider = dtype != step.compute and dtype in FLOATS
    if not wider:
        call.seen.note(step.role, call.symbol, dtype, step.compute, allowed=(dtype,))
        return clean
    if call.by.kind == OURS:
        call.seen.dtypes["lora_branch" if is_lora_branch(call.by.file) else "isotype_ops"][dtype] += 1
        # recorded by autograd, unlike what runs inside an autograd function: backward mirrors it
        step.wide_forward = step.wide_forward or torch.is_grad_enabled()
    elif call.by.kind == ENGINE and call.region == BACKWARD:
        # mirrors a forward product outside compute, which was judged; one without such a forward is autocast's
        if not step.wide_forward and _PRODUCT_NODE.match(type(torch._C._current_autograd_node()).__name__):
            step.product_outside("backward", dtype, call.by, call.symbol)
        call.seen.dtypes["mirrored_in_backward"][dtype] += 1
    elif step.attention_calls and float_word(step.attention_calls[-1]) == step.compute:
        # with dropout, and on devices without a kernel, PyTorch makes attention of fp32 products of what it got in `compute`
        step.wide_forward = True
        call.seen.unseen_thing(step.role, "inside PyTorch's attention, which is given and gives `compute`")
    elif adapter and step.lora_branch in (None, dtype):
        step.wide_forward = True
        call.seen.dtypes["lora_branch"][dtype] += 1
    elif not made.activation and call.region == FORWARD:
        call.seen.dtypes["tables"][dtype] += 1
    elif call.region == FORWARD and call.by.kind == PRACTICE and dtype == "fp32" and step.regions.switched_off_by_family():
        step.wide_forward = True
        call.seen.dtypes["family_in_fp32"][dtype] += 1
    elif call.region == FORWARD:
        number = len(step.pending)
        step.wide_forward = True
        step.pending[number] = (call.module, dtype, call.by, call.symbol)
        return replace(clean, products=clean.products | {number})
    else:
        step.product_outside(call.module or "backward", dtype, call.by, call.symbol)
    return clean
