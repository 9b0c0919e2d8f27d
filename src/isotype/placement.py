"""What became of one module of a model: the result of every function that places an op, and a line of the manifest. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """One module, and the op that runs there now.

    part    norm, layer, gated mlp, rotary, attention, head, lora, 4-bit, generate, experts, or foreign; of a denoiser also block,
            modulated norm, joint attention, activation
    module  its path in the model; "" is the model itself
    kind    its class; of a LoRA layer, the class of its base layer
    op      the op; None where the module runs its own code
    reason  without an op: why there is none. With one: what the probe found out, or ""
    """

    part: str
    module: str
    kind: str
    op: str | None
    reason: str = ""

    def __str__(self) -> str:
        said = f"{self.module or '(the model)'}: {self.op or 'left alone'}"
        return f"{said}: {self.reason}" if self.reason else said
