"""Dynamic loss scaling for fp16: doubles the scale after many steps without overflow, halves it on overflow, reports one that collapses."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import RunError

INITIAL = 2.0**16
GROWTH_INTERVAL = 2000  # steps without overflow before the scale doubles; torch.amp.GradScaler's default
SMALLEST = 1.0  # below this the gradients themselves do not fit fp16


@dataclass
class LossScale:
    """`scale` multiplies the loss; `quiet` counts steps without overflow. Both are the whole state."""

    scale: float = INITIAL
    quiet: int = 0

    def update(self, *, overflow: bool, step: int) -> None:
        """Raises  RunError FP001 when the scale has fallen below 1: halving will not help any more."""
        if overflow:
            self.scale, self.quiet = self.scale / 2, 0
            if self.scale < SMALLEST:
                raise RunError(
                    f"step {step}: the loss scale collapsed to {self.scale:g}: gradients overflow fp16 at any scale",
                    code="FP001",
                    fix="precision.preset: bf16-mixed or bf16-lora where bf16 is native, else fp32",
                )
        else:
            self.quiet += 1
            if self.quiet >= GROWTH_INTERVAL:
                self.scale, self.quiet = self.scale * 2, 0
