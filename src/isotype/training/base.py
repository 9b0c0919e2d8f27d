"""Computes fingerprints of the frozen weights and of the model's own settings, because the result
of a run depends on both. With these fingerprints, a resumed run can find out whether the base model
has changed. A run cannot be resumed with another base model.

The fingerprints are stored in `plan.json`. Weights that are packed, or that `adapter.start` has
changed, are left out, because their bits may differ between devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..config.load import LoadedConfig
from ..config.schema import AdapterSection
from ..distributed.agree import SAMPLED_ELEMENTS, version_lines
from ..dtypes import to_torch
from ..errors import UsageError
from ..model.initialisation import SUBTRACTED_STARTS
from ..precision.apply import declared_dtype, inner_model, is_quantised
from ..precision.precision import Precision

BASE = "base"  # the key in plan.json, and the kind of a change
# the keys that a library, an installation or a run writes into the settings of a loaded model
_INSTALLATION_KEYS = (
    "transformers_version", "dtype", "torch_dtype", "use_cache", "quantization_config", "name_or_path",
)  # fmt: skip


def fingerprint_of_base(model: nn.Module, precision: Precision, adapter: AdapterSection) -> str:
    """Returns a hash of some elements of every frozen weight. The elements are converted to the
    dtype to which the run casts the weight, so that the hash is the same before and after the cast.
    Returns "" if `adapter.start` changes the weights.
    """
    if adapter.start in SUBTRACTED_STARTS:
        return ""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or is_quantised(parameter):
            continue
        flat = parameter.detach().flatten()
        values = flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)][:SAMPLED_ELEMENTS].cpu()
        if parameter.is_floating_point():
            values = values.to(to_torch(declared_dtype(model, name, parameter, precision)))
        digest.update(f"{name} {values.dtype} {list(parameter.shape)}".encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def model_settings(model: nn.Module) -> dict[str, Any]:
    """Returns the model's `config.json` as its library read it. Nested keys are joined, for example
    `rope_parameters.rope_theta`.
    """
    config: Any = getattr(inner_model(model), "config", None)
    if config is None:
        return {}
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return dict(_flatten_settings(json.loads(json.dumps(values, default=str)), ""))


def setting_lines(settings: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}: {value!r}" for key, value in sorted(settings.items()))


def describe_base(fingerprint: str, model: nn.Module, precision: Precision) -> dict[str, Any]:
    """Returns the entry of plan.json that describes a base model."""
    return {
        "weights": fingerprint,
        "precision": precision.base,
        "libraries": version_lines("transformers", "diffusers").splitlines(),
        "settings": model_settings(model),
    }


def compare_bases(recorded: Any, current: dict[str, Any], loaded: LoadedConfig) -> str:
    """Returns a text that says how the base model differs from the one at the run's last start.
    Returns "" if the base model has not changed.

    recorded  the entry of plan.json; if a run has no such entry, nothing is compared
    Raises    UsageError if the base models differ, unless the user accepts changes. If the versions
              of the libraries differ too, there is no error and the difference is only described,
              because another version may read the same file in another way
    """
    if not isinstance(recorded, dict) or not isinstance(recorded.get("settings"), dict):
        return ""
    differences: list[str] = []
    settings = current["settings"]
    for key, value in recorded["settings"].items():
        if key in settings and settings[key] != value:
            differences.append(f"{key}: {value!r} -> {settings[key]!r}")
    is_comparable = recorded.get("precision") == current["precision"]
    fingerprint = recorded.get("weights")
    if is_comparable and fingerprint and fingerprint != current["weights"]:
        differences.append("its weights are others")
    if not differences:
        return ""
    message = f"the base model is not that of the run's last start ({'; '.join(differences[:5])})"
    if recorded.get("libraries") == current["libraries"] and not loaded.consent:
        raise UsageError(
            f"resuming would be another run: {message}",
            fix=(
                "give the model as it was (model.revision, or its folder), start a new run, or"
                " accept it: --yes (from Python: accept_changes=True)"
            ),
        )
    return message


def _flatten_settings(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        if not key.startswith("_") and key not in _INSTALLATION_KEYS:
            yield from _flatten_settings(value, f"{prefix}.{key}" if prefix else key)
