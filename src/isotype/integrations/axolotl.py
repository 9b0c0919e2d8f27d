"""Plugin for axolotl: `plugins: [isotype.integrations.axolotl.IsotypePlugin]`, and `isotype_precision: bf16-lora` beside it.

axolotl calls `post_trainer_create` when its trainer is complete. Nothing here imports axolotl until axolotl imports it.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from .attach import attach

try:
    from axolotl.integrations.base import BasePlugin
except ImportError:  # the interface alone, so that it can be tested where axolotl is not installed
    BasePlugin = object


class IsotypeArgs(BaseModel):
    """Keys of axolotl's configuration; without the first one, the precision follows `bf16` and `fp16` there."""

    isotype_precision: str = "auto"
    isotype_skip: dict[str, str] = {}


class IsotypePlugin(BasePlugin):
    """Attaches to axolotl's trainer when it is complete."""

    def get_input_args(self) -> str:
        return f"{__name__}.{IsotypeArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        given = IsotypeArgs(**{name: cfg[name] for name in IsotypeArgs.model_fields if cfg.get(name) is not None})
        attach(trainer, given.isotype_precision, skip=given.isotype_skip)
