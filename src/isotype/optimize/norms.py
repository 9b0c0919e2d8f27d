"""Replaces RMSNorm modules by `rms_norm`. These are modules with a vector `weight`, without a bias
and without child modules, for which `rms_norm` computes the same output.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from ..instance_method import Placement
from ..ops import rms_norm
from .forwards import USUAL_EPSILON, NormSettings, norm_forward
from .instances import (
    cache_by_module_kind,
    computes_same_in_train_and_eval,
    make_probe_copy,
    place_replacement,
    replacement_blocker,
)

PART_NAME = "norm"  # the value of `Placement.part`


def is_candidate(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and not list(module.children())
        and "Norm" in type(module).__name__
    )


def epsilon_names(module: nn.Module) -> list[str | None]:
    """Returns the names of the attributes whose value is a small positive number and may therefore
    be epsilon.
    """
    names: list[str | None] = [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and 0 < value < 1e-2
    ]
    return names or [None]


def recognise_norm(
    module: nn.Module, norm_output_dtype: torch.dtype | None, *, saves_input: bool
) -> NormSettings | str:
    """Returns the settings with which `rms_norm` computes the same output as this module for a
    small test input. If no settings give the same output, returns a text with the reason.

    norm_output_dtype  the dtype of the norm's output; None for the dtype of its input
    saves_input        as in `NormSettings`
    """
    form_or_reason = _recognise_form(module)
    if isinstance(form_or_reason, str):
        return form_or_reason
    eps_attribute, unit_offset = form_or_reason
    return NormSettings(eps_attribute, unit_offset, norm_output_dtype, saves_input)


@cache_by_module_kind
def _recognise_form(module: Any) -> tuple[str | None, bool] | str:
    """Returns the name of the epsilon's attribute, and whether the norm multiplies by 1 + weight.
    If `rms_norm` computes another output for both forms, returns a text with the reason.
    """
    # as wide as the module, because torch's norm refuses any other width
    size = module.get_parameter("weight").shape[0]
    weight = nn.Parameter(torch.linspace(-1.0, 2.0, size, dtype=torch.float32), requires_grad=False)
    probe = make_probe_copy(module, {}, {"weight": weight})
    # so small that a wrong epsilon changes the output
    x = torch.linspace(-3e-3, 4e-3, 2 * size).view(2, size)
    for eps_attribute in epsilon_names(module):
        for unit_offset in (False, True):
            eps_value = (
                USUAL_EPSILON if eps_attribute is None else float(vars(module)[eps_attribute])
            )
            op_forward = partial(rms_norm, x, weight, eps_value, unit_offset=unit_offset)
            if computes_same_in_train_and_eval(
                probe, partial(type(module).forward, probe, x), op_forward, x, weight
            ):
                inputs = signature(type(module).forward).parameters.values()
                extra_inputs = [
                    parameter.name
                    for parameter in inputs
                    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                ][2:]
                # the probe does not pass it, and with a gate the norm computes another function, so
                # the op would not run in the model
                if extra_inputs:
                    return f"its forward takes {extra_inputs[0]} beside its input"
                return eps_attribute, unit_offset
    return "for random inputs, its output differs from that of RMSNorm"


def place_norm(
    path: str,
    module: nn.Module,
    norm_output_dtype: torch.dtype | None,
    *,
    saves_input: bool = False,
) -> Placement:
    """Installs `rms_norm` on a norm, if it computes the same output as the module."""
    settings_or_reason = replacement_blocker(module) or recognise_norm(
        module, norm_output_dtype, saves_input=saves_input
    )
    note = (
        "1 + weight"
        if isinstance(settings_or_reason, NormSettings) and settings_or_reason.unit_offset
        else ""
    )
    return place_replacement(
        PART_NAME,
        path,
        module,
        norm_forward,
        "rms_norm",
        settings_or_reason=settings_or_reason,
        note=note,
    )
