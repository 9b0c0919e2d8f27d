"""Finds contradictions between the settings of one run before anything is loaded. The rules are in
the text file `rules.txt`, whose format `pages.sheets` describes. If settings contradict each other,
a rule reports them. The report names the settings, where each was set, why they conflict, and how
to fix it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..finding import Finding, Place, Severity
from ..pages import sheets
from ..pages.sheet_check import check_section
from .packing import PACKED_DTYPES
from .precision import ALL_ROLES, ALLOWED_DTYPES, EIGHT_BIT_OPTIMIZERS, PRESETS

if TYPE_CHECKING:
    from ..environment.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of a setting, and where it comes from.

    is_written  whether the user wrote it; False for values of a preset or a default
    """

    value: str
    source: str = "default"
    is_written: bool = False

    def __str__(self) -> str:
        return f"{self.value} ({self.source})"


# settings and properties of the model that rules can ask about
SETTINGS = (*ALL_ROLES, "preset", "adapter", "frozen", "family", "optimizer_name", "micro_batches")
_HALF_DTYPES = ("bf16", "fp16")  # dtypes of 16 bits


class SettingFacts(sheets.Facts):
    """Looks up the values of the names that a rule may use. A role is a field of the precision,
    such as `base` or `grads`. The name of a setting is replaced by its value. The other names are:

    given ROLE                whether the user wrote the role
    packed NAME               whether weights of this dtype are quantised, that is, stored in few
                              bits with scales
    bf16 among ROLE, ROLE     the roles of this list that are bf16; with `half among` the roles that
                              are bf16 or fp16
    ROLES set to NAME         the text `precision.ROLE: VALUE` for each of the roles
    device                    the device's name
    bf16 of device            how the device computes bf16: native, emulated or none
    eight bit                 whether the optimizer keeps its states in 8 bits

    settings  every role of the run, `adapter` (lora or none), `frozen` (yes if some weights of the
              model are not trained, else no), `family` (the model's `model_type`),
              `optimizer_name` (adamw, adamw8bit), `micro_batches` (number of micro-batches per
              update) and `preset`
    """

    fact_functions = {
        "device": lambda self: self.device.name,
        "bf16 of device": lambda self: self.device.bf16,
        "eight bit": lambda self: self.get("optimizer_name") in EIGHT_BIT_OPTIMIZERS,
    }
    functions = {
        "given": sheets.Function(lambda self, role: self.settings[role].is_written, SETTINGS),
        "packed": sheets.Function(lambda self, name: self.get(name) in ("nf4", *PACKED_DTYPES)),
    }
    values = {
        **ALLOWED_DTYPES,
        "preset": tuple(PRESETS),
        "adapter": ("lora", "none"),
        "frozen": ("yes", "no"),
        "bf16 of device": ("native", "emulated", "none"),
    }

    def __init__(self, settings: Mapping[str, Setting], device: Hardware) -> None:
        super().__init__()
        self.settings = settings
        self.device = device

    def evaluate_other_name(self, name: str) -> Any:
        if name in self.settings:
            return self.settings[name].value
        roles, separator, value = name.partition(" set to ")
        if separator:
            dtype = self.get(value)
            return " and ".join(
                f"precision.{role}: {dtype}" for role in str(self.get(roles)).split(", ")
            )
        dtype, separator, roles = name.partition(" among ")
        if separator:
            dtypes = _HALF_DTYPES if dtype == "half" else (dtype,)
            candidates = self.variables.get(roles, roles).split(", ")
            return ", ".join(
                role
                for role in candidates
                if role in self.settings and self.settings[role].value in dtypes
            )
        return None

    @classmethod
    def find_variables_in_other_name(cls, name: str, variables: Collection[str]) -> set[str] | None:
        if name in SETTINGS:
            return set()
        roles, separator, value = name.partition(" set to ")
        if separator:
            role_variables = cls.find_variables(roles, variables)
            value_variables = cls.find_variables(value, variables)
            if role_variables is None or value_variables is None:
                return None
            return role_variables | value_variables
        dtype, separator, roles = name.partition(" among ")
        if not separator or dtype not in (*_HALF_DTYPES, "half"):
            return None
        if roles in variables:
            return {roles}
        return set() if all(role in SETTINGS for role in roles.split(", ")) else None


def load_rules(path: Path) -> dict[str, sheets.Section]:
    """Reads the rules of a file. Returns a dict from the code of each rule to its section. Raises
    SheetError.
    """
    rules = {}
    for section in sheets.read_sections(
        path, rank_pattern="error|warning", field_pattern="settings|cause|fix"
    ):
        check_section(section, SettingFacts, lists=("settings",))
        rules[section.code] = section
    return dict(sorted(rules.items()))


RULES = load_rules(Path(__file__).with_name("rules.txt"))


def find_contradictions(settings: Mapping[str, Setting], device: Hardware) -> list[Finding]:
    """Returns the contradictions that the rules find, in the order of the rules' codes.

    settings  the settings that `SettingFacts` lists
    """
    findings = []
    for code, section in RULES.items():
        facts = SettingFacts(settings, device)
        for severity, entry in section.matching_entries(facts):
            names = entry.text("settings", facts).split(", ")
            findings.append(
                Finding(
                    code=code,
                    severity=Severity.parse(severity),
                    message=facts.format(entry.title),
                    place=_find_place(names, settings),
                    cause=entry.text("cause", facts),
                    fix=entry.text("fix", facts),
                    details=tuple((_config_key(name), str(settings[name])) for name in names),
                )
            )
    return findings


def codes() -> list[str]:
    return list(RULES)


def page(code: str) -> str | None:
    """Returns the explanation of a rule as a page of text, or None for an unknown code."""
    return RULES[code].to_page() if code in RULES else None


def _find_place(names: list[str], settings: Mapping[str, Setting]) -> Place:
    """Returns the file and line of the first of these settings that the user wrote. If the user
    wrote none of them, returns the place of the first one.
    """
    name = next((name for name in names if settings[name].is_written), names[0])
    # "run.yaml:3", or "preset nf4-lora, run.yaml:3"
    file, _, line = settings[name].source.rpartition(", ")[2].rpartition(":")
    if file and line.isdigit():
        return Place(file=file, line=int(line), symbol=_config_key(name))
    return Place(symbol=_config_key(name))


def _config_key(name: str) -> str:
    keys = {
        "adapter": "adapter.kind",
        "optimizer_name": "train.optimizer",
        "micro_batches": "train.accumulate",
    }
    return keys.get(name, f"precision.{name}")
