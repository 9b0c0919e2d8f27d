"""Defines the names that conditions in the rule files (`*.txt`) of `check` can use. The names stand
for properties of the run's precision, and for the settings of the tools that the run uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from ....dtypes import torch_dtype_name
from ....pages import sheets
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
from ..tools import RULE_KEYS


def _find_early_evaluation(record: Record) -> Setting | None:
    """Returns the program's first call of evaluate or predict, if the program calls train after it."""
    calls = [
        (setting.line or 0, name.partition("@")[0], setting)
        for name, setting in record.facts.tool_settings("code")
        if "@" in name
    ]
    calls.sort(key=lambda call: call[0])
    evaluation_call = next((call for call in calls if call[1] in ("evaluate", "predict")), None)
    if evaluation_call and any(
        call[1] == "train" and call[0] > evaluation_call[0] for call in calls
    ):
        return evaluation_call[2]
    return None


def _find_indivisible_size(record: Record) -> Setting | None:
    """Returns a size of the model that is not divisible by the FP8 block size."""
    block_size = record.facts.value("checkpoint.quantization_config.weight_block_size")
    if not isinstance(block_size, list) or len(block_size) != 2:
        return None
    for name in (
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "q_lora_rank",
        "vocab_size",
    ):
        size = record.facts.get(f"checkpoint.{name}", f"checkpoint.text_config.{name}")
        if (
            size is not None
            and isinstance(size.value, int)
            and size.value > int(block_size[0])
            and size.value % int(block_size[0])
        ):
            return size
    # the output size of DeepSeek's kv_a_proj_with_mqa: 512 + 64 = 576
    kv_rank, rope_size = (
        record.facts.get(f"checkpoint.{name}") for name in ("kv_lora_rank", "qk_rope_head_dim")
    )
    if (
        kv_rank
        and rope_size
        and isinstance(kv_rank.value, int)
        and isinstance(rope_size.value, int)
        and (kv_rank.value + rope_size.value) % int(block_size[0])
    ):
        return replace(
            kv_rank,
            value=kv_rank.value + rope_size.value,
            key=f"{kv_rank.key} + {rope_size.key.rpartition('.')[2]}",
        )
    return None


def _find_rounded_activations(record: Record) -> Setting | None:
    """Finds the setting of a published checkpoint that requires rounded activations. The checkpoint
    has the format of compressed-tensors or torchao.
    """
    for setting in record.facts.nested_settings("checkpoint.quantization_config"):
        if (
            ".config_groups." in setting.key
            and ".input_activations" in setting.key
            and setting.value
        ):
            return setting
        if ".quant_type" in setting.key and "DynamicActivation" in str(setting.value):
            return setting
    return None


def _find_precision_plugin(record: Record) -> Setting | None:
    candidates = (
        (name, setting, f"{setting.value}{name}".lower().replace("trainer.precision", ""))
        for name, setting in record.facts.tool_settings("lightning")
    )
    return next(
        (
            setting
            for name, setting, text in candidates
            if "plugins" in name.split(".") and "precision" in text
        ),
        None,
    )


_RECORD_FACTS: dict[str, Callable[[Record], Any]] = {
    "accumulates": lambda r: r.accumulation_setting,
    "adapter": lambda r: r.adapter,
    "adapter by": lambda r: r.adapter_setting,
    "without adapter": lambda r: r.adapter is False,
    "checkpoint dtype": lambda r: r.facts.get(*CHECKPOINT_DTYPE_KEYS),
    "deepspeed": lambda r: find_deepspeed(r.facts),
    "deepspeed half": deepspeed_half,
    "evaluated before training": _find_early_evaluation,
    "full": lambda r: r.trains_every_weight,
    "learning rate": lambda r: r.learning_rate,
    "precision plugin": _find_precision_plugin,
    "rounded activations": _find_rounded_activations,
    "undivided size": _find_indivisible_size,
    "unsloth": lambda r: any(document.attributes.get("unsloth") for document in r.facts.documents),
    "device": lambda r: r.device,
    "fsdp": lambda r: find_fsdp(r.facts),
    "fsdp version": lambda r: fsdp_version(r.facts)[0],
    "fsdp version by": lambda r: fsdp_version(r.facts)[1],
    "made by": lambda r: next(
        (made for document in r.facts.documents if (made := document.attributes.get("made_by"))),
        None,
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
    "precision with quanto": lambda r: next(
        (
            setting
            for n, setting in r.facts.tool_settings("simpletuner")
            if n.endswith("_precision") and "quanto" in str(setting.value)
        ),
        None,
    ),
}


def _read_value(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that applies `read` to the value of a setting. It can also be called with
    a value that is not a `Setting`.
    """
    return lambda value: read(value.value if isinstance(value, Setting) else value)


def _read_key(read: Callable[[str], str | None]) -> Callable[[Any], str | None]:
    """Returns a function that applies `read` to the key of a setting. For any other argument, this
    function returns None.
    """
    return lambda value: read(value.key) if isinstance(value, Setting) else None


class _ToolKeys(Collection[str]):
    """The names of settings, `TOOL.KEY`, that rules may use. A string may hold several names
    separated by `, `. `{tool}` may be written in place of the tool's name.

    tools  the tools whose settings may be named; by default all
    """

    def __init__(self, *tools: str) -> None:
        self.tools = tools or tuple(RULE_KEYS)

    def __contains__(self, names: object) -> bool:
        return all(map(self._is_key, str(names).split(", ")))

    def _is_key(self, name: str) -> bool:
        tool, _, key = name.partition(".")
        if tool == "{tool}":
            return any(key in RULE_KEYS[tool] for tool in self.tools)
        return tool in self.tools and key in RULE_KEYS[tool]

    def __iter__(self) -> Iterator[str]:
        return (f"{tool}.{key}" for tool in self.tools for key in sorted(RULE_KEYS[tool]))

    def __len__(self) -> int:
        return sum(len(RULE_KEYS[tool]) for tool in self.tools)


_KEYS = _ToolKeys()


def _first_nested(facts: RuleFacts, prefixes: str) -> Setting | None:
    return next(
        (
            setting
            for prefix in prefixes.split(", ")
            for setting in facts.record.facts.nested_settings(prefix)
        ),
        None,
    )


def _is_value_unknown(facts: RuleFacts, name: str) -> bool:
    """True if a program computes the value of a setting. The value is then unknown."""
    tool, _, key = name.partition(".")
    return any(
        key in document.attributes.get("unknown", ())
        for document in facts.record.facts.documents
        if document.tool == tool
    )


def _record_fact(compute: Callable[[Record], Any]) -> Callable[[RuleFacts], Any]:
    return lambda facts: compute(facts.record)


def _role_value(role: str) -> Callable[[RuleFacts], Any]:
    return lambda facts: facts.record.value(role)


class RuleFacts(sheets.Facts):
    """Looks up values that describe a run. Conditions in the files of rules refer to these values
    by names. A name can be a variable that the section defines, a role of the run, a key of
    `_RECORD_FACTS`, or one of the following.

    TOOL.KEY, TOOL.KEY     the first of these settings that is set; after `on` or `off` the first
                           that is switched on or off, after `given` the first that is written at
                           all, after `under` the first whose key begins with KEY
    by ROLE                the setting that decided the dtype of a role
    deepspeed KEY          a setting of DeepSpeed, in any place where the tool may have it
    has TOOL               whether the run has a file of the tool
    unknown TOOL.KEY       whether a program computes the value of the setting

    Words after a name convert its value. For example, `NAME as dtype` converts the value of a
    setting to a dtype. `NAME as key`, `NAME as name` and `NAME as half` convert its key.
    """

    fact_functions = {
        **{name: _record_fact(compute) for name, compute in _RECORD_FACTS.items()},
        **{role: _role_value(role) for role in ROLES},
    }
    functions = {
        "on": sheets.Function(lambda f, a: f.record.facts.first_enabled(*a.split(", ")), _KEYS),
        "off": sheets.Function(lambda f, a: f.record.facts.first_disabled(*a.split(", ")), _KEYS),
        "given": sheets.Function(lambda f, a: f.record.facts.get_written(a), _KEYS),
        "under": sheets.Function(_first_nested, _KEYS),
        "by": sheets.Function(lambda f, role: f.record.deciding_setting(role), ROLES),
        "deepspeed": sheets.Function(
            lambda f, key: deepspeed_setting(f.record.facts, key), RULE_KEYS["deepspeed"]
        ),
        "has": sheets.Function(lambda f, tool: f.record.facts.has(tool), RULE_KEYS),
        "unknown": sheets.Function(_is_value_unknown, _KEYS),
    }
    conversions = {
        " as dtype": _read_value(parse_dtype),
        " as text": _read_value(str),
        " as torch": _read_value(torch_dtype_name),
        " as truth": _read_value(parse_boolean),
        " as type": _read_value(lambda value: type(value).__name__),
        " in lower case": _read_value(lambda value: str(value).lower()),
        " as half": _read_key(
            lambda key: next((half for half in ("bf16", "fp16") if half in key), None)
        ),
        " as key": _read_key(lambda key: key),
        " as name": _read_key(lambda key: key.rpartition(".")[2]),
    }
    attributes = ("key", "value", "name", "kind", "architecture", "bf16", "fp8", "tf32")
    values = {"tool": (*RULE_KEYS, "script")}

    def __init__(self, record: Record, variables: dict[str, str]) -> None:
        super().__init__(variables)
        self.record = record

    def evaluate_other_name(self, name: str) -> Any:
        return self.record.facts.get(*name.split(", ")) if "." in name else None

    @classmethod
    def find_variables_in_other_name(cls, name: str, variables: Collection[str]) -> set[str] | None:
        return set() if name in _KEYS else None

    def setting(self, names: str) -> Setting | None:
        """Looks up the names in `one|another` in this order, and returns the first setting that the
        run has.
        """
        return next(
            (value for name in names.split("|") if isinstance(value := self.get(name), Setting)),
            None,
        )
