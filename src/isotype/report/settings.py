"""What a run set differently: against the defaults, its recipe and its precision preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config.expected import default, keys
from ..config.recipes import recipe
from ..config.yaml_text import write_value
from ..precision.presets import PRESETS
from .record import RunRecord

# what every run has to say about itself: its subject, not a difference
_ALWAYS = {"model.name", "model.config", "model.tokenizer", "data.train", "data.eval", "run.folder", "precision.preset"}


@dataclass(frozen=True)
class Difference:
    """One key; `usual` is the value of the preset, or the default where the preset has none."""

    key: str
    value: str
    usual: str
    source: str


def differences(record: RunRecord) -> list[Difference]:
    """In the order of the schema. Keys this version does not know are left out, as are those a run must give."""
    preset = record.setting("precision", "preset")
    known = isinstance(preset, str) and preset in PRESETS
    usual = recipe(preset).settings if known else {}
    roles = dict(PRESETS[preset].items()) if known else {}
    found = []
    for key in keys():
        section, _, name = key.partition(".")
        if key in _ALWAYS or name not in _section(record, section):
            continue
        value = record.setting(section, name)
        expected = usual.get(key, default(key))
        if section == "precision":
            if value is None:  # a role that was not given is the preset's
                continue
            expected = roles.get(name)
        if value != expected:
            found.append(Difference(key, write_value(value), write_value(expected), _source(record, section, name)))
    return found


def _section(record: RunRecord, section: str) -> dict[str, Any]:
    part = record.settings.get(section)
    return part if isinstance(part, dict) else {}


def _source(record: RunRecord, section: str, name: str) -> str:
    """The comment behind the key in resolved.yaml, which says where the value came from."""
    inside = False
    for line in record.settings_text.splitlines():
        if not line.startswith((" ", "#")):
            inside = line.startswith(f"{section}:")
        elif inside and line.startswith(f"  {name}:"):
            return line.rpartition("  # ")[2] if "  # " in line else ""
    return ""
