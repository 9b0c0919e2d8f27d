"""Chooses the decoder layers that compute in fp32 in a run with `precision.compute: fp16`.

One forward pass on the longest rows measures the values of each layer before step 1. The names of
the chosen layers are stored in the run folder, and a resumed run reads them.
"""

from __future__ import annotations

from functools import partial

from ..optimize.fp32_layers import (
    FP32_LAYERS_FILE,
    MAX_VALUE,
    find_layers,
    find_overflowing_layers,
    use_fp32_layers,
)
from ..precision.apply import inner_model
from ..runs.folder import RunFolder
from .preflight.rehearsal import STEP_ERRORS, preserve_state
from .setup import PreflightSubject


def choose_fp32_layers(subject: PreflightSubject, folder: RunFolder) -> str:
    """Makes the layers whose values do not fit fp16 compute in fp32. Returns a sentence that
    describes this change, or "" if there are no such layers.

    A sharded model is not changed, because a process has only parts of a layer's weights. If the
    values of such a model do not fit fp16, the trial step reports an error and the run does not
    start.
    """
    prepared = subject.prepared
    precision = prepared.resolved.precision
    if precision.compute != "fp16" or prepared.stepper.sharding is not None:
        return ""
    layers = find_layers(prepared.model)
    if subject.is_resuming:
        stored = folder.read_json(FP32_LAYERS_FILE).get("layers", {})
        ranges = {name: float(value) for name, value in stored.items() if name in layers}
    else:
        ranges = _measure(subject)
    world = prepared.stepper.world
    names = [name for name in layers if world.any(name in ranges)]
    if not names:
        return ""
    use_fp32_layers(prepared.model, names)
    if world.is_first and not subject.is_resuming:
        folder.write_json(
            FP32_LAYERS_FILE, {"layers": {name: ranges.get(name, 0.0) for name in names}}
        )
    model_name = type(inner_model(prepared.model)).__name__
    largest = max((ranges.get(name, 0.0), name) for name in names)
    return (
        f"fp16: {len(names)} of {len(layers)} layers of {model_name} compute in fp32, because their"
        f" values pass {MAX_VALUE:.0f} (half of fp16's largest number): {largest[0]:.3g} in"
        f" {largest[1]}. These layers need fp32 weights, and more time"
    )


def _measure(subject: PreflightSubject) -> dict[str, float]:
    """Returns the layers whose values do not fit fp16 in a forward pass on the longest rows, each
    with its largest absolute value. Returns {} if the forward pass fails, because the trial
    step then reports the error.
    """
    prepared = subject.prepared
    batch = subject.make_batch(subject.longest_rows)
    forward = partial(
        subject.task.loss_sum,
        prepared.model,
        batch,
        dtype=prepared.resolved.precision.loss,
    )
    with preserve_state(prepared):
        prepared.model.train()
        try:
            return find_overflowing_layers(prepared.model, forward)
        except STEP_ERRORS:
            return {}
