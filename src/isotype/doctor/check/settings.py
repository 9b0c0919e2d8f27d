"""A setting with the line that made it; a document of settings; everything known about one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...dtypes import parse
from ...finding import Place


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
