"""Errors of autocast regions: recomputation, a lost graph, a word that is no device."""

from __future__ import annotations

from ....finding import Severity
from ..family import Cause, Explained, Seen, family


@family("EX015", "recompute")
def recompute(s: Seen) -> Explained:
    """Checkpoint recompute produced another dtype

    **Why it matters.** Gradient checkpointing runs the forward again in backward. If autocast (or a dtype flag) differs then, the
    same tensor comes out in another dtype.

    **Example.** autocast entered around the model's call, left before `backward`, with a wrapper that does not restore it.

    **What to do.** Enter autocast inside the checkpointed function, use `use_reentrant=False`, and read no dtype from global state in it.
    """
    saved, again = s.dtype("saved"), s.dtype("recomputed")
    return Explained(
        message=f"gradient checkpointing: {saved} in forward, {again} when recomputed",
        causes=[
            Cause(
                name="autocast differs between forward and recompute",
                score=4,
                why=(
                    f"the same tensor (same shape) was {saved} in the forward pass and {again} in the recompute during "
                    "backward: the autocast state, or a flag that sets a dtype, differs between forward and backward"
                ),
                fix=(
                    "enter autocast inside the checkpointed function:\n    def block(x):\n        with "
                    "torch.autocast('cuda', dtype=torch.bfloat16):\n            return layer(x)\n    y = "
                    "checkpoint(block, x, use_reentrant=False)"
                ),
                because=f"{saved} saved, {again} recomputed, same shape",
            )
        ],
    )


@family("EX019", "no gradient")
def no_gradient(s: Seen) -> Explained:
    """The loss has no graph; in a dtype context, a stale autocast cache

    **Why it matters.** Usually nothing requires a gradient (all frozen, or a loss made from detached values). One cause is
    precision: a forward under `no_grad` inside
    an autocast region caches low-precision copies of the weights without history, and the training forward re-uses them.

    **Example.** `generate()` and then the training forward within one `with torch.autocast(...)`.

    **What to do.** Separate autocast regions, or `torch.clear_autocast_cache()` between; check that something has `requires_grad`.
    """
    cached = "generate" in s.situation or "evaluation" in s.situation
    return Explained(
        message="the loss does not require a gradient",
        severity=Severity.WARNING,
        causes=[
            Cause(
                name="stale autocast cache",
                score=4 if cached else 2,
                why=(
                    "a no_grad forward (generate, evaluation) inside the same autocast region cached low-precision "
                    "weights without history, and the training forward re-used them"
                ),
                fix=(
                    "leave the autocast region between them, or torch.clear_autocast_cache() before the training "
                    "forward; newer torch mends it"
                ),
                because=s.situation.where("generate" if "generate" in s.situation else "evaluation") if cached else "",
            ),
            Cause(
                name="nothing requires a gradient",
                score=3,
                why=("every parameter is frozen, or gradient checkpointing with frozen embeddings cut the graph: not a dtype error then"),
                fix="model.enable_input_require_grads(), or check any(p.requires_grad for p in model.parameters())",
            ),
        ],
    )


@family("EX028", "autocast", "unsafe to autocast")
def autocast_word(s: Seen) -> Explained:
    """autocast met a dtype it does not know how to rank

    **Why it matters.** autocast promotes among fp16, bf16 and fp32; an fp16 tensor inside a bf16 region (or the reverse), or fp64
    or fp8, has no rank there.

    **Example.** An fp16 adapter under `torch.autocast(dtype=torch.bfloat16)`.

    **What to do.** One half format in a region: cast the odd tensor. `binary_cross_entropy` is refused there altogether: its logarithm of a
    probability near 0 or 1 has no room in fp16, so give it logits.
    """
    if s.operator == "unsafe to autocast":
        return Explained(
            message=f"{s.words['name']} is refused under autocast",
            causes=[
                Cause(
                    name="probabilities, not logits, in a loss under autocast",
                    score=3,
                    why=(
                        "sigmoid followed by binary_cross_entropy takes log(p) of a half-precision probability, which rounds to 0 or 1: "
                        "autocast refuses it"
                    ),
                    fix=(
                        "drop the sigmoid and use F.binary_cross_entropy_with_logits (BCEWithLogitsLoss), or compute this loss in fp32:\n"
                        "    with torch.autocast(x.device.type, enabled=False):\n"
                        "        loss = F.binary_cross_entropy(p.float(), y.float())"
                    ),
                    because="the text names it",
                )
            ],
        )
    return Explained(
        message="autocast got a floating dtype it cannot rank",
        causes=[
            Cause(
                name="two half formats in one autocast region",
                score=3,
                why=(
                    "a tensor of the other half format (fp16 under bf16 autocast, or the reverse), or fp8, reached an "
                    "operator that autocast promotes"
                ),
                fix=("cast it to the region's dtype: x.to(torch.get_autocast_dtype('cuda')), or load every part in one dtype"),
            )
        ],
    )
