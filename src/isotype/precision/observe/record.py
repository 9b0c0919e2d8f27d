"""The part of `precision.json` about observations: the last observed state of each role, and every place that cannot be observed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..precision import TASK_ROLES
from .observation import UNSEEN, Observation

UNSEEN_OF_TASK = "nothing of it ran in this process: what it makes was found in the cache"
_FP16_ZEROS = "values that fp16 rounds to zero"
ROUNDED_TO_ZERO = "they are not counted: a product is rounded inside its kernel, and a zero does not tell what it was"


def noted(before: Mapping[str, Any], seen: Observation) -> dict[str, Any]:
    """The record after one more observation. For each role that it counted, its counts replace those before."""
    new = seen.as_json()
    stepped = bool(new["total"].get("compute"))

    def newest(key: str, roles: Mapping[str, Any]) -> dict[str, Any]:
        unchanged = {role: value for role, value in before.get(key, {}).items() if role not in new["total"] and role not in roles}
        return {**unchanged, **roles}

    return {
        "observed": newest("observed", new["dtypes"]),
        "unseen": newest("unseen", new["unseen"]),
        "total": {**before.get("total", {}), **new["total"]},
        "violations": new["violations"],
        "promotions": new["promotions"] if stepped else before.get("promotions", []),
        "wide_arithmetic": new["wide_arithmetic"] if stepped else before.get("wide_arithmetic", []),
        "observed_at": before.get("observed_at", []) + [seen.step] * stepped,
        "places": {**before.get("places", {}), **new["unobserved"]},
    }


def as_written(
    record: Mapping[str, Any], task_roles: Iterable[str] = (), *, compute: str, more: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The record in the form of the file: `unobserved` names the roles and places that were not observed, each with the reason.

    compute  the declared dtype of products; of fp16 the record says what is not counted
    more     reasons of further roles, for those that were not observed
    """
    reasons = UNSEEN | dict.fromkeys(task_roles, UNSEEN_OF_TASK) | dict(more or {})
    roles = {role: why for role, why in reasons.items() if role not in record.get("observed", {})}
    zeros = {_FP16_ZEROS: ROUNDED_TO_ZERO} if compute == "fp16" else {}
    counted = {key: value for key, value in record.items() if key != "places"}
    return {**counted, "unobserved": {**roles, **zeros, **record.get("places", {})}}


def as_read(said: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The record of an earlier part of a run, up to `step`. A damaged file raises KeyError, TypeError or ValueError."""
    counts = {key: {str(role): dict(count) for role, count in said.get(key, {}).items()} for key in ("observed", "unseen")}
    return {
        **counts,
        "total": {str(role): int(n) for role, n in said.get("total", {}).items()},
        "violations": [],
        "promotions": list(said["promotions"]),
        "wide_arithmetic": list(said.get("wide_arithmetic", [])),
        "observed_at": [int(at) for at in said["observed_at"] if int(at) <= step],
        "places": {str(place): str(why) for place, why in said.get("unobserved", {}).items() if place not in (*UNSEEN, *TASK_ROLES)},
    }
