"""In what the precision of two runs differs, by their `precision.json`: what each declared, and the dtypes observed in each role."""

from __future__ import annotations

from typing import Any

from .record import dict_of

BRANCH = "lora_branch"  # a role of `declared` only where it has a dtype of its own


def precision_differences(one: dict[str, Any], two: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """`declared` and `observed`, each role -> its values in both runs, where they differ.

    A declared value is a text; an observed one the sorted dtypes, None where the role was not observed. How many tensors had a dtype
    depends on steps and lengths, and is not compared.
    """
    return {of: _differences(of, one, two) for of in ("declared", "observed")}


def _differences(of: str, one: dict[str, Any], two: dict[str, Any]) -> dict[str, list[Any]]:
    """Role -> its value in both runs, where they differ.

    of  `declared`, each a text, or `observed`, each the sorted dtypes; None where the role was not observed
    """
    parts = [dict_of(record.get(of)) for record in (one, two)]
    found = {}
    for role in dict.fromkeys([*parts[0], *parts[1]]):
        values = [_declared(part, role) if of == "declared" else sorted(dict_of(part.get(role))) or None for part in parts]
        if values[0] != values[1]:
            found[role] = values
    return found


def _declared(roles: dict[str, Any], role: str) -> str | None:
    """What a run declares for a role. Without a declaration of its own, a LoRA branch is computed in the dtype of `compute`."""
    value = dict_of(roles.get(role)).get("value")
    if value is None and role == BRANCH:
        value = dict_of(roles.get("compute")).get("value")
    return None if value is None else str(value)
