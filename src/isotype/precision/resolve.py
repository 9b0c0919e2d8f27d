"""Resolves a preset and overrides on a device to one value for each role, with the reason for each
value. Imports no torch.

Contradictions between the values are found before anything is loaded, by the sheet `rules.txt`,
which `pages.sheets` reads. A rule names the settings, where each was set, why they conflict, and
the fix. Errors refuse the run; warnings are shown in its header. Every way out that a rule names is
tried on the very settings, and told with what else it needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dtypes import itemsize
from ..errors import UsageError
from ..finding import Finding, Place, Severity
from ..pages import sheets
from .packing import PACKED_DTYPES as PACKED
from .precision import ABOUT, EIGHT_BIT_OPTIMIZERS, PRESETS, ROLES, TASK_ROLES, Precision

if TYPE_CHECKING:
    from ..environment.hardware import Hardware

RULES = {
    section.code: section
    for section in sorted(
        sheets.sections(
            Path(__file__).with_name("rules.txt"), ranks="error|warning", fields="names|cause|fix"
        ),
        key=lambda s: s.code,
    )
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its source. `given`: the user wrote it; it is not from a preset or a default."""

    value: str
    where: str = "default"
    given: bool = False

    def __str__(self) -> str:
        return f"{self.value} ({self.where})"


class _Words(sheets.Facts):
    """The words of the sheet: its own, settings by name (their values), and the following.

    given ROLE                   whether the user wrote it
    packed ROLE                  whether its weights are a few bits with scales
    bf16 among ROLE, ROLE        those of the roles that are bf16; `half among`: bf16 or fp16
    ROLES set to WORD            `precision.ROLE: WORD`, for each of the roles
    device, bf16 of device       its name; native, emulated or none
    eight bit                    whether the optimizer keeps its states in 8 bits
    ROLE narrower than ROLE      a test of its own

    settings  every role of the run, `adapter` (lora, none), `frozen` (yes, no: whether weights of
              the model are not trained), `optimizer_name` (adamw, adamw8bit) and `preset`
    """

    def __init__(self, settings: Mapping[str, Setting], device: Hardware) -> None:
        super().__init__()
        self.settings = settings
        self.device = device

    def get(self, name: str) -> Any:
        settings = self.settings
        if name in self.made:
            return self.made[name]
        if name in settings:
            return settings[name].value
        kind, _, rest = name.partition(" ")
        roles, found, word = name.partition(" set to ")
        if found:
            return " and ".join(
                f"precision.{role}: {self.get(word)}" for role in str(self.get(roles)).split(", ")
            )
        dtype, found, roles = name.partition(" among ")
        if found:
            wanted = ("bf16", "fp16") if dtype == "half" else (dtype,)
            return ", ".join(
                r
                for r in self.made.get(roles, roles).split(", ")
                if r in settings and settings[r].value in wanted
            )
        match kind:
            case "given":
                return settings[rest].given
            case "packed":
                return self.get(rest) in ("nf4", *PACKED)
            case "eight":
                return self.get("optimizer_name") in EIGHT_BIT_OPTIMIZERS
            case "device":
                return self.device.name
            case "bf16" if rest == "of device":
                return self.device.bf16
        return None

    def holds_specially(self, term: str) -> bool | None:
        left, found, right = term.partition(" narrower than ")
        if not found:
            return None
        one = self.get(left)
        other = self.get(right)
        return one is not None and itemsize(one) < itemsize(other)


def check(settings: Mapping[str, Setting], device: Hardware) -> list[Finding]:
    """Every finding of every rule, by code; `settings` as `_Words` has them."""
    found = []
    for code, section in RULES.items():
        words, (head, *entries) = _Words(settings, device), section.entries
        head.make(words)
        for entry in entries:
            if severity := entry.rank(words):
                names, cause, fix = (entry.first(name, words) for name in ("names", "cause", "fix"))
                keys = names.split(", ")
                found.append(
                    Finding(
                        code=code,
                        severity=Severity.parse(severity),
                        message=words.say(entry.title),
                        place=_place(keys, settings),
                        cause=cause,
                        fix=fix,
                        details=tuple((_key(k), str(settings[k])) for k in keys),
                    )
                )
    return found


def codes() -> list[str]:
    return list(RULES)


def page(code: str) -> str | None:
    """The page of a rule."""
    return RULES[code].as_page() if code in RULES else None


def _place(keys: list[str], settings: Mapping[str, Setting]) -> Place:
    """Of the first setting that the user wrote, else of the first."""
    written = next((k for k in keys if settings[k].given), keys[0])
    # "run.yaml:3", or "preset nf4-lora, run.yaml:3"
    file, _, line = settings[written].where.rpartition(", ")[2].rpartition(":")
    in_file = bool(file) and line.isdigit()
    return Place(
        file=file if in_file else None, line=int(line) if in_file else None, symbol=_key(written)
    )


def _key(name: str) -> str:
    return {"adapter": "adapter.kind", "optimizer_name": "train.optimizer"}.get(
        name, f"precision.{name}"
    )


Settings = Mapping[str, str]
Change = dict[str, str | None]  # key -> its new value, or None where it is removed
_MOST = 4  # settings, besides those that a rule names, that a way out may need


def ways_out(fix: str) -> Iterator[tuple[str, Change]]:
    """(text, settings) of each way that a rule's advice names: `precision.a: x and precision.b: y,
    or remove precision.c`.
    """
    for text in fix.split(", or "):
        plain = re.sub(r" \([^)]*\)", "", text)
        if removed := re.fullmatch(r"remove ([a-z_.]+)", plain):
            yield text, {removed[1]: None}
            continue
        pairs = (part.partition(": ") for part in plain.split(" and "))
        yield text, {key: value for key, _, value in pairs}


def that_holds(
    finding: Finding, settings: Settings, look: Callable[[Settings], Sequence[Finding]]
) -> Finding:
    """The finding with those of its ways out that end it and begin no other error, each with what
    it needs besides.

    settings  what the user wrote, by its full key
    look      what the rules say about other settings
    """
    before = {f.code for f in look(settings)}
    held = []
    for text, way in ways_out(finding.fix or ""):
        change = _completed(finding.code, way, settings, before, look)
        if change is not None:
            more = {key: value for key, value in change.items() if key not in way}
            held.append(
                " and ".join(
                    [
                        text,
                        *(
                            f"remove {key}" if value is None else f"{key}: {value}"
                            for key, value in more.items()
                        ),
                    ]
                )
            )
    if not held:
        held = [
            text
            for text, change in _without_roles(settings)
            if _bad(finding.code, change, settings, before, look) is None
        ][:1]
    if held:
        return replace(finding, fix=", or ".join(held))
    return finding


def _without_roles(settings: Settings) -> Iterator[tuple[str, Change]]:
    """The preset alone, and another one: where the roles beside it contradict each other."""
    roles: Change = {
        key: None for key in settings if key.startswith("precision.") and key != "precision.preset"
    }
    removed = " and ".join(f"remove {key}" for key in roles)
    yield removed, roles
    yield (
        " and ".join(filter(None, (removed, "precision.preset: auto"))),
        {
            **roles,
            "precision.preset": "auto",
        },
    )


def changed(settings: Settings, change: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in {**settings, **change}.items() if value is not None}


def _completed(
    code: str,
    way: Change,
    settings: Settings,
    before: set[str],
    look: Callable[[Settings], Sequence[Finding]],
) -> Change | None:
    """The way with the settings that it needs besides, or None where it does not help."""
    change = dict(way)
    for _ in range(_MOST + 1):
        bad = _bad(code, change, settings, before, look)
        if bad is None:
            return change
        more = next(_further(bad, change, settings), None)
        if more is None:
            return None
        change |= more
    return None


def _bad(
    code: str,
    change: Change,
    settings: Settings,
    before: set[str],
    look: Callable[[Settings], Sequence[Finding]],
) -> Finding | None:
    """The finding that is still there after a change, or an error that it begins."""
    found = look(changed(settings, change))
    return next(
        (
            f
            for f in found
            if f.code == code or (f.severity == Severity.ERROR and f.code not in before)
        ),
        None,
    )


def _further(bad: Finding, change: Change, settings: Settings) -> Iterator[Change]:
    """What ends a finding that is still there: a role is removed that the user set beside a preset,
    or that finding's own way out.
    """
    named = [key for key, _ in bad.details]
    if "precision.preset" in change:
        for key in named:
            if key in settings and key not in change and key.startswith("precision."):
                yield {key: None}
    for _, way in ways_out(bad.fix or ""):
        if not any(key in change or key == "precision.preset" for key in way):
            yield way


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The contract of one run.

    reasons   role -> why it has its value: the preset, the line of the file, or what the device
              made of `auto`
    warnings  findings that do not refuse the run
    from_checkpoint  the base that `auto` took from a checkpoint that was published quantised; ""
                     where it did not
    """

    precision: Precision
    preset: str
    reasons: Mapping[str, str]
    warnings: tuple[Finding, ...] = ()
    why_preset: str = ""
    from_checkpoint: str = ""

    @property
    def text(self) -> str:
        """The short text form, as the preset that was chosen: two presets may differ in what
        another role changed.
        """
        return self.precision.text(self.preset)

    def as_file(self) -> str:
        """The `precision.json` that lies beside saved weights, since their own files carry no
        precision.
        """
        return (
            json.dumps({"precision": self.text, "roles": self.precision.to_dict()}, indent=1) + "\n"
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """(role, value, reason) in the order of the design's table; rounding and loss scaling where
        they are not the plain ones.
        """
        p = self.precision
        shown = {role: getattr(p, role) for role in (*ROLES, *TASK_ROLES) if getattr(p, role)}
        if p.packed:
            shown["base"] = f"{p.base} (rest {p.unquantised})"
        if p.rounding == "stochastic":
            shown["trainable"] += ", stochastic rounding"
        if p.loss_scaling == "dynamic":
            shown["compute"] += ", loss scaling"
        return [(role, value, self.reasons[role]) for role, value in shown.items()]

    def to_dict(self) -> dict[str, dict[str, str]]:
        """Each role's value and reason; of a packed base also `rest`, the dtype of the frozen
        weights that are not packed.
        """
        declared = {
            role: {"value": value, "reason": self.reasons[role]}
            for role, value in self.precision.items()
        }
        if self.precision.packed:
            declared["base"]["rest"] = self.precision.unquantised
        return declared


def choose_preset(device: Hardware, *, adapter: str) -> tuple[str, str]:
    """What `auto` becomes on a device, and why: (preset, reason)."""
    if device.bf16 == "native":
        name = "bf16-mixed" if adapter == "none" else "bf16-lora"
        return name, f"auto: {device.name} has native bf16"
    about = "no bf16" if device.bf16 == "none" else "only emulated bf16"
    if device.kind != "cpu":
        offer = "; fp16-mixed is faster here but overflows above 65504: choose it by name"
    else:
        offer = ""
    return "fp32", f"auto: {device.name} has {about}{offer}"


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
) -> Resolved:
    """Resolves `preset` and role overrides.

    settings  `preset` and roles as in the configuration's precision section; None and missing mean
              not given
    frozen    whether some weights of the model are not trained; by default where there is an
              adapter
    sources   `precision.grads`, `adapter.kind`, `train.optimizer` -> where it was set
              (`run.yaml:12`)
    task_roles  roles that the run's task has besides -> a dtype, or the role that it follows
                (`compute`)
    checkpoint  (word, description) of a base that was published quantised, which `auto` takes as it
                is
    Raises    UsageError with every contradiction, worst first
    """
    said = {
        f"precision.{role}": value for role, value in (settings or {}).items() if value is not None
    }
    settled = partial(
        _settled,
        device=device,
        frozen=frozen,
        where=sources or {},
        task_roles=task_roles or {},
        checkpoint=checkpoint,
    )
    resolved, findings = settled(said, adapter, optimizer)

    def look(written: Settings) -> list[Finding]:
        roles = {key: value for key, value in written.items() if key.startswith("precision.")}
        return settled(roles, written["adapter.kind"], written["train.optimizer"])[1]

    if findings:
        written = said | {"adapter.kind": adapter, "train.optimizer": optimizer}
        findings = [that_holds(f, written, look) for f in findings]
    refused = [f for f in findings if f.severity == Severity.ERROR]
    if refused:
        raise UsageError("\n".join(f.render() for f in refused))
    return replace(resolved, warnings=tuple(findings))


def _settled(
    said: Settings,
    adapter: str,
    optimizer: str,
    *,
    device: Hardware,
    frozen: bool | None,
    where: Mapping[str, str],
    task_roles: Mapping[str, str],
    checkpoint: tuple[str, str] | None,
) -> tuple[Resolved, list[Finding]]:
    """Every role's value with its reason, and what the rules say about them.

    said    what the user wrote in the precision section, by its full key
    frozen  None where it follows from the adapter
    """
    settings = {key.removeprefix("precision."): value for key, value in said.items()}
    asked = settings.pop("preset", None) or "auto"
    preset_where = where.get("precision.preset", "default")
    if asked == "auto":
        preset, why = choose_preset(device, adapter=adapter)
    elif asked in PRESETS:
        preset = asked
        why = f"preset {asked}"
    else:
        raise UsageError(
            f"{preset_where} precision.preset: {asked!r} is not one of auto {' '.join(PRESETS)}",
            code="PR000",
        )
    taken = checkpoint if asked == "auto" and "base" not in settings else None
    eight_bits = optimizer in EIGHT_BIT_OPTIMIZERS and "optimizer" not in settings
    precision = PRESETS[preset].but(
        **({"base": taken[0]} if taken else {}),
        **({"optimizer": "int8"} if eight_bits else {}),
        **settings,
    )
    follows_compute = "compute" in settings and "generate" not in settings
    if follows_compute:
        precision = precision.but(generate=precision.compute)
    of_task = {role: getattr(precision, value, value) for role, value in task_roles.items()}
    precision = precision.but(
        **{role: value for role, value in of_task.items() if role not in settings}
    )

    # a later reason counts
    reasons = dict.fromkeys((f.name for f in fields(Precision) if f.name not in TASK_ROLES), why)
    if eight_bits:
        set_at = where.get("train.optimizer", "train.optimizer")
        reasons["optimizer"] = f"{optimizer} keeps 8 bits, and fp32 below 4,096 elements; {set_at}"
    reasons |= {
        role: "default" if role_of == of_task[role] else f"follows {role_of}"
        for role, role_of in task_roles.items()
    }
    if follows_compute:
        reasons["generate"] = "follows compute"
    if taken:
        reasons["base"] = f"the checkpoint is {taken[1]}"
    reasons |= {role: where.get(f"precision.{role}", "given") for role in settings}

    table = {
        role: Setting(getattr(precision, role), reason, role in settings)
        for role, reason in reasons.items()
    }
    if asked != "auto" and preset_where != "default":
        table |= {
            role: replace(one, where=f"{why}, {preset_where}")
            for role, one in table.items()
            if one.where == why
        }
    table["preset"] = Setting(preset, preset_where if asked != "auto" else why, asked != "auto")
    table["adapter"] = Setting(
        adapter,
        where.get("adapter.kind", "default"),
        where.get("adapter.kind", "default") != "default",
    )
    table["frozen"] = Setting("yes" if (adapter != "none" if frozen is None else frozen) else "no")
    table["optimizer_name"] = Setting(
        optimizer, where.get("train.optimizer", "default"), "train.optimizer" in where
    )

    changes = [role for role, value in settings.items() if value != getattr(PRESETS[preset], role)]
    # what a preset is about may be the very thing that was changed
    about = f"; changed: {', '.join(changes)}" if changes else f": {ABOUT[preset]}"
    about = f"; base {precision.base}, as the checkpoint is" if taken else about
    resolved = Resolved(
        precision=precision,
        preset=preset,
        reasons=reasons,
        why_preset=f"{why}{about}",
        from_checkpoint=precision.base if taken else "",
    )
    return resolved, check(table, device)
