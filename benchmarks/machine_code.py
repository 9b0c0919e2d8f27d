"""Every Triton kernel of the ops, compiled to machine code for GPUs that are not here: registers, spills and shared memory of each.

    python benchmarks/machine_code.py                                  # all, for sm_80, sm_90, sm_100 and gfx942
    python benchmarks/machine_code.py --targets sm_90 --only rms_norm --markdown benchmarks/results/kernels.md

Each kernel is compiled with every flag that the ops give it, for every dtype of its tensors in the front end, and to machine code for one
signature a dtype. Exit status 1 where anything fails or is noted. The cases are those of the tests.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

# library ops import it on their first call, which must not happen while launches are trapped
import torch._dynamo

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def cases() -> dict[str, tuple[Any, tuple[torch.Tensor, ...]]]:
    """Name -> (function, its inputs)."""
    from bitsandbytes.functional import quantize_4bit
    from tests.ops.test_adamw import NUMBERS, tensors
    from tests.ops.test_kernels import COMPILED

    from isotype.ops.adamw import triton as adamw
    from isotype.ops.packed import triton as packed_triton

    found: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
        name: (op, tuple(torch.randn(shape, requires_grad=True) for shape in shapes))
        for name, (op, shapes) in COMPILED.items()
    }
    for stochastic in (False, True):

        def update(*state: torch.Tensor, stochastic: bool = stochastic) -> None:
            adamw.adamw_(*state, NUMBERS, 12345 if stochastic else None)

        found[f"adamw{'-stochastic' if stochastic else ''}"] = (
            update,
            tuple(tensors(300, *[torch.float32] * 3)),
        )
    for double in (False, True):
        packed, state = quantize_4bit(
            torch.randn(64, 640), compress_statistics=double, quant_type="nf4"
        )
        inner = (
            (state.state2.absmax, state.state2.code, state.offset, state.state2.blocksize)
            if double
            else (None, None, None, 1)
        )

        def widen(
            out: torch.Tensor, packed: Any = packed, state: Any = state, inner: Any = inner
        ) -> None:
            packed_triton.widen_4bit(
                packed, state.absmax, state.code, *inner[:3], state.blocksize, inner[3], out
            )

        found[f"widen_4bit{'-double' if double else ''}"] = widen, (torch.empty(64, 640),)
    return found


def main() -> int:
    from isotype.doctor.kernels.calls import check_wrapper

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    a = parser.parse_args()
    rows, programs, combinations = list[str](), 0, 0
    noted: list[str] = []
    for name, (function, inputs) in cases().items():
        if a.only not in name:
            continue
        for target in a.targets:
            made = check_wrapper(function, inputs, [target], binary=True)
            combinations += made.compiled
            programs += len(made.usages)
            noted += [
                f"{name} {target}: {finding.code} {finding.message}" for finding in made.findings
            ]
            if not made.launches:
                noted.append(f"{name} {target}: launched nothing")
            # of the programs of one kernel, the one that takes most registers
            most: dict[str, tuple[int, str]] = {}
            for usage in made.usages:
                kernel = usage.split(" ", 1)[0]
                written = usage.rsplit(": ", 1)[1]
                registers = int(next(iter(re.findall(r"(\d+) (?:vector )?registers", written)), 0))
                most[kernel] = max(most.get(kernel, (-1, "")), (registers, written))
            rows += [
                f"| {name} | `{kernel}` | {target} | {written} |"
                for kernel, (_, written) in most.items()
            ]
            print(rows[-1] if most else f"{name} {target}: no machine code", flush=True)
    summary = f"{combinations} combinations of dtypes, integer classes and flags; {programs} programs of machine code; {len(noted)} notes."
    print("\n".join([*noted, summary]))
    if a.markdown:
        head = ["| case | kernel | target | its program with most registers |", "|---|---|---|---|"]
        a.markdown.write_text("\n".join([*head, *rows, "", *noted, summary, ""]))
    return 1 if noted else 0


if __name__ == "__main__":
    sys.exit(main())
