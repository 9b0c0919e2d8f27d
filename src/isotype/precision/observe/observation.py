"""`Observation`: the dtypes found in one observation of a run, the ones that could not be observed and why, and the violations."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from ...errors import DtypeError
from ...finding import Finding, Place, Severity

# role -> why no run of one process observes it
UNSEEN = {
    "norms": "inside one kernel, Isotype's rms_norm (fp32 by its contract) or PyTorch's layer_norm; what leaves a norm is under compute",
    "reduce": "one process: nothing was summed across ranks",
}
FIX = "find the cast (isotype doctor trace shows it), or declare what you meant in the precision section"
TABLES = "buffers and tables are fp32, whatever precision.compute is"
# role -> what gives such a thing another dtype; parameters of any other role had the declared one at first
CHANGED = "something changed it after the precision was put on the model: a .to(), a hook, a callback or a library"
_CAUSES = {
    "compute": "its input has that dtype, or an autocast of the model's own code, a hook or a library gave it that dtype",
    "grads": "a hook, an autograd function or a library gave it that dtype",
    "optimizer": "the optimizer makes its states in that dtype, or something cast them afterwards",
    "averages": "something cast it after it was made",
    "loss": "the loss is computed, or handed over, in that dtype",
    "reduce": "they were sent in that dtype",
    "save": "the file was written so",
}
_CAUSES["generate"] = _CAUSES["compute"]


@dataclass
class Observation:
    """The result of observing one step or one set of files.

    dtypes       role -> dtype -> how many: parameters, gradients, states, products, norm calls, tensors of files
    unseen       role -> reason -> how many things of that role could not be observed
    total        role -> how many there are, counted independently; equal to the sum of `dtypes` and `unseen`
    violations   findings where the dtype differs from the declared one
    promotions   module outputs wider than `compute` that the declaration allows: (module, dtype), counted
    widened      arithmetic on activations that is wider than `compute`, outside norms: (operator in module, dtype), counted
    unobserved   place -> why the arithmetic there cannot be observed
    """

    step: int
    dtypes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    unseen: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    total: Counter[str] = field(default_factory=Counter)
    violations: list[Finding] = field(default_factory=list)
    promotions: Counter[tuple[str, str]] = field(default_factory=Counter)
    widened: Counter[tuple[str, str]] = field(default_factory=Counter)
    unobserved: dict[str, str] = field(default_factory=dict)
    _said: set[tuple[str, ...]] = field(default_factory=set)

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "dtypes": {role: dict(count) for role, count in self.dtypes.items() if count},
            "unseen": {role: dict(count) for role, count in self.unseen.items() if count},
            "total": dict(self.total),
            "promotions": [{"module": module, "dtype": dtype, "times": n} for (module, dtype), n in self.promotions.most_common()],
            "wide_arithmetic": [{"operator": where, "dtype": dtype, "times": n} for (where, dtype), n in self.widened.most_common()],
            "violations": [f.as_json() for f in self.violations],
            "unobserved": dict(self.unobserved),
        }

    def raise_if_violated(self) -> None:
        """Raises  DtypeError DT003 naming tensor, module and both dtypes."""
        if self.violations:
            worst = self.violations[0]
            more = f" (and {len(self.violations) - 1} more: see precision.json)" if len(self.violations) > 1 else ""
            raise DtypeError(worst.render() + more, code=None)

    def note(self, role: str, tensor: str, dtype: str, declared: str, *, allowed: tuple[str, ...] = (), **why: Any) -> None:
        """Counts one thing of a role, and reports a violation if its dtype is neither the declared one nor in `allowed`.

        why  `report`'s cause, file and line
        """
        self.dtypes[role][dtype] += 1
        self.total[role] += 1
        if dtype != declared and dtype not in allowed:
            self.report(role, f"{tensor} is {dtype}, declared {declared}", symbol=tensor, observed=dtype, declared=declared, **why)

    def unseen_thing(self, role: str, reason: str) -> None:
        """Counts one thing of a role that cannot be observed."""
        self.unseen[role][reason] += 1
        self.total[role] += 1

    def report(
        self, role: str, message: str, *, symbol: str, observed: str, declared: str = "", rule: str = "", cause: str = "", fix: str = FIX,
        file: str | None = None, line: int | None = None,
    ) -> None:  # fmt: skip
        """Adds a violation, unless one with the same message exists.

        declared  the role's dtype
        rule      what is broken instead, where that is not the dtype of a role
        cause     by default what gives things of this role another dtype
        """
        if (role, message) in self._said:
            return
        self._said.add((role, message))
        self.violations.append(
            Finding(
                code="DT003",
                severity=Severity.ERROR,
                message=message,
                place=Place(symbol=symbol, file=file, line=line),
                declared=rule or f"precision.{role}: {declared}",
                observed=observed,
                cause=cause or _CAUSES.get(role, CHANGED),
                fix=fix,
            )
        )
