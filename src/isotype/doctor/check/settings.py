"""Defines the classes for the settings that the rules check. A `Setting` is one setting with its
file and line, a `Document` contains the settings of one file, `Facts` contains everything that is
known about one run, and a `Record` contains the precision with which the run will train.

A role is a part of training that has its own dtype, such as the loaded weights or the computation.
The record contains the dtype of each role and the setting that decided this dtype. `roles.py`
creates such a record from the settings of any tool, so each rule about precision is written only
once. The functions at the end of the module read settings that have a different place in each tool.
These settings are the model's dtype, half precision, quantisation, adapters, DeepSpeed and FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...dtypes import parse
from ...environment.hardware import lookup_hardware
from ...errors import UsageError
from ...finding import Place


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a run and the formats that it supports.

    architecture     the CUDA compute capability (`9.0`), or AMD's gfx name
    bf16, tf32, fp8  whether the device supports the format
    """

    name: str
    kind: str
    architecture: str = ""
    bf16: bool = True
    tf32: bool = False
    fp8: bool = False


def parse_device(name: str) -> Device:
    """Returns the device with this name. For an unknown name it raises a UsageError that suggests
    similar names.
    """
    # other tools train on this device, Isotype does not
    if name.strip().lower() in ("mps", "apple"):
        return Device(name, "mps")
    hardware = lookup_hardware(name)
    display_name = name
    if hardware.kind == "cpu":
        display_name = "CPU"
    elif len(name) < 6:
        display_name = name.upper()
    return Device(
        display_name,
        hardware.kind,
        hardware.architecture,
        hardware.bf16 != "none",
        hardware.tf32 == "native",
        hardware.fp8 == "native",
    )


def find_device(name: str) -> Device | None:
    """Returns the device with this name, or None if the name is not in the table of hardware."""
    try:
        return parse_device(name)
    except UsageError:
        return None


@dataclass(frozen=True, slots=True)
class Setting:
    """A value with its key, file and line.

    value  the parsed value (bool, number, str, None or list)
    key    the key as it is written in the file
    """

    value: Any
    key: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return str(self.value)

    @property
    def location(self) -> Place:
        return Place(file=self.file, line=self.line, symbol=self.key)

    @property
    def value_and_origin(self) -> str:
        """Returns the value and its location, such as `true  (train.yaml:3)`."""
        value = self.value
        if value is None:
            text = "null"
        elif isinstance(value, bool):
            text = str(value).lower()
        else:
            text = str(value)
        if self.file and self.line:
            origin = f"{self.file}:{self.line}"
        else:
            origin = self.file or "default"
        return f"{text}  ({origin})"


@dataclass(slots=True)
class Document:
    """The settings of one file for one tool. `tool` is the namespace of its keys (`hf`,
    `deepspeed`, ...).

    attributes  further information about the file:
                `reader`    how it was read: python, command line, config.env or safetensors
                `launcher`  True for the options of a launcher such as torchrun
                `unknown`   the keys whose values cannot be read, because the program computes them
                            or sets them more than once
                `unsloth`   True for a program that loads its model with Unsloth
                `dtypes`    dtype name -> number of tensors, of a safetensors file
                `made_by`   the class whose call has the settings, such as SFTConfig
    """

    tool: str
    file: str
    settings: dict[str, Setting] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def add(
        self, key: str, value: Any, line: int | None, *, written_key: str | None = None
    ) -> None:
        self.settings[key] = Setting(value, written_key or key, self.file, line)


TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0", "none", "null", "")


def parse_boolean(value: Any) -> bool | None:
    """Parses a boolean in all the spellings that trainers accept. Returns None for a value that is
    not a boolean, such as `auto`.
    """
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return bool(value)
    text = str(value).strip().lower()
    if text in TRUE_WORDS:
        return True
    return False if text in FALSE_WORDS else None


def parse_dtype(value: Any) -> str | None:
    """Returns the short name of a dtype, for example `bf16` for `torch.bfloat16`, `bfloat16` or
    `BF16`. Returns None for a value that is not a dtype, such as `auto`.
    """
    try:
        return parse(str(value))
    except ValueError:
        return None


@dataclass
class Facts:
    """Contains all settings of one run. `facts.get("hf.bf16")` looks up a setting."""

    documents: list[Document] = field(default_factory=list)
    device: str | None = None

    def first_document(self, name: str) -> Document | None:
        return next((document for document in self.documents if document.tool == name), None)

    def has(self, *tools: str) -> bool:
        return any(document.tool in tools for document in self.documents)

    def get(self, *names: str) -> Setting | None:
        """Returns the first of these settings whose value is not null, or None. Each name has the
        form `tool.key`.
        """
        for name in names:
            tool, _, key = name.partition(".")
            for document in self.documents:
                if (
                    document.tool == tool
                    and (setting := document.settings.get(key)) is not None
                    and setting.value is not None
                ):
                    return setting
        return None

    def get_written(self, name: str) -> Setting | None:
        """Returns the setting if a file contains its key, even if the value is null."""
        tool, _, key = name.partition(".")
        return next(
            (
                document.settings[key]
                for document in self.documents
                if document.tool == tool and key in document.settings
            ),
            None,
        )

    def value(self, *names: str, default: Any = None) -> Any:
        setting = self.get(*names)
        return default if setting is None else setting.value

    def lower_text(self, *names: str) -> str:
        return str(self.value(*names, default="")).strip().lower()

    def first_enabled(self, *names: str) -> Setting | None:
        """Returns the first of the given settings that is switched on. `auto` does not count as on."""
        return next(
            (
                s
                for name in names
                if (s := self.get(name)) is not None and parse_boolean(s.value) is True
            ),
            None,
        )

    def first_disabled(self, *names: str) -> Setting | None:
        return next(
            (
                s
                for name in names
                if (s := self.get(name)) is not None and parse_boolean(s.value) is False
            ),
            None,
        )

    def number(self, *names: str) -> float | None:
        try:
            return float(self.value(*names, default="none"))
        except (TypeError, ValueError):
            return None

    def tool_settings(self, tool: str) -> Iterator[tuple[str, Setting]]:
        for document in self.documents:
            if document.tool == tool:
                yield from document.settings.items()

    def nested_settings(self, prefix: str) -> list[Setting]:
        """Returns all settings whose names begin with `tool.key.`."""
        tool, _, key = prefix.partition(".")
        return [
            setting
            for name, setting in self.tool_settings(tool)
            if name.startswith(f"{key}.") or name == key
        ]


ROLES = (
    "parameters",
    "trained",
    "gradients",
    "accumulation",
    "reduction",
    "optimizer",
    "compute",
    "loss scaling",
    "norms",
    "storage",
    "evaluation",
    "ema",
)


@dataclass(frozen=True, slots=True)
class Decision:
    """The value that applies to one role (such as `compute` or `optimizer`), and the reason for
    this value.

    value    a dtype or a short description
    reason   a short phrase
    setting  the setting that decided the value; None for the tool's default
    """

    value: str
    reason: str
    setting: Setting | None = None


@dataclass
class Record:
    """The precision with which a run will train: for each role (such as `compute` or `optimizer`),
    the value and the reason for it.

    tool            the program to which the settings belong
    facts           the settings themselves
    adapter         whether adapters are trained; None if no setting says so
    quantised_bits  the bits per weight of a quantised base model; None if it is not quantised
    """

    tool: str
    facts: Facts
    roles: dict[str, Decision] = field(default_factory=dict)
    adapter: bool | None = None
    adapter_setting: Setting | None = None
    quantised_bits: int | None = None
    quantisation_setting: Setting | None = None
    device: Device | None = None

    def set(
        self, role: str, value: str | None, reason: str, setting: Setting | None = None
    ) -> None:
        if value is not None:
            self.roles[role] = Decision(value, reason, setting)

    def value(self, role: str) -> str | None:
        return self.roles[role].value if role in self.roles else None

    def deciding_setting(self, role: str) -> Setting | None:
        return self.roles[role].setting if role in self.roles else None

    @property
    def trains_every_weight(self) -> bool:
        """True if every weight is trained, and also if this is unknown."""
        return self.adapter is not True and self.quantised_bits is None

    @property
    def learning_rate(self) -> float | None:
        return self.facts.number(
            *_keys_of_every_tool(
                "learning_rate train.learning_rate lr optimizer.lr optimizer.params.lr"
            )
        )

    @property
    def accumulation_setting(self) -> Setting | None:
        keys = (
            "gradient_accumulation_steps train.accumulate accumulate_grad_batches"
            " trainer.accumulate_grad_batches"
        )
        return self.facts.get(*_keys_of_every_tool(keys))


_ALL_TOOLS = [
    "hf",
    "simpletuner",
    "axolotl",
    "llamafactory",
    "torchtune",
    "torchtitan",
    "lightning",
    "kohya",
    "script",
    "isotype",
    "deepspeed",
    "accelerate",
]
# these tools have the Trainer's arguments for DeepSpeed and FSDP
_TRAINER_TOOLS = ("hf", "axolotl", "llamafactory")


def _keys_of_every_tool(keys: str) -> list[str]:
    return [f"{tool}.{key}" for tool in _ALL_TOOLS for key in keys.split()]


# settings for the dtype in which the model is loaded
MODEL_DTYPE_KEYS = (
    "model.dtype",
    "model.torch_dtype",
    "hf.dtype",
    "hf.torch_dtype",
    "hf.model_init_kwargs.dtype",
    "hf.model_init_kwargs.torch_dtype",
    "hf.model_dtype",
    "model.model_kwargs.torch_dtype",
)
CHECKPOINT_DTYPE_KEYS = [
    f"checkpoint.{key}"
    for key in (
        "stored_dtype",
        "dtype",
        "torch_dtype",
        "text_config.dtype",
        "text_config.torch_dtype",
    )
]
QUANTIZATION_SECTION = "quantization_config"


def model_dtype(facts: Facts) -> tuple[str | None, Setting | None]:
    """Returns the dtype in which the weights are loaded, and the setting that decides it. The dtype
    is the one that the user requested, or else the dtype of the checkpoint.
    """
    requested = facts.get(*MODEL_DTYPE_KEYS)
    if requested is not None and parse_dtype(requested.value):
        return parse_dtype(requested.value), requested
    stored = facts.get(*CHECKPOINT_DTYPE_KEYS)
    if stored:
        return (parse_dtype(stored.value), stored)
    return (None, None)


def mixed_flag(facts: Facts, tool: str = "hf") -> Setting | None:
    """Returns the trainer's flag that switches half precision on. If both flags are on, `bf16`
    takes precedence.
    """
    return facts.first_enabled(f"{tool}.bf16", f"{tool}.fp16")


def launcher_mode(facts: Facts) -> Setting | None:
    """Returns the mixed precision mode of accelerate's configuration, launcher or environment."""
    return facts.get("env.ACCELERATE_MIXED_PRECISION", "accelerate.mixed_precision")


def detect_quantisation(record: Record, *prefixes: str) -> None:
    facts = record.facts
    for bits in (4, 8):
        if flag := facts.first_enabled(*(f"{prefix}.load_in_{bits}bit" for prefix in prefixes)):
            record.quantised_bits = bits
            record.quantisation_setting = flag
            return
    if stored := facts.get(
        "checkpoint.quantization_config.quant_method", "model.quantization_config.quant_method"
    ):
        is_4bit = facts.first_enabled(
            "checkpoint.quantization_config.load_in_4bit", "model.quantization_config._load_in_4bit"
        )
        if is_4bit or str(stored.value) in ("awq", "gptq", "hqq"):
            record.quantised_bits = 4
        else:
            record.quantised_bits = 8
        record.quantisation_setting = stored


def detect_adapter(record: Record, *names: str) -> None:
    """Determines whether adapters are trained. The decision depends on the first of these settings
    that the user wrote. If the user wrote none of these settings, calls of PEFT in the program
    decide this.
    """
    facts = record.facts
    if setting := next(filter(None, map(facts.get_written, names)), None):
        record.adapter = str(setting.value).lower() not in (
            "none",
            "null",
            "false",
            "full",
            "",
            "freeze",
            "no",
        )
        record.adapter_setting = setting
    elif facts.has("peft"):
        record.adapter = True
        record.adapter_setting = next((setting for _, setting in facts.tool_settings("peft")), None)


def lightning_precision(facts: Facts) -> Setting | None:
    return facts.get("lightning.precision", "lightning.trainer.precision")


def deepspeed_setting(facts: Facts, key: str) -> Setting | None:
    sections = (
        "deepspeed",
        "accelerate.deepspeed_config",
        *(f"{tool}.deepspeed" for tool in _TRAINER_TOOLS),
    )
    return facts.get(*(f"{section}.{key}" for section in sections))


def find_deepspeed(facts: Facts) -> Setting | None:
    if document := facts.first_document("deepspeed"):
        return next(iter(document.settings.values()), None)
    if "deepspeed" in facts.lower_text("accelerate.distributed_type"):
        return facts.get("accelerate.distributed_type")
    references = (facts.get(f"{tool}.deepspeed") for tool in _TRAINER_TOOLS)
    return next((setting for setting in references if setting and setting.value), None) or next(
        iter(facts.nested_settings("hf.deepspeed")), None
    )


def deepspeed_half(record: Record) -> str | None:
    """Returns the half-precision dtype that DeepSpeed's file enables, either with true or with
    "auto". Returns None if the file enables neither bf16 nor fp16.
    """
    for half in ("bf16", "fp16"):
        section = deepspeed_setting(record.facts, f"{half}.enabled")
        if section is not None and (
            parse_boolean(section.value)
            or (str(section.value) == "auto" and record.value("compute") == half)
        ):
            return half
    return None


def zero_stage(facts: Facts) -> tuple[int | None, Setting | None]:
    """Returns the ZeRO stage and the setting that decides it. The stage is read from DeepSpeed's
    settings, or else from the name of DeepSpeed's file (`zero3.json`, `ds_z2_config.json`).
    """
    if stage := deepspeed_setting(facts, "zero_optimization.stage") or facts.get(
        "accelerate.deepspeed_config.zero_stage"
    ):
        return _parse_int(stage), stage
    for reference in filter(None, (facts.get(f"{tool}.deepspeed") for tool in _TRAINER_TOOLS)):
        digits = [
            character
            for character in str(reference.value).rpartition("/")[2]
            if character in "0123"
        ]
        if isinstance(reference.value, str) and digits and "z" in reference.value.lower():
            return int(digits[0]), reference
    return None, None


def _parse_int(setting: Setting) -> int | None:
    try:
        return int(setting.value)
    except (TypeError, ValueError):
        return None


# settings that turn FSDP on
_FSDP_KEYS = (
    "hf.fsdp",
    "axolotl.fsdp",
    "llamafactory.fsdp",
    "simpletuner.fsdp_enable",
    "axolotl.fsdp_version",
    "fsdp.strategy",
    "accelerate.use_fsdp",
    "lightning.strategy",
    "lightning.trainer.strategy",
)
_FSDP_VERSION_KEYS = (
    "accelerate.fsdp_config.fsdp_version",
    "hf.fsdp_config.version",
    "hf.fsdp_config.fsdp_version",
    "fsdp.fsdp_version",
    "fsdp.version",
    "axolotl.fsdp_version",
    "axolotl.fsdp_config.fsdp_version",
    "simpletuner.fsdp_version",
    "accelerate.fsdp_version",
    "env.FSDP_VERSION",
)


def find_fsdp(facts: Facts) -> Setting | None:
    if "fsdp" in facts.lower_text("accelerate.distributed_type"):
        return facts.get("accelerate.distributed_type")
    for name in _FSDP_KEYS:
        setting = facts.get(name)
        if (
            setting
            and setting.value not in ("", [], False)
            and ("strategy" not in name or "fsdp" in str(setting.value).lower())
        ):
            return setting
    config_settings = (
        setting
        for tool in _TRAINER_TOOLS
        for setting in facts.nested_settings(f"{tool}.fsdp_config")
        if setting.value not in (None, {}, [])
    )
    if not facts.has("accelerate") and (setting := next(config_settings, None)):
        return setting
    return next((setting for _, setting in facts.tool_settings("fsdp")), None)


def fsdp_version(facts: Facts) -> tuple[int | None, Setting | None]:
    """Returns the FSDP version and the setting that decides it. If no version is set, transformers
    5.10 and newer use FSDP2. For a configuration file of accelerate, the version is then None.
    """
    if version := facts.get(*_FSDP_VERSION_KEYS):
        return _parse_int(version), version
    fsdp = next(
        (
            s
            for tool in ("hf", "llamafactory")
            if (s := facts.get(f"{tool}.fsdp")) and s.value not in ("", [], False)
        ),
        None,
    )
    if fsdp is None or "fsdp" in facts.lower_text("accelerate.distributed_type"):
        return None, None
    return 2, fsdp
