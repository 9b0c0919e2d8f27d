"""The table of pipelines in docs/diffusion.md: `python docs/pipelines.py --write`. A test compares
the two.
"""

from __future__ import annotations

import sys
from pathlib import Path

from isotype.tasks.diffusion.families import FAMILIES, REFUSED

PAGE = Path(__file__).with_name("diffusion.md")
BEGIN, END = "<!-- pipelines -->\n", "<!-- end of pipelines -->\n"


def table() -> str:
    rows = [
        "| `_class_name` in model_index.json | learns | LoRA for diffusers | for ComfyUI |",
        "|---|---|---|---|",
    ]
    for name, kind in FAMILIES.items():
        family = kind()
        learns = "flow matching" if "flow_matching" in family.objectives else "noise, or v"
        learns += ", from pairs" if family.pairs else ""
        loads = "`load_lora_weights`" if family.loads_lora else "a PEFT folder"
        rows.append(
            f"| `{name}` | {learns} | {loads} | {'no: ' + family.not_in_comfyui if family.not_in_comfyui else 'yes'} |"
        )
    by_reason: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    refused = [f"* {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return "\n".join([*rows, "", "Refused by name:", "", *refused]) + "\n"


def page() -> str:
    """The page with the table as it is made now."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(table(), end="")
