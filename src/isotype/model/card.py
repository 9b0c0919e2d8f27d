"""Writes the `README.md` of a saved result. It describes the base, the data and the precision, and
how to load the result with plain transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.sources import gguf_file, is_folder_name
from ..precision.apply import inner_model
from ..precision.precision import ROLES, Precision
from ..precision.vision import vision_parts
from .architecture import auto_class

CARD_FILE = "README.md"


def write_card(
    folder: Path,
    model: Any,
    *,
    base: str,
    data: str,
    step: int,
    precision: Precision,
    observed: Mapping[str, Mapping[str, int]],
    is_adapter: bool,
    has_score_head: bool,
) -> None:
    """Writes the model card of a result. This card replaces PEFT's card, whose fields are empty.

    data            a description of the numbers of rows
    observed        how many tensors of each role (purpose of a tensor, such as `grads`) had which
                    dtype when dtypes were last observed
    has_score_head  whether the model is a sequence classifier with one label
    """
    inner: Any = inner_model(model)
    class_name = auto_class(
        inner.config, text_only=vision_parts(inner) is None, has_score_head=has_score_head
    ).__name__
    labels = ", num_labels=1" if has_score_head else ""
    name = json.dumps(base)
    if is_adapter:
        title = "A PEFT adapter"
        library = "peft"
        saved_dtype = precision.save_adapter
        import_lines = ["from peft import PeftModel"]
        load_lines = [
            f"model = {class_name}.from_pretrained({name}{labels}, dtype='auto')",
            "model = PeftModel.from_pretrained(model, FOLDER)",
        ]
        # transformers would dequantise the file, and ignore Llama 3's scaling of positions
        if gguf_file(base) is not None:
            import_lines.insert(0, "import isotype")
            load_lines[0] = f"model = isotype.load_packed({name})"
    else:
        title = "A model"
        library = "transformers"
        saved_dtype = precision.save_model
        import_lines = []
        load_lines = [f"model = {class_name}.from_pretrained(FOLDER{labels}, dtype='auto')"]
    lines = [
        *card_header(
            base,
            title,
            data,
            f"{step}, in {saved_dtype}",
            {role: getattr(precision, role) for role in ROLES},
            observed,
            library=library,
        ),
        "FOLDER is this folder:",
        "",
        "```python",
        *import_lines,
        f"from transformers import {class_name}, AutoTokenizer",
        "",
        *load_lines,
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)",
        "```",
        "",
    ]
    if not has_score_head:
        lines.append("`isotype chat FOLDER` talks with it.")
        if is_adapter:
            lines.append("`isotype merge FOLDER` adds it to its base.")
        lines.append("")
    (folder / CARD_FILE).write_text("\n".join(lines), encoding="utf-8")


def card_header(
    base: str,
    title: str,
    data: str,
    step: str,
    declared: Mapping[str, Any],
    observed: Mapping[str, Mapping[str, int]],
    library: str = "",
    extra: Mapping[str, Any] | None = None,
    label: str | None = None,
) -> list[str]:
    """Returns the lines that every card has. They contain the hub's metadata, followed by base,
    data and dtypes.

    declared  the declared dtype of each role (purpose of a tensor, such as `grads`)
    extra     more entries of the hub's metadata
    label     the name of the base that is shown; by default `base`
    """
    # the hub refuses a card whose base_model is a path
    on_hub = not is_folder_name(base) and not Path(base).exists()
    metadata = []
    if on_hub and base:
        metadata.append(f"base_model: {json.dumps(base)}")
    if library:
        metadata.append(f"library_name: {json.dumps(library)}")
    metadata += [f"{key}: {json.dumps(value)}" for key, value in (extra or {}).items()]
    if metadata:
        metadata = ["---", *metadata, "---", ""]
    roles = [
        f"| {role} | {declared[role]} | {', '.join(observed.get(role, {})) or 'not observed'} |"
        for role in ROLES
        if role in declared
    ]
    return [
        *metadata,
        f"# {title}, trained by Isotype",
        "",
        f"* base: `{label or base}`",
        f"* data: {data}",
        f"* weights of step {step}",
        "",
        "| role | declared | observed |",
        "|---|---|---|",
        *(row for row in roles if not row.startswith("| save ")),
        "",
    ]


def merged_card(card: str, dtype: str, noise: float) -> str:
    """Converts the card of an adapter to the card of the merged model.

    noise  the rounding error of the cast to `dtype`, relative to the adapter's effect on the
           weights
    """
    facts, _, code_section = card.partition("FOLDER is this folder:")
    class_match = re.search(r"^from transformers import (\w+),", code_section, re.MULTILINE)
    name = class_match[1] if class_match else "AutoModelForCausalLM"
    facts = facts.replace('library_name: "peft"', 'library_name: "transformers"').replace(
        "# A PEFT adapter", "# A model", 1
    )
    rounding_line = (
        f"* merged in fp32, then rounded to {dtype}: the rounding is {noise:.1%} of the adapter's"
        " effect on the weights\n"
    )
    facts = facts.replace("\n\n| role", f"\n{rounding_line}\n| role", 1)
    lines = [
        f"from transformers import {name}, AutoTokenizer",
        "",
        f"model = {name}.from_pretrained(FOLDER, dtype='auto')",
    ]
    code = "\n".join([*lines, "tokenizer = AutoTokenizer.from_pretrained(FOLDER)"])
    return f"{facts}FOLDER is this folder:\n\n```python\n{code}\n```\n"


VERIFIED_HEADING = "## Verified files and servers"


def replace_verified_section(card: str, results: Mapping[str, Any]) -> str:
    """Returns the card with a section that shows how the result compares with the run. If the card
    already has such a section, it is replaced.

    results  the content of the run's verify.json: the name of each file or the address of each
             server, with the result. The card may be published, so it does not contain the
             addresses
    """
    rows = [
        _verified_row(name, result) for name, result in results.items() if isinstance(result, dict)
    ]
    facts = card.partition(VERIFIED_HEADING)[0].rstrip()
    lines = [
        VERIFIED_HEADING,
        "",
        "`kept` is the share of what training improved that the file or server shows.",
        "",
        "| file or server | loss of the base | trained | file or server | kept | result |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join([facts, "", *lines]) + "\n"


def _verified_row(name: str, result: Mapping[str, Any]) -> str:
    losses = result.get("loss") or {}
    values = [_card_number(losses.get(key), ".4f") for key in ("base", "trained", "served")]
    description = str(result.get("format", ""))
    subject = description if "server" in result else f"`{name}` ({description})"
    cells = [subject, *values, _card_number(result.get("kept"), ".1%")]
    cells.append(str(result.get("summary", "")))
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _card_number(value: Any, style: str) -> str:
    return format(value, style) if isinstance(value, int | float) else "unknown"


def plain_card(
    *, base: str, data: Mapping[str, Any], precision: Mapping[str, Any], step: int | None
) -> str:
    """Returns the card of a result that was saved without a card, such as the result of a diffusion
    run.

    data, precision  the content of the run's data.json and precision.json
    """
    row_counts = {
        key: value
        for key, value in data.items()
        if key.endswith(("pictures", "captions")) and isinstance(value, int) and value
    }
    counts_text = (
        ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in row_counts.items())
        or "not counted"
    )
    declared = {
        role: entry.get("value")
        for role, entry in precision.get("declared", {}).items()
        if isinstance(entry, dict)
    }
    return "\n".join(
        card_header(
            base, "A result", counts_text, str(step), declared, precision.get("observed", {})
        )
    )
