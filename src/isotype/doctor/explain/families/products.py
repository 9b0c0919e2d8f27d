"""Errors of matrix products."""

from __future__ import annotations

from ..family import Cause, Explained, Seen, family
from ..source_line import failing_call
from .causes import custom_backward, outside_autocast, wider


@family("EX001", "matrix product", "vector product", "accumulated product", "grouped product", "layer outside autocast")
def matrix_product(s: Seen) -> Explained:
    """Two dtypes in one matrix product

    **Why it matters.** A product outside autocast takes operands of one dtype. The texts are many: `mat1 and mat2` on CUDA, `m1 and m2`
    on a CPU, `self and mat2` for a bias or an in-place buffer, `expected scalar type` for batched and einsum products. The fault is
    usually upstream of where it fails: something made an activation fp32, or left a weight behind when the model was cast.

    **Example.** A Linear with bf16 weights gets the fp32 output of a norm whose weight is fp32, in `generate()`, outside autocast.

    **What to do.** Run the call under `torch.autocast` with the dtype training uses, or cast the odd operand. The first dtype named is
    the activation, the second the weight; `self` is the bias or the buffer. `isotype trace` names what made the operand.
    """
    left, right = s.dtype("left", s.dtype("self", s.dtype("expected"))), s.dtype("right", s.dtype("got"))
    if s.operator == "accumulated product":
        left = s.dtype("self")
    causes = [*outside_autocast(s), *custom_backward(s)]
    call = failing_call(s.situation)
    in_place = call if call and call.in_place and call.is_product else None
    half_pair = {left, right} == {"bf16", "fp16"}
    if s.operator == "accumulated product" or s.words.get("left") == "self":
        causes.append(
            Cause(
                name="bias or in-place buffer in another dtype",
                score=8.5 if in_place else 5.5,
                why=(
                    f"the tensor that is added to (self: a bias, mask or addmm_ / baddbmm buffer) is {s.dtype('self')} "
                    f"and the product is {right}; in-place and out= products take no part in autocast"
                ),
                fix=(
                    f"make {in_place.tensors[0]} with the operands' dtype, or keep it wide and add out of place, which promotes: "
                    f"{in_place.tensors[0]} = {in_place.tensors[0]} + the product, instead of {in_place.function}"
                    if in_place
                    else f"cast the buffer or the bias: bias.to({s.torch_half}), or write torch.matmul(a, b) + c instead of c.addmm_(a, b)"
                ),
                because=(
                    f"{in_place.frame.code} at {in_place.frame.file}:{in_place.frame.line}"
                    if in_place
                    else "the text names self or input, the tensor added to"
                ),
            )
        )
    if s.operator == "grouped product" or "grouped product" in s.situation or s.situation.mentions(r"_?grouped_mm\b|grouped_linear"):
        causes.append(
            Cause(
                name="grouped product of experts outside autocast's list",
                score=5.5,
                why=(
                    f"torch._grouped_mm takes no part in autocast: {left} activations (a norm under autocast returns fp32) met {right} "
                    "expert weights, and the batched layers around it were cast"
                ),
                fix=f"cast both next to the call: torch._grouped_mm(x.to({s.torch_half}), w.to({s.torch_half}), offs=...)",
                because="mat_a and mat_b are grouped_mm's names" if s.operator == "grouped product" else "the text names grouped_mm",
            )
        )
    if s.operator == "layer outside autocast":
        causes.append(
            Cause(
                name="Transformer Engine layer outside autocast",
                score=5.5,
                why=(
                    f"a Transformer Engine layer takes one dtype where no autocast is active: its input is {left}, its parameter "
                    f"{s.words.get('parameter', 'weight')} {right} (an fp32 residual stream or "
                    "embedding, or an evaluation outside autocast)"
                ),
                fix=(
                    f"run the call under {s.autocast}, or cast at the border: x = x.to({s.torch_half}), or make the layer "
                    f"with params_dtype={left}"
                ),
                because="the text says that no autocast is active",
            )
        )
    if "fp32 head" in s.situation and "sharded" in s.situation:
        causes.append(
            Cause(
                name="fp32 head under a sharding policy",
                score=8,
                why=(
                    f"the head's input is cast to fp32 ({left}), and FSDP's mixed-precision policy (or ZeRO-3) casts its gathered weight "
                    f"to {right} again: casting the module once does not hold"
                ),
                fix="cast weight and input in the head's forward: F.linear(x.float(), head.weight.float()), or keep the head out of the "
                "policy (a unit of its own with param_dtype=torch.float32); upgrade trl where it does so itself",
                because="the text names an fp32 head and sharding",
            )
        )
    frame = s.situation.mentions(r"lm_head|\bhead\b|classifier|score\(|v_head")
    if frame:
        causes.append(
            Cause(
                name="head left in another dtype",
                score=4,
                why=(
                    f"the head's weight and its input differ: {left} input, {right} weight; a head added or kept in fp32 "
                    f"beside a {s.half} model, or a norm that returned fp32"
                ),
                fix=(
                    "cast the head's input where it is called: head(x.to(head.weight.dtype)), or the head: "
                    f"model.lm_head.to({s.torch_half}); or run under {s.autocast}"
                ),
                because=f"the head is in the traceback: {frame.function} at {frame.file}:{frame.line}",
            )
        )
    if "backward" not in s.situation and (frame := s.situation.mentions(r"liger_kernel|unsloth|fused_|cut_cross_entropy|apex|fla/")):
        causes.append(
            Cause(
                name="fused kernel outside autocast",
                score=5,
                why=(
                    f"a fused operation was handed {left} activations and {right} weights as they are: it takes a weight directly "
                    "and autocast casts neither, so what autocast made half precision meets an fp32 weight"
                ),
                fix="cast next to the call: fused(hidden, weight.to(hidden.dtype)), or keep activations and weight in one dtype",
                because=f"{frame.function} at {frame.file}:{frame.line}",
            )
        )
    if (frame := s.situation.mentions(r"/peft/|lora_[AB]|fast_lora|/lora")) is not None:
        causes.append(
            Cause(
                name="fp32 adapter on a half-precision base",
                score=3,
                why=(
                    f"LoRA weights are fp32 by default (PEFT's autocast_adapter_dtype) on a {s.half} base; outside "
                    "autocast their output or input does not match"
                ),
                fix=(
                    f"run the call under {s.autocast}, or make the adapter the base's dtype: get_peft_model(model, "
                    "config, autocast_adapter_dtype=False)"
                ),
                because=f"an adapter layer is in the traceback: {frame.file}:{frame.line}",
            )
        )
    if "fp64" in (left, right):
        causes.append(
            Cause(
                name="fp64 from numpy",
                score=5,
                why="one operand is fp64: torch.from_numpy keeps numpy's float64, and a Python list or np.linspace becomes one on the way",
                fix="x.to(weight.dtype) where the array enters: torch.as_tensor(array, dtype=torch.float32)",
                because="the text names fp64, which no trainer asks for",
            )
        )
    if fp8 := next((word for word in (left, right) if word.startswith("fp8")), None):
        causes.append(
            Cause(
                name="fp8 weight in an ordinary product",
                score=5,
                why=f"{fp8} is a storage format here: an fp8 checkpoint was loaded as it is, and nothing casts the weight for the product",
                fix="cast in the layer's forward: F.linear(x, weight.to(x.dtype)), or load the checkpoint in bf16 or fp16",
                because="the text names fp8",
            )
        )
    if call and call.is_product and len(call.tensors) == 2:
        first, second = call.tensors
        known = f"{first} is {left}, {second} {right}" if "left" in s.dtypes else f"{first} and {second} are {left} and {right}"
        narrow, wide = (second, first) if wider(left, right) else (first, second)
        causes.append(
            Cause(
                name="operands of two dtypes",
                score=4.5,
                why=f"{known}: no layer's weight takes part; one of them was made or kept in fp32 (a softmax, a router, an adjacency)",
                fix=f"cast one at the call: {wide}.to({narrow}.dtype), or both with .float() where the precision matters",
                because=f"{call.frame.code} at {call.frame.file}:{call.frame.line}",
            )
        )
    inner = s.situation.innermost
    if inner and inner.file.replace("\\", "/").endswith("nn/modules/rnn.py"):
        causes.append(
            Cause(
                name="a recurrent layer's input or hidden state in another dtype",
                score=4,
                why=f"{left} met the layer's {right} weights: the input, or a first hidden state made by torch.zeros without dtype=",
                fix="torch.zeros(..., dtype=x.dtype) for the hidden state, and the input in the layer's dtype",
                because=f"{inner.function} at {inner.file}:{inner.line}",
            )
        )
    if half_pair:
        causes.append(
            Cause(
                name="bf16 and fp16 in one model",
                score=5,
                why=(
                    "one part was loaded in fp16 and another in bf16 (a checkpoint's dtype, quantisation's compute "
                    "dtype, or a fallback for GPUs without bf16)"
                ),
                fix=(
                    "load every part with one dtype: dtype=torch.bfloat16 and bnb_4bit_compute_dtype=torch.bfloat16 "
                    "(torch.float16 for both on GPUs before Ampere)"
                ),
                because="the text names both half formats",
            )
        )
    elif wider(left, right):
        causes.append(
            Cause(
                name="activation promoted to fp32",
                score=2.5,
                why=(
                    f"the activation (first) is {left} and the weight (second) {right}: an fp32 norm weight, mask, scale, "
                    "embedding or cos/sin table promoted it upstream, and no autocast casts it back"
                ),
                fix=f"run under {s.autocast}, or cast at the border: x = x.to(layer.weight.dtype)",
                because=f"the first operand is the wider: {left} against {right}" if "left" in s.dtypes else "",
            )
        )
    else:
        causes.append(
            Cause(
                name="weight left in a wider dtype",
                score=2.5,
                why=(
                    f"the activation (first) is {left} and the weight (second) {right}: this layer was not cast with the "
                    "rest of the model (a new head, an adapter, prepare_model_for_kbit_training), and no autocast is "
                    "active here"
                ),
                fix=f"cast the layer, layer.to({s.torch_half}), or run under {s.autocast}",
                because=f"the second operand is the wider: {left} against {right}" if "left" in s.dtypes else "",
            )
        )
    return Explained(message=f"{s.operator} of {left} and {right}", causes=causes)
