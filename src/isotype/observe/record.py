"""`Observation`: the dtypes found in one observation of a run, the ones that could not be observed
and why, and the violations; and the part of `precision.json` that is made of them: the last
observed state of each role, and every place that cannot be observed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import DtypeError
from ..finding import Finding, Place, Severity
from ..precision.precision import TASK_ROLES

# role -> why no run of one process observes it
UNSEEN = {
    "norms": (
        "inside one kernel, Isotype's rms_norm (fp32 by its contract) or PyTorch's layer_norm; what"
        " leaves a norm is under compute"
    ),
    "reduce": "one process: nothing was summed across ranks",
}
UNSEEN_OF_TASK = "nothing of it ran in this process: what it makes was found in the cache"
_FP16_ZEROS = "values that fp16 rounds to zero"
ROUNDED_TO_ZERO = (
    "they are not counted: a product is rounded inside its kernel, and a zero does not tell what"
    " it was"
)
FIND = "find the cast: isotype doctor trace shows it"
FIX = (
    "find the cast (isotype doctor trace shows it), or declare what you meant in the precision"
    " section"
)
TABLES = "buffers and tables are fp32, whatever precision.compute is"
# role -> what gives such a thing another dtype; parameters of any other role had the declared one
# at first
CHANGED = (
    "something changed it after the precision was put on the model: a .to(), a hook, a callback or"
    " a library"
)
_CAUSES = {
    "compute": (
        "its input has that dtype, or an autocast of the model's own code, a hook or a library gave"
        " it that dtype"
    ),
    "grads": "a hook, an autograd function or a library gave it that dtype",
    "optimizer": "the optimizer makes its states in that dtype, or something cast them afterwards",
    "loss": "the loss is computed, or handed over, in that dtype",
    "reduce": "they were sent in that dtype",
    "save": "the file was written so",
}
_CAUSES["generate"] = _CAUSES["compute"]


@dataclass
class Observation:
    """The result of observing one step or one set of files.

    dtypes       role -> dtype -> how many: parameters, gradients, states, products, norm calls,
                 tensors of files
    unseen       role -> reason -> how many things of that role could not be observed
    total        role -> how many there are, counted independently; equal to the sum of `dtypes` and
                 `unseen`
    violations   findings where the dtype differs from the declared one
    promotions   module outputs wider than `compute` that the declaration allows: (module, dtype),
                 counted
    arithmetic   arithmetic on activations in another dtype than `compute`, outside norms: (operator
                 in module, dtype), counted
    unobserved   place -> why the arithmetic there cannot be observed
    """

    step: int
    dtypes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    unseen: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    total: Counter[str] = field(default_factory=Counter)
    violations: list[Finding] = field(default_factory=list)
    promotions: Counter[tuple[str, str]] = field(default_factory=Counter)
    arithmetic: Counter[tuple[str, str]] = field(default_factory=Counter)
    unobserved: dict[str, str] = field(default_factory=dict)
    _said: set[tuple[str, ...]] = field(default_factory=set)

    def raise_if_violated(self) -> None:
        """Raises  DtypeError DT003 naming tensor, module and both dtypes."""
        if self.violations:
            worst = self.violations[0]
            if len(self.violations) > 1:
                more = f" (and {len(self.violations) - 1} more: see precision.json)"
            else:
                more = ""
            raise DtypeError(worst.render() + more, code=None)

    def note(
        self,
        role: str,
        tensor: str,
        dtype: str,
        declared: str,
        *,
        allowed: tuple[str, ...] = (),
        **why: Any,
    ) -> None:
        """Counts one thing of a role, and reports a violation if its dtype is neither the declared
        one nor in `allowed`.

        why  `report`'s cause, file and line
        """
        self.dtypes[role][dtype] += 1
        self.total[role] += 1
        if dtype != declared and dtype not in allowed:
            self.report(
                role,
                f"{tensor} is {dtype}, declared {declared}",
                symbol=tensor,
                observed=dtype,
                declared=declared,
                **why,
            )

    def unseen_thing(self, role: str, reason: str) -> None:
        """Counts one thing of a role that cannot be observed."""
        self.unseen[role][reason] += 1
        self.total[role] += 1

    def report(
        self,
        role: str,
        message: str,
        *,
        symbol: str,
        observed: str,
        declared: str = "",
        rule: str = "",
        cause: str = "",
        fix: str = "",
        file: str | None = None,
        line: int | None = None,
    ) -> None:
        """Adds a violation, unless one with the same message exists.

        declared  the role's dtype
        rule      what is broken instead, where that is not the dtype of a role
        cause     by default what gives things of this role another dtype
        fix       by default to find the cast, and to declare the dtype where a role may have it
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
                fix=fix or (FIND if rule or observed == "fp64" else FIX),
            )
        )


# what a preflight rehearses
LONGEST = "a step on the longest rows"
EVALUATION = "an evaluation batch"
GENERATION = "a generation"


def not_watched(record: Mapping[str, Any]) -> list[str]:
    """What no observation of the run looked at, in words."""
    steps = ", ".join(map(str, record.get("observed_at", []))) or "none"
    places = record.get("places", {})
    watched = record.get("watched", [])
    said = [
        (
            f"what is computed in other steps than these: {steps}; between all steps, a sample of"
            " weights, states and buffers is compared"
        ),
        (
            "in that comparison: elements outside the sample, and all but 16 tensors of each kind"
            " in a step"
        ),
        *(f"any {what.partition(' ')[2]}" for what in (LONGEST, EVALUATION) if what not in watched),
        *(["evaluations, but for one batch before step 1"] if EVALUATION in watched else []),
        (
            "generations, but for the first"
            if GENERATION in watched or "generate" in record.get("total", {})
            else "any generation"
        ),
        (
            "values that leave PyTorch (NumPy, lists), and tensors kept beside parameters, buffers"
            " and the optimizer's states"
        ),
    ]
    foreign = sorted({place.split()[1] for place in places if place.startswith("operator ")})
    return said + (
        [f"the inside of operators of other packages: {', '.join(foreign)}"] if foreign else []
    )


def noted(before: Mapping[str, Any], seen: Observation) -> dict[str, Any]:
    """The record after one more observation. For each role that it counted, its counts replace
    those before.
    """
    stepped = bool(seen.total.get("compute"))

    def newest(key: str, counts: Mapping[str, Counter[str]]) -> dict[str, Any]:
        counted = {role: dict(count) for role, count in counts.items() if count}
        unchanged = {
            role: value
            for role, value in before.get(key, {}).items()
            if role not in seen.total and role not in counted
        }
        return {**unchanged, **counted}

    promotions = [
        {"module": module, "dtype": dtype, "times": n}
        for (module, dtype), n in seen.promotions.most_common()
    ]
    arithmetic = [
        {"operator": where, "dtype": dtype, "times": n}
        for (where, dtype), n in seen.arithmetic.most_common()
    ]
    return {
        "observed": newest("observed", seen.dtypes),
        "unseen": newest("unseen", seen.unseen),
        "total": {**before.get("total", {}), **seen.total},
        "violations": [finding.to_dict() for finding in seen.violations],
        "promotions": promotions if stepped else before.get("promotions", []),
        "arithmetic": arithmetic if stepped else before.get("arithmetic", []),
        "observed_at": before.get("observed_at", []) + [seen.step] * stepped,
        "places": {**before.get("places", {}), **seen.unobserved},
        "watched": before.get("watched", []),
    }


def as_written(
    record: Mapping[str, Any],
    task_roles: Iterable[str] = (),
    *,
    compute: str,
    more: Mapping[str, str] | None = None,
    beside: Iterable[str] = (),
) -> dict[str, Any]:
    """The record in the form of the file: `unobserved` names the roles and places that were not
    observed, each with the reason.

    compute  the declared dtype of products; of fp16 the record says what is not counted
    more     reasons of further roles, for those that were not observed
    beside   what else is not watched
    """
    reasons = UNSEEN | dict.fromkeys(task_roles, UNSEEN_OF_TASK) | dict(more or {})
    roles = {role: why for role, why in reasons.items() if role not in record.get("observed", {})}
    zeros = {_FP16_ZEROS: ROUNDED_TO_ZERO} if compute == "fp16" else {}
    counted = {key: value for key, value in record.items() if key != "places"}
    unobserved = {**roles, **zeros, **record.get("places", {})}
    return {**counted, "unobserved": unobserved, "not watched": [*not_watched(record), *beside]}


def as_read(said: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The record of an earlier part of a run, up to `step`. A damaged file raises KeyError,
    TypeError or ValueError.
    """
    counts = {
        key: {str(role): dict(count) for role, count in said.get(key, {}).items()}
        for key in ("observed", "unseen")
    }
    return {
        **counts,
        "total": {str(role): int(n) for role, n in said.get("total", {}).items()},
        "violations": [],
        "promotions": list(said["promotions"]),
        "arithmetic": list(said.get("arithmetic", [])),
        "observed_at": [int(at) for at in said["observed_at"] if int(at) <= step],
        "watched": [str(what) for what in said.get("watched", [])],
        "places": {
            str(place): str(why)
            for place, why in said.get("unobserved", {}).items()
            if place not in (*UNSEEN, *TASK_ROLES)
        },
    }
