"""The effective precision record: what each role of a run will really be, with the setting that decided it.

Each tool's settings are compiled into the same record (`effective.py`), so that a rule about precision is written once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .devices import Device
from .settings import Facts, Setting

ROLES = (
    "parameters", "trained", "gradients", "accumulation", "reduction", "optimizer", "compute", "loss scaling", "norms", "storage",
    "buffers", "exempt", "evaluation", "ema",
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
