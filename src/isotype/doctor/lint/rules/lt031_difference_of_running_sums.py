from __future__ import annotations

import ast
from collections.abc import Iterator

from ..dataflow.plain import PURE, plain_events
from ..dataflow.running_sums import differences
from ..rule import Hit, Rule
from ..source import SourceFile
from .evidence import details, first_of_each, of_a_model


class DifferenceOfRunningSums(Rule):
    """two entries of a running sum in bf16 or fp16 are subtracted from each other

    Why
    ---
    `torch.cumsum` of a bf16 tensor adds in fp32 and rounds each entry to bf16, by up to 0.4% of the sum so far. Two near entries differ by
    a few addends, which soon is less than that: over 4,096 decays of about -0.05 the differences of neighbours are off by 2.8 times their
    size, and by 0.001% where the sum is fp32. State space models and linear attention take the exponential of them.

    Example
    -------
    ```python
    total = torch.cumsum(decay, dim=-1)                    # bf16, as decay is
    segments = total[..., :, None] - total[..., None, :]
    ```

    Use instead
    -----------
    ```python
    total = torch.cumsum(decay, dim=-1, dtype=torch.float32)
    segments = total[..., :, None] - total[..., None, :]
    ```

    Known problems
    --------------
    Off by default: how often it is right has not been measured. Callers that hand over fp32, as most do with decays, are seen only in
    the same repository. No run proves it: the loss lies in a few entries, and not in the norm of the result.
    """

    code = "LT031"
    name = "difference-of-running-sums"
    on = False
    in_tests = False
    words = ("cumsum",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        events = [e for e in plain_events(file) if e.scenario == PURE and of_a_model(file, e.node)]
        for event in first_of_each(events, "running sum"):
            function = file.function_of(event.node)
            difference = differences(file, function).get(event.node) if function and isinstance(event.node, ast.Call) else None
            if difference is None:
                continue
            label, value = event.operands[0]
            yield Hit(
                node=difference,
                message=f"`{file.snippet(difference, 60)}` subtracts entries of a running sum in {value.dtype}",
                cause=f"line {event.node.lineno} makes the running sum of {label}, {value}: each entry is rounded by up to 0.4% of "
                "the sum so far, which is more than what near entries differ by",
                fix=f"sum in fp32: `{event.operation}(..., dtype=torch.float32)`",
                details=details(event),
                scenario=event.scenario,
                symbol=event.symbol,
            )
