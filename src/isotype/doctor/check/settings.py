"""A setting with the line that made it, a document of settings, what is known about one run, and its effective precision record.

The record says what each role of a run will really be, with the setting that decided it. Each tool's settings are compiled into the same
record (`tools.py`), so that a rule about precision is written once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...dtypes import parse
from ...errors import UsageError
from ...finding import Place


@dataclass(frozen=True, slots=True)
class Device:
    """capability: CUDA compute capability times ten, None where there is none; bf16: native there."""

    name: str
    kind: str
    capability: int | None = None
    bf16: bool = True

    @property
    def tf32(self) -> bool:
        return self.capability is not None and self.capability >= 80

    @property
    def fp8(self) -> bool:
        return (self.capability is not None and self.capability >= 89) or self.kind == "rocm-fp8"


_CAPABILITY = {
    "p100": 60, "1080": 61, "p40": 61, "p4": 61, "v100": 70, "titan v": 70, "t4": 75, "2060": 75, "2070": 75, "2080": 75,
    "titan rtx": 75, "rtx 8000": 75, "a100": 80, "a30": 80, "a800": 80, "a10": 86, "a10g": 86, "a40": 86, "a6000": 86, "3060": 86,
    "3070": 86, "3080": 86, "3090": 86, "a4000": 86, "a5000": 86, "l4": 89, "l40": 89, "l40s": 89, "4070": 89, "4080": 89, "4090": 89,
    "rtx 6000 ada": 89, "h100": 90, "h200": 90, "h800": 90, "h20": 90, "gh200": 90, "b100": 100, "b200": 100, "gb200": 100, "b300": 103,
    "5070": 120, "5080": 120, "5090": 120,
}  # fmt: skip


def find_device(name: str) -> Device | None:
    word = re.sub(r"[-_]", " ", name.strip().lower())
    if word == "cpu":
        return Device("CPU", "cpu")
    if word in ("mps", "apple") or re.fullmatch(r"m[1-4]( (pro|max|ultra))?", word):
        return Device(name, "mps")
    if re.fullmatch(r"(amd )?(instinct )?mi(2[15]0x?|300[xa]?|325x|350x?|355x)", word):
        return Device(name, "rocm-fp8" if "mi3" in word else "rocm")
    if match := re.fullmatch(r"sm ?(\d{2,3})a?", word):
        return Device(name, "cuda", int(match[1]), int(match[1]) >= 80)
    short = re.sub(r"\b(?:nvidia|geforce|tesla|rtx|gtx|quadro|titan|\d+ ?gb|sxm\d?|pcie|ti|super|laptop|gpu|nvl|hbm\d?e?)\b", " ", word)
    for candidate in (word, " ".join(short.split())):
        if candidate in _CAPABILITY:
            capability = _CAPABILITY[candidate]
            return Device(name.upper() if len(name) < 6 else name, "cuda", capability, capability >= 80)
    return None


def parse_device(name: str) -> Device:
    """Raises UsageError naming what is known."""
    device = find_device(name)
    if device is None:
        raise UsageError(f"--device {name}: not known; give cpu, mps, a GPU such as {', '.join(list(_CAPABILITY)[4::7])}, mi300x, or sm_80")
    return device


@dataclass(frozen=True, slots=True)
class Setting:
    """value as its reader understands it (Python bool, number, str, None, list); key as written in the file."""

    value: Any
    key: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return str(self.value)

    @property
    def place(self) -> Place:
        return Place(file=self.file, line=self.line, symbol=self.key)

    @property
    def shown(self) -> str:
        """`true  (train.yaml:3)`."""
        value = self.value
        word = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        where = f"{self.file}:{self.line}" if self.file and self.line else self.file or "default"
        return f"{word}  ({where})"


@dataclass(slots=True)
class Document:
    """One file's settings for one tool: `tool` is the namespace its keys are asked under (`hf`, `deepspeed`, ...)."""

    tool: str
    file: str
    settings: dict[str, Setting] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def add(self, key: str, value: Any, line: int | None, *, written: str | None = None) -> None:
        self.settings[key] = Setting(value, written or key, self.file, line)


TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "null", "")


def truth(value: Any) -> bool | None:
    """What a trainer's own boolean parsing makes of a value; None for words that are no booleans (`auto`)."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return bool(value)
    word = str(value).strip().lower()
    return True if word in TRUE else False if word in FALSE else None


def dtype_of(value: Any) -> str | None:
    """`torch.bfloat16`, `bfloat16`, `BF16` -> `bf16`; None for what is no dtype (`auto`)."""
    try:
        return parse(str(value))
    except ValueError:
        return None


@dataclass
class Facts:
    """All documents of one run, asked as `facts.get("hf.bf16")`."""

    documents: list[Document] = field(default_factory=list)
    device: str | None = None

    def tool(self, name: str) -> Document | None:
        return next((d for d in self.documents if d.tool == name), None)

    def has(self, *tools: str) -> bool:
        return any(d.tool in tools for d in self.documents)

    def get(self, *names: str) -> Setting | None:
        """The first of `tool.key` that is set to something other than null."""
        for name in names:
            tool, _, key = name.partition(".")
            for document in self.documents:
                if document.tool == tool and (found := document.settings.get(key)) is not None and found.value is not None:
                    return found
        return None

    def given(self, name: str) -> Setting | None:
        """As `get`, null included: somebody wrote the key."""
        tool, _, key = name.partition(".")
        return next((d.settings[key] for d in self.documents if d.tool == tool and key in d.settings), None)

    def value(self, *names: str, default: Any = None) -> Any:
        found = self.get(*names)
        return default if found is None else found.value

    def word(self, *names: str) -> str:
        return str(self.value(*names, default="")).strip().lower()

    def on(self, *names: str) -> Setting | None:
        """The first of the names that is switched on (`auto` is not)."""
        return next((s for name in names if (s := self.get(name)) is not None and truth(s.value) is True), None)

    def off(self, *names: str) -> Setting | None:
        return next((s for name in names if (s := self.get(name)) is not None and truth(s.value) is False), None)

    def number(self, *names: str) -> float | None:
        try:
            return float(self.value(*names, default="none"))
        except (TypeError, ValueError):
            return None

    def all(self, tool: str) -> Iterator[tuple[str, Setting]]:
        for document in self.documents:
            if document.tool == tool:
                yield from document.settings.items()

    def under(self, prefix: str) -> list[Setting]:
        """Every setting below `tool.key.`."""
        tool, _, key = prefix.partition(".")
        return [s for name, s in self.all(tool) if name.startswith(f"{key}.") or name == key]


ROLES = (
    "parameters", "trained", "gradients", "accumulation", "reduction", "optimizer", "compute", "loss scaling", "norms", "storage",
    "evaluation", "ema",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """value: a dtype word or a phrase; by: the setting that decided, None for the tool's default; why: in a few words."""

    value: str
    why: str
    by: Setting | None = None


@dataclass
class Record:
    """adapter, quantised: None where no setting gives them; autocast: None when off; scaler: whether a GradScaler will run."""

    tool: str
    facts: Facts
    roles: dict[str, Decision] = field(default_factory=dict)
    adapter: bool | None = None
    adapter_by: Setting | None = None
    quantised: int | None = None
    quantised_by: Setting | None = None
    device: Device | None = None

    def set(self, role: str, value: str | None, why: str, by: Setting | None = None) -> None:
        if value is not None:
            self.roles[role] = Decision(value, why, by)

    def value(self, role: str) -> str | None:
        return self.roles[role].value if role in self.roles else None

    def by(self, role: str) -> Setting | None:
        return self.roles[role].by if role in self.roles else None

    @property
    def full(self) -> bool:
        """Every weight is trained, as far as the settings say."""
        return self.adapter is not True and self.quantised is None

    def number(self, *names: str) -> float | None:
        return self.facts.number(*names)

    @property
    def learning_rate(self) -> float | None:
        return self.facts.number(
            *(
                f"{tool}.{key}"
                for tool in _TOOLS
                for key in ("learning_rate", "train.learning_rate", "lr", "optimizer.lr", "optimizer.params.lr")
            )
        )

    @property
    def accumulates(self) -> Setting | None:
        return self.facts.get(
            *(
                f"{tool}.{key}"
                for tool in _TOOLS
                for key in ("gradient_accumulation_steps", "train.accumulate", "accumulate_grad_batches", "trainer.accumulate_grad_batches")
            )
        )


_TOOLS = (
    "hf", "simpletuner", "axolotl", "llamafactory", "torchtune", "torchtitan", "lightning", "kohya", "script", "isotype", "deepspeed",
    "accelerate",
)  # fmt: skip
