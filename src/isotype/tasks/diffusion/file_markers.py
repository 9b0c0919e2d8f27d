"""Reads the markers of a checkpoint that is a single file. Markers are tensors and metadata with
which ComfyUI, A1111, Forge and kohya's tools record how the checkpoint was trained.

The settings next to such a file, or on the hub, are the usual settings of its model family. If this
checkpoint was trained in another way, for example with v-prediction, only the markers show it.

Sources  ComfyUI `supported_models.py` and its node that saves a checkpoint (`v_pred`, `ztsnr`,
         `edm_...`, `modelspec.predict_key`); Stability's ModelSpec 1.0; kohya's `ss_...`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ...errors import UsageError

V_TENSOR, ZERO_SNR_TENSOR = "v_pred", "ztsnr"
# tensors of a model that was trained with EDM
EDM_TENSORS = ("edm_mean", "edm_std", "edm_vpred.sigma_max", "edm_vpred.sigma_min")
PREDICTION_KEYS = ("modelspec.prediction_type", "modelspec.predict_key", "prediction_type")
SHIFT_KEYS = ("modelspec.shift", "ss_discrete_flow_shift", "discrete_flow_shift", "flow_shift")
# spelling in a file -> spelling in a scheduler's configuration
PREDICTIONS = {
    "epsilon": "epsilon",
    "eps": "epsilon",
    "v": "v_prediction",
    "vpred": "v_prediction",
    "v_pred": "v_prediction",
    "v_prediction": "v_prediction",
    "velocity": "v_prediction",
    "flow": "flow_prediction",
    "rf": "flow_prediction",
    "flow_matching": "flow_prediction",
    "flow_prediction": "flow_prediction",
}
# values of `modelspec.architecture` that decide the prediction type
ARCHITECTURES = {
    "stable-diffusion-v2-512": "epsilon",
    "stable-diffusion-v2-768-v": "v_prediction",
}
TRUE_VALUES = ("true", "1")
# values that mean that the model was trained on all steps of the schedule
WHOLE_SCHEDULE_VALUES = ("", "0,1000", "0,999")
# values that mean that the output of CLIP's last layer was used
LAST_LAYER_VALUES = ("", "0", "1")


@dataclass(frozen=True)
class FileMarkers:
    """The markers of a checkpoint that is a single file.

    prediction   marker -> `epsilon`, `v_prediction` or `flow_prediction`
    zero_snr     the markers that say that the last step of the schedule is pure noise
    shift        marker -> the shift of flow matching
    notes        sentences about markers that have no automatic effect on training
    """

    prediction: Mapping[str, str] = field(default_factory=dict)
    zero_snr: tuple[str, ...] = ()
    shift: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_markers(file: Path) -> FileMarkers:
    """Reads the markers of a file. Raises UsageError if the markers name a way of training that is
    not supported, or if a value cannot be read.
    """
    with safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
        metadata = {key: str(text).strip() for key, text in (opened.metadata() or {}).items()}
    if edm_tensors := [name for name in EDM_TENSORS if name in names]:
        raise UsageError(
            f"model.name: {file}: its tensor {edm_tensors[0]} says that it was trained with EDM's"
            " preconditioning, which is not offered",
            fix="a checkpoint of epsilon or v",
        )
    return FileMarkers(
        _predictions(file, names, metadata),
        _zero_snr(names, metadata),
        _shifts(file, metadata),
        _notes(metadata),
    )


def _predictions(file: Path, names: set[str], metadata: Mapping[str, str]) -> dict[str, str]:
    predictions = {}
    if V_TENSOR in names:
        predictions[f"tensor {V_TENSOR}"] = "v_prediction"
    for key in PREDICTION_KEYS:
        if text := metadata.get(key):
            spelling = text.lower().replace("-", "_").replace(" ", "_")
            if spelling not in PREDICTIONS:
                raise UsageError(
                    f"model.name: {file}: its metadata says {key}: {text}, which is not offered",
                    fix=f"a checkpoint of {', '.join(sorted(set(PREDICTIONS.values())))}",
                )
            predictions[key] = PREDICTIONS[spelling]
    if text := metadata.get("ss_v_parameterization"):
        is_v = text.lower() in TRUE_VALUES
        predictions["ss_v_parameterization"] = "v_prediction" if is_v else "epsilon"
    architecture = metadata.get("modelspec.architecture", "").partition("/")[0]
    if architecture in ARCHITECTURES:
        predictions["modelspec.architecture"] = ARCHITECTURES[architecture]
    return predictions


def _zero_snr(names: set[str], metadata: Mapping[str, str]) -> tuple[str, ...]:
    markers = [f"tensor {ZERO_SNR_TENSOR}"] if ZERO_SNR_TENSOR in names else []
    if metadata.get("ss_zero_terminal_snr", "").lower() in TRUE_VALUES:
        markers.append("ss_zero_terminal_snr")
    return tuple(markers)


def _shifts(file: Path, metadata: Mapping[str, str]) -> dict[str, float]:
    shifts = {}
    for key in SHIFT_KEYS:
        text = metadata.get(key, "")
        if text.lower() in ("", "none"):
            continue
        try:
            shifts[key] = float(text)
        except ValueError:
            raise UsageError(
                f"model.name: {file}: its metadata says {key}: {text}, which is no number",
                fix="the file without that key",
            ) from None
    return shifts


def _notes(metadata: Mapping[str, str]) -> tuple[str, ...]:
    notes = []
    steps = metadata.get("modelspec.timestep_range", "").replace(" ", "")
    if steps not in WHOLE_SCHEDULE_VALUES:
        notes.append(
            f"modelspec.timestep_range: {steps}: diffusion.least_noise and most_noise train in a"
            " range"
        )
    layer = metadata.get("modelspec.encoder_layer", "")
    if layer not in LAST_LAYER_VALUES:
        notes.append(
            f"modelspec.encoder_layer: {layer}: captions are encoded as diffusers' pipeline does,"
            " whatever the file says"
        )
    return tuple(notes)


def scheduler_changes(
    markers: FileMarkers, scheduler: Mapping[str, Any], file: Path, *, objective: str, shift: Any
) -> dict[str, Any]:
    """Returns the keys of the scheduler's configuration that the file's markers change, with their
    new values.

    objective, shift  the settings of `diffusion`. Unless they are `auto`, they take precedence over
                      the markers
    Raises            UsageError if they are `auto` and the markers contradict each other or the
                      model family
    """
    if uses_flow_matching(scheduler):
        _refuse_other_shift(markers, scheduler, file, shift=shift)
        return {}
    requested = {"epsilon": "epsilon", "v": "v_prediction"}.get(objective)
    kinds = {requested} if requested else set(markers.prediction.values())
    if len(kinds) > 1 or "flow_prediction" in kinds:
        descriptions = ", ".join(
            f"{marker} ({kind})" for marker, kind in markers.prediction.items()
        )
        raise UsageError(
            f"model.name: {file}: its markers do not agree, or name what its family is not trained"
            f" with: {descriptions}",
            fix="diffusion.objective: epsilon, or v",
        )
    changes: dict[str, Any] = {}
    if kinds and kinds != {scheduler.get("prediction_type", "epsilon")}:
        changes["prediction_type"] = kinds.pop()
    if not markers.zero_snr:
        return changes
    if {**scheduler, **changes}.get("prediction_type", "epsilon") == "epsilon":
        raise UsageError(
            f"model.name: {file}: {markers.zero_snr[0]} says that the last step of its schedule is"
            " noise alone, from which epsilon cannot be learnt",
            fix="diffusion.objective: v, if it is a v-prediction checkpoint",
        )
    return {**changes, **_zero_snr_settings(scheduler)}


def refuse_unknown_prediction(file: Path, settings_repository: str | None) -> None:
    """Raises UsageError if the file is a Stable Diffusion 2 model. Is called for a file that has no
    marker.

    There are Stable Diffusion 2 models that predict epsilon (512 pixels) and models that predict v
    (768 pixels). The tensors of both kinds have the same names and shapes. The settings on the hub
    are right for only one of the two kinds.

    settings_repository  the repository on the hub whose settings diffusers uses for the file; None
                         if it does not recognise the file
    """
    if "stable-diffusion-2" in (settings_repository or ""):
        raise UsageError(
            f"model.name: {file}: nothing in this file of Stable Diffusion 2 says whether it learns"
            " epsilon (512 pixels) or v (768)",
            fix="diffusion.objective: epsilon, or v",
        )


def _zero_snr_settings(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scheduler settings for zero terminal SNR. If the scheduler's class does not
    support this, the settings name another scheduler class.

    Source  Lin et al. 2023
    """
    import diffusers

    name = "rescale_betas_zero_snr"
    scheduler_class = getattr(diffusers, str(scheduler.get("_class_name")), None)
    settings = {name: True, "timestep_spacing": "trailing"}
    if scheduler_class is None or name not in scheduler_class().config:
        settings["_class_name"] = "DDIMScheduler"
    return {key: value for key, value in settings.items() if scheduler.get(key) != value}


def _refuse_other_shift(
    markers: FileMarkers, scheduler: Mapping[str, Any], file: Path, *, shift: Any
) -> None:
    """Raises UsageError if a marker in the file gives another shift than the scheduler. Does
    nothing if the run's configuration sets the shift.
    """
    if shift != "auto":
        return
    scheduler_value = scheduler.get("shift", scheduler.get("flow_shift", 1.0))
    is_dynamic = bool(scheduler.get("use_dynamic_shifting"))
    for marker, number in markers.shift.items():
        if is_dynamic or number != float(scheduler_value):
            scheduler_shift = (
                "one that depends on the picture's size"
                if is_dynamic
                else f"{float(scheduler_value):g}"
            )
            raise UsageError(
                f"model.name: {file}: {marker} says shift {number:g}, and its scheduler has"
                f" {scheduler_shift}",
                fix=f"diffusion.shift: {number:g}, or the number that you mean",
            )


def uses_flow_matching(scheduler: Mapping[str, Any]) -> bool:
    """Returns True if a scheduler is made for flow matching."""
    is_flow = "FlowMatch" in str(scheduler.get("_class_name"))
    return is_flow or scheduler.get("prediction_type") == "flow_prediction"


def describe_markers(
    markers: FileMarkers, changes: Mapping[str, Any], scheduler: Mapping[str, Any], file: Path
) -> list[str]:
    """Returns lines about the file's markers. They are printed by `isotype plan` and at the start of a run."""
    lines = []
    if uses_flow_matching(scheduler):
        epsilon_markers = [
            marker for marker, kind in markers.prediction.items() if kind == "epsilon"
        ]
        lines += [
            f"{file.name}: {marker} belongs to a model that learns noise: its family learns by flow"
            " matching, and it is trained so"
            for marker in (*epsilon_markers, *markers.zero_snr)
        ]
    elif changes:
        traits = [str(changes.get("prediction_type", ""))]
        traits += ["zero terminal SNR"] if "rescale_betas_zero_snr" in changes else []
        sources = [*markers.prediction, *markers.zero_snr] or ["diffusion.objective"]
        lines.append(f"{file.name} is {' with '.join(filter(None, traits))}: {', '.join(sources)}")
    return [*lines, *(f"{file.name}: {note}" for note in markers.notes)]
