"""Errors of destinations: output buffers and indexed writes."""

from __future__ import annotations

from ..family import Cause, Explained, Seen, family


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
        loss = s.situation.mentions(r"binary_cross_entropy|mse_loss|l1_loss|bce\b|BCE")
        labels = Cause(
            name="labels are integers",
            score=5,
            why=f"this loss computes with its labels, and they are {got}: a multi-label or regression loss needs floating ones",
            fix="labels.float() in the dataset or the collator (torch.tensor(labels, dtype=torch.float32))",
            because=f"{loss.function} at {loss.file}:{loss.line}" if loss else "",
        )
        return Explained(
            message=f"a {want} result cannot be written into a {got} tensor",
            causes=[
                *([labels] if loss else []),
                Cause(
                    name="in-place update of a narrower category",
                    score=3,
                    why=(
                        f"the left-hand side (or out= tensor) is {got}, and the operation gives {want}: an integer mask, "
                        "position or counter tensor is updated with floats"
                    ),
                    fix="make the target floating first: x = x.float(), or write x = x * y instead of x *= y",
                ),
            ],
        )
    frame = s.situation.mentions(r"[(,]\s*out\s*=|addmm_|addbmm_")
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
    if (dst, src) in (("fp32", "bf16"), ("fp32", "fp16")) and not name.startswith("index_copy"):
        causes.append(
            Cause(
                name="autocast cast the source only",
                score=3 if "autocast" in s.situation else 1.5,
                why=(
                    f"under autocast an nn.Embedding's output and buffers stay {dst}, and what comes from a Linear or a convolution is "
                    f"{src}: an indexed write does not cast (autocast leaves it alone)"
                ),
                fix=cast,
                because="the text says that autocast is on, and the source is the narrower" if "autocast" in s.situation else "",
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
