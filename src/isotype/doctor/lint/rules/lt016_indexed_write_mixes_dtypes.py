from __future__ import annotations

import re
from collections.abc import Iterator

from ..dataflow.events import Event
from ..dataflow.functions import function_classes
from ..dataflow.plain import FP32_WEIGHTS, plain_events
from ..dataflow.values import Made, Tensor
from ..rule import Hit, Rule
from ..source import SourceFile
from .evidence import details, dtypes, first_of_each, operands

_WRITTEN_TO = re.compile(r"^(out|outputs?|dst|dest|destination|result|buf|buffer|d?grad\w*)(_\w+)?$|_(out|buf|buffer|grad)$")


class IndexedWriteMixesDtypes(Rule):
    """a scatter, index_add or indexed assignment whose source has another dtype than its destination

    Why
    ---
    `buffer[i] = value` with a slice casts the value; with a tensor of indices it is index_put_, which refuses to, as do scatter_,
    index_add_ and index_copy_. Autocast does not touch them. A buffer made by `zeros_like(x)` and a value that came out of a matmul under
    autocast have different dtypes: "scatter(): Expected self.dtype to be equal to src.dtype".

    Example
    -------
    ```python
    out = torch.zeros_like(x)                     # fp32
    out.index_add_(0, rows, x[rows] @ expert.t())   # bf16 under autocast
    ```

    Use instead
    -----------
    ```python
    out.index_add_(0, rows, (x[rows] @ expert.t()).to(out.dtype))
    ```

    Fix safety
    ----------
    There is no automatic fix: `.to(buffer.dtype)` is usually right, a wider buffer sometimes better.

    Known problems
    --------------
    Into an argument called like an output the caller decides, and it is possible only. What submodules return is not
    followed, except those of torch.nn that the class itself makes.
    """

    code = "LT016"
    name = "indexed-write-mixes-dtypes"
    first_look = (7, 19)
    on = False
    in_tests = False

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        events = [e for function in function_classes(file) for e in function.events]
        events += [e for e in plain_events(file) if e.scenario != FP32_WEIGHTS and not any(v.made is Made.DEFAULT for _, v in e.operands)]
        for event in first_of_each(events, "scatter"):
            target = event.operands[0][0]
            yield Hit(
                node=event.node,
                message=f"{event.operation} into `{target}` gets {dtypes(event)}",
                cause=f"{event.operation} wants source and destination in one dtype, and autocast casts neither; with "
                f"{event.scenario}: {operands(event)}",
                fix=f"cast the source: `.to({target}.dtype)`",
                details=details(event),
                scenario=event.scenario,
                weak=_by_the_caller(file, event),
                symbol=event.symbol,
            )


def _by_the_caller(file: SourceFile, event: Event) -> str:
    """Why the dtypes are the caller's to choose, or ""."""
    if _handed_in(*event.operands[0]):
        return "the caller made the destination, in a dtype of its choice"
    function = file.function_of(event.node)
    if function is None or function.name in ("forward", "__call__") or event.operands[0][1].why.startswith("self."):
        return ""
    arguments = {f"the argument {a.arg}" for a in (*function.args.args, *function.args.kwonlyargs)}
    if any(value.low and value.why in arguments for _, value in event.operands[1:]):
        return f"the callers of {function.name} make what is written, in a dtype of their choice"
    return ""


def _handed_in(name: str, destination: Tensor) -> bool:
    """Whether it is an argument made to be written to: `out`, a gradient, a buffer."""
    return destination.why == f"the argument {name}" and bool(_WRITTEN_TO.search(name))
