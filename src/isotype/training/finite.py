"""Finds where a non-finite number comes from. Functions of this module return the name of the first
module whose output contains a non-finite number, or the parameters that contain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..errors import RunError
from ..observe import floating_tensors
from ..precision.apply import inner_model
from ..precision.parts import local_part, reshard_units
from .setting_names import RUN_FILE_NAMES, SettingNames


def first_non_finite_module(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Runs the forward pass and the loss again. Returns the name of the first module with a
    non-finite output. If modules are nested, this is the innermost one.
    """
    names: list[str] = []
    inner_module = inner_model(model)

    def make_hook(name: str) -> Callable[..., None]:
        def record_non_finite(module: nn.Module, args: object, output: object) -> None:
            if not names and any(not bool(t.isfinite().all()) for t in floating_tensors(output)):
                names.append(f"{name} ({type(module).__name__})")

        return record_non_finite

    # an inner module finishes before the module around it, so the first recorded is the innermost
    handles = [
        m.register_forward_hook(make_hook(name or type(inner_module).__name__))
        for name, m in inner_module.named_modules()
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
        reshard_units(model)
    return names[0] if names else None


def non_finite_parameters(model: nn.Module) -> list[str]:
    return [
        name
        for name, p in model.named_parameters()
        if p.is_floating_point() and not bool(local_part(p).isfinite().all())
    ]


def first_non_finite_trained(model: nn.Module) -> str | None:
    """Returns the first trained parameter that contains a non-finite number. Waits for the device
    only once.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        return None
    finite = torch.stack(
        [local_part(p).detach().isfinite().all() for p in trained.values()]
    ).tolist()
    return next((name for name, is_finite in zip(trained, finite) if not is_finite), None)


def refuse_non_finite_weights(
    model: nn.Module, *, step: int, learning_rate: float, clip: float | None
) -> None:
    """Raises RunError NF001 if a trained weight contains a non-finite number. This function is
    called before the weights are saved.
    """
    name = first_non_finite_trained(model)
    if name is not None:
        raise RunError(
            f"step {step}: parameter {name} is not finite after the update: not saved",
            code="NF001",
            fix=f"{smaller_update_advice(learning_rate, clip)}, and resume",
        )


def non_finite_gradients(
    model: nn.Module, gradient: Callable[[nn.Parameter], Tensor | None]
) -> list[str]:
    """Returns the parameters with a non-finite gradient in the order of the backward pass,
    beginning with the last layer.
    """
    names = [
        name
        for name, p in model.named_parameters()
        if (g := gradient(p)) is not None and not bool(g.isfinite().all())
    ]
    return names[::-1]


def smaller_update_advice(
    learning_rate: float, clip: float | None, names: SettingNames = RUN_FILE_NAMES
) -> str:
    """Returns advice on how to make the updates smaller. The advice names only settings that the
    run does not use yet.
    """
    advice = f"lower {names.learning_rate} (it is {learning_rate:g})"
    if not clip:
        advice += f", or set {names.clip}"
    return advice


def non_finite_error(
    model: nn.Module,
    passes: Sequence[Callable[[], object]],
    *,
    step: int,
    quantity: str,
    gradient: Callable[[nn.Parameter], Tensor | None],
    learning_rate: float,
    clip: float | None,
    compute: str,
    names: SettingNames = RUN_FILE_NAMES,
) -> RunError:
    """Returns a RunError NF001 with the step, the module in which the first non-finite number
    appears, and advice.

    passes    functions that run the forward pass of each micro-batch again
    step      the step; 0 in the checks before step 1, where smaller updates would not help
    quantity  what is not finite, for the message, for example `the loss` or `the gradient`
    """
    smaller_updates = smaller_update_advice(learning_rate, clip, names)
    wider_range = ""
    if compute == "fp16":
        wider_range = f", or {names.compute_bf16}, whose range is fp32's"
    bad_parameters = non_finite_parameters(model)
    # runs every pass, even if the first one finds the module: processes that share a model must run
    # the same number of forwards
    modules = [first_non_finite_module(model, forward) for forward in passes]
    module = next(filter(None, modules), None)
    bad_gradients = non_finite_gradients(model, gradient)
    if bad_parameters:
        location = f"parameter {bad_parameters[0]} is not finite"
        if step:
            fix = (
                "it was so before this step: resume from an earlier checkpoint, and"
                f" {smaller_updates}"
            )
        else:
            fix = "it was so in the base: fetch its files again, or take another base"
    elif not step and (
        bad_buffers := [
            name
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point() and bool(buffer.isnan().any())
        ]
    ):
        location = f"buffer {bad_buffers[0]} is not a number"
        fix = "look at the model's code that fills it"
    elif module:
        location = f"first in the output of {module}"
        if step:
            fix = f"if activations overflow there: {smaller_updates}{wider_range}"
        else:
            fix = f"look at that module with this base, without Isotype{wider_range}"
    elif bad_gradients:
        if step:
            advice = f"{smaller_updates}, or look at this step's rows"
        else:
            advice = "look at the longest rows"
        location = f"first in the gradient of {bad_gradients[0]}"
        fix = advice
    else:
        location = "in the loss itself"
        fix = "look at this step's rows"
    return RunError(f"step {step}: {quantity} is not finite, {location}", code="NF001", fix=fix)
