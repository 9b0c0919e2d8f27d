"""`Observation` holds the result of one observation of a run. It contains the dtypes, the
violations, and a list of what could not be observed, each with the reason. This file also merges
observations into the record that `precision.json` stores. For each role (a field of the precision,
such as `compute`), the record has the last state that was observed. The record also lists every
place in the program that cannot be observed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import DtypeError
from ..finding import Finding, Place, Severity
from ..precision.precision import TASK_ROLES

# role -> the reason why a run may not observe this role
UNSEEN_REASONS = {
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
FIND_CAST_FIX = "find the cast: isotype doctor trace shows it"
DEFAULT_FIX = (
    "find the cast (isotype doctor trace shows it), or declare what you meant in the precision"
    " section"
)
TABLES_RULE = "buffers and tables are fp32, whatever precision.compute is"
# the usual cause of a wrong dtype of a parameter, which had the declared dtype at the start
CHANGED_CAUSE = (
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

    dtypes       role (a field of the precision) -> dtype -> number of parameters, gradients,
                 states, matrix products, calls of norms, or tensors in files
    unseen       role -> reason -> number of the tensors or calls of that role that could not be
                 observed
    total        role -> number of all tensors or calls of that role; it is counted independently,
                 and equals the sum of `dtypes` and `unseen`
    violations   the reports of dtypes that differ from the declared ones
    promotions   (module, dtype) -> number of module outputs that are wider than `compute`, which
                 the declared precision allows
    arithmetic   (operator in module, dtype) -> number of calls that compute with activations in
                 another dtype than `compute`, outside norms
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
    _reported: set[tuple[str, ...]] = field(default_factory=set)

    def raise_if_violated(self) -> None:
        """Raises DtypeError DT003 if there is a violation. The message names the tensor, the module
        and both dtypes.
        """
        if self.violations:
            worst = self.violations[0]
            if len(self.violations) > 1:
                more = f" (and {len(self.violations) - 1} more: see precision.json)"
            else:
                more = ""
            raise DtypeError(worst.render() + more, code=None)

    def count_dtype(
        self,
        role: str,
        tensor: str,
        dtype: str,
        declared: str,
        *,
        allowed: tuple[str, ...] = (),
        **details: Any,
    ) -> None:
        """Counts one tensor or call. Reports a violation if the dtype is neither the declared dtype
        nor in `allowed`. `role` is the field of the precision that declares the dtype.

        details  the arguments `cause`, `file` and `line` of `report`
        """
        self.dtypes[role][dtype] += 1
        self.total[role] += 1
        if dtype != declared and dtype not in allowed:
            self.report(
                role,
                f"{tensor} is {dtype}, declared {declared}",
                location=tensor,
                observed=dtype,
                declared=declared,
                **details,
            )

    def count_unseen(self, role: str, reason: str) -> None:
        """Counts one tensor or call that cannot be observed. `role` is the field of the precision
        that declares the dtype of this tensor or call.
        """
        self.unseen[role][reason] += 1
        self.total[role] += 1

    def report(
        self,
        role: str,
        message: str,
        *,
        location: str,
        observed: str,
        declared: str = "",
        rule: str = "",
        cause: str = "",
        fix: str = "",
        file: str | None = None,
        line: int | None = None,
    ) -> None:
        """Adds a violation, unless there is already one with the same message.

        role      the field of the precision that declares the dtype, such as `compute`
        location  the name of the module, tensor or function; the report shows it as `symbol`
        observed  the dtype that was found
        declared  the dtype that the precision declares
        rule      the broken rule, if it is another rule than the declared dtype
        cause     the cause; by default the usual cause for this role
        fix       the advice; by default to find the cast or to declare the dtype
        """
        if (role, message) in self._reported:
            return
        self._reported.add((role, message))
        self.violations.append(
            Finding(
                code="DT003",
                severity=Severity.ERROR,
                message=message,
                place=Place(symbol=location, file=file, line=line),
                declared=rule or f"precision.{role}: {declared}",
                observed=observed,
                cause=cause or _CAUSES.get(role, CHANGED_CAUSE),
                fix=fix or (FIND_CAST_FIX if rule or observed == "fp64" else DEFAULT_FIX),
            )
        )


# the phases that a preflight may rehearse
LONGEST = "a step on the longest rows"
EVALUATION = "an evaluation batch"
GENERATION = "a generation"


# computations of which no case is judged, in any step
_NEVER_JUDGED = (
    "weights that a parametrization or a layer's own packed form narrows in forward",
    "the dtype of a key-value cache",
    "a forward or a loss that the program computes beside the step's own",
    "promotions inside a norm and of the residual stream, which are counted and not judged",
    "hooks of the program in steps that are not observed",
)


def list_unwatched(record: Mapping[str, Any]) -> list[str]:
    """Describes which computations of the run were never observed."""
    steps = ", ".join(map(str, record.get("observed_at", []))) or "none"
    locations = record.get("places", {})
    watched = record.get("watched", [])
    descriptions = [
        (
            f"what is computed in other steps than these: {steps}; between all steps, a sample of"
            " weights, states and buffers is compared"
        ),
        (
            "in that comparison: elements outside the sample, and all but 16 tensors of each kind"
            " in a step"
        ),
        *(
            f"any {phase.partition(' ')[2]}"
            for phase in (LONGEST, EVALUATION)
            if phase not in watched
        ),
        *(["evaluations, but for one batch before step 1"] if EVALUATION in watched else []),
        (
            "generations, but for the first one or its first tokens"
            if GENERATION in watched or "generate" in record.get("total", {})
            else "any generation"
        ),
        (
            "values that leave PyTorch (NumPy, lists), and tensors kept beside parameters, buffers"
            " and the optimizer's states"
        ),
        *_NEVER_JUDGED,
    ]
    foreign = sorted(
        {location.split()[1] for location in locations if location.startswith("operator ")}
    )
    return descriptions + (
        [f"the inside of operators of other packages: {', '.join(foreign)}"] if foreign else []
    )


def merge_observation(record: Mapping[str, Any], observation: Observation) -> dict[str, Any]:
    """Returns the record with one more observation. The counts of the new observation replace
    earlier counts of the same roles.
    """
    is_step = bool(observation.total.get("compute"))

    def merge_counts(key: str, counts: Mapping[str, Counter[str]]) -> dict[str, Any]:
        new_counts = {role: dict(count) for role, count in counts.items() if count}
        earlier_counts = {
            role: value
            for role, value in record.get(key, {}).items()
            if role not in observation.total and role not in new_counts
        }
        return {**earlier_counts, **new_counts}

    promotions = [
        {"module": module, "dtype": dtype, "times": count}
        for (module, dtype), count in observation.promotions.most_common()
    ]
    arithmetic = [
        {"operator": operator, "dtype": dtype, "times": count}
        for (operator, dtype), count in observation.arithmetic.most_common()
    ]
    return {
        "observed": merge_counts("observed", observation.dtypes),
        "unseen": merge_counts("unseen", observation.unseen),
        "total": {**record.get("total", {}), **observation.total},
        "violations": [finding.to_dict() for finding in observation.violations],
        "promotions": promotions if is_step else record.get("promotions", []),
        "arithmetic": arithmetic if is_step else record.get("arithmetic", []),
        "observed_at": record.get("observed_at", []) + [observation.step] * is_step,
        "places": {**record.get("places", {}), **observation.unobserved},
        "watched": record.get("watched", []),
    }


def to_file_record(
    record: Mapping[str, Any],
    task_roles: Iterable[str] = (),
    *,
    compute: str,
    extra_reasons: Mapping[str, str] | None = None,
    extra_unwatched: Iterable[str] = (),
) -> dict[str, Any]:
    """Converts the record to the content of `precision.json`. There, `unobserved` lists the roles
    and places that were not observed, each with the reason.

    compute          the declared dtype of matrix products; for fp16 the file says that zeros are
                     not counted
    extra_reasons    further roles that were not observed -> the reason
    extra_unwatched  descriptions of further computations that are not watched
    """
    reasons = UNSEEN_REASONS | dict.fromkeys(task_roles, UNSEEN_OF_TASK) | dict(extra_reasons or {})
    roles = {
        role: reason for role, reason in reasons.items() if role not in record.get("observed", {})
    }
    zeros = {_FP16_ZEROS: ROUNDED_TO_ZERO} if compute == "fp16" else {}
    counted = {key: value for key, value in record.items() if key != "places"}
    unobserved = {**roles, **zeros, **record.get("places", {})}
    return {
        **counted,
        "unobserved": unobserved,
        "not watched": [*list_unwatched(record), *extra_unwatched],
    }


def from_file_record(written: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Reads the record of an earlier part of a run, up to `step`, from its file. A damaged file
    raises KeyError, TypeError or ValueError.
    """
    counts = {
        key: {str(role): dict(count) for role, count in written.get(key, {}).items()}
        for key in ("observed", "unseen")
    }
    return {
        **counts,
        "total": {str(role): int(count) for role, count in written.get("total", {}).items()},
        "violations": [],
        "promotions": list(written["promotions"]),
        "arithmetic": list(written.get("arithmetic", [])),
        "observed_at": [int(at) for at in written["observed_at"] if int(at) <= step],
        "watched": [str(phase) for phase in written.get("watched", [])],
        "places": {
            str(location): str(reason)
            for location, reason in written.get("unobserved", {}).items()
            if location not in (*UNSEEN_REASONS, *TASK_ROLES)
        },
    }
