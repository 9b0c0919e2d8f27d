"""Families of errors from products and layers: two operands, a buffer, a norm, attention, an indexed write."""

from __future__ import annotations

from collections.abc import Iterator

from ...dtypes import is_float, itemsize
from ...finding import Severity
from .family import Cause, Explained, Seen, family


def _wider(left: str, right: str) -> bool:
    try:
        return itemsize(left) > itemsize(right)
    except ValueError:
        return False


def _float(word: str) -> bool:
    try:
        return is_float(word)
    except ValueError:
        return False


def _outside_autocast(s: Seen, base: float = 0.0) -> Iterator[Cause]:
    """Generation, evaluation and validation run outside the autocast that a trainer puts around the training forward only."""
    if "generate" in s.situation:
        seen = f"generate is called in {s.situation.where('generate')}"
        if "callback" in s.situation:
            seen += f", from the callback {s.situation.where('callback')}"
        yield Cause(
            name="generate outside autocast",
            score=base + 6 + ("callback" in s.situation) + ("trainer" in s.situation),
            why=(
                "the trainer wraps only the training forward in autocast; generate() is outside autocast, so an fp32 "
                f"activation (from fp32 norms, adapters or embeddings) meets {s.half} weights uncast"
            ),
            fix=(
                f"with torch.no_grad(), {s.autocast}:\n    out = model.generate(**inputs)\nor cast what is fp32 once: "
                f"the norms and the head, model.to({s.torch_half})"
            ),
            because=seen,
        )
    elif "evaluation" in s.situation and "backward" not in s.situation:
        yield Cause(
            name="evaluation outside autocast",
            score=base + 4,
            why=f"training runs under autocast and this evaluation does not: fp32 activations meet {s.half} weights uncast",
            fix=f"with torch.no_grad(), {s.autocast}:\n    ...  # the evaluation forward",
            because=f"evaluation in {s.situation.where('evaluation')}",
        )


def _custom_backward(s: Seen) -> Iterator[Cause]:
    if "backward" not in s.situation:
        return
    if "custom backward" in s.situation:
        yield Cause(
            name="custom backward mixes dtypes",
            score=8,
            why=(
                "a hand-written autograd backward multiplies the incoming gradient (in the dtype autocast gave the "
                "output) with saved tensors of another dtype; backward runs outside autocast"
            ),
            fix=(
                "decorate forward with torch.amp.custom_fwd(device_type='cuda') and backward with "
                "torch.amp.custom_bwd(device_type='cuda'), and cast next to the product:\n"
                "    saved = saved.to(grad_output.dtype)\nreturn each gradient in its tensor's dtype"
            ),
            because=f"custom backward in {s.situation.where('custom backward')}",
        )
    elif "recompute" not in s.situation:
        yield Cause(
            name="dtypes differ in backward",
            score=5,
            why=(
                "backward runs outside autocast: the gradient has the dtype of the forward's output and meets a "
                "tensor saved in another dtype"
            ),
            fix=(
                "make the forward produce one dtype: cast the odd operand before the product, or use "
                "torch.amp.custom_fwd / custom_bwd in a custom function"
            ),
            because=f"backward in {s.situation.where('backward')}",
        )


@family("EX001", "matrix product", "vector product", "accumulated product")
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
    causes = [*_outside_autocast(s), *_custom_backward(s)]
    half_pair = {left, right} == {"bf16", "fp16"}
    if s.operator == "accumulated product" or s.words.get("left") == "self":
        causes.append(
            Cause(
                name="bias or in-place buffer in another dtype",
                score=5.5,
                why=(
                    f"the tensor that is added to (self: a bias, mask or addmm_ / baddbmm buffer) is {s.dtype('self')} "
                    f"and the product is {right}; in-place and out= products take no part in autocast"
                ),
                fix=f"cast the buffer or the bias: bias.to({s.torch_half}), or write torch.matmul(a, b) + c instead of c.addmm_(a, b)",
                because="the text names self or input, the tensor added to",
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
    elif _wider(left, right):
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


@family("EX002", "output buffer", "result type")
def output_buffer(s: Seen) -> Explained:
    """An out= buffer, or an in-place target, in another dtype than the result

    **Why it matters.** `out=` and in-place operations write where they are told and are not autocast: the operands' dtype decides the
    result, the buffer's dtype must be the same. A float result cannot be written into an integer tensor at all.

    **Example.** `torch.matmul(dW, up.t(), out=dX)` in a custom backward, where `dX` re-uses an fp32 activation buffer and dW is bf16.

    **What to do.** Allocate the buffer with the product's dtype, or drop `out=` and let autograd's next step cast.
    """
    want, got = s.dtype("expected", s.dtype("result")), s.dtype("got", s.dtype("desired"))
    if s.operator == "result type":
        return Explained(
            message=f"a {want} result cannot be written into a {got} tensor",
            causes=[
                Cause(
                    name="in-place update of a narrower category",
                    score=3,
                    why=(
                        f"the left-hand side (or out= tensor) is {got}, and the operation gives {want}: an integer mask, "
                        "position or counter tensor is updated with floats"
                    ),
                    fix="make the target floating first: x = x.float(), or write x = x * y instead of x *= y",
                )
            ],
        )
    frame = s.situation.mentions(r"out\s*=|addmm_|addbmm_")
    seen = f"written by {frame.code or frame.function} at {frame.file}:{frame.line}" if frame else ""
    where = "in a custom backward " if "custom backward" in s.situation or "backward" in s.situation else ""
    return Explained(
        message=f"an out= buffer is {got}, the result {want}",
        causes=[
            Cause(
                name="out= buffer",
                score=5,
                why=(
                    f"a product with out= {where}has {want} operands and a preallocated {got} buffer (made from another "
                    "tensor, or an activation buffer re-used); out= and in-place products are not autocast, also not "
                    "under custom_fwd"
                ),
                fix=(
                    "make the dtype of the buffer the product's: buffer = torch.empty(shape, dtype=a.dtype, "
                    "device=a.device), or drop out= and cast the result: torch.matmul(a, b).to(dx.dtype); cast operands "
                    "first in backward, custom_fwd / custom_bwd do not cure out="
                ),
                because=seen,
            )
        ],
    )


@family("EX003", "convolution", "recurrent layer")
def convolution(s: Seen) -> Explained:
    """A convolution's or recurrent layer's input and parameters differ

    **Why it matters.** Convolutions check the input against the bias first, then the weight. In diffusion training the VAE is often
    kept in fp32 while pixels or latents are cast to the training dtype, or the reverse.

    **Example.** `vae.encode(pixel_values.to(torch.bfloat16))` with an fp32 VAE.

    **What to do.** Cast at the border: `vae.encode(pixels.to(vae.dtype))`, and the latents to the denoiser's dtype after it.
    """
    left, right = s.dtype("left", s.dtype("expected")), s.dtype("right", s.dtype("got"))
    layer = s.operator
    causes = []
    if "backward" in s.situation or "grad_output" in " ".join(s.words.values()):
        causes.append(
            Cause(
                name="gradient and weight differ",
                score=5,
                why=(
                    f"in backward the gradient is {left} and the saved weight {right}: fp16 or fp32 weights under another "
                    "mixed precision, or a custom backward without casts"
                ),
                fix=(
                    "make the weights the dtype mixed precision uses (or fp32), and cast saved tensors to "
                    "grad_output.dtype in a custom backward"
                ),
                because="the failing call is a backward",
            )
        )
    vae = s.situation.mentions(r"vae|autoencoder|encode\(|decode\(|first_stage")
    if vae or layer == "convolution":
        causes.append(
            Cause(
                name="VAE or image encoder in another dtype",
                score=4 if vae else 2,
                why=(
                    f"the input is {left} and the layer's parameters {right}: a VAE (or image encoder) kept in one dtype "
                    "while pixels or latents are cast to another"
                ),
                fix="cast the input at the border: vae.encode(pixel_values.to(vae.dtype)), and latents.to(transformer.dtype) after it",
                because=f"{vae.code or vae.function} at {vae.file}:{vae.line}" if vae else "",
            )
        )
    causes += list(_outside_autocast(s))
    causes.append(
        Cause(
            name="input not cast to the layer's dtype",
            score=1.5,
            why=f"a {layer} got {left} and has {right} parameters, outside autocast",
            fix=f"layer(x.to(next(layer.parameters()).dtype)), or run under {s.autocast}",
        )
    )
    return Explained(message=f"{layer}: {left} input, {right} parameters", causes=causes)


@family("EX004", "norm", "slow norm")
def norm(s: Seen) -> Explained:
    """A norm's weight and its input differ

    **Why it matters.** On a CPU a low-precision norm weight does not go with an fp32 input (only the reverse is allowed); on CUDA the
    layer norm refuses both. `rms_norm` only warns, and takes its slow path.

    **Example.** A model cast to bf16 whose embedding output is fp32, on a CPU.

    **What to do.** Keep norm weights fp32, or cast the norm's input; under autocast `layer_norm` computes in fp32 by itself.
    """
    want, got = s.dtype("expected", s.dtype("left")), s.dtype("got", s.dtype("right"))
    if s.operator == "slow norm":
        return Explained(
            message=f"rms_norm: {want} input, {got} weight: the fused path is not taken",
            severity=Severity.WARNING,
            causes=[
                Cause(
                    name="norm weight in another dtype",
                    score=2,
                    why=f"the norm's weight is {got} and its input {want}; the result is right, but computed by the slow path",
                    fix=(
                        "cast the norm's weight to the input's dtype, norm.to(x.dtype), or accept the slower path: it is a "
                        "warning, not an error"
                    ),
                )
            ],
        )
    what = s.words.get("what", "parameter")
    return Explained(
        message=f"norm: {what} must be {want}"
        if "expected" in s.dtypes and "got" not in s.dtypes
        else f"norm: {want} expected, {got} found",
        causes=[
            *_outside_autocast(s),
            Cause(
                name="norm weight and input differ",
                score=3,
                why=(
                    "the norm's weight (parameter) and its input have two dtypes: the model was cast to half precision "
                    f"and its input was not, or the norm's weight was kept fp32; expected {want}"
                ),
                fix=(
                    "keep one rule: norm.float() and x.float() inside the norm with the output cast back, or "
                    "x.to(norm.weight.dtype) before it; under torch.autocast layer_norm computes in fp32"
                ),
                because=f"the text asks for {want}",
            ),
            Cause(
                name="half-precision model on a CPU",
                score=1,
                why="a model made for a GPU in half precision is run on a CPU",
                fix="model.float() on a CPU, or bf16 under torch.autocast('cpu', torch.bfloat16)",
            ),
        ],
    )


@family("EX005", "attention", "attention mask")
def attention(s: Seen) -> Explained:
    """Query, key, value or mask of attention differ

    **Why it matters.** Attention takes one dtype. Which one is odd tells who did it: query and key together, the rotary table;
    key and value
    together, the cache; the query alone, a norm on it; the mask, its construction with torch's default dtype.

    **Example.** fp32 cos/sin tables promote query and key, and value stays bf16.

    **What to do.** Cast where the odd one is made: `q, k = q.to(v.dtype), k.to(v.dtype)` after rotary, a cache made with the model's dtype,
    a mask made with `dtype=query.dtype` (or bool).
    """
    if s.operator == "attention mask":
        mask, query = s.dtype("mask", "another dtype"), s.dtype("query", "one dtype")
        causes = []
        if "mask" in s.dtypes and not _float(mask):
            causes.append(
                Cause(
                    name="integer mask",
                    score=4,
                    why=f"the mask is {mask}: attention takes a bool or a float mask",
                    fix="attn_mask = attn_mask.bool()",
                    because=f"attn_mask is {mask}",
                )
            )
        else:
            wide_query = _wider(query, mask)
            causes.append(
                Cause(
                    name="query promoted to fp32",
                    score=4 if wide_query else 1,
                    why=(
                        f"the query is {query} while the mask is {mask}: a norm, rotary table (cos/sin) or adapter upstream "
                        "promoted the query"
                    ),
                    fix=f"cast query and key back: q = q.to({s.torch_half}), or run under {s.autocast}",
                    because="the query is the wider" if wide_query else "",
                )
            )
            causes.append(
                Cause(
                    name="mask made in another dtype",
                    score=1 if wide_query else 4,
                    why=(
                        f"the mask is {mask} and the query {query}: the mask was made with torch's default dtype, or cached "
                        "from before the model was cast"
                    ),
                    fix="make the mask bool, or with dtype=query.dtype: attn_mask = attn_mask.to(query.dtype)",
                    because="" if wide_query else "the mask is not the query's dtype",
                )
            )
        return Explained(message=f"attention: {mask} mask, {query} query", causes=[*causes, *_outside_autocast(s, -2)])
    q, k, v = (s.dtypes.get(role) for role in ("query", "key", "value"))
    causes = []
    if q and k and v:
        odd = f"query is {q}, key is {k}, value is {v}"
        if q == k != v:
            causes.append(
                Cause(
                    name="rotary table promotes q and k",
                    score=5,
                    why=(
                        f"query and key are {q} and value {v}: the rotary embedding's fp32 cos/sin tables promoted query and "
                        "key (rotary), value was not touched"
                    ),
                    fix="cast after rotary: q, k = q.to(v.dtype), k.to(v.dtype), or cos, sin = cos.to(q.dtype), sin.to(q.dtype)",
                    because=odd,
                )
            )
        elif k == v != q:
            causes.append(
                Cause(
                    name="KV cache in another dtype",
                    score=5,
                    why=(
                        f"key and value are {k} and the query {q}: the KV cache (or the encoder's states) was made in another "
                        "dtype than the query's"
                    ),
                    fix=(
                        "make the cache with the model's dtype: StaticCache(..., dtype=model.dtype), or cast the query: q = q.to(k.dtype)"
                    ),
                    because=odd,
                )
            )
            causes.append(
                Cause(
                    name="query from an fp32 norm",
                    score=4.5 if q == "fp32" else 2,
                    why=f"only the query is {q}: a query norm, an adapter on q_proj, or a scale in fp32 promoted it",
                    fix="cast the query before attention: q = q.to(k.dtype)",
                    because=odd,
                )
            )
        else:
            name = "key" if q == v else "query, key and value"
            causes.append(
                Cause(
                    name=f"{name} in another dtype",
                    score=5,
                    why=(
                        f"{odd}: the {name} projection, its adapter, its norm or the cache works in another dtype (a mixed "
                        "cache promotes only what is written to it)"
                    ),
                    fix="cast to one dtype before attention: q, k = q.to(v.dtype), k.to(v.dtype)",
                    because=odd,
                )
            )
    causes += list(_outside_autocast(s, -2))
    causes.append(
        Cause(
            name="rotary, norm or cache promoted one operand",
            score=1,
            why="one of query, key and value was promoted: rotary cos/sin in fp32, a query or key norm, or a KV cache of another dtype",
            fix=f"cast before attention: q, k = q.to(v.dtype), k.to(v.dtype), or run under {s.autocast}",
        )
    )
    return Explained(message="attention: query, key and value differ", causes=causes)


@family("EX006", "flash attention")
def flash_attention(s: Seen) -> Explained:
    """FlashAttention got fp32

    **Why it matters.** FlashAttention has fp16 and bf16 kernels only. fp32 q/k/v mean that no mixed precision is on, or that something
    (norms, rotary tables, fp32 adapters) promoted them.

    **Example.** A model loaded in fp32 and trained with `attn_implementation="flash_attention_2"` without `bf16=True`.

    **What to do.** `bf16=True` in the trainer, `dtype=torch.bfloat16` when loading, or a cast before attention; else
    `attn_implementation="sdpa"`.
    """
    causes = list(_outside_autocast(s))
    trainer = "trainer" in s.situation or s.situation.mentions(r"trainer\.py|compute_loss|training_step") is not None
    causes.append(
        Cause(
            name="no mixed precision flag",
            score=3.5 if trainer else 2.5,
            why=(
                "q/k/v reached FlashAttention in fp32: no mixed precision flag is set, so nothing casts them (fp32 "
                "q/k/v); loaded in fp32, or norms and adapters in fp32"
            ),
            fix=(
                "bf16=True in the training arguments (fp16=True before Ampere), or model = "
                f"AutoModel.from_pretrained(..., dtype=torch.bfloat16), or call under {s.autocast}"
            ),
            because=f"a trainer is in the traceback: {s.situation.where('trainer')}" if "trainer" in s.situation else "",
        )
    )
    causes.append(
        Cause(
            name="fp32 norms or rotary tables",
            score=3,
            why=(
                "with half-precision weights: fp32 norm weights (prepare_model_for_kbit_training casts them), rotary "
                "cos/sin tables or fp32 adapters promote q/k/v to fp32"
            ),
            fix=f"cast before attention: q, k, v = (t.to({s.torch_half}) for t in (q, k, v)), or run under {s.autocast}",
        )
    )
    return Explained(message="FlashAttention got fp32 q/k/v; it takes fp16 and bf16 only", causes=causes)


@family("EX007", "indexed write")
def indexed_write(s: Seen) -> Explained:
    """An indexed write whose source and destination differ

    **Why it matters.** `x[mask] = y`, `index_put_`, `scatter`, `index_add_`, `index_copy_` and `masked_scatter` do not cast,
    unlike a slice assignment.

    **Example.** Expert outputs multiplied by fp32 routing weights are written into a bf16 buffer.

    **What to do.** Cast the source, `src.to(dst.dtype)`, or allocate the buffer in the wider dtype where a sum is meant.
    """
    name = s.words.get("name", "indexed write").lower()
    dst, src = s.dtype("destination", "one dtype"), s.dtype("source", "another")
    causes = []
    cast = "cast the source: dst[index] = src.to(dst.dtype)"
    if frame := s.situation.mentions(r"moe|expert|router|routing|mixtral|top_k|combine"):
        causes.append(
            Cause(
                name="routing weights promote the source",
                score=5,
                why=(
                    "mixture of experts: fp32 routing weights (softmax in fp32) multiply the expert outputs, so the "
                    f"source is {src} and the buffer {dst}"
                ),
                fix=(
                    "cast the routing weights, weights.to(hidden.dtype), or the source: out.index_add_(0, idx, "
                    "x.to(out.dtype)); or allocate the buffer in fp32 (dtype= of the zeros)"
                ),
                because=f"{frame.function} at {frame.file}:{frame.line}",
            )
        )
    if frame := s.situation.mentions(r"image|vision|pixel|multimodal|audio|inputs_embeds|patch"):
        causes.append(
            Cause(
                name="image or audio features in another dtype",
                score=5,
                why=f"features of a tower kept in {src} are written into {dst} text embeddings",
                fix="inputs_embeds[mask] = features.to(inputs_embeds.dtype)",
                because=f"{frame.function} at {frame.file}:{frame.line}",
            )
        )
    if name.startswith("index_copy") or (frame := s.situation.mentions(r"cache|past_key")):
        causes.append(
            Cause(
                name="KV cache in another dtype",
                score=4.5,
                why=f"a static KV cache is {dst} and the new states are {src}",
                fix="make the cache with the states' dtype: StaticCache(..., dtype=model.dtype), or k.to(cache.dtype)",
                because="index_copy_ is how static caches are filled" if name.startswith("index_copy") else "a cache is in the traceback",
            )
        )
    causes.append(
        Cause(
            name="source and destination differ",
            score=2,
            why=(
                f"the destination is {dst} and the source {src}: indexed writes do not cast (slice assignment does); "
                "usual sources are fp32 routing weights, fp32 image features, or a buffer made without dtype="
            ),
            fix=cast + ", or allocate the destination with dtype=src.dtype",
        )
    )
    named = f"{src} source, {dst} destination" if "source" in s.dtypes else "source and destination differ in dtype"
    return Explained(message=f"{name}: {named}", causes=causes)


@family("EX008", "integer input")
def integer_input(s: Seen) -> Explained:
    """Ids or labels are floating where integers are expected

    **Why it matters.** Embeddings take integer ids, and losses over classes integer labels. Casting a whole batch to bf16, a
    remedy that circulates for
    dtype errors elsewhere, casts the ids too.

    **Example.** `batch = {k: v.to(torch.bfloat16) for k, v in batch.items()}`.

    **What to do.** Cast floating tensors only: `v.to(dtype) if v.is_floating_point() else v`; labels with `.long()`.
    """
    want, got = s.dtype("expected", "an integer dtype"), s.dtype("got", "a floating dtype")
    embedding = s.situation.mentions("embed")
    return Explained(
        message=f"{got} where integer ids or labels are expected",
        causes=[
            Cause(
                name="ids cast with the rest of the batch",
                score=4 if embedding or "indices" in s.text else 2,
                why=f"an embedding's ids are {got}: the whole batch was cast to a floating dtype, input_ids included",
                fix="cast floating tensors only: {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}",
                because="the argument is indices" if "indices" in s.text else "",
            ),
            Cause(
                name="labels are floating",
                score=3,
                why=f"a loss over classes needs {want} labels and got {got}",
                fix="labels = labels.long()",
            ),
        ],
    )


@family("EX030", "unknown wording")
def unknown_wording(s: Seen) -> Explained:
    """Two dtypes met, in words this version does not know

    **Why it matters.** The text names two dtypes and a disagreement, but fits no known form. What follows is read from the traceback only.

    **Example.** A custom kernel's own assertion about its arguments.

    **What to do.** Look at the operands of the named line; `isotype trace` gives each its history.
    """
    first, second, operator = s.dtype("first", "two dtypes"), s.dtypes.get("second"), s.words.get("operator") or "an operator"
    pair = f"{first} and {second}" if second else "tensors of two dtypes"
    quoted = " ".join(s.text.split())[:160]
    return Explained(
        message=f"{pair} met in {operator}: {quoted}",
        severity=Severity.WARNING,
        causes=[
            *_outside_autocast(s),
            *_custom_backward(s),
            Cause(
                name="wording not known",
                score=1,
                why=(
                    f"this wording is not in isotype's list; it names {pair}, and the traceback "
                    f"{'suggests ' + operator if s.words.get('operator') else 'is missing'}"
                ),
                fix=(
                    f"cast one operand to the other's dtype where it is made, or run the call under {s.autocast}; isotype "
                    "trace SCRIPT.py shows which tensor was promoted"
                ),
            ),
        ],
    )
