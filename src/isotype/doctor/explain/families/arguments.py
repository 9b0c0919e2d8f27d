"""Errors of functions whose arguments have two dtypes, and which are no products of matrices."""

from __future__ import annotations

import re

from ..family import Cause, Explained, Seen, family
from ..shared_causes import wider
from ..source_line import failing_call


@family("EX034", "paired arguments", "comparison", "interpolation", "storage")
def paired_arguments(s: Seen) -> Explained:
    """A function's arguments have two dtypes

    **Why it matters.** Arithmetic promotes; much else does not: `grid_sample`, `embedding_bag`, `lerp`, `cdist`, `torch.allclose`,
    `assert_close`, `set_` compare the dtypes of their arguments and stop.

    **Example.** `F.grid_sample(features, points)` with bf16 features and an fp32 grid; an average of weights (EMA) in fp32 whose model was
    cast to bf16 after the average was made.

    **What to do.** Cast one argument to the other's dtype at the call, or both to fp32 where the value matters (comparisons, averages).
    """
    left, right = s.dtype("left", s.dtype("expected")), s.dtype("right", s.dtype("got"))
    call = failing_call(s.situation)
    name = s.words.get("checker") or (call.function if call else "") or s.words.get("name") or "this function"
    if s.operator == "comparison":
        cause = Cause(
            name="values of two dtypes compared",
            score=3,
            why=(
                f"{name} compares the dtype too, and one side is {left}, the other {right}: a computed value (autocast, a cast model) "
                "beside a reference in fp32"
            ),
            fix=(
                "compare in one dtype, with the tolerance of the narrower: torch.testing.assert_close(a.float(), b.float(), rtol=1.6e-2, "
                "atol=1e-2), or check_dtype=False there; torch.allclose(a.float(), b.float())"
            ),
            because="the text names both",
        )
        return Explained(message=f"a comparison of {left} with {right}", causes=[cause])
    if s.operator == "storage":
        cause = Cause(
            name="a tensor's storage replaced by one of another dtype",
            score=3,
            why=f"set_ exchanges the memory behind a tensor and keeps its dtype: it was given {right} and is {left}",
            fix="copy, which casts: p.data.copy_(new); or cast before: p.data.set_(new.to(p.dtype))",
            because="the text names both",
        )
        return Explained(message=f"set_ of a {right} tensor into a {left} one", causes=[cause])
    if s.operator == "interpolation":
        return Explained(message=f"lerp of {left} with {right}", causes=_interpolation(s, left, right))
    if name.startswith("mps."):
        unpromoted = Cause(
            name="an operand that MPS does not promote",
            score=3,
            why=(
                f"the graph compiler of MPS takes one dtype where CUDA and the CPU promote: {left} meets {right}. The odd one is often a "
                "tensor of one element (a learning rate, a beta, a scale) that is kept in fp32"
            ),
            fix="cast it before the operation: scale = scale.to(x.dtype), or use a Python number",
            because="the text is of MPS's graph compiler",
        )
        return Explained(message=f"{name} of {left} and {right}", causes=[unpromoted])
    named = [s.words[key] for key in ("left", "right") if key in s.words]
    other = "b.astype(a.dtype)" if re.match(r"(?:lax|jnp|jax)\.", name) else "tf.cast(b, a.dtype)" if "zero-based" in s.text else ""
    pair = named if len(named) == 2 else list(call.tensors[:2]) if call else []
    roles = f"{pair[0]} and {pair[1]}" if pair else "its arguments"
    if len(named) == 2:
        roles = f"{named[0]} is {left}, {named[1]} {right}"
    else:
        roles = (
            f"{roles} are {left} and {right}" if "right" in s.dtypes else f"{roles} are of {left} and {right}, in one order or the other"
        )
    if other:
        cast = other
    elif pair and wider(right, left):
        cast = f"{pair[1]}.to({pair[0]}.dtype)"
    elif pair:
        cast = f"{pair[0]}.to({pair[1]}.dtype)"
    else:
        cast = "b.to(a.dtype)"
    return Explained(
        message=f"{name} of {left} and {right}",
        causes=[
            Cause(
                name="arguments of two dtypes",
                score=3,
                why=f"{name} takes one dtype and casts nothing: {roles}; what was made in fp32 (a grid, weights, a softmax) met {s.half}",
                fix=f"cast one at the call: {cast}, or both to fp32 where the precision matters",
                because=call.place if call else "the text names the arguments" if named else "",
            )
        ],
    )


def _interpolation(s: Seen, left: str, right: str) -> list[Cause]:
    call = failing_call(s.situation)
    causes = [
        Cause(
            name="ends of an interpolation differ" if s.words.get("which") != "weight" else "interpolation weight in another dtype",
            score=3,
            why=f"lerp takes one dtype for both ends and a tensor weight: it is {left}, the {s.words.get('which', 'other')} {right}",
            fix="cast at the call: torch.lerp(a, b.to(a.dtype), weight.to(a.dtype)); a Python number as weight fits every dtype",
            because="the text names the argument" + (f"; {call.frame.code}" if call else ""),
        )
    ]
    if "averaging" in s.situation:
        causes.append(
            Cause(
                name="the average and the model have two dtypes",
                score=5,
                why=(
                    f"an average of weights (EMA, SWA) is kept in {left} and the model's weights are {right}: the model was cast after the "
                    "average was made, or the average loaded in another dtype"
                ),
                fix=(
                    "make the average after the cast; to keep it in fp32 (in bf16 small steps round away) give it fp32 weights: "
                    "average.lerp_(p.float(), 1 - decay)"
                ),
                because=f"averaging in {s.situation.where('averaging')}",
            )
        )
    return causes
