"""Determines the dtype of each role (each field of the precision) from a preset, the roles that the
user set, and the device. Each dtype has a reason. Imports no torch.

The rules of `contradictions` check the values. If a rule reports an error, the run does not start.
A warning is printed before training starts. Every change that a rule suggests is first tested with
these settings (`advice`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..finding import Finding, Severity
from .advice import Settings, keep_working_fixes
from .contradictions import Setting, find_contradictions
from .precision import (
    ALL_ROLES,
    EIGHT_BIT_OPTIMIZERS,
    PRESET_DESCRIPTIONS,
    PRESETS,
    ROLES,
    TASK_ROLES,
    Precision,
)

if TYPE_CHECKING:
    from ..environment.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The precision of one run, with the reason for each value.

    reasons          role -> the reason for its value, which is the preset, a line of the
                     configuration file, or the choice of `auto` on this device
    warnings         problems that the rules report but that do not prevent the run
    preset_reason    the reason for the preset
    from_checkpoint  the dtype of the base that `auto` took from a checkpoint that was published
                     quantised; else ""
    """

    precision: Precision
    preset: str
    reasons: Mapping[str, str]
    warnings: tuple[Finding, ...] = ()
    preset_reason: str = ""
    from_checkpoint: str = ""

    @property
    def text(self) -> str:
        """Returns the precision as a short text. The text begins with the preset that the user
        chose, even if another preset would be more similar to the final values.
        """
        return self.precision.text(self.preset)

    def to_json(self) -> str:
        """Returns the content of the file `precision.json`, which is saved next to the weights. The
        files with the weights do not contain the precision.
        """
        return (
            json.dumps({"precision": self.text, "roles": self.precision.to_dict()}, indent=1) + "\n"
        )

    def list_roles(self) -> list[tuple[str, str, str]]:
        """Returns (role, dtype, reason) for each role, in the order of the documentation. If the
        precision declares them, "stochastic rounding" is added to the value of `trainable`, and
        "loss scaling" to the value of `compute`.
        """
        precision = self.precision
        values = {role: getattr(precision, role) for role in (*ROLES, *TASK_ROLES)}
        if precision.packed:
            values["base"] = f"{precision.base} (rest {precision.unquantised})"
        if precision.rounding == "stochastic":
            values["trainable"] += ", stochastic rounding"
        if precision.loss_scaling == "dynamic":
            values["compute"] += ", loss scaling"
        return [(role, value, self.reasons[role]) for role, value in values.items() if value]

    def to_dict(self) -> dict[str, dict[str, str]]:
        """Returns the value and the reason of each role. If the base is quantised, the entry of
        `base` also has `rest`, the dtype of the frozen weights that are not quantised.
        """
        declared = {
            role: {"value": value, "reason": self.reasons[role]}
            for role, value in self.precision.items()
        }
        if self.precision.packed:
            declared["base"]["rest"] = self.precision.unquantised
        return declared


SERVE_KEY = "adapter.serve_as"
# families whose activations pass fp16's largest value (rule PR030)
OVERFLOWS_IN_FP16 = (
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n",
    "gemma3n_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "t5",
    "mt5",
    "umt5",
    "t5gemma",
    "t5gemma2",
)


def choose_preset(
    device: Hardware, *, adapter: str, family: str = "", needs_bf16: str = ""
) -> tuple[str, str]:
    """Chooses the preset for `auto` on a device. Returns (preset, reason).

    family      the model's `model_type`, where it is known
    needs_bf16  the reason why a run with an adapter fits into the memory in bf16 only; "" if there
                is none
    """
    if device.bf16 == "native":
        name = "bf16-mixed" if adapter == "none" else "bf16-lora"
        return name, f"auto: {device.name} has native bf16"
    bf16_support = "no bf16" if device.bf16 == "none" else "only emulated bf16"
    if needs_bf16:
        return "bf16-lora", f"auto: {device.name} has {bf16_support}, but {needs_bf16}"
    if family in OVERFLOWS_IN_FP16:
        return "fp32", f"auto: {device.name} has {bf16_support}, and {family} overflows in fp16"
    if device.kind == "cpu":
        return "fp32", f"auto: {device.name} has {bf16_support}"
    return "fp16-mixed", (
        f"auto: {device.name} has {bf16_support}; fp16 overflows above 65504, and a step whose"
        " gradients overflow is skipped. fp32 is slower and safe"
    )


def resolve(
    settings: Mapping[str, str | None] | None = None,
    *,
    device: Hardware,
    adapter: str = "lora",
    optimizer: str = "adamw",
    frozen: bool | None = None,
    sources: Mapping[str, str] | None = None,
    task_roles: Mapping[str, str] | None = None,
    checkpoint: tuple[str, str] | None = None,
    family: str = "",
    served: str = "",
    micro_batches: int = 1,
    needs_bf16: str = "",
) -> Resolved:
    """Determines the precision of a run from `settings`, which may have a preset and values of
    roles.

    settings    `preset` and roles as in the configuration's precision section; None means the same
                as a missing key
    frozen      whether some weights of the model are not trained. The default is True if there is
                an adapter
    sources     `precision.grads`, `adapter.kind`, `train.optimizer` -> where it was set
                (`run.yaml:12`)
    task_roles  further roles of the run's task -> a dtype, or another role from which it takes its
                dtype (`compute`)
    checkpoint  (dtype, description) of a base that was published quantised; `auto` keeps that dtype
    family      the model's `model_type`; "" where it is not known
    served      the value of `adapter.serve_as`; "" without it
    micro_batches
                the number of micro-batches whose gradients are summed for one update
    needs_bf16  as in `choose_preset`
    Raises      UsageError that lists every contradiction, the most severe first
    """
    written = {
        f"precision.{role}": value for role, value in (settings or {}).items() if value is not None
    }
    written |= {"adapter.kind": adapter, "train.optimizer": optimizer}

    def resolve_written(written: Settings) -> tuple[Resolved, list[Finding]]:
        roles = {
            key.removeprefix("precision."): value
            for key, value in written.items()
            if key.startswith("precision.")
        }
        preset = roles.pop("preset", None) or "auto"
        run = _RunSettings(
            preset=preset,
            roles=roles,
            adapter=written["adapter.kind"],
            optimizer=written["train.optimizer"],
            device=device,
            has_frozen_weights=frozen,
            sources=sources or {},
            task_roles=task_roles or {},
            checkpoint=checkpoint if preset == "auto" and "base" not in roles else None,
            family=family,
            micro_batches=micro_batches,
            needs_bf16=needs_bf16,
        )
        return _resolve_run(run)

    resolved, findings = resolve_written(written)
    findings = [
        keep_working_fixes(finding, written, lambda changed: resolve_written(changed)[1])
        for finding in findings
    ]
    errors = [finding for finding in findings if finding.severity == Severity.ERROR]
    if errors:
        raise UsageError("\n".join(finding.render() for finding in errors))
    if served:
        source = (sources or {}).get(SERVE_KEY, "default")
        reasons = {**resolved.reasons, "served": f"{SERVE_KEY}, {source}"}
        precision = resolved.precision.but(served=served)
        resolved = replace(resolved, precision=precision, reasons=reasons)
    return replace(resolved, warnings=tuple(findings))


@dataclass(frozen=True, kw_only=True)
class _RunSettings:
    """Holds the settings and the properties of the model that decide the precision of a run.

    preset              the preset that the user wrote, or auto
    roles               the roles that the user wrote
    has_frozen_weights  None if this depends on whether there is an adapter
    checkpoint          (dtype, description) of the base whose dtype `auto` keeps
    family              the model's `model_type`
    micro_batches       number of micro-batches per update
    needs_bf16          as in `choose_preset`
    """

    preset: str
    roles: Mapping[str, str]
    adapter: str
    optimizer: str
    device: Hardware
    has_frozen_weights: bool | None
    sources: Mapping[str, str]
    task_roles: Mapping[str, str]
    checkpoint: tuple[str, str] | None
    family: str
    micro_batches: int
    needs_bf16: str

    @property
    def generate_follows_compute(self) -> bool:
        return "compute" in self.roles and "generate" not in self.roles

    @property
    def optimizer_decides_states(self) -> bool:
        return self.optimizer in EIGHT_BIT_OPTIMIZERS and "optimizer" not in self.roles


def _resolve_run(run: _RunSettings) -> tuple[Resolved, list[Finding]]:
    """Determines the value of each field of the precision, and the reason for this value. Returns
    them together with the problems that the rules report.
    """
    preset, preset_reason = _resolve_preset(run)
    precision = _resolve_roles(run, preset)
    reasons = _find_reasons(run, preset_reason)
    resolved = Resolved(
        precision=precision,
        preset=preset,
        reasons=reasons,
        preset_reason=f"{preset_reason}{_describe_preset(run, preset, precision)}",
        from_checkpoint=precision.base if run.checkpoint else "",
    )
    settings = _list_settings(run, resolved, preset_reason)
    return resolved, find_contradictions(settings, run.device)


def _resolve_preset(run: _RunSettings) -> tuple[str, str]:
    """Returns the preset and the reason for it."""
    if run.preset == "auto":
        return choose_preset(
            run.device, adapter=run.adapter, family=run.family, needs_bf16=run.needs_bf16
        )
    if run.preset in PRESETS:
        return run.preset, f"preset {run.preset}"
    source = run.sources.get("precision.preset", "default")
    raise UsageError(
        f"{source} precision.preset: {run.preset!r} is not one of auto {' '.join(PRESETS)}",
        code="PR000",
    )


def _resolve_roles(run: _RunSettings, preset: str) -> Precision:
    overrides: dict[str, str] = {}
    if run.checkpoint:
        overrides["base"] = run.checkpoint[0]
    if run.optimizer_decides_states:
        overrides["optimizer"] = "int8"
    precision = PRESETS[preset].but(**overrides | dict(run.roles))
    if run.generate_follows_compute:
        precision = precision.but(generate=precision.compute)
    roles_of_task = {
        role: getattr(precision, value, value)
        for role, value in run.task_roles.items()
        if role not in run.roles
    }
    return precision.but(**roles_of_task)


def _find_reasons(run: _RunSettings, preset_reason: str) -> dict[str, str]:
    """Returns a dict from each role to the reason for its value. If there are several reasons, the
    last one counts.
    """
    reasons = {role: preset_reason for role in ALL_ROLES if role not in TASK_ROLES}
    if run.optimizer_decides_states:
        source = run.sources.get("train.optimizer", "train.optimizer")
        reasons["optimizer"] = (
            f"{run.optimizer} keeps 8 bits, and fp32 below 4,096 elements; {source}"
        )
    for role, value in run.task_roles.items():
        reasons[role] = f"follows {value}" if value in ALL_ROLES else "default"
    if run.generate_follows_compute:
        reasons["generate"] = "follows compute"
    if run.checkpoint:
        reasons["base"] = f"the checkpoint is {run.checkpoint[1]}"
    for role in run.roles:
        reasons[role] = run.sources.get(f"precision.{role}", "given")
    return reasons


def _list_settings(run: _RunSettings, resolved: Resolved, preset_reason: str) -> dict[str, Setting]:
    """Lists the settings that the rules about contradictions check."""
    sources = run.sources
    preset_source = sources.get("precision.preset", "default")
    settings: dict[str, Setting] = {}
    for role, reason in resolved.reasons.items():
        source = reason
        if reason == preset_reason and run.preset != "auto" and preset_source != "default":
            source = f"{preset_reason}, {preset_source}"
        settings[role] = Setting(getattr(resolved.precision, role), source, role in run.roles)
    if run.preset == "auto":
        settings["preset"] = Setting(resolved.preset, preset_reason)
    else:
        settings["preset"] = Setting(resolved.preset, preset_source, True)
    adapter_source = sources.get("adapter.kind", "default")
    settings["adapter"] = Setting(run.adapter, adapter_source, adapter_source != "default")
    has_frozen_weights = run.has_frozen_weights
    if has_frozen_weights is None:
        has_frozen_weights = run.adapter != "none"
    settings["frozen"] = Setting("yes" if has_frozen_weights else "no")
    settings["family"] = Setting(run.family)
    settings["micro_batches"] = Setting(
        str(run.micro_batches),
        sources.get("train.accumulate", "default"),
        "train.accumulate" in sources,
    )
    settings["optimizer_name"] = Setting(
        run.optimizer, sources.get("train.optimizer", "default"), "train.optimizer" in sources
    )
    return settings


def _describe_preset(run: _RunSettings, preset: str, precision: Precision) -> str:
    """Describes the preset. If the user changed values of the preset, its description may no longer
    be true. The text then lists the changed values instead.
    """
    if run.checkpoint:
        return f"; base {precision.base}, as the checkpoint is"
    changes = [role for role, value in run.roles.items() if value != getattr(PRESETS[preset], role)]
    if changes:
        return f"; changed: {', '.join(changes)}"
    return f": {PRESET_DESCRIPTIONS[preset]}"
