from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ....finding import Severity
from ..dataflow.events import Event
from ..dataflow.functions import function_classes
from ..dataflow.plain import plain_events
from ..dataflow.values import Made
from ..rule import Hit, Rule
from ..source import SourceFile, last_name
from .evidence import details, dtypes, first_of_each_function, of_a_model, operands


class ProductIntoUnfixedDtype(Rule):
    """a matrix product with `out=` or in place, where autocast decides one dtype and not the other

    Why
    ---
    `torch.matmul` takes part in autocast; `torch.matmul(..., out=)`, `torch.addmm(..., out=)` and `addmm_` do not. Around them autocast
    makes one operand bf16 while a buffer made by `zeros_like(weight)` stays fp32, and torch refuses to mix them. `custom_fwd` and
    `custom_bwd` do not help: they switch autocast on, and these calls ignore it.

    Example
    -------
    ```python
    grad_w = torch.zeros_like(w)                # fp32
    logits = h @ w.t()                          # bf16 under autocast
    torch.addmm(grad_w, logits.t(), h, out=grad_w)
    ```

    Use instead
    -----------
    ```python
    grad_w += (logits.t() @ h.to(logits.dtype)).to(grad_w.dtype)
    ```
    or decide one dtype at the top, cast every operand to it, and switch autocast off inside.

    Fix safety
    ----------
    There is no automatic fix: which dtype the buffer ought to have is the author's decision.

    Known problems
    --------------
    Reported only where the dtypes can be followed to the call. A buffer that is passed in from another package is not followed.
    """

    code = "LT001"
    name = "product-into-unfixed-dtype"
    on = False
    by_name = True
    first_look = (4, 6)
    in_tests = False
    severity = Severity.WARNING
    words = ("out=", "addmm_", "addbmm_", "addmv_")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        events = [e for function in function_classes(file) for e in function.events]
        # nothing indicates that the arguments of a plain function differ in dtype, unless autocast makes them differ
        events += [e for e in plain_events(file) if any(v.made is Made.AUTOCAST for _, v in e.operands) and not _offline(file, e)]
        events = [e for e in events if e.phase != "call" or of_a_model(file, e.node)]
        for event, also in first_of_each_function(file, events, "out", "in_place"):
            how = "with out=" if event.kind == "out" else "in place"
            yield Hit(
                node=event.node,
                message=f"{event.operation} {how} gets {dtypes(event)}: autocast does not cast here, and torch refuses to mix them",
                cause=f"a matmul {how} takes no part in autocast, so the dtype of every operand and of the output tensor has to be fixed "
                f"beforehand; with {event.scenario} they differ: {operands(event)}",
                fix=f"multiply without {'out=' if event.kind == 'out' else 'writing in place'} and cast the result "
                "(`buffer += (a @ b).to(buffer.dtype)`), or cast every operand to the buffer's dtype first with .to(...)",
                details=details(event, file, also),
                scenario=event.scenario,
                symbol=event.symbol,
            )


def _offline(file: SourceFile, event: Event) -> bool:
    """Work on weights between two runs: a function of its own under no_grad, or inside one, where no trainer has autocast on.

    One whose docstring promises fp32 counts as well.
    """
    function = file.function_of(event.node)
    while function is not None:
        if re.search(r"\b(fp32|float32)\b", ast.get_docstring(function, clean=False) or ""):
            return True
        if any("no_grad" in last_name(d) or "inference" in last_name(d) for d in function.decorator_list) and not isinstance(
            file.parents.get(function), ast.ClassDef
        ):
            return True
        function = file.function_of(function)
    return False
