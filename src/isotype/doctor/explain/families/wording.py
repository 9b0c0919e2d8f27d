"""Errors that are no mix of floating dtypes, or that are worded in an unknown way."""

from __future__ import annotations

from ....finding import Severity
from ..family import Cause, Explained, Seen, family
from ..shared_causes import custom_backward, outside_autocast


@family("EX008", "integer input", "floating labels")
def integer_input(s: Seen) -> Explained:
    """Ids, indices or labels of the wrong kind

    **Why it matters.** Embeddings, gathers and scatters take integer ids, losses over classes int64 labels, losses over probabilities
    floating ones. Casting a whole batch to bf16, a remedy that circulates for dtype errors elsewhere, casts the ids too.

    **Example.** `batch = {k: v.to(torch.bfloat16) for k, v in batch.items()}`.

    **What to do.** Cast floating tensors only: `v.to(dtype) if v.is_floating_point() else v`; class labels with `.long()`, labels of a
    binary or soft loss with `.float()`.
    """
    got = s.dtype("got", "a floating dtype")
    if s.operator == "floating labels":
        return Explained(
            message=f"labels of {got} where floating ones are expected",
            causes=[
                Cause(
                    name="labels are integers",
                    score=3,
                    why=f"the loss reads labels of the prediction's shape as probabilities, and they are {got}",
                    fix="labels.float() for probabilities; class numbers have one dimension less than the predictions: labels.argmax(-1)",
                    because="the text names the target",
                )
            ],
        )
    want = s.dtype("expected", "int64")
    name = s.words.get("name", "")
    named = f"the text names {name}" if name else ""
    labels = name == "target" or (not name and "indices" not in s.text)
    narrow = got.startswith(("int", "uint", "bool"))
    causes = [
        Cause(
            name="labels are floating" if not narrow else f"labels are {got}",
            score=5 if name == "target" else 3,
            why=f"a loss over classes needs {want} labels and got {got}"
            + ("" if narrow else ": cast with the rest of the batch, or made as a float"),
            fix="labels = labels.long()",
            because=named if name == "target" else "",
        )
    ]
    if not narrow:
        embedding = not name and (s.situation.mentions("embed") or "indices" in s.text)
        what = (
            f"the indices of {name}" if name not in ("", "indices", "target") else "indices" if name == "indices" else "an embedding's ids"
        )
        causes.append(
            Cause(
                name="ids cast with the rest of the batch" if embedding or labels else "indices are floating",
                score=4 if not labels or embedding else 2,
                why=f"{what} are {got}: the whole batch was cast to a floating dtype (input_ids, labels, positions included), or the index "
                "was computed as a float",
                fix="cast floating tensors only: {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}"
                + ("" if embedding else "; or index.long() at the call"),
                because="the argument is indices" if embedding and "indices" in s.text else named,
            )
        )
    subject = "labels" if name == "target" else "indices" if name else "ids or labels"
    return Explained(
        message=f"{got} where integer {subject} are expected" if not narrow else f"{got} {subject} where {want} is expected", causes=causes
    )


@family("EX030", "unknown wording", "unknown refusal")
def unknown_wording(s: Seen) -> Explained:
    """Two dtypes met, or one was refused, in words this version does not know

    **Why it matters.** The text names two dtypes and a disagreement, or a half-precision dtype and a refusal, but fits no known form. What
    follows is read from the text and the traceback only.

    **Example.** A custom kernel's own assertion about its arguments.

    **What to do.** Look at the operands of the named line; `isotype trace` gives each its history.
    """
    if s.operator == "unknown refusal":
        return _refusal(s)
    first, second, operator = s.dtype("first", "two dtypes"), s.dtypes.get("second"), s.words.get("operator") or "an operator"
    pair = f"{first} and {second}" if second else "tensors of two dtypes"
    quoted = " ".join(s.text.split())[:160]
    if asserted := s.words.get("asserted"):
        return Explained(
            message=f"an assertion about a dtype failed: {asserted[:160]}",
            severity=Severity.WARNING,
            causes=[
                *outside_autocast(s),
                Cause(
                    name="a tensor is not in the dtype this code was written for",
                    score=1,
                    why=f"the code asserts {asserted}, and a tensor came in another dtype: a cast, autocast or an fp32 parameter upstream",
                    fix="cast the tensor that the assertion names before the call (x = x.to(...)), or run that part in the dtype it takes",
                ),
            ],
        )
    return Explained(
        message=f"{pair} met in {operator}: {quoted}",
        severity=Severity.WARNING,
        causes=[
            *outside_autocast(s),
            *custom_backward(s),
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


def _refusal(s: Seen) -> Explained:
    dtype = s.dtype("refused", "a dtype")
    other = {"bf16": "fp16 or fp32", "fp16": "bf16 or fp32"}.get(dtype, "bf16 or fp32")
    return Explained(
        message=f"{dtype} is refused: {' '.join(s.text.split())[:160]}",
        severity=Severity.WARNING,
        causes=[
            Cause(
                name=f"{dtype} where it is not taken",
                score=1,
                why=(
                    f"this wording is not in isotype's list; it refuses {dtype}: the operation, the file format, this version or this "
                    "device does not take it"
                ),
                fix=f"use {other} there: dtype= when loading, the trainer's flag, or a cast next to the call; or upgrade what refuses",
            )
        ],
    )
