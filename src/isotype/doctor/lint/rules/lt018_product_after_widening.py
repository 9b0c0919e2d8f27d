from __future__ import annotations

import ast
from collections.abc import Iterator

from ..dataflow.events import Event
from ..dataflow.plain import PURE, plain_events
from ..dataflow.values import Made, Tensor
from ..rule import Hit, Rule
from ..source import SourceFile, last_name
from .attention_operands import cast_in_part
from .evidence import details, dtypes, first_of_each_function, of_a_model, operands


class ProductAfterWidening(Rule):
    """something that forward casts to fp32 meets an untouched tensor or weight in a matrix product

    Why
    ---
    `softmax(scores, dtype=torch.float32)`, `x.float()` and a sinusoid of positions are fp32 whatever the model's dtype is. Where the cast
    back is forgotten, the next matrix product gets fp32 and bf16, and torch refuses: "expected mat1 and mat2 to have the same dtype".
    Under autocast and in an fp32 model nothing shows.

    Example
    -------
    ```python
    weights = torch.softmax(q @ k.mT, dim=-1, dtype=torch.float32)
    return weights @ v                    # v is bf16
    ```

    Use instead
    -----------
    ```python
    return weights.to(v.dtype) @ v
    ```

    Fix safety
    ----------
    There is no automatic fix: casting down keeps the model's dtype, casting the other operand up keeps precision.

    Known problems
    --------------
    A weight that is kept in fp32 on purpose, as a router's often is, is recognised by a cast written in the product itself only.
    Operands of attention are compared where one statement binds them, whatever their dtype is.
    """

    code = "LT018"
    name = "product-after-widening"
    on = False
    by_name = True
    first_look = (3, 5)
    in_tests = False

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        events = [e for e in plain_events(file) if e.scenario == PURE and _wide_and_low(e) and of_a_model(file, e.node)]
        for event, also in first_of_each_function(file, events, "matmul", "attention"):
            wide = next((label, v) for label, v in event.operands if v.dtype == "fp32")
            other = next(label for label, v in event.operands if v.low)
            yield Hit(
                node=event.node,
                message=f"{event.operation} gets {dtypes(event)}: `{wide[0]}` was made fp32, and `{other}` was not",
                cause=f"without autocast a matmul takes one dtype only; with {event.scenario}: {operands(event)}",
                fix=f"cast back before the product: `{wide[0]}.to({other}.dtype)`",
                details=details(event, file, also),
                scenario=event.scenario,
                weak=_meant(event, wide[1]),
                symbol=event.symbol,
            )
        for function in file.functions():
            for part in cast_in_part(file, function):
                yield Hit(
                    node=part.call,
                    message=f"{last_name(part.call.func)}: `{part.wide}` is cast to fp32, and `{part.left}` is not",
                    cause=f"line {part.made} makes both in one dtype, line {part.cast} casts `{part.wide}`, and attention takes one dtype: "
                    "outside autocast it refuses for a model in bf16 or fp16",
                    fix=f"cast `{part.left}` as well, or none",
                    scenario=PURE,
                )


def _wide_and_low(event: Event) -> bool:
    """Whether fp32 that was written, or counted, meets a low precision that follows the model."""
    wide = [v for _, v in event.operands if v.dtype == "fp32"]
    low = [v for _, v in event.operands if v.low]
    return len(low) == 1 and any(_written(v) for v in wide) and low[0].made in (Made.INPUT, Made.PARAMETER, Made.FOLLOWS)


def _written(value: Tensor) -> bool:
    """By a cast; of what a factory makes in fp32 the author has said so."""
    return (value.made is Made.LITERAL and value.why.startswith(("cast by ", "the table of "))) or (
        value.made is Made.DEFAULT and (value.positional or value.frequency)
    )


def _meant(event: Event, wide: Tensor) -> str:
    """Why the author expects the other operand to be fp32, or ""."""
    if event.operation.endswith("_norm"):
        return ""  # what is normalised is widened on purpose, and its weight was forgotten
    inside = wide.node is not None and any(node is wide.node for node in ast.walk(event.node))
    if inside:
        return "the cast is written in the product itself: what it meets is meant to be fp32"
    return ""
