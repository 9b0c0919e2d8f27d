"""What a rule is: a function from a record to findings, naming the settings, their places and who
wins; its docstring is its page.

Rules are sheets (`*.txt` beside this file, read by `pages.sheets`); those that look at every key of
a file are functions (`keys.py`). The name of a section may hold rows of words, `half=bf16
other=fp16; half=fp16 other=bf16`: the section is asked once for each row. Its head may `set` names
to settings. An entry's title is the finding's message, its ranks are the severities, its fields:
`shows` (the settings listed, with `,` between them, each the first of `|` that is there), `cause`,
`fix`, `today`, `holds`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ....dtypes import torch_dtype_name
from ....finding import Finding, Place, Severity
from ....pages import registered
from ....pages.sheets import Entry, Section, sections
from ....pages.sheets import Facts as Known
from ..settings import (
    CHECKPOINT_DTYPE_KEYS,
    ROLES,
    Record,
    Setting,
    deepspeed_half,
    deepspeed_setting,
    find_deepspeed,
    find_fsdp,
    fsdp_version,
    launcher_mode,
    lightning_precision,
    parse_boolean,
    parse_dtype,
    zero_stage,
)

Rule = Callable[[Record], Iterator[Finding]]
RULES: dict[str, Rule] = {}

rule = partial(registered, RULES)


def make_finding(
    severity: Severity,
    message: str,
    *settings: Setting | None,
    cause: str,
    fix: str,
    current_effect: str | None = None,
    known_versions: str | None = None,
) -> Finding:
    """A finding at the first setting, listing all of them.

    current_effect  what happens today, when two settings disagree
    known_versions  the versions the rule is known for
    """
    distinct_settings = list(
        {(s.key, s.file, s.line): s for s in settings if s is not None}.values()
    )
    details: list[tuple[str, str]] = []
    for setting in distinct_settings:
        if all(setting.key != listed_label for listed_label, _ in details):
            label = setting.key
        else:
            label = f"{setting.key}, also"
        details.append((label, setting.value_and_origin))
    if current_effect:
        details.append(("today", current_effect))
    if known_versions:
        details.append(("holds for", known_versions))
    location = distinct_settings[0].location if distinct_settings else Place()
    return Finding(
        code="",
        severity=severity,
        message=message,
        place=location,
        cause=cause,
        fix=fix,
        details=tuple(details),
    )


error = partial(make_finding, Severity.ERROR)


def _evaluated_before_training(r: Record) -> Setting | None:
    """The program's first call of evaluate or predict, where it stands above its call of train."""
    calls = [
        (s.line or 0, name.partition("@")[0], s)
        for name, s in r.facts.tool_settings("code")
        if "@" in name
    ]
    calls.sort(key=lambda call: call[0])
    first = next((call for call in calls if call[1] in ("evaluate", "predict")), None)
    if first and any(call[1] == "train" and call[0] > first[0] for call in calls):
        return first[2]
    return None


def _undivided_size(r: Record) -> Setting | None:
    """A size of the model that an FP8 block does not divide."""
    block = r.facts.value("checkpoint.quantization_config.weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        return None
    for name in (
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "q_lora_rank",
        "vocab_size",
    ):
        size = r.facts.get(f"checkpoint.{name}", f"checkpoint.text_config.{name}")
        if (
            size is not None
            and isinstance(size.value, int)
            and size.value > int(block[0])
            and size.value % int(block[0])
        ):
            return size
    # of DeepSeek's kv_a_proj_with_mqa: 512 + 64 are 576
    rank, angles = (
        r.facts.get(f"checkpoint.{name}") for name in ("kv_lora_rank", "qk_rope_head_dim")
    )
    if (
        rank
        and angles
        and isinstance(rank.value, int)
        and isinstance(angles.value, int)
        and (rank.value + angles.value) % int(block[0])
    ):
        return replace(
            rank,
            value=rank.value + angles.value,
            key=f"{rank.key} + {angles.key.rpartition('.')[2]}",
        )
    return None


def _rounded_activations(r: Record) -> Setting | None:
    """The setting of a published checkpoint that asks for them, by compressed-tensors or torchao."""
    for setting in r.facts.nested_settings("checkpoint.quantization_config"):
        if (
            ".config_groups." in setting.key
            and ".input_activations" in setting.key
            and setting.value
        ):
            return setting
        if ".quant_type" in setting.key and "DynamicActivation" in str(setting.value):
            return setting
    return None


def _precision_plugin(r: Record) -> Setting | None:
    candidates = (
        (name, s, f"{s.value}{name}".lower().replace("trainer.precision", ""))
        for name, s in r.facts.tool_settings("lightning")
    )
    return next(
        (s for name, s, text in candidates if "plugins" in name.split(".") and "precision" in text),
        None,
    )


_QUANTO = "precision with quanto"
_SHARED: dict[str, Callable[[Record], Any]] = {
    "accumulates": lambda r: r.accumulation_setting,
    "adapter": lambda r: r.adapter,
    "adapter by": lambda r: r.adapter_setting,
    "without adapter": lambda r: r.adapter is False,
    "checkpoint dtype": lambda r: r.facts.get(*CHECKPOINT_DTYPE_KEYS),
    "deepspeed": lambda r: find_deepspeed(r.facts),
    "deepspeed half": deepspeed_half,
    "evaluated before training": _evaluated_before_training,
    "full": lambda r: r.trains_every_weight,
    "learning rate": lambda r: r.learning_rate,
    "precision plugin": _precision_plugin,
    "rounded activations": _rounded_activations,
    "undivided size": _undivided_size,
    "unsloth": lambda r: any(d.attributes.get("unsloth") for d in r.facts.documents),
    "device": lambda r: r.device,
    "fsdp": lambda r: find_fsdp(r.facts),
    "fsdp version": lambda r: fsdp_version(r.facts)[0],
    "fsdp version by": lambda r: fsdp_version(r.facts)[1],
    "made by": lambda r: next(
        (made for d in r.facts.documents if (made := d.attributes.get("made_by"))), None
    ),
    "launcher": lambda r: launcher_mode(r.facts),
    "lightning precision": lambda r: lightning_precision(r.facts),
    "quantised": lambda r: r.quantised_bits,
    "quantised by": lambda r: r.quantisation_setting,
    "quantised by simpletuner": (
        lambda r: r.facts.lower_text("simpletuner.base_model_precision") not in ("", "no_change")
    ),
    "tool": lambda r: r.tool,
    "zero stage": lambda r: zero_stage(r.facts)[0],
    "zero stage by": lambda r: zero_stage(r.facts)[1],
    _QUANTO: lambda r: next(
        (
            s
            for n, s in r.facts.tool_settings("simpletuner")
            if n.endswith("_precision") and "quanto" in str(s.value)
        ),
        None,
    ),
}
_READINGS: dict[str, Callable[[Any], Any]] = {
    " as dtype": parse_dtype,
    " as text": str,
    " as torch": torch_dtype_name,
    " as truth": parse_boolean,
    " as type": lambda value: type(value).__name__,
    " in lower case": lambda value: str(value).lower(),
}


_OF_KEYS: dict[str, Callable[[str], str | None]] = {
    " as half": lambda key: next((half for half in ("bf16", "fp16") if half in key), None),
    " as key": lambda key: key,
    " as name": lambda key: key.rpartition(".")[2],
}


class Facts(Known):
    """What is known of a run, by name: words and settings that the sheet made, roles of the record
    by name, and the following.

    TOOL.KEY, TOOL.KEY     the first of these settings that is given; after `on` or `off` the first
                           that is switched so, after `given` that is written at all, after `under`
                           that begins so
    by ROLE                the setting that decided a role
    deepspeed KEY          a setting of DeepSpeed's, wherever the tool keeps it
    has TOOL               whether a file of the tool is there
    unknown TOOL.KEY       whether a program computes the value

    and the names of `_SHARED`; `NAME as dtype` and the other endings of `_READINGS` read a value
    so, those of `_OF_KEYS` a setting's key. `NAME < number` and `NAME >= number` are tests as well.
    """

    def __init__(self, record: Record, words: dict[str, str]) -> None:
        super().__init__()
        self.record = record
        self.made |= words

    def holds_specially(self, term: str) -> bool | None:
        if (parts := re.fullmatch(r"(.+) (<|>=) ([\d.e-]+)", term)) is None:
            return None
        try:
            number = float(str(self.get(parts[1])))
        except ValueError:
            return False
        if parts[2] == "<":
            return number < float(parts[3])
        return number >= float(parts[3])

    def get(self, name: str) -> Any:
        record, facts = self.record, self.record.facts
        if name in self.made:
            return self.made[name]
        if name in _SHARED:
            return _SHARED[name](record)
        if name in ROLES:
            return record.value(name)
        for ending, read in _READINGS.items():
            if name.endswith(ending):
                value = self.get(name.removesuffix(ending))
                if value is None:
                    return None
                return read(value.value if isinstance(value, Setting) else value)
        for ending, of_key in _OF_KEYS.items():
            if name.endswith(ending):
                setting = self.get(name.removesuffix(ending))
                if isinstance(setting, Setting):
                    return of_key(setting.key)
                return None
        kind, _, rest = name.partition(" ")
        match kind:
            case "on":
                return facts.first_enabled(*rest.split(", "))
            case "off":
                return facts.first_disabled(*rest.split(", "))
            case "given":
                return facts.get_written(rest)
            case "under":
                return next(
                    (s for prefix in rest.split(", ") for s in facts.nested_settings(prefix)), None
                )
            case "by":
                return record.deciding_setting(rest)
            case "deepspeed":
                return deepspeed_setting(facts, rest)
            case "has":
                return facts.has(rest)
            case "unknown":
                tool, _, key = rest.partition(".")
                return any(
                    key in d.attributes.get("unknown", ())
                    for d in facts.documents
                    if d.tool == tool
                )
        return facts.get(*name.split(", ")) if "." in name else None

    def setting(self, names: str) -> Setting | None:
        """The first of `one|another` that is a setting."""
        return next(
            (value for name in names.split("|") if isinstance(value := self.get(name), Setting)),
            None,
        )


def _findings(entries: list[Entry], facts: Facts) -> Iterator[Finding]:
    head = entries[0]
    for name, test, lookup in head.fields:
        if name.startswith("set ") and facts.made.get(name[4:]) is None and facts.holds(test):
            facts.made[name[4:]] = facts.get(facts.say(lookup))
    head.make(facts)
    for entry in entries[1:]:
        if severity := entry.rank(facts):
            cause, fix, wins, holds = (
                entry.first(name, facts) for name in ("cause", "fix", "today", "holds")
            )
            settings = [facts.setting(names) for names in entry.first("shows", facts).split(", ")]
            yield make_finding(
                Severity.parse(severity),
                facts.say(entry.title),
                *settings,
                cause=cause,
                fix=fix,
                current_effect=wins,
                known_versions=holds,
            )


def register(path: Path) -> None:
    """Makes the rules of one sheet."""
    by_code: dict[str, list[Section]] = {}
    for section in sections(
        path, ranks="error|warning|note", fields=r"set \w+|shows|cause|fix|today|holds"
    ):
        by_code.setdefault(section.code, []).append(section)
    for code, parts in by_code.items():

        def findings(record: Record, parts: list[Section] = parts) -> Iterator[Finding]:
            for part in parts:
                for row in part.name.split(";"):
                    words = dict(pair.split("=") for pair in row.split())
                    yield from _findings(part.entries, Facts(record, words))

        findings.__doc__ = parts[0].page
        rule(code)(findings)


for _sheet in sorted(Path(__file__).parent.glob("*.txt")):
    register(_sheet)
