"""What a family of dtype errors is: one operator's way of refusing, and its causes; the docstring of its function is its page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...dtypes import torch_word
from ...finding import Severity
from .situation import Situation


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What an incident showed.

    operator  what refused: `matrix product`, `convolution`, ...
    dtypes    role -> dtype word, in the order of the text (`left`, `right`; `expected`, `got`; `query`, `key`, `value`; ...)
    words     other facts of the text: a variable, an operator's internal name
    """

    text: str
    operator: str
    dtypes: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    situation: Situation = field(default_factory=Situation)

    def dtype(self, role: str, otherwise: str = "another dtype") -> str:
        return self.dtypes.get(role, otherwise)

    @property
    def half(self) -> str:
        """The 16-bit float that takes part, bf16 when none was named."""
        return next((d for d in self.dtypes.values() if d in ("bf16", "fp16")), "bf16")

    @property
    def torch_half(self) -> str:
        return f"torch.{torch_word(self.half)}"

    @property
    def autocast(self) -> str:
        """The call that switches autocast on, for the device that the text names, or CUDA."""
        device = next((kind for kind in ("cpu", "mps") if kind in self.situation.said), "cuda")
        return f'torch.autocast("{device}", dtype={self.torch_half})'


@dataclass(frozen=True, kw_only=True)
class Cause:
    """name: in a few words; score: higher is likelier; because: the evidence seen, empty when it is only the usual cause."""

    name: str
    score: float
    why: str
    fix: str
    because: str = ""


@dataclass(frozen=True, kw_only=True)
class Explained:
    message: str
    causes: list[Cause]
    severity: Severity = Severity.ERROR

    def ranked(self) -> list[Cause]:
        return sorted(self.causes, key=lambda c: -c.score)


Family = Callable[[Seen], Explained]
FAMILIES: dict[str, tuple[str, Family]] = {}  # operator -> (code, function)


def family(code: str, *operators: str) -> Callable[[Family], Family]:
    """Registers a function for what refused; several operators may share it."""

    def register(function: Family) -> Family:
        for operator in operators:
            assert operator not in FAMILIES, operator
            FAMILIES[operator] = (code, function)
        return function

    return register
