"""What `attach` changed in a trainer: printed once, and used by `detach`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..optimize import Manifest
from ..precision.precision import Precision
from ..precision.resolve import Resolved
from .owners import Claim
from .pure import PureWeights

# models beside the trained one that a trainer runs without gradients: TRL's reference and teacher
READ_ONLY = ("ref_model", "teacher_model")


@dataclass
class Attachment:
    """`print(attachment)` shows who claimed the precision, what was replaced, and what was left alone.

    claims     every owner of precision with its value and what became of it
    manifests  model ("model", "ref_model", ...) -> what `optimize` replaced there
    notes further lines to print
    undo functions that undo the changes, called in reverse order
    pure       where low-precision weights are trained: what holds their gradients
    """

    trainer: Any
    resolved: Resolved
    claims: list[Claim]
    manifests: dict[str, Manifest] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    undo: list[Any] = field(default_factory=list)
    pure: PureWeights | None = None

    @property
    def precision(self) -> Precision:
        return self.resolved.precision

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """A parameter's summed gradient, wherever it is."""
        return parameter.grad if self.pure is None else self.pure.accumulator.gradient(parameter)

    @property
    def manifest(self) -> Manifest:
        """Of the trained model."""
        return self.manifests["model"]

    def lines(self) -> list[str]:
        trainer = type(self.trainer).__name__
        shown = [f"isotype attached to {trainer}: precision {self.resolved.text} ({self.resolved.why_preset})"]
        shown += [f"  claimed by  {claim}" for claim in self.claims]
        for name, manifest in self.manifests.items():
            shown += [f"  {name}: {line}" if i == 0 else f"    {line}" for i, line in enumerate(str(manifest).splitlines())]
        return [*shown, *(f"  note        {note}" for note in self.notes)]

    def to_dict(self) -> dict[str, Any]:
        """For the record and --json."""
        return {
            "trainer": f"{type(self.trainer).__module__}.{type(self.trainer).__name__}",
            "precision": self.resolved.text,
            "declared": self.resolved.as_json(),
            "claims": [{"owner": c.owner, "value": c.value, "now": c.now} for c in self.claims],
            "models": {name: manifest.to_dict() for name, manifest in self.manifests.items()},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())


def models_of(trainer: Any) -> dict[str, nn.Module]:
    """The trained model, and those that the trainer only reads."""
    named = {"model": trainer.model, **{name: getattr(trainer, name, None) for name in READ_ONLY}}
    return {name: model for name, model in named.items() if isinstance(model, nn.Module)}
