"""Writes configurations as text: `resolved.yaml` of a run, the file of `isotype init`, and the
reference in the documentation.

`config.load.load` reads the two YAML files. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from textwrap import wrap
from typing import Any

from .compare import AUTO_KEYS
from .keys import default_value, describe_accepted_values, key_schemas, section_names
from .kind import DIFFUSION, detect_run_kind, guess_run_kind, is_key_of_kind
from .load import DEFAULT, RESOLVED_HEADER, LoadedConfig, find_recipe
from .schema import RunConfig
from .yaml_text import write_value

_ESSENTIAL_KEYS = {  # keys that `init` writes without `#`: most runs set them
    "model.name", "data.train", "data.max_length", "adapter.kind", "adapter.r", "adapter.alpha", "precision.preset",
    "train.epochs", "train.batch_size", "train.accumulate", "train.learning_rate", "run.folder",
}  # fmt: skip
_ESSENTIAL_PICTURE_KEYS = {
    "images.train", "images.resolution", "images.max_aspect", "train.steps", "run.samples", "run.adapters_every",
}  # fmt: skip
_RESOLVED_KEYS = {"precision.preset", *AUTO_KEYS}  # keys that can be `auto`
# section -> the comment that is written above it
_SECTION_DESCRIPTIONS = {
    "model": "The model that is fine-tuned.",
    "data": "The training data of a language model.",
    "images": "The training pictures of a diffusion model.",
    "diffusion": "The objective of a diffusion model.",
    "adapter": "The weights that are trained: an adapter, or every weight of the model.",
    "precision": (
        "The dtypes of a run. A preset sets all of them; each key below overrides the preset for"
        " one dtype."
    ),
    "preference": "Settings of the objectives that learn which answers are preferred (train.objective).",
    "distil": "Settings of the objective distil, which learns from a teacher.",
    "train": "The objective, the steps, the optimizer and the memory of the training.",
    "run": "Which files a run writes, and when.",
    "parallel": "Settings of a run on several processes (isotype train --gpus N, or torchrun).",
}


def resolved_yaml(
    loaded: LoadedConfig, reasons: Mapping[str, str], values: Mapping[str, Any] | None = None
) -> str:
    """Writes every setting of a run with its source as a comment. Loading this text gives the same
    configuration.

    reasons  for a key such as `precision.grads` the reason for its value
    values   values that the run chose for keys that the user did not set, such as bf16 for
             `precision.base`. They are written as comments, because a precision key that the user
             has set is checked differently from a key whose value follows from the preset. A key
             that was `auto` gets its resolved value.
    """
    values = values or {}

    def format_line(key: str, value: Any) -> str:
        source = loaded.sources.get(key, DEFAULT)
        name = key.partition(".")[2]
        reason = reasons.get(key)
        if key in _RESOLVED_KEYS and key in values:
            return _append_comment(f"  {name}: {write_value(values[key])}", reason or source)
        if value is None and key in values:
            return _append_comment(f"  # {name}: {write_value(values[key])}", reason or source)
        comment = source if value is not None or reason is None else reason
        return _append_comment(f"  {name}: {write_value(value)}", comment)

    return f"{RESOLVED_HEADER} `isotype train --resume` reads this file.\n" + _write_sections(
        loaded.config, format_line, kind=detect_run_kind(loaded.config)
    )


def init_yaml(
    preset: str = "lora",
    *,
    model: str = "path/to/model",
    data: str = "stdlib",
    proposed: Mapping[str, Any] | None = None,
) -> str:
    """Writes the commented file of `isotype init`: it sets the essential keys and the keys in
    `proposed`, and shows every other key as a comment with its default.
    """
    kind = guess_run_kind(model, data)
    settings = {
        **find_recipe(preset).settings,
        "model.name": model,
        ("images.train" if kind == DIFFUSION else "data.train"): data,
        **(proposed or {}),
    }
    essential = _ESSENTIAL_KEYS | _ESSENTIAL_PICTURE_KEYS if kind == DIFFUSION else _ESSENTIAL_KEYS

    def format_line(key: str, value: Any) -> str:
        value = settings.get(key, value)
        name = key.partition(".")[2]
        is_active = key in essential or key in settings
        if settings.get("adapter.kind") == "none" and key in ("adapter.r", "adapter.alpha"):
            is_active = False
        setting = f"{name}: {write_value(value)}"
        sentence = "".join(
            f"  # {text}\n" for text in wrap(str(key_schemas()[key].get("description", "")), 118)
        )
        return sentence + f"  {'' if is_active else '# '}{setting}"

    header = (
        f"# A run of Isotype ({preset}: {find_recipe(preset).description}).\n# See what it would do:  isotype"
        " plan FILE      Run it:  isotype train FILE\n# Completion in editors: isotype init"
        " --schema > isotype.schema.json, and as this file's first line\n#   yaml-language-server:"
        " $schema=isotype.schema.json\n# Lines that are commented out show the default.\n\n"
    )
    return header + _write_sections(
        RunConfig(), format_line, kind=kind, descriptions=_SECTION_DESCRIPTIONS
    )


def reference_markdown() -> str:
    """Writes docs/configuration.md: every key with its default, the values it accepts, and its
    description.
    """
    lines = [
        "# Configuration",
        "",
        (
            "Generated by `isotype init --schema --markdown`; a test compares it with the schema."
            " `isotype init` writes a file to start from."
        ),
        (
            "Every key can be given as `section.key=value` on the command line. Unknown keys are"
            " errors."
        ),
        "",
    ]
    for section in section_names():
        lines += [
            f"## {section}",
            "",
            _SECTION_DESCRIPTIONS[section],
            "",
            "| key | default | accepted values | description |",
            "|---|---|---|---|",
        ]
        for key, schema in key_schemas().items():
            if key.startswith(f"{section}."):
                default_text = (
                    write_value(default_value(key)) if default_value(key) is not None else ""
                )
                cells = (
                    f"`{key.partition('.')[2]}`",
                    f"`{default_text}`" if default_text else "",
                    describe_accepted_values(key),
                    str(schema.get("description", "")),
                )
                lines.append(
                    "| "
                    + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
                    + " |"
                )
        lines.append("")
    return "\n".join(lines)


def _write_sections(
    config: RunConfig,
    format_line: Callable[[str, Any], str],
    *,
    kind: str,
    descriptions: Mapping[str, str] | None = None,
) -> str:
    """Writes the sections, with the keys that apply to this kind of run."""
    blocks = []
    for section in section_names():
        values = getattr(config, section)
        names = [
            name for name in type(values).model_fields if is_key_of_kind(f"{section}.{name}", kind)
        ]
        if not names:
            continue
        head = f"# {descriptions[section]}\n{section}:" if descriptions else f"{section}:"
        blocks.append(
            "\n".join(
                [head, *[format_line(f"{section}.{name}", getattr(values, name)) for name in names]]
            )
        )
    return ("\n\n" if descriptions else "\n").join(["", *blocks]).lstrip("\n") + "\n"


def _append_comment(setting: str, reason: str) -> str:
    return f"{setting:<40}  # {' '.join(reason.split())}"
