"""A user's own code in a run: callbacks, and an objective in place of the task's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from ..config.load import LoadedConfig
from ..errors import UsageError
from ..runs.folder import RunFolder
from .callbacks import Callback
from .console import RunConsole
from .resume_record import Changed

Objective: TypeAlias = Callable[[nn.Module, Any], Tensor]
OBJECTIVE = "objective"  # in plan.json


@dataclass(frozen=True)
class Own:
    """A user's own code in a run."""

    callbacks: Sequence[Callback] = ()
    objective: Objective | None = None

    @property
    def objective_name(self) -> str | None:
        """Module and name of the objective; None where the task's own is used."""
        given = self.objective
        return None if given is None else f"{given.__module__}.{getattr(given, '__qualname__', type(given).__qualname__)}"


def compare_objectives(loaded: LoadedConfig, own: Own, folder: RunFolder, console: RunConsole) -> list[Changed]:
    """The change of an objective, printed too; refuses another kind of loss. What an objective computes is not compared, only its name."""
    try:
        before = folder.read_json("plan.json")[OBJECTIVE]
    except (OSError, ValueError, LookupError, TypeError):  # a run from before this was recorded
        return []
    now = own.objective_name
    if before == now:
        return []
    if (before is None or now is None) and not loaded.consent:
        was, become = (f"an objective of your own ({name})" if name else "the loss of the task" for name in (before, now))
        raise UsageError(
            f"resuming would be another run: it was trained with {was}, and would go on with {become}",
            fix="isotype.train(resume=..., objective=...) with the same function"
            if before
            else "leave the objective out, or start a new run",
        )
    line = f"objective: {before} -> {now}"
    console.say(f"changed   {line}")
    return [Changed("objective", line)]
