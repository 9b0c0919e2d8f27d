"""Errors of attention: operands, masks, FlashAttention."""

from __future__ import annotations

from ..family import Cause, Explained, Seen, family
from .causes import is_floating, outside_autocast, wider


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
        if "mask" in s.dtypes and not is_floating(mask):
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
            wide_query = wider(query, mask)
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
        return Explained(message=f"attention: {mask} mask, {query} query", causes=[*causes, *outside_autocast(s, -2)])
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
    causes += list(outside_autocast(s, -2))
    causes.append(
        Cause(
            name="rotary, norm or cache promoted one operand",
            score=1,
            why="one of query, key and value was promoted: rotary cos/sin in fp32, a query or key norm, or a KV cache of another dtype",
            fix=f"cast before attention: q, k = q.to(v.dtype), k.to(v.dtype), or run under {s.autocast}",
        )
    )
    return Explained(message="attention: query, key and value differ", causes=causes)


@family("EX006", "flash attention", "memory-efficient attention")
def flash_attention(s: Seen) -> Explained:
    """FlashAttention got fp32

    **Why it matters.** FlashAttention has fp16 and bf16 kernels only. fp32 q/k/v mean that no mixed precision is on, or that something
    (norms, rotary tables, fp32 adapters) promoted them.

    **Example.** A model loaded in fp32 and trained with `attn_implementation="flash_attention_2"` without `bf16=True`.

    **What to do.** `bf16=True` in the trainer, `dtype=torch.bfloat16` when loading, or a cast before attention; else
    `attn_implementation="sdpa"`.
    """
    causes = list(outside_autocast(s))
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
    if s.operator == "memory-efficient attention":
        only = ", ".join(sorted(word.strip().removeprefix("torch.") for word in s.words.get("only", "").split(",")))
        return Explained(
            message=f"memory_efficient_attention got {s.dtype('query')} q/k/v; every kernel here takes {only} only", causes=causes
        )
    return Explained(message="FlashAttention got fp32 q/k/v; it takes fp16 and bf16 only", causes=causes)
