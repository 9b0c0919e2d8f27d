"""`model.rope_parameters`: the rotary embedding of a base, changed before it is loaded, by transformers' own names and rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEY = "model.rope_parameters"


def change_rope(config: PretrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Changes a configuration, and returns the settings that changed: all rotary parameters, and the positions that a factor adds.

    Raises  UsageError for a name or a type that transformers does not know, a model without rotary parameters, or with several
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

    own = getattr(config, "rope_parameters", None)
    if not isinstance(own, dict) or not own or config.get_text_config() is not config:
        raise UsageError(f"{KEY}: {config.model_type} has no rotary parameters of its own", fix=f"remove {KEY}")
    if any(isinstance(part, dict) for part in own.values()):
        raise UsageError(f"{KEY}: {config.model_type} has several, {', '.join(own)}", fix="change the config.json in the model's folder")
    if unknown := sorted(given.keys() - RopeParameters.__annotations__.keys() - own.keys()):
        raise UsageError(f"{KEY}: {unknown[0]}: unknown", fix=f"one of {', '.join(RopeParameters.__annotations__)}")
    types = ("default", *ROPE_INIT_FUNCTIONS)
    if (asked := given.get("rope_type", own.get("rope_type", "default"))) not in types:
        raise UsageError(f"{KEY}: rope_type: {asked}: unknown", fix=f"one of {', '.join(types)}")
    if asked == own.get("rope_type", "default") and all(own.get(key) == value for key, value in given.items()):
        raise UsageError(f"{KEY}: has no effect: the model has these already", fix=f"remove {KEY}")
    positions = int(given.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", 0) or 0)
    config.rope_parameters = {**own, **given}
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{KEY}: {str(error).strip(chr(34)).splitlines()[0]}") from error
    changed: dict[str, Any] = {"rope_parameters": config.rope_parameters}
    if positions and given.get("factor"):
        changed["max_position_embeddings"] = max(config.max_position_embeddings, int(positions * float(given["factor"])))
        config.max_position_embeddings = changed["max_position_embeddings"]
    return changed
